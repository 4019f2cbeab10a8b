"""The host tier over a real arena and real files: reading, checking, dropping, and what goes wrong."""

import asyncio
import errno
import random
import zlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.types import FunctionId
from dormouse.errors import DormouseError, HostMemoryFull, RefusedSource
from dormouse.store.arena import Arena
from dormouse.store.freepages import FreePages, Run
from dormouse.store.host import HostStore
from dormouse.store.index import (
    DATA_FILE,
    INDEX_FILE,
    PAGE_BYTES,
    FactorySkeleton,
    ImageIndex,
    read_index,
    write_index,
)
from dormouse.store.writeback import REDO_FILE, settle
from dormouse.tensors import Signature
from dormouse.wire import Extent

SEGMENT = 4 * PAGE_BYTES
F, G = FunctionId("f/1"), FunctionId("g/1")


def make_image(directory: Path, pages: int, *, state_pages: int = 0, seed: int = 0) -> bytes:
    """An image of noise on disk; its content as it lies in the file."""
    directory.mkdir()
    image_bytes = pages * PAGE_BYTES - 1000
    content = random.Random(seed).randbytes(image_bytes) + bytes(1000)
    weight_bytes = (pages - state_pages) * PAGE_BYTES if state_pages else image_bytes
    checksums = tuple(zlib.crc32(content[at : at + PAGE_BYTES]) for at in range(0, len(content), PAGE_BYTES))
    (directory / DATA_FILE).write_bytes(content)
    skeleton = FactorySkeleton("module:callable", "", {})
    write_index(
        directory, ImageIndex((), weight_bytes, image_bytes, checksums, skeleton, Signature((), ()), "pytorch_module")
    )
    return content


def content_of(store: HostStore, function: FunctionId) -> bytes:
    parts = []
    for extent in store.extents(function):
        with store.arena.view(extent) as view:
            parts.append(bytes(view))
    return b"".join(parts)


def overwrite(store: HostStore, function: FunctionId, page: int, value: bytes) -> None:
    """Change a page in the arena, as an executor does that writes runtime state home."""
    pages = [at for e in store.extents(function) for at in range(e.offset, e.offset + e.size_bytes, PAGE_BYTES)]
    with store.arena.view(Extent(pages[page], PAGE_BYTES)) as view:
        view[:] = value * PAGE_BYTES


def run(scenario: Callable[[HostStore], Awaitable[None]], *, pages: int = 12, threads: int = 3) -> list[Extent]:
    """Run a scenario with a store of its own; the growths that were reported."""
    growths: list[Extent] = []

    async def whole() -> None:
        def grown(offset: int, size_bytes: int) -> None:
            growths.append(Extent(offset, size_bytes))

        store = HostStore(pages * PAGE_BYTES, grown, threads=threads, segment_bytes=SEGMENT)
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(whole())
    return growths


# ------------------------------------------------------------------ reading


def test_an_image_is_read_into_pages_that_hold_its_bytes(tmp_path: Path) -> None:
    content = make_image(tmp_path / "f", 3)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        assert content_of(store, F) == content
        assert (store.arena.used_bytes, store.arena.free_bytes) == (3 * PAGE_BYTES, 9 * PAGE_BYTES)

    assert run(scenario) == [Extent(0, SEGMENT)]


