"""The queue of functions by urgency, against a plain dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.ready import ReadyQueue
from dormouse.core.types import FunctionId

NAMES = st.sampled_from([FunctionId(letter) for letter in "abcd"])


@given(st.lists(st.tuples(NAMES, st.none() | st.integers(0, 5)), max_size=400))
def test_the_first_is_always_the_smallest_key(steps: list[tuple[FunctionId, int | None]]) -> None:
    queue, model = ReadyQueue(), dict[FunctionId, tuple[int, int, int]]()
    for name, key in steps:
        if key is None:
            queue.discard(name)
            model.pop(name, None)
        else:
            model[name] = (key, 0, 0)
            queue.put(name, model[name])
        first = queue.first()
        assert first == min(model, key=lambda n: (model[n], n), default=None)
        assert len(queue) == len(model)
        assert (name in queue) == (name in model)


def test_stale_entries_do_not_pile_up() -> None:
    queue = ReadyQueue()
    for key in range(10_000):
        queue.put(FunctionId("a"), (key, 0, 0))
    assert len(queue._heap) < 200
    assert queue.first() == "a"
