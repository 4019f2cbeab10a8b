"""Configuration and statistics: what the extensions ask for, from what Dormouse knows."""

from typing import Any

import msgspec

from dormouse.core.types import Path
from dormouse.functions import BatchManifest, LimitsManifest, SloManifest
from dormouse.gateway.reports import configuration, statistics
from dormouse.submit import Description, Statistics, Tally
from dormouse.tensors import Signature, TensorSpec
from tests.shell.in_memory import DEVICE_NS, ENDED_MS, QUEUED_NS, furnished
from tests.shell.test_app import AFFINE, INFER, answer_to, fault

SIGNATURE = Signature(
    (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("text", "BYTES", (-1, 1), optional=True)),
    (TensorSpec("y", "BF16", (-1, 3, 4)),),
)


def described(**changes: Any) -> Description:
    return msgspec.structs.replace(Description("f", ("2",), "pytorch", SIGNATURE), **changes)


def test_a_function_that_does_not_batch_shows_whole_shapes() -> None:
    slo, limits = SloManifest(80, 99.5), LimitsManifest(16, 2500)
    assert configuration(described(slo=slo, limits=limits)) == {
        "name": "f",
        "platform": "pytorch",
        "max_batch_size": 0,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": (-1, 3)},
            {"name": "text", "data_type": "TYPE_STRING", "dims": (-1, 1), "optional": True},
        ],
        "output": [{"name": "y", "data_type": "TYPE_BF16", "dims": (-1, 3, 4)}],
        "parameters": {
            "slo_ms": {"string_value": "80"},
            "slo_percentile": {"string_value": "99.5"},
            "timeout_ms": {"string_value": "2500"},
            "queue_length": {"string_value": "16"},
        },
    }


def test_one_that_batches_leaves_the_first_dimension_out() -> None:
    report: Any = configuration(described(batch=BatchManifest(8, 1.5)))
    assert report["max_batch_size"] == 8
    assert report["dynamic_batching"] == {"max_queue_delay_microseconds": 1500}
    assert [tensor["dims"] for tensor in (*report["input"], *report["output"])] == [(3,), (1,), (3, 4)]


def test_one_whose_rows_are_fixed_is_never_said_to_batch() -> None:
    fixed = Signature(SIGNATURE.inputs, (TensorSpec("y", "FP32", (4, -1)),))
    report: Any = configuration(described(signature=fixed, batch=BatchManifest(8)))
    assert (report["max_batch_size"], "dynamic_batching" in report) == (0, False)
    assert report["output"][0]["dims"] == (4, -1)


def test_statistics_have_counts_and_nanoseconds_and_our_paths() -> None:
    given = Statistics("f", "2", Tally(3, 300), Tally(1, 50), 30, 90, 2, 1_700_000_000_000, {Path.HOST: Tally(2, 200)})
    assert statistics([given]) == {
        "model_stats": [
            {
                "name": "f",
                "version": "2",
                "last_inference": 1_700_000_000_000,
                "inference_count": 3,
                "execution_count": 2,
                "inference_stats": {
                    "success": {"count": 3, "ns": 300},
                    "fail": {"count": 1, "ns": 50},
                    "queue": {"count": 3, "ns": 30},
                    "compute_input": {"count": 0, "ns": 0},
                    "compute_infer": {"count": 3, "ns": 90},
                    "compute_output": {"count": 0, "ns": 0},
                    "cache_hit": {"count": 0, "ns": 0},
                    "cache_miss": {"count": 0, "ns": 0},
                },
                "batch_stats": [],
                "memory_usage": [],
                "dormouse_paths": {"host": {"count": 2, "ns": 200}},
            }
        ]
    }


def test_both_have_a_route_for_a_function_a_version_and_statistics_one_for_all() -> None:
    node = furnished()
    assert answer_to("POST", INFER, node, json=AFFINE).status_code == 200
    assert answer_to("POST", "/v2/models/fault/infer", node, json=fault("busy")).status_code == 503
    for model in ("affine", "affine/versions/1"):
        assert answer_to("GET", f"/v2/models/{model}/config", node).json()["input"][0]["name"] == "x"
        (one,) = answer_to("GET", f"/v2/models/{model}/stats", node).json()["model_stats"]
        assert one["inference_stats"]["success"] == {"count": 1, "ns": QUEUED_NS + DEVICE_NS}
        assert (one["inference_count"], one["last_inference"]) == (1, ENDED_MS)
    everyone = answer_to("GET", "/v2/models/stats", node).json()["model_stats"]
    assert {each["name"] for each in everyone} == node.deployed.keys()
    assert {each["name"] for each in everyone if each["inference_stats"]["fail"]["count"]} == {"fault"}


def test_both_are_404_for_nobody() -> None:
    for path in ("nobody/config", "nobody/stats", "affine/versions/9/config", "affine/versions/9/stats"):
        assert answer_to("GET", f"/v2/models/{path}").status_code == 404
