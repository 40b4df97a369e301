"""Runs with several models, each trained by the devices whose examples it fits best (IFCA)."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import edgefl
from edgefl.coordinator.runs.planning import create_admission_requirements
from edgefl.core.clusters import CLUSTER, add_cluster, make_stack_shapes, split_stack
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.types import Update, UpdateMetrics
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.simulated_run import simulate
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.registry import make_task


def tables(clusters=3, **changes):
    config = {
        "run": {"task": "digits", "rounds": 3},
        "strategy": {"name": "ifca", "clusters": clusters, "learning_rate": 0.1, "epochs": 1},
        "devices": {"min": 4},
        "simulation": {"workers": 0, "scheme": "dirichlet:0.1", "jitter": 0.0},
    }
    return {name: {**config.get(name, {}), **changes.get(name, {})} for name in {*config, *changes}}


def list_choices(result):
    return sorted((row["round"], row["device_id"], row["metrics"]["cluster"]) for row in result.updates)


def list_scores(result):
    return sorted((row["round"], row["device_id"], row["loss"], row["accuracy"]) for row in result.evaluations)


def test_all_models_come_down_one_goes_up_and_the_history_says_which(tmp_path):
    result = simulate(tables(), devices=4, root=tmp_path / "run")
    plain = simulate(tables(strategy={"name": "fedavg"}) | {"strategy": {"name": "fedavg"}}, devices=4, root=tmp_path)
    size = plain.updates[0]["bytes_up"]
    assert {row["bytes_up"] for row in result.updates} == {size + 8}
    assert all(3 * size - 200 < row["bytes_down"] < 3 * size for row in result.updates)
    counts = result.rounds[-1]["facts"]
    chosen = [cluster for number, _, cluster in list_choices(result) if number == 3]
    assert [counts[f"cluster-{place}"] for place in range(3)] == [chosen.count(place) for place in range(3)]
    assert all(row["source"] == "device" for row in result.evaluations)


def test_processes_do_the_same(tmp_path):
    alone = simulate(tables(), devices=4, root=tmp_path / "a")
    processes = simulate(tables(simulation={"workers": 2}), devices=4, root=tmp_path / "b")
    assert alone.model.read_bytes() == processes.model.read_bytes()
    assert list_choices(alone) == list_choices(processes)
    assert list_scores(alone) == list_scores(processes)


def test_boards_do_the_same(tmp_path):
    live = edgefl.run(tables(devices={"min": 3}), devices=3, scheme="dirichlet:0.1", root=tmp_path / "live")
    virtual = simulate(tables(devices={"min": 3}), devices=3, root=tmp_path / "virtual")
    assert (live.status, live.reason) == ("finished", "rounds reached 3")
    assert live.model.read_bytes() == virtual.model.read_bytes()
    assert list_choices(live) == list_choices(virtual)
    assert list_scores(live) == list_scores(virtual)
    assert not [*(tmp_path / "live").rglob("runs/*.npz")], "nothing stays on a board"


def test_clusters_begin_from_different_weights_and_a_board_has_room_for_all():
    components = build_run(parse_run(tables(4)), "r")
    models = split_stack(components.model)
    assert len({model["fc1.weight"].tobytes() for model in models}) == 4
    assert all(np.array_equal(models[0][name], tensor) for name, tensor in make_task("digits").init(7).items())
    again = build_run(parse_run(tables(4)), "s").model
    assert all(np.array_equal(components.model[name], again[name]) for name in again)
    fewer = create_admission_requirements(build_run(parse_run(tables(2)), "r")).memory_bytes
    assert create_admission_requirements(components).memory_bytes == 2 * fewer


def test_an_update_for_a_cluster_that_is_not_there_is_refused_and_one_that_is_there_is_not():
    components = build_run(parse_run(tables()), "r")
    tensors = {name: 0.01 * tensor for name, tensor in split_stack(components.model)[0].items()}
    assert [spec.name for spec in components.update_shapes] == [*tensors, CLUSTER]
    guard = components.policy.guard
    assert (guard.min_cosine, guard.compares_responses) == (None, False), "clusters may pull apart"

    def judge(tensors):
        update = Update(
            assignment_id="a", device_id="pi", base_version=0, tensors=tensors, metrics=UpdateMetrics(num_examples=9)
        )
        return guard.rejection_reason(update)

    assert judge(add_cluster(tensors, 2)) is None
    assert "it is for cluster 3, of 0 to 2" in judge(add_cluster(tensors, 3))
    assert "no tensor '-cluster'" in judge(tensors)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"adapt": {"local": ["fc2.*"]}}, r"does not go with \[adapt\]"),
        ({"strategy": {"personal_lambda": 1.0}}, "does not go with strategy.personal_lambda"),
        ({"strategy": {"keep_optimizer": True}}, "does not go with strategy.keep_optimizer"),
        ({"compression": {"up": "ef|topk:0.1"}}, "does not go with ef in compression.up"),
        ({"aggregation": {"collective": "ring"}}, "ring"),
        ({"run": {"evaluate_on": "coordinator"}}, "evaluate_on must be auto, devices or none with 3 cluster models"),
        ({"strategy": {"clusters": 99}}, "clusters must be .*at most 16"),
        ({"strategy": {"head_epochs": 2}}, "name a part of it in adapt.local"),
    ],
)
def test_what_does_not_go_with_clusters_is_told_before_the_first_round(changes, told):
    with pytest.raises(ConfigError, match=told):
        build_run(parse_run(tables(**changes)), "r")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The models of three clusters after a run."""
    return simulate(tables(devices={"min": 3}), devices=3, root=tmp_path_factory.mktemp("kept")).model


