"""A Hugging Face directory: load it with its weights, or rebuild its module without any.

Only classes of the installed transformers package, only safetensors, only local files. Code that came with a model is
never run, and no weight is ever left random in silence.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dormouse.errors import DormouseError, RefusedSource
from dormouse.model.examples import from_configuration
from dormouse.model.loaded import LoadedModel, Trial, one_line, prepared
from dormouse.model.preprocessing import PREPROCESSOR, described, image_input
from dormouse.model.tasks import description_files, resolved, wrapped
from dormouse.store.index import HuggingFaceSkeleton

CONFIG, WEIGHTS, PARTS = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PLATFORM = "pytorch_huggingface"


def load(directory: Path, task: str, dtype: str | None, trial: Trial | None) -> LoadedModel:
    """The model with its own weights. Raises RefusedSource."""
    architecture = architecture_of(directory)
    model_class = class_of(architecture, directory)
    check_weights(directory)
    task = resolved(task, architecture, directory)

    def reload() -> nn.Module:
        return prepared(wrapped(_with_weights(model_class, directory, dtype), task, directory), None)

    module: Any = reload()
    trials = (
        (trial,)
        if trial
        else from_configuration(
            _sized(module.model.config, directory), module.model.forward, module.model.main_input_name
        )
    )
    return LoadedModel(
        module=module,
        skeleton=HuggingFaceSkeleton(architecture, task),
        platform=PLATFORM,
        trials=trials,
        reload=reload,
        files=tuple((directory / name, name) for name in (CONFIG, *description_files(directory))),
        dtype=dtype,
        optional=frozenset({"attention_mask", "token_type_ids"}),
    )


def _sized(config: Any, directory: Path) -> Any:
    """A configuration that says how large pictures are, be it only its image processor's that does."""
    image = image_input("", described(directory, PREPROCESSOR))
    if image is None or hasattr(config, "image_size"):
        return config
    config = copy.deepcopy(config)
    config.image_size = (image.height, image.width)
    return config


def rebuild(directory: Path, skeleton: HuggingFaceSkeleton, dtype: str | None) -> nn.Module:
    """The module on the meta device, from the configuration alone."""
    model_class = class_of(skeleton.architecture, directory)
    config = model_class.config_class.from_pretrained(directory, local_files_only=True)
    wanted = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    config.dtype = wanted
    before = torch.get_default_dtype()
    torch.set_default_dtype(wanted)
    try:
        with torch.device("meta"):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return prepared(wrapped(model, skeleton.task, directory), None)


def architecture_of(directory: Path) -> str:
    """The class that config.json names. Raises RefusedSource for what must not or cannot be loaded."""
    try:
        config = json.loads((directory / CONFIG).read_bytes())
        architecture = config["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as fault:
        raise RefusedSource(f"{directory / CONFIG} names no architecture: {one_line(fault)}") from None
    if "quantization_config" in config:
        raise RefusedSource(f"{directory} is quantized, which needs kernels of its own; deploy the unquantized model")
    kernel = next(_fetched_kernels(config), None)
    if kernel is not None:
        raise RefusedSource(
            f"{directory / CONFIG} asks for the kernel {kernel!r}, code that would be fetched; remove it"
        )
    if (directory / "adapter_config.json").exists():
        raise RefusedSource(f"{directory} is an adapter; merge it into its base model and save that")
    return str(architecture)


def _fetched_kernels(config: Any) -> Iterator[str]:
    """What transformers would fetch from the network and run, if a package for that is installed: ``owner/name``."""
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in str(value):
            yield str(value)[:80]
        elif isinstance(value, dict):
            yield from _fetched_kernels(value)


def class_of(architecture: str, directory: Path) -> Any:
    """The transformers class of that name. Raises RefusedSource if the package has none."""
    # It takes as long to import as all else of an executor but torch, and who serves no such model does not need it.
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        found = getattr(transformers, architecture, None)
    except (ImportError, RuntimeError) as fault:
        raise RefusedSource(f"{directory}: {architecture} cannot be imported: {one_line(fault)}") from None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise RefusedSource(
            f"{directory}: transformers {transformers.__version__} has no model class {architecture!r}, and code that "
            "comes with a model is not run; export it with torch.export, or serve it as module:callable"
        )
    if getattr(found, "config_class", None) is None:
        raise RefusedSource(f"{directory}: {architecture} is an abstract class; name a concrete one in config.json")
    return found


def check_weights(directory: Path) -> None:
    """Sound safetensors, and nothing else. Raises RefusedSource naming the file."""
    files = weight_files(directory)
    if not files:
        pickled = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLED)
        if pickled:
            raise RefusedSource(
                f"{directory} has its weights only as pickle ({pickled[0]}), which can run code when it is read; load "
                "it where you trust it and save it again with save_pretrained(), which writes safetensors"
            )
        raise RefusedSource(f"{directory} has no {WEIGHTS}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as fault:
            raise RefusedSource(f"{file} is damaged: {one_line(fault)}") from None


def weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if not (directory / PARTS).exists():
        return []
    try:
        names = sorted(set(json.loads((directory / PARTS).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as fault:
        raise RefusedSource(f"{directory / PARTS} is damaged: {one_line(fault)}") from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise RefusedSource(f"{directory / PARTS} names {name!r}, which is no safetensors file beside it")
    return [directory / name for name in names]


def _with_weights(model_class: Any, directory: Path, dtype: str | None) -> nn.Module:
    try:
        model, found = model_class.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            dtype=getattr(torch, dtype) if dtype else "auto",
        )
    except DormouseError:
        raise
    except Exception as fault:
        raise RefusedSource(f"{directory} cannot be loaded: {one_line(fault)}") from None
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in found[problem])
        if names:
            raise RefusedSource(f"{directory}: {_said(problem, len(names))}: {', '.join(names[:5])}")
    assert isinstance(model, nn.Module)
    return model


def _said(problem: str, count: int) -> str:
    return {
        "missing_keys": f"{count} weights are missing and would be random",
        "mismatched_keys": f"{count} weights have another shape than config.json says",
        "unexpected_keys": f"{count} weights belong to no part of the model",
    }[problem]
