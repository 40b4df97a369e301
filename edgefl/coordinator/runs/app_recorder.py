"""History of a Flower app's run: its rounds, and what the replies of its boards say of them.

An app has one version only, so the base version of a message is its round less one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgefl.coordinator.runs.history_recorder import HistoryRecorder
from edgefl.core.metrics import MAX_REPLY_METRICS, ReplyMetrics, rank_reply_metric
from edgefl.core.types import Decision, Event, TrainInstruction, Update, UpdateStatus
from edgefl.storage.repositories.records import EvaluationRow

log = logging.getLogger(__name__)


class AppRecorder(HistoryRecorder):
    """Recorder of a Flower app's run. A round closes once, with the first message of the next, or with the app.

    Replies that are there when the next round begins are used; of others the app's end tells which were.

    Args:
        read_reply: returns what a reply says.
        options: of `HistoryRecorder`.
    """

    def __init__(self, *, read_reply: Callable[[Update], ReplyMetrics], **options: Any) -> None:
        super().__init__(**options)
        self._read_reply, self._replies = read_reply, dict[int, dict[str, ReplyMetrics]]()
        self._newest_closed = 0

    def on_events(self, events: Sequence[Event]) -> None:
        super().on_events(events)
        for event in events:
            if isinstance(event, Update):
                self._assignments.pop(event.assignment_id, None)
                self._record_reply(event, self._read_reply(event))

    def on_decision(self, decision: Decision) -> None:
        numbers = [one.base_version + 1 for one in decision.instructions if isinstance(one, TrainInstruction)]
        if newer := [number for number in numbers if number > self._newest_closed]:
            for replies in self._close_rounds(before=min(newer)).values():
                self._use_updates(replies)
        super().on_decision(decision)
        for number in set(numbers).difference(newer):  # a message of a round that is closed does not open it again
            self._round_starts_s.pop(number, None)

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        facts = {name: float(value) for name, value in self._compute_metrics(state).items()}
        for number in [*self._close_rounds(version=version)][-1:]:
            self._history.add_round_metrics(number, {"facts": facts})
        self._use_updates(assignment_ids)
        self._on_version(version)

    def on_finish(self) -> None:
        self._close_rounds()
        super().on_finish()

    def _record_reply(self, update: Update, reply: ReplyMetrics) -> None:
        row, received_s = self._unused_updates[update.assignment_id]
        loss = None if reply.is_evaluation else reply.loss
        row = replace(row, num_examples=reply.num_examples, loss=loss, metrics={**row.metrics, **reply.values})
        self._unused_updates[update.assignment_id] = row, received_s
        self._history.add_updates([row])
        if row.round > self._newest_closed:
            self._replies.setdefault(row.round, {})[row.assignment_id] = reply
        if reply.is_evaluation and reply.loss is not None:
            evaluation = EvaluationRow(
                assignment_id=row.assignment_id,
                device_id=row.device_id,
                version=row.round,
                round=row.round,
                source="device",
                num_examples=reply.num_examples,
                loss=reply.loss,
                accuracy=reply.accuracy,
                metrics=reply.values,
                at=self._clock(),
            )
            self._history.add_evaluation(evaluation)

    def _use_updates(self, assignment_ids: Iterable[str]) -> None:
        """Writes updates as used that are not yet."""
        now_s = self._monotonic()
        used = [self._unused_updates.pop(name) for name in assignment_ids if name in self._unused_updates]
        self._history.add_updates([
            replace(row, outcome=UpdateStatus.USED, applied_version=0, staleness=0, wait_s=now_s - received_s)
            for row, received_s in used
        ])  # fmt: skip

    def _close_rounds(self, *, before: float = math.inf, version: int = 0) -> dict[int, Mapping[str, ReplyMetrics]]:
        """Closes the open rounds before one, and returns their replies by round and assignment."""
        closed, now_s = dict[int, Mapping[str, ReplyMetrics]](), self._monotonic()
        for number in sorted(number for number in self._round_starts_s if number < before):
            self._newest_closed = number
            closed[number] = self._replies.pop(number, {})
            replies = [*closed[number].values()]
            self._history.close_round(number, version=version, at=self._clock())
            seconds = now_s - self._round_starts_s.pop(number)
            if number not in self._resumed_rounds:
                self._history.add_round_metrics(number, {"seconds": max(0.0, seconds)})
            if values := compute_mean_metrics(replies):
                self._history.add_round_metrics(number, {"metrics": values})
            accuracies = [(one.accuracy, one.num_examples) for one in replies if one.accuracy is not None]
            if any(count for _, count in accuracies):
                total = sum(count for _, count in accuracies)
                self._history.update_accuracy(sum(value * count for value, count in accuracies) / total)
            log.info("round %d closed: %d replies, %.2f s", number, len(replies), seconds)
        return closed


def compute_mean_metrics(replies: Sequence[ReplyMetrics]) -> dict[str, float]:
    """Returns the means of metrics by name, weighted by examples; those of evaluations count for names of both.

    Of too many, those are kept that most replies have.
    """
    counts = Counter(name for reply in replies for name in reply.values)
    sums: dict[tuple[bool, str], tuple[float, int]] = {}
    for reply in replies:
        for name, value in reply.values.items():
            total, count = sums.get((reply.is_evaluation, name), (0.0, 0))
            weight = max(1, reply.num_examples)
            sums[reply.is_evaluation, name] = total + weight * value, count + weight
    means = {name: total / count for (_, name), (total, count) in sorted(sums.items())}
    kept = sorted(means, key=lambda name: rank_reply_metric(name, counts[name]))[:MAX_REPLY_METRICS]
    return {name: means[name] for name in sorted(kept)}
