"""`edgefl.simulate`: a whole run in virtual time, as one call; against a real fleet see test_local_run.py."""

import json
import re
from pathlib import Path

import apart_strategy
import numpy as np
import pytest
from sqlalchemy import text

import edgefl
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError, RunFailedError, StrategyError, TaskError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import partition_devices
from edgefl.simulation.simulated_run import make_reference, read_scales
from edgefl.storage.checkpoints import load_model_file
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.strategies.registry import BUILT_IN_STRATEGIES
from edgefl.tasks.datasets.central import load_central_data

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
EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = {"fedavg", "asgd", "fedbuff", "esync", "redundant", "local", "signsgd", "d2"}
"""One of each kind; all others run with the tests that add up to minutes."""


def run_file(**sections):
    run = {"task": "digits", "rounds": 3, "seed": 7}
    tables = {"run": run, "task": {"model": "logistic"}, "simulation": {"workers": 0}}
    return {name: {**tables.get(name, {}), **sections.get(name, {})} for name in {**tables, **sections}}


@pytest.fixture
def simulate(tmp_path):
    """Simulates a fleet of two boards that hold equal parts, unless told otherwise."""

    def run(folder="run", *, devices=2, scheme="iid", bookkeeping_only=False, requires=None, **sections):
        config = run_file(devices=requires or {}, **sections)
        options = {"scheme": None if bookkeeping_only else scheme, "bookkeeping_only": bookkeeping_only}
        modules = ["apart_strategy"]
        return edgefl.simulate(config, devices=devices, root=tmp_path / folder, allow_modules=modules, **options)

    return run


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


def test_it_returns_how_the_run_went_and_waits_for_the_slow_board(simulate):
    result = simulate(devices=3, simulation={"profiles": ["pi-5", "pi-zero-2w"]})
    assert (result.status, result.reason) == ("finished", "rounds reached 3")
    assert result.metrics["accuracy"] > 0.7
    assert result.metrics["bytes_up"] == sum(row["bytes_up"] for row in result.updates)
    assert result.metrics["seconds"] == pytest.approx(result.rounds[-1]["closed_at"] - result.rounds[0]["started_at"])
    assert [row["round"] for row in result.rounds] == [1, 2, 3]
    assert [row["outcome"] for row in result.updates] == ["used"] * 3 * 3
    assert {row["source"] for row in result.evaluations} == {"coordinator"}
    assert list(load_model_file(result.model)) == ["fc1.weight", "fc1.bias"]
    waits = {row["device_id"]: row["wait_s"] for row in result.updates}
    assert waits["device-02"] == 0.0
    assert waits["device-01"] > 0.01 < waits["device-03"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in sorted(BUILT_IN_STRATEGIES)],
)
def test_every_strategy_survives_dead_slow_and_uneven_boards_and_always_alike(simulate, name, tmp_path):
    (tmp_path / "faults.toml").write_text(FAULTS)
    hard = {"iteration_s": 1.0, "jitter": 0.3, "detect_s": 5.0, "faults": str(tmp_path / "faults.toml")}
    fleet = {"devices": 4, "scheme": "duplicate:2" if name == "redundant" else "iid"}
    histories, losses = [], 0
    for attempt in ("first", "second"):
        result = simulate(attempt, **fleet, strategy={"name": name}, simulation=hard, requires={"min": 2})
        assert (result.status, result.reason) == ("finished", "rounds reached 3")
        versions = [row["version"] for row in result.rounds]
        assert versions == sorted(set(versions))
        losses += sum(row["outcome"] == "lost" for row in result.updates)
        histories.append(everything(tmp_path / attempt))
    assert histories[0] == histories[1], "byte for byte"
    assert losses or name == "local", "somebody died at work"
    if name == "fedavg":
        other = simulate("other", **fleet, strategy={"name": name}, simulation=hard, run={"seed": 8})
        assert other.model != result.model


