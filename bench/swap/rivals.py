"""What else brings a sleeping model onto a device: from ordinary memory, pinned tensor by tensor, accelerate's hooks,
torch_memory_saver. Each is timed from asleep to answered, with an ordinary forward pass, as its users run it.
"""

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from bench.swap.turns import MIB, Bench, clock

from dormouse.core.types import Bytes
from dormouse.model.places import find_places

ROOT = Path(__file__).parents[2]
LARGE_BYTES: Bytes = 4096 * MIB
"""Of such models only the first is timed, once: the others would hold several copies of it."""
REPEATS = 5


@dataclass(frozen=True)
class Rivals:
    """Medians in milliseconds; None where it was not measured, and then ``not_measured`` says why."""

    naive_ms: float
    pinned_ms: float | None
    hooks_ms: float | None
    memory_saver_ms: float | None
    memory_saver_resume_ms: float | None
    """Of that, the resume alone."""
    not_measured: dict[str, str]


def rivals_of(bench: Bench) -> Rivals:
    large = bench.image.index.image_bytes > LARGE_BYTES
    naive_ms = median(_naive(bench) for _ in range(1 if large else 3))
    why = "larger than 4 GiB" if large else "" if bench.compute.device.type == "cuda" else "needs a GPU"
    if why:
        left_out = dict.fromkeys(("pinned", "hooks", "memory_saver"), why)
        return Rivals(naive_ms, None, None, None, None, left_out)
    not_measured: dict[str, str] = {}
    hooks_ms, saver = None, None
    for name in ("accelerate", "torch_memory_saver"):
        if importlib.util.find_spec(name) is None:
            not_measured[name] = "not installed"
    if "accelerate" not in not_measured:
        hooks_ms = _repeated(_hooked(bench))
    if "torch_memory_saver" not in not_measured:
        saver, said = _memory_saver(bench.image.shape.name)
        if saver is None:
            not_measured["torch_memory_saver"] = said
    saver_ms, resume_ms = saver or (None, None)
    return Rivals(naive_ms, _repeated(_pinned(bench)), hooks_ms, saver_ms, resume_ms, not_measured)


def _repeated(once: Callable[[], float]) -> float:
    once()
    return median(once() for _ in range(REPEATS))


def _naive(bench: Bench) -> float:
    """What a process without any of this does: weights from ordinary memory, tensor by tensor, then run."""
    module = bench.image.plain(torch.device("cpu"))
    with clock() as elapsed:
        here = copy.deepcopy(module) if bench.compute.device.type == "cpu" else module.to(bench.compute.device)
        bench.plainly(here)
    return elapsed.ms


def _pinned(bench: Bench) -> Callable[[], float]:
    module = bench.image.plain(torch.device("cpu"))
    pinned: dict[int, torch.Tensor] = {}
    places = find_places(module)
    for place in places:
        tensor = place.tensor
        assert tensor is not None
        pinned.setdefault(id(tensor), tensor.detach().pin_memory())
    sleeping = [(place, pinned[id(place.tensor)], isinstance(place.tensor, torch.nn.Parameter)) for place in places]

    def once() -> float:
        # On the stream where the forward pass runs: else that would not wait for the copies.
        with clock() as elapsed, bench.compute.lane():
            awake = {id(tensor): tensor.to(bench.compute.device, non_blocking=True) for tensor in pinned.values()}
            for place, tensor, trained in sleeping:
                here = awake[id(tensor)]
                place.put(torch.nn.Parameter(here, requires_grad=False) if trained else here)
            bench.plainly(module)
        for place, tensor, trained in sleeping:
            place.put(torch.nn.Parameter(tensor, requires_grad=False) if trained else tensor)
        return elapsed.ms

    return once


def _hooked(bench: Bench) -> Callable[[], float]:
    """Every module's weights come just before its forward and go after it."""
    import accelerate  # need not be installed

    module = accelerate.cpu_offload(bench.image.plain(torch.device("cpu")), execution_device=bench.compute.device)

    def once() -> float:
        with clock() as elapsed:
            bench.plainly(module)
        return elapsed.ms

    return once


def _memory_saver(model: str) -> tuple[tuple[float, float] | None, str]:
    """Resumed and run, and resumed, in a process of its own, which its allocator needs; or why not."""
    command = [sys.executable, "-m", "bench.swap.memory_saver", model, str(REPEATS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    found = json.loads(done.stdout.splitlines()[-1])
    return (found["resumed_and_run_ms"], found["resumed_ms"]), ""
