"""Unmodified V2 clients against a real server: tritonclient (HTTP, sync and asyncio) and KServe's REST client."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import httpx
import kserve
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from dormouse.gateway.kserve import EXTENSIONS
from tests.shell.running import RunningServer
from tests.shell.samples import ROW, SAMPLES


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(values: Any, datatype: str, *, binary: bool = True) -> Any:
    given = triton.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values, binary_data=binary)
    return given


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """Status and text of what a Triton client raises."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return caught.value.status(), caught.value.message()


# ------------------------------------------------------------------ tritonclient


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_triton_gets_the_right_numbers_in_every_form(client: Any, binary_in: bool, binary_out: bool) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("total", "y")]
    result = client.infer("affine", [tensor(ROW, "FP32", binary=binary_in)], outputs=outputs, request_id="r-1")
    np.testing.assert_array_equal(result.as_numpy("y"), ROW * 2 + 1)
    np.testing.assert_array_equal(result.as_numpy("total"), (ROW * 2 + 1).sum(axis=1, dtype=np.float64))
    answer = result.get_response()
    assert answer["id"] == "r-1"
    assert answer["model_version"] == "1"
    assert answer["parameters"] == {"dormouse_path": "host", "dormouse_queued_us": 1500, "dormouse_device_us": 2}
    assert [output["name"] for output in answer["outputs"]] == ["total", "y"]


@pytest.mark.parametrize("datatype", SAMPLES)
def test_triton_round_trips_every_datatype_as_binary(client: Any, datatype: str) -> None:
    result = client.infer(f"echo_{datatype}", [tensor(SAMPLES[datatype], datatype)])
    back = result.as_numpy("y")
    assert back.shape == SAMPLES[datatype].shape
    assert back.tolist() == SAMPLES[datatype].tolist()


@pytest.mark.parametrize("datatype", sorted(SAMPLES.keys() - {"FP16", "BF16", "BYTES"}))
def test_triton_round_trips_every_json_datatype_as_json(client: Any, datatype: str) -> None:
    outputs = [triton.InferRequestedOutput("y", binary_data=False)]
    result = client.infer(f"echo_{datatype}", [tensor(SAMPLES[datatype], datatype, binary=False)], outputs=outputs)
    assert result.as_numpy("y").tolist() == SAMPLES[datatype].tolist()


@pytest.mark.parametrize("binary", [True, False])
def test_triton_sends_and_gets_texts(client: Any, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    texts = np.array([["dormouse"], [""], ["a b"]], dtype=np.object_)
    result = client.infer("upper", [tensor(texts, "BYTES", binary=binary)], outputs=outputs)
    back = result.as_numpy("y").reshape(-1).tolist()
    assert [text.decode() if isinstance(text, bytes) else text for text in back] == ["DORMOUSE", "", "A B"]


@pytest.mark.parametrize("values", [np.zeros((0, 3), np.float32), np.zeros((300, 3), np.float32)])
def test_triton_sends_and_gets_empty_and_large_tensors(client: Any, values: Any) -> None:
    np.testing.assert_array_equal(client.infer("affine", [tensor(values, "FP32")]).as_numpy("y"), values * 2 + 1)


@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("rows", [1, 20_000])
def test_triton_compresses_both_ways(
    client: Any, request_coding: str | None, response_coding: str | None, rows: int
) -> None:
    values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    result = client.infer(
        "affine",
        [tensor(values, "FP32")],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=response_coding,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), values * 2 + 1)


def test_triton_streams_nothing_and_gets_the_last_chunk(client: Any) -> None:
    result = client.infer("running_total", [tensor(np.array([1, 2, 3]), "INT64")])
    assert result.as_numpy("y").tolist() == [6]


def test_triton_may_say_the_schedule(client: Any, server: RunningServer) -> None:
    client.infer("affine", [tensor(ROW, "FP32")], priority=7, timeout=250_000, parameters={"slo_ms": 80.5, "mine": "x"})
    (inference,) = server.node.seen
    assert (inference.priority, inference.timeout_ns, inference.slo_ns) == (7, 250_000_000, 80_500_000)


def test_triton_reads_health_and_metadata(client: Any, server: RunningServer) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["extensions"] == list(EXTENSIONS)
    assert client.get_model_metadata("affine") == client.get_model_metadata("affine", "1")
    assert client.get_model_metadata("affine") == {
        "name": "affine",
        "versions": ["1"],
        "platform": "numpy",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "total", "datatype": "FP64", "shape": [-1]},
        ],
    }
    server.node.is_ready = False
    assert client.is_server_live()
    assert not client.is_server_ready()


