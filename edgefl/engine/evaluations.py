"""Evaluations of a run: which are in flight, what a version's results amount to, and which figures are trusted."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.core.types import EvaluateInstruction, EvaluateResult, Instruction, InstructionFailed

MIN_EVALUATORS = 3
"""Devices whose median is trusted: of three, one that lies does not decide it."""
MAX_ACCURACY_WINDOW = 100
"""Maximum number of recent accuracies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAccuracy:
    """Accuracy of one version of the global model; None if no evaluation succeeded.

    `is_newest` of the versions with an accuracy. `trusted` is the accuracy that may stop a run and make a model the
    best: the coordinator's, or the median of `MIN_EVALUATORS` or more devices; None where there are fewer. `loss` is
    likewise. `sums` are those of the task's metrics on the data that `accuracy` is of, `trusted_metrics` their values
    as `trusted` is.
    """

    version: int
    accuracy: float | None
    is_newest: bool
    trusted: float | None = None
    loss: float | None = field(default=None, compare=False)
    sums: tuple[bytes, ...] = field(default=(), compare=False)
    trusted_metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class _PendingEvaluations:
    """Evaluations in flight, and their results by version until the last one is in."""

    outstanding: dict[str, int] = field(default_factory=dict)
    results: dict[int, list[EvaluateResult]] = field(default_factory=dict)
    num_outstanding: dict[int, int] = field(default_factory=dict)

    def _add(self, instructions: Iterable[EvaluateInstruction]) -> None:
        for instruction in instructions:
            version = instruction.version
            if self.outstanding.get(instruction.assignment_id) == version:
                continue  # the loop adds evaluations before it dispatches them
            self.outstanding[instruction.assignment_id] = version
            self.num_outstanding[version] = self.num_outstanding.get(version, 0) + 1

    def _pop_complete(self, event: EvaluateResult | InstructionFailed) -> tuple[int, list[EvaluateResult]] | None:
        """Returns a version and its results with its last pending evaluation."""
        version = self.outstanding.pop(event.assignment_id, None)
        if version is None:
            return None
        if isinstance(event, EvaluateResult):
            self.results.setdefault(version, []).append(event)
        self.num_outstanding[version] -= 1
        if self.num_outstanding[version]:
            return None
        del self.num_outstanding[version]
        return version, self.results.pop(version, [])


