"""`edgefl.simulate`: a whole run in virtual time, as one call."""

from __future__ import annotations

import json

import apart_strategy
import pytest
from sqlalchemy import text

import edgefl
from edgefl.errors import ConfigError, RunFailedError, StrategyError, TaskError
from edgefl.storage.checkpoints import load_model_file
from edgefl.storage.store import Store
from edgefl.strategies.registry import BUILT_IN

FAULTS = """
[[fault]]
device = "device-02"
at_s = 2.0
kind = "kill"
for_s = 30
[[fault]]
device = "device-03"
at_s = 0.0
kind = "slow"
factor = 3
"""


def run_file(**sections):
    tables = {"run": {"task": "digits", "rounds": 3, "seed": 7}, "task": {"model": "logistic"}}
    for name, values in sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    return tables


def everything(root):
    """Every row of every table, as JSON."""
    with Store.open(root / "edgefl.db", read_only=True) as store, store.database.read() as connection:
        names = connection.execute(
            text("select name from sqlite_master where type = 'table' and name not like 'alembic%' order by name")
        ).scalars()
        tables = {
            name: [dict(row) for row in connection.execute(text(f"select * from {name}")).mappings()]
            for name in names
        }
    return json.dumps(tables, default=repr, indent=1)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = run_file(simulation={"profiles": ["pi-5", "pi-zero-2w"]})
    return edgefl.simulate(config, devices=3, scheme="iid", root=tmp_path_factory.mktemp("simulated"))


def test_it_returns_how_the_run_went(result):
    assert (result.status, result.reason) == ("finished", "rounds reached 3")
    assert result.metrics["accuracy"] is not None
    assert result.metrics["accuracy"] > 0.7
    assert result.metrics["bytes_up"] == sum(row["bytes_up"] for row in result.updates)
    assert result.metrics["seconds"] == pytest.approx(result.rounds[-1]["closed_at"] - result.rounds[0]["started_at"])


def test_it_returns_the_history_and_the_model(result):
    assert [row["round"] for row in result.rounds] == [1, 2, 3]
    assert len(result.updates) == 3 * 3
    assert {row["outcome"] for row in result.updates} == {"used"}
    assert {row["source"] for row in result.evaluations} == {"coordinator"}
    assert result.model is not None
    assert list(load_model_file(result.model)) == ["fc1.weight", "fc1.bias"]


def test_the_slow_board_is_waited_for(result):
    waits = {row["device_id"]: row["wait_s"] for row in result.updates}
    assert waits["device-02"] == 0.0
    assert waits["device-01"] > 0.01 < waits["device-03"]


def test_a_real_fleet_gives_the_very_same_model(tmp_path):
    config = {"run": {"task": "digits", "rounds": 3, "seed": 7}, "devices": {"min": 3}}
    real = edgefl.run(config, devices=3, scheme="dirichlet:0.5", root=tmp_path / "real")
    virtual = edgefl.simulate(config, devices=3, scheme="dirichlet:0.5", root=tmp_path / "virtual")
    assert virtual.model is not None
    assert virtual.model.read_bytes() == real.model.read_bytes()
    assert [row["accuracy"] for row in virtual.rounds] == [row["accuracy"] for row in real.rounds]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_strategy_survives_dead_slow_and_uneven_boards_and_always_alike(name, tmp_path):
    (tmp_path / "faults.toml").write_text(FAULTS)
    scheme = "duplicate:2" if name == "redundant" else "iid"
    config = run_file(
        strategy={"name": name},
        simulation={"iteration_s": 1.0, "jitter": 0.3, "detect_s": 5.0, "faults": str(tmp_path / "faults.toml")},
        devices={"min": 2},
    )
    histories, losses = [], 0
    for attempt in ("first", "second"):
        result = edgefl.simulate(config, devices=4, scheme=scheme, root=tmp_path / attempt)
        assert (result.status, result.reason) == ("finished", "rounds reached 3")
        versions = [row["version"] for row in result.rounds]
        assert versions == sorted(set(versions))
        losses += sum(row["outcome"] == "lost" for row in result.updates)
        histories.append(everything(tmp_path / attempt))
    assert histories[0] == histories[1], "byte for byte"
    other = edgefl.simulate(
        {**config, "run": {**config["run"], "seed": 8}}, devices=4, scheme=scheme, root=tmp_path / "other"
    )
    assert other.model != result.model
    assert losses or name == "local", "somebody died at work"


