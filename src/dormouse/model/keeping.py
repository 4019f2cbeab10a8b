"""What is kept of a source beside its weights, so that callers may send texts or pictures instead of tensors.

Reads what model makers put beside their weights; what the manifest says goes over it. A source that says too little is
served with tensors alone, unless its manifest asks for more.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from dormouse.errors import RefusedSource
from dormouse.functions import ImageManifest, Manifest, TaskManifest, task_of
from dormouse.model.loaded import LoadedModel
from dormouse.model.preprocessing import PREPROCESSOR, described, image_input
from dormouse.store.index import HuggingFaceSkeleton
from dormouse.tasks.description import TOKENIZER_FILE, ImageInput, Kind, Scoring, Task, TextInput
from dormouse.tasks.text import digest_of, tokenizer_of
from dormouse.tensors import Signature, TensorSpec

ANSWERS: dict[Kind, str] = {"embedding": "embedding", "classification": "logits"}
"""By kind, the output of a Hugging Face model that says it."""
VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
"""Of tokenizers saved before there was ``tokenizer.json``."""
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "data2vec-text")
"""Kinds of models whose positions begin behind the padding's."""
UNLIMITED = 10**6
"""A ``model_max_length`` beyond is transformers' way to say that there is none."""
ROWS = (-1, 1)


@dataclass(frozen=True, slots=True)
class Kept:
    """``files``: names in the image directory, and contents."""

    task: Task | None = None
    files: dict[str, bytes] = field(default_factory=dict)


class Source(Struct, frozen=True):
    """What is known of a source: the manifest's task, its directory if it is Hugging Face's, and the configuration."""

    asked: TaskManifest
    directory: Path | None
    config: dict[str, Any]


def kept_of(manifest: Manifest, loaded: LoadedModel, signature: Signature) -> Kept:
    """The task of a function and its files. Raises RefusedSource for a ``[task]`` that cannot be kept."""
    skeleton, asked = loaded.skeleton, task_of(manifest)
    is_huggingface = isinstance(skeleton, HuggingFaceSkeleton)
    directory = Path(manifest.source) if is_huggingface else None
    named = skeleton.task if isinstance(skeleton, HuggingFaceSkeleton) else asked.kind
    kind = next((each for each in ANSWERS if each == named), None)
    if kind is None:
        return Kept()
    source = Source(asked, directory, described(directory, "config.json"))
    output = _output(source, kind, signature)
    text, files = _text(source, signature)
    image = _image(source, signature)
    if output is None or (text is None and image is None):
        return _without(source, output)
    task = Task(
        kind=kind,
        output=output,
        text=text,
        image=image,
        labels=_labels(source),
        scoring=_scoring(source),
        dimensions=_dimensions(source.config),
    )
    return Kept(task, files)


def _without(source: Source, output: str | None) -> Kept:
    asked = source.asked
    if output is None and asked.output is not None:
        raise RefusedSource(f"task.output = {asked.output!r} is no output with a row of numbers for every input")
    if asked.tokenizer is not None or asked.image is not None:
        raise RefusedSource("task: the model has not one output with a row of numbers; name it with task.output")
    return Kept()


# ------------------------------------------------------------------ answers


def _output(source: Source, kind: Kind, signature: Signature) -> str | None:
    fitting = [spec.name for spec in signature.outputs if _is_rows(spec, (2,) if kind == "embedding" else (2, 4))]
    wanted = source.asked.output or (ANSWERS[kind] if source.directory is not None else None)
    if wanted is not None:
        return wanted if wanted in fitting else None
    return fitting[0] if len(fitting) == 1 else None


def _is_rows(spec: TensorSpec, dimensions: tuple[int, ...]) -> bool:
    return len(spec.shape) in dimensions and spec.shape[0] in ROWS and spec.datatype in ("FP32", "FP16")


def _labels(source: Source) -> tuple[str, ...]:
    labels = source.asked.labels
    if isinstance(labels, str):
        raise RefusedSource(f"task.labels = {labels!r} is a file; `dormouse deploy` reads it, others send the names")
    if labels:
        return labels
    named = source.config.get("id2label")
    if not isinstance(named, dict):
        return ()
    return tuple(str(named.get(str(number), number)) for number in range(len(named)))


def _scoring(source: Source) -> Scoring:
    if source.asked.scoring is not None:
        return source.asked.scoring
    problem = source.config.get("problem_type")
    if problem == "regression":
        return "none"
    # One class alone would have a softmax of 1 whatever the model says.
    lonely = isinstance(source.config.get("id2label"), dict) and len(source.config["id2label"]) == 1
    return "sigmoid" if problem == "multi_label_classification" or lonely else "softmax"


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Embeddings are cut only where the model was trained for it, and says so."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed and all(isinstance(each, int) and each > 0 for each in listed):
        return tuple(sorted(listed))
    return () if config.get("is_matryoshka") is True else None


# ------------------------------------------------------------------ texts


