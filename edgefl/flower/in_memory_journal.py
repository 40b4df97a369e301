"""In-memory history of an exported app; a restarted ServerApp starts from scratch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgefl.core.types import Decision, EvaluateResult, Event, InstructionFailed, Json, Update, UpdateMetrics

log = logging.getLogger(__name__)


@dataclass(slots=True)
class InMemoryJournal:
    """Implements `Journal`; `rows` has one row per version: updates, loss, accuracy, bytes up and down.

    Where nodes have models of their own, the row has their mean and worst accuracy too.
    """

    rows: list[Json] = field(default_factory=list)
    _pending: dict[str, UpdateMetrics] = field(default_factory=dict)
    _evaluations: dict[int, list[EvaluateResult]] = field(default_factory=dict)
    _device_accuracies: dict[int, list[float]] = field(default_factory=dict)

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            if isinstance(event, Update):
                self._pending[event.assignment_id] = event.metrics
            elif isinstance(event, EvaluateResult) and event.subject:
                self._record_device_evaluation(event)
            elif isinstance(event, EvaluateResult):
                self._record_evaluation(event)
            elif isinstance(event, InstructionFailed):
                log.warning("%s: nothing from %s: %s", event.assignment_id, event.device_id, event.reason)
        return events

    def record_decision(self, decision: Decision) -> None:
        """Does nothing: the run is never resumed."""

    def record_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:  # noqa: ARG002 Journal's
        updates = [self._pending.pop(name) for name in assignment_ids if name in self._pending]
        losses = [(metrics.loss, metrics.num_examples) for metrics in updates if metrics.loss is not None]
        row = {
            "version": version,
            "num_updates": len(updates),
            "loss": _compute_mean(losses),
            "accuracy": None,
            "bytes_up": sum(metrics.bytes_up for metrics in updates),
            "bytes_down": sum(metrics.bytes_down for metrics in updates),
        }
        self.rows.append(row)
        log.info("version %d: %d updates, loss %s", version, len(updates), row["loss"])

    def commit(self) -> None:
        """Does nothing: there is no disk to sync."""

    def _record_evaluation(self, event: EvaluateResult) -> None:
        scores = self._evaluations.setdefault(event.version, [])
        scores.append(event)
        accuracy = _compute_mean([(score.accuracy, score.num_examples) for score in scores])
        self._update_row(event.version, {"accuracy": accuracy})
        log.info("version %d: accuracy %s on %d devices", event.version, accuracy, len(scores))

    def _record_device_evaluation(self, event: EvaluateResult) -> None:
        accuracies = self._device_accuracies.setdefault(event.version, [])
        accuracies.append(event.accuracy)
        mean, worst = sum(accuracies) / len(accuracies), min(accuracies)
        self._update_row(event.version, {"node_accuracy": mean, "worst_node_accuracy": worst})
        log.info("version %d: accuracy of %d nodes %s, worst %s", event.version, len(accuracies), mean, worst)

    def _update_row(self, version: int, values: Json) -> None:
        for row in self.rows[version - 1 : version]:
            row.update(values)


def _compute_mean(weighted: Sequence[tuple[Any, int]]) -> float | None:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None
