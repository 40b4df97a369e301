"""Robust rules, by numbers that can be checked by hand."""

import numpy as np
import pytest

from edgefl.core.errors import ConfigError
from edgefl.core.types import Update, UpdateMetrics
from edgefl.strategies.robust import (
    CoordinateMedianConfig,
    KrumConfig,
    MultiKrumConfig,
    TrimmedMeanConfig,
    compute_distances,
    select_krum,
)
from edgefl.strategies.strategy_config import RoundRules


def updates(*rows):
    return [
        Update(
            assignment_id=f"a{number}",
            device_id=f"d{number}",
            base_version=0,
            tensors={"w": np.array(row, np.float32)},
            metrics=UpdateMetrics(num_examples=1),
        )
        for number, row in enumerate(rows)
    ]


ROWS = updates([1, 10], [2, 20], [3, 30], [4, 40], [1e9, -1e9])


def test_the_median_takes_the_middle_entry_of_each_coordinate():
    assert CoordinateMedianConfig().combine(ROWS)["w"].tolist() == [3, 20]


def test_a_trimmed_mean_leaves_out_the_ends():
    assert TrimmedMeanConfig(trim=0.2).combine(ROWS)["w"].tolist() == [3, 20]
    assert TrimmedMeanConfig(trim=0.0).combine(ROWS[:4])["w"].tolist() == [2.5, 25]
    with pytest.raises(ConfigError, match=r"below 0\.5, got 0\.5"):
        TrimmedMeanConfig(trim=0.5).build(RoundRules())


def test_krum_takes_the_update_nearest_to_its_neighbours():
    rows = updates([0], [1], [3], [4], [100])
    # Two neighbours each: 1 + 9, 1 + 4, 1 + 4, 1 + 9, and more than 9,000.
    assert select_krum(compute_distances(rows), 1, 5) == [0, 1, 2, 3, 4]
    assert KrumConfig().combine(rows)["w"].tolist() == [1]
    assert MultiKrumConfig().combine(rows)["w"].tolist() == [2]
