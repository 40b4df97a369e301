"""Runs that train a part of their model: bytes, whole models, and the same in virtual time as on boards."""

from types import SimpleNamespace

import numpy as np
import pytest

import edgefl
from edgefl.coordinator.runs.planning import count_model_bytes, create_admission_requirements
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.simulated_run import simulate
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.adaptation.base_file import encode_base
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.registry import make_task

LORA = {"method": "lora", "rank": 2, "shared": ["fc2.bias"]}


def tables(adapt, strategy="fedavg", **run):
    return {
        "run": {"task": "digits", "rounds": 3, **run},
        "strategy": {"name": strategy, "learning_rate": 0.1},
        "adapt": adapt,
        "devices": {"min": 2},
        "simulation": {"workers": 0, "scheme": "iid"},
    }


def count_base_bytes(adapt):
    return build_run(parse_run(tables(adapt)), "r").adapted.base_bytes


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff", "asgd", "scaffold", "fedasync"])
def test_strategies_see_fewer_tensors_and_a_device_gets_the_base_once(tmp_path, strategy):
    result = simulate(tables(LORA, strategy), devices=2, root=tmp_path)
    assert result.status == "finished"
    base = count_base_bytes(LORA)
    downs = {}
    for row in result.updates:
        downs.setdefault(row["device_id"], []).append(row["bytes_down"])
    small = max(row["bytes_up"] for row in result.updates)
    assert small < base / 4
    for sizes in downs.values():
        assert sizes[0] > base
        assert max(sizes[1:], default=0) < base / 4


def test_the_model_that_is_kept_is_whole_and_is_the_one_that_was_evaluated(tmp_path):
    result = simulate(tables(LORA), devices=2, root=tmp_path)
    task, model = make_task("digits", {}), load_model_file(result.model)
    assert list(model) == [spec.name for spec in task.shapes()]
    first = task.init(7)
    assert np.array_equal(model["fc1.bias"], first["fc1.bias"])
    assert not np.array_equal(model["fc1.weight"], first["fc1.weight"])
    assert not np.array_equal(model["fc2.bias"], first["fc2.bias"])
    assert np.linalg.matrix_rank(model["fc1.weight"] - first["fc1.weight"], tol=1e-4) <= LORA["rank"]


def test_adapters_learn_by_their_name_alone(tmp_path):
    found = simulate(
        {**tables({"method": "lora"}, rounds=10), "strategy": {"name": "fedavg"}}, devices=3, root=tmp_path
    )
    assert found.metrics["accuracy"] > 0.8, "the rate for whole tensors makes them diverge"


def test_processes_train_the_same(tmp_path):
    here = simulate(tables(LORA), devices=2, root=tmp_path / "one")
    there = tables(LORA)
    there["simulation"]["workers"] = 2
    assert simulate(there, devices=2, root=tmp_path / "two").model.read_bytes() == here.model.read_bytes()


def test_a_head_that_stays_is_evaluated_where_it_is(tmp_path):
    adapt = {"frozen": ["fc1.weight"], "local": ["fc2.*"]}
    result = simulate(tables(adapt, rounds=6), devices=2, root=tmp_path)
    assert {row["device_id"] for row in result.evaluations} == {"device-01", "device-02"}
    assert result.metrics["accuracy"] > 0.6
    assert list(load_model_file(result.model)) == ["fc1.weight", "fc1.bias"]
    again = simulate(tables(adapt, init=str(result.model)), devices=2, root=tmp_path / "again")
    kept, later = load_model_file(result.model), load_model_file(again.model)
    assert list(later) == list(kept)
    assert np.array_equal(later["fc1.weight"], kept["fc1.weight"]), "a run goes on from a model without heads"
    for place in ("coordinator", "evaluator"):
        with pytest.raises(ConfigError, match=r"tensors stay on the devices \(fc2.weight\)"):
            build_run(parse_run(tables(adapt, evaluate_on=place)), "r")


