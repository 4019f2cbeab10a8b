"""What V2 says about a function when nothing is asked of it: metadata, configuration, statistics. Pure.

Plain values in the form that the extensions prescribe for JSON; gRPC has the same names in its messages.
"""

from collections.abc import Iterable, Mapping

from dormouse.submit import Description, Statistics
from dormouse.tensors import TensorSpec

Report = dict[str, object]


def metadata(described: Description) -> Report:
    """Model metadata."""
    return {
        "name": described.name,
        "versions": described.versions,
        "platform": described.platform,
        "inputs": [_tensor_metadata(spec) for spec in described.signature.inputs],
        "outputs": [_tensor_metadata(spec) for spec in described.signature.outputs],
    }


def _tensor_metadata(spec: TensorSpec) -> Report:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


# ------------------------------------------------------------------ configuration


def configuration(described: Description) -> Report:
    """The model configuration extension, as far as it says anything of a Dormouse function.

    Where functions batch, the extension leaves the first dimension out of ``dims``; metadata never does.
    """
    signature, batch = described.signature, described.batch
    batches = batch.rows > 1 and all(spec.shape[:1] == (-1,) for spec in (*signature.inputs, *signature.outputs))
    skipped = int(batches)
    inputs = [
        {**_tensor_configuration(spec, skipped), "optional": True}
        if spec.optional
        else _tensor_configuration(spec, skipped)
        for spec in signature.inputs
    ]
    report: Report = {
        "name": described.name,
        "platform": described.platform,
        "max_batch_size": batch.rows if batches else 0,
        "input": inputs,
        "output": [_tensor_configuration(spec, skipped) for spec in signature.outputs],
        "parameters": {name: {"string_value": value} for name, value in _parameters(described).items()},
    }
    if batches:
        report["dynamic_batching"] = {"max_queue_delay_microseconds": round(batch.wait_ms * 1_000)}
    return report


def _tensor_configuration(spec: TensorSpec, skipped: int) -> Report:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": spec.shape[skipped:]}


def _parameters(described: Description) -> dict[str, str]:
    slo, limits = described.slo, described.limits
    return {
        "slo_ms": f"{slo.deadline_ms:g}",
        "slo_percentile": f"{slo.percentile:g}",
        "timeout_ms": f"{limits.timeout_ms:g}",
        "queue_length": str(limits.queue_length),
    }


# ------------------------------------------------------------------ statistics


def statistics(entries: Iterable[Statistics]) -> Report:
    """The statistics extension; ``dormouse_paths`` is ours: answers by the way their model took to a device."""
    return {"model_stats": [_model_statistics(each) for each in entries]}


def _model_statistics(each: Statistics) -> Report:
    answered, none = each.answered.count, {"count": 0, "ns": 0}
    return {
        "name": each.name,
        "version": each.version,
        "last_inference": each.last_ms,
        "inference_count": answered,
        "execution_count": each.executions,
        "inference_stats": {
            "success": _duration(answered, each.answered.ns),
            "fail": _duration(each.failed.count, each.failed.ns),
            "queue": _duration(answered, each.queued_ns),
            "compute_input": none,
            "compute_infer": _duration(answered, each.device_ns),
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [],
        "memory_usage": [],
        "dormouse_paths": _paths(each),
    }


def _paths(each: Statistics) -> Mapping[str, object]:
    return {str(path): _duration(tally.count, tally.ns) for path, tally in each.paths.items()}


def _duration(count: int, total_ns: int) -> Report:
    return {"count": count, "ns": total_ns}
