"""Who asks when: streams of ``(nanoseconds from the start, number of the function)``, ascending, drawn as they go.

Every stream is a function of its parameters and a seed. Rates are requests per second unless a name says otherwise.
"""

import random
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import accumulate, repeat
from math import ceil, exp, log
from math import gamma as gamma_function
from typing import NamedTuple

from dormouse.core.types import Ns

Arrivals = Iterator[tuple[Ns, int]]

SECOND_NS: Ns = 1_000_000_000
MINUTE_NS: Ns = 60 * SECOND_NS


def poisson(rates: Sequence[float], duration_ns: Ns, seed: int) -> Arrivals:
    """Every function asked at its own constant rate, each request independent of all others."""
    draw = random.Random(seed)
    cumulative = list(accumulate(rates))
    total = cumulative[-1]
    numbers = range(len(rates))
    at_ns = 0
    while total > 0:
        at_ns += ceil(draw.expovariate(total) * SECOND_NS)
        if at_ns > duration_ns:
            return
        yield at_ns, draw.choices(numbers, cum_weights=cumulative)[0]


def gamma(rates: Sequence[float], cv: float, duration_ns: Ns, seed: int) -> Arrivals:
    """Every function with Gamma gaps of its own: ``cv`` 1 is Poisson, more is burstier, less is steadier."""
    shape = 1 / cv**2

    def gap_ns(draw: random.Random, rate: float) -> Ns:
        return ceil(draw.gammavariate(shape, 1 / (rate * shape)) * SECOND_NS)

    waiting: list[tuple[Ns, int, random.Random]] = []
    for number, rate in enumerate(rates):
        if rate > 0:
            draw = random.Random(seed * 1_000_003 + number)
            # The first gap of a stream that has been going on for ever is only a part of one.
            heappush(waiting, (ceil(draw.random() * gap_ns(draw, rate)), number, draw))
    while waiting:
        at_ns, number, draw = heappop(waiting)
        if at_ns <= duration_ns:
            yield at_ns, number
            heappush(waiting, (at_ns + gap_ns(draw, rates[number]), number, draw))


def per_minute(counts: Sequence[Sequence[int]], seed: int) -> Arrivals:
    """Torpor's generator (its artifact; see the paper's section on workloads): ``counts[function][minute]`` calls.

    Minute by minute, R calls over all functions: about R requests, with gaps of whole milliseconds drawn from
    Poisson(60000 / R), each for a function drawn in proportion to its calls. A minute ends when its requests do or when
    it is over, whichever is first.
    """
    draw = random.Random(seed)
    numbers = range(len(counts))
    for minute in range(len(counts[0])):
        calls = [function[minute] for function in counts]
        total = sum(calls)
        cumulative = list(accumulate(calls))
        at_ms = 0
        for _ in range(total):
            at_ms += _poisson_variate(draw, 60_000 / total)
            if at_ms >= 60_000:
                break
            yield minute * MINUTE_NS + at_ms * 1_000_000, draw.choices(numbers, cum_weights=cumulative)[0]


def _poisson_variate(draw: random.Random, mean: float) -> int:
    """Counts arrivals of a Poisson process: exact, and quick for the means that occur here (up to some hundreds)."""
    count, left = 0, mean
    while (left := left - draw.expovariate(1.0)) > 0:
        count += 1
    return count


def drawn_with_replacement(rows: Sequence[Sequence[int]], functions: int, seed: int) -> list[Sequence[int]]:
    """As many functions as wanted from a sample of fewer."""
    return random.Random(seed).choices(rows, k=functions)


