"""The history of an exported app, in memory: a plain ServerApp keeps nothing, and a killed one starts again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgefl.types import Decision, Evaluated, Event, Json, Lost, Update, UpdateMetrics

log = logging.getLogger(__name__)


@dataclass(slots=True)
class AppJournal:
    """Implements `Journal`; `rows` has one row a version: updates, loss, accuracy, bytes in both directions.

    Where nodes have models of their own, the version's row has their mean and their worst accuracy, too.
    """

    rows: list[Json] = field(default_factory=list)
    _open: dict[str, UpdateMetrics] = field(default_factory=dict)
    _scores: dict[int, list[Evaluated]] = field(default_factory=dict)
    _nodes: dict[int, list[float]] = field(default_factory=dict)

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            if isinstance(event, Update):
                self._open[event.assignment_id] = event.metrics
            elif isinstance(event, Evaluated) and event.subject:
                self._score_node(event)
            elif isinstance(event, Evaluated):
                self._score(event)
            elif isinstance(event, Lost):
                log.warning("%s: nothing from %s: %s", event.assignment_id, event.device_id, event.reason)
        return events

    def decided(self, decision: Decision) -> None:
        """Takes no notice: nothing is taken up again."""

    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object) -> None:  # noqa: ARG002 Journal's
        used = [self._open.pop(name) for name in assignment_ids if name in self._open]
        losses = [(metrics.loss, metrics.num_examples) for metrics in used if metrics.loss is not None]
        row = {
            "version": version,
            "num_updates": len(used),
            "loss": _mean(losses),
            "accuracy": None,
            "bytes_up": sum(metrics.bytes_up for metrics in used),
            "bytes_down": sum(metrics.bytes_down for metrics in used),
        }
        self.rows.append(row)
        log.info("version %d: %d updates, loss %s", version, len(used), row["loss"])

    def commit(self) -> None:
        """Has nothing to write."""

    def _score(self, event: Evaluated) -> None:
        scores = self._scores.setdefault(event.version, [])
        scores.append(event)
        accuracy = _mean([(score.accuracy, score.num_examples) for score in scores])
        self._note(event.version, {"accuracy": accuracy})
        log.info("version %d: accuracy %s on %d devices", event.version, accuracy, len(scores))

    def _score_node(self, event: Evaluated) -> None:
        accuracies = self._nodes.setdefault(event.version, [])
        accuracies.append(event.accuracy)
        mean, worst = sum(accuracies) / len(accuracies), min(accuracies)
        self._note(event.version, {"node_accuracy": mean, "worst_node_accuracy": worst})
        log.info("version %d: accuracy of %d nodes %s, worst %s", event.version, len(accuracies), mean, worst)

    def _note(self, version: int, figures: Json) -> None:
        for row in self.rows[version - 1 : version]:
            row.update(figures)


def _mean(weighted: Sequence[tuple[Any, int]]) -> float | None:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None
