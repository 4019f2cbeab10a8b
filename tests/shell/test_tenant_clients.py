"""Unmodified HTTP clients with a key: tritonclient, sync and asyncio, and KServe's. Those for gRPC are in clients/."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.shell.running import RunningServer
from tests.shell.samples import ROW
from tests.shell.tenanted import ACME, ADMIN, MINE, SHARED, THEIRS, bearer
from tests.shell.test_clients import kserve_request, refused, tensor, with_kserve

WANTED = ROW * 2 + 1


def test_triton_sends_a_key_and_hears_why_not(tenanted_server: RunningServer) -> None:
    with triton.InferenceServerClient(tenanted_server.address) as client:
        assert client.is_server_ready()
        result = client.infer(MINE, [tensor(ROW, "FP32")], headers=bearer(ACME))
        np.testing.assert_array_equal(result.as_numpy("y"), WANTED)
        index = client.get_model_repository_index(headers=bearer(ACME))
        assert {entry["name"] for entry in index} == {MINE, SHARED}
        assert not client.is_model_ready(THEIRS, headers=bearer(ACME))
        calls = {
            "401": lambda: client.infer(MINE, [tensor(ROW, "FP32")]),
            "403": lambda: client.unload_model(MINE, headers=bearer(ACME)),
            "404": lambda: client.get_inference_statistics(THEIRS, headers=bearer(ACME)),
        }
        for status, call in calls.items():
            assert refused(call)[0] == status
        client.unload_model(MINE, headers=bearer(ADMIN))
        assert not client.is_model_ready(MINE, headers=bearer(ACME))


def test_triton_aio_sends_a_key(tenanted_server: RunningServer) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(tenanted_server.address) as client:
            result = await client.infer(SHARED, [tensor(ROW, "FP32")], headers={"x-api-key": ACME})
            np.testing.assert_array_equal(result.as_numpy("y"), WANTED)
            with pytest.raises(InferenceServerException, match="no function"):
                await client.infer(THEIRS, [tensor(ROW, "FP32")], headers={"x-api-key": ACME})

    asyncio.run(run())
    assert [inference.tenant for inference in tenanted_server.node.seen] == ["acme"]


def test_kserve_sends_a_key(tenanted_server: RunningServer) -> None:
    async def talk(client: Any, url: str) -> None:
        request = kserve_request(ROW, "FP32", binary=True)
        response = await client.infer(url, request, model_name=MINE, headers=bearer(ACME))
        np.testing.assert_array_equal(response.outputs[0].as_numpy(), WANTED)
        assert await client.is_model_ready(url, SHARED, headers=bearer(ACME))
        assert not await client.is_model_ready(url, THEIRS, headers=bearer(ACME))
        with pytest.raises(httpx.HTTPStatusError, match="a key is needed here"):
            await client.infer(url, request, model_name=MINE)

    with_kserve(tenanted_server, talk)
