"""tritonclient over gRPC, unmodified, sync and asyncio, against a real server.

Not collected by itself: test_grpc_clients runs it in a process of its own, as KServe's client and Triton's define the
same protobuf messages and so cannot live in one.
"""

import asyncio
import queue
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from dormouse.gateway.grpc_messages import INFERENCE, message, methods
from dormouse.gateway.kserve import EXTENSIONS
from tests.shell.running import RunningServer
from tests.shell.samples import ROW, SAMPLES
from tests.shell.tenanted import ACME, MINE, SHARED, THEIRS


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc) as client:
        yield client


def tensor(values: Any, datatype: str, name: str = "x") -> Any:
    given = triton.InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """Status and text of what a Triton client raises."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return caught.value.status(), caught.value.message()


# ------------------------------------------------------------------ sync


@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype_round_trips(client: Any, datatype: str) -> None:
    back = client.infer(f"echo_{datatype}", [tensor(SAMPLES[datatype], datatype)]).as_numpy("y")
    assert back.shape == SAMPLES[datatype].shape
    assert back.tolist() == SAMPLES[datatype].tolist()


def test_outputs_are_asked_for_and_the_id_comes_back(client: Any) -> None:
    outputs = [triton.InferRequestedOutput(name) for name in ("total", "y")]
    result = client.infer("affine", [tensor(ROW, "FP32")], outputs=outputs, request_id="r-1", model_version="1")
    np.testing.assert_array_equal(result.as_numpy("y"), ROW * 2 + 1)
    np.testing.assert_array_equal(result.as_numpy("total"), (ROW * 2 + 1).sum(axis=1, dtype=np.float64))
    assert (result.get_response().id, result.get_response().model_version) == ("r-1", "1")
    assert result.get_response().parameters["dormouse_path"].string_param == "host"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_packed_requests_are_read(client: Any, coding: str) -> None:
    result = client.infer("affine", [tensor(ROW, "FP32")], compression_algorithm=coding)
    np.testing.assert_array_equal(result.as_numpy("y"), ROW * 2 + 1)


def test_the_schedule_and_the_deadline_are_said(client: Any, server: RunningServer) -> None:
    given = [tensor(ROW, "FP32")]
    client.infer("affine", given, priority=7, timeout=250_000, client_timeout=60.0, parameters={"slo_ms": 80})
    (inference,) = server.node.seen
    assert (inference.priority, inference.timeout_ns, inference.slo_ns) == (7, 250_000_000, 80_000_000)


def test_health_metadata_and_configuration_are_read(client: Any, server: RunningServer) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("affine", "1")
    assert list(client.get_server_metadata().extensions) == list(EXTENSIONS)
    assert client.get_model_metadata("affine", as_json=True)["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": ["-1", "3"]}
    ]
    config = client.get_model_config("affine").config
    assert (config.name, config.max_batch_size) == ("affine", 0)
    assert [(each.name, each.data_type, list(each.dims)) for each in config.output] == [
        ("y", model_config_pb2.TYPE_FP32, [-1, 3]),
        ("total", model_config_pb2.TYPE_FP64, [-1]),
    ]
    assert config.parameters["slo_ms"].string_value == "1000"
    server.node.is_ready = False
    assert not client.is_server_ready()


def test_statistics_are_read(client: Any) -> None:
    client.infer("affine", [tensor(ROW, "FP32")])
    (one,) = client.get_inference_statistics("affine").model_stats
    assert one.inference_stats.success.count == 1
    assert one.inference_stats.queue.ns > one.inference_stats.compute_infer.ns > 0


def test_models_are_loaded_unloaded_and_listed(client: Any) -> None:
    for _ in range(2):
        client.unload_model("affine")
    assert not client.is_model_ready("affine")
    states = {model.name: model.state for model in client.get_model_repository_index().models}
    assert states["affine"] == "UNAVAILABLE"
    assert refused(lambda: client.infer("affine", [tensor(ROW, "FP32")]))[0] == "StatusCode.UNAVAILABLE"
    for _ in range(2):
        client.load_model("affine")
    assert client.is_model_ready("affine")


def test_nobody_is_not_found(client: Any) -> None:
    found = "StatusCode.NOT_FOUND"
    for call in (client.is_model_ready, client.get_model_metadata, client.get_model_config, client.load_model):
        assert refused(partial(call, "nobody")) == (found, "no function 'nobody'")
    assert refused(lambda: client.infer("nobody", [tensor(ROW, "FP32")]))[0] == found
    assert refused(lambda: client.infer("affine", [tensor(ROW, "FP32")], model_version="9")) == (
        found,
        "function 'affine' has no version '9'; it has 1",
    )


def test_a_wrong_input_is_an_invalid_argument(client: Any) -> None:
    assert refused(lambda: client.infer("affine", [tensor(np.zeros((1, 4), np.float32), "FP32")])) == (
        "StatusCode.INVALID_ARGUMENT",
        "input 'x': shape is [1, 4], expected [-1, 3] (-1: any)",
    )


def test_a_call_may_be_made_beside_others_and_given_up(client: Any) -> None:
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for number in range(20):
        values = np.full((1, 3), number, np.float32)
        client.async_infer(
            "affine", [tensor(values, "FP32")], lambda result, error: done.put((result, error)), request_id=str(number)
        )
    for _ in range(20):
        result, error = done.get(timeout=30)
        assert error is None
        assert result.as_numpy("y")[0, 0] == int(result.get_response().id) * 2 + 1


def test_a_stream_brings_every_chunk_and_every_failure(client: Any) -> None:
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: done.put((result, error)))
    client.async_stream_infer("running_total", [tensor(np.array([1, 2, 3]), "INT64")], request_id="a")
    client.async_stream_infer("nobody", [tensor(np.array([1]), "INT64")], request_id="b")
    client.async_stream_infer("running_total", [tensor(np.array([5]), "INT64")], request_id="c")
    answers = [done.get(timeout=30) for _ in range(5)]
    client.stop_stream()
    assert [None if result is None else result.as_numpy("y").tolist() for result, _ in answers] == [
        [1],
        [3],
        [6],
        None,
        [5],
    ]
    assert answers[3][1].message() == "no function 'nobody'"
    final = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers[:3]]
    assert final == [False, False, True]


# ------------------------------------------------------------------ asyncio


def with_aio(server: RunningServer, talk: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(server.grpc) as client:
            await talk(client)

    asyncio.run(run())


def test_aio_round_trips_many_at_once(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        async def one(number: int) -> None:
            values = np.full((1, 3), number, np.float32)
            result = await client.infer("affine", [tensor(values, "FP32")], request_id=str(number))
            assert result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("y"), values * 2 + 1)

        await asyncio.gather(*(one(number) for number in range(100)))

    with_aio(server, talk)


@pytest.mark.parametrize("datatype", SAMPLES)
def test_aio_round_trips_every_datatype(server: RunningServer, datatype: str) -> None:
    async def talk(client: Any) -> None:
        result = await client.infer(f"echo_{datatype}", [tensor(SAMPLES[datatype], datatype)])
        assert result.as_numpy("y").tolist() == SAMPLES[datatype].tolist()

    with_aio(server, talk)


def test_aio_runs_the_repository_and_reads_what_there_is(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        await client.unload_model("affine")
        assert not await client.is_model_ready("affine")
        await client.load_model("affine")
        assert await client.is_model_ready("affine")
        assert {model.state for model in (await client.get_model_repository_index()).models} == {"READY"}
        assert (await client.get_model_metadata("affine")).platform == "numpy"
        assert (await client.get_model_config("affine")).config.platform == "numpy"
        assert len((await client.get_inference_statistics()).model_stats) == len(server.node.deployed)
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("nobody", [tensor(ROW, "FP32")])
        assert caught.value.status() == "StatusCode.NOT_FOUND"

    with_aio(server, talk)


def test_aio_streams(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        async def requests() -> Any:
            for number in range(3):
                given = tensor(np.array([1, 2]), "INT64")
                yield {"model_name": "running_total", "inputs": [given], "request_id": str(number)}

        found = [
            (result.get_response().id, result.as_numpy("y").tolist(), error)
            async for result, error in client.stream_infer(requests())
        ]
        assert found == [(str(number), total, None) for number in range(3) for total in ([1], [3])]

    with_aio(server, talk)


# ------------------------------------------------------------------ texts


def test_texts_go_in_and_labels_come_out(client: Any) -> None:
    wanted = [triton.InferRequestedOutput(name) for name in ("label", "score")]
    answer = client.infer("reader", [tensor(np.array([b"nuts nuts"], object), "BYTES", "text")], outputs=wanted)
    assert answer.as_numpy("label")[0, 0] == b"food"
    assert answer.as_numpy("score").shape == (1, 3)


# ------------------------------------------------------------------ the protocol itself


def shape_of(descriptor: Any) -> dict[str, tuple[Any, ...]]:
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.full_name if field.message_type else None,
        )
        for field in descriptor.fields
    }


OURS = {"RepositoryModelLoadResponse", "RepositoryModelUnloadResponse"}
"""Messages that have fields of KServe's, too, where Triton has none."""


