"""The lineage of a store goes on through crashes and full disks, and ends where its directory is an older copy."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from sqlalchemy import select

from edgefl.storage.lineage import (
    LINEAGE_FILE,
    MARK_FILE,
    RUN_FILE,
    Lineage,
    LineageMark,
    open_lineage,
    save_run_record,
)
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store
from edgefl.storage.tables import LineageTable


@pytest.fixture
def folder(tmp_path):
    """A directory with a store, whose lineage counted three durable transactions."""
    folder = tmp_path / "coordinator"
    folder.mkdir()
    with Store.open(folder / "edgefl.db") as store:
        lineage = Lineage(store, folder)
        assert lineage.finding is None, "a new store is no copy of another"
        write(store, 3)
        lineage.close()
    return folder


def write(store, number):
    for _ in range(number):
        with store.batch(durable=True):
            store.record_event("test", "something", at=1.0)


def go_on(folder, number=0):
    """Opens store and lineage as a coordinator does; returns the lineage, closed again."""
    with Store.open(folder / "edgefl.db") as store:
        lineage = Lineage(store, folder)
        write(store, number)
        lineage.close()
    return lineage


def copy(folder):
    """Returns a copy of a directory, all times and owners included, as `cp -a` makes it."""
    second = int(time.time())
    while int(time.time()) == second:  # file systems that keep whole seconds
        time.sleep(0.01)
    return shutil.copytree(folder, folder.with_name("copy"), copy_function=shutil.copy2)


def is_continued(folder, lineage_id):
    lineage = go_on(folder)
    return lineage.finding is None and lineage.lineage_id == lineage_id and lineage.num_lost_commits == 0


def test_a_lineage_goes_on_from_start_to_start(folder):
    lineage_id = go_on(folder, 2).lineage_id
    assert is_continued(folder, lineage_id)
    mark = LineageMark.decode((folder / MARK_FILE).read_bytes())
    assert (mark.lineage_id, mark.num_commits) == (lineage_id, 5)
    folder.rename(folder.with_name("elsewhere"))
    assert is_continued(folder.with_name("elsewhere"), lineage_id), "a directory may be moved"


def test_a_mark_behind_the_database_is_a_crash_and_no_copy(folder):
    lineage_id = go_on(folder).lineage_id
    with Store.open(folder / "edgefl.db") as store:
        lineage = Lineage(store, folder)
        os.close(lineage._handle)
        lineage._handle = -1  # whatever is committed now does not reach the file
        write(store, 2)
    assert is_continued(folder, lineage_id)


def test_a_full_disk_neither_ends_a_lineage_nor_stops_the_store(folder, monkeypatch, caplog):
    lineage_id = go_on(folder).lineage_id

    def raise_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("edgefl.storage.lineage.os.pwrite", raise_full)
        go_on(folder, 3)
    assert len(caplog.records) == 1
    assert is_continued(folder, lineage_id)


def test_a_copy_of_the_directory_begins_a_new_lineage_once(folder):
    former = go_on(folder).lineage_id
    restored = copy(folder)
    lineage = go_on(restored)
    assert "is a copy" in lineage.finding
    assert lineage.lineage_id != former
    assert is_continued(restored, lineage.lineage_id)
    assert is_continued(folder, former)


def test_an_older_copy_put_over_the_directory_begins_a_new_lineage(folder):
    former, older = go_on(folder).lineage_id, copy(folder)
    go_on(folder, 2)
    for path in older.iterdir():
        if path.name == LINEAGE_FILE:
            continue  # equal in size and time: rsync leaves it alone
        shutil.copy2(path, folder / ".new")
        (folder / ".new").replace(folder / path.name)
    assert go_on(folder).lineage_id != former


@pytest.mark.parametrize("name", [LINEAGE_FILE, MARK_FILE])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_missing_or_damaged_file_begins_a_new_lineage(folder, name, is_damaged):
    former = go_on(folder).lineage_id
    if is_damaged:
        with (folder / name).open("r+b") as file:
            file.write(b"\0")
    else:
        (folder / name).unlink()
    lineage = go_on(folder)
    assert lineage.lineage_id != former
    assert "missing or damaged" in lineage.finding or "is a copy" in lineage.finding


KILLED = """
import os, sys
from pathlib import Path
from edgefl.storage.lineage import Lineage
from edgefl.storage.store import Store
folder = Path(sys.argv[1])
store = Store.open(folder / "edgefl.db")
lineage = Lineage(store, folder)
for _ in range(4):
    with store.batch(durable=True):
        store.record_event("test", "something", at=1.0)
os._exit(0)
"""


def test_a_lost_write_ahead_log_is_noticed_with_the_number_of_lost_transactions(folder):
    lineage_id = go_on(folder).lineage_id
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=True)
    assert (folder / "edgefl.db-wal").stat().st_size > 0
    for end in ("-wal", "-shm"):
        (folder / f"edgefl.db{end}").unlink()
    lineage = go_on(folder)
    assert (lineage.num_lost_commits, lineage.lineage_id == lineage_id) == (4, False)
    assert "write-ahead log (-wal) was removed or cut" in lineage.finding
    assert is_continued(folder, lineage.lineage_id)


def test_a_kill_loses_nothing_and_ends_no_lineage(folder):
    lineage_id = go_on(folder).lineage_id
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=True)
    assert is_continued(folder, lineage_id)


@pytest.fixture
def store_without_rows(folder):
    """A store that has lost the row of its run `r1`, which lies in the run's folder too."""
    with Store.open(folder / "edgefl.db") as store:
        config = {"run": {"task": "digits"}}
        run = {"run_id": "r1", "name": "", "task": "digits", "strategy": "fedavg", "config": config}
        store.add_run(**run, seed=1, submitted_at=1.0)
        (folder / "runs" / "r1").mkdir(parents=True)
        save_run_record(folder / "runs", store.get_run("r1"))
        with store.database.write(durable=True) as connection:
            connection.exec_driver_sql("DELETE FROM runs")
        (folder / MARK_FILE).unlink()
        yield store


def restore(store, folder):
    open_lineage(store, folder, runs_folder=folder / "runs", now=2.0).close()


def test_a_run_that_the_store_lost_gets_its_row_again(store_without_rows, folder):
    restore(store_without_rows, folder)
    run = store_without_rows.get_run("r1")
    assert (run.status, run.seed) == (RunStatus.RUNNING, 1)


def test_a_damaged_row_beside_a_journal_is_a_warning_and_not_the_end(store_without_rows, folder, caplog):
    path = folder / "runs" / "r1" / RUN_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": {"a": 1}}))
    restore(store_without_rows, folder)
    assert store_without_rows.list_runs() == []
    assert "r1 cannot be restored" in caplog.text


def test_hosts_that_share_a_store_go_on_with_its_lineage_unless_it_lost_what_one_has_seen(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / MARK_FILE).write_bytes(LineageMark(lineage_id="f" * 32, num_commits=99).encode())
    with Store.open(folder / "edgefl.db") as store:
        known = [Lineage(store, place, is_shared=True) for place in (other, folder)]
        assert {lineage.lineage_id for lineage in known} == {
            store.database.read_value(select(LineageTable.lineage_id))
        }
        for lineage in known:
            lineage.close()
        (other / MARK_FILE).write_bytes(LineageMark(lineage_id=known[0].lineage_id, num_commits=99).encode())
        behind = Lineage(store, other, is_shared=True)
        behind.close()
    assert behind.lineage_id != known[0].lineage_id
