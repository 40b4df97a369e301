"""Who evaluates the global model, and when. Evaluation never blocks a round: it is just more work given out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgefl.types import DeviceInfo, Evaluation, FleetView, Role

Evaluators = Literal["auto", "coordinator", "evaluator", "devices", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """Asks for evaluations after every `every` rounds and after the last one.

    `who` is one source, or `auto`: every evaluator there is (the coordinator's own shard, devices with the role
    evaluator), and when there is none, the devices' local test splits.
    """

    every: int = 1
    who: Evaluators = "auto"

    def __call__(self, version: int, number: int, view: FleetView, is_last: bool) -> Sequence[Evaluation]:
        """Returns the evaluations of `version`, which ended round `number`."""
        if self.who == "none" or (not is_last and number % self.every):
            return ()
        return tuple(
            Evaluation(
                assignment_id=f"e{version}-{info.device_id}", device_id=info.device_id, version=version, round=number
            )
            for info in self._evaluators(view)
        )

    def _evaluators(self, view: FleetView) -> list[DeviceInfo]:
        present = [view.devices[device_id] for device_id in sorted(view.devices)]
        evaluators = [info for info in present if info.role == Role.EVALUATOR]
        match self.who:
            case "coordinator" | "evaluator":
                return [info for info in evaluators if info.source == self.who]
            case "devices":
                return [info for info in present if info.role == Role.TRAINER]
            case _:
                return evaluators or [info for info in present if info.role == Role.TRAINER]
