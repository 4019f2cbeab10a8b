"""The way in: which kind of source a manifest names, and the real module behind it, on the CPU.

Everything that can run code when it is merely read (pickle in all its spellings) is refused here, with the way out.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from dormouse.errors import RefusedSource
from dormouse.functions import Manifest, task_of
from dormouse.model import exported, factory, huggingface
from dormouse.model.examples import from_manifest
from dormouse.model.loaded import LoadedModel
from dormouse.store.index import FactorySkeleton

REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".jit", ".ptl")


def load(manifest: Manifest, allow_code: Sequence[Path]) -> LoadedModel:
    """Load the source. Raises RefusedSource saying what is wrong and what would be taken instead."""
    path = Path(manifest.source)
    trial = from_manifest(manifest.inputs) if manifest.inputs else None
    if path.is_dir():
        return huggingface.load(path, task_of(manifest).kind, manifest.dtype, trial)
    if path.suffix == ".pt2" and path.is_file():
        return exported.load(path, manifest.dtype, trial)
    if REFERENCE.fullmatch(manifest.source):
        code = factory.checked_directory(manifest.code, manifest.source, allow_code)
        skeleton = FactorySkeleton(manifest.source, str(code), manifest.arguments)
        return factory.load(skeleton, allow_code, manifest.dtype, trial)
    raise _refused(manifest.source, path)


def _refused(source: str, path: Path) -> RefusedSource:
    if path.suffix in PICKLES:
        return RefusedSource(
            f"{source} is a pickle or TorchScript, which can run code when it is read; save it with "
            "torch.export (.pt2) or as safetensors, or serve it as module:callable from an allowed directory"
        )
    if not path.exists():
        return RefusedSource(
            f"{source} does not exist; a source is a Hugging Face directory, a .pt2 or module:callable"
        )
    return RefusedSource(f"{source} is no Hugging Face directory, .pt2 file or module:callable")
