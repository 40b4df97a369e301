"""The keeper sees every evaluated version of the global model, with its accuracy, and the journal sees everything."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.coordinator.runs.model_saving_journal import ModelSavingJournal
from edgefl.core.types import (
    Decision,
    EvaluateInstruction,
    EvaluateResult,
    InstructionFailed,
    TrainConfig,
    TrainInstruction,
    UpdateStatus,
)


class Noted:
    """A journal and a keeper that write down what they are told, in one list."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def record_events(self, events: Any) -> Any:
        self.told.append(("received", len(events)))
        return [*events, "from the journal"]

    def record_decision(self, decision: Decision) -> None:
        self.told.append(("decided", len(decision.orders)))

    def record_aggregation(self, version: int, ids: Any, state: object) -> None:
        self.told.append(("aggregated", version, ids, state))

    def commit(self) -> None:
        self.told.append(("commit",))

    def add(self, version: int, number: int, last_record: int, model: Any) -> None:
        self.told.append(("take", version, number, last_record, model))

    def record_accuracy(self, version: int, accuracy: float | None) -> None:
        self.told.append(("score", version, accuracy))


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def journal(noted: Noted) -> ModelSavingJournal:
    keeper: Any = noted
    return ModelSavingJournal(noted, keeper, lambda state: {"model of": state}, lambda: 42)


def asks(version: int, *devices: str, subject: str = "") -> Decision:
    return Decision(
        orders=tuple(
            EvaluateInstruction(
                assignment_id=f"{d}{version}{subject}", device_id=d, version=version, round=9, subject=subject
            )
            for d in devices
        )
    )


def answer(
    version: int, device: str, accuracy: float, num_examples: int = 10, source: str = "evaluator"
) -> EvaluateResult:
    return EvaluateResult(
        assignment_id=f"{device}{version}", device_id=device, version=version, round=9, source=source,
        num_examples=num_examples, loss=1.0, accuracy=accuracy,
    )  # fmt: skip


def test_the_model_is_taken_when_its_evaluation_is_asked_for_and_after_the_journal_knows(
    journal: ModelSavingJournal, noted: Noted
) -> None:
    journal.record_aggregation(3, ["a"], "state")
    journal.record_decision(asks(3, "one", "two"))
    journal.commit()
    assert noted.told == [
        ("aggregated", 3, ["a"], "state"), ("decided", 2), ("take", 3, 9, 42, {"model of": "state"}), ("commit",),
    ]  # fmt: skip


def test_it_is_taken_once_however_often_it_is_asked_for(journal: ModelSavingJournal, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    for device in ("one", "two"):
        journal.record_decision(asks(3, device))
    assert [entry[0] for entry in noted.told].count("take") == 1


def test_its_accuracy_is_known_when_all_have_answered_or_are_lost(journal: ModelSavingJournal, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one", "two", "gone"))
    assert journal.record_events([answer(3, "one", 0.5, 30)])[-1] == "from the journal"
    lost = InstructionFailed(device_id="gone", assignment_id="gone3", outcome=UpdateStatus.LOST, reason="away")
    journal.record_events([lost])
    assert not [entry for entry in noted.told if entry[0] == "score"]
    journal.record_events([answer(3, "two", 0.9, 10)])
    assert noted.told[-1] == ("score", 3, pytest.approx(0.6))


def test_a_version_that_nobody_could_evaluate_has_no_accuracy(journal: ModelSavingJournal, noted: Noted) -> None:
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one"))
    journal.record_events(
        [InstructionFailed(device_id="one", assignment_id="one3", outcome=UpdateStatus.LOST, reason="away")]
    )
    assert noted.told[-1] == ("score", 3, None)


def test_models_of_single_devices_other_orders_and_older_versions_are_not_taken(
    journal: ModelSavingJournal, noted: Noted
) -> None:
    journal.record_decision(asks(0, "one"))  # before anything was aggregated there is no state
    journal.record_aggregation(3, [], "state")
    journal.record_decision(asks(3, "one", subject="pi-1"))
    journal.record_decision(asks(2, "one"))
    order = TrainInstruction(assignment_id="a", device_id="one", base_version=3, plan=TrainConfig(iterations=1))
    journal.record_decision(Decision(orders=(order,)))
    journal.record_events([answer(3, "stranger", 0.5)])
    assert not [entry for entry in noted.told if entry[0] in {"take", "score"}]
