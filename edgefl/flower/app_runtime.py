"""Runtime of an exported app: messages between ServerApp and ClientApp, and the history in memory.

A message is a JSON header and a codec body. A restarted ServerApp starts from scratch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from edgefl.core.errors import NetworkError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Decision, EvaluateResult, Event, InstructionFailed, Json, Update, UpdateMetrics

RECORD_HEADER = "edgefl"
RECORD_BODY = "body"
_FIELD = "json"
log = logging.getLogger(__name__)


def make_body_record(body: bytes) -> ArrayRecord:
    """Returns a body as the array that Flower stores once for all nodes and sends in chunks."""
    return ArrayRecord({RECORD_BODY: Array(np.frombuffer(body, np.uint8))})


def encode_content(header: Json, body: ArrayRecord | None = None) -> RecordDict:
    """Returns the content of a message."""
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        RECORD_HEADER: ConfigRecord({_FIELD: json.dumps(header)})
    }
    if body is not None:
        records[RECORD_BODY] = body
    return RecordDict(records)


def decode_content(content: RecordDict) -> tuple[Json, bytes]:
    """Returns header and body of a message, an empty one when it has none.

    Raises:
        NetworkError: not an edgefl message.
    """
    try:
        header = parse_json(str(content.config_records[RECORD_HEADER][_FIELD]))
        arrays = content.array_records.get(RECORD_BODY)
        body = b"" if arrays is None else arrays[RECORD_BODY].numpy().tobytes()
    except (KeyError, TypeError, ValueError) as error:
        raise NetworkError(f"a message without our header or body: {error!r}") from None
    if not isinstance(header, dict):
        raise NetworkError(f"the header of a message must be an object, got a {type(header).__name__}")
    return header, body


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
        accuracy = _compute_mean(
            [(score.accuracy, score.num_examples) for score in scores if score.accuracy is not None]
        )
        self._update_row(event.version, {"accuracy": accuracy})
        log.info("version %d: accuracy %s on %d devices", event.version, accuracy, len(scores))

    def _record_device_evaluation(self, event: EvaluateResult) -> None:
        if event.accuracy is None:
            return
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