def bursts(
    rates: Sequence[float], duration_ns: Ns, seed: int, *, factor: float, share: float, mean_burst_ns: Ns
) -> Arrivals:
    """A quiet and a busy state by turns: ``factor`` times the quiet rate for ``share`` of the time, on average the
    rates as given. Which functions are hot in a burst is drawn anew: one in ten of them takes nine tenths."""
    draw = random.Random(seed)
    quiet = 1 / (1 - share + share * factor)
    at_ns, busy = 0, False
    while at_ns < duration_ns:
        mean_ns = mean_burst_ns if busy else mean_burst_ns * (1 - share) / share
        ends_ns = min(duration_ns, at_ns + ceil(draw.expovariate(1 / mean_ns)))
        now = [rate * quiet * (factor if busy else 1) for rate in rates]
        if busy:
            asked = [number for number, rate in enumerate(rates) if rate > 0]
            hot = set(draw.sample(asked, max(1, len(asked) // 10)))
            total, heat = sum(now), sum(now[number] for number in hot)
            cool = max(total - heat, 1e-12)
            now = [r * (0.9 * total / heat if n in hot else 0.1 * total / cool) for n, r in enumerate(now)]
        for offset_ns, number in poisson(now, ends_ns - at_ns, draw.getrandbits(63)):
            yield at_ns + offset_ns, number
        at_ns, busy = ends_ns, not busy


def periodic(periods_s: Sequence[float], jitter: float, duration_ns: Ns, seed: int) -> Arrivals:
    """Functions on timers: each asked once a period, by up to ``jitter`` periods early or late; 0: one that is not."""
    draw = random.Random(seed)
    streams = []
    for number, period_s in enumerate(periods_s):
        if period_s:
            own = random.Random(draw.getrandbits(63))
            streams.append(zip(_timer(round(period_s * SECOND_NS), jitter, duration_ns, own), repeat(number)))
    return merge(*streams)


def _timer(period_ns: Ns, jitter: float, duration_ns: Ns, draw: random.Random) -> Iterator[Ns]:
    due_ns, last_ns = round(draw.random() * period_ns), 0
    while due_ns <= duration_ns:
        last_ns = max(last_ns, due_ns + round(draw.uniform(-jitter, jitter) * period_ns))
        yield last_ns
        due_ns += period_ns


def timers_among_others(
    functions: int, total_rate: float, exponent: float, duration_ns: Ns, seed: int, *, share: float, timers: "Timers"
) -> Arrivals:
    """A share of the functions is on timers with periods drawn evenly on a logarithmic scale; the others are asked at
    random, some much more often than others."""
    draw = random.Random(seed)
    timed = set(draw.sample(range(functions), round(share * functions)))
    low, high = log(timers.shortest_s), log(timers.longest_s)
    periods = [exp(draw.uniform(low, high)) if number in timed else 0.0 for number in range(functions)]
    others = iter(skewed(functions - len(timed), total_rate, exponent, seed) if len(timed) < functions else ())
    rates = [0.0 if number in timed else next(others) for number in range(functions)]
    return merge(periodic(periods, timers.jitter, duration_ns, seed), poisson(rates, duration_ns, seed))


class Timers(NamedTuple):
    """Periods, and how far from them requests come, in periods."""

    shortest_s: float
    longest_s: float
    jitter: float


def skewed(functions: int, total_rate: float, exponent: float, seed: int) -> list[float]:
    """Rates by Zipf's law, dealt to the functions in a drawn order."""
    weights = [1 / (rank + 1) ** exponent for rank in range(functions)]
    random.Random(seed).shuffle(weights)
    scale = total_rate / sum(weights)
    return [weight * scale for weight in weights]


def windows(
    clients: Sequence[Sequence["Window"]], window_ns: Ns, duration_ns: Ns, seed: int, scale: float = 1.0
) -> Arrivals:
    """Renewal processes whose rate and shape change from window to window, one for each client (ServeGen's fits)."""
    waiting: list[tuple[Ns, int, random.Random]] = []
    for number in range(len(clients)):
        draw = random.Random(seed * 1_000_003 + number)
        first = clients[number][0]
        gap_ns = first.gap_ns(draw, scale) if first.rate > 0 else window_ns
        heappush(waiting, (ceil(draw.random() * gap_ns), number, draw))
    while waiting:
        at_ns, number, draw = heappop(waiting)
        if at_ns > duration_ns:
            continue
        index = min(at_ns // window_ns, len(clients[number]) - 1)
        window = clients[number][index]
        if window.rate * scale * window_ns < SECOND_NS:  # less than one request in it
            heappush(waiting, ((index + 1) * window_ns + ceil(draw.random() * window_ns), number, draw))
            continue
        yield at_ns, number
        heappush(waiting, (at_ns + window.gap_ns(draw, scale), number, draw))


class Window:
    """Rate and distribution of the gaps within a window."""

    __slots__ = ("_shape", "_weibull", "rate")

    def __init__(self, rate: float, shape: float, *, weibull: bool) -> None:
        self.rate = rate
        self._shape = shape
        self._weibull = weibull

    def gap_ns(self, draw: random.Random, scale: float) -> Ns:
        mean_s = 1 / (self.rate * scale)
        if self._weibull:
            gap_s = draw.weibullvariate(1.0, self._shape) * mean_s / _weibull_mean(self._shape)
        else:
            gap_s = draw.gammavariate(self._shape, mean_s / self._shape)
        return max(1, ceil(gap_s * SECOND_NS))


def _weibull_mean(shape: float) -> float:
    return gamma_function(1 + 1 / shape)
