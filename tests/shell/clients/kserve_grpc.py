"""KServe's gRPC client, unmodified, against a real server. Run by test_grpc_clients, like triton_grpc."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import kserve
import numpy as np
import pytest
from kserve.inference_client import InferenceGRPCClient
from kserve.protocol.grpc import grpc_predict_v2_pb2, grpc_predict_v2_pb2_grpc

from tests.shell.running import RunningServer
from tests.shell.samples import ROW, SAMPLES
from tests.shell.tenanted import ACME, MINE, THEIRS


def talk_to(server: RunningServer, talk: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        client = InferenceGRPCClient(server.grpc)
        try:
            await talk(client)
        finally:
            await client.close()

    asyncio.run(run())


def request_of(values: Any, datatype: str, model: str, *, binary: bool, **parameters: object) -> Any:
    given = kserve.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values, binary_data=binary)
    return kserve.InferRequest(model_name=model, infer_inputs=[given], request_id="k-1", parameters=parameters or None)


@pytest.mark.parametrize("binary", [True, False])
def test_texts_round_trip_in_both_forms(server: RunningServer, binary: bool) -> None:
    async def talk(client: Any) -> None:
        texts = np.array([[b"dormouse"], [b"a b"]], dtype=np.object_)
        response = await client.infer(request_of(texts, "BYTES", "upper", binary=binary))
        assert response.outputs[0].as_numpy().reshape(-1).tolist() == [b"DORMOUSE", b"A B"]

    talk_to(server, talk)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", sorted(SAMPLES.keys() - {"BF16", "FP16", "BYTES"}))
def test_every_number_round_trips_in_both_forms(server: RunningServer, datatype: str, binary: bool) -> None:
    async def talk(client: Any) -> None:
        values = SAMPLES[datatype]
        response = await client.infer(request_of(values, datatype, f"echo_{datatype}", binary=binary))
        assert response.id == "k-1"
        assert response.outputs[0].as_numpy().tolist() == values.tolist()

    talk_to(server, talk)


def test_half_precision_round_trips_as_bytes(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        response = await client.infer(request_of(SAMPLES["FP16"], "FP16", "echo_FP16", binary=True))
        assert response.outputs[0].as_numpy().tolist() == SAMPLES["FP16"].tolist()

    talk_to(server, talk)


@pytest.mark.parametrize("binary_out", [True, False])
def test_the_form_of_the_answer_is_asked_for(server: RunningServer, binary_out: bool) -> None:
    async def talk(client: Any) -> None:
        request = request_of(ROW, "FP32", "affine", binary=True, binary_data_output=binary_out)
        response = await client.infer(request)
        np.testing.assert_array_equal(response.outputs[0].as_numpy(), ROW * 2 + 1)

    talk_to(server, talk)


def test_health_and_readiness_are_read(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("affine")
        server.node.deployed["affine"].loaded = False
        assert not await client.is_model_ready("affine")
        with pytest.raises(grpc.RpcError, match="no function 'nobody'"):
            await client.is_model_ready("nobody")

    talk_to(server, talk)


def test_our_words_are_heard(server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.infer(request_of(ROW, "FP32", "nobody", binary=True))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no function 'nobody'")

    talk_to(server, talk)


def test_kserves_own_messages_load_and_unload(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = grpc_predict_v2_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(2):
            answer = stub.RepositoryModelUnload(
                grpc_predict_v2_pb2.RepositoryModelUnloadRequest(model_name="affine"), timeout=30
            )
            assert (answer.model_name, answer.isUnloaded) == ("affine", True)
        assert not server.node.deployed["affine"].loaded
        answer = stub.RepositoryModelLoad(
            grpc_predict_v2_pb2.RepositoryModelLoadRequest(model_name="affine"), timeout=30
        )
        assert (answer.model_name, answer.isLoaded) == ("affine", True)


def test_a_key_goes_in_headers(tenanted_server: RunningServer) -> None:
    async def talk(client: Any) -> None:
        headers = (("authorization", f"Bearer {ACME}"),)
        assert await client.is_server_ready()
        response = await client.infer(request_of(ROW, "FP32", MINE, binary=True), headers=headers)
        np.testing.assert_array_equal(response.outputs[0].as_numpy(), ROW * 2 + 1)
        for given, status in ((None, grpc.StatusCode.UNAUTHENTICATED), (headers, grpc.StatusCode.NOT_FOUND)):
            with pytest.raises(grpc.RpcError) as caught:
                await client.infer(request_of(ROW, "FP32", THEIRS, binary=True), headers=given)
            assert caught.value.code() == status

    talk_to(tenanted_server, talk)