@pytest.mark.parametrize("up", ["qsgd:4", "ef|topk:0.05|int8"])
def test_how_many_processes_train_changes_nothing(up, tmp_path):
    histories, models = [], []
    for workers in (0, 2):
        config = run_file(
            strategy={"name": "asgd", "iterations": 5, "optimizer": "adam", "keep_optimizer": True},
            compression={"up": up},
            simulation={"workers": workers, "profiles": ["pi-5", "pi-zero-2w"]},
        )
        result = edgefl.simulate(config, devices=4, scheme="iid", root=tmp_path / str(workers))
        assert result.model is not None
        models.append(result.model.read_bytes())
        histories.append(everything(tmp_path / str(workers)))
    assert models[0] == models[1]
    assert histories[0] == histories[1]


def test_runs_in_one_folder_follow_each_other(tmp_path):
    first, second = (edgefl.simulate(run_file(), devices=2, scheme="iid", root=tmp_path) for _ in range(2))
    assert second.run_id == f"{first.run_id}-2"
    assert second.rounds[0]["started_at"] > first.rounds[-1]["closed_at"]
    assert second.model == first.model


def test_bookkeeping_alone_counts_the_bytes_of_real_updates(tmp_path):
    config = run_file(
        compression={"up": "topk:0.1", "down": "dense|fp16"}, simulation={"jitter": 0.0, "examples": 322}
    )
    schedule = edgefl.simulate(config, devices=4, root=tmp_path / "schedule", bookkeeping_only=True)
    real = edgefl.simulate(config, devices=4, root=tmp_path / "real", scheme="iid")
    assert schedule.model is None
    assert schedule.metrics["accuracy"] is None
    assert schedule.metrics["bytes_down"] == real.metrics["bytes_down"]
    assert schedule.metrics["bytes_up"] == pytest.approx(real.metrics["bytes_up"], rel=0.05)
    assert schedule.metrics["seconds"] == pytest.approx(real.metrics["seconds"], rel=0.05)


def test_ten_thousand_boards_are_no_trouble(tmp_path):
    config = run_file(devices={"fraction": 0.05}, simulation={"profiles": ["pi-4", "pi-zero-2w"]})
    result = edgefl.simulate(config, devices=10_000, root=tmp_path, bookkeeping_only=True)
    assert len(result.updates) == 3 * 500
    assert len({row["device_id"] for row in result.updates}) > 1200


def test_boards_are_chosen_by_name_and_group(tmp_path):
    file = tmp_path / "boards.toml"
    file.write_text('[profile.shed]\ngroups = ["cold"]\n[profile.desk]\n')
    config = run_file(devices={"groups": ["cold"]})
    result = edgefl.simulate(config, devices=4, profiles=[str(file)], root=tmp_path, bookkeeping_only=True)
    assert {row["device_id"] for row in result.updates} == {"device-01", "device-03"}
    config = run_file(devices={"names": ["nobody"]})
    with pytest.raises(ConfigError, match="leave no device"):
        edgefl.simulate(config, devices=4, root=tmp_path, bookkeeping_only=True)
    config = run_file(devices={"names": ["device-01", "device-02"], "min": 3})
    with pytest.raises(ConfigError, match="leave 2 of 4 devices of the simulation, the run needs at least 3"):
        edgefl.simulate(config, devices=4, root=tmp_path, bookkeeping_only=True)