def test_an_image_larger_than_a_segment_lies_in_extents_that_straddle_none(tmp_path: Path) -> None:
    content = make_image(tmp_path / "f", 10)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        extents = store.extents(F)
        assert all(e.offset // SEGMENT == (e.offset + e.size_bytes - 1) // SEGMENT for e in extents)
        assert content_of(store, F) == content
        assert store.arena.segments() == (Extent(0, SEGMENT), Extent(SEGMENT, SEGMENT), Extent(2 * SEGMENT, SEGMENT))

    assert run(scenario) == [Extent(0, SEGMENT), Extent(SEGMENT, SEGMENT), Extent(2 * SEGMENT, SEGMENT)]


def test_scattered_pages_are_enough(tmp_path: Path) -> None:
    for number in range(12):
        make_image(tmp_path / str(number), 1, seed=number)
    content = make_image(tmp_path / "f", 6)

    async def scenario(store: HostStore) -> None:
        for number in range(12):
            await store.read(FunctionId(f"small/{number}"), tmp_path / str(number))
        for number in range(0, 12, 2):
            await store.drop(FunctionId(f"small/{number}"))
        await store.read(F, tmp_path / "f")
        assert len(store.extents(F)) == 6
        assert content_of(store, F) == content

    run(scenario)


def test_a_growth_is_reported_before_the_read_that_needed_it_ends(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 2)
    seen: list[str] = []

    async def scenario() -> None:
        store = HostStore(4 * PAGE_BYTES, lambda offset, size: seen.append(f"{offset}+{size}"), segment_bytes=SEGMENT)
        await store.read(F, tmp_path / "f")
        seen.append("read")
        await store.close()

    asyncio.run(scenario())
    assert seen == [f"0+{SEGMENT}", "read"]


def test_reads_of_one_function_at_once_are_one_read(tmp_path: Path) -> None:
    content = make_image(tmp_path / "f", 3)

    async def scenario(store: HostStore) -> None:
        await asyncio.gather(*(store.read(F, tmp_path / "f") for _ in range(20)))
        assert store.arena.peak_bytes == 3 * PAGE_BYTES
        assert content_of(store, F) == content

    run(scenario)


def test_a_reader_that_goes_away_does_not_stop_the_read(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 3)

    async def scenario(store: HostStore) -> None:
        first = asyncio.create_task(store.read(F, tmp_path / "f"))
        second = asyncio.create_task(store.read(F, tmp_path / "f"))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert store.holds(F)

    run(scenario)


def test_many_functions_come_and_go_at_once(tmp_path: Path) -> None:
    contents = [make_image(tmp_path / str(number), 1 + number % 3, seed=number) for number in range(12)]

    async def one(store: HostStore, number: int, room: asyncio.Semaphore) -> None:
        function = FunctionId(f"f/{number}")
        for _ in range(3):
            async with room:
                await store.read(function, tmp_path / str(number))
                assert content_of(store, function) == contents[number]
                await store.drop(function)

    async def scenario(store: HostStore) -> None:
        room = asyncio.Semaphore(4)  # four of three pages fill the arena
        await asyncio.gather(*(one(store, number, room) for number in range(12)))
        assert store.arena.used_bytes == 0
        assert 0 < store.arena.peak_bytes <= 12 * PAGE_BYTES

    run(scenario)


# ------------------------------------------------------------------ refusals


def test_a_damaged_page_is_refused_by_name_and_holds_nothing(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 5)
    with (tmp_path / "f" / DATA_FILE).open("r+b") as file:
        file.seek(3 * PAGE_BYTES + 17)
        file.write(b"\x00\x01\x02\x03")

    async def scenario(store: HostStore) -> None:
        with pytest.raises(RefusedSource, match=r"f/image\.bin, page 3 is damaged: its checksum"):
            await store.read(F, tmp_path / "f")
        assert store.arena.used_bytes == 0
        assert not store.holds(F)

    run(scenario)


@pytest.mark.parametrize(("left", "page"), [(0, 0), (2 * PAGE_BYTES, 2), (3 * PAGE_BYTES - 1, 2)])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, left: int, page: int) -> None:
    make_image(tmp_path / "f", 3)
    with (tmp_path / "f" / DATA_FILE).open("r+b") as file:
        file.truncate(left)

    async def scenario(store: HostStore) -> None:
        with pytest.raises(RefusedSource, match=rf"image\.bin, page {page} is damaged: the file has {left} bytes"):
            await store.read(F, tmp_path / "f")
        assert store.arena.used_bytes == 0

    run(scenario)


@pytest.mark.parametrize("missing", [DATA_FILE, INDEX_FILE])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    make_image(tmp_path / "f", 1)
    (tmp_path / "f" / missing).unlink()

    async def scenario(store: HostStore) -> None:
        with pytest.raises(RefusedSource, match=missing):
            await store.read(F, tmp_path / "f")

    run(scenario)


def test_a_full_arena_refuses_and_takes_the_image_when_there_is_room(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 8)
    make_image(tmp_path / "g", 5)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        with pytest.raises(HostMemoryFull, match=f"{5 * PAGE_BYTES} bytes do not fit"):
            await store.read(G, tmp_path / "g")
        assert store.arena.used_bytes == 8 * PAGE_BYTES
        await store.drop(F)
        await store.read(G, tmp_path / "g")

    run(scenario)


# ------------------------------------------------------------------ dropping and deleting


def test_a_drop_frees_the_pages_and_the_image_can_be_read_again(tmp_path: Path) -> None:
    content = make_image(tmp_path / "f", 3)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        await store.drop(F)
        await store.drop(F)
        assert (store.arena.used_bytes, store.arena.peak_bytes) == (0, 3 * PAGE_BYTES)
        await store.read(F, tmp_path / "f")
        assert content_of(store, F) == content

    run(scenario)


def test_what_is_asked_of_a_function_happens_in_order(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 3)

    async def scenario(store: HostStore) -> None:
        await asyncio.gather(store.read(F, tmp_path / "f"), store.drop(F), store.read(F, tmp_path / "f"))
        assert store.holds(F)
        await asyncio.gather(store.drop(F), store.read(F, tmp_path / "f"), store.delete(F, tmp_path / "f"))
        assert not store.holds(F)
        assert not (tmp_path / "f").exists()

    run(scenario)


def test_runtime_state_survives_a_drop_and_weights_are_never_written(tmp_path: Path) -> None:
    content = make_image(tmp_path / "f", 4, state_pages=2)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        overwrite(store, F, 0, b"w")
        overwrite(store, F, 3, b"s")
        await store.drop(F)
        await store.read(F, tmp_path / "f")
        assert content_of(store, F) == content[: 3 * PAGE_BYTES] + b"s" * PAGE_BYTES

    run(scenario)
    assert not (tmp_path / "f" / REDO_FILE).exists()


