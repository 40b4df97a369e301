"""Runs that nobody could train are refused; boards without torch get no part in runs that need it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from edgefl.coordinator.execution.eligibility import EligibilityFilter, RunSpec
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.trainer_check import check_trainers
from edgefl.core.config import parse_run
from edgefl.core.errors import TaskError


def roster(reasons: dict[str, str] | None = None, **boards: list[str] | None) -> DeviceRegistry:
    """Trainers by name, with these backends; None says nothing of them, as older agents do."""
    made = DeviceRegistry(PresenceTracker(), time.monotonic)
    for number, (name, backends) in enumerate(boards.items()):
        facts = {} if backends is None else {"backends": backends, "backend_reasons": reasons or {}}
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
    run = RunSpec(
        run_id="r", task="mnist", header={}, groups=(), names=(), join_at_start=False, encode=lambda *_: b"",
        decode=lambda _: {}, needs_torch=needs_torch,
    )  # fmt: skip
    participants = EligibilityFilter(run)
    assert [info.device_id for info in fleet.list_devices() if participants.is_eligible(info)] == accepted


def test_boards_that_say_why_they_cannot_are_quoted() -> None:
    zero = roster({"torch": "its 437 MB of memory are too few for torch"}, zero=["numpy"])
    with pytest.raises(TaskError, match="no device can train task mnist: zero: its 437 MB of memory are too few"):
        check_trainers(config(), zero, needs_torch=True)
    check_trainers(config(), zero, needs_torch=False)


@pytest.mark.parametrize("needs_torch", [False, True])
def test_a_board_that_trains_with_nothing_trains_nothing(needs_torch: bool) -> None:
    old = roster(dict.fromkeys(("numpy", "torch"), "its userland has 32 bits"), old=[])
    with pytest.raises(TaskError, match="old: its userland has 32 bits"):
        check_trainers(config(), old, needs_torch=needs_torch)
    run = RunSpec(
        run_id="r", task="mnist", header={}, groups=(), names=(), join_at_start=False, needs_torch=needs_torch,
        encode=lambda *_: b"", decode=lambda _: {},
    )  # fmt: skip
    info = old.get_device("old")
    assert info is not None
    assert not EligibilityFilter(run).is_eligible(info)
