"""Manifests: what is refused before anything is done with it."""

import msgspec
import pytest

from dormouse.core.types import Batch
from dormouse.errors import ConfigurationFault
from dormouse.functions import (
    BatchManifest,
    LimitsManifest,
    Manifest,
    SloManifest,
    batch_of,
    checked,
    limits_of,
    slo_of,
)

PLAIN = Manifest("f", "nets:make")


def test_a_name_that_the_protocol_has_taken_is_refused() -> None:
    with pytest.raises(ConfigurationFault, match=r"name = 'stats' cannot be used; expected another: /v2/models/stats"):
        checked(msgspec.structs.replace(PLAIN, name="stats"), "'stats'")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"slo": SloManifest(deadline_ms=1e13)}, "slo.deadline_ms"),
        ({"slo": SloManifest(deadline_ms=1e308)}, "slo.deadline_ms"),
        ({"slo": SloManifest(deadline_ms=float("nan"))}, "slo.deadline_ms"),
        ({"slo": SloManifest(deadline_ms=0)}, "slo.deadline_ms"),
        ({"slo": SloManifest(percentile=float("nan"))}, "slo.percentile"),
        ({"limits": LimitsManifest(timeout_ms=1e16)}, "limits.timeout_ms"),
        ({"limits": LimitsManifest(timeout_ms=float("inf"))}, "limits.timeout_ms"),
        ({"limits": LimitsManifest(queue_length=2**70)}, "limits.queue_length"),
        ({"limits": LimitsManifest(queue_length=0)}, "limits.queue_length"),
        ({"batch": BatchManifest(rows=0)}, "batch.rows"),
        ({"batch": BatchManifest(rows=5000)}, "batch.rows"),
        ({"batch": BatchManifest(rows=4, wait_ms=-1)}, "batch.wait_ms"),
        ({"batch": BatchManifest(rows=4, wait_ms=float("nan"))}, "batch.wait_ms"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_its_key(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigurationFault, match=key):
        checked(msgspec.structs.replace(PLAIN, **changes), "manifest")


def test_the_longest_durations_survive_the_wire() -> None:
    slo, limits = SloManifest(deadline_ms=1e12), LimitsManifest(timeout_ms=1e12, queue_length=10**9)
    manifest = checked(msgspec.structs.replace(PLAIN, slo=slo, limits=limits), "manifest")
    longest_uptime_ns = 2**62
    later = slo_of(manifest).deadline_ns + longest_uptime_ns, limits_of(manifest).timeout_ns + longest_uptime_ns
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(later), type=tuple[int, int]) == later


def test_without_a_word_about_it_requests_run_one_by_one() -> None:
    assert batch_of(PLAIN) == Batch(rows=1, wait_ns=0)
    assert batch_of(msgspec.structs.replace(PLAIN, batch=BatchManifest(8, 2.5))) == Batch(8, 2_500_000)
