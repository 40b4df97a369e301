"""Accuracies of the devices' own models, evaluated beside the global model and never a goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgefl.core.types import EvaluateInstruction, EvaluateResult, Instruction, InstructionFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccuracy:
    """Accuracy of the devices' models after a round: the unweighted mean, and the worst."""

    round: int
    mean: float
    worst: float


@dataclass(slots=True)
class DeviceEvaluationTracker:
    """Pending evaluations of devices' own models, and their results by version."""

    outstanding: dict[str, int] = field(default_factory=dict)
    results: dict[int, list[EvaluateResult]] = field(default_factory=dict)
    num_outstanding: dict[int, int] = field(default_factory=dict)

    def record_dispatch(self, instructions: Sequence[Instruction]) -> None:
        versions = {
            o.assignment_id: o.version for o in instructions if isinstance(o, EvaluateInstruction) and o.subject
        }
        self.outstanding |= versions
        for version in versions.values():
            self.num_outstanding[version] = self.num_outstanding.get(version, 0) + 1

    def record_event(self, event: EvaluateResult | InstructionFailed) -> DeviceAccuracy | None:
        """Returns the accuracy after a round with its last pending evaluation, if any returned."""
        version = self.outstanding.pop(event.assignment_id, None)
        if version is None:
            return None
        if isinstance(event, EvaluateResult):
            self.results.setdefault(version, []).append(event)
        self.num_outstanding[version] -= 1
        if self.num_outstanding[version]:
            return None
        del self.num_outstanding[version]
        return _compute_accuracy(self.results.pop(version, []))

    def complete_pending(self) -> list[DeviceAccuracy]:
        """Returns the accuracies of incomplete versions and drops pending evaluations."""
        accuracies = [_compute_accuracy(self.results[version]) for version in sorted(self.results)]
        self.outstanding, self.results, self.num_outstanding = {}, {}, {}
        return [accuracy for accuracy in accuracies if accuracy is not None]


def compute_mean_accuracy(results: Sequence[EvaluateResult]) -> float | None:
    """Returns the accuracy of one model: the evaluators' mean by examples, else the devices'; None without any."""
    selection = [result for result in results if result.source != "device"] or results
    num_examples = sum(result.num_examples for result in selection)
    return sum(result.accuracy * result.num_examples for result in selection) / num_examples if num_examples else None


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
