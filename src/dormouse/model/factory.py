"""``module:callable`` from a directory that the operator allows: call it, and call it again for the skeleton.

The code is trusted by whoever passed --allow-code. It is imported afresh for every build, so that a new revision runs
its own code and two directories may use the same module names.
"""

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dormouse.errors import DormouseError, RefusedSource
from dormouse.model.examples import from_values
from dormouse.model.loaded import Inputs, LoadedModel, Trial, one_line, prepared
from dormouse.store.index import FactorySkeleton

PLATFORM = "pytorch_module"
_importing = threading.Lock()


def load(skeleton: FactorySkeleton, allow_code: Sequence[Path], dtype: str | None, trial: Trial | None) -> LoadedModel:
    """Call the factory. Raises RefusedSource."""
    module, examples = _called(skeleton, allow_code)
    prepared(module, dtype)
    if trial is None and examples is None:
        raise RefusedSource(
            f"{skeleton.reference} returns no example inputs; return (module, inputs) or declare [[inputs]]"
        )
    return LoadedModel(
        module=module,
        skeleton=skeleton,
        platform=PLATFORM,
        trials=(trial or from_values(_named(examples, module, skeleton.reference)),),
        reload=lambda: prepared(_called(skeleton, allow_code)[0], dtype),
        dtype=dtype,
    )


def rebuild(skeleton: FactorySkeleton, allow_code: Sequence[Path], dtype: str | None) -> nn.Module:
    """The module as the factory makes it; its own tensors are freed when others are bound in their place."""
    if not Path(skeleton.code).is_dir():
        print(f"{skeleton.reference}: its directory {skeleton.code} is gone", file=sys.stderr)
        raise RefusedSource(f"the directory with the code of {skeleton.reference} is gone; the server's log names it")
    return prepared(_called(skeleton, allow_code)[0], dtype)


def made(skeleton: FactorySkeleton, allow_code: Sequence[Path]) -> nn.Module | dict[str, torch.Tensor]:
    """What the factory makes, or only its tensors by name. Raises RefusedSource."""
    result = _result(skeleton, allow_code)
    result = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if isinstance(result, nn.Module):
        return result
    if isinstance(result, dict) and all(isinstance(value, torch.Tensor) for value in result.values()):
        return result
    raise RefusedSource(
        f"{skeleton.reference} returned {type(result).__name__}, expected a torch.nn.Module or tensors by name"
    )


def checked_directory(code: str | None, reference: str, allow_code: Sequence[Path]) -> Path:
    """The directory to import from, links resolved. Raises RefusedSource if it is not an allowed one."""
    if code is None:
        raise RefusedSource(f"source = {reference!r} needs code = the directory that it is imported from")
    directory = Path(code).resolve()
    if not any(directory.is_relative_to(allowed.resolve()) for allowed in allow_code):
        raise RefusedSource(f"code = {code} is not under a directory given with --allow-code, so it is not run")
    if not directory.is_dir():
        raise RefusedSource(f"code = {code} is no directory")
    return directory


def _called(skeleton: FactorySkeleton, allow_code: Sequence[Path]) -> tuple[nn.Module, object]:
    """The module and its example inputs, None if it brings none."""
    result = _result(skeleton, allow_code)
    module, examples = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        raise RefusedSource(f"{skeleton.reference} returned {type(module).__name__}, expected a torch.nn.Module")
    scripted = next((inner for inner in module.modules() if isinstance(inner, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise RefusedSource(
            f"{skeleton.reference} returned TorchScript, whose tensors cannot be bound; export it with torch.export"
        )
    return module, examples


def _result(skeleton: FactorySkeleton, allow_code: Sequence[Path]) -> object:
    directory = checked_directory(skeleton.code, skeleton.reference, allow_code)
    try:
        with _imported_from(directory):
            return _function(skeleton.reference, directory)(**skeleton.arguments)
    except DormouseError:
        raise
    except Exception as fault:
        raise RefusedSource(f"{skeleton.reference} from {directory} failed: {one_line(fault)}") from None


def _function(reference: str, directory: Path) -> Callable[..., Any]:
    name, _, attribute = reference.partition(":")
    module = importlib.import_module(name)
    origin = getattr(module, "__file__", None)
    if origin is None or not Path(origin).resolve().is_relative_to(directory):
        raise RefusedSource(f"{reference}: {name} is found at {origin}, outside {directory}")
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RefusedSource(f"{reference}: {name} has no callable {attribute!r}")
    return function  # type: ignore[no-any-return]


@contextmanager
def _imported_from(directory: Path) -> Iterator[None]:
    """Import from this directory first, and forget afterwards what came from it."""
    with _importing:
        before = sys.dont_write_bytecode
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(directory))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(directory))
            sys.dont_write_bytecode = before
            # A copy is made in one go; a list of items is not, and another thread may be importing.
            for name, module in sys.modules.copy().items():
                if (getattr(module, "__file__", None) or "").startswith(f"{directory}/"):
                    del sys.modules[name]


def _named(examples: object, module: nn.Module, reference: str) -> Inputs:
    if isinstance(examples, dict):
        return dict(examples)
    if isinstance(examples, torch.Tensor):
        examples = (examples,)
    if not isinstance(examples, tuple | list):
        raise RefusedSource(f"{reference}: example inputs are a {type(examples).__name__}, expected a dict or a tuple")
    names = list(inspect.signature(module.forward).parameters)
    if len(examples) > len(names):
        raise RefusedSource(f"{reference}: {len(examples)} example inputs for a forward of {len(names)} parameters")
    return dict(zip(names, examples, strict=False))
