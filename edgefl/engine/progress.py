"""Run progress and stopping criteria: rounds, work, goal reached, or no device can make progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.core.errors import RunFailedError
from edgefl.core.types import (
    NOT_FINITE,
    EvaluateResult,
    Event,
    FleetView,
    Instruction,
    InstructionFailed,
    Role,
    StopRequested,
    TrainInstruction,
    Update,
    UpdateStatus,
)
from edgefl.engine.divergence import Divergence, DivergenceDetector, DivergenceRule
from edgefl.engine.evaluations import DeviceAccuracy, DeviceEvaluationTracker, EvaluationTracker, VersionAccuracy

MAX_CONSECUTIVE_FAILURES = 3
"""Failures per device since the last update after which the run fails."""
PRIVACY_BUDGET = "privacy budget"
"""Reason of a run's end: another round would pass the budget."""
_WORK_LIMITS = frozenset({"rounds", "epochs", "updates", "seconds", "bytes"})
"""Criteria of `StoppingCriteria` that are an amount of work, not a quality."""


@dataclass(slots=True)
class RoundCounter:
    """Round counter by versions; None until the first dispatch, then the number of its devices."""

    versions_per_round: int | None = 1

    def start(self, num_devices: int) -> None:
        """Sets the versions per round to the devices of the first dispatch, unless it is set already."""
        if self.versions_per_round is None:
            self.versions_per_round = max(1, num_devices)

    def get_round(self, version: int) -> int:
        """Returns the round of the aggregation to `version`; version 0 is before the first."""
        return math.ceil(version / (self.versions_per_round or 1))

    def count_closed(self, version: int) -> int:
        """Returns the number of complete rounds at `version`."""
        return version // (self.versions_per_round or 1)

    def is_round_end(self, version: int) -> bool:
        return version % (self.versions_per_round or 1) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """Local iterations of one device in a run, and its number of training examples by its newest update."""

    iterations: int = 0
    num_examples: int = 0

    def count_epochs(self, batch_size: int) -> float:
        """Returns the passes over the device's own data; the last batch of a pass may be short."""
        return self.iterations / max(1, math.ceil(self.num_examples / batch_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSize:
    """What an epoch consists of: a device's examples of `task` less `test_fraction`, `batch_size` in an iteration."""

    task: str = ""
    batch_size: int = 1
    test_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGoal:
    """What a metric of the task must reach: at least `limit` where more is better, at most where less is."""

    name: str
    limit: float
    is_max: bool

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.is_max else '<='} {self.limit:g}"

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.is_max else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingCriteria:
    """Stopping criteria, the first reached ends the run; None is off. `seconds` count from the first dispatch.

    `accuracy` is compared with the mean of the last `accuracy_window` trusted accuracies, and `until` with that of
    its metric. With `trust_single_evaluation` every evaluation is trusted. `epochs` are passes over the data of all
    devices, counted by `epoch`. `is_budget_spent` says of a version whether the next would pass the privacy budget.
    """

    rounds: int | None = None
    epochs: float | None = None
    updates: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    accuracy: float | None = None
    until: MetricGoal | None = None
    epoch: EpochSize = EpochSize()
    accuracy_window: int = 1
    trust_single_evaluation: bool = False
    is_budget_spent: Callable[[int], bool] | None = None

    def is_quality_reached(self, scores: EvaluationTracker) -> bool:
        """Returns whether the model is as good as the run asks, by accuracy or by a metric."""
        mean = scores.compute_mean(self.accuracy_window)
        is_accurate = self.accuracy is not None and mean is not None and mean >= self.accuracy
        return is_accurate or self.is_metric_reached(scores)

    def is_metric_reached(self, scores: EvaluationTracker) -> bool:
        if self.until is None:
            return False
        mean = scores.compute_metric_mean(self.until.name, self.accuracy_window)
        return mean is not None and self.until.is_met(mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorProgress:
    """Progress of a resumed run before it resumed: updates, bytes, and seconds since its first dispatch.

    `work` is what each device had trained.
    """

    work: Mapping[str, DeviceWork] = field(default_factory=dict)
    updates: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class ProgressTracker:
    """Tracks a run's progress against its stopping criteria."""

    rounds: RoundCounter = field(default_factory=RoundCounter)
    version: int = 0
    updates: int = 0
    bytes: int = 0
    started_s: float | None = None
    earlier_s: float = 0.0
    stop_reason: str | None = None
    scores: EvaluationTracker = field(default_factory=EvaluationTracker)
    nodes: DeviceEvaluationTracker = field(default_factory=DeviceEvaluationTracker)
    work: dict[str, DeviceWork] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    last_failure: str = ""
    has_new_failure: bool = False
    divergence: DivergenceDetector = field(default_factory=DivergenceDetector)

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is in flight, of the global model or of a device's."""
        return bool(self.scores.outstanding or self.nodes.outstanding)

    def restore(self, prior_progress: PriorProgress) -> None:
        """Continues the counts of a resumed run."""
        self.updates, self.bytes, self.earlier_s = (
            prior_progress.updates,
            prior_progress.bytes,
            prior_progress.seconds,
        )
        self.work = dict(prior_progress.work)

    def record_dispatch(self, instructions: Sequence[Instruction], now_s: float) -> None:
        self.scores.record_dispatch(instructions)
        self.nodes.record_dispatch(instructions)
        if self.started_s is None and (
            device_ids := {o.device_id for o in instructions if isinstance(o, TrainInstruction)}
        ):
            self.started_s = now_s - self.earlier_s
            self.rounds.start(len(device_ids))

    def record_event(self, event: Event) -> Sequence[VersionAccuracy | DeviceAccuracy]:
        """Returns the accuracies that are complete with this event."""
        match event:
            case Update():
                self.bytes += event.metrics.bytes_up + event.metrics.bytes_down
                self.failures.clear()
                self._record_work(event)
                self.divergence.add_update(event.metrics.loss, event.metrics.iterations)
            case EvaluateResult():
                self.bytes += event.bytes_up + event.bytes_down
                return self._record_evaluation(event)
            case InstructionFailed() if self._is_evaluation(event.assignment_id):
                return self._record_evaluation(event)
            case InstructionFailed():
                if event.outcome in {UpdateStatus.FAILED, UpdateStatus.REJECTED}:
                    self.failures[event.device_id] = self.failures.get(event.device_id, 0) + 1
                    self.last_failure = f"{event.device_id}: {event.reason}"
                    self.has_new_failure = True
                    if event.reason.startswith(NOT_FINITE):
                        self.divergence.add_not_finite(event.device_id)
            case StopRequested():
                self.stop_reason = event.reason
        return ()

    def _record_work(self, update: Update) -> None:
        known, metrics = self.work.get(update.device_id, DeviceWork()), update.metrics
        self.work[update.device_id] = DeviceWork(
            iterations=known.iterations + metrics.iterations,
            num_examples=metrics.num_examples or known.num_examples,
        )

    def count_epochs(self, epoch: EpochSize, view: FleetView) -> float:
        """Returns the passes over the data of the devices that have trained, and of those that are here and will."""
        trained = {name: work for name, work in self.work.items() if work.num_examples}
        known = sum(work.num_examples for work in trained.values())
        if not known:
            return 0.0
        done = sum(work.num_examples * work.count_epochs(epoch.batch_size) for work in trained.values())
        others = sum(
            info.examples.get(epoch.task, 0) * (1.0 - epoch.test_fraction)
            for info in view.devices.values()
            if info.role == Role.TRAINER and info.device_id not in trained
        )
        return done / (known + others)

    def find_stop_reason(self, goal: StoppingCriteria, view: FleetView) -> str | None:
        """Returns why the run is over, or None."""
        now_s = view.now_s
        facts: tuple[tuple[str, float | None, float | None], ...] = (
            ("rounds", self.rounds.count_closed(self.version), goal.rounds),
            ("epochs", None if goal.epochs is None else self.count_epochs(goal.epoch, view), goal.epochs),
            ("updates", self.updates, goal.updates),
            ("seconds", None if self.started_s is None else now_s - self.started_s, goal.seconds),
            ("bytes", self.bytes, goal.bytes),
            ("accuracy", self.scores.compute_mean(goal.accuracy_window), goal.accuracy),
        )
        for name, value, limit in facts:
            if value is not None and limit is not None and value >= limit:
                return f"{name} reached {limit:g}"
        if goal.is_budget_spent is not None and goal.is_budget_spent(self.version):
            return PRIVACY_BUDGET
        if goal.until is not None and goal.is_metric_reached(self.scores):
            return f"{goal.until.name} reached {goal.until.limit:g}"
        return self.stop_reason

    def find_not_finite(self, view: FleetView, rule: DivergenceRule) -> Divergence | None:
        """Returns the finding that the devices' updates are not finite any more, if they are not."""
        if not self.divergence.not_finite:  # nothing was refused: no need to scan the fleet
            return None
        num_trainers = sum(info.role == Role.TRAINER for info in view.devices.values())
        return self.divergence.find_not_finite(self.rounds.get_round(self.version + 1), num_trainers, rule)

    def compute_wake_s(self, goal: StoppingCriteria, until_s: float, *, is_over: bool) -> float:
        """Returns the next wake-up time: `until_s`, or the run's deadline if it is earlier."""
        if is_over or goal.seconds is None or self.started_s is None:
            return until_s
        return min(until_s, self.started_s + goal.seconds)

    def check_progress_possible(self, view: FleetView, blocked_devices: Collection[str]) -> None:
        """Checks that some device can still make progress.

        Raises:
            RunFailedError: every present trainer failed repeatedly since the last update or is blocked; or the
                failures are as many as if every trainer had, and no work is in flight.
        """
        # Only a new failure can end progress, and scanning every device every turn is too slow for a large fleet.
        if not self.has_new_failure:
            return
        self.has_new_failure = False
        if not self.failures and not blocked_devices:  # nothing failed: no need to scan the fleet
            return
        trainers = [info.device_id for info in view.devices.values() if info.role == Role.TRAINER]
        counts = [self.failures.get(name, 0) for name in trainers]
        if trainers and all(
            n >= MAX_CONSECUTIVE_FAILURES or name in blocked_devices for name, n in zip(trainers, counts, strict=True)
        ):
            raise RunFailedError(
                f"no device can do this work, each failed {MAX_CONSECUTIVE_FAILURES} times or is quarantined; "
                f"{self.last_failure}"
            )
        # Devices without assignments (`local`, a board that does not qualify) never fail, and send no updates either.
        if trainers and not view.busy and sum(counts) >= MAX_CONSECUTIVE_FAILURES * len(trainers):
            raise RunFailedError(
                f"no device that is asked can do this work, {sum(counts)} tries failed in a row; {self.last_failure}"
            )

    def _is_evaluation(self, assignment_id: str) -> bool:
        return assignment_id in self.scores.outstanding or assignment_id in self.nodes.outstanding

    def _record_evaluation(
        self, event: EvaluateResult | InstructionFailed
    ) -> Sequence[VersionAccuracy | DeviceAccuracy]:
        version_score = self.scores.record_event(event)
        if version_score is not None and version_score.loss is not None:
            self.divergence.add_evaluation(version_score.loss)
        scores = version_score, self.nodes.record_event(event)
        return [score for score in scores if score is not None]


def is_goal_reason(reason: str) -> bool:
    """Returns whether a reason of `find_stop_reason` is that the model is as good as asked, not an amount of work."""
    name, separator, _ = reason.partition(" reached ")
    return bool(separator) and name not in _WORK_LIMITS