def compare(ours: Any, theirs: Any, seen: set[str]) -> None:
    """Every field that we have is theirs, with their number and type."""
    if ours.full_name in seen:
        return
    seen.add(ours.full_name)
    expected = shape_of(theirs)
    for name, shape in shape_of(ours).items():
        if not name.startswith("dormouse_"):
            assert expected[name] == shape, f"{ours.full_name}.{name}"
    for field in ours.fields:
        if field.message_type is not None and not field.name.startswith("dormouse_"):
            compare(field.message_type, theirs.fields_by_name[field.name].message_type, seen)


def test_our_messages_have_tritons_names_numbers_and_types() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    seen: set[str] = set()
    for method in methods(INFERENCE):
        other = theirs[method.name]
        assert (other.client_streaming, other.server_streaming) == (method.streams, method.streams)
        compare(method.request.DESCRIPTOR, other.input_type, seen)
        if method.response.DESCRIPTOR.name not in OURS:
            compare(method.response.DESCRIPTOR, other.output_type, seen)
    assert len(seen) > 40
    types = message("ModelInput").DESCRIPTOR.fields_by_name["data_type"].enum_type
    assert {value.name: value.number for value in types.values} == dict(model_config_pb2.DataType.items())


# ------------------------------------------------------------------ keys


def test_a_key_goes_in_headers(tenanted_server: RunningServer) -> None:
    headers = {"authorization": f"Bearer {ACME}"}
    with triton.InferenceServerClient(tenanted_server.grpc) as client:
        assert client.is_server_ready()
        assert refused(lambda: client.infer(MINE, [tensor(ROW, "FP32")]))[0] == "StatusCode.UNAUTHENTICATED"
        back = client.infer(MINE, [tensor(ROW, "FP32")], headers=headers).as_numpy("y")
        np.testing.assert_array_equal(back, ROW * 2 + 1)
        index = client.get_model_repository_index(headers=headers, as_json=True)
        assert {model["name"] for model in index["models"]} == {MINE, SHARED}
        assert refused(lambda: client.is_model_ready(THEIRS, headers=headers))[0] == "StatusCode.NOT_FOUND"
        assert refused(lambda: client.unload_model(MINE, headers=headers))[0] == "StatusCode.PERMISSION_DENIED"

        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
        client.async_stream_infer(MINE, [tensor(ROW, "FP32")])
        client.async_stream_infer(THEIRS, [tensor(ROW, "FP32")])
        result, error = answers.get(timeout=30)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), ROW * 2 + 1)
        assert answers.get(timeout=30)[1].message() == f"no function {THEIRS!r}"
        client.stop_stream()


def test_aio_a_key_goes_in_headers(tenanted_server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        result = await client.infer(MINE, [tensor(ROW, "FP32")], headers={"x-api-key": ACME})
        np.testing.assert_array_equal(result.as_numpy("y"), ROW * 2 + 1)
        with pytest.raises(InferenceServerException, match="no function"):
            await client.infer(THEIRS, [tensor(ROW, "FP32")], headers={"x-api-key": ACME})

    with_aio(tenanted_server, talk)
