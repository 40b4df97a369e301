"""Deployments step by step: canaries first, the rest after them, and back again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgefl.coordinator.rollouts.state_machine import (
    RolloutTransition,
    advance_rollout,
    fail_rollout,
    select_canaries,
    start_rollout,
    update_canary_deadline,
)
from edgefl.core.types import DeviceInfo
from edgefl.storage.repositories.rollouts import (
    CANARY_PART,
    DeploymentDeviceRecord,
    DeploymentRecord,
    RolloutStage,
    RolloutStatus,
)


def deployment(status: str, **changes: Any) -> DeploymentRecord:
    values: dict[str, Any] = {
        "deployment_id": "d", "run_id": "r", "model": "ab" * 32, "task": "digits", "options": {}, "devices": None,
        "canary": 2, "canary_s": 60.0, "tolerance": 0.02, "min_accuracy": 0.0, "test_fraction": 0.1,
        "created_at": 0.0, "canary_until": 160.0,
    }  # fmt: skip
    return DeploymentRecord(status=RolloutStatus(status), **{**values, **changes})


def rows(canaries: str = "", rest: str = "", reason: str | None = None) -> list[DeploymentDeviceRecord]:
    """Devices c1, c2, … and r1, r2, … in these states."""
    return [
        DeploymentDeviceRecord(
            deployment_id="d",
            device_id=f"{letter}{number}",
            state=RolloutStage(state),
            part=part,
            reason=reason,
        )
        for letter, part, states in (("c", CANARY_PART, canaries), ("r", "rest", rest))
        for number, state in enumerate(states.split(), 1)
    ]


def states(step: RolloutTransition | None) -> dict[str, str]:
    assert step is not None
    return {name: str(values["state"]) for name, values in step.devices.items()}


def board(name: str, model: str = "Pi 4") -> DeviceInfo:
    return DeviceInfo(device_id=name, capabilities={"model": model})


def test_canaries_are_spread_over_kinds_of_board() -> None:
    fleet = [board("a"), board("b"), board("c", "Orin"), board("d"), board("e", "Zero")]
    assert select_canaries(fleet, 3) == ["a", "c", "e"]
    assert select_canaries(fleet, 9) == ["a", "c", "e", "b", "d"]
    assert select_canaries([], 2) == []


def test_the_canaries_time_begins_when_the_last_of_them_comes_to_it() -> None:
    waiting = rows("running notified", "pending")
    queued, free = (lambda name: name == "c2"), (lambda _name: False)
    assert update_canary_deadline(deployment("canary"), waiting, queued, 150.0) == RolloutTransition(
        values={"canary_until": None}
    )
    assert update_canary_deadline(deployment("canary", canary_until=None), waiting, queued, 900.0) is None
    assert advance_rollout(deployment("canary", canary_until=None), waiting, 900.0) is None
    begun = update_canary_deadline(deployment("canary", canary_until=None), waiting, free, 900.0)
    assert begun == RolloutTransition(values={"canary_until": 960.0})
    assert update_canary_deadline(deployment("canary"), waiting, free, 150.0) is None
    assert update_canary_deadline(deployment("canary"), rows("notified running"), queued, 150.0) is None
    assert update_canary_deadline(deployment("rolling"), waiting, queued, 150.0) is None


def test_without_canaries_everybody_is_told_at_once() -> None:
    step = start_rollout(deployment("preparing", canary=0), rows(rest="pending pending"), [], 100.0)
    assert states(step) == {"r1": "notified", "r2": "notified"}
    assert step.values == {"status": "rolling"}


def test_with_canaries_only_those_that_are_there_are_told() -> None:
    step = start_rollout(
        deployment("preparing"), rows(rest="pending pending pending"), [board("r2"), board("r3"), board("x")], 100.0
    )
    assert states(step) == {"r2": "notified", "r3": "notified"}
    assert step.values == {"status": "canary", "canary_until": 160.0}
    assert step.devices["r2"]["part"] == CANARY_PART


def test_without_anybody_there_a_canary_fails() -> None:
    step = start_rollout(deployment("preparing"), rows(rest="pending"), [], 100.0)
    assert (step.values["status"], step.values["reason"]) == ("failed", "no device is online that could be a canary")


@pytest.mark.parametrize(("canaries", "now"), [("running notified", 100.0), ("notified notified", 159.9)])
def test_the_rest_waits_while_a_canary_has_time(canaries: str, now: float) -> None:
    assert advance_rollout(deployment("canary"), rows(canaries, "pending pending"), now) is None


def test_the_rest_is_told_when_every_canary_runs_it() -> None:
    step = advance_rollout(deployment("canary"), rows("running running", "pending pending"), 100.0)
    assert states(step) == {"r1": "notified", "r2": "notified"}
    assert step is not None
    assert step.values == {"status": "rolling"}


@pytest.mark.parametrize("bad", ["rejected", "failed"])
def test_one_bad_canary_takes_the_others_back_and_is_named(bad: str) -> None:
    step = advance_rollout(
        deployment("canary"), rows(f"running {bad} notified", "pending", reason="0.1, before 0.9"), 100.0
    )
    assert states(step) == {"c1": "reverting", "c3": "reverting", "r1": "superseded"}
    assert step is not None
    assert step.values == {"status": "failed", "reason": "canary c2: 0.1, before 0.9", "finished_at": 100.0}


def test_a_canary_that_says_nothing_in_time_fails_the_deployment_and_is_named() -> None:
    step = advance_rollout(deployment("canary"), rows("running notified", "pending"), 160.0)
    assert step is not None
    assert step.values["reason"] == "canary c2 did not report within 60 s"
    assert states(step) == {"c1": "reverting", "c2": "reverting", "r1": "superseded"}


def test_a_newer_deployment_of_a_canary_ends_this_one_and_takes_nothing_back() -> None:
    step = advance_rollout(deployment("canary"), rows("running superseded", "pending"), 100.0)
    assert step is not None
    assert step.values["status"] == "superseded"
    assert states(step) == {"r1": "superseded"}


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("running notified", None),
        ("running rejected", "done"),
        ("rejected failed", "failed"),
        ("superseded", "superseded"),
    ],
)
def test_it_is_over_when_everybody_has_answered(rest: str, expected: str | None) -> None:
    step = advance_rollout(deployment("rolling"), rows(rest=rest, reason="worse"), 100.0)
    assert (step and step.values["status"]) == expected
    if expected == "failed":
        assert step is not None
        assert step.values["reason"] == "no device took it; r1: worse"


def test_a_failed_deployment_leaves_those_alone_that_never_had_it() -> None:
    assert states(fail_rollout(deployment("rolling"), rows("rejected reverted", "superseded"), "x", 1.0)) == {}


@pytest.mark.parametrize("status", ["preparing", "done", "failed", "superseded"])
def test_what_is_over_or_not_begun_takes_no_step(status: str) -> None:
    assert advance_rollout(deployment(status), rows("running", "pending"), 1000.0) is None


def judged(*accuracies: float | None, former: float | None = 0.9) -> list[DeploymentDeviceRecord]:
    found = rows(" ".join(["running"] * len(accuracies)), "pending")
    scores = [*accuracies, None]
    return [
        replace(row, accuracy=score, former_accuracy=former if score is not None else None)
        for row, score in zip(found, scores, strict=True)
    ]


@pytest.mark.parametrize(
    ("accuracies", "status", "reason"),
    [
        ((0.91, 0.9, 0.89), "rolling", None),
        ((0.2, 0.3, 1.0), "failed", "the canaries' median accuracy is 0.300, with the model before 0.900"),
        ((None, None, 1.0), "failed", "1 of 3 canaries reported an accuracy, 3 are needed"),
        ((None, None, None), "rolling", None),
    ],
)
def test_a_model_is_passed_on_by_the_median_of_its_canaries(
    accuracies: tuple[float | None, ...], status: str, reason: str | None
) -> None:
    step = advance_rollout(deployment("canary", canary=3), judged(*accuracies), 100.0)
    assert step is not None
    assert (str(step.values["status"]), step.values.get("reason")) == (status, reason)


def test_with_fewer_than_three_canaries_there_it_says_who_is() -> None:
    step = start_rollout(
        deployment("preparing", canary=3), rows(rest="pending pending"), [board("r1"), board("r2")], 1.0
    )
    assert step.values["reason"] == "3 canaries are needed to pass a model on, only r1, r2 online"