def _text(source: Source, signature: Signature) -> tuple[TextInput | None, dict[str, bytes]]:
    if not _takes_tokens(signature):
        if source.asked.tokenizer is not None:
            raise RefusedSource("task.tokenizer: the model has no inputs input_ids and attention_mask for its tokens")
        return None, {}
    definition = _definition(source)
    if definition is None:
        return None, {}
    try:
        vocabulary = tokenizer_of(definition).get_vocab_size()
    except ValueError as fault:
        raise RefusedSource(f"the tokenizer of {source.directory or source.asked.tokenizer}: {fault}") from None
    sentences = _sentences(source.directory)
    prompts = described(source.directory, "config_sentence_transformers.json")
    text = TextInput(
        digest=digest_of(definition),
        max_tokens=_max_tokens(source, sentences),
        truncates=_truncates(source, sentences, definition),
        pad_id=_padding(source.config, definition),
        vocabulary=int(source.config.get("vocab_size") or vocabulary),
        prompt=str((prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or ""),
        lowers=sentences.get("do_lower_case") is True,
    )
    return text, {TOKENIZER_FILE: definition}


def _takes_tokens(signature: Signature) -> bool:
    specs = {spec.name: spec for spec in signature.inputs}
    ids = specs.get("input_ids")
    if ids is None or len(ids.shape) != 2 or ids.shape[0] not in ROWS:
        return False
    known = ("input_ids", "attention_mask", "token_type_ids")
    required = {spec.name for spec in signature.inputs if not spec.optional}
    whole = all(specs[name].shape == ids.shape for name in known if name in specs)
    return whole and required <= set(known) and all(s.datatype in ("INT32", "INT64") for s in signature.inputs)


def _definition(source: Source) -> bytes | None:
    """The tokenizer as the tokenizers library writes it, made from older files where there is nothing newer."""
    if source.asked.tokenizer is not None:
        return _read(Path(source.asked.tokenizer))
    directory = source.directory
    if directory is None:
        return None
    if (directory / TOKENIZER_FILE).is_file():
        return _read(directory / TOKENIZER_FILE)
    if not any((directory / name).is_file() for name in VOCABULARIES):
        return None
    try:
        import transformers  # as in huggingface.py

        made = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return str(made.backend_tokenizer.to_str()).encode()
    except Exception:  # of a library of many kinds of tokenizers; without one the model is served with tensors
        return None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as fault:
        raise RefusedSource(f"{file} cannot be read: {fault.strerror}") from None


def _sentences(directory: Path | None) -> dict[str, Any]:
    """How a sentence-transformers model takes its texts."""
    found = [] if directory is None else sorted(directory.glob("sentence_*_config.json"))
    return described(directory, found[0].name) if found else {}


def _max_tokens(source: Source, sentences: dict[str, Any]) -> int:
    tokenizer = described(source.directory, "tokenizer_config.json")
    positions = source.config.get("max_position_embeddings")
    if isinstance(positions, int) and source.config.get("model_type") in OFFSET_POSITIONS:
        positions -= int(source.config.get("pad_token_id") or 0) + 1
    limits = [source.asked.max_tokens, sentences.get("max_seq_length"), tokenizer.get("model_max_length"), positions]
    known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < UNLIMITED]
    return min(known, default=512)


def _truncates(source: Source, sentences: dict[str, Any], definition: bytes) -> bool:
    if source.asked.truncates is not None:
        return source.asked.truncates
    return bool(sentences.get("max_seq_length")) or bool(json.loads(definition).get("truncation"))


def _padding(config: dict[str, Any], definition: bytes) -> int:
    configured = config.get("pad_token_id")
    if isinstance(configured, int) and configured >= 0:
        return configured
    padding = json.loads(definition).get("padding")
    return int(padding["pad_id"]) if isinstance(padding, dict) else 0


# ------------------------------------------------------------------ pictures


def _image(source: Source, signature: Signature) -> ImageInput | None:
    spec = _picture(signature)
    asked = source.asked.image
    if spec is None:
        if asked is not None:
            raise RefusedSource("task.image: the model has no input of pictures, [-1, 3, height, width], and no other")
        return None
    if asked is not None:
        return _declared(spec, asked)
    found = image_input(spec.name, described(source.directory, PREPROCESSOR))
    return found if found is not None and _fits(spec, found) else None


def _declared(spec: TensorSpec, asked: ImageManifest) -> ImageInput:
    image = ImageInput(spec.name, **{key: getattr(asked, key) for key in asked.__struct_fields__})
    if not _fits(spec, image):
        raise RefusedSource(
            f"task.image makes pictures of {image.height}x{image.width}, the model's input takes {list(spec.shape)}"
        )
    return image


def _fits(spec: TensorSpec, image: ImageInput) -> bool:
    return spec.shape[2] in (-1, image.height) and spec.shape[3] in (-1, image.width)


def _picture(signature: Signature) -> TensorSpec | None:
    required = [spec for spec in signature.inputs if not spec.optional]
    pictures = [
        spec for spec in required if len(spec.shape) == 4 and spec.shape[0] in ROWS and spec.shape[1] in (-1, 3)
    ]
    fitting = len(required) == 1 and len(pictures) == 1 and pictures[0].datatype in ("FP32", "FP16")
    return pictures[0] if fitting else None
