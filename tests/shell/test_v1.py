"""OpenAI's door and the task layer behind it: forms, errors, and answers, over HTTP and gRPC."""

import asyncio
import base64
import io
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import tritonclient.http
from PIL import Image

from dormouse.gateway.app import create_app
from dormouse.gateway.with_tasks import LONG_CHARACTERS, WithTasks
from tests.shell.grpc_caller import Caller, InferRequest
from tests.shell.in_memory import DEPLOYED_S, DEVICE_NS, InMemory, furnished
from tests.shell.running import RunningServer

BODY_LIMIT_BYTES = 1_000_000
TEXTS = ["a dormouse sleeps", "nuts", "all winter and all summer in all"]


def asked(method: str, path: str, node: InMemory | None = None, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with WithTasks(node or furnished(), most_pixels=10_000) as served:
            app = create_app(served, body_limit_bytes=BODY_LIMIT_BYTES)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://dormouse") as client:
                return await client.request(method, path, **options)

    return asyncio.run(run())


def embedded(**body: Any) -> httpx.Response:
    return asked("POST", "/v1/embeddings", json={"model": "embedder", **body})


def classified(model: str, **body: Any) -> httpx.Response:
    return asked("POST", "/v1/classify", json={"model": model, **body})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert answer.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def png(colour: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (6, 5)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def broken(text: str) -> str:
    """Into lines, as ``base64 FILE`` writes it."""
    return "".join(f"{text[at : at + 76]}\r\n" for at in range(0, len(text), 76))


def in_base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def vector(*ids: int) -> list[float]:
    """What the embedder makes of token ids."""
    values = np.array([len(ids), sum(ids), ids[0], ids[-1]], np.float32)
    unit: list[float] = (values / np.linalg.norm(values)).tolist()
    return unit


WANTED = [vector(2, 4, 5, 6, 3), vector(2, 11, 3), vector(2, 7, 8, 9, 7, 13, 12, 7, 3)]


# ------------------------------------------------------------------ models


def test_models_are_listed_and_found_as_openai_does() -> None:
    listed = asked("GET", "/v1/models").json()
    assert listed["object"] == "list"
    models = {model["id"]: model for model in listed["data"]}
    assert models.keys() == furnished().deployed.keys()
    wanted = {
        "id": "embedder",
        "object": "model",
        "created": DEPLOYED_S,
        "owned_by": "dormouse",
        "task": "embedding",
    }
    assert models["embedder"] == asked("GET", "/v1/models/embedder").json() == wanted
    assert models["affine"]["task"] == ""


# ------------------------------------------------------------------ embeddings


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-nothing"}])
def test_texts_are_answered_in_their_order_with_their_tokens_counted(headers: dict[str, str]) -> None:
    body = {"model": "embedder", "input": TEXTS, "user": "somebody", "of_the_future": [1]}
    answer = asked("POST", "/v1/embeddings", json=body, headers=headers).json()
    assert (answer["object"], answer["model"]) == ("list", "embedder")
    assert [(each["object"], each["index"]) for each in answer["data"]] == [("embedding", n) for n in range(3)]
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], WANTED, rtol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 17, "total_tokens": 17}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("nuts", [vector(2, 11, 3)]),
        ([7], [vector(7)]),
        ([2, 11, 3], [vector(2, 11, 3)]),
        ([[5, 6], [7]], [vector(5, 6), vector(7)]),
    ],
)
def test_an_input_is_a_text_or_ids_one_or_several(given: object, wanted: list[list[float]]) -> None:
    answer = embedded(input=given).json()
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], wanted, rtol=1e-6)


def test_base64_holds_little_endian_floats() -> None:
    answer = embedded(input="nuts", encoding_format="base64").json()
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, vector(2, 11, 3), rtol=1e-6)


def test_dimensions_cut_and_lengthen_again_where_the_model_allows() -> None:
    (found,) = (each["embedding"] for each in embedded(input="nuts", dimensions=2).json()["data"])
    whole = np.array(vector(2, 11, 3)[:2])
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole), rtol=1e-6)
    refused = embedded(input="nuts", dimensions=1)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "dimensions"


