"""What is kept on disk by the control process, and what it says of files that it cannot read."""

import sqlite3
from pathlib import Path

import pytest

from dormouse.control.catalog import Catalog, Deployed
from dormouse.core.messages import SetTimer, TimerFired
from dormouse.core.types import Settings
from dormouse.errors import ConfigurationFault, StateNotKept
from dormouse.functions import Manifest
from dormouse.journal import FORMAT, JournalWriter, read_journal
from dormouse.tensors import Signature
from tests.node.nodes import full_disk

SETTINGS = Settings(host_capacity_bytes=1)


def deployed(revision: int, name: str = "f") -> Deployed:
    return Deployed(Manifest(name, "somewhere"), revision, 10, 0, Signature((), ()), "pytorch_module")


def test_the_catalog_keeps_functions_between_openings(tmp_path: Path) -> None:
    file = tmp_path / "catalog.sqlite"
    catalog = Catalog(file)
    catalog.add(deployed(1))
    catalog.add(deployed(2, "g"))
    catalog.set_available("g", 2, False)
    catalog.close()
    again = Catalog(file)
    assert [(d.name, d.revision, d.available) for d in again.functions()] == [("f", 1, True), ("g", 2, False)]
    again.remove("f", 1)
    assert [d.name for d in again.functions()] == ["g"]
    again.close()


def test_a_name_stands_for_the_revision_added_last(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite")
    for revision in (1, 2):
        catalog.add(deployed(revision))
    assert [d.revision for d in catalog.functions()] == [2]
    catalog.close()


def test_a_catalog_that_cannot_be_written_says_so_and_stays_as_it_was(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite")
    catalog.add(deployed(1))
    with full_disk():
        for change in (
            lambda: catalog.add(deployed(2)),
            lambda: catalog.remove("f", 1),
            lambda: catalog.set_available("f", 1, False),
            lambda: catalog.next_revision("f"),
        ):
            with pytest.raises(StateNotKept, match="cannot be written"):
                change()
    assert [(d.revision, d.available) for d in catalog.functions()] == [(1, True)]
    assert catalog.next_revision("f") == 1
    catalog.close()


def test_removing_and_unloading_need_no_room(tmp_path: Path) -> None:
    """Nor does what has been opened anew, and changed more often than there is room kept."""
    for _ in range(2):
        catalog = Catalog(tmp_path / "catalog.sqlite")
        for number in range(100):
            catalog.add(deployed(1, f"f{number}"))
        with full_disk(max(file.stat().st_size for file in tmp_path.iterdir())):
            for number in range(100):
                catalog.set_available(f"f{number}", 1, False)
            for number in range(100):
                catalog.remove(f"f{number}", 1)
        assert catalog.functions() == []
        catalog.close()


def test_a_revision_number_is_never_used_twice(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite")
    assert [catalog.next_revision(name) for name in ("f", "f", "g", "f")] == [1, 2, 1, 3]
    catalog.close()


def test_a_catalog_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    file = tmp_path / "catalog.sqlite"
    Catalog(file).close()
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigurationFault, match="schema 99, this version reads 1"):
        Catalog(file)


def test_a_file_that_is_no_catalog_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "catalog.sqlite"
    file.write_bytes(b"this is no database, however long it may be" * 100)
    with pytest.raises(ConfigurationFault, match="cannot be used as the catalog"):
        Catalog(file)


def test_a_journal_is_read_back_up_to_where_it_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    writer = JournalWriter(file, SETTINGS)
    for now in (1, 2):
        writer.append(now, TimerFired(), [SetTimer(now + 1)])
    writer.close()
    file.write_bytes(file.read_bytes()[:-1])
    record = read_journal(file)
    settings, entries = record.settings, record.entries
    assert settings == SETTINGS
    assert [(e.now, e.commands) for e in entries] == [(1, [SetTimer(2)])]


def test_a_journal_on_a_full_disk_ends_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    writer = JournalWriter(Path("/dev/full"), SETTINGS)
    for now in range(10_000):
        writer.append(now, TimerFired(), [SetTimer(now + 1)])
    writer.close()
    assert [record.message for record in caplog.records] == [
        "the journal /dev/full ends early: No space left on device"
    ]


def test_what_earlier_starts_have_recorded_is_kept_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    (tmp_path / "journal.toml").write_text("somebody else's")
    for now in (1, 2, 3):
        writer = JournalWriter(file, SETTINGS)
        writer.append(now, TimerFired(), [])
        writer.close()
    found = [
        [entry.now for entry in read_journal(tmp_path / name).entries] for name in ("journal.1", "journal.2", "journal")
    ]
    assert found == [[1], [2], [3]]


def test_after_the_oldest_was_deleted_the_next_is_still_the_last(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    (tmp_path / "journal.2").touch()
    for _ in range(2):
        JournalWriter(file, SETTINGS).close()
    assert sorted(other.name for other in tmp_path.iterdir()) == ["journal", "journal.2", "journal.3"]


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.write_bytes(b"dear diary\n")
    with pytest.raises(ConfigurationFault, match="is no journal"):
        read_journal(file)


def test_a_journal_of_another_format_is_refused_with_both_formats(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.write_bytes(b'{"format":9,"settings":{"host_capacity_bytes":1}}\n')
    with pytest.raises(ConfigurationFault, match=f"format 9, this version reads {FORMAT}"):
        read_journal(file)


def test_a_journal_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match="cannot be written"):
        JournalWriter(tmp_path / "nowhere" / "journal", SETTINGS)
