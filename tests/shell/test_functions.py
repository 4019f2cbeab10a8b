"""Manifests: what is refused before anything is done with it."""

import msgspec
import pytest

from dormouse.errors import ConfigurationFault
from dormouse.functions import LimitsManifest, Manifest, SloManifest, checked, limits_of, slo_of

PLAIN = Manifest("f", "nets:make")


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
