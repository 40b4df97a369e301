"""Run files looked at before they are queued, with the parts that they make over a real store and roster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.validation import RunValidator
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.protocol import Capabilities, StatusMessage
from edgefl.engine.build import build_run
from edgefl.storage.store import Store


@pytest.fixture
def roster() -> DeviceRegistry:
    made = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    made.record_broker_link(connected=True)
    made.add("pi", node_id=1, role="trainer", groups=(), examples={"digits": 9})
    made.record_status("pi", StatusMessage(state="online", boot_id="b", session_no=1))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


def run_file(**sections: Any) -> Any:
    return parse_run({"run": {"task": "digits", "rounds": 2}, **sections})


def test_a_run_that_can_work_is_planned_with_what_was_said_at_its_check(roster: DeviceRegistry, store: Store) -> None:
    vetting = RunValidator(build_run, roster, store)
    told = vetting.check(run_file())
    assert "state_bytes" in told
    plan = vetting.plan(run_file())
    assert told.items() <= plan.items()
    assert [row["device_id"] for row in plan["rows"] if row["takes_part"]] == ["pi"]


def test_a_run_whose_state_is_too_large_is_not_planned_either(roster: DeviceRegistry, store: Store) -> None:
    vetting = RunValidator(build_run, roster, store)
    greedy = parse_run({"run": {"task": "digits", "max_state_bytes": 1}, "strategy": {"name": "dc-asgd"}})
    for look in (vetting.check, vetting.plan):
        with pytest.raises(ConfigError, match="max_state_bytes"):
            look(greedy)


def test_a_run_that_nobody_can_train_is_not_planned_either(roster: DeviceRegistry, store: Store) -> None:
    roster.record_capabilities("pi", Capabilities(facts={"backends": ["numpy"]}, shards={"digits": 9}))
    vetting = RunValidator(lambda config, run_id: replace(build_run(config, run_id), needs_torch=True), roster, store)
    for look in (vetting.check, vetting.plan):
        with pytest.raises(TaskError, match="have no torch"):
            look(run_file())