def test_a_board_needs_memory_for_the_base_and_on_its_disk_only_what_a_download_looks_for():
    run, whole = (build_run(parse_run(tables(adapt)), "r") for adapt in (LORA, {}))
    needed, before = create_admission_requirements(run), create_admission_requirements(whole)
    assert needed.disk_bytes == 2 * count_model_bytes(run.model)
    assert run.adapted.base_bytes < needed.memory_bytes < before.memory_bytes


def test_a_run_starts_from_a_whole_model(tmp_path):
    first = simulate(tables({}), devices=2, root=tmp_path / "first")
    again = simulate(tables({"method": "head"}, init=str(first.model)), devices=2, root=tmp_path / "second")
    before, after = load_model_file(first.model), load_model_file(again.model)
    assert np.array_equal(before["fc1.weight"], after["fc1.weight"])
    assert not np.array_equal(before["fc2.weight"], after["fc2.weight"])


def test_a_pretrained_base_has_what_is_frozen_and_where_the_rest_starts(tmp_path):
    task = make_task("digits", {})
    pretrained = {**task.init(99), "fc2.weight": np.zeros((1000, 64), np.float32)}  # of another task
    (tmp_path / "base.safetensors").write_bytes(encode_base(pretrained))
    adapt = {"method": "bitfit", "shared": ["fc2.weight"], "base": str(tmp_path / "base.safetensors")}
    run = build_run(parse_run(tables(adapt)), "r")
    assert np.array_equal(run.model["fc1.bias"], pretrained["fc1.bias"])
    assert np.array_equal(run.model["fc2.weight"], task.init(7)["fc2.weight"]), "it does not fit, so it is drawn"
    assert run.header["adapt"]["base_bytes"] == (tmp_path / "base.safetensors").stat().st_size
    assert run.header["adapt"]["method"] == "bitfit"
    result = simulate(tables(adapt), devices=2, root=tmp_path / "root")
    assert np.array_equal(load_model_file(result.model)["fc1.weight"], pretrained["fc1.weight"])
    (tmp_path / "base.safetensors").write_bytes(encode_base({"fc1.bias": pretrained["fc1.bias"]}))
    with pytest.raises(ConfigError, match=r"the base must have tensor 'fc1.weight' of shape \(64, 64\), got none"):
        build_run(parse_run(tables(adapt)), "r")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"adapt": {"frozen": ["backbone.*"]}},
            "adapt.frozen: no tensor of the model matches 'backbone.*'; it has fc1",
        ),
        ({"adapt": {"method": "head", "base": "x"}}, "adapt.base = 'x': only a coordinator has bases by name"),
        ({"adapt": {"base": "x"}}, "adapt.base means nothing where nothing is frozen"),
        ({"adapt": {"method": "head"}, "split": {"after": "fc1"}}, "adapt does not go with split.after"),
    ],
)
def test_what_does_not_go_is_told_before_the_first_round(changes, told):
    with pytest.raises(ConfigError, match=told):
        build_run(parse_run({**tables({}), **changes}), "r")


def test_a_strategy_that_cannot_do_with_local_tensors_says_so_before_the_first_round():
    for name in ("redundant", "scaffold"):
        with pytest.raises(ConfigError, match=rf"strategy {name} does not go with .* on the devices \(fc2.weight\)"):
            build_run(parse_run({**tables({"local": ["fc2.*"]}), "strategy": {"name": name}}), "r")
    build_run(parse_run({**tables({"local": ["fc2.*"]}), "strategy": {"name": "fednova"}}), "r")


@pytest.mark.parametrize(
    ("adapt", "strategy", "told"),
    [
        ({}, {}, r"strategy.head_epochs = 2 trains first what .* of this model nothing stays; name a part"),
        ({"local": ["fc2.*"]}, {"name": "scaffold"}, "begins anew, not with scaffold"),
        ({"local": ["fc2.*"]}, {"name": "esync"}, "does not go with esync or fltrust"),
        ({"local": ["fc2.*"]}, {"keep_optimizer": True}, "begins anew, not with keep_optimizer"),
        ({"local": ["fc2.*"]}, {"seconds": 1.0}, "begins anew, not with seconds"),
        ({"local": ["fc2.*"]}, {"head_epochs": 0}, "strategy.head_epochs must be a number above 0 and at most 1000"),
    ],
)
def test_heads_that_cannot_be_trained_first_are_told_before_the_first_round(adapt, strategy, told):
    config = {**tables(adapt), "strategy": {"name": "fedavg", "head_epochs": 2, **strategy}}
    with pytest.raises(ConfigError, match=told):
        build_run(parse_run(config), "r")