@pytest.mark.parametrize("devices", ["device-01.npz", 2.5, True])
def test_what_is_neither_a_number_nor_a_list_is_no_fleet(devices, tmp_path):
    for start in (edgefl.simulate, edgefl.run):
        with pytest.raises(ConfigError, match=f"devices must be how many there are, .*, got {devices!r}"):
            start(run_file(), devices=devices, root=tmp_path)


def test_shards_that_there_are_can_be_trained_on(tmp_path):
    from edgefl.local_run import cut_devices  # noqa: PLC0415 only here

    fleet = cut_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    paths = [device.shards["digits"] for device in fleet.devices]
    result = edgefl.simulate(run_file(), devices=paths, root=tmp_path / "found")
    cut = edgefl.simulate(run_file(), devices=2, scheme="iid", root=tmp_path / "cut")
    assert {row["source"] for row in result.evaluations} == {"device"}
    assert result.model is not None
    assert cut.model is not None
    assert result.model.name == cut.model.name


def test_a_run_that_fails_says_so_in_its_history(tmp_path):
    (tmp_path / "faults.toml").write_text('[[fault]]\ndevice = "*"\nat_s = 0.001\nkind = "kill"\n')
    config = run_file(simulation={"faults": str(tmp_path / "faults.toml")})
    with pytest.raises(RunFailedError, match="nothing happens any more"):
        edgefl.simulate(config, devices=2, scheme="iid", root=tmp_path)
    with Store.open(tmp_path / "edgefl.db", read_only=True) as store:
        (record,) = store.runs()
    assert record.status == "failed"
    assert record.reason is not None
    assert "nothing happens any more" in record.reason


LATE = """
from dataclasses import dataclass
from edgefl.strategies.fedavg import FedAvg

class Odd:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def aggregate(self, state):
        state = self.inner.aggregate(state)
        if state.version == 3:
            state.settled["device-01"] = {"of-late": print}
        return state

@dataclass(frozen=True, kw_only=True)
class Late(FedAvg):
    def build(self, rules):
        return Odd(FedAvg.build(self, rules))
"""


