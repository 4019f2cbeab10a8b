"""Torpor's queueing: how many more requests in time a function needs, and two groups (ATC'25, and its artifact).

RRC solves (m + RRC)/(n + RRC) = p for a function with n requests seen, m of them in time, and a target share p, so
RRC = (p n - m)/(1 - p): the smaller, the nearer to its promise. A threshold splits functions into a high group, which
is served first, and a low one: functions that are far behind are given up for a while, so that the others keep theirs.
The paper orders by RRC alone; the artifact weighs it with the function's mean latency. How the threshold follows the
load is only in the artifact.

Shares are in parts per million throughout, so that everything stays whole numbers. Counters are cumulative, as in the
paper's runs, or, in production, over a sliding window (``Settings.slo_window_ns``): a good past would let a function
starve.
"""

from dormouse.core.groups import PPM
from dormouse.core.ready import Key
from dormouse.core.state import Function, Request, State
from dormouse.core.types import FunctionId, Ns

UPDATES_PER_ADAPTATION = 20
RISE_PPM, FALL_PPM = 40_000, -40_000
"""A change of the compliant share by so much moves the threshold."""
SMALLEST_ALPHA_PPM = 1


def behind(function: Function, now: Ns) -> int:
    """p n - m, in parts per million of a request: what the function lacks; below 0 it is ahead."""
    seen = function.recent.sums(now)
    return function.spec.slo.share_ppm * seen.requests - PPM * seen.in_time


def artifact_metric(function: Function, now: Ns) -> int:
    """RRC weighed with the mean latency."""
    return (
        behind(function, now) * function.recent.sums(now).mean_latency_ns // max(1, PPM - function.spec.slo.share_ppm)
    )


def artifact_key(state: State, function: Function, request: Request, now: Ns) -> Key:
    """High group: the furthest behind first. Low group: the nearest to its promise first."""
    weighed = behind(function, now) * function.recent.sums(now).mean_latency_ns
    return _grouped(state, function, request, weighed)


def paper_key(state: State, function: Function, request: Request, now: Ns) -> Key:
    """The same, by RRC alone."""
    return _grouped(state, function, request, behind(function, now))


def _grouped(state: State, function: Function, request: Request, lacks: int) -> Key:
    if function.id in state.groups.low:
        return (1, lacks, request.id)
    return (0, -lacks, request.id)


def regroup(state: State, now: Ns) -> None:
    """Put functions into groups anew: as many in the high one as alpha of all that is lacking pays for."""
    groups = state.groups
    groups.updates += 1
    if groups.updates % UPDATES_PER_ADAPTATION == 0:
        _adapt(state, now)
    _split(state, [(artifact_metric(function, now), function.id) for function in state.functions.values()])


def regroup_fixed(state: State, now: Ns) -> None:
    """The same by RRC alone and with a threshold that stays where the settings put it, as in the authors' simulator."""
    state.groups.alpha_ppm = state.settings.alpha_ppm
    _split(state, [(behind(function, now), function.id) for function in state.functions.values()])


def _split(state: State, metrics: list[tuple[int, FunctionId]]) -> None:
    groups = state.groups
    metrics.sort()
    budget = sum(metric for metric, _ in metrics if metric > 0) * groups.alpha_ppm // PPM
    groups.low.clear()
    spent = 0
    for metric, name in metrics:
        if metric > 0:
            spent += metric
            if spent > budget:
                groups.low.add(name)


def _adapt(state: State, now: Ns) -> None:
    """Move the threshold by what the compliant share has become since it was last moved."""
    groups, functions = state.groups, state.functions.values()
    if not functions:
        return
    share_ppm = sum(behind(function, now) <= 0 for function in functions) * PPM // len(functions)
    change_ppm = (share_ppm - groups.recorded_ppm) * PPM // max(1, groups.recorded_ppm)
    if change_ppm >= RISE_PPM:
        groups.alpha_ppm, groups.recorded_ppm = min(PPM, groups.alpha_ppm * 2), share_ppm
    elif change_ppm < FALL_PPM:
        groups.alpha_ppm, groups.recorded_ppm = max(SMALLEST_ALPHA_PPM, groups.alpha_ppm // 2), share_ppm
    else:
        groups.alpha_ppm = min(PPM, groups.alpha_ppm * 101 // 100)