@pytest.mark.parametrize("workers", [0, 2])
def test_heads_trained_first_cost_their_time_and_change_what_is_sent(tmp_path, workers):
    found = {}
    for head_epochs in (None, 3):
        config = tables({"local": ["fc2.*"]}, rounds=2)
        config["strategy"] |= {"epochs": 1, **({"head_epochs": head_epochs} if head_epochs else {})}
        config["simulation"] |= {"workers": workers, "jitter": 0.0}
        found[head_epochs] = simulate(config, devices=2, root=tmp_path / str(head_epochs))
    iterations = [[row["iterations"] for row in found[each].updates] for each in (None, 3)]
    assert [4 * count for count in iterations[0]] == iterations[1]
    assert found[3].model.read_bytes() != found[None].model.read_bytes()
    assert {row["bytes_up"] for row in found[3].updates} == {row["bytes_up"] for row in found[None].updates}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"adapt": {"local": ["fc2.*"]}}, "does not go with tensors that stay on the devices beside it"),
        ({"adapt": LORA}, "does not go with adapt.method = 'lora'"),
        ({"strategy": {"name": "esync", "personal_lambda": 1.0}}, "does not go with esync or fltrust"),
        ({"strategy": {"name": "redundant", "personal_lambda": 1.0}}, "does not go with redundant"),
        ({"strategy": {"name": "dsgd", "personal_lambda": 1.0}}, "does not go with nodes of a graph"),
        ({"strategy": {"name": "esync", "personal_mixture": 1.0}}, "personal_mixture = 1.0 does not go with esync"),
        (
            {"aggregation": {"collective": "ring"}, "guard": {"enabled": False, "max_weight_ratio": 0.0}},
            "does not go with aggregation.collective",
        ),
        ({"strategy": {"name": "fedavg", "personal_lambda": 1.0, "keep_optimizer": True}}, "not with keep_optimizer"),
        ({"run": {"task": "digits", "evaluate_on": "coordinator"}}, r"stay on the devices \(personal copies\)"),
    ],
)
def test_copies_that_cannot_be_kept_are_told_before_the_first_round(changes, told):
    config = {**tables({}), "strategy": {"name": "fedavg", "personal_lambda": 1.0}, **changes}
    with pytest.raises(ConfigError, match=told):
        build_run(parse_run(config), "r")


def test_copies_of_a_task_without_classes_need_a_metric_to_be_told_by():
    task = SimpleNamespace(name="wear")
    with pytest.raises(ConfigError, match=r"task wear declares no metrics.*or leave strategy.personal_lambda out"):
        make_task_metrics(task, has_personal=True)
    task.metrics = {"rmse": "min"}
    assert list(make_task_metrics(task, has_personal=True).metrics) == ["rmse", "personal-rmse"]


def test_copies_cost_their_time_and_memory_and_leave_the_shared_model_as_it_is(tmp_path):
    found, needed = {}, {}
    for name, value, workers in (("plain", None, 0), ("ditto", 0.5, 0), ("processes", 0.5, 2)):
        config = tables({}, rounds=3, evaluate_on="devices", until="personal-accuracy >= 0.99" if value else None)
        config["run"] = {key: each for key, each in config["run"].items() if each is not None}
        config["strategy"] |= {} if value is None else {"personal_lambda": value}
        config["simulation"] |= {"workers": workers, "jitter": 0.0}
        found[name] = simulate(config, devices=2, root=tmp_path / name)
        needed[name] = create_admission_requirements(build_run(parse_run(config), "r")).memory_bytes
    plain, ditto, processes = found.values()
    assert plain.model.read_bytes() == ditto.model.read_bytes() == processes.model.read_bytes()
    assert [2 * row["iterations"] for row in plain.updates] == [row["iterations"] for row in ditto.updates]
    assert plain.rounds[-1]["metrics"] is None
    assert set(ditto.rounds[-1]["metrics"]) == {"accuracy", "personal-accuracy"}
    assert ditto.rounds[-1]["metrics"] == processes.rounds[-1]["metrics"]
    assert needed["ditto"] > needed["plain"]


