"""What the coordinator rebuilds of a store that has lost its newest transactions."""

import json

import pytest

from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.lineage import RUN_FILE, open_lineage, save_run_record
from edgefl.storage.lineage import MARK_FILE
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store


@pytest.fixture
def directory(tmp_path):
    """A directory with one run, `r1`, whose row is in the run's folder, too."""
    directory = init_directory(tmp_path / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=1)
    with Store.open(directory.database) as store:
        open_lineage(directory, store, now=1.0).close()
        config = {"run": {"task": "digits"}}
        run = {"run_id": "r1", "name": "", "task": "digits", "strategy": "fedavg", "config": config}
        store.add_run(**run, seed=1, submitted_at=1.0)
        (directory.runs / "r1").mkdir(parents=True)
        save_run_record(directory, store.get_run("r1"))
        with store.database.write(durable=True) as connection:
            connection.exec_driver_sql("DELETE FROM runs")
    (directory.root / MARK_FILE).unlink()
    return directory


def test_a_run_that_the_store_lost_gets_its_row_again(directory):
    with Store.open(directory.database) as store:
        open_lineage(directory, store, now=2.0).close()
        assert (store.get_run("r1").status, store.get_run("r1").seed) == (RunStatus.RUNNING, 1)


def test_a_damaged_row_beside_a_journal_is_a_warning_and_not_the_end(directory, caplog):
    path = directory.runs / "r1" / RUN_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": {"a": 1}}))
    with Store.open(directory.database) as store:
        open_lineage(directory, store, now=2.0).close()
        assert store.list_runs() == []
    assert "r1 cannot be restored" in caplog.text
