"""When a function's first run begins: late enough to leave the lane to others, early enough to end with its copy."""

import pytest

from dormouse.core.lead import MARGIN_NS, Lead
from dormouse.core.messages import (
    Command,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFinished,
    ImageNearlyArrived,
    Load,
    LoadFinished,
    Reply,
)
from dormouse.core.state import ResidencyState
from dormouse.core.types import FOREVER_NS, FunctionId, Limits, Path
from tests.core.bench import GPU, MS, Bench, every, only

A = FunctionId("a/1")


class Story:
    """One device that holds one of the functions a and b beside the small function s, which stays."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.join(capacity_mib=12)
        for name, mib in (("s/1", 2), ("a/1", 10), ("b/1", 10)):
            self.bench.park(name, mib, limits=Limits(queue_length=8, timeout_ns=10_000 * MS))

    def pending(self, kind: type[Load] | type[Execute]) -> Load | Execute:
        commands = self.bench.state.executors[GPU].pending.values()
        (found,) = [command for command in commands if isinstance(command, kind)]
        return found

    def near(self) -> list[Command]:
        load = self.pending(Load)
        return self.bench.send(ImageNearlyArrived(GPU, load.command, load.function))

    def loaded(self, after_ms: float = 1) -> list[Command]:
        load = self.pending(Load)
        return self.bench.send(LoadFinished(GPU, load.command, load.function, 1), after_ms=after_ms)

    def executed(self, device_ms: float = 1, after_ms: float = 1) -> list[Command]:
        run = self.pending(Execute)
        assert isinstance(run, Execute)
        done = ExecutionFinished(GPU, run.command, run.request, round(device_ms * MS))
        return self.bench.send(done, after_ms=after_ms)

    def evicted(self) -> None:
        """What had to make room has gone."""
        for command in list(self.bench.state.executors[GPU].pending.values()):
            if isinstance(command, Evict):
                self.bench.send(EvictionFinished(GPU, command.command, command.function))

    def known(self, name: str, device_ms: float) -> None:
        """Bring a function in and run it there, so that its computing time is known."""
        self.bench.ask(name)
        if isinstance(self.bench.state.executors[GPU].copying, str):
            self.evicted()
            self.loaded()
        self.executed(device_ms)
        self.bench.ask(name)
        self.executed(device_ms)

    def lead_ns(self, name: str) -> int:
        return self.bench.state.functions[FunctionId(name)].lead.lead_ns


@pytest.fixture
def story() -> Story:
    story = Story()
    for name in ("s/1", "a/1", "b/1"):
        story.known(name, device_ms=4)
    return story


def test_a_resident_hit_starts_at_once_while_another_function_loads(story: Story) -> None:
    load = only(story.bench.ask("a/1"), Load)
    assert load.lead_ns == round(4.6 * MS) + MARGIN_NS
    assert story.bench.state.executors[GPU].executing is None, "the lane is free although a function is on its way"
    assert only(story.bench.ask("s/1"), Execute).function == "s/1"


def test_the_first_run_begins_when_the_image_has_nearly_arrived_and_overlaps_its_copy(story: Story) -> None:
    assert every(story.bench.ask("a/1"), Execute) == []
    assert only(story.near(), Execute).function == "a/1"
    assert story.bench.state.functions[A].residencies[GPU].state is ResidencyState.STREAMING
    story.loaded()
    assert only(story.executed(), Reply).path is Path.HOST


def test_a_hit_runs_before_a_function_that_nears_while_the_lane_is_taken(story: Story) -> None:
    story.bench.ask("a/1")
    story.bench.ask("s/1")
    story.bench.ask("s/1")
    assert every(story.near(), Execute) == []
    assert only(story.executed(), Execute).function == "s/1"
    assert only(story.executed(), Execute).function == "a/1"


def test_nobody_has_to_say_so_of_a_copy_that_is_there(story: Story) -> None:
    story.bench.ask("a/1")
    assert only(story.loaded(), Execute).function == "a/1"


def test_only_a_pending_load_nears(story: Story) -> None:
    story.bench.ask("a/1")
    load = story.pending(Load)
    story.loaded()
    with pytest.raises(AssertionError, match="not pending"):
        story.bench.core.handle(story.bench.now, ImageNearlyArrived(GPU, load.command, A))


def swapped(story: Story, name: str, *, copy_ms: float, device_ms: float) -> int:
    """A request for a function that has to come first; the lead that its load was given."""
    load = only(story.bench.ask(name), Load)
    story.evicted()
    if load.lead_ns < FOREVER_NS:
        story.near()
    if device_ms < copy_ms:
        story.executed(device_ms, after_ms=copy_ms)
        story.loaded(after_ms=0)
    else:
        story.loaded(after_ms=copy_ms)
        story.executed(device_ms, after_ms=device_ms - copy_ms)
    return load.lead_ns


def test_until_a_function_has_run_its_first_run_begins_at_once() -> None:
    story = Story()
    assert swapped(story, "a/1", copy_ms=20, device_ms=19) == FOREVER_NS
    assert story.lead_ns("a/1") == FOREVER_NS, "a run after a build tells nothing"


def test_the_lead_of_a_function_that_only_ever_swaps_shrinks_until_it_is_bound_by_computing() -> None:
    story = Story()
    for name in ("a/1", "b/1"):
        swapped(story, name, copy_ms=20, device_ms=19)
    leads = []
    for device_ms in (80, 46, 24, 14, 14):
        leads.append(swapped(story, "a/1", copy_ms=device_ms / 4 if device_ms == 14 else 100, device_ms=device_ms) / MS)
        swapped(story, "b/1", copy_ms=20, device_ms=30)
    assert leads == pytest.approx([FOREVER_NS / MS, 46.5, 23.5, 12, 16.6])


def test_a_known_time_rises_at_once_and_falls_slowly() -> None:
    lead = Lead()
    for device_ns, expected in ((800, 800), (1600, 1600), (800, 1500), (2000, 2000)):
        lead.computed(device_ns)
        assert lead.computing_ns == expected
    lead.waited(3000)
    assert lead.computing_ns == 2000, "it waited; how long it computes is known"
    lead.waited(1200)
    assert lead.computing_ns == 1900


def test_memory_of_a_function_that_nears_is_not_taken(story: Story) -> None:
    story.bench.ask("a/1")
    story.near()
    assert story.bench.state.functions[A].is_source_of_a_copy
    assert every(story.bench.ask("b/1"), Load) == []
    assert story.bench.state.executors[GPU].free_bytes == 0