@dataclass(slots=True)
class EvaluationTracker(_PendingEvaluations):
    """Tracks evaluations; `accuracy` is that of the newest version whose evaluations all returned or failed.

    It is the mean over the test examples of the evaluators; of the devices' own splits where there is no evaluator.
    `recent` are the trusted ones, newest last, and `recent_metrics` those of each metric of the task. Models of
    single devices are excluded; see `DeviceEvaluationTracker`.
    """

    accuracy: float | None = None
    trusts_single: bool = False
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ACCURACY_WINDOW))
    recent_metrics: dict[str, list[float]] = field(default_factory=dict)
    version: int = -1
    measured_version: int = -1
    requested_version: int = -1

    def record_dispatch(self, instructions: Sequence[Instruction]) -> None:
        evaluations = [i for i in instructions if isinstance(i, EvaluateInstruction) and not i.subject]
        self._add(evaluations)
        self.requested_version = max([self.requested_version, *(evaluation.version for evaluation in evaluations)])

    def record_event(self, event: EvaluateResult | InstructionFailed) -> VersionAccuracy | None:
        """Returns the accuracy of a version with its last pending evaluation."""
        if (complete := self._pop_complete(event)) is None:
            return None
        version, results = complete
        accuracy = compute_mean_accuracy(results)
        is_newest = accuracy is not None and version > self.version
        trusted, loss = compute_trusted_scores(results, trusts_single=self.trusts_single)
        trusted_metrics = compute_trusted_metrics(results, trusts_single=self.trusts_single)
        if accuracy is not None and is_newest:
            self.version, self.accuracy = version, accuracy
            if trusted is not None:
                self.recent.append(trusted)
        if trusted_metrics and version > self.measured_version:
            self.measured_version = version
            for name, value in trusted_metrics.items():
                self.recent_metrics[name] = [*self.recent_metrics.get(name, ()), value][-MAX_ACCURACY_WINDOW:]
        sums = tuple(result.sums for result in _select_best_source(results) if result.sums)
        return VersionAccuracy(
            version=version, accuracy=accuracy, is_newest=is_newest, trusted=trusted, loss=loss, sums=sums,
            trusted_metrics=trusted_metrics,
        )  # fmt: skip

    def compute_mean(self, count: int) -> float | None:
        """Returns the mean accuracy of the last `count` evaluated versions, None before there are so many."""
        return _compute_last_mean(self.recent, count)

    def compute_metric_mean(self, name: str, count: int) -> float | None:
        """Returns the mean of a metric over the last `count` evaluated versions, None before there are so many."""
        return _compute_last_mean(self.recent_metrics.get(name, ()), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccuracy:
    """Accuracy of the devices' models after a round: the unweighted mean, and the worst."""

    round: int
    mean: float
    worst: float


@dataclass(slots=True)
class DeviceEvaluationTracker(_PendingEvaluations):
    """Tracks evaluations of devices' own models."""

    def record_dispatch(self, instructions: Sequence[Instruction]) -> None:
        self._add(i for i in instructions if isinstance(i, EvaluateInstruction) and i.subject)

    def record_event(self, event: EvaluateResult | InstructionFailed) -> DeviceAccuracy | None:
        """Returns the accuracy after a round with its last pending evaluation, if any returned."""
        complete = self._pop_complete(event)
        return None if complete is None else _compute_accuracy(complete[1])

    def complete_pending(self) -> list[DeviceAccuracy]:
        """Returns the accuracies of incomplete versions and drops pending evaluations."""
        accuracies = [_compute_accuracy(self.results[version]) for version in sorted(self.results)]
        self.outstanding, self.results, self.num_outstanding = {}, {}, {}
        return [accuracy for accuracy in accuracies if accuracy is not None]


def _compute_last_mean(values: Collection[float], count: int) -> float | None:
    last = list(values)[-count:]
    return sum(last) / count if len(last) == count else None


def compute_mean_accuracy(results: Sequence[EvaluateResult]) -> float | None:
    """Returns the accuracy of one model: the evaluators' mean by examples, else the devices'; None without any."""
    return _compute_mean(results)[0]


def _compute_mean(results: Sequence[EvaluateResult]) -> tuple[float | None, float | None]:
    """Returns accuracy and loss of one model: the evaluators' means by examples, else the devices'."""
    selection = _select_best_source(results)
    if not (num_examples := sum(result.num_examples for result in selection)):
        return None, None
    known = [(result.accuracy, result.num_examples) for result in selection if result.accuracy is not None]
    num_known = sum(count for _, count in known)
    accuracy = sum(accuracy * count for accuracy, count in known) / num_known if num_known else None
    return accuracy, sum(result.loss * result.num_examples for result in selection) / num_examples


def _select_best_source(results: Sequence[EvaluateResult]) -> Sequence[EvaluateResult]:
    return [result for result in results if result.source != "device"] or results


def compute_trusted_scores(
    results: Sequence[EvaluateResult], *, trusts_single: bool = False
) -> tuple[float | None, float | None]:
    """Returns accuracy and loss of a model that no single dishonest device decides; None where too few evaluated it.

    They are the coordinator's own, else the median of the evaluators, else that of the devices on their own splits.
    """
    if trusts_single:
        return _compute_mean(results)
    selection, num_needed = _select_trusted(results, MIN_EVALUATORS)
    if num_needed == 1 or not selection:
        return _compute_mean(selection)
    accuracy = _compute_median([result.accuracy for result in selection])
    return accuracy, statistics.median(result.loss for result in selection)


def _select_trusted(results: Sequence[EvaluateResult], min_devices: int) -> tuple[Sequence[EvaluateResult], int]:
    """Returns the coordinator's results, else those of `min_devices` or more evaluators, else of as many devices.

    The second value is how many of them make a figure.
    """
    for source in ("coordinator", "evaluator", "device"):
        selection = [result for result in results if result.source == source and result.num_examples]
        num_needed = 1 if source == "coordinator" else min_devices
        if len({result.device_id for result in selection}) >= num_needed:
            return selection, num_needed
    return (), min_devices


def compute_trusted_metrics(results: Sequence[EvaluateResult], *, trusts_single: bool = False) -> Mapping[str, float]:
    """Returns the task's metrics of a model that no single dishonest device decides, by name.

    They are the coordinator's own, else the median of `MIN_EVALUATORS` or more evaluators, else of as many devices;
    with `trusts_single` of any number. Sums of all of them together are exact, and any one of them could spoil these.
    """
    selection, num_needed = _select_trusted(results, 1 if trusts_single else MIN_EVALUATORS)
    names = dict.fromkeys(name for result in selection for name in result.metrics)
    values = {name: [r.metrics[name] for r in selection if name in r.metrics] for name in names}
    return {name: statistics.median(known) for name, known in values.items() if len(known) >= num_needed}


def _compute_median(accuracies: Sequence[float | None]) -> float | None:
    """Returns the median; None where most have none, and a single one that conceals its own counts as low."""
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if 2 * len(known) <= len(accuracies):
        return None
    return statistics.median([*known, *[0.0] * (len(accuracies) - len(known))])


def _compute_accuracy(results: Sequence[EvaluateResult]) -> DeviceAccuracy | None:
    by_device: dict[str, list[EvaluateResult]] = {}
    for result in results:
        by_device.setdefault(result.subject, []).append(result)
    accuracies = [
        accuracy
        for device_results in by_device.values()
        if (accuracy := compute_mean_accuracy(device_results)) is not None
    ]
    return (
        DeviceAccuracy(round=results[0].round, mean=sum(accuracies) / len(accuracies), worst=min(accuracies))
        if accuracies
        else None
    )
