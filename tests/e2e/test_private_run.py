"""A private run on live boards: a coordinator that is killed in its middle spends nothing twice."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from edgefl.core.config import GuardSection, PrivacySection
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.storage.state_serialisation import decode_state
from edgefl.strategies.private_mean import PrivacySpend


def read_spend(root: Path) -> PrivacySpend:
    (record,) = root.rglob("privacy.safetensors")
    return decode_state(record.read_bytes(), PrivacySpend)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("num_kills", "num_rounds"),
    [(1, 10), pytest.param(100, 250, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
def test_a_private_run_whose_coordinator_is_killed_goes_on_and_spends_nothing_twice(
    tools: Any, tmp_path: Path, num_kills: int, num_rounds: int
) -> None:
    luck, spends, epsilon = Random(7), [], min(5.0 * num_rounds, 1000.0)
    with tools.fleet(tmp_path, tools.devices(3, "digits", tools.gated), kind=LocalFleet) as fleet:
        config = replace(
            tools.gated_run(pace_s=0.03, iterations=4, rounds=num_rounds, min=3, seed=7),
            guard=GuardSection(enabled=False),
            privacy=PrivacySection(unit="device", epsilon=epsilon, delta=1e-3, clip=1.0, boards=3),
        )
        run_id = fleet.submit(config)
        rounds = tools.wait_rounds(fleet, run_id, 3)
        for _ in range(num_kills):
            time.sleep(luck.uniform(0.0, 0.3))
            fleet.kill("coordinator")
            spends.append((rounds, read_spend(tmp_path)))
            fleet.start_coordinator()
            rounds = tools.wait_rounds(fleet, run_id, rounds + 1)
        run = fleet.wait_for_run(run_id)
        assert (run["status"], run["reason"]) == ("finished", f"rounds reached {num_rounds}")
        spent = [row["facts"]["epsilon"] for row in fleet.list_history("rounds", run=run_id)]
        spend = read_spend(tmp_path)
    assert all(rounds <= spend.sampled for rounds, spend in spends), "a sum was used before its release was counted"
    assert len(spent) == num_rounds
    assert spent == sorted(spent)
    assert spent[-1] <= epsilon
    assert (spend.sampled, spend.repeated, spend.key) == (num_rounds, 0, b"")
