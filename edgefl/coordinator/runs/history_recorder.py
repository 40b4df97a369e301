"""History recorder of a run: the rows derived from its log.

They go to the history writer once the log is durable; it flushes them soon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from edgefl.coordinator.runs.history_writer import EventRow, HistoryWriter
from edgefl.core.errors import StrategyError
from edgefl.core.metrics import NO_METRICS, MetricSet
from edgefl.core.types import (
    ClippedUpdate,
    Decision,
    EvaluateResult,
    Event,
    InstructionFailed,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.engine.divergence import Divergence
from edgefl.engine.evaluations import MIN_EVALUATORS, DeviceAccuracy, VersionAccuracy
from edgefl.engine.progress import RoundCounter
from edgefl.engine.round_loop import RunSubscriber
from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, RoundMetrics, UpdateRow

log = logging.getLogger(__name__)

ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""A strategy's state -> metrics of its newest version, by name."""

UPDATE_CLIPPED = "update-clipped"
UPDATE_REJECTED = "update-rejected"
DEVICE_QUARANTINED = "device-quarantined"
ACCURACY_UNTRUSTED = "accuracy-untrusted"
TOO_FEW_UPDATES = "too-few-updates"
RUN_DIVERGING = "run-diverging"
DERIVED_EVENT_KINDS = (
    "assignment-failed", UPDATE_CLIPPED, UPDATE_REJECTED, DEVICE_QUARANTINED, ACCURACY_UNTRUSTED, TOO_FEW_UPDATES,
    RUN_DIVERGING,
)  # fmt: skip
"""Kinds of events derived from the journal."""

_METRIC_COLUMNS = tuple(
    {field.name for field in fields(UpdateMetrics)} - {"wait_s", "extra", "shard_version", "shard_examples", "boards"}
)
"""Metrics of an update that its row has under the same names; others are in its `metrics`."""


def compute_no_metrics(_state: object) -> Mapping[str, float]:
    """Returns no metrics, whatever the state."""
    return {}


@dataclass(slots=True)
class _OpenRound:
    """Sums of the open round since the coordinator started.

    `state` is the strategy's at `version`, which is 0 while the round has no version.
    """

    version: int = 0
    num_updates: int = 0
    num_bytes: int = 0
    state: object = None

    def add(self, version: int, rows: Sequence[UpdateRow], state: object) -> None:
        self.version, self.state = version, state
        self.num_updates += len(rows)
        self.num_bytes += sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in rows)


def format_shortage(needed: int, count: int) -> str:
    """Returns one line on a robust rule that gets fewer updates than its promise needs."""
    return (
        f"the robust rule needs {needed} updates a round to hold against the rogues that it is for "
        f"(strategy.num_rogues, one by default), and gets {count}: let more devices take part, or lower num_rogues"
    )