def test_a_later_run_goes_on_from_the_models_of_all_clusters(kept):
    first, expected = build_run(parse_run(tables(run={"init": str(kept)})), "r").model, load_model_file(kept)
    assert list(first) == [spec.name for spec in make_stack_shapes(make_task("digits").shapes(), 3)]
    assert all(np.array_equal(tensor, expected[name]) for name, tensor in first.items())


@pytest.mark.extended
def test_boards_go_on_from_them_as_in_the_simulation(tmp_path, kept):
    config = tables(run={"init": str(kept), "rounds": 2}, devices={"min": 3})
    live = edgefl.run(config, devices=3, scheme="dirichlet:0.1", root=tmp_path / "live")
    virtual = simulate(config, devices=3, root=tmp_path / "virtual")
    assert live.model.read_bytes() == virtual.model.read_bytes() != kept.read_bytes()
    assert list_choices(live) == list_choices(virtual)


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("one", {}, "with 3 models, one for each cluster, as this run has; it has one model"),
        ("three", {"strategy": {"clusters": 2}}, "with 2 models, .*; it has 3 models, one for each cluster"),
        ("three", {"strategy": {"name": "fedavg"}}, "with one model, as this run has; it has 3 models"),
        ("three", {"strategy": {"name": "fedavg"}, "adapt": {"frozen": ["fc1.*"]}}, "with one model, .*3 models"),
        ("gap", {}, "run.init: tensor 'cluster-2/fc1.weight' must have shape .*, got none"),
    ],
)
def test_a_run_begins_from_no_other_number_of_models(tmp_path, kept, file, changes, told):
    three = load_model_file(kept)
    gap = {name.replace("cluster-2", "cluster-7"): tensor for name, tensor in three.items()}
    model = {"one": make_task("digits").init(7), "three": three, "gap": gap}[file]
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in model.items()}, tmp_path / "first.safetensors")
    config = tables(run={"init": str(tmp_path / "first.safetensors")}, **changes)
    if config["strategy"]["name"] == "fedavg":
        del config["strategy"]["clusters"]
    with pytest.raises(ConfigError, match=told):
        build_run(parse_run(config), "r")


@pytest.mark.parametrize("up", ["topk:0.1|int8", "sign", "lss:4", "dense|fp16|zstd"])
def test_an_update_is_for_its_cluster_through_any_codec(tmp_path, up):
    result = simulate(tables(compression={"up": up}), devices=4, root=tmp_path)
    assert result.status == "finished"
    assert len(list_choices(result)) == 12


@pytest.mark.extended
def test_clusters_suit_boards_of_their_own_kind_better_than_one_model_for_all(tmp_path):
    accuracy = {}
    for clusters in (1, 4):
        config = tables(clusters, run={"rounds": 20, "seed": 2, "evaluate_on": "devices"})
        if clusters == 1:
            config["strategy"] = {"name": "fedavg", "learning_rate": 0.1, "epochs": 1}
        result = simulate(config, devices=8, root=tmp_path / str(clusters))
        accuracy[clusters] = result.metrics["accuracy"]
    assert accuracy[4] > accuracy[1] + 0.03
    assert len(split_stack(load_model_file(result.model))) == 4
