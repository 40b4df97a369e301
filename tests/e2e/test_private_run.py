"""A private run on live boards: a coordinator that is killed in its middle spends nothing twice."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import GuardSection, PrivacySection
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.storage.state_serialisation import decode_state
from edgefl.strategies.private_mean import PrivacySpend


@pytest.mark.extended
@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
def test_a_private_run_whose_coordinator_is_killed_goes_on_and_spends_nothing_twice(
    tools: Any, tmp_path: Path
) -> None:
    with tools.fleet(tmp_path, tools.devices(3, "digits", tools.gated), kind=LocalFleet) as fleet:
        config = replace(
            tools.gated_run(pace_s=0.03, iterations=4, rounds=10, min=3, seed=7),
            guard=GuardSection(enabled=False),
            privacy=PrivacySection(unit="device", epsilon=50.0, delta=1e-3, clip=1.0, boards=3),
        )
        run_id = fleet.submit(config)
        tools.wait_rounds(fleet, run_id, 3)
        fleet.kill("coordinator")
        fleet.start_coordinator()
        run = fleet.wait_for_run(run_id)
        assert (run["status"], run["reason"]) == ("finished", "rounds reached 10")
        spent = [row["facts"]["epsilon"] for row in fleet.list_history("rounds", run=run_id)]
        (record,) = tmp_path.rglob("privacy.safetensors")
    assert len(spent) == 10
    assert spent == sorted(spent)
    assert spent[-1] <= 50.0
    spend = decode_state(record.read_bytes(), PrivacySpend)
    assert (spend.sampled, spend.repeated, spend.key) == (10, 0, b"")
