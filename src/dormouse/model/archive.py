"""Whether a .pt2 archive is sound, and free of everything that could run code when torch.export reads it.

torch.export.load trusts its file: pickles are read without limits, operator names are looked up anywhere in torch,
symbolic sizes are evaluated, and names of inputs end up in generated source. So before it sees an archive, every one
of these is checked against what an exported program needs. Reads the archive; never unpickles without limits.
"""

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dormouse.errors import RefusedSource
from dormouse.model.loaded import one_line

OPERATOR = re.compile(
    r"torch\.ops\.(?!aten\.from_file\b)(aten|prims|higher_order|quantized_decomposed|torchvision)"
    r"\.((?!__)\w+|__(i?and|i?or|i?xor|i?lshift|i?rshift)__)(\.[A-Za-z]\w*)?"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_|xor)"
    r"|math\.(ceil|floor|trunc|sqrt|pow|log2|isnan|isinf)"
    r"|torch\.sym_(int|float|max|min|not|ite|sqrt|sum)"
)
SYMBOLIC_NAMES = frozenset(
    re.findall(
        r"\w+",
        """Max Min Mod FloorDiv CeilDiv CleanDiv PythonMod ModularIndexing Where Eq Ne Lt Le Gt Ge And Or Not TrueDiv
        IntTrueDiv FloatTrueDiv FloatPow PowByNatural ToFloat TruncToInt CeilToInt FloorToInt RoundToInt Identity
        Abs Pow Integer Rational floor ceiling oo int_oo True False Symbol Add Mul Float precision Equality Unequality
        LessThan GreaterThan StrictLessThan StrictGreaterThan positive nonnegative negative integer real finite""",
    )
)
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ4x2L4Q")
_SATURATED = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
"""The numbers of the end record, when the real ones stand in the larger one before it."""
_SYMBOL = re.compile(r"[a-z]{1,3}\d+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_ARITHMETIC = re.compile(r"(?:[A-Za-z_]\w*|'[a-z]{1,3}\d+'|\d+(?:\.\d+)?|[\s+\-*/%(),<>=!&|~])*")
_WAY_OUT = "export the model again with torch.export.save, with plain tensors as inputs and weights"


def check(path: Path) -> None:
    """Raises RefusedSource unless the archive is whole and holds a program and tensors, nothing else."""
    try:
        if not _has_one_directory(path):
            raise RefusedSource(f"{path} is refused: readers may disagree about what it holds; {_WAY_OUT}")
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise RefusedSource(f"{path} is damaged: {damaged} has another checksum than the archive says")
            _Archive(path, archive).check()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, struct.error) as fault:
        raise RefusedSource(f"{path} is damaged or no archive: {one_line(fault)}") from None


