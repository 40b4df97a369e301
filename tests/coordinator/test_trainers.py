"""Runs that nobody could train are refused; boards without torch get no part in runs that need it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.coordinator.participants import FleetRun, Participants
from edgefl.coordinator.presence import Presence
from edgefl.coordinator.roster import Roster
from edgefl.coordinator.trainers import check_trainers
from edgefl.errors import TaskError


def roster(**boards: list[str] | None) -> Roster:
    """Trainers by name, with these backends; None says nothing of them, as older agents do."""
    made = Roster(Presence(), time.monotonic)
    for number, (name, backends) in enumerate(boards.items()):
        facts = {} if backends is None else {"backends": backends}
        made.add(name, node_id=number, role="trainer", groups=(name[0],), examples={"mnist": 5}, facts=facts)
    return made


def config(**devices: Any) -> Any:
    return parse_run({"run": {"task": "mnist"}, "devices": devices})


def test_a_run_whose_trainers_all_lack_torch_is_refused_and_they_are_named() -> None:
    fleet = roster(**{f"b{number}": ["numpy"] for number in range(7)})
    with pytest.raises(
        TaskError, match=r"no device can train task mnist: b0, b1, b2, b3, b4 and 2 more have no torch"
    ):
        check_trainers(config(), fleet, needs_torch=True)
    check_trainers(config(), fleet, needs_torch=False)


@pytest.mark.parametrize("other", [["numpy", "torch"], None])
def test_one_trainer_that_has_it_or_does_not_say_is_enough(other: list[str] | None) -> None:
    fleet = roster(small=["numpy"], large=other)
    check_trainers(config(), fleet, needs_torch=True)
    with pytest.raises(TaskError, match="small have no torch"):
        check_trainers(config(groups=["s"]), fleet, needs_torch=True)


def test_a_fleet_that_is_still_empty_may_be_given_work() -> None:
    check_trainers(config(), roster(), needs_torch=True)


@pytest.mark.parametrize(("needs_torch", "accepted"), [(True, ["large", "old"]), (False, ["small", "large", "old"])])
def test_boards_without_torch_take_part_only_where_none_is_needed(needs_torch: bool, accepted: list[str]) -> None:
    fleet = roster(small=["numpy"], large=["numpy", "torch"], old=None)
    run = FleetRun(
        run_id="r", task="mnist", header={}, groups=(), names=(), join_at_start=False, encode=lambda *_: b"",
        decode=lambda _: {}, needs_torch=needs_torch,
    )  # fmt: skip
    participants = Participants(run)
    assert [info.device_id for info in fleet.known() if participants.accepts(info)] == accepted