def test_long_texts_are_tokenized_to_the_same_ids_beside_the_event_loop() -> None:
    many = ["nuts"] * (LONG_CHARACTERS // 4)
    answer = embedded(input=many).json()
    assert answer["usage"]["prompt_tokens"] == 3 * len(many)
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], [vector(2, 11, 3)] * len(many))


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        ({"input": ""}, "input", None, "an empty text"),
        ({"input": []}, "input", None, "input is empty"),
        ({"input": [[]]}, None, None, "text 0 has no tokens"),
        ({"input": ["a", 1]}, "input", None, "mixes texts and token ids"),
        ({"input": [99]}, None, None, "text 0 has a token that is none of the model's 14"),
        ({"input": [-1]}, "input", None, "the request cannot be used"),
        ({"input": {"text": "a"}}, "input", None, "the request cannot be used"),
        ({"input": ["a"] * 2049}, "input", None, "input has 2049 texts, 2048 are the most"),
        ({"input": "a " * 20}, "input", "context_length_exceeded", "text 0 has 22 tokens; the model takes 16 at most"),
        ({"input": [4] * 17}, "input", "context_length_exceeded", "text 0 has 17 tokens"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", None, "the request cannot be used"),
        ({"input": "a", "dimensions": 0}, "dimensions", None, "the request cannot be used"),
        ({}, None, None, "missing required field `input`"),
        ({"input": "a", "model": "looker"}, "model", None, "the model 'looker' embeds nothing"),
        ({"input": "a", "model": "affine"}, "model", None, "the model 'affine' embeds nothing"),
    ],
)
def test_malformed_requests_are_400_and_name_the_field(
    body: dict[str, Any], param: str | None, code: str | None, message: str
) -> None:
    answer = embedded(**body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert message in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"model": "embedder", "input": "\\ud800"}', b"[" * 10_000])
def test_bodies_that_are_no_request_are_400(content: bytes) -> None:
    answer = asked("POST", "/v1/embeddings", content=content)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["nobody", "no/body", "", "x" * 300, "naïve\n"])
def test_unknown_models_are_404_as_openai_says_it(name: str) -> None:
    answers = [embedded(model=name, input="a"), classified(name, input="a")]
    answers += [asked("GET", f"/v1/models/{name}")] if name == "nobody" else []
    for answer in answers:
        assert answer.status_code == 404
        error = error_of(answer)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")


def test_other_failures_have_openais_form_below_v1_and_ours_elsewhere() -> None:
    assert error_of(asked("GET", "/v1/nothing"))["code"] is None
    wrong = asked("GET", "/v1/embeddings")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error_of(wrong)["type"] == "invalid_request_error"
    assert asked("GET", "/v2/nothing").json() == {"error": "no such path: /v2/nothing"}
    large = asked("POST", "/v1/embeddings", content=bytes(BODY_LIMIT_BYTES + 1))
    assert (large.status_code, error_of(large)["code"]) == (413, "request_too_large")
    stranger = asked("GET", "/v1/models", headers={"Origin": "http://elsewhere"})
    assert (stranger.status_code, error_of(stranger)["type"]) == (403, "permission_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_generation_has_its_place_and_says_that_it_comes_later(path: str) -> None:
    answer = asked("POST", path, json={"model": "embedder", "messages": []})
    assert answer.status_code == 501
    assert error_of(answer)["message"].startswith("this server does not generate text yet")


def test_a_function_that_is_not_ready_is_503_with_a_time_to_come_back() -> None:
    node = furnished()
    node.deployed["embedder"].loaded = False
    answer = asked("POST", "/v1/embeddings", node, json={"model": "embedder", "input": TEXTS})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert error_of(answer)["type"] == "server_error"


def test_a_deadline_in_a_header_goes_with_the_request() -> None:
    node = furnished()
    body = {"model": "embedder", "input": "nuts"}
    asked("POST", "/v1/embeddings", node, json=body, headers={"x-llm-d-slo-ttft-ms": "80"})
    assert [inference.slo_ns for inference in node.seen] == [80_000_000]


def test_dimensions_that_cannot_be_are_refused_before_anything_is_computed() -> None:
    node = furnished()
    refused = asked("POST", "/v1/embeddings", node, json={"model": "embedder", "input": "nuts", "dimensions": 1})
    assert (refused.status_code, node.seen) == (400, [])


def test_alike_lengths_share_a_request_and_others_do_not() -> None:
    node = furnished()
    asked("POST", "/v1/embeddings", node, json={"model": "embedder", "input": [*TEXTS, "nuts"]})
    assert sorted(inference.inputs[0].shape for inference in node.seen) == [(1, 8), (1, 16), (2, 8)]


# ------------------------------------------------------------------ classification


def test_texts_get_labels_with_scores() -> None:
    answer = classified("reader", input=["dormouse dormouse", "nuts nuts nuts"], top_k=2).json()
    best = [[each["label"] for each in row["labels"]] for row in answer["data"]]
    assert best == [["dormouse", "sleep"], ["food", "dormouse"]]
    weights = np.exp([2.0, 0.0, 0.0])
    assert answer["data"][0]["labels"][0]["score"] == pytest.approx(weights[0] / weights.sum())
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_pictures_get_labels_with_scores() -> None:
    plain, url = in_base64(png()), f"data:image/png;base64,{in_base64(png((0, 0, 255)))}"
    answer = classified("looker", image=[broken(plain), url]).json()
    assert [row["labels"][0]["label"] for row in answer["data"]] == ["red", "blue"]
    assert [len(row["labels"]) for row in answer["data"]] == [3, 3]
    assert [sum(each["score"] for each in row["labels"]) for row in answer["data"]] == pytest.approx([1, 1])
    assert "usage" not in answer
    assert classified("looker", image=plain, top_k=1).json()["data"] == [
        {"object": "classification", "index": 0, "labels": answer["data"][0]["labels"][:1]}
    ]


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("looker", {"input": "a"}, "takes no texts"),
        ("reader", {"image": "aaaa"}, "takes no pictures"),
        ("reader", {}, "send either input (texts) or image (pictures)"),
        ("reader", {"input": "a", "image": "a"}, "send either input (texts) or image (pictures)"),
        ("embedder", {"input": "a"}, "classifies nothing"),
        ("looker", {"image": "?"}, "image is no base64"),
        ("looker", {"image": []}, "image has 0 pictures, expected 1 to 64"),
        ("looker", {"image": "aaaa"}, "the picture cannot be read: it has no known format"),
        ("looker", {"image": in_base64(png(size=(101, 100)))}, "the picture has 101x100 pixels, 10000 are the limit"),
        ("reader", {"input": "a", "top_k": 0}, "the request cannot be used"),
    ],
)
def test_what_cannot_be_classified_is_400(model: str, body: dict[str, Any], message: str) -> None:
    answer = classified(model, **body)
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