def test_holders_that_send_slices_send_no_block_twice_and_reach_the_model_of_whole_copies(simulate):
    fleet = {"devices": 4, "scheme": "sorted|duplicate:2", "guard": {"enabled": False}}
    whole, slices = (
        simulate(copies, **fleet, strategy={"name": "redundant", "iterations": 5, "copies": copies})
        for copies in ("whole", "slices")
    )
    assert [row["num_updates"] for row in slices.rounds] == [4] * 3
    model = load_model_file(slices.model)
    for name, tensor in load_model_file(whole.model).items():
        assert model[name].tobytes() == tensor.tobytes(), "not a bit differs"
    assert slices.rounds[-1]["bytes_up"] < 2.2 * sum(tensor.nbytes for tensor in model.values())


@pytest.mark.parametrize(
    ("rule", "value", "reason"),
    [
        ("updates", 5, "updates reached 5"),
        ("epochs", 2.5, "epochs reached 2.5"),
        ("bytes", 20_000, "bytes reached 20000"),
        ("accuracy", 0.5, "accuracy reached 0.5"),
        ("seconds", 0.5, "seconds reached 0.5"),
    ],
)
def test_a_run_ends_by_each_stop_rule(simulate, rule, value, reason):
    simulation = {"jitter": 0.0, "iteration_s": 0.01} if rule == "seconds" else {}
    result = simulate(run={"rounds": 40, rule: value}, simulation=simulation)
    assert (result.status, result.reason) == ("finished", reason)
    closed = [row for row in result.rounds if row["closed_at"] is not None]
    assert closed[-1]["accuracy"] is not None, "the last version is evaluated"


@pytest.mark.parametrize("name", ["asgd", "fedbuff", "pdmm-isvr", "ad-psgd"])
def test_an_epoch_is_a_pass_over_the_data_of_all_devices_whatever_the_strategy(simulate, name):
    result = simulate(devices=4, strategy={"name": name}, run={"rounds": None, "epochs": 2.0, "evaluate_every": 1000})
    assert result.reason == "epochs reached 2"
    taken_in = [row for row in result.updates if row["outcome"] in {"used", "late"}]
    sizes = {row["device_id"]: row["num_examples"] for row in taken_in}
    # What was under way at the end is finished early, and counts as well.
    passes = 8 * sum(row["iterations"] for row in taken_in) / sum(sizes.values())
    assert 1.9 < passes < 2.6


@pytest.mark.extended
def test_how_many_processes_train_changes_nothing(simulate, tmp_path):
    models, histories = [], []
    for workers in (0, 2):
        result = simulate(
            str(workers), devices=4, compression={"up": "ef|topk:0.05|int8"},
            strategy={"name": "asgd", "iterations": 5, "optimizer": "adam", "keep_optimizer": True},
            simulation={"workers": workers, "profiles": ["pi-5", "pi-zero-2w"]},
        )  # fmt: skip
        models.append(result.model.read_bytes())
        histories.append(everything(tmp_path / str(workers)))
    assert models[0] == models[1]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_a_fleet_trains_on_the_accelerator_that_the_run_file_names(tmp_path, workers):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        np.savez(
            tmp_path / name / "data.npz", inputs=rng.integers(0, 256, (20, 28, 28)), labels=rng.integers(0, 10, 20)
        )

    def train_on(accelerator):
        config = {
            "run": {"task": "mnist", "rounds": 2, "local_test_fraction": 0.0, "evaluate_on": "none"},
            "task": {"model": "cnn-small"},
            "simulation": {"workers": workers, "accelerator": accelerator},
        }
        result = edgefl.simulate(config, devices=[tmp_path / "a", tmp_path / "b"], root=tmp_path / accelerator)
        return load_model_file(result.model)

    if torch.cuda.is_available():
        on_gpu, on_cpu = train_on("cuda"), train_on("cpu")
        assert all(np.abs(on_gpu[name] - on_cpu[name]).max() < 1e-3 for name in on_cpu)
        return
    with pytest.raises((RunFailedError, TaskError), match="accelerator cuda:1 is not here: torch sees 0 CUDA device"):
        train_on("cuda:1")