def test_triton_loads_unloads_and_lists(client: Any) -> None:
    client.unload_model("affine")
    client.unload_model("affine")
    assert not client.is_model_ready("affine")
    assert {"name": "affine", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in (
        client.get_model_repository_index()
    )
    assert refused(lambda: client.infer("affine", [tensor(ROW, "FP32")]))[0] == "503"
    client.load_model("affine")
    client.load_model("affine")
    assert client.is_model_ready("affine")
    assert client.is_model_ready("affine", "1")
    client.infer("affine", [tensor(ROW, "FP32")], model_version="1")


@pytest.mark.parametrize("model", ["nobody", "weird name/with?everything"])
def test_triton_hears_of_unknown_models(client: Any, model: str) -> None:
    assert not client.is_model_ready(model)
    for call in (client.get_model_metadata, client.load_model, client.unload_model):
        status, text = refused(partial(call, model))
        assert status == "404"
        assert text.startswith("no ")
    assert refused(lambda: client.infer(model, [tensor(ROW, "FP32")]))[0] == "404"


def test_triton_hears_of_an_unknown_version(client: Any) -> None:
    assert not client.is_model_ready("affine", "9")
    assert refused(lambda: client.infer("affine", [tensor(ROW, "FP32")], model_version="9")) == (
        "404",
        "function 'affine' has no version '9'; it has 1",
    )


@pytest.mark.parametrize(
    ("word", "status", "text"),
    [
        (b"bug", "500", "internal error: ZeroDivisionError; the server's log has the details"),
        (b"busy", "503", "function 'fault' has 256 requests waiting"),
        (b"late", "504", "the request took longer than its timeout of 5 ms"),
        (b"raised", "500", "function 'fault' raised ValueError: no"),
    ],
)
def test_triton_hears_our_words_when_a_request_fails(client: Any, word: bytes, status: str, text: str) -> None:
    assert refused(lambda: client.infer("fault", [tensor(np.array([word], np.object_), "BYTES")])) == (status, text)


def test_triton_hears_which_input_is_wrong(client: Any) -> None:
    status, text = refused(lambda: client.infer("affine", [tensor(np.zeros((1, 4), np.float32), "FP32")]))
    assert (status, text) == ("400", "input 'x': shape is [1, 4], expected [-1, 3] (-1: any)")


def test_triton_hears_that_classification_is_not_ours(client: Any) -> None:
    outputs = [triton.InferRequestedOutput("y", class_count=2)]
    status, text = refused(lambda: client.infer("affine", [tensor(ROW, "FP32")], outputs=outputs))
    assert (status, text.partition(":")[0]) == ("400", "output 'y'")


def test_triton_hears_that_load_takes_no_override(client: Any) -> None:
    assert refused(lambda: client.load_model("affine", config='{"max_batch_size": 4}'))[0] == "400"


def test_triton_hears_that_a_body_is_too_large(client: Any) -> None:
    values = np.zeros((100_000, 3), np.float32)
    for coding in (None, "gzip"):  # in sight, and as a bomb
        status, text = refused(
            partial(client.infer, "affine", [tensor(values, "FP32")], request_compression_algorithm=coding)
        )
        assert status == "413"
        assert "1048576 bytes" in text


# ------------------------------------------------------------------ tritonclient, asyncio


def with_triton_aio(server: RunningServer, talk: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(server.address) as client:
            await talk(client)

    asyncio.run(run())


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16", "BYTES"])
def test_triton_aio_round_trips(server: RunningServer, coding: str | None, datatype: str) -> None:
    async def talk(client: Any) -> None:
        result = await client.infer(
            f"echo_{datatype}",
            [tensor(SAMPLES[datatype], datatype)],
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        assert result.as_numpy("y").tolist() == SAMPLES[datatype].tolist()

    with_triton_aio(server, talk)


def test_triton_aio_runs_the_repository(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        await client.unload_model("affine")
        assert not await client.is_model_ready("affine")
        await client.load_model("affine")
        assert await client.is_model_ready("affine")
        assert {entry["state"] for entry in await client.get_model_repository_index()} == {"READY"}
        assert (await client.get_model_metadata("affine"))["platform"] == "numpy"
        assert (await client.get_server_metadata())["name"] == "dormouse"

    with_triton_aio(server, talk)


def test_triton_aio_hears_errors(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("nobody", [tensor(ROW, "FP32")])
        assert (caught.value.status(), caught.value.message()) == ("404", "no function 'nobody'")

    with_triton_aio(server, talk)


def test_many_triton_aio_requests_at_once_get_their_own_answers(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        async def one(number: int) -> None:
            values = np.full((1, 3), number, np.float32)
            result = await client.infer("affine", [tensor(values, "FP32")], request_id=str(number))
            assert result.get_response()["id"] == str(number)
            np.testing.assert_array_equal(result.as_numpy("y"), values * 2 + 1)

        await asyncio.gather(*(one(number) for number in range(100)))

    with_triton_aio(server, talk)


# ------------------------------------------------------------------ KServe


def with_kserve(server: RunningServer, talk: Callable[[Any, str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with kserve.InferenceRESTClient(
            kserve.inference_client.RESTConfig(protocol="v2", verify=False)
        ) as client:
            await talk(client, server.url)

    asyncio.run(run())


def kserve_request(values: Any, datatype: str, *, binary: bool, **parameters: object) -> Any:
    given = kserve.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values, binary_data=binary)
    return kserve.InferRequest(model_name="any", infer_inputs=[given], request_id="k-1", parameters=parameters or None)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_kserve_gets_the_right_numbers_in_every_form(server: RunningServer, binary_in: bool, binary_out: bool) -> None:
    async def talk(client: Any, url: str) -> None:
        request = kserve_request(ROW, "FP32", binary=binary_in, binary_data_output=binary_out)
        response = await client.infer(url, request, model_name="affine")
        assert response.id == "k-1"
        np.testing.assert_array_equal(response.outputs[0].as_numpy(), ROW * 2 + 1)

    with_kserve(server, talk)


@pytest.mark.parametrize("datatype", ["FP16", "INT64", "BOOL", "FP64"])
def test_kserve_round_trips_as_binary(server: RunningServer, datatype: str) -> None:
    async def talk(client: Any, url: str) -> None:
        request = kserve_request(SAMPLES[datatype], datatype, binary=True, binary_data_output=True)
        response = await client.infer(url, request, model_name=f"echo_{datatype}")
        assert response.outputs[0].as_numpy().tolist() == SAMPLES[datatype].tolist()

    with_kserve(server, talk)


@pytest.mark.parametrize("binary", [True, False])
def test_kserve_sends_and_gets_texts(server: RunningServer, binary: bool) -> None:
    async def talk(client: Any, url: str) -> None:
        texts = np.array([["dormouse"], ["a b"]], dtype=np.object_)
        request = kserve_request(texts, "BYTES", binary=binary, binary_data_output=binary)
        response = await client.infer(url, request, model_name="upper")
        assert response.outputs[0].as_numpy().reshape(-1).tolist() == ["DORMOUSE", "A B"]

    with_kserve(server, talk)


def test_kserve_reads_health_and_readiness(server: RunningServer) -> None:
    async def talk(client: Any, url: str) -> None:
        assert await client.is_server_live(url) is True
        assert await client.is_server_ready(url) is True
        assert await client.is_model_ready(url, "affine")
        assert not await client.is_model_ready(url, "nobody")
        server.node.deployed["affine"].loaded = False
        assert not await client.is_model_ready(url, "affine")

    with_kserve(server, talk)


def test_kserve_hears_our_words(server: RunningServer) -> None:
    async def talk(client: Any, url: str) -> None:
        with pytest.raises(httpx.HTTPStatusError, match="no function 'nobody'"):
            await client.infer(url, kserve_request(ROW, "FP32", binary=True), model_name="nobody")

    with_kserve(server, talk)


# ------------------------------------------------------------------ a client that goes away


def test_closing_the_connection_cancels_the_request(server: RunningServer) -> None:
    async def hold() -> None:
        server.node.gate, server.node.entered, server.node.given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def happened(event: asyncio.Event | None) -> None:
        assert event is not None
        await event.wait()

    def wait_there(work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, server.loop).result(timeout=30)

    wait_there(hold())
    body = b'{"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    head = f"POST /v2/models/running_total/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_there(happened(server.node.entered))
    wait_there(happened(server.node.given_up))
    assert server.node.cancelled == 1
