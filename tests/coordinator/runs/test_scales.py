"""Means and scales in a run's record, from an earlier run's result."""

import json

import numpy as np
import pytest

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs.scales import find_scales_run, record_scales
from edgefl.coordinator.runs.stalls import WAITING, IdleRuns
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import ConfigError, NotFoundError, RunFailedError
from edgefl.engine.assembly.normalisation import make_scales_run, name_scales_run, should_find_scales
from edgefl.storage.checkpoints import save_model
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import RunStatus, SavedModelRow
from edgefl.storage.store import Store
from edgefl.tasks.analyses.analysis import pack_result

CONFIG = parse_run(
    {
        "run": {"task": "table", "name": "house", "rounds": 5, "local_test_fraction": 0.25},
        "task": {"columns": ["heat", "damp"], "target": "load", "normalise": "fleet"},
        "strategy": {"name": "fedavg", "batch_size": 4},
        "devices": {"min": 3, "count": 3, "groups": ["ground"]},
    }
)
COLUMNS = [{"name": "heat", "mean": 1 / 3, "scale": 2e-9}, {"name": "damp", "mean": -5e7, "scale": 1.0}]


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_run_behind_the_one_that_finds_its_scales_is_not_told_to_stop_that(is_needed):
    runs = IdleRuns()
    runs.add("r1", "waiting for 3 more boards", WAITING, is_needed=is_needed)
    reason = runs.apply_to({"run_id": "r2", "status": "queued"})["reason"]
    assert reason.startswith("it comes after run r1, which waits for boards")
    assert ("edgefl run stop r1" in reason, "finds means and scales" in reason) == (not is_needed, is_needed)


@pytest.fixture
def directory(tmp_path):
    return CoordinatorDirectory(root=tmp_path, fleet="lab", hosts=())


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


def add(store, run_id, config):
    return store.add_run(
        run_id=run_id,
        name=run_id,
        task=config.run.task,
        strategy=config.strategy.name,
        config=config.to_json(),
        seed=1,
        submitted_at=1.0,
    )


def finish(store, directory, run_id, result):
    sha256, path = save_model(directory.models, pack_result(result))
    row = SavedModelRow(version=1, round=1, last_record=1, sha256=sha256, bytes_file=path.stat().st_size, at=2.0)
    store.record_saved_model(run_id, row)
    store.set_run_status(run_id, RunStatus.FINISHED, at=3.0)
    return path


def test_the_run_that_asks_is_about_the_same_boards_and_the_examples_that_they_train_on():
    asked = make_scales_run(CONFIG)
    assert (asked.strategy.name, asked.run.name, asked.run.rounds) == ("column-scales", "house-scales", 1)
    assert (asked.devices.min, asked.devices.groups, asked.devices.count) == (3, ("ground",), None)
    assert asked.run.local_test_fraction == 0.25
    assert dict(asked.task) == {"columns": "heat,damp", "target": "load"}
    assert not should_find_scales(asked)
    assert RunConfig.from_json(asked.to_json()) == asked


def test_a_run_has_the_numbers_in_its_record_whatever_becomes_of_the_result(store, directory):
    add(store, "scales", make_scales_run(CONFIG))
    record = add(store, "house", name_scales_run(CONFIG, "scales"))
    rogue = [{**column, "left_out": ["board-9"]} for column in COLUMNS]
    path = finish(store, directory, "scales", {"columns": rogue})
    found = record_scales(record, store, directory)
    assert store.get_run("house") == found
    config = RunConfig.from_json(found.config)
    numbers = {name: np.array(config.task[name].split(","), np.float32) for name in ("means", "scales")}
    assert numbers["means"].tolist() == np.array([1 / 3, -5e7], np.float32).tolist()
    assert numbers["scales"].tolist() == np.array([2e-9, 1], np.float32).tolist()
    assert "normalise" not in config.task
    (event,) = [row for row in read_history(store, "events", run="house") if row["kind"] == "scales-left-out"]
    assert (event["device_id"], event["message"].startswith("left out of the scales of heat, damp: ")) == (
        "board-9",
        True,
    )
    path.unlink()
    assert record_scales(store.get_run("house"), store, directory) == found


def test_a_run_whose_scales_were_not_found_fails_in_one_line(store, directory):
    add(store, "scales", make_scales_run(CONFIG))
    record = add(store, "house", name_scales_run(CONFIG, "scales"))
    store.set_run_status("scales", RunStatus.STOPPED, at=2.0, reason="stopped by the operator")
    with pytest.raises(RunFailedError, match="run scales has found no means and scales, it is stopped: stopped by"):
        record_scales(record, store, directory)
    finish(store, directory, "scales", {"min_group": 5, "columns": []})
    with pytest.raises(RunFailedError, match="each had fewer than 5 examples"):
        record_scales(record, store, directory)
    assert json.loads(json.dumps(store.get_run("house").config)) == name_scales_run(CONFIG, "scales").to_json()


def test_an_earlier_run_must_be_about_the_same_columns(store):
    add(store, "scales", make_scales_run(CONFIG))
    add(store, "training", CONFIG)
    assert find_scales_run(CONFIG, store) is None
    assert find_scales_run(name_scales_run(CONFIG, "scales"), store) == "scales"
    with pytest.raises(ConfigError, match="must name a run of column-scales on task table, got one of fedavg"):
        find_scales_run(name_scales_run(CONFIG, "training"), store)
    with pytest.raises(NotFoundError):
        find_scales_run(name_scales_run(CONFIG, "nothing"), store)
    other = parse_run({"run": {"task": "table"}, "task": {"columns": "damp,heat", "target": "load"}})
    with pytest.raises(ConfigError, match="about the same columns, damp,heat, got one about heat,damp"):
        find_scales_run(name_scales_run(other, "scales"), store)
