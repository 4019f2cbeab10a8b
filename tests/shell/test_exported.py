"""Exported programs: served with their weights fetched late, and refused when the archive could run code."""

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dormouse.device.cpu import CpuDevice
from dormouse.errors import InvalidRequest, RefusedSource
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import CpuCompute
from dormouse.executor.runner import Runner
from dormouse.functions import Manifest
from dormouse.model import sources
from dormouse.model.importing import import_model
from dormouse.store.index import PAGE_BYTES
from tests.shell.arenas import MappedArena


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)
        first: Any = self.layers[0]
        self.head.weight = first.weight
        self.register_buffer("offset", torch.rand(8), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.table = torch.rand(8)

    def forward(self, x: torch.Tensor, scale: float, other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.count.add_(1)  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x).relu()
        return {"y": self.head(x) * scale + self.offset + self.table + other["shift"], "count": self.count.clone()}  # type: ignore[operator]


def export(file: Path) -> Path:
    batch = torch.export.Dim("batch", min=2, max=64)
    inputs = (torch.ones(3, 8), 2.0, {"shift": torch.ones(8)})
    program = torch.export.export(Net().eval(), inputs, dynamic_shapes=({0: batch}, None, {"shift": None}))
    torch.export.save(program, file)
    return file


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("exported") / "net.pt2")


@pytest.fixture
def program(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copy(exported, tmp_path / "net.pt2"))


