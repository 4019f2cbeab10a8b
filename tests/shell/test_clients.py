"""Unmodified V2 clients against a real server: tritonclient (HTTP, sync and asyncio) and KServe's REST client."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tests.shell.conftest import RunningServer

ROW = np.array([[1.0, 2.5, -3.0], [0.0, 1e-3, 1e6]], dtype=np.float32)


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(values: Any, datatype: str, *, binary: bool = True) -> Any:
    given = triton.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values, binary_data=binary)
    return given


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
