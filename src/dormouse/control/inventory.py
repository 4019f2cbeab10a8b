"""Where everything is and how it has been served, read from the core's records, for people and their tools."""

from collections.abc import Mapping
from typing import Any

from dormouse.control.catalog import Deployed
from dormouse.core.ledger import Histogram, Ledger
from dormouse.core.state import Executor, Function, ImageState, ResidencyState, Service, State
from dormouse.core.types import Bytes, Ns, Path
from dormouse.functions import function_id
from dormouse.store.host import HostStore
from dormouse.submit import IndexEntry, Statistics, Tally
from dormouse.wire import GraphsHeld

MEDIAN_PPM = 500_000
_STATES = {
    Service.ADMITTING: "LOADING",
    Service.LOADING: "LOADING",
    Service.READY: "READY",
    Service.UNLOADING: "UNLOADING",
    Service.UNAVAILABLE: "UNAVAILABLE",
    Service.REMOVING: "UNLOADING",
}
_ON_DEVICE = (ResidencyState.RESIDENT, ResidencyState.RUNNING)


def tier_of(function: Function | None) -> str:
    """The fastest tier that holds the image: device names, ``loading``, ``host``, ``reading`` or ``disk``."""
    if function is None:
        return "disk"
    devices = [str(name) for name, residency in function.residencies.items() if residency.state in _ON_DEVICE]
    if devices:
        return "+".join(devices)
    return "loading" if function.is_arriving else str(function.image)


def index_entry(deployed: Deployed, function: Function | None) -> IndexEntry:
    state = "UNAVAILABLE" if function is None else _STATES[function.service]
    reason = tier_of(function) if state == "READY" else ("unloaded" if state == "UNAVAILABLE" else "")
    return IndexEntry(deployed.name, str(deployed.revision), state, reason)


def statistics_of(deployed: Deployed, function: Function | None, clock_offset_ns: Ns) -> Statistics:
    """``clock_offset_ns``: what makes a time of the core a time since 1970."""
    if function is None:
        return Statistics(deployed.name, str(deployed.revision))
    ledger = function.ledger
    paths = {path: Tally(histogram.count, histogram.total_ns) for path, histogram in ledger.latency.items()}
    last_ns = ledger.last_answer_ns
    return Statistics(
        deployed.name,
        str(deployed.revision),
        answered=Tally(sum(t.count for t in paths.values()), sum(t.ns for t in paths.values())),
        failed=Tally(sum(ledger.refusals.values()), ledger.refused_ns),
        queued_ns=ledger.queued_ns,
        device_ns=ledger.device_ns,
        executions=ledger.executions,
        last_ms=0 if last_ns is None else (last_ns + clock_offset_ns) // 1_000_000,
        paths=paths,
    )


def function_row(
    deployed: Deployed, function: Function | None, graphs: Mapping[str, GraphsHeld] | None = None
) -> dict[str, Any]:
    """One function for ``ps``; durations in milliseconds. ``graphs``: by executor, how it is run there."""
    row: dict[str, Any] = {
        "name": deployed.name,
        "version": str(deployed.revision),
        "state": index_entry(deployed, function).state,
        "tier": tier_of(function),
        "image_bytes": deployed.image_bytes,
        "state_bytes": deployed.state_bytes,
        "pin": str(deployed.manifest.pin),
        "tenant": deployed.manifest.tenant,
        "public": deployed.manifest.public,
        "source": deployed.manifest.source,
        "durable": deployed.durable,
        "slo": {
            "deadline_ms": deployed.manifest.slo.deadline_ms,
            "percentile": deployed.manifest.slo.percentile,
        },
        "graphs": {
            executor: {"shapes": held.shapes, "eager_because": held.eager_because}
            for executor, held in (graphs or {}).items()
        },
    }
    return row if function is None else row | _served(function)


def batch_row(deployed: Deployed, state: State) -> dict[str, Any]:
    """How a function's requests are run together. ``refused``: by executor, why not there."""
    batch, function = deployed.manifest.batch, function_id(deployed.name, deployed.revision)
    refused = {name: e.unbatched[function] for name, e in state.executors.items() if function in e.unbatched}
    return {"rows": batch.rows, "wait_ms": batch.wait_ms, "refused": refused}


def disk_row(deployed: Deployed, state: State) -> dict[str, Any]:
    """What a function costs while its image is on disk: what a request then waits longer, by what reads have taken so
    far, and what has been read. ``ahead``: reads before a request came; ``used``: one then did come."""
    function = state.functions.get(function_id(deployed.name, deployed.revision))
    ledger = Ledger() if function is None else function.ledger
    used, unused = ledger.promotions_used, ledger.promotions_unused
    return {
        "extra_ms": state.disk.read_ns(deployed.image_bytes) / 1e6,
        "reads": ledger.reads,
        "read_bytes": ledger.read_bytes,
        "ahead": {"used": used, "unused": unused},
    }


def _served(function: Function) -> dict[str, Any]:
    ledger = function.ledger
    return {
        "queued": len(function.queue),
        "requests": ledger.requests,
        "in_time": ledger.in_time,
        "missed": ledger.missed,
        "cancelled": ledger.cancelled,
        "compliant": ledger.compliant(function.spec.slo),
        "refusals": {str(reason): count for reason, count in ledger.refusals.items()},
        "paths": {str(path): _percentiles(ledger.latency[path]) for path in Path if path in ledger.latency},
        "loads": {str(path): count for path, count in ledger.loads.items()},
        "evictions": ledger.evictions,
        "loaded_bytes": ledger.loaded_bytes,
        "unaccounted_bytes": ledger.unaccounted_bytes,
        "device_ms": ledger.device_ns / 1e6,
        "resident_ms": ledger.resident_ns / 1e6,
    }


def _percentiles(histogram: Histogram) -> dict[str, float]:
    return {
        "requests": histogram.count,
        "p50_ms": histogram.percentile(MEDIAN_PPM) / 1e6,
        "p95_ms": histogram.percentile(950_000) / 1e6,
        "p98_ms": histogram.percentile(980_000) / 1e6,
    }


def waste_bytes(executor: Executor, state: State) -> Bytes:
    """Between the ends of images on a device and of the chunks that hold them."""
    return sum(
        residency.size_bytes - state.functions[name].spec.image_bytes for name, residency in executor.recency.items()
    )


def host_row(state: State, store: HostStore) -> dict[str, Any]:
    """Memory and totals of the node."""
    functions = state.functions.values()
    return {
        "host": {
            "capacity_bytes": state.settings.host_capacity_bytes,
            "used_bytes": state.host_used_bytes,
            "peak_bytes": store.arena.peak_bytes,
            "images_in": "dram" if state.settings.host_is_last else "disk",
            "images": sum(function.image is ImageState.HOST for function in functions),
        },
        "devices": [
            {
                "executor": executor.id,
                "device": executor.device,
                "capacity_bytes": executor.capacity_bytes,
                "free_bytes": executor.free_bytes,
                "resident": sum(r.state in _ON_DEVICE for r in executor.recency.values()),
                "waste_bytes": waste_bytes(executor, state),
            }
            for executor in state.executors.values()
        ],
        "functions": len(state.functions),
        "functions_compliant": sum(function.ledger.compliant(function.spec.slo) for function in functions),
        "queued": state.queued,
    }
