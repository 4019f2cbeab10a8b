"""The slab: ranges that never overlap, never get lost, and are seen by the other process."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.slab import ALIGNMENT_BYTES, Slab


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create(1024)
    yield slab
    slab.close()


def test_ranges_are_aligned_and_the_first_gap_that_fits_is_taken(slab: Slab) -> None:
    assert [slab.allocate(size) for size in (1, 65, 64)] == [0, 64, 192]
    slab.free(64)
    assert slab.allocate(200) == 256
    assert slab.allocate(128) == 64
    assert slab.used_bytes == 64 + 128 + 64 + 256


def test_a_full_slab_says_none_and_recovers(slab: Slab) -> None:
    assert slab.allocate(1025) is None
    offsets = [slab.allocate(512), slab.allocate(512)]
    assert offsets == [0, 512]
    assert slab.allocate(0) is None
    slab.free(0)
    slab.free(512)
    assert slab.allocate(1024) == 0


def test_freed_neighbours_become_one_gap_in_any_order(slab: Slab) -> None:
    for order in ((0, 64, 128), (128, 64, 0), (0, 128, 64), (64, 0, 128)):
        assert [slab.allocate(64) for _ in range(3)] == [0, 64, 128]
        for offset in order:
            slab.free(offset)
        assert slab.allocate(1024) == 0
        slab.free(0)


def test_reset_frees_everything(slab: Slab) -> None:
    for _ in range(5):
        slab.allocate(100)
    slab.reset()
    assert slab.used_bytes == 0
    assert slab.allocate(1024) == 0


def test_the_readers_side_can_neither_write_nor_allocate(slab: Slab) -> None:
    reader = Slab.attach(os.dup(slab.fd), slab.size_bytes)
    with slab.view(64, 5) as view:
        view[:] = b"hello"
    with reader.view(64, 5) as view:
        assert bytes(view) == b"hello"
        assert view.readonly
    assert reader.allocate(1) is None
    reader.close()


CHILD = """
import sys
from dormouse.slab import Slab
reply = Slab.attach(int(sys.argv[1]), 1024, owner=True)
for _ in range(2):
    offset = reply.allocate(3)
with reply.view(offset, 3) as view:
    view[:] = b"abc"
print(offset)
"""


def test_a_slab_made_here_is_owned_by_a_child_that_inherits_it() -> None:
    slab = Slab.create(1024, owner=False)
    command = [sys.executable, "-c", CHILD, str(slab.fd)]
    child = subprocess.run(command, pass_fds=[slab.fd], stdout=subprocess.PIPE, check=True)
    with slab.view(int(child.stdout), 3) as view:
        assert bytes(view) == b"abc"
    assert slab.allocate(1) is None
    slab.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=80))
def test_ranges_never_overlap_and_no_byte_is_lost(steps: list[tuple[bool, int]]) -> None:
    slab = Slab.create(4096 + 7)
    held: dict[int, int] = {}
    for allocate, number in steps:
        if allocate:
            offset = slab.allocate(number)
            taken = sorted((start, start + size) for start, size in held.items())
            ends = [0, *(end for _, end in taken)]
            gaps = [start - end for end, start in zip(ends, [*(start for start, _ in taken), 4096], strict=True)]
            assert (offset is None) == (max(gaps) < max(number, 1)), "refused although a gap fits, or the reverse"
            if offset is not None:
                assert offset % ALIGNMENT_BYTES == 0
                held[offset] = -(-max(number, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                assert all(offset + held[offset] <= start or end <= offset for start, end in taken)
        elif held:
            offset = sorted(held)[number % len(held)]
            slab.free(offset)
            del held[offset]
        assert slab.used_bytes == sum(held.values())
    slab.close()
