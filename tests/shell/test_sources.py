"""What is taken as a model's source, and what is refused in one line that says the way out."""

import gc
import json
import pickle
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dormouse.errors import RefusedSource
from dormouse.functions import Manifest
from dormouse.model.places import find_places
from dormouse.model.sources import load
from tests.shell.tiny_models import configurations, save_factories, save_huggingface


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    save_huggingface("bert", tmp_path / "bert")
    return tmp_path / "bert"


def refusal(source: Path | str, allow_code: tuple[Path, ...] = (), code: Path | None = None) -> str:
    with pytest.raises(RefusedSource) as refused:
        load(Manifest("m", str(source), code=str(code) if code else None), allow_code)
    assert "\n" not in refused.value.message
    return refused.value.message


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("name", sorted(configurations()))
def test_a_huggingface_directory_is_loaded_with_its_own_weights(name: str, tmp_path: Path) -> None:
    saved = save_huggingface(name, tmp_path / name)
    loaded = load(Manifest("m", str(tmp_path / name), task="raw"), ())
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[f"model.{key}"], value)
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_weights_are_cast_where_the_manifest_says_so(bert: Path) -> None:
    loaded = load(Manifest("m", str(bert), dtype="bfloat16"), ())
    floating = {
        p.tensor.dtype for p in find_places(loaded.module) if p.tensor is not None and p.tensor.is_floating_point()
    }
    assert floating == {torch.bfloat16}


def test_a_missing_weight_is_never_left_random(bert: Path) -> None:
    weights = load_file(bert / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    assert "encoder.layer.1.output.dense.weight" in refusal(bert)


def test_an_unknown_weight_is_refused_by_name(bert: Path) -> None:
    weights = load_file(bert / "model.safetensors") | {"encoder.layer.7.new": torch.ones(2)}
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    assert "encoder.layer.7.new" in refusal(bert)


def test_a_weight_of_another_shape_is_refused_by_name(bert: Path) -> None:
    weights = load_file(bert / "model.safetensors") | {"pooler.dense.bias": torch.ones(7)}
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    assert "pooler.dense.bias" in refusal(bert)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_safetensors_are_refused(bert: Path, keep: int) -> None:
    file = bert / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is damaged" in refusal(bert)


def test_pickled_weights_are_refused_with_the_way_out(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    torch.save({}, bert / "pytorch_model.bin")
    assert "save_pretrained" in refusal(bert)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.pkl"])
def test_a_pickle_is_refused_and_never_read(name: str, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.mkdir, (Path(tmp_path / "sprung"),)  # type: ignore[return-value]

    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    assert "torch.export" in refusal(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_code_that_comes_with_a_model_is_not_run(bert: Path, tmp_path: Path) -> None:
    (bert / "evil.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass EvilModel: pass\n")
    edit_config(bert, architectures=["EvilModel"], auto_map={"AutoModel": "evil.EvilModel"})
    assert "EvilModel" in refusal(bert)
    edit_config(bert, architectures=["BertModel"])
    load(Manifest("m", str(bert)), ())
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("architecture", ["AutoModel", "PreTrainedModel", "pipeline", "BertConfig", "__doc__"])
def test_only_model_classes_are_architectures(bert: Path, architecture: str) -> None:
    edit_config(bert, architectures=[architecture])
    refusal(bert)


def test_a_list_of_parts_may_not_lead_out_of_the_directory(bert: Path, tmp_path: Path) -> None:
    shutil.move(bert / "model.safetensors", tmp_path / "model.safetensors")
    parts = {"weight_map": {"pooler.dense.bias": "../model.safetensors"}}
    (bert / "model.safetensors.index.json").write_text(json.dumps(parts))
    assert "../model.safetensors" in refusal(bert)


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"architectures": []}'])
def test_a_configuration_without_an_architecture_is_refused(bert: Path, config: str) -> None:
    (bert / "config.json").write_text(config)
    assert "names no architecture" in refusal(bert)


def test_quantized_models_and_adapters_are_refused(bert: Path) -> None:
    (bert / "adapter_config.json").write_text("{}")
    assert "merge it" in refusal(bert)
    edit_config(bert, quantization_config={"bits": 4})
    assert "quantized" in refusal(bert)


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "someone/attention"},
        {"attn_implementation": "someone/attention@v1"},
        {"experts_implementation": "someone/experts"},
        {"text_config": {"_attn_implementation": "someone/attention"}},
        {"attn_implementation": {"": "someone/attention"}},
    ],
)
def test_a_configuration_that_asks_for_code_from_the_network_is_refused(bert: Path, changes: dict[str, object]) -> None:
    edit_config(bert, **changes)
    assert "code that would be fetched" in refusal(bert)