def _has_one_directory(path: Path) -> bool:
    """Whether the archive's directory lies where every reader looks for it.

    Python believes that it ends where the trailer begins, torch goes by the offsets in the trailer. Where these differ,
    what is checked here is not what torch would read.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size_bytes - _ZIP64_END.size - _LOCATOR.size - _END.size))
        trailer = file.read()
    if len(trailer) < _END.size:
        raise zipfile.BadZipFile("it is shorter than any archive")
    signature, *numbers, comment = _END.unpack(trailer[-_END.size :])
    if signature != b"PK\5\6" or comment:
        raise zipfile.BadZipFile("it does not end as an archive does")
    end = size_bytes - _END.size
    if trailer[-_END.size - _LOCATOR.size :].startswith(b"PK\6\7"):
        end -= _LOCATOR.size + _ZIP64_END.size
        _, _, found, _ = _LOCATOR.unpack(trailer[-_END.size - _LOCATOR.size : -_END.size])
        signature, _, *larger = _ZIP64_END.unpack(trailer[: _ZIP64_END.size])
        agree = all(small in (large, most) for small, large, most in zip(numbers, larger, _SATURATED, strict=True))
        if found != end or signature != b"PK\6\6" or not agree:
            return False
        numbers = larger
    disk, directory_disk, _, _, directory_bytes, offset = numbers
    return (disk, directory_disk, offset + directory_bytes) == (0, 0, end)


class _Archive:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        self._files = {name.partition("/")[2]: name for name in archive.namelist()}

    def check(self) -> None:
        # Upper and lower case too: torch may not tell them apart.
        if len({name.lower() for name in self._files}) != len(self._archive.namelist()):
            raise self._refusal("it has two files of the same name")
        if self._read("archive_format", b"") != b"pt2" or "models/model.json" not in self._files:
            raise self._refusal("it holds no program of torch >= 2.8")
        for name in self._files:
            self._check_file(name)

    def _check_file(self, name: str) -> None:
        if name.startswith("data/aotinductor/") or name.endswith((".so", ".o", ".cubin")):
            raise self._refusal(f"{name} is compiled code")
        if name.startswith("models/"):
            self._check_program(self._json(name))
        elif name.endswith("_config.json"):
            self._check_payloads(self._json(name), name.rpartition("/")[0])
        elif name.endswith((".pt", ".pkl", ".pickle", ".bin")):
            self._check_pickle(name)

    def _check_payloads(self, config: Any, folder: str) -> None:
        for name, payload in _mapping(config.get("config") if isinstance(config, dict) else None).items():
            file = str(payload.get("path_name")) if isinstance(payload, dict) else ""
            if not file.startswith(("weight_", "tensor_")):
                raise self._refusal(f"its constant {name!r} is an object, not a tensor")
            if payload.get("use_pickle"):
                self._check_pickle(f"{folder}/{file}")

    def _check_pickle(self, name: str) -> None:
        try:
            torch.load(io.BytesIO(self._read(name)), weights_only=True, map_location="meta")
        except Exception as fault:  # whatever the limited reader stumbles over
            raise self._refusal(f"{name} holds more than tensors: {one_line(fault)}") from None

    def _check_program(self, program: Any) -> None:
        for key, value in _walk(program):
            allowed = _RULES.get(key)
            if allowed is not None and isinstance(value, str) and not allowed(value):
                raise self._refusal(f"its program has {key} = {value[:80]!r}")
        for call in program.get("graph_module", {}).get("module_call_graph", ()):
            self._check_signature(call.get("signature"))

    def _check_signature(self, signature: Any) -> None:
        """Names of arguments, which become parameters of generated code."""
        if not signature:
            return
        _, spec = json.loads(signature["in_spec"])
        keywords = json.loads(spec["children_spec"][1]["context"])
        for name in (*keywords, *(signature.get("forward_arg_names") or ())):
            if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
                raise self._refusal(f"its program has an argument named {str(name)[:80]!r}")

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._read(name))
        except ValueError as fault:
            raise self._refusal(f"{name} is no JSON: {one_line(fault)}") from None

    def _read(self, name: str, default: bytes | None = None) -> bytes:
        if name not in self._files:
            if default is None:
                raise self._refusal(f"{name} is missing")
            return default
        return self._archive.read(self._files[name])

    def _refusal(self, why: str) -> RefusedSource:
        return RefusedSource(f"{self._path} is refused: {why}; {_WAY_OUT}")


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_arithmetic(text: str) -> bool:
    names = _IDENTIFIER.findall(text)
    return _ARITHMETIC.fullmatch(text) is not None and all(
        name in SYMBOLIC_NAMES or _SYMBOL.fullmatch(name) for name in names
    )


def _is_operator(text: str) -> bool:
    return OPERATOR.fullmatch(text) is not None


_RULES: dict[str, Callable[[str], bool]] = {
    "target": _is_operator,
    "as_operator": _is_operator,
    "expr_str": _is_arithmetic,
    "name": lambda text: text == "" or _IDENTIFIER.fullmatch(text) is not None,
}