def test_runs_in_one_folder_follow_each_other_on_shards_that_there_are_too(simulate, tmp_path):
    devices, _ = partition_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    first, second = simulate(), simulate()
    third = simulate(devices=[device.shards["digits"] for device in devices])
    assert [run.run_id for run in (second, third)] == [f"{first.run_id}-2", f"{first.run_id}-3"]
    assert second.rounds[0]["started_at"] > first.rounds[-1]["closed_at"]
    assert first.model.name == second.model.name == third.model.name
    assert {row["source"] for row in third.evaluations} == {"device"}


def test_bookkeeping_alone_counts_the_bytes_of_real_updates(simulate):
    sections = {
        "compression": {"up": "topk:0.1", "down": "dense|fp16"}, "simulation": {"jitter": 0.0, "examples": 322},
    }  # fmt: skip
    schedule = simulate("schedule", devices=4, bookkeeping_only=True, **sections)
    real = simulate("real", devices=4, **sections)
    assert (schedule.model, schedule.metrics["accuracy"]) == (None, None)
    assert schedule.metrics["bytes_down"] == real.metrics["bytes_down"]
    assert schedule.metrics["bytes_up"] == pytest.approx(real.metrics["bytes_up"], rel=0.05)
    assert schedule.metrics["seconds"] == pytest.approx(real.metrics["seconds"], rel=0.05)


@pytest.mark.extended
def test_ten_thousand_boards_are_no_trouble(simulate):
    boards = {"profiles": ["pi-4", "pi-zero-2w"]}
    result = simulate(devices=10_000, bookkeeping_only=True, simulation=boards, requires={"fraction": 0.05})
    assert len(result.updates) == 3 * 500
    assert len({row["device_id"] for row in result.updates}) > 1200


def test_boards_are_chosen_by_name_and_group(tmp_path):
    def chosen(profiles=(), **devices):
        options = {"devices": 4, "root": tmp_path, "bookkeeping_only": True, "profiles": profiles}
        return {row["device_id"] for row in edgefl.simulate(run_file(devices=devices), **options).updates}

    (tmp_path / "boards.toml").write_text('[profile.shed]\ngroups = ["cold"]\n[profile.desk]\n')
    assert chosen([str(tmp_path / "boards.toml")], groups=["cold"]) == {"device-01", "device-03"}
    assert chosen(exclude=["device-03"]) == {"device-01", "device-02", "device-04"}
    with pytest.raises(ConfigError, match="leave no device"):
        chosen(names=["nobody"])
    with pytest.raises(ConfigError, match="leave 2 of 4 devices of the simulation, the run needs at least 3"):
        chosen(names=["device-01", "device-02"], min=3)


def test_what_boards_send_to_each_other_directly_is_carried_all_the_same(simulate):
    strategy = {"name": "dsgd", "graph": "ring", "carrier": "direct"}
    assert simulate(devices=3, strategy=strategy, run={"rounds": 1}).status == "finished"


@pytest.mark.parametrize("devices", ["device-01.npz", 2.5, True])
def test_what_is_neither_a_number_nor_a_list_is_no_fleet(devices, tmp_path):
    for start in (edgefl.simulate, edgefl.run):
        with pytest.raises(ConfigError, match=f"devices must be how many there are, .*, got {devices!r}"):
            start(run_file(), devices=devices, root=tmp_path)


LATE = """
from dataclasses import dataclass
from edgefl.strategies.synchronous.fedavg import FedAvgConfig

class Odd:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def aggregate(self, state):
        state = self.inner.aggregate(state)
        if state.version == 3:
            state.used_assignments["device-01"] = {"of-late": print}
        return state

@dataclass(frozen=True, kw_only=True)
class Late(FedAvgConfig):
    def build(self, rules):
        return Odd(FedAvgConfig.build(self, rules))
"""


