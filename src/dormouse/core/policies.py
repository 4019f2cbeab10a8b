"""Policies that belong together, by name: ours, the published ones, and the plain ones that both are compared with."""

from collections.abc import Mapping

import msgspec

from dormouse.core.types import Settings

SETS: Mapping[str, Mapping[str, object]] = {
    "dormouse": {
        "queueing": "slack",
        "placement": "quiet",
        "eviction": "torpor",
        "replication": "worthwhile-evicting",
        "host_tier": "interval",
    },
    "torpor": {
        "binding": "late",
        "queueing": "torpor",
        "placement": "torpor",
        "eviction": "torpor",
        "slo_window_ns": 0,
        "ahead_ns": -1,
    },
    "edf": {"queueing": "edf", "placement": "least-displacing", "eviction": "lru", "replication": "worthwhile"},
    "fifo": {"queueing": "fifo", "placement": "least-displacing", "eviction": "lru", "replication": "worthwhile"},
}
"""``dormouse``: late requests behind those that can be in time; light functions leave first; copies between devices
where they pay; images leave host memory by each function's pauses. ``torpor``: as in the paper's runs, with counters
since the beginning. ``bench/policies`` compares."""


def with_policies(name: str, settings: Settings) -> Settings:
    """The settings with a set's policies in them. An unknown name is a KeyError."""
    return msgspec.structs.replace(settings, **SETS[name])
