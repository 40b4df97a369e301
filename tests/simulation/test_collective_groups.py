"""Collectives in virtual time: the coordinator's model, bytes, times, and lost members."""

import numpy as np
import pytest

import edgefl
from edgefl.core.types import derive_rng
from edgefl.storage.checkpoints import load_model_file

BOARD = """
[profile.board]
up_bytes_per_s = 2_500_000
down_bytes_per_s = 2_500_000
latency_s = 0.005
"""


@pytest.fixture
def simulate(tmp_path):
    """Simulates boards on links of 20 Mbit/s, as the coordinator's."""
    (tmp_path / "boards.toml").write_text(BOARD)
    numbers = iter(range(1000))

    def run(
        collective, *, reductions=1, rounds=4, devices=4, task=None, faults="", bookkeeping_only=False, **strategy
    ):
        folder = tmp_path / str(next(numbers))
        (tmp_path / "faults.toml").write_text(faults)
        aggregation = {"collective": collective, "reductions": reductions} if collective != "coordinator" else {}
        tables = {
            "run": {"task": "digits", "rounds": rounds, "evaluate_every": 100, "local_test_fraction": 0.0},
            "task": {"model": "logistic"},
            "strategy": strategy,
            "guard": {"enabled": False, "max_weight_ratio": 0},
            "aggregation": aggregation,
            "simulation": {
                "workers": 0, "jitter": 0.0, "iteration_s": 0.01, "profiles": ["board"], "detect_s": 8.0,
                "profile_file": str(tmp_path / "boards.toml"), "faults": str(tmp_path / "faults.toml"),
                "server_up_bytes_per_s": 2_500_000, "server_down_bytes_per_s": 2_500_000,
            },
        }  # fmt: skip
        if task is not None:
            tables["run"]["task"], tables["task"] = "noop", task
        options = {} if task else {"scheme": "dirichlet:0.5"}
        return edgefl.simulate(tables, devices=devices, root=folder, bookkeeping_only=bookkeeping_only, **options)

    return run


def distance(first, second):
    """The largest difference of two weights, relative to the largest weight where that is above 1."""
    models = [load_model_file(result.model) for result in (first, second)]
    largest = max(1.0, *(float(np.abs(tensor).max()) for tensor in models[0].values()))
    return max(float(np.abs(models[0][name] - models[1][name]).max()) for name in models[0]) / largest


def kill(device, at_s, for_s=None):
    until = "" if for_s is None else f"for_s = {for_s}\n"
    return f'[[fault]]\ndevice = "{device}"\nat_s = {at_s}\nkind = "kill"\n{until}'


@pytest.mark.parametrize("name", ["fedavg", "ssgd", "fedprox", "esync"])
def test_the_model_is_the_coordinator_s_whichever_collective_adds_it_up(simulate, name):
    expected = simulate("coordinator", rounds=4, name=name)
    for collective, reductions in (("ring", 1), ("butterfly", 2), ("binary-blocks", 4), ("auto", 2)):
        result = simulate(collective, reductions=reductions, rounds=4 // reductions, name=name)
        assert result.status == "finished"
        assert distance(expected, result) < 1e-6, collective


def test_moments_that_are_kept_and_five_members_give_the_coordinator_s_model_too(simulate):
    kept = {"momentum": 0.9, "keep_optimizer": True}
    expected = simulate("coordinator", devices=5, **kept)
    assert distance(expected, simulate("binary-blocks", devices=5, reductions=2, rounds=2, **kept)) < 1e-6


@pytest.mark.parametrize(("devices", "megabytes"), [(4, 1), (8, 20)])
def test_a_round_is_sooner_and_hardly_a_byte_passes_the_coordinator(simulate, devices, megabytes):
    task = {"size_bytes": megabytes * 1_000_000}
    usual = simulate("coordinator", devices=devices, task=task, bookkeeping_only=True)
    for collective in ("ring", "butterfly", "auto"):
        result = simulate(collective, reductions=16, devices=devices, task=task, bookkeeping_only=True)
        seconds = [run.rounds[-1]["closed_at"] - run.rounds[-1]["started_at"] for run in (usual, result)]
        assert seconds[0] / (seconds[1] / 16) > 3
        last = [[row for row in run.updates if row["round"] == 4] for run in (usual, result)]
        through = [sum(row["bytes_up"] + row["bytes_down"] for row in rows) for rows in last]
        assert through[1] / 16 <= 0.01 * through[0]
        sent = [row["metrics"]["peer_bytes_up"] / 16 for row in last[1]]
        assert sent == pytest.approx([2 * (devices - 1) / devices * task["size_bytes"]] * devices, rel=1e-3)


def test_a_member_that_dies_before_it_has_trained_leaves_the_model_that_the_coordinator_makes_of_the_others(simulate):
    faults = kill("device-02", 0.01)
    expected = simulate("coordinator", rounds=3, faults=faults)
    result = simulate("ring", rounds=3, faults=faults)
    assert distance(expected, result) < 1e-6
    assert [row["outcome"] for row in result.updates if row["device_id"] == "device-02"] == ["lost"]
    first = [row["metrics"]["reductions"] for row in result.updates if row["round"] == 1 and row["outcome"] == "used"]
    assert first == [0.0] * 3, "the round fell back to the coordinator"


def test_the_update_of_a_member_that_dies_between_two_reductions_is_not_lost(simulate):
    whole = simulate("ring", reductions=1, rounds=1)
    at_s = 1.3 * (whole.rounds[0]["closed_at"] - whole.rounds[0]["started_at"])
    broken = simulate("ring", reductions=2, rounds=1, faults=kill("device-03", at_s))
    counts = {row["metrics"]["reductions"] for row in broken.updates if row["outcome"] == "used"}
    assert counts == {1.0}
    assert sum(row["outcome"] == "used" for row in broken.updates) == 3
    assert distance(whole, broken) > 1e-3


def test_a_displacement_that_was_on_its_way_up_is_sent_by_another_member(simulate):
    task = {"size_bytes": 2_500_000}
    whole = simulate("ring", rounds=1, task=task)
    times = whole.updates[0]
    uploading_s = times["received_at"] - times["dispatched_at"] - 0.5
    result = simulate("ring", rounds=1, task=task, faults=kill("device-01", uploading_s))
    used = [row for row in result.updates if row["outcome"] == "used"]
    assert sorted(row["device_id"] for row in used) == ["device-02", "device-03", "device-04"]
    assert sum(row["bytes_up"] for row in used) > 2_500_000
    assert distance(whole, result) == 0.0


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(50))
def test_whoever_dies_when_no_update_is_counted_twice_and_every_round_closes(simulate, seed):
    rng = derive_rng(seed, "kills")
    faults = "".join(
        kill(f"device-0{rng.integers(1, 5)}", round(float(rng.uniform(0.0, 40.0)), 3), int(rng.integers(1, 20)))
        for _ in range(4)
    )
    result = simulate("auto", reductions=3, rounds=6, faults=faults)
    assert (result.status, len(result.rounds)) == ("finished", 6)
    used = [row for row in result.updates if row["outcome"] == "used"]
    assert len({(row["round"], row["device_id"]) for row in used}) == len(used)
    for number in range(1, 7):
        assert len({row["metrics"]["reductions"] for row in used if row["round"] == number}) == 1