@pytest.mark.parametrize(
    ("sections", "error", "told"),
    [
        ({"simulation": {"faults": "{folder}/faults.toml"}}, RunFailedError, "nothing happens any more"),
        ({"strategy": {"name": "late_strategy:Late"}}, StrategyError, "a state that cannot be saved: .*of-late"),
    ],
    ids=["all die", "a last state that a live run could not save"],
)
def test_a_run_that_fails_says_so_in_its_history(simulate, installed, tmp_path, sections, error, told):
    installed({"late_strategy": LATE})
    (tmp_path / "faults.toml").write_text('[[fault]]\ndevice = "*"\nat_s = 0.001\nkind = "kill"\n')
    placed = {name: {k: v.format(folder=tmp_path) for k, v in table.items()} for name, table in sections.items()}
    with pytest.raises(error, match=told):
        simulate(**placed)
    with Store.open(tmp_path / "run" / "edgefl.db", read_only=True) as store:
        (record,) = store.list_runs()
    assert (record.status, record.reason is not None) == ("failed", True)


@pytest.mark.parametrize(
    ("sections", "options", "error", "message"),
    [
        ({"devices": {"min": 9}}, {}, ConfigError, "at least 9 devices, got 2"),
        ({"run": {"task": "digitz"}}, {}, TaskError, "digitz"),
        ({"strategy": {"name": "fedavgg"}}, {}, StrategyError, "fedavgg"),
        ({"simulation": {"profiles": ["pi4"]}}, {}, ConfigError, "did you mean pi-4"),
        ({"simulation": {"profiles": []}}, {}, ConfigError, "at least one profile"),
        (
            {"run": {"max_state_bytes": 10}, "strategy": {"name": "dc-asgd"}},
            {},
            ConfigError,
            "dc-asgd keeps .* 2 dev",
        ),
        ({"run": {"rounds": None, "accuracy": 0.9}}, {"bookkeeping_only": True}, ConfigError, "no accuracy is ever"),
        ({}, {"profiles": ["a.toml", "b.toml"]}, ConfigError, "one profile file at a time"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_written(tmp_path, sections, options, error, message):
    config = run_file(**sections)
    config["run"] = {name: value for name, value in config["run"].items() if value is not None}
    with pytest.raises(error, match=message):
        edgefl.simulate(config, devices=2, root=tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()


def accuracies(rows, subject):
    return {row["version"]: row["accuracy"] for row in rows if row["subject"] == subject}


def test_the_average_and_every_device_s_own_model_are_evaluated_and_told_apart(simulate):
    result = simulate("apart", strategy={"name": apart_strategy.NAME}, run={"evaluate_every": 2})
    average, first, second = (accuracies(result.evaluations, name) for name in ("", "device-01", "device-02"))
    assert list(average) == [2, 3]
    assert average == first, "that device's model is the average"
    assert average[3] > 0.7
    assert max(second.values()) < 0.2, "and the other's knows nothing"
    unevaluated, *rounds = result.rounds
    assert (unevaluated["node_accuracy"], unevaluated["facts"]) == (None, {"disagreement": 0.25})
    for row in rounds:
        version = row["version"]
        assert (row["accuracy"], row["worst_node_accuracy"]) == (average[version], second[version])
        assert row["node_accuracy"] == pytest.approx((first[version] + second[version]) / 2)
        assert row["facts"] == {"disagreement": 0.25 * version}
    plain = simulate("plain")
    assert result.model.name == plain.model.name, "evaluating changes nothing of what is learnt"
    assert plain.rounds[-1]["accuracy"] == result.rounds[-1]["accuracy"]
    assert set(result.metrics) - set(plain.metrics) == {"node_accuracy", "worst_node_accuracy", "disagreement"}
    told = f"accuracy of the average model {average[3]:.4f}, of the nodes {result.metrics['node_accuracy']:.4f}"
    assert f"; {told} (worst {second[3]:.4f})" in str(result)
    assert str(plain).endswith(f"rounds reached 3; accuracy {average[3]:.4f}")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_without_an_evaluator_a_device_tests_the_average_and_its_own_model_on_its_own_split(simulate, workers):
    result = simulate(
        devices=3, strategy={"name": apart_strategy.NAME, "nodes": 3}, run={"evaluate_on": "devices", "rounds": 2},
        simulation={"workers": workers},
    )  # fmt: skip
    found = {(row["version"], row["device_id"], row["subject"]): row for row in result.evaluations}
    names = ["device-01", "device-02", "device-03"]
    assert set(found) == {(version, name, of) for version in (1, 2) for name in names for of in ("", name)}
    own = {name: found[2, name, name]["accuracy"] for name in names}
    assert own["device-01"] == found[2, "device-01", ""]["accuracy"] > 0.5
    assert max(own["device-02"], own["device-03"]) < 0.3
    last = result.rounds[-1]
    assert last["node_accuracy"] == pytest.approx(sum(own.values()) / 3)
    assert last["worst_node_accuracy"] == min(own.values())
    rows = [found[2, name, ""] for name in names]
    weighted = sum(row["accuracy"] * row["num_examples"] for row in rows)
    assert last["accuracy"] == pytest.approx(weighted / sum(row["num_examples"] for row in rows))


def test_a_good_node_ends_no_run_and_bookkeeping_alone_tells_nothing_of_devices_models(simulate):
    apart = {"name": apart_strategy.NAME, "nodes": 1}
    assert simulate(run={"accuracy": 0.99, "rounds": 2}, strategy=apart).reason == "rounds reached 2"
    result = simulate(strategy={"name": apart_strategy.NAME}, bookkeeping_only=True)
    assert result.evaluations == []
    assert {row["facts"] is None and row["node_accuracy"] is None for row in result.rounds} == {True}


def test_a_root_update_of_the_coordinator_is_simulated_in_any_number_of_processes_and_without_training(simulate):
    strategy = {"name": "fltrust", "root_examples": 40}
    first, second = (simulate(f"{n}", strategy=strategy, simulation={"workers": n}) for n in (0, 2))
    assert (
        load_model_file(first.model)["fc1.weight"].tobytes() == load_model_file(second.model)["fc1.weight"].tobytes()
    )
    assert first.metrics["accuracy"] > 0.6
    root = [row for row in first.updates if row["device_id"] == EVALUATOR_NAME]
    assert [(row["outcome"], row["applied_version"]) for row in root] == [("used", 0), ("used", 1), ("used", 2)]
    (scored,), (trained,) = ({row["num_examples"] for row in rows} for rows in (first.evaluations, root))
    assert 20 < trained < 60
    assert scored + trained == len(load_central_data("digits").test)
    bare = simulate("bare", bookkeeping_only=True, strategy=strategy)
    assert len([row for row in bare.updates if row["outcome"] == "used"]) == 3 * 3


def test_a_root_update_needs_data_of_the_coordinator(tmp_path):
    devices, _ = partition_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    shards = [device.shards["digits"] for device in devices]
    with pytest.raises(DataError, match="the coordinator has no examples to train on"):
        edgefl.simulate(run_file(strategy={"name": "fltrust"}), devices=shards, root=tmp_path / "run")


def events_of(folder, kind):
    with Store.open(folder / "edgefl.db", read_only=True) as store:
        return [row["message"] for row in read_history(store, "events") if row["kind"] == kind]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["pdmm-isvr", "dsgd"])
def test_in_pairs_edges_exchange_once_in_a_period_and_nodes_learn_what_only_others_hold(tmp_path, name):
    strategy = {"name": name, "exchange": "pair", "iterations": 4, "exchanges_per_round": 25, "learning_rate": 0.1}
    config = run_file(run={"rounds": 4}, task={"model": "logistic"}, strategy=strategy)
    result = edgefl.simulate(config, devices=4, scheme="by-class", root=tmp_path)
    assert result.metrics["node_accuracy"] > 0.7, "each device holds three of ten classes at most"
    messages = sum(row["facts"]["messages"] for row in result.rounds)
    assert messages == pytest.approx(2 * 4 * 4 * 25, rel=0.2)


def test_a_reference_does_a_node_s_iterations_and_has_nothing_of_the_fleet():
    tables = run_file(
        strategy={"name": "pdmm-isvr", "iterations": 4, "exchanges_per_round": 25, "batch_size": 16, "k_eta": 2.0},
        devices={"min": 3},
        compression={"up": "qsgd:2:8"},
    )
    alone = make_reference(parse_run(tables))
    assert (alone.strategy.name, alone.strategy.options) == ("local", {"iterations": 100, "batch_size": 16})
    assert (alone.devices.min, alone.simulation.devices, alone.compression.up) == (1, 1, "dense")
    assert make_reference(parse_run(run_file(strategy={"epochs": 3.0}))).strategy.options == {"epochs": 3.0}
    alone = make_reference(parse_run(run_file(strategy={"name": "k-means", "clusters": 4}, devices={"min": 3})))
    assert (alone.strategy.name, alone.strategy.options, alone.devices.min) == ("k-means", {"clusters": 4}, 1)


HIGH = 10.0
"""Twenty times what the task recommends."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended)
        for name in ("fedavg", "asgd", "fedbuff", "pdmm-isvr", "scaffold")
    ],
)
def test_a_learning_rate_far_too_high_is_said_within_ten_rounds_and_the_advice_helps(tmp_path, name):
    def run(folder, rounds, **options):
        return edgefl.simulate(
            run_file(run={"rounds": rounds}, task={"model": "mlp"}, strategy={"name": name, **options}),
            devices=3, scheme="dirichlet:0.5", root=tmp_path / folder,
        )  # fmt: skip

    high = run("high", 10, learning_rate=HIGH)
    (said,) = events_of(tmp_path / "high", "run-diverging")
    assert "diverges" in said
    advised = float(re.search(r"learning_rate = 10 is too high: start again with ([0-9.]+)", said)[1])
    good = run("good", 120 if name == "asgd" else 6, learning_rate=advised)
    assert high.metrics["accuracy"] < 0.5
    assert good.metrics["accuracy"] > 0.8
    assert events_of(tmp_path / "good", "run-diverging") == []


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "scheme", "rounds"),
    [
        ("fedavg", "iid", 30),
        ("fedbuff", "iid", 30),
        ("fedavg", "dirichlet:0.5", 30),
        ("scaffold", "dirichlet:0.5", 30),
        ("asgd", "dirichlet:0.5", 400),
    ],
)
def test_a_run_at_a_rate_twenty_times_too_high_learns_in_the_end_where_it_is_halved(tmp_path, name, scheme, rounds):
    config = run_file(
        run={"rounds": rounds, "on_divergence": "halve"},
        task={"model": "mlp"},
        strategy={"name": name, "learning_rate": HIGH},
    )
    rescued = edgefl.simulate(config, devices=3, scheme=scheme, root=tmp_path / "high")
    said = events_of(tmp_path / "high", "run-diverging")
    assert len(said) >= 3
    assert all("goes back to its last good model" in line for line in said)
    # The right rate reaches 0.97; the last halving may come late, after three quarters of the run.
    assert rescued.metrics["accuracy"] > 0.85


def test_a_run_that_diverges_ends_where_the_run_file_says_so(simulate, tmp_path):
    options = {"run": {"rounds": 20, "on_divergence": "stop"}, "task": {"model": "mlp"}}
    done = simulate(devices=3, scheme="dirichlet:0.5", strategy={"name": "fedavg", "learning_rate": HIGH}, **options)
    assert done.status == "finished"
    assert done.reason.startswith("stopped, since in round ")
    assert done.reason.split("since in ")[1] in events_of(tmp_path / "run", "run-diverging")[0]
    assert len(done.rounds) < 10


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_are_simulated_as_they_are_asked_for_live(simulate, workers):
    analysed = {
        "strategy": {"name": "statistics", "columns": "10", "min_group": 1},
        "simulation": {"workers": workers},
    }
    result = simulate(devices=3, **analysed)
    found = json.loads(result.result.read_text())
    data = load_central_data("digits").train
    values = data.inputs.reshape(len(data), -1)[:, 10].astype(float)
    assert [row["num_updates"] for row in result.rounds] == [3, 3]
    assert (found["rows"], found["columns"][0]["count"]) == (len(data), len(data))
    assert found["columns"][0]["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert found["columns"][0]["std"] == pytest.approx(values.std(), rel=1e-12)
    assert abs(found["columns"][0]["quantiles"]["0.5"] - np.median(values)) <= 16 / 256


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"compression": {"up": "dense|int8"}}, "compression means nothing for the analysis statistics"),
        ({"aggregation": {"collective": "ring"}}, "aggregation means nothing"),
        ({"server": {"optimizer": "adam"}}, "server means nothing"),
        ({"strategy": {"name": "statistics", "learning_rate": 0.1}}, "statistics has no such setting"),
        ({"bookkeeping_only": True}, "trains nothing, and has no bookkeeping alone"),
    ],
)
def test_what_an_analysis_cannot_follow_is_refused(simulate, sections, message):
    with pytest.raises(ConfigError, match=message):
        simulate(**{"strategy": {"name": "statistics"}, **sections})


def test_a_model_from_sums_is_evaluated_and_kept_as_any_other(simulate):
    result = simulate(devices=3, strategy={"name": "naive-bayes"}, run={"rounds": 5})
    assert (result.status, len(result.rounds), result.result) == ("finished", 1, None)
    assert result.metrics["accuracy"] > 0.85
    assert load_model_file(result.model)["fc1.weight"].shape == (10, 64)


def test_clusters_take_as_many_rounds_as_the_run_file_says(simulate):
    result = simulate(devices=3, strategy={"name": "k-means", "clusters": 4, "columns": "0-63"}, run={"rounds": 6})
    found = json.loads(result.result.read_text())
    assert len(result.rounds) == 6
    assert (len(found["centres"]), len(found["columns"]), sum(found["counts"]) > 1000) == (4, 64, True)


def test_trees_are_simulated_in_the_rounds_that_they_need(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "diabetes")
    rng = np.random.default_rng(5)
    (tmp_path / "data").mkdir()
    for name in ("a", "b", "c"):
        rows = rng.standard_normal((60, 11))
        rows[:, -1] = 150 + 50 * (rows[:, 2] > 0) + rows[:, -1]
        (tmp_path / "data" / name).mkdir()
        np.savetxt(tmp_path / "data" / name / "patients.csv", rows, delimiter=",")
    config = {
        "run": {"task": "diabetes:Diabetes"},
        "strategy": {"name": "boosted-trees", "trees": 3, "depth": 2, "min_group": 1},
    }
    shards = sorted((tmp_path / "data").iterdir())
    result = edgefl.simulate(config, devices=shards, root=tmp_path / "runs", allow_modules=["diabetes"])
    found = json.loads(result.result.read_text())
    assert (len(result.rounds), found["num_trees"]) == (2 + 3 * 2, 3)
    assert [tree[0] for tree in found["trees"]["columns"]] == [2, 2, 2]
    assert found["losses"][-1] < found["losses"][0] / 3


@pytest.fixture
def houses(tmp_path):
    """Two boards' rows of a table, in which pressures are about 100,000 and flows about 0.01."""
    rng, paths = np.random.default_rng(8), [tmp_path / "one.csv", tmp_path / "two.csv"]
    for path, size in zip(paths, (30, 70), strict=True):
        rows = rng.normal([101_325, 0.01], [900, 0.002], (size, 2))
        is_leak = (rows[:, 0] > 101_325).astype(int)
        lines = [f"{a!r},{b!r},{c}" for (a, b), c in zip(rows.tolist(), is_leak.tolist(), strict=True)]
        path.write_text("\n".join(["pressure,flow,is_leak", *lines]) + "\n")
    return paths


def test_scales_of_the_fleet_are_those_of_the_rows_that_it_trains_on(houses, tmp_path):
    options = {"columns": "pressure,flow", "target": "is_leak", "labels": "no,yes"}
    tables = {"run": {"task": "table", "rounds": 3, "local_test_fraction": 0.0}, "simulation": {"workers": 0}}
    config = parse_run({**tables, "task": {**options, "normalise": "fleet"}})
    result = edgefl.simulate(config, devices=houses, root=tmp_path / "fleet")
    found = read_scales(config, result)
    rows = np.concatenate([np.loadtxt(path, delimiter=",", skiprows=1) for path in houses]).astype(np.float32)
    rows = rows[:, :2].astype(float)
    assert np.array(found.task["means"].split(","), float) == pytest.approx(rows.mean(axis=0), rel=1e-7)
    assert np.array(found.task["scales"].split(","), float) == pytest.approx(rows.std(axis=0), rel=1e-7)
    same = edgefl.simulate(found, devices=houses, root=tmp_path / "told")
    assert same.model.read_bytes() == result.model.read_bytes()
    assert make_reference(found).task == found.task
    with Store.open(tmp_path / "fleet" / "edgefl.db", read_only=True) as store:
        assert [run.strategy for run in store.list_runs()] == ["fedavg", "column-scales"]


def test_a_simulation_knows_no_run_of_a_fleet(houses, tmp_path):
    task = {"columns": "pressure,flow", "target": "is_leak", "labels": "no,yes", "normalise": "run:latest"}
    with pytest.raises(ConfigError, match='of a simulation must be "fleet"'):
        edgefl.simulate({"run": {"task": "table"}, "task": task}, devices=houses, root=tmp_path / "runs")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"strategy": {"name": "fedavg", "lerning_rate": 1}}, "learning_rate"),
        (
            {"privacy": {"unit": "device", "epsilon": 1.0, "delta": 1e-5, "boards": 2}, "guard": {"enabled": False}},
            r"^task\.normalise must be left out",
        ),
    ],
)
def test_wrong_settings_of_a_run_are_refused_before_its_scales_are_asked_for(houses, tmp_path, wrong, line):
    task = {"columns": "pressure,flow", "target": "is_leak", "labels": "no,yes", "normalise": "fleet"}
    tables = {"run": {"task": "table"}, "task": task, **wrong}
    with pytest.raises(ConfigError, match=line):
        edgefl.simulate(tables, devices=houses, root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fednova", "fedbuff", "asgd"])
def test_a_rate_twenty_times_too_high_is_said_within_ten_rounds_and_what_is_advised_trains(name, tmp_path):
    """With the task's own model; an update of `asgd` is one gradient, so its runs are longer."""
    usual = build_run(parse_run({"run": {"task": "digits", "rounds": 1}, "strategy": {"name": name}}), "x")
    high = 20 * usual.strategy.plan.learning_rate

    def run(folder, rate, rounds):
        tables = {"run": {"task": "digits", "rounds": rounds, "seed": 7, "evaluate_on": "coordinator"}}
        tables |= {"strategy": {"name": name, "learning_rate": rate}, "simulation": {"workers": 0}}
        result = edgefl.simulate(tables, devices=3, scheme="dirichlet:0.5", root=tmp_path / folder)
        with Store.open(tmp_path / folder / "edgefl.db") as store:
            events = read_history(store, "events", run=result.run_id)
        return result, [event["message"] for event in events if event["kind"] == "run-diverging"]

    said = run("high", high, 10)[1]
    advised = re.search(r"^round (\d+): .* is too high: start again with ([\d.]+)", said[0])
    assert advised is not None, said
    assert int(advised[1]) <= 10
    result, said = run("advised", float(advised[2]), 300 if name == "asgd" else 20)
    assert said == []
    assert max(row["accuracy"] for row in result.rounds[-5:]) > 0.85
