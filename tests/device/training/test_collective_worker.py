"""A member's round: what it sends of all-reduces that were done, and of a group that broke."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgefl.core.errors import DataError, NetworkError
from edgefl.core.types import CollectiveConfig
from edgefl.device.training.collective_worker import CollectiveWorker, check_config
from edgefl.tasks.local_algorithms.local_training import LocalTrainingResult

ALONE = CollectiveConfig(collective="ring", members=("a",), group="g", reductions=3, addresses=("",))
PAIR = CollectiveConfig(collective="ring", members=("a", "b"), group="g", reductions=3, addresses=("", ""))
MODEL = {"w": np.zeros(2, np.float32), "n": np.array(0)}


def training(seen: list[Any], value: float = 1.0) -> Any:
    def train(model: Any, reduction: int) -> LocalTrainingResult:
        seen.append((reduction, float(model["w"][0])))
        moved = {"w": np.full(2, value, np.float32), "n": np.array(1)}
        return LocalTrainingResult(
            displacement=moved,
            iterations=2,
            num_examples=8,
            loss=reduction + 1.0,
            compute_s=0.5,
            algorithm_state=None,
        )

    return train


def test_each_training_begins_where_the_all_reduce_before_it_ended() -> None:
    seen: list[Any] = []
    result = CollectiveWorker("a", None).run_round(
        "r", ALONE, MODEL, train=training(seen), should_finish=lambda: False
    )
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert result.displacement["w"].tolist() == [3.0, 3.0]
    assert result.displacement["n"] == 3
    assert (result.num_reduced, result.iterations, result.loss_sum, result.compute_s) == (3, 6, 12.0, 1.5)


def test_without_connections_it_trains_once_and_leaves_the_sum_to_the_coordinator() -> None:
    seen: list[Any] = []
    result = CollectiveWorker("a", None).run_round(
        "r", PAIR, MODEL, train=training(seen), should_finish=lambda: False
    )
    assert (len(seen), result.num_reduced) == (1, 0)
    assert result.displacement["w"].tolist() == [1.0, 1.0]


def test_a_mean_that_is_not_finite_is_no_result() -> None:
    with pytest.raises(DataError, match="NaN"):
        CollectiveWorker("a", None).run_round(
            "r", ALONE, MODEL, train=training([], float("nan")), should_finish=lambda: False
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collective": "star"}, "one of ring, butterfly, binary-blocks"),
        ({"members": ("b", "c")}, "this device among them"),
        ({"members": ("a", "a")}, "each once"),
        ({"addresses": ()}, "as many addresses, got 0"),
        ({"reductions": 0}, "1 to 10000"),
        ({"reductions": 2.5}, "whole"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    check_config(PAIR, "a")
    with pytest.raises(NetworkError, match=message):
        check_config(replace(PAIR, **changes), "a")