def test_closing_the_store_keeps_runtime_state(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 2, state_pages=1)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        overwrite(store, F, 1, b"s")

    run(scenario)
    assert (tmp_path / "f" / DATA_FILE).read_bytes()[PAGE_BYTES:] == b"s" * PAGE_BYTES


def test_a_read_waits_for_memory_that_a_write_back_is_about_to_free(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 10, state_pages=1)
    content = make_image(tmp_path / "g", 10, seed=1)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        overwrite(store, F, 9, b"s")
        await asyncio.gather(store.drop(F), store.read(G, tmp_path / "g"))
        assert content_of(store, G) == content

    run(scenario)


def test_a_write_back_cut_short_is_finished_by_the_next_read(tmp_path: Path) -> None:
    """A crash after the redo file is whole: the image file may hold half of the new state."""
    content = make_image(tmp_path / "f", 3, state_pages=2)
    state = b"s" * (2 * PAGE_BYTES)
    (tmp_path / "f" / REDO_FILE).write_bytes(state)
    with (tmp_path / "f" / DATA_FILE).open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(state[: PAGE_BYTES + 99])

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        assert content_of(store, F) == content[:PAGE_BYTES] + state

    run(scenario)


def test_a_redo_file_that_was_not_finished_changes_nothing(tmp_path: Path) -> None:
    content = make_image(tmp_path / "f", 2, state_pages=1)
    (tmp_path / "f" / f"{REDO_FILE}.part").write_bytes(b"half")
    assert settle(tmp_path / "f") == read_index(tmp_path / "f")
    assert (tmp_path / "f" / DATA_FILE).read_bytes() == content


def test_state_that_cannot_be_written_is_told_and_its_pages_are_free(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 2, state_pages=1)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        overwrite(store, F, 1, b"s")
        (tmp_path / "f" / f"{REDO_FILE}.part").mkdir()
        with pytest.raises(DormouseError, match=r"f/1: its runtime state could not be kept .* \[Errno"):
            await store.drop(F)
        assert store.arena.used_bytes == 0

    run(scenario)


def test_a_delete_removes_the_directory_and_the_pages(tmp_path: Path) -> None:
    make_image(tmp_path / "f", 2)

    async def scenario(store: HostStore) -> None:
        await store.read(F, tmp_path / "f")
        await store.delete(F, tmp_path / "f")
        await store.delete(F, tmp_path / "f")
        assert store.arena.used_bytes == 0

    run(scenario)
    assert not (tmp_path / "f").exists()


# ------------------------------------------------------------------ the arena


def test_an_arena_without_a_page_is_refused() -> None:
    with pytest.raises(HostMemoryFull, match="do not hold one page"):
        Arena(PAGE_BYTES - 1, lambda *_: None)


def test_an_arena_takes_memory_from_the_system_only_when_it_grows() -> None:
    arena = Arena(1 << 40, lambda *_: None, segment_bytes=SEGMENT)
    assert arena.free_bytes == 1 << 40
    arena.free(arena.allocate(SEGMENT))
    assert arena.segments() == (Extent(0, SEGMENT),)
    arena.close()


def test_closing_an_arena_closes_its_descriptor() -> None:
    arena = Arena(SEGMENT, lambda *_: None, segment_bytes=SEGMENT)
    arena.allocate(1)
    arena.close()
    with pytest.raises(OSError) as fault:
        Path(f"/proc/self/fd/{arena.fd}").readlink()
    assert fault.value.errno == errno.ENOENT


def pages_in(runs: Iterable[Run]) -> int:
    return sum(count for _, count in runs)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_free_pages_are_never_lost_split_over_segments_or_given_twice(steps: list[tuple[bool, int]]) -> None:
    free = FreePages(8)
    free.add(0, 36)  # the last segment is short
    held: list[list[tuple[int, int]]] = []
    for take, number in steps:
        if take and number <= free.count:
            runs = free.take(number)
            assert pages_in(runs) == number
            held.append(runs)
        elif not take and held:
            for run in held.pop(number % len(held)):
                free.add(*run)
        everything = sorted([*free.runs(), *(run for runs in held for run in runs)])
        pages = [page for first, count in everything for page in range(first, first + count)]
        assert pages == list(range(36))
        assert all(first // 8 == (first + count - 1) // 8 for first, count in everything)
        assert free.count == pages_in(free.runs())


def test_the_shortest_run_that_fits_is_taken_and_else_the_longest_first() -> None:
    free = FreePages(100)
    for first, count in ((0, 3), (10, 5), (20, 9)):
        free.add(first, count)
    assert free.take(4) == [(10, 4)]
    assert free.take(12) == [(20, 9), (0, 3)]
    assert free.runs() == ((14, 1),)
