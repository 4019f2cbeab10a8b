"""Images of other weights for an architecture that is known already."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dormouse.errors import RefusedSource
from dormouse.executor.skeletons import architecture_of
from dormouse.functions import Manifest
from dormouse.model import skeleton, sources
from dormouse.model.importing import import_model
from dormouse.model.likeness import import_like
from dormouse.model.profiling import run
from dormouse.store.index import DATA_FILE, ImageIndex, read_index
from tests.shell.tiny_models import configurations, save_factories, save_huggingface


def rebuilt(directory: Path, code: Path) -> torch.nn.Module:
    """The module of an image, with its weights."""
    index, data = read_index(directory), bytearray((directory / DATA_FILE).read_bytes())
    memory = torch.frombuffer(data, dtype=torch.uint8)
    module = skeleton.rebuild(directory, index, [code])

    def view(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return memory[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    skeleton.bind(module, index, view)
    return module


def factory(code: Path, source: str, **more: Any) -> Manifest:
    return Manifest("m", f"factories:{source}", code=str(code), **more)


@pytest.mark.parametrize("name", sorted(configurations()))
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_fine_tune_answers_as_if_it_had_been_imported_by_itself(name: str, dtype: str | None, tmp_path: Path) -> None:
    save_huggingface(name, tmp_path / "base")
    save_huggingface(name, tmp_path / "tuned", seed=1)
    import_model(Manifest("base", str(tmp_path / "base"), dtype=dtype), tmp_path / "one", [])
    import_like(Manifest("tuned", str(tmp_path / "tuned"), like="base"), tmp_path / "one", tmp_path / "other", [])
    index = import_model(Manifest("alone", str(tmp_path / "tuned"), dtype=dtype), tmp_path / "alone", [])
    assert read_index(tmp_path / "other").page_crc32 == index.page_crc32
    assert architecture_of(read_index(tmp_path / "other"), tmp_path / "other") == architecture_of(
        read_index(tmp_path / "one"), tmp_path / "one"
    )
    if dtype is None:
        manifest = Manifest("tuned", str(tmp_path / "tuned"))
        loaded = sources.load(manifest, [])
        inputs = loaded.trials[-1].inputs
        expected = run(loaded.module, inputs)
        answer = run(rebuilt(tmp_path / "other", tmp_path), inputs)
        for key, value in expected.items():
            torch.testing.assert_close(answer[key], value)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A function with weights of its own; beside it, the code that made it."""
    code = save_factories(tmp_path / "code")
    import_model(factory(code, "net"), tmp_path / "base", [tmp_path])
    return code


def like(manifest: Manifest, tmp_path: Path, *, target: str | None = "image") -> ImageIndex:
    return import_like(manifest, tmp_path / "base", None if target is None else tmp_path / target, [tmp_path])


def test_a_callable_may_return_tensors_only(base: Path, tmp_path: Path) -> None:
    like(factory(base, "tensors_of_net", arguments={"scale": 0.0}, like="base"), tmp_path)
    assert run(rebuilt(tmp_path / "image", tmp_path), {"x": torch.ones(1, 8)})["output"].tolist() == [[0.0, 0.0, 0.0]]  # type: ignore[union-attr]


@pytest.mark.usefixtures("base")
def test_a_safetensors_file_is_enough(tmp_path: Path) -> None:
    index = read_index(tmp_path / "base")
    save_file(
        {entry.names[0]: torch.ones(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in index.tensors},
        tmp_path / "ones.safetensors",
    )
    like(Manifest("m", str(tmp_path / "ones.safetensors"), like="base"), tmp_path)
    answer = run(rebuilt(tmp_path / "image", tmp_path), {"x": torch.ones(1, 8)})["output"]
    assert isinstance(answer, torch.Tensor)
    assert answer.tolist() == [[16 * 9 + 1.0] * 3]


def test_a_callable_may_return_a_module(base: Path, tmp_path: Path) -> None:
    index = like(factory(base, "random_net", like="base"), tmp_path)
    assert index.skeleton == read_index(tmp_path / "base").skeleton
    assert index.page_crc32 != read_index(tmp_path / "base").page_crc32


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"drop": "last.bias"}, "it lacks last.bias"),
        ({"more": {"late": [1]}}, "returned dict, expected a torch.nn.Module or tensors by name"),
    ],
)
def test_a_source_whose_tensors_are_others_is_refused_by_name(
    arguments: dict[str, Any], problem: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedSource, match=problem):
        like(factory(base, "tensors_of_net", arguments=arguments, like="base"), tmp_path)
    assert not (tmp_path / "image").exists()
    assert not list(tmp_path.glob(".image*"))


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"first.weight": torch.ones(16, 9)}, r"first.weight is float32 \[16, 9\] and float32 \[16, 8\]"),
        ({"first.weight": torch.ones(16, 8, dtype=torch.float16)}, r"is float16 \[16, 8\] and float32 \[16, 8\]"),
        ({"extra": torch.ones(1)}, "it has extra, which that function has not"),
    ],
)
def test_a_tensor_of_another_shape_or_type_is_refused_with_both(
    tensors: dict[str, torch.Tensor], problem: str, tmp_path: Path
) -> None:
    index = read_index(tmp_path / "base")
    known = {entry.names[0]: torch.ones(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in index.tensors}
    save_file(known | tensors, tmp_path / "other.safetensors")
    with pytest.raises(RefusedSource, match=problem):
        like(Manifest("m", str(tmp_path / "other.safetensors"), like="base"), tmp_path, target=None)


def test_a_source_that_is_no_tensors_at_all_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"12345678 no header")
    with pytest.raises(RefusedSource, match=r"bad\.safetensors cannot be read"):
        like(Manifest("m", str(tmp_path / "bad.safetensors"), like="base"), tmp_path)
    with pytest.raises(RefusedSource, match="returned dict, expected"):
        like(factory(base, "bytes_of_net", like="base"), tmp_path)


def test_tied_weights_must_be_tied_in_the_other_source_too(tmp_path: Path) -> None:
    save_huggingface("llama", tmp_path / "tied")
    import_model(Manifest("base", str(tmp_path / "tied")), tmp_path / "base", [])
    index = read_index(tmp_path / "base")
    tied = next(entry for entry in index.tensors if len(entry.names) > 1 and entry.kind == "parameter")
    tensors = {
        entry.names[0]: torch.ones(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in index.tensors
    } | {tied.names[1]: torch.zeros(tied.shape, dtype=getattr(torch, tied.dtype))}
    save_file(tensors, tmp_path / "untied.safetensors")
    with pytest.raises(RefusedSource, match="are one tensor in that function and differ here"):
        like(Manifest("m", str(tmp_path / "untied.safetensors"), like="base"), tmp_path)
