"""The gRPC door against a real server: both forms of tensors, status codes, deadlines, streams, and clients that go."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from dormouse.errors import ConfigurationFault, DormouseError
from dormouse.gateway.grpc_calls import LONGEST_DETAILS, STATUS
from dormouse.gateway.grpc_form import FIELDS, Terms
from dormouse.gateway.grpc_messages import HEALTH, INFERENCE
from dormouse.gateway.grpc_server import GrpcServer
from dormouse.gateway.grpc_stream import MOST_AT_ONCE, Stream
from tests.shell.grpc_caller import Caller, InferRequest, Refused, raw_request, total_request, typed_request
from tests.shell.in_memory import ENDED_MS, furnished
from tests.shell.running import BODY_LIMIT_BYTES, RunningServer
from tests.shell.samples import ROW, SAMPLES


@pytest.fixture
def caller(server: RunningServer) -> Iterator[Caller]:
    with Caller(server.grpc) as caller:
        yield caller


def raw_bytes(values: Any, datatype: str) -> bytes:
    if datatype != "BYTES":
        data: bytes = values.tobytes()
        return data
    return b"".join(struct.pack("<I", len(text)) + text for text in values.reshape(-1).tolist())


# ------------------------------------------------------------------ tensors


@pytest.mark.parametrize("datatype", SAMPLES)
def test_raw_bytes_go_in_and_come_out_for_every_datatype(caller: Caller, datatype: str) -> None:
    data = raw_bytes(SAMPLES[datatype], datatype)
    request = InferRequest(model_name=f"echo_{datatype}", id="7", raw_input_contents=[data])
    request.inputs.add(name="x", datatype=datatype, shape=(1, 2))
    answer = caller.infer(request)
    assert (answer.model_name, answer.model_version, answer.id) == (f"echo_{datatype}", "1", "7")
    assert list(answer.raw_output_contents) == [data]
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", datatype, [1, 2])
    assert not output.HasField("contents")


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_contents_go_in_and_come_out_for_every_datatype_that_has_them(caller: Caller, datatype: str) -> None:
    values, field = SAMPLES[datatype].reshape(-1).tolist(), FIELDS[datatype][0]
    answer = caller.infer(typed_request(f"echo_{datatype}", datatype, (1, 2), field, values))
    assert list(getattr(answer.outputs[0].contents, field)) == values
    assert not answer.raw_output_contents


@pytest.mark.parametrize("raw", [True, False])
def test_a_parameter_says_how_the_answer_comes(caller: Caller, raw: bool) -> None:
    typed = typed_request("affine", "FP32", ROW.shape, "fp32_contents", ROW.reshape(-1))
    for request in (typed, raw_request("affine", "FP32", ROW)):
        request.parameters["binary_data_output"].bool_param = raw
        answer = caller.infer(request)
        if raw:
            assert answer.raw_output_contents[0] == (ROW * 2 + 1).tobytes()
        else:
            assert list(answer.outputs[0].contents.fp32_contents) == (ROW * 2 + 1).reshape(-1).tolist()
        assert len(answer.raw_output_contents) == (2 if raw else 0)


def test_outputs_come_in_the_order_asked_for_with_our_parameters(caller: Caller) -> None:
    request = raw_request("affine", "FP32", ROW)
    for name in ("total", "y"):
        request.outputs.add(name=name)
    answer = caller.infer(request)
    assert [output.name for output in answer.outputs] == ["total", "y"]
    assert answer.raw_output_contents[0] == (ROW * 2 + 1).sum(axis=1, dtype=np.float64).tobytes()
    assert answer.parameters["dormouse_path"].string_param == "host"
    assert answer.parameters["dormouse_queued_us"].int64_param == 1500


def test_an_empty_tensor_goes_either_way(caller: Caller) -> None:
    empty = np.zeros((0, 3), np.float32)
    assert list(caller.infer(raw_request("affine", "FP32", empty)).outputs[0].shape) == [0, 3]
    assert list(caller.infer(typed_request("affine", "FP32", (0, 3), "fp32_contents", [])).outputs[0].shape) == [0, 3]


def test_the_schedule_is_in_the_parameters_and_the_deadline_counts_too(caller: Caller, server: RunningServer) -> None:
    request = raw_request("affine", "FP32", ROW)
    request.parameters["priority"].uint64_param = 7
    request.parameters["timeout"].int64_param = 250_000
    request.parameters["slo_ms"].double_param = 80.5
    caller.infer(request)
    caller.infer(raw_request("affine", "FP32", ROW), timeout=20)
    caller.infer(raw_request("affine", "FP32", ROW), timeout=None)
    first, second, third = server.node.seen
    assert (first.priority, first.timeout_ns, first.slo_ns) == (7, 250_000_000, 80_500_000)
    assert second.timeout_ns is not None
    assert 10 * 10**9 < second.timeout_ns < 21 * 10**9  # the wire rounds it up a little
    assert third.timeout_ns is None


# ------------------------------------------------------------------ complaints


def changed(change: Callable[[Any], object]) -> Any:
    request = raw_request("affine", "FP32", ROW)
    change(request)
    return request


def _int_contents(request: Any) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.int_contents.extend([1] * 6)


def _too_few(request: Any) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend([1.0])


def _flag(request: Any) -> None:
    request.parameters["binary_data_output"].string_param = "yes"


def _parameter(where: str, name: str) -> Callable[[Any], object]:
    def change(request: Any) -> None:
        if where == "outputs":
            request.outputs.add(name="y")
        getattr(request, where)[0].parameters[name].int64_param = 1

    return change


BAD: dict[str, tuple[Callable[[Any], object], str]] = {
    "raw for nobody": (
        lambda request: request.raw_input_contents.append(b""),
        "raw_input_contents has 2 entries for 1 inputs; send one for each, or none",
    ),
    "raw and typed": (
        lambda request: request.inputs[0].contents.fp32_contents.append(1),
        "input 'x': has contents beside raw_input_contents; send one or the other",
    ),
    "too few bytes": (
        lambda request: request.raw_input_contents.__setitem__(0, b"1234"),
        "input 'x': binary data has 4 bytes, its shape and FP32 take 24",
    ),
    "the wrong field": (_int_contents, "input 'x': has int_contents, FP32 takes fp32_contents"),
    "too few elements": (_too_few, "input 'x': contents has 1 elements, its shape takes 6"),
    "a datatype without end": (lambda request: setattr(request.inputs[0], "datatype", "F" * 10**6), "input 'x': datat"),
    "a name without end": (lambda request: setattr(request.inputs[0], "name", "x" * 10**6), "input 'xxx"),
    "an output without end": (lambda request: request.outputs.add(name="x" * 10**6), "output 'xxx"),
    "dimensions without end": (lambda request: request.inputs[0].shape.extend([1] * 99), "input 'x': shape has 101"),
    "no flag": (_flag, "parameter: binary_data_output is 'yes', expected true or false"),
    "shared memory": (_parameter("inputs", "shared_memory_region"), "input 'x': shared memory is not supported"),
    "classification": (_parameter("outputs", "classification"), "output 'y': the classification extension"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_an_invalid_argument_in_one_line(caller: Caller, case: str) -> None:
    change, text = BAD[case]
    with pytest.raises(Refused) as refused:
        caller.infer(changed(change))
    assert refused.value.status == "INVALID_ARGUMENT"
    assert refused.value.text.startswith(text)
    assert len(refused.value.text) < 500
    assert "\n" not in refused.value.text


@pytest.mark.parametrize(("datatype", "value"), [("INT8", 128), ("INT8", -129), ("INT16", 2**15), ("UINT8", 256)])
def test_a_value_that_its_datatype_does_not_hold_is_refused(caller: Caller, datatype: str, value: int) -> None:
    with pytest.raises(Refused, match=f"INVALID_ARGUMENT: input 'x': contents has a value out of range for {datatype}"):
        caller.infer(typed_request(f"echo_{datatype}", datatype, (1, 1), FIELDS[datatype][0], [value]))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_pointed_to_raw_bytes(caller: Caller, datatype: str) -> None:
    with pytest.raises(Refused, match=f"{datatype} has no typed contents; send it in raw_input_contents"):
        caller.infer(typed_request(f"echo_{datatype}", datatype, (1, 1), "fp32_contents", [1.0]))


def test_what_is_no_message_is_an_invalid_argument(caller: Caller) -> None:
    with pytest.raises(Refused, match=r"INVALID_ARGUMENT: the message is no valid inference\.ModelInferRequest"):
        caller.send("/inference.GRPCInferenceService/ModelInfer", b"\xff\xff")


@pytest.mark.parametrize(
    ("word", "status", "text"),
    [
        (b"bug", "INTERNAL", "internal error: ZeroDivisionError; the server's log has the details"),
        (b"busy", "UNAVAILABLE", "function 'fault' has 256 requests waiting"),
        (b"late", "DEADLINE_EXCEEDED", "the request took longer than its timeout of 5 ms"),
        (b"raised", "INTERNAL", "function 'fault' raised ValueError: no"),
    ],
)
def test_failures_have_the_words_that_http_has(caller: Caller, word: bytes, status: str, text: str) -> None:
    with pytest.raises(Refused) as refused:
        caller.infer(typed_request("fault", "BYTES", (1,), "bytes_contents", [word]))
    assert (refused.value.status, refused.value.text) == (status, text)
    assert refused.value.trailing.get("retry-after") == ("3" if word == b"busy" else None)


def test_every_status_of_an_error_has_a_code_of_its_own_here(caller: Caller) -> None:

    def kinds(of: type[DormouseError]) -> set[int]:
        return {of.status}.union(*(kinds(kind) for kind in of.__subclasses__()))

    assert kinds(DormouseError) <= STATUS.keys()
    with pytest.raises(Refused, match="UNIMPLEMENTED"):
        caller.send("/inference.GRPCInferenceService/SystemSharedMemoryStatus", b"")


def test_a_name_of_a_megabyte_is_not_repeated_whole(caller: Caller) -> None:
    with pytest.raises(Refused) as refused:
        caller.infer(raw_request("n" * 900_000, "FP32", ROW))
    assert refused.value.status == "NOT_FOUND"
    assert len(refused.value.text) <= LONGEST_DETAILS


# ------------------------------------------------------------------ the other calls


def test_health_is_told_in_both_services(caller: Caller, server: RunningServer) -> None:
    check = f"/{HEALTH}/Check"
    assert caller.ask("ServerLive").live
    assert caller.ask("ServerReady").ready
    assert caller.ask("ModelReady", name="affine", version="1").ready
    assert [caller.ask(check, service=name).status for name in ("", "affine")] == [1, 1]
    server.node.is_ready = False
    server.node.deployed["affine"].loaded = False
    assert not caller.ask("ServerReady").ready
    assert not caller.ask("ModelReady", name="affine").ready
    assert [caller.ask(check, service=name).status for name in ("", "affine")] == [2, 2]
    for call, fields in (("ModelReady", {"name": "nobody"}), (check, {"service": "nobody"})):
        with pytest.raises(Refused, match="NOT_FOUND: no function 'nobody'"):
            caller.ask(call, **fields)


def test_statistics_are_of_one_or_of_all(caller: Caller, server: RunningServer) -> None:
    caller.infer(raw_request("affine", "FP32", ROW))
    (one,) = caller.ask("ModelStatistics", name="affine").model_stats
    assert (one.inference_count, one.execution_count, one.last_inference) == (1, 1, ENDED_MS)
    assert one.inference_stats.success.count == one.dormouse_paths["host"].count == 1
    assert len(caller.ask("ModelStatistics").model_stats) == len(server.node.deployed)
    with pytest.raises(Refused, match="INVALID_ARGUMENT"):
        caller.ask("ModelStatistics", version="1")


@pytest.mark.parametrize("field", ["model_name", "repository_name"])
def test_load_and_unload_find_the_name_in_tritons_place_and_in_kserves(
    caller: Caller, server: RunningServer, field: str
) -> None:
    for call, loaded in (("RepositoryModelUnload", False), ("RepositoryModelLoad", True)):
        for _ in range(2):
            assert caller.ask(call, **{field: "affine"}).model_name == "affine"
        assert server.node.deployed["affine"].loaded == loaded
        assert [model.state for model in caller.ask("RepositoryIndex").models if model.name == "affine"] == [
            "READY" if loaded else "UNAVAILABLE"
        ]
        ready = {model.name for model in caller.ask("RepositoryIndex", ready=True).models}
        assert ("affine" in ready) == loaded


def test_load_refuses_what_it_does_not_do(caller: Caller) -> None:
    with pytest.raises(Refused, match="INVALID_ARGUMENT: parameter 'config' is not supported by load"):
        caller.ask("RepositoryModelLoad", model_name="affine", parameters={"config": {"string_param": "{}"}})


# ------------------------------------------------------------------ streams


def test_a_stream_is_answered_in_order_and_says_which_chunk_is_last(caller: Caller) -> None:
    wires = [total_request(3, id=str(number)).SerializeToString() for number in range(2 * MOST_AT_ONCE)]
    answers = [each.infer_response for each in caller.stream(wires)]
    assert [answer.id for answer in answers] == [str(n) for n in range(2 * MOST_AT_ONCE) for _ in range(3)]
    assert [np.frombuffer(answer.raw_output_contents[0], "<i8")[0] for answer in answers[:3]] == [1, 3, 6]
    assert [answer.parameters["triton_final_response"].bool_param for answer in answers[:3]] == [False, False, True]


def test_one_bad_request_does_not_end_a_stream(caller: Caller) -> None:
    wires = [b"\xff", total_request(1, id="a").SerializeToString(), InferRequest(id="b").SerializeToString()]
    bug = typed_request("fault", "BYTES", (1,), "bytes_contents", [b"bug"], id="c").SerializeToString()
    answers = list(caller.stream([*wires, bug, wires[1]]))
    assert [bool(answer.error_message) for answer in answers] == [True, False, True, True, False]
    assert [answer.infer_response.id for answer in answers] == ["", "a", "b", "c", "a"]
    assert answers[2].error_message == "no function ''"
    assert answers[3].error_message.startswith("internal error: ZeroDivisionError")


def test_an_empty_stream_is_fine(caller: Caller) -> None:
    assert list(caller.stream([])) == []


def test_the_requests_of_a_stream_are_served_side_by_side(caller: Caller, server: RunningServer) -> None:
    """The second is taken up while the first one is held back."""
    hold(server)
    both = threading.Event()

    def wires() -> Iterator[bytes]:
        yield total_request(1, id="a").SerializeToString()
        yield total_request(1, id="b").SerializeToString()
        both.wait(30)

    answers = caller.stream(wires())
    first: list[Any] = []
    reader = threading.Thread(target=lambda: first.append(next(answers)))
    reader.start()
    wait_there(server, times(2, server.node.arrivals))
    release(server)
    reader.join()
    both.set()
    assert [each.infer_response.id for each in (*first, *answers)] == ["a", "b"]


# ------------------------------------------------------------------ clients that go away, and limits


def wait_there(server: RunningServer, work: Coroutine[None, None, None]) -> None:
    asyncio.run_coroutine_threadsafe(work, server.loop).result(timeout=30)


def hold(server: RunningServer) -> None:
    async def make() -> None:
        node = server.node
        node.gate, node.arrivals, node.departures = asyncio.Event(), asyncio.Semaphore(0), asyncio.Semaphore(0)

    wait_there(server, make())


def release(server: RunningServer) -> None:
    assert server.node.gate is not None
    server.loop.call_soon_threadsafe(server.node.gate.set)


async def times(count: int, happening: asyncio.Semaphore | None) -> None:
    assert happening is not None
    for _ in range(count):
        await happening.acquire()


def test_cancelling_a_call_cancels_its_request(caller: Caller, server: RunningServer) -> None:
    hold(server)
    call = caller.begin(total_request(1))
    wait_there(server, times(1, server.node.arrivals))
    call.cancel()
    wait_there(server, times(1, server.node.departures))
    assert server.node.cancelled == 1


def test_closing_the_connection_cancels_all_of_a_stream(server: RunningServer) -> None:
    hold(server)
    ended = threading.Event()
    refusals: list[Refused] = []

    def wires() -> Iterator[bytes]:
        yield from (total_request(1).SerializeToString() for _ in range(3))
        ended.wait(30)

    with Caller(server.grpc) as caller:
        reader = threading.Thread(target=lambda: refusals.append(refused(caller.stream(wires()))))
        reader.start()
        wait_there(server, times(3, server.node.arrivals))
    wait_there(server, times(3, server.node.departures))
    ended.set()
    reader.join()
    assert [refusal.status for refusal in refusals] == ["CANCELLED"]


def refused(answers: Iterator[Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        next(answers)
    return caught.value


def test_a_deadline_that_passes_is_told_and_cancels_the_request(caller: Caller, server: RunningServer) -> None:
    hold(server)
    with pytest.raises(Refused, match="DEADLINE_EXCEEDED"):
        caller.infer(total_request(1), timeout=0.2)
    wait_there(server, times(1, server.node.departures))


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_message_over_the_limit_is_refused_packed_or_not(caller: Caller, compression: Any) -> None:
    large = np.zeros((BODY_LIMIT_BYTES // 12 + 1, 3), np.float32)
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
        caller.infer(raw_request("affine", "FP32", large), compression=compression)
    fits = np.zeros((BODY_LIMIT_BYTES // 12 - 10, 3), np.float32)
    assert caller.infer(raw_request("affine", "FP32", fits), compression=compression).raw_output_contents


def test_metadata_without_end_is_refused(caller: Caller) -> None:
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
        caller.infer(raw_request("affine", "FP32", ROW), metadata=(("x-large", "a" * 100_000),))
    assert caller.ask("ServerLive").live


def test_streams_that_say_nothing_stop_nobody_and_end_with_their_clients(server: RunningServer) -> None:
    ended = threading.Event()

    def silence() -> Iterator[bytes]:
        ended.wait(30)
        yield from ()

    with Caller(server.grpc) as silent, Caller(server.grpc) as caller:
        streams = [silent.open_stream(silence()) for _ in range(50)]
        assert caller.infer(raw_request("affine", "FP32", ROW)).raw_output_contents
        for stream in streams:
            stream.cancel()
        ended.set()
        assert caller.ask("ServerLive").live


def test_a_client_that_does_not_read_holds_back_its_own_stream_only() -> None:
    """Neither are its requests read without end, nor chunks made."""
    node, read, written = furnished(), 0, 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield total_request(100).SerializeToString()

    async def write(_: bytes) -> None:
        nonlocal written
        written += 1
        await asyncio.Event().wait()

    async def run() -> None:
        stream = asyncio.create_task(Stream(node, Terms, contextlib.nullcontext, write).answer(endless()))
        for _ in range(10_000):  # turns of the loop: far more than it takes to read thousands
            await asyncio.sleep(0)
        stream.cancel()
        await asyncio.wait([stream])

    asyncio.run(run())
    assert written == 1
    assert read <= MOST_AT_ONCE + 2
    assert node.cancelled == len(node.seen) > 0


def test_more_calls_than_there_may_be_are_refused() -> None:
    async def run() -> None:
        node = furnished()
        node.gate, node.arrivals = asyncio.Event(), asyncio.Semaphore(0)
        server = GrpcServer(BODY_LIMIT_BYTES, most_calls=3)
        server.bind("127.0.0.1", 0)
        stop = asyncio.Event()
        async with server.serving(node, stop=stop, hurry=asyncio.Event(), grace_s=30):
            with Caller(server.address) as caller:
                calls = [caller.begin(total_request(1)) for _ in range(3)]
                await times(3, node.arrivals)
                with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
                    await asyncio.to_thread(caller.ask, "ServerLive")
                node.gate.set()
                for call in calls:
                    await asyncio.to_thread(call.result, timeout=30)
                assert (await asyncio.to_thread(caller.ask, "ServerLive")).live
            stop.set()

    asyncio.run(run())


def test_more_connections_than_there_may_be_are_turned_away_and_the_rest_are_served() -> None:
    async def run() -> None:
        server = GrpcServer(BODY_LIMIT_BYTES, most_connections=2)
        server.bind("127.0.0.1", 0)
        stop = asyncio.Event()
        async with server.serving(furnished(), stop=stop, hurry=asyncio.Event(), grace_s=30):
            with Caller(server.address) as first:
                with Caller(server.address) as second:
                    for caller in (first, second):
                        assert (await asyncio.to_thread(caller.ask, "ServerLive")).live
                    with Caller(server.address) as third, pytest.raises(Refused, match="UNAVAILABLE"):
                        await asyncio.to_thread(third.ask, "ServerLive")
                    assert (await asyncio.to_thread(second.ask, "ServerLive")).live
                with Caller(server.address) as fourth:
                    path = f"/{INFERENCE}/ServerLive"
                    await asyncio.to_thread(fourth.send, path, b"", wait_for_ready=True)
            stop.set()

    asyncio.run(run())


def test_a_port_that_somebody_has_is_one_clear_line() -> None:
    async def run() -> None:
        first, second = GrpcServer(BODY_LIMIT_BYTES), GrpcServer(BODY_LIMIT_BYTES)
        first.bind("127.0.0.1", 0)
        with pytest.raises(ConfigurationFault, match=r"cannot listen on 127\.0\.0\.1 port"):
            second.bind("127.0.0.1", int(first.address.rpartition(":")[2]))

    asyncio.run(run())


def test_thousands_of_calls_at_once_are_all_answered(caller: Caller) -> None:
    calls = [caller.begin(raw_request("affine", "FP32", ROW, id=str(number))) for number in range(3_000)]
    assert all(call.result(timeout=30) for call in calls)


def test_half_open_and_silent_connections_stop_nobody(caller: Caller, server: RunningServer) -> None:
    host, _, port = server.grpc.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    beginnings = [b"", preface[:9], preface, b"GET / HTTP/1.1\r\n\r\n", bytes(100)]
    connections = [socket.create_connection((host, int(port))) for _ in range(50)]
    try:
        for number, connection in enumerate(connections):
            connection.sendall(beginnings[number % len(beginnings)])
        assert caller.infer(raw_request("affine", "FP32", ROW)).raw_output_contents
    finally:
        for connection in connections:
            connection.close()
    assert caller.ask("ServerLive").live
