"""Simulated runs with secure aggregation: the plain run's model, and boards that die on the way."""

import numpy as np
import pytest

import edgefl
from edgefl.storage.checkpoints import load_model_file


@pytest.fixture
def simulate(tmp_path):
    numbers = iter(range(100))

    def run(*, is_secure, faults="", rounds=3, devices=5, workers=0, privacy=None, secure=None, **strategy):
        (tmp_path / "faults.toml").write_text(faults)
        tables = {
            "run": {"task": "digits", "rounds": rounds, "evaluate_every": 100, "local_test_fraction": 0.0},
            "task": {"model": "logistic"},
            "strategy": strategy,
            "guard": {"enabled": False, "max_weight_ratio": 0},
            "devices": {"min": 3},
            "simulation": {
                "workers": workers,
                "jitter": 0.0,
                "faults": str(tmp_path / "faults.toml"),
                "detect_s": 1.0,
            },
        }
        if privacy:
            tables["privacy"] = privacy
        if is_secure:
            tables["secure_aggregation"] = {"enabled": True, "threshold": 0.6, "clip": 4.0, **(secure or {})}
        folder = tmp_path / str(next(numbers))
        return edgefl.simulate(tables, devices=devices, root=folder, scheme="dirichlet:0.5")

    return run


def compute_distance(first, second):
    models = [load_model_file(result.model) for result in (first, second)]
    return max(float(np.abs(models[0][name] - models[1][name]).max()) for name in models[0])


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ssgd"])
def test_the_model_is_that_of_plain_rounds(simulate, name):
    plain, secure = (simulate(is_secure=is_secure, name=name) for is_secure in (False, True))
    assert compute_distance(plain, secure) < 1e-5
    assert [row["outcome"] for row in secure.updates] == ["used"] * 15
    assert compute_distance(secure, simulate(is_secure=True, name=name)) == 0.0


def test_a_sparse_graph_gives_the_same_model_for_fewer_bytes(simulate):
    sparse = {"graph": "sparse", "corrupted": 0.05, "dropped": 0.05}
    results = [simulate(is_secure=True, devices=30, rounds=2, secure=found) for found in (None, sparse)]
    assert compute_distance(*results) == 0.0
    assert [row["outcome"] for row in results[1].updates] == ["used"] * 60
    sizes = [{row["bytes_up"] for row in result.updates} for result in results]
    assert max(sizes[1]) < 0.8 * min(sizes[0])


def test_workers_train_the_same_masked_updates(simulate):
    assert compute_distance(simulate(is_secure=True), simulate(is_secure=True, workers=2)) == 0.0


def test_a_board_that_dies_is_left_out_and_the_others_go_on(simulate):
    faults = '[[fault]]\ndevice = "device-002"\nat_s = 0.0\nkind = "kill"\n'
    name = sorted({row["device_id"] for row in simulate(is_secure=True, rounds=1).updates})[1]
    result = simulate(is_secure=True, faults=faults.replace("device-002", name).replace("0.0", "0.001"))
    last = {row["device_id"] for row in result.updates if row["round"] == 3 and row["outcome"] == "used"}
    assert result.status == "finished"
    assert len(last) == 4
    assert name not in last


@pytest.mark.parametrize("workers", [0, 2])
def test_boards_mask_updates_with_noise_and_say_what_they_have_spent(simulate, workers):
    privacy = {"unit": "example", "epsilon": 20.0, "delta": 1e-4, "clip": 1.0}
    settings = {"privacy": privacy, "workers": workers, "momentum": 0.0}
    plain, secure = (simulate(is_secure=is_secure, **settings) for is_secure in (False, True))
    assert [row["outcome"] for row in secure.updates] == ["used"] * 15
    assert secure.metrics["accuracy"] > 0.5
    assert [row["facts"]["epsilon"] for row in secure.rounds] == [row["facts"]["epsilon"] for row in plain.rounds]
    assert 0.0 < secure.rounds[-1]["facts"]["epsilon"] <= 20.0
