"""The strategy of a run, with what its task recommends."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.strategy import get_plan


@pytest.mark.parametrize(
    ("strategy", "rate"),
    [
        ({"name": "fedavg"}, 0.5),
        ({"name": "scaffold"}, 0.25),
        ({"name": "scaffold", "learning_rate": 0.5}, 0.5),
    ],
)
def test_a_strategy_takes_its_share_of_the_task_s_rate_unless_the_run_file_gives_one(
    strategy: dict[str, Any], rate: float
) -> None:
    run = build_run(parse_run({"run": {"task": "digits", "rounds": 1}, "strategy": strategy}), "r")
    assert get_plan(run.strategy).learning_rate == rate
