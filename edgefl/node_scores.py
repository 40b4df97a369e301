"""How good the devices' own models are, where each has one: evaluated beside the global model, and never a goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgefl.types import Evaluated, Evaluation, Lost, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccuracy:
    """Of the devices' models after a round: the mean, in which each model counts alike, and the worst."""

    round: int
    mean: float
    worst: float


@dataclass(slots=True)
class NodeScores:
    """Who evaluates models of single devices, and what came of it, version by version, with how many still out."""

    outstanding: dict[str, int] = field(default_factory=dict)
    results: dict[int, list[Evaluated]] = field(default_factory=dict)
    num_outstanding: dict[int, int] = field(default_factory=dict)

    def ask(self, orders: Sequence[Order]) -> None:
        asked = {o.assignment_id: o.version for o in orders if isinstance(o, Evaluation) and o.subject}
        self.outstanding |= asked
        for version in asked.values():
            self.num_outstanding[version] = self.num_outstanding.get(version, 0) + 1

    def note(self, event: Evaluated | Lost) -> NodeAccuracy | None:
        """Returns the accuracy after a round with the last event that was waited for, where one came at all."""
        version = self.outstanding.pop(event.assignment_id, None)
        if version is None:
            return None
        if isinstance(event, Evaluated):
            self.results.setdefault(version, []).append(event)
        self.num_outstanding[version] -= 1
        if self.num_outstanding[version]:
            return None
        del self.num_outstanding[version]
        return _accuracy(self.results.pop(version, []))

    def rest(self) -> list[NodeAccuracy]:
        """Returns the accuracies of what came where not all have answered; nobody is waited for any more."""
        found = [_accuracy(self.results[version]) for version in sorted(self.results)]
        self.outstanding, self.results, self.num_outstanding = {}, {}, {}
        return [accuracy for accuracy in found if accuracy is not None]


def mean_accuracy(results: Sequence[Evaluated]) -> float | None:
    """Returns the accuracy of one model: the evaluators' mean by examples, else the devices'; None without any."""
    chosen = [result for result in results if result.source != "device"] or results
    num_examples = sum(result.num_examples for result in chosen)
    return sum(result.accuracy * result.num_examples for result in chosen) / num_examples if num_examples else None


def _accuracy(results: Sequence[Evaluated]) -> NodeAccuracy | None:
    by_device: dict[str, list[Evaluated]] = {}
    for result in results:
        by_device.setdefault(result.subject, []).append(result)
    known = [accuracy for each in by_device.values() if (accuracy := mean_accuracy(each)) is not None]
    return NodeAccuracy(round=results[0].round, mean=sum(known) / len(known), worst=min(known)) if known else None
