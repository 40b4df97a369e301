"""One rogue device of five against default settings: what it sends, and what it costs.

Fashion-MNIST where `EDGEFL_DATA` has it, otherwise digits. The measure is the same fleet without the rogue.
"""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rogue_devices import flip_labels, load_fleet, noise, one_coordinate, play, scaled, slow_creep

pytestmark = pytest.mark.attack

DATA = Path(os.environ.get("EDGEFL_DATA", "nowhere")) / "fashion-mnist"
TASK = "fashion-mnist" if DATA.is_dir() else "digits"
SCHEMES = ("iid", "dirichlet:0.3")
NUM_DEVICES, NUM_EXAMPLES, NUM_SEEDS = 5, 4000, 20
STRATEGIES = {"fedavg": 15, "fedprox": 15, "fedbuff": 25}
"""Name and rounds."""
ATTACKS = {
    "update x -1": scaled(-1),
    "update x 10": scaled(10),
    "update x 1e6": scaled(1e6),
    "update x 1e12": scaled(1e12),
    "not finite": scaled(np.nan),
    "noise": noise,
    "one coordinate": one_coordinate,
}


def make_tables(strategy, rounds, seed=1):
    options = {"learning_rate": 0.1, "batch_size": 32, "epochs": 1.0} if TASK == "fashion-mnist" else {}
    tables = {
        "run": {"task": TASK, "rounds": rounds, "seed": seed, "local_test_fraction": 0.0},
        "strategy": {"name": strategy, **options},
    }
    return {**tables, "task": {"model": "mlp"}} if TASK == "fashion-mnist" else tables


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
def get_baseline(strategy, rounds, scheme):
    return play(make_tables(strategy, rounds), get_fleet(scheme), without_rogues=True).accuracy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_one_rogue_of_five_costs_at_most_two_points(attack, scheme, strategy, attack_table):
    rounds = STRATEGIES[strategy]
    outcome = play(make_tables(strategy, rounds), get_fleet(scheme), attack=ATTACKS[attack])
    loss = get_baseline(strategy, rounds, scheme) - outcome.accuracy
    attack_table.add(f"{attack}, {strategy}, {TASK} {scheme}", "<= 2 points", f"{100 * loss:.1f} points")
    assert loss <= 0.02


@pytest.mark.parametrize("scheme", SCHEMES)
def test_flipped_labels_cost_at_most_five_points(scheme, attack_table):
    fleet = flip_labels(get_fleet(scheme), [NUM_DEVICES - 1])
    loss = get_baseline("fedavg", 15, scheme) - play(make_tables("fedavg", 15), fleet).accuracy
    attack_table.add(f"label flip, fedavg, {TASK} {scheme}", "<= 5 points", f"{100 * loss:.1f} points")
    assert loss <= 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_slow_creep_over_a_hundred_rounds_costs_at_most_five_points(scheme, attack_table):
    outcome = play(make_tables("fedavg", 100), get_fleet(scheme), attack=slow_creep)
    loss = get_baseline("fedavg", 100, scheme) - outcome.accuracy
    attack_table.add(f"slow creep, fedavg, {TASK} {scheme}", "<= 5 points", f"{100 * loss:.1f} points")
    assert loss <= 0.05
    assert {device for device, _ in outcome.clipped} >= {f"device-{NUM_DEVICES:02}"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_honest_device_is_refused_in_twenty_seeds(scheme, attack_table):
    refused = []
    for seed in range(1, NUM_SEEDS + 1):
        outcome = play(make_tables("fedavg", 15, seed), get_fleet(scheme, seed), num_rogues=0)
        refused += [(seed, device, reason) for device, reason in outcome.refused]
    attack_table.add(f"no attack, {NUM_SEEDS} seeds, {TASK} {scheme}", "0 refused", f"{len(refused)} refused")
    assert not refused