def test_a_last_state_that_a_live_run_could_not_save_fails_a_simulated_one_too(tmp_path, monkeypatch):
    (tmp_path / "late_strategy.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    config = run_file(strategy={"name": "late_strategy:Late"})
    with pytest.raises(StrategyError, match=r"late_strategy:Late: .* a state that cannot be saved: .*of-late"):
        edgefl.simulate(config, devices=2, scheme="iid", root=tmp_path)
    with Store.open(tmp_path / "edgefl.db", read_only=True) as store:
        assert [record.status for record in store.runs()] == ["failed"]


def test_what_makes_no_sense_is_told_before_anything_is_written(tmp_path):
    root = tmp_path / "none"
    for config, kind, message in (
        (run_file(devices={"min": 9}), ConfigError, "at least 9 devices, got 2"),
        (run_file(run={"task": "digitz"}), TaskError, "digitz"),
        (run_file(strategy={"name": "fedavgg"}), StrategyError, "fedavgg"),
        (run_file(simulation={"profiles": ["pi4"]}), ConfigError, "did you mean pi-4"),
        (run_file(simulation={"profiles": []}), ConfigError, "at least one profile"),
        (
            run_file(run={"max_state_bytes": 10}, strategy={"name": "dc-asgd"}),
            ConfigError,
            r"dc-asgd keeps .* for 2 devices",
        ),
    ):
        with pytest.raises(kind, match=message):
            edgefl.simulate(config, devices=2, scheme="iid", root=root)
    with pytest.raises(ConfigError, match="no accuracy is ever reached"):
        edgefl.simulate({"run": {"task": "digits", "accuracy": 0.9}}, devices=2, root=root, bookkeeping_only=True)
    with pytest.raises(ConfigError, match="one profile file at a time"):
        edgefl.simulate(run_file(), devices=2, profiles=["a.toml", "b.toml"], root=root)
    assert not root.exists()


def accuracies(rows, subject):
    return {row["version"]: row["accuracy"] for row in rows if row["subject"] == subject}


def test_the_average_and_every_device_s_own_model_are_evaluated_and_told_apart(tmp_path):
    config = run_file(strategy={"name": apart_strategy.NAME}, run={"evaluate_every": 2})
    result = edgefl.simulate(config, devices=2, scheme="iid", root=tmp_path / "apart")
    average, first, second = (accuracies(result.evaluations, name) for name in ("", "device-01", "device-02"))
    assert list(average) == [2, 3]
    assert average == first, "that device's model is the average"
    assert average[3] > 0.7
    assert max(second.values()) < 0.2, "and the other's knows nothing"
    unevaluated, *rounds = result.rounds
    assert (unevaluated["node_accuracy"], unevaluated["facts"]) == (None, {"disagreement": 0.25})
    for row in rounds:
        version = row["version"]
        assert row["accuracy"] == average[version]
        assert row["node_accuracy"] == pytest.approx((first[version] + second[version]) / 2)
        assert row["worst_node_accuracy"] == second[version]
        assert row["facts"] == {"disagreement": 0.25 * version}
    plain = edgefl.simulate(run_file(), devices=2, scheme="iid", root=tmp_path / "plain")
    assert plain.model is not None
    assert result.model is not None
    assert result.model.name == plain.model.name, "evaluating changes nothing of what is learnt"
    assert plain.rounds[-1]["accuracy"] == result.rounds[-1]["accuracy"]
    assert set(result.metrics) - set(plain.metrics) == {"node_accuracy", "worst_node_accuracy", "disagreement"}
    told = f"accuracy of the average model {average[3]:.4f}, of the nodes {result.metrics['node_accuracy']:.4f}"
    assert f"; {told} (worst {second[3]:.4f})" in str(result)
    assert str(plain).endswith(f"rounds reached 3; accuracy {average[3]:.4f}")


@pytest.mark.parametrize("workers", [0, 2])
def test_without_an_evaluator_a_device_tests_the_average_and_its_own_model_on_its_own_split(workers, tmp_path):
    config = run_file(
        strategy={"name": apart_strategy.NAME, "nodes": 3},
        run={"evaluate_on": "devices", "rounds": 2},
        simulation={"workers": workers},
    )
    result = edgefl.simulate(config, devices=3, scheme="iid", root=tmp_path)
    found = {(row["version"], row["device_id"], row["subject"]): row for row in result.evaluations}
    names = ["device-01", "device-02", "device-03"]
    assert set(found) == {(version, name, of) for version in (1, 2) for name in names for of in ("", name)}
    own = {name: found[2, name, name]["accuracy"] for name in names}
    assert own["device-01"] == found[2, "device-01", ""]["accuracy"] > 0.5
    assert max(own["device-02"], own["device-03"]) < 0.3
    last = result.rounds[-1]
    assert last["node_accuracy"] == pytest.approx(sum(own.values()) / 3)
    assert last["worst_node_accuracy"] == min(own.values())
    examples = [found[2, name, ""]["num_examples"] for name in names]
    weighted = sum(found[2, name, ""]["accuracy"] * n for name, n in zip(names, examples, strict=True))
    assert last["accuracy"] == pytest.approx(weighted / sum(examples))


def test_bookkeeping_alone_evaluates_and_tells_nothing_of_devices_models(tmp_path):
    config = run_file(strategy={"name": apart_strategy.NAME})
    result = edgefl.simulate(config, devices=2, root=tmp_path, bookkeeping_only=True)
    assert result.evaluations == []
    assert {row["facts"] is None and row["node_accuracy"] is None for row in result.rounds} == {True}


def test_a_good_node_does_not_end_a_run_whose_average_is_not_good_enough(tmp_path):
    config = run_file(run={"accuracy": 0.99, "rounds": 2}, strategy={"name": apart_strategy.NAME, "nodes": 1})
    assert edgefl.simulate(config, devices=2, scheme="iid", root=tmp_path).reason == "rounds reached 2"