def test_of_several_pictures_the_one_at_fault_is_named() -> None:
    answer = classified("looker", image=[in_base64(png()), in_base64(png()), "aaaa", "aaaa"])
    assert answer.status_code == 400
    assert error_of(answer)["message"].startswith("picture 2: the picture cannot be read: it has no known format")


def test_more_pictures_than_memory_is_wanted_for_are_refused_unread() -> None:
    node = furnished()
    task = node.deployed["looker"].task
    assert task is not None and task.image is not None
    large = msgspec.structs.replace(task.image, height=4000, width=4000)
    node.deployed["looker"].task = msgspec.structs.replace(task, image=large)
    answer = asked("POST", "/v1/classify", node, json={"model": "looker", "image": ["aaaa"] * 2})
    assert error_of(answer)["message"] == "input 'image' has 2 pictures, of this size 1 are the most"


# ------------------------------------------------------------------ clients


def test_the_openai_client_lists_and_embeds(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        assert "embedder" in {model.id for model in client.models.list()}
        assert client.models.retrieve("embedder").created == DEPLOYED_S
        answer = client.embeddings.create(model="embedder", input=TEXTS)
        np.testing.assert_allclose([each.embedding for each in answer.data], WANTED, rtol=1e-6)
        assert answer.usage.prompt_tokens == 17
        plain = client.embeddings.create(model="embedder", input=[[5, 6]], encoding_format="float", dimensions=3)
        assert len(plain.data[0].embedding) == 3
        with pytest.raises(openai.NotFoundError, match="no function") as unknown:
            client.embeddings.create(model="nobody", input="a")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="22 tokens") as too_long:
            client.embeddings.create(model="embedder", input="a " * 20)
        assert too_long.value.code == "context_length_exceeded"


def test_the_asynchronous_openai_client_does_too(server: RunningServer) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            assert "reader" in {model.id async for model in client.models.list()}
            assert (await client.models.retrieve("reader")).id == "reader"
            answers = await asyncio.gather(*(client.embeddings.create(model="embedder", input=text) for text in TEXTS))
            np.testing.assert_allclose([each.data[0].embedding for each in answers], WANTED, rtol=1e-6)

    asyncio.run(talk())


# ------------------------------------------------------------------ V2


def test_metadata_of_v2_tells_of_texts_and_pictures() -> None:
    def named(model: str, kind: str) -> list[str]:
        metadata = asked("GET", f"/v2/models/{model}").json()
        return [f"{each['name']} {each['datatype']}" for each in metadata[kind]]

    own = ["input_ids INT64", "attention_mask INT64"]
    assert named("embedder", "inputs") == [*own, "text BYTES", "tokens BYTES"]
    assert named("embedder", "outputs") == ["embedding FP32", "token_count INT64"]
    assert named("reader", "outputs") == ["logits FP32", "label BYTES", "score FP32", "token_count INT64"]
    assert named("looker", "inputs") == ["pixel_values FP32", "image BYTES"]
    assert named("affine", "inputs") == ["x FP32"]