@pytest.mark.parametrize("setting", ["personal_lambda", "personal_mixture"])
def test_boards_keep_the_same_copies_as_virtual_ones(tmp_path, setting):
    config = tables({}, evaluate_on="devices")
    config["strategy"] |= {setting: 0.5}
    live = edgefl.run(config, devices=2, scheme="iid", root=tmp_path / "live")
    virtual = simulate(config, devices=2, scheme="iid", root=tmp_path / "virtual")
    assert live.status == "finished"
    assert live.model.read_bytes() == virtual.model.read_bytes()
    measured = [
        sorted((row["round"], row["device_id"], tuple(row["metrics"].items())) for row in result.evaluations)
        for result in (live, virtual)
    ]
    assert measured[0] == measured[1]
    assert len([*(tmp_path / "live").rglob("runs/*.npz")]) == 2


@pytest.mark.extended
def test_heads_of_their_own_suit_boards_of_their_own_kind_better_than_one_model_for_all(tmp_path):
    accuracy = {}
    for name, adapt, strategy in (
        ("shared", {}, {}),
        ("fedper", {"local": ["fc2.*"]}, {}),
        ("fedrep", {"local": ["fc2.*"]}, {"head_epochs": 2}),
        ("ditto", {}, {"personal_lambda": 1.0}),
        ("apfl", {}, {"personal_mixture": 0.5}),
    ):
        config = tables(adapt, rounds=20, evaluate_on="devices")
        config["strategy"] |= {"epochs": 1, **strategy}
        config["simulation"]["scheme"] = "dirichlet:0.1"
        metrics = simulate(config, devices=8, root=tmp_path / name).metrics
        accuracy[name] = metrics["accuracy"]
        if name in {"ditto", "apfl"}:
            assert metrics["personal-accuracy"] > accuracy["shared"] + 0.02
            assert accuracy[name] == accuracy["shared"]
        if name == "shared":
            first = simulate(config, devices=8, root=tmp_path / "first")
            config["run"] |= {"rounds": 1, "init": str(first.model)}
            config["strategy"] |= {"personal_lambda": 0.0, "epochs": 5}
            tuned = simulate(config, devices=8, root=tmp_path / "tuned")
            assert tuned.metrics["personal-accuracy"] > accuracy["shared"] + 0.02
    assert accuracy["fedper"] > accuracy["shared"] + 0.02
    assert accuracy["fedrep"] > accuracy["shared"] + 0.02


@pytest.mark.parametrize(
    ("adapt", "strategy"),
    [
        (LORA, {}),
        ({"frozen": ["fc1.*"], "local": ["fc2.bias"]}, {}),
        ({"frozen": ["fc1.weight"], "local": ["fc2.weight"]}, {"head_epochs": 2}),
    ],
)
def test_boards_do_the_same_and_fetch_the_base_once(tmp_path, adapt, strategy):
    config = tables(adapt)
    config["strategy"] |= strategy
    live = edgefl.run(config, devices=2, scheme="iid", root=tmp_path / "live")
    virtual = simulate(config, devices=2, scheme="iid", root=tmp_path / "virtual")
    assert (live.status, live.reason) == ("finished", "rounds reached 3")
    assert live.model.read_bytes() == virtual.model.read_bytes()
    base = count_base_bytes(adapt)
    for device in ("device-01", "device-02"):
        downs = [row["bytes_down"] for row in live.updates if row["device_id"] == device]
        assert len(downs) == 3
        assert downs[0] > base
        assert max(downs[1:]) < base
        (path,) = (tmp_path / "live").rglob(f"{device}/bases/*.safetensors")
        assert path.stat().st_size == base
        own = [list(np.load(file)) for file in (tmp_path / "live").rglob(f"{device}/runs/*.npz")]
        assert own == [adapt["local"]] if "local" in adapt else own == []
