"""Where V2 servers answer differently: what this one answers, over HTTP and over gRPC alike.

The protocol leaves these cases open, and the servers in use do not agree. Each row names one case.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from dormouse.functions import BatchManifest, Manifest
from dormouse.gateway.kserve import EXTENSIONS
from tests.shell.grpc_caller import Caller, InferRequest, Refused, raw_request
from tests.shell.running import RunningServer

ROWS = np.ones((1, 3), np.float32)
JSON_INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}
INFER = "/v2/models/affine/infer"


@dataclass
class Doors:
    http: httpx.Client
    grpc: Caller
    server: RunningServer

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        return self.http.post(path, content=content, **options)

    def infer(self, *inputs: dict[str, Any], **more: Any) -> int:
        return self.post(INFER, {"inputs": list(inputs), **more}).status_code


@pytest.fixture
def doors(server: RunningServer) -> Iterator[Doors]:
    with httpx.Client(base_url=server.url) as http, Caller(server.grpc) as grpc:
        yield Doors(http, grpc, server)


def status(call: Callable[[], object]) -> str:
    """What a gRPC call ends with."""
    try:
        call()
    except Refused as refusal:
        assert refusal.text
        return refusal.status
    return "OK"


def changed(**tensor: Any) -> Any:
    """The same wrong input over gRPC."""
    request = raw_request("affine", "FP32", ROWS)
    given = request.inputs[0]
    for name, value in tensor.items():
        if name == "shape":
            del given.shape[:]
            given.shape.extend(value)
        elif name == "data":
            request.raw_input_contents[0] = value
        else:
            setattr(given, name, value)
    return request


WRONG_INPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wrong shape": ({"shape": [3], "data": [1, 1, 1]}, {"shape": [3]}),
    "wrong datatype": ({"datatype": "FP64"}, {"datatype": "FP64"}),
    "unknown datatype": ({"datatype": "FLOAT"}, {"datatype": "FLOAT"}),
    "unknown input": ({"name": "q"}, {"name": "q"}),
    "element count and shape differ": ({"data": [1, 1]}, {"data": b"12345678"}),
    "negative shape": ({"shape": [-1, -3]}, {"shape": [-1, -3]}),
}


@pytest.mark.parametrize("row", WRONG_INPUTS)
def test_a_wrong_input_is_the_clients_fault(doors: Doors, row: str) -> None:
    over_http, over_grpc = WRONG_INPUTS[row]
    assert doors.infer({**JSON_INPUT, **over_http}) == 400
    assert status(lambda: doors.grpc.infer(changed(**over_grpc))) == "INVALID_ARGUMENT"


def test_an_input_twice_and_an_unknown_output_are_too(doors: Doors) -> None:
    assert doors.infer(JSON_INPUT, JSON_INPUT) == 400
    assert doors.infer(JSON_INPUT, outputs=[{"name": "q"}]) == 400
    twice = raw_request("affine", "FP32", ROWS)
    twice.inputs.append(twice.inputs[0])
    twice.raw_input_contents.append(twice.raw_input_contents[0])
    assert status(lambda: doors.grpc.infer(twice)) == "INVALID_ARGUMENT"
    unknown = raw_request("affine", "FP32", ROWS)
    unknown.outputs.add(name="q")
    assert status(lambda: doors.grpc.infer(unknown)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"", b"{}"], ids=str)
def test_what_is_no_request_is_the_clients_fault_and_never_ours(doors: Doors, body: bytes) -> None:
    answer = doors.post(INFER, body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert "Traceback" not in answer.text


def test_neither_is_what_is_no_message(doors: Doors) -> None:
    path = "/inference.GRPCInferenceService/ModelInfer"
    assert status(lambda: doors.grpc.send(path, b"\xff")) == "INVALID_ARGUMENT"
    assert status(lambda: doors.grpc.infer(InferRequest(model_name="affine"))) == "INVALID_ARGUMENT"
    assert status(lambda: doors.grpc.send(path, b"")) == "NOT_FOUND", "it names no function"


@pytest.mark.parametrize("length", ["-1", "10000", "x"])
def test_a_header_length_outside_the_body_is_the_clients_fault(doors: Doors, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    assert doors.post(INFER, {"inputs": [JSON_INPUT]}, headers=headers).status_code == 400


@pytest.mark.parametrize("version", ["", "9", "latest"])
def test_who_is_not_there_is_not_found_whatever_is_asked(doors: Doors, version: str) -> None:
    """Also readiness, for which some answer 400, and a version that is no number."""
    name = "affine" if version else "nobody"
    path = f"/v2/models/{name}" + (f"/versions/{version}" if version else "")
    for below in ("", "/ready", "/config", "/stats"):
        assert doors.http.get(path + below).status_code == 404
    assert doors.post(f"{path}/infer", {"inputs": [JSON_INPUT]}).status_code == 404
    for call in ("ModelMetadata", "ModelReady", "ModelConfig", "ModelStatistics"):
        assert status(lambda call=call: doors.grpc.ask(call, name=name, version=version)) == "NOT_FOUND"  # type: ignore[misc]
    asked = raw_request(name, "FP32", ROWS, model_version=version)
    assert status(lambda: doors.grpc.infer(asked)) == "NOT_FOUND"


def test_neither_loading_nor_unloading_finds_nobody(doors: Doors) -> None:
    for verb, call in (("load", "RepositoryModelLoad"), ("unload", "RepositoryModelUnload")):
        assert doors.post(f"/v2/repository/models/nobody/{verb}").status_code == 404
        assert status(lambda call=call: doors.grpc.ask(call, model_name="nobody")) == "NOT_FOUND"  # type: ignore[misc]


def test_unloading_may_be_repeated_and_is_true_when_it_is_answered(doors: Doors) -> None:
    def state() -> tuple[str, str]:
        over_http = {entry["name"]: entry["state"] for entry in doors.post("/v2/repository/index").json()}
        over_grpc = {model.name: model.state for model in doors.grpc.ask("RepositoryIndex").models}
        return over_http["affine"], over_grpc["affine"]

    for _ in range(2):
        assert doors.post("/v2/repository/models/affine/unload").status_code == 200
        assert state() == ("UNAVAILABLE", "UNAVAILABLE")
        assert status(lambda: doors.grpc.ask("RepositoryModelUnload", model_name="affine")) == "OK"
    for _ in range(2):
        assert doors.post("/v2/repository/models/affine/load").status_code == 200
        assert state() == ("READY", "READY")


def test_what_is_unloaded_is_unavailable_and_says_when_to_ask_again(doors: Doors) -> None:
    doors.server.node.deployed["affine"].loaded = False
    answer = doors.post(INFER, {"inputs": [JSON_INPUT]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    with pytest.raises(Refused) as refused:
        doors.grpc.infer(raw_request("affine", "FP32", ROWS))
    assert (refused.value.status, refused.value.trailing["retry-after"]) == ("UNAVAILABLE", "1")
    assert doors.http.get("/v2/models/affine/ready").status_code == 503
    assert not doors.grpc.ask("ModelReady", name="affine").ready


def test_a_server_with_nothing_loaded_is_ready(doors: Doors) -> None:
    for deployed in doors.server.node.deployed.values():
        deployed.loaded = False
    assert doors.http.get("/v2/health/ready").json() == {"ready": True, "live": True}
    assert doors.http.get("/v2/health/live").json() == {"live": True}
    assert doors.grpc.ask("ServerReady").ready
    assert doors.grpc.ask("ServerLive").live


def test_the_server_is_found_with_and_without_a_slash_and_names_what_it_does(doors: Doors) -> None:
    for path in ("/v2", "/v2/"):
        assert tuple(doors.http.get(path).json()["extensions"]) == EXTENSIONS
    assert tuple(doors.grpc.ask("ServerMetadata").extensions) == EXTENSIONS


def test_parameters_of_others_are_ignored(doors: Doors) -> None:
    assert doors.infer(JSON_INPUT, parameters={"triton_enable_empty_final_response": True, "mine": [1]}) == 200
    request = raw_request("affine", "FP32", ROWS)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert status(lambda: doors.grpc.infer(request)) == "OK"


@pytest.mark.parametrize("path", [INFER, "/v2/repository/index"])
def test_no_content_type_is_asked_for_nor_a_body_where_none_is_needed(doors: Doors, path: str) -> None:
    body = {"inputs": [JSON_INPUT]} if path == INFER else None
    assert doors.post(path, body).status_code == 200


def test_more_rows_than_a_batch_has_are_a_request_all_the_same(doors: Doors) -> None:
    """``batch.rows`` is how many rows of several requests are put together, no limit for one."""
    deployed = doors.server.node.deployed["affine"]
    deployed.manifest = Manifest("affine", "arithmetic:affine", batch=BatchManifest(2))
    assert doors.http.get("/v2/models/affine/config").json()["max_batch_size"] == 2
    assert doors.infer({**JSON_INPUT, "shape": [4, 3], "data": [1] * 12}) == 200
    assert status(lambda: doors.grpc.infer(raw_request("affine", "FP32", np.ones((4, 3), np.float32)))) == "OK"


@pytest.mark.parametrize("header", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"])
def test_a_gateway_may_say_the_deadline_in_a_header_and_a_parameter_says_it_better(doors: Doors, header: str) -> None:
    for parameters in ({}, {"slo_ms": 50}):
        body = {"inputs": [JSON_INPUT], "parameters": parameters}
        assert doors.post(INFER, body, headers={header: "80.5"}).status_code == 200
        request = raw_request("affine", "FP32", ROWS)
        for name, value in parameters.items():
            request.parameters[name].int64_param = value
        doors.grpc.infer(request, metadata=((header, "80.5"),))
    seen = [inference.slo_ns for inference in doors.server.node.seen]
    assert seen == [80_500_000, 80_500_000, 50_000_000, 50_000_000]
    for wrong in ("soon", "-1", "nan"):
        assert doors.post(INFER, {"inputs": [JSON_INPUT]}, headers={header: wrong}).status_code == 400
        call = partial(doors.grpc.infer, raw_request("affine", "FP32", ROWS), metadata=((header, wrong),))
        assert status(call) == "INVALID_ARGUMENT"


def test_a_wrong_method_is_said_to_be_one(doors: Doors) -> None:
    assert doors.http.get(INFER).status_code == 405
    assert status(lambda: doors.grpc.send("/inference.GRPCInferenceService/Guess", b"")) == "UNIMPLEMENTED"


def test_pages_of_other_sites_are_kept_out_and_nobody_else(doors: Doors) -> None:
    assert doors.http.get("/v2", headers={"Origin": "http://elsewhere.example"}).status_code == 403
    assert doors.http.get("/v2").status_code == 200