def rewrite(file: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Write the archive anew, with sound checksums, each file as ``change`` returns it."""
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            changed = change(name.partition("/")[2], content)
            if changed is not None:
                archive.writestr(name, changed)


def refusal(file: Path) -> str:
    with pytest.raises(RefusedSource) as refused:
        sources.load(Manifest("m", str(file)), ())
    assert "\n" not in refused.value.message
    return refused.value.message


def test_the_image_holds_the_weights_and_the_program_beside_it_does_not(program: Path, tmp_path: Path) -> None:
    index = import_model(Manifest("m", str(program)), tmp_path / "image", ())
    names = [entry.names[0].removeprefix("graph_module.") for entry in index.tensors]
    order = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.weight"]
    assert [name for name in names if name.startswith("layers")][:5] == order
    assert names[-1] == "count" and index.state_bytes == 8
    weights = Net().layers[1].weight.detach().numpy().tobytes()  # type: ignore[operator]
    assert weights in (tmp_path / "image" / "image.bin").read_bytes()
    with zipfile.ZipFile(tmp_path / "image" / "program.pt2") as archive:
        sizes = [item.file_size for item in archive.infolist() if "/weight_" in item.filename]
    assert sizes and max(sizes) <= 8


def test_sizes_that_the_export_left_open_are_free(program: Path, tmp_path: Path) -> None:
    signature = import_model(Manifest("m", str(program)), tmp_path / "image", ()).signature
    assert [(item.name, item.shape) for item in signature.inputs] == [("x", (-1, 8)), ("other_shift", (8,))]
    assert [(item.name, item.shape) for item in signature.outputs] == [("y", (-1, 8)), ("count", ())]


@pytest.mark.parametrize("shape", [(1, 8), (65, 8), (3, 7), (8,)])
def test_sizes_outside_the_exported_limits_are_the_clients_fault(shape: tuple[int, ...], program: Path) -> None:
    module = sources.load(Manifest("m", str(program)), ()).module
    with pytest.raises(InvalidRequest, match=r"2\.\.64, 8"):
        module(x=torch.ones(shape), other_shift=torch.ones(8))


def test_it_answers_right_while_it_arrives(program: Path, tmp_path: Path) -> None:
    index = import_model(Manifest("m", str(program)), tmp_path / "image", ())
    arena = MappedArena(4 * PAGE_BYTES)
    extents = arena.read(tmp_path / "image", index)
    device = CpuDevice(8 * 1024 * 1024, 64 * 1024)
    runner = Runner(device, CpuCompute(), tmp_path / "image", arena.address, 256, poison=True)
    plain = Net().eval()
    for _ in range(3):
        arrival = Arrival()
        runner.load(extents, arrival)
        arrival.complete = False  # so that the guard stays
        x = torch.rand(5, 8)
        answer = runner.run(arrival, {"x": x, "other_shift": torch.ones(8)}, (), lambda _: True)
        with torch.inference_mode():
            expected = plain(x, 2.0, {"shift": torch.ones(8)})
        assert torch.equal(answer["count"], expected["count"])  # type: ignore[arg-type]
        assert torch.allclose(answer["y"], expected["y"])  # type: ignore[arg-type]
        runner.evict()
    device.close()
    arena.close()


def test_a_program_keeps_its_types(program: Path) -> None:
    with pytest.raises(RefusedSource, match="bfloat16"):
        sources.load(Manifest("m", str(program), dtype="bfloat16"), ())


@pytest.mark.parametrize("keep", [0, 10, 2000])
def test_a_truncated_archive_is_refused(program: Path, keep: int) -> None:
    program.write_bytes(program.read_bytes()[:keep])
    assert "damaged" in refusal(program)


def test_a_flipped_bit_is_noticed(program: Path) -> None:
    content = bytearray(program.read_bytes())
    content[content.index(Net().layers[2].weight.detach().numpy().tobytes()) + 5] ^= 1  # type: ignore[operator]
    program.write_bytes(content)
    assert "checksum" in refusal(program)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (self.path,)


def trap(path: Path) -> bytes:
    return pickle.dumps(Trap(path))


def test_a_renamed_checkpoint_is_no_program(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt2")
    assert "no program" in refusal(tmp_path / "model.pt2")


@pytest.mark.parametrize("target", ["sample inputs", "weight", "constant", "object", "stray"])
def test_a_pickle_inside_is_never_read_without_limits(target: str, program: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"

    def change(name: str, content: bytes) -> bytes:
        if (target, name) in (("sample inputs", "data/sample_inputs/model.pt"), ("weight", "data/weights/weight_0")):
            return trap(sprung)
        if (target, name) == ("constant", "data/constants/tensor_0"):
            return trap(sprung)
        if name.endswith("_config.json") and target in ("weight", "constant", "object"):
            config: Any = json.loads(content)
            for payload in config["config"].values():
                if payload["path_name"] in ("weight_0", "tensor_0"):
                    payload["use_pickle"] = True
                    if target == "object":
                        payload["path_name"] = "opaque_obj_0"
            return json.dumps(config).encode()
        return content

    rewrite(program, change)
    if target == "stray":
        with zipfile.ZipFile(program, "a") as archive:
            archive.writestr("net/data/constants/model.pt", trap(sprung))
    assert "is refused" in refusal(program)
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "torch.os.system"),
        ("target", "torch.hub.load"),
        ("target", "torch.ops.load_library"),
        ("target", "torch.ops.aten.__class__"),
        ("target", "torch.ops.aten.from_file.default"),
        ("target", "_operator.methodcaller"),
        ("expr_str", "__import__('os').system('true')"),
        ("expr_str", "Symbol.__init__.__globals__"),
        ("expr_str", "open('f', 'w')"),
        ("name", "x=print('hello')"),
    ],
)
def test_a_program_cannot_name_what_it_should_not(field: str, value: str, program: Path) -> None:
    def spoilt(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: value if key == field else spoilt(inner) for key, inner in item.items()}
        return [spoilt(inner) for inner in item] if isinstance(item, list) else item

    def change(name: str, content: bytes) -> bytes:
        return json.dumps(spoilt(json.loads(content))).encode() if name == "models/model.json" else content

    rewrite(program, change)
    assert f"its program has {field}" in refusal(program)


def test_an_argument_cannot_smuggle_code_into_the_generated_forward(program: Path) -> None:
    def change(_: str, content: bytes) -> bytes:
        return content.replace(b'"forward_arg_names": ["x"', b'"forward_arg_names": ["x=exit()"')

    rewrite(program, change)
    assert "an argument named" in refusal(program)


@pytest.mark.parametrize("written_by", ["torch", "python"])
@pytest.mark.parametrize("shift", [4, -4])
def test_an_archive_whose_directory_lies_elsewhere_for_torch_is_refused(
    written_by: str, shift: int, program: Path
) -> None:
    if written_by == "python":  # which writes no larger end record
        rewrite(program, lambda _, content: content)
    content = program.read_bytes()
    program.write_bytes(b"junk" + content if shift > 0 else content[4:])
    assert "readers may disagree" in refusal(program)


def test_an_archive_whose_end_records_differ_is_refused(program: Path) -> None:
    content = bytearray(program.read_bytes())
    directory_bytes = content.rindex(b"PK\5\6") + 12
    content[directory_bytes] ^= 1
    program.write_bytes(content)
    assert "readers may disagree" in refusal(program)


def test_names_that_differ_in_case_alone_are_refused(program: Path) -> None:
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr(archive.namelist()[0].partition("/")[0] + "/MODELS/model.json", b"{}")
    assert "two files of the same name" in refusal(program)


def test_compiled_code_is_refused(program: Path) -> None:
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("net/data/aotinductor/model/wrapper.so", b"\x7fELF")
    assert "compiled code" in refusal(program)
