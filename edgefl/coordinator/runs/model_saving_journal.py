"""Journal that also passes a run's evaluated models to its model retention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.core.types import (
    Decision,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    InstructionFailed,
    Journal,
    Tensors,
)
from edgefl.engine.device_evaluation import compute_mean_accuracy
from edgefl.engine.stopping import EvaluationTracker


class ModelSavingJournal:
    """Implements `Journal` over another one.

    Args:
        journal: the journal of the run.
        retention: gets the global model of every evaluated version, and its accuracy.
        get_model: a strategy's state -> its model.
        last_record: () -> number of the journal's last record.
    """

    def __init__(
        self,
        journal: Journal,
        retention: ModelRetention,
        get_model: Callable[[Any], Tensors],
        last_record: Callable[[], int],
    ) -> None:
        self._journal, self._retention = journal, retention
        self._get_model, self._last_record = get_model, last_record
        self._version, self._state = -1, None
        self._pending_evaluations: dict[str, int] = {}
        self._results: dict[int, list[EvaluateResult]] = {}

    def resume(self, scores: EvaluationTracker) -> None:
        """Restores the pending evaluations and their results so far."""
        self._pending_evaluations = dict(scores.outstanding)
        self._results = {version: list(results) for version, results in scores.results.items()}

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        journaled = self._journal.record_events(events)
        for event in events:
            if isinstance(event, EvaluateResult | InstructionFailed):
                self._record_result(event)
        return journaled

    def record_decision(self, decision: Decision) -> None:
        self._journal.record_decision(decision)
        evaluations = [
            instruction
            for instruction in decision.orders
            if isinstance(instruction, EvaluateInstruction) and not instruction.subject
        ]
        new_versions = {instruction.version for instruction in evaluations} - {
            *self._pending_evaluations.values(),
            *self._results,
        }
        self._pending_evaluations |= {instruction.assignment_id: instruction.version for instruction in evaluations}
        for version in new_versions & {self._version}:
            number = next(instruction.round for instruction in evaluations if instruction.version == version)
            # The state is that of the newest version until the loop folds updates into it, which follows.
            self._retention.add(version, number, self._last_record(), self._get_model(self._state))

    def record_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self._version, self._state = version, state  # type: ignore[assignment] # the strategy's own type
        self._journal.record_aggregation(version, assignment_ids, state)

    def commit(self) -> None:
        self._journal.commit()

    def _record_result(self, event: EvaluateResult | InstructionFailed) -> None:
        version = self._pending_evaluations.pop(event.assignment_id, None)
        if version is None:
            return
        if isinstance(event, EvaluateResult):
            self._results.setdefault(version, []).append(event)
        if version not in self._pending_evaluations.values():
            self._retention.record_accuracy(version, compute_mean_accuracy(self._results.pop(version, [])))