def test_tritons_http_client_sends_texts_and_pictures(server: RunningServer) -> None:
    client = tritonclient.http.InferenceServerClient(server.address)
    texts = tritonclient.http.InferInput("text", [3], "BYTES")
    texts.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object))
    answer = client.infer("embedder", [texts])
    np.testing.assert_allclose(answer.as_numpy("embedding"), WANTED, rtol=1e-6)
    assert answer.get_response()["parameters"]["dormouse_device_us"] == 2 * DEVICE_NS // 1000
    image = tritonclient.http.InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(np.array([png()], object))
    answer = client.infer("looker", [image], parameters={"top_k": 1})
    assert answer.as_numpy("label").tolist() == [[b"red"]]
    assert answer.as_numpy("logits").shape == (1, 3)
    client.close()


def test_grpc_carries_texts_and_tokens(server: RunningServer) -> None:
    """Triton's own client does so in tests/shell/clients: it and KServe's cannot be in one process."""
    texts = InferRequest(model_name="reader")
    texts.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"nuts nuts")
    for name in ("label", "token_count"):
        texts.outputs.add(name=name)
    tokens = InferRequest(model_name="embedder")
    tokens.inputs.add(name="tokens", datatype="BYTES", shape=[2]).contents.bytes_contents.extend(
        np.array(ids, "<i4").tobytes() for ids in ([5, 6], [7])
    )
    with Caller(server.grpc) as caller:
        label, count = caller.infer(texts).outputs
        assert label.contents.bytes_contents[0] == b"food"
        assert list(count.contents.int64_contents) == [4]
        (embedding,) = caller.infer(tokens).outputs
    np.testing.assert_allclose(embedding.contents.fp32_contents, [*vector(5, 6), *vector(7)], rtol=1e-6)


IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 5]}


def test_tensors_still_do_and_may_get_labels_too() -> None:
    mask = IDS | {"name": "attention_mask", "data": [1, 1]}
    answer = asked("POST", "/v2/models/reader/infer", json={"inputs": [IDS, mask]}).json()
    assert [output["name"] for output in answer["outputs"]] == ["logits"]
    body = {"inputs": [IDS], "outputs": [{"name": "label"}], "parameters": {"top_k": 1}}
    answer = asked("POST", "/v2/models/reader/infer", json=body).json()
    assert answer["outputs"] == [{"name": "label", "datatype": "BYTES", "shape": [1, 1], "data": ["dormouse"]}]


def given(name: str, *data: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": list(data)}


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("reader", {"inputs": []}, "input 'input_ids' is missing; or send text"),
        ("looker", {"inputs": []}, "input 'pixel_values' is missing; or send image"),
        ("reader", {"inputs": [given("text", "a"), IDS]}, "input 'text' stands for all inputs; leave out 'input_ids'"),
        ("reader", {"inputs": [given("text")]}, "input 'text' has 0 elements, expected 1 to 2048"),
        ("reader", {"inputs": [given("tokens", "abc")]}, "input 'tokens': element 0 has 3 bytes"),
        ("reader", {"inputs": [given("text", "a " * 20)]}, "text 0 has 22 tokens"),
        ("reader", {"inputs": [IDS], "outputs": [{"name": "token_count"}]}, "is of texts and tokens only"),
        ("reader", {"inputs": [given("text", "a")], "parameters": {"top_k": 0}}, "top_k is 0, expected at least 1"),
        ("looker", {"inputs": [given("image", "data:image/png,x")]}, "the picture's data URL is not in base64"),
        ("looker", {"inputs": [given("image", "data:image/png;base64,?")]}, "the picture is no base64"),
        ("affine", {"inputs": [given("text", "a")]}, "input 'text' is unknown"),
    ],
)
def test_what_v2_cannot_carry_is_400(model: str, body: dict[str, Any], message: str) -> None:
    answer = asked("POST", f"/v2/models/{model}/infer", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_a_picture_in_json_is_a_data_url() -> None:
    body = {"inputs": [given("image", f"data:image/png;base64,{in_base64(png((0, 255, 0)))}")]}
    answer = asked("POST", "/v2/models/looker/infer", json=body).json()
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["label"][0] == "green"