def test_a_source_that_is_nothing_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    assert "is no Hugging Face directory" in refusal(tmp_path / "notes.txt")


def test_a_factory_is_called_with_its_arguments(tmp_path: Path) -> None:
    code = save_factories(tmp_path / "code")
    loaded = load(Manifest("m", "factories:net", code=str(code), arguments={"width": 5}), (tmp_path,))
    assert loaded.module.state_dict()["first.weight"].shape == (5, 8)
    assert set(loaded.trials[0].inputs) == {"x"}


def test_code_outside_the_allowed_directories_is_not_run(tmp_path: Path) -> None:
    code = save_factories(tmp_path / "code")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(code)
    allowed = (tmp_path / "allowed",)
    assert "--allow-code" in refusal("factories:net", allowed, code)
    assert "--allow-code" in refusal("factories:net", allowed, tmp_path / "allowed" / "link")
    assert "--allow-code" in refusal("factories:net", allowed, tmp_path / "allowed" / ".." / "code")
    assert "code =" in refusal("factories:net", allowed)


def test_a_module_found_elsewhere_is_not_taken(tmp_path: Path) -> None:
    code = save_factories(tmp_path / "code")
    assert "outside" in refusal("os.path:join", (tmp_path,), code)
    (tmp_path / "elsewhere.py").write_text("def make(): ...")
    (code / "elsewhere.py").symlink_to(tmp_path / "elsewhere.py")
    assert "outside" in refusal("elsewhere:make", (code,), code)


def test_two_directories_may_use_the_same_names(tmp_path: Path) -> None:
    one, two = save_factories(tmp_path / "one"), save_factories(tmp_path / "two")
    (two / "layers.py").write_text((two / "layers.py").read_text().replace("2.0", "3.0"))
    modules = [load(Manifest("m", "factories:net", code=str(code)), (tmp_path,)).module for code in (one, two, one)]
    assert [module.scale.factors[0].item() for module in modules] == [2.0, 3.0, 2.0]  # type: ignore[union-attr, index]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("scripted", "torch.export"),
        ("no_module", "returned int"),
        ("absent", "has no callable"),
        ("echo", "declare [[inputs]]"),
    ],
)
def test_a_factory_that_gives_no_usable_module_is_refused(function: str, said: str, tmp_path: Path) -> None:
    code = save_factories(tmp_path / "code")
    assert said in refusal(f"factories:{function}", (tmp_path,), code)


def test_a_factory_that_raises_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make():\n    raise ValueError('first\\nsecond')\n")
    assert "ValueError: first" in refusal("broken:make", (tmp_path,), tmp_path)


@pytest.fixture
def importing_meanwhile() -> Iterator[None]:
    """Modules come up at any moment, as when another thread imports: here, whenever rubbish is collected."""
    names: list[str] = []

    class Restless:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            if not over:
                name = f"meanwhile_{id(self)}_{len(names)}"  # another may come in between any two lines
                names.append(name)
                sys.modules[name] = types.ModuleType(name)
                Restless()

    over = False
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    Restless()
    yield
    over = True
    gc.set_threshold(*before)
    gc.collect()
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("importing_meanwhile")
def test_what_was_imported_is_forgotten_though_other_modules_come_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        "from torch import nn, zeros\ndef net():\n    return nn.Linear(1, 1), zeros(1, 1)\n"
    )
    load(Manifest("m", "small:net", code=str(tmp_path)), [tmp_path])
    assert "small" not in sys.modules