class HistoryRecorder(RunSubscriber):
    """Subscriber of one run's log that derives its rows.

    Args:
        history: where the rows go.
        rounds: the loop's own counter, which maps versions to rounds; set by the first dispatch.
        clock: Unix seconds, for the rows.
        monotonic: the fleet's clock, which the events carry.
        on_version: called with every new version.
        get_blocked: returns the devices blocked after too many rejected updates.
        compute_metrics: called at the end of every round.
        metrics: of the task, whose sums are combined over all that evaluated a version.
        needed_updates: of a version, for what its strategy promises.
        unused_updates: updates that arrived before the run was resumed, and are not used yet.
        can_repeat: an assignment id may have been dispatched before, for other work.
    """

    def __init__(  # noqa: PLR0913 the parts of a run, by name
        self,
        *,
        history: HistoryWriter,
        rounds: RoundCounter,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_version: Callable[[int], None] = lambda _version: None,
        get_blocked: Callable[[], Collection[str]] = frozenset,
        compute_metrics: ComputeMetrics = compute_no_metrics,
        metrics: MetricSet = NO_METRICS,
        needed_updates: int = 0,
        unused_updates: Sequence[UpdateRow] = (),
        can_repeat: bool = False,
    ) -> None:
        self._history, self._rounds = history, rounds
        self._clock, self._monotonic, self._on_version = clock, monotonic, on_version
        self._get_blocked, self._known_blocked = get_blocked, set[str]()
        self._compute_metrics, self._metrics = compute_metrics, metrics
        self._unused_updates: dict[str, tuple[UpdateRow, float]] = {}
        self._assignments: dict[str, TrainInstruction] = {}
        self._steps: dict[str, int] = {}
        self._step_bytes: dict[str, tuple[int, int]] = {}
        self._round_starts_s: dict[int, float] = {}
        self._resumed_rounds = set[int]()
        self._open_round = _OpenRound()
        self._can_repeat, self._needed_updates = can_repeat, needed_updates
        self._is_untrusted_recorded = False
        for row in unused_updates:
            self._unused_updates[row.assignment_id] = row, self._monotonic()

    @property
    def round_starts_s(self) -> Mapping[int, float]:
        """Start of the open rounds, by number, in seconds of the run's own clock."""
        return self._round_starts_s

    def resume(
        self,
        assignments: Iterable[TrainInstruction],
        version: int,
        round_starts_s: Mapping[int, float],
        state: object = None,
    ) -> None:
        """Restores assignments and open rounds at a version; devices blocked by now are not reported again."""
        self._resume_round(version, state)
        self._record_steps(assignments := list(assignments))
        self._assignments = {
            instruction.assignment_id: instruction for instruction in assignments if instruction.plan.has_training
        }
        self._round_starts_s = dict(round_starts_s)
        rounds = {self._rounds.get_round(instruction.base_version + 1) for instruction in self._assignments.values()}
        self._resumed_rounds = rounds - self._round_starts_s.keys()
        self._known_blocked = set(self._get_blocked())

    def resume_after(self, version: int, state: object = None) -> None:
        """Restores a round that is open at a version; its row has its start."""
        self._known_blocked = set(self._get_blocked())
        self._resume_round(version, state)
        if self._open_round.version:
            self._resumed_rounds = {self._rounds.get_round(version)}

    def _resume_round(self, version: int, state: object) -> None:
        if not self._rounds.is_round_end(version):
            self._open_round = _OpenRound(version=version, state=state)

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Update() if event.assignment_id in self._steps:
                    self._add_step(event)
                case Update():
                    row = self._create_update_row(event)
                    self._unused_updates[event.assignment_id] = row, event.received_s
                    self._history.add_updates([row])
                case EvaluateResult():
                    self._history.add_evaluation(self._create_evaluation_row(event))
                case InstructionFailed():
                    self._record_failure(event)

    def on_decision(self, decision: Decision) -> None:
        assignments = [
            instruction for instruction in decision.instructions if isinstance(instruction, TrainInstruction)
        ]
        self._record_steps(assignments)
        if not assignments:
            return
        self._rounds.start(len({instruction.device_id for instruction in assignments}))
        now, rows = self._clock(), []
        for instruction in assignments:
            number = self._rounds.get_round(instruction.base_version + 1)
            self._round_starts_s.setdefault(number, self._monotonic())
            if not instruction.plan.has_training:
                continue
            self._assignments[instruction.assignment_id] = instruction
            self._unused_updates.pop(instruction.assignment_id, None)  # dispatched a second time
            rows.append(
                AssignmentRow(
                    assignment_id=instruction.assignment_id,
                    device_id=instruction.device_id,
                    round=number,
                    base_version=instruction.base_version,
                    dispatched_at=now,
                    codec=instruction.codec or "dense",
                )
            )
        self._history.add_dispatches(rows, can_repeat=self._can_repeat)

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        now_s, number = self._monotonic(), self._rounds.get_round(version)
        # An answer to the last step may come after the sum is opened by enough others.
        self._steps = {name: base for name, base in self._steps.items() if base >= version - 1}
        rows = []
        for assignment_id in assignment_ids:
            row, received_s = self._pop_update(assignment_id)
            up, down = self._step_bytes.pop(row.device_id, (0, 0))
            self._assignments.pop(assignment_id, None)
            rows.append(
                replace(
                    row,
                    round=number,
                    outcome=UpdateStatus.USED,
                    applied_version=version - 1,
                    staleness=version - 1 - row.base_version,
                    wait_s=max(0.0, now_s - received_s),
                    bytes_up=None if row.bytes_up is None else row.bytes_up + up,
                    bytes_down=None if row.bytes_down is None else row.bytes_down + down,
                )
            )
        self._history.add_updates(rows)
        if len(rows) < self._needed_updates:
            warning = f"version {version}: {format_shortage(self._needed_updates, len(rows))}"
            self._needed_updates = 0  # said once
            self._history.add_event(EventRow(kind=TOO_FEW_UPDATES, device_id=None, message=warning, at=self._clock()))
        self._open_round.add(version, rows, state)
        if self._rounds.is_round_end(version):
            self._close_round(number, now_s)
        self._on_version(version)

    def _record_steps(self, assignments: Iterable[TrainInstruction]) -> None:
        """Keeps which assignments are steps in which nobody trains: no rows, but their bytes count."""
        for instruction in assignments:
            if not instruction.plan.has_training:
                self._steps[instruction.assignment_id] = instruction.base_version

    def _add_step(self, update: Update) -> None:
        up, down = self._step_bytes.get(update.device_id, (0, 0))
        self._step_bytes[update.device_id] = up + update.metrics.bytes_up, down + update.metrics.bytes_down

    def _close_round(self, round_number: int, now_s: float) -> None:
        closing, self._open_round = self._open_round, _OpenRound()
        self._history.close_round(round_number, version=closing.version, at=self._clock())
        opened_s = self._round_starts_s.pop(round_number, None)
        if opened_s is not None and round_number not in self._resumed_rounds:
            # Not the difference of two Unix times: the machine's clock may have been set in between.
            self._history.add_round_metrics(round_number, {"seconds": max(0.0, now_s - opened_s)})
        if metrics := {name: float(value) for name, value in self._compute_metrics(closing.state).items()}:
            self._history.add_round_metrics(round_number, {"facts": metrics})
        log.info(
            "round %d closed: %d updates, %.2f s, %d kB",
            round_number,
            closing.num_updates,
            now_s - (now_s if opened_s is None else opened_s),
            closing.num_bytes // 1000,
        )

    def on_score(self, score: VersionAccuracy | DeviceAccuracy) -> None:
        if isinstance(score, DeviceAccuracy):
            log.info("round %d: accuracy of the nodes %.4f, worst %.4f", score.round, score.mean, score.worst)
            metrics = RoundMetrics(node_accuracy=score.mean, worst_node_accuracy=score.worst)
            self._history.add_round_metrics(score.round, metrics)
            return
        if values := self._metrics.combine(score.sums):
            self._history.add_round_metrics(self._rounds.get_round(score.version), {"metrics": values})
        if score.accuracy is not None and score.is_newest:
            self._history.update_accuracy(score.accuracy)
        if score.accuracy is not None and score.trusted is None and not self._is_untrusted_recorded:
            self._is_untrusted_recorded = True
            self._history.add_event(
                EventRow(
                    kind=ACCURACY_UNTRUSTED,
                    device_id=None,
                    message=f"version {score.version}: fewer than {MIN_EVALUATORS} devices evaluated it, so its "
                    "accuracy ends no run and makes no model the best; see run.trust_single_evaluation",
                    at=self._clock(),
                )
            )

    def on_clipped(self, clipped: ClippedUpdate) -> None:
        log.info("%s of %s is clipped: %s", clipped.assignment_id, clipped.device_id, clipped.reason)
        self._record_event(UPDATE_CLIPPED, clipped.device_id, f"{clipped.assignment_id}: {clipped.reason}")

    def on_divergence(self, divergence: Divergence) -> None:
        log.warning("%s", divergence.message)
        self._record_event(RUN_DIVERGING, None, divergence.message)
        self._history.update_reason(divergence.message)

    def on_finish(self) -> None:
        """Closes an incomplete round, and marks unused updates as late."""
        if self._open_round.version:
            self._close_round(self._rounds.get_round(self._open_round.version), self._monotonic())
        self._history.add_updates(
            [replace(row, outcome=UpdateStatus.LATE) for row, _ in self._unused_updates.values()]
        )
        self._unused_updates.clear()

    def on_commit(self) -> None:
        self._history.publish()

    def _record_failure(self, failure: InstructionFailed) -> None:
        instruction = self._assignments.pop(failure.assignment_id, None)
        log.warning("%s of %s brings no update: %s", failure.assignment_id, failure.device_id, failure.reason)
        is_refused = failure.outcome is UpdateStatus.REJECTED
        kind = UPDATE_REJECTED if is_refused else "assignment-failed"
        self._record_event(kind, failure.device_id, f"{failure.assignment_id}: {failure.reason}")
        if is_refused or failure.is_strike:
            self._record_quarantine(failure)
        if instruction is not None:
            row = UpdateRow(
                assignment_id=failure.assignment_id,
                device_id=failure.device_id,
                round=self._rounds.get_round(instruction.base_version + 1),
                base_version=instruction.base_version,
                outcome=failure.outcome,
                reason=failure.reason,
                ended_at=self._clock(),
            )
            self._history.add_updates([row])

    def _record_quarantine(self, failure: InstructionFailed) -> None:
        """Records, once, that the device whose update was just refused is not asked again."""
        if failure.device_id in self._get_blocked() and failure.device_id not in self._known_blocked:
            self._known_blocked.add(failure.device_id)
            log.warning("%s is quarantined and not asked again in this run", failure.device_id)
            self._record_event(DEVICE_QUARANTINED, failure.device_id, failure.reason)

    def _record_event(self, kind: str, device_id: str | None, message: str) -> None:
        self._history.add_event(EventRow(kind=kind, device_id=device_id, message=message, at=self._clock()))

    def _pop_update(self, assignment_id: str) -> tuple[UpdateRow, float]:
        """Removes and returns the row of an update that is used now, and when it arrived.

        Raises:
            StrategyError: there is no such update, or it was used before.
        """
        if assignment_id not in self._unused_updates:
            raise StrategyError(f"used: the strategy names {assignment_id!r}, which never came or was used before")
        return self._unused_updates.pop(assignment_id)

    def _create_update_row(self, update: Update) -> UpdateRow:
        metrics, now = update.metrics, self._clock()
        shard = {"shard_version": metrics.shard_version, "shard_examples": metrics.shard_examples}
        return UpdateRow(
            assignment_id=update.assignment_id,
            device_id=update.device_id,
            round=self._rounds.get_round(update.base_version + 1),
            base_version=update.base_version,
            received_at=now,
            ended_at=now,
            metrics={
                **metrics.extra,
                **(shard if metrics.shard_version is not None else {}),
                **({"boards": list(metrics.boards)} if metrics.boards else {}),
            },
            **{name: getattr(metrics, name) for name in _METRIC_COLUMNS},
        )

    def _create_evaluation_row(self, result: EvaluateResult) -> EvaluationRow:
        log.log(
            logging.DEBUG if result.subject else logging.INFO,
            "version %d%s: accuracy %s, loss %.4f on %d examples of %s",
            result.version,
            f" of {result.subject}" if result.subject else "",
            "-" if result.accuracy is None else f"{result.accuracy:.4f}",
            result.loss,
            result.num_examples,
            result.device_id,
        )
        values = {field.name: getattr(result, field.name) for field in fields(result)}
        return EvaluationRow(**values | {"at": self._clock(), "metrics": dict(result.metrics)})
