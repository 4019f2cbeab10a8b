"""Pages in segments: there as a whole or not at all, whatever happens while they are written."""

import os
from pathlib import Path

import pytest

from dormouse.billing.segments import SegmentWriter, file_of, numbers_in, pages_of
from tests.node.nodes import full_disk


def read(directory: Path, number: int) -> list[bytes]:
    return [page for page, _ in pages_of(file_of(directory, number).read_bytes())]


def test_pages_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "process")
    for page in (b"one", b"two" * 1000, b"three"):
        writer.append(page)
    writer.close()
    assert read(tmp_path, 1) == [b"one", b"two" * 1000, b"three"]


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_page_of_which_anything_is_missing_is_not_there(tmp_path: Path, lost: int) -> None:
    writer = SegmentWriter(tmp_path, "process")
    writer.append(b"one")
    writer.append(b"two")
    writer.close()
    file = file_of(tmp_path, 1)
    os.truncate(file, file.stat().st_size - lost)
    assert read(tmp_path, 1) == ([b"one"] if lost < 12 else [])


def test_a_page_with_a_wrong_bit_ends_what_is_read(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "process")
    writer.append(b"one")
    writer.append(b"two")
    writer.close()
    data = bytearray(file_of(tmp_path, 1).read_bytes())
    data[-1] ^= 1
    assert [page for page, _ in pages_of(bytes(data))] == [b"one"]


def test_zeros_that_a_lost_write_left_are_no_page() -> None:
    assert list(pages_of(bytes(64))) == []


def test_a_full_disk_leaves_nothing_and_the_next_page_is_found(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "process")
    writer.append(b"one")
    with full_disk(), pytest.raises(OSError, match="too large"):
        writer.append(b"two")
    writer.append(b"three")
    writer.close()
    assert read(tmp_path, 1) == [b"one", b"three"]


def test_a_disk_that_fills_up_in_the_middle_of_a_page_leaves_nothing_of_it(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "process")
    writer.append(b"one")
    with full_disk(leaving_bytes=file_of(tmp_path, 1).stat().st_size + 20), pytest.raises(OSError, match="too large"):
        writer.append(b"two" * 100)
    assert read(tmp_path, 1) == [b"one"]
    writer.append(b"three")
    writer.close()
    assert read(tmp_path, 1) == [b"one", b"three"]


@pytest.mark.parametrize("sync", ["process", "power"])
def test_a_segment_that_is_long_enough_is_followed_by_another(tmp_path: Path, sync: str) -> None:
    writer = SegmentWriter(tmp_path, "power" if sync == "power" else "process", segment_bytes=100)
    for _ in range(4):
        writer.append(b"x" * 60)
        writer.sync()
    writer.close()
    assert numbers_in(tmp_path) == [1, 2]
    assert [len(read(tmp_path, number)) for number in (1, 2)] == [2, 2]


def test_a_writer_never_adds_to_what_another_one_began(tmp_path: Path) -> None:
    SegmentWriter(tmp_path, "process").append(b"one")
    SegmentWriter(tmp_path, "process", after=7).append(b"two")
    assert numbers_in(tmp_path) == [1, 8]
