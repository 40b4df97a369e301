"""One rogue device of five against default settings: what it sends, and what it costs.

Fashion-MNIST where `EDGEFL_DATA` has it, otherwise digits. The measure is the same fleet without the rogue, when the
run has learned; each cell is one process's work: `make attack ARGS="-n 15"`.
"""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rogue_devices import flip_labels, load_fleet, noise, one_coordinate, play, scaled, slow_creep

pytestmark = [pytest.mark.attack, pytest.mark.timeout(900)]

DATA = Path(os.environ.get("EDGEFL_DATA", "nowhere")) / "fashion-mnist"
TASK = "fashion-mnist" if DATA.is_dir() else "digits"
SCHEMES = ("iid", "dirichlet:0.3")
NUM_DEVICES, NUM_EXAMPLES, NUM_SEEDS = 5, 4000, 20
EPOCHS = {"epochs": 1.0, "learning_rate": 0.1}
STEPS = {"iterations": 10, "learning_rate": 0.05}
STRATEGIES = {
    "fedavg": (40, EPOCHS),
    "fedprox": (40, EPOCHS),
    "fednova": (40, EPOCHS),
    "scaffold": (40, EPOCHS),
    "ssgd": (150, {"iterations": 5, "learning_rate": 0.1}),
    "signsgd": (150, {"iterations": 5, "learning_rate": 0.1}),
    "esync": (150, {"learning_rate": 0.1}),
    "fedbuff": (60, EPOCHS),
    "fedasync": (60, EPOCHS),
    "asgd": (100, STEPS),
    "dc-asgd": (100, STEPS),
    "bounded": (100, STEPS),
    "adacomp": (100, {**STEPS, "compression": 0.05}),
}
"""Rounds and options with which each one learns."""
ATTACKS = {
    "update x -1": scaled(-1),
    "update x 10": scaled(10),
    "update x 1e6": scaled(1e6),
    "update x 1e12": scaled(1e12),
    "not finite": scaled(np.nan),
    "noise": noise,
    "one coordinate": one_coordinate,
}


def make_tables(strategy, seed=1, rounds=None):
    usual_rounds, options = STRATEGIES[strategy]
    is_fashion = TASK == "fashion-mnist"
    tables = {
        "run": {"task": TASK, "rounds": rounds or usual_rounds, "seed": seed, "local_test_fraction": 0.0},
        "strategy": {"name": strategy, "batch_size": 32, **options} if is_fashion else {"name": strategy},
    }
    return {**tables, "task": {"model": "mlp"}} if is_fashion else tables


@cache
def get_fleet(scheme, seed=1):
    is_fashion = TASK == "fashion-mnist"
    return load_fleet(
        TASK,
        scheme,
        NUM_DEVICES,
        data=DATA if is_fashion else None,
        seed=seed,
        examples=NUM_EXAMPLES if is_fashion else None,
    )


@cache
def get_baseline(strategy, scheme, rounds=None):
    return play(make_tables(strategy, rounds=rounds), get_fleet(scheme), without_rogues=True).accuracy


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rogue_of_five_costs_at_most_two_points(strategy, scheme, attack, attack_table):
    outcome = play(make_tables(strategy), get_fleet(scheme), attack=ATTACKS[attack])
    baseline = get_baseline(strategy, scheme)
    loss = baseline - outcome.accuracy
    attack_table.add(
        f"{attack}, {strategy}, {TASK} {scheme}", "<= 2 points", f"{100 * loss:.1f} points of {100 * baseline:.1f}"
    )
    assert loss <= 0.02


@pytest.mark.parametrize("scheme", SCHEMES)
def test_flipped_labels_cost_at_most_five_points(scheme, attack_table):
    fleet = flip_labels(get_fleet(scheme), [NUM_DEVICES - 1])
    loss = get_baseline("fedavg", scheme) - play(make_tables("fedavg"), fleet).accuracy
    attack_table.add(f"label flip, fedavg, {TASK} {scheme}", "<= 5 points", f"{100 * loss:.1f} points")
    assert loss <= 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_slow_creep_over_a_hundred_rounds_costs_at_most_five_points(scheme, attack_table):
    outcome = play(make_tables("fedavg", rounds=100), get_fleet(scheme), attack=slow_creep)
    loss = get_baseline("fedavg", scheme, rounds=100) - outcome.accuracy
    attack_table.add(f"slow creep, fedavg, {TASK} {scheme}", "<= 5 points", f"{100 * loss:.1f} points")
    assert loss <= 0.05
    assert {device for device, _ in outcome.clipped} >= {f"device-{NUM_DEVICES:02}"}


@pytest.mark.parametrize("seed", range(1, NUM_SEEDS + 1))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strategy", ["fedavg", "ssgd", "esync", "fedbuff", "fedasync", "asgd"])
def test_no_honest_device_is_refused(strategy, scheme, seed, attack_table):
    outcome = play(make_tables(strategy, seed), get_fleet(scheme, seed), num_rogues=0)
    attack_table.add(
        f"no attack, seed {seed}, {strategy}, {TASK} {scheme}",
        "0 refused",
        f"{len(outcome.refused)} refused, {len(outcome.clipped)} clipped",
    )
    assert not outcome.refused
