from __future__ import annotations

import os
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest

from edgefl.core.errors import StoreError, StoreTooNewError
from edgefl.storage.database import SCHEMA_REVISION
from edgefl.storage.sqlite_backup import check_database, copy_database, get_device_versions, list_model_hashes
from edgefl.storage.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store that nobody has open, with some pages in it."""
    made = tmp_path / "edgefl.db"
    with Store.open(made) as store, store.batch():
        for number in range(300):
            store.record_event("kind", "text " * 20, at=float(number))
    return made


def count(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM events").fetchone()[0])


def test_a_copy_is_one_private_file_with_what_was_committed(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        store.record_event("kind", "in the write-ahead log", at=1.0)
        copy_database(path, tmp_path / "copy.db")
    assert count(tmp_path / "copy.db") == 301
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.glob("copy.db*")] == ["copy.db"]
    assert check_database(tmp_path / "copy.db")[1] == ()


def test_a_copy_is_one_state_of_a_store_that_is_written_all_the_time(path: Path, tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        with Store.open(path) as store:
            while not stop.is_set():
                with store.batch():  # always both or none
                    store.record_event("left", "x" * 200, at=1.0)
                    store.record_event("right", "x" * 200, at=1.0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(4):
            copy_database(path, tmp_path / f"copy-{number}.db")
    finally:
        stop.set()
        writer.join()
    for number in range(4):
        with closing(sqlite3.connect(tmp_path / f"copy-{number}.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            counts = dict(connection.execute("SELECT kind, COUNT(*) FROM events GROUP BY kind"))
        assert counts.get("left", 0) == counts.get("right", 0)


def test_looking_at_a_store_makes_no_file_and_changes_no_byte(path: Path) -> None:
    before = (path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir()))
    assert check_database(path) == (SCHEMA_REVISION, ())
    assert list_model_hashes(path) == frozenset()
    assert get_device_versions(path) == {}
    assert (path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir())) == before


def test_damaged_pages_are_found(path: Path) -> None:
    body = bytearray(path.read_bytes())
    pages = len(body) // 4096
    body[4096 * (pages - 3) : 4096 * (pages - 2)] = os.urandom(4096)
    path.write_bytes(body)
    assert check_database(path)[1]


def test_what_is_no_store_of_ours_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        check_database(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("hello, this is no database at all" * 100)
    with pytest.raises(StoreError, match="cannot be read"):
        check_database(tmp_path / "text.db")
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (x)")
    with pytest.raises(StoreError, match="not of edgefl"):
        check_database(tmp_path / "other.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(StoreTooNewError, match="update edgefl"):
        check_database(path)
    with pytest.raises(StoreError, match="no store at"):
        copy_database(tmp_path / "none.db", tmp_path / "copy.db")
