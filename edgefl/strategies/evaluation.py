"""Who evaluates which models, and when. Evaluation never blocks a round: it is just more work given out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from edgefl.types import DeviceInfo, Evaluation, FleetView, Role

Evaluators = Literal["auto", "coordinator", "evaluator", "devices", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """Asks for evaluations after every `every` rounds and after the last one.

    `who` is one source, or `auto`: every evaluator there is (the coordinator's own shard, devices with the role
    evaluator), and when there is none, the devices' local test splits. Where devices have models of their own, an
    evaluator is asked for the global model and for each of them, a device for the global one and its own.
    """

    every: int = 1
    who: Evaluators = "auto"

    def __call__(
        self, version: int, number: int, view: FleetView, is_last: bool, subjects: Collection[str] = ()
    ) -> Sequence[Evaluation]:
        """Returns the evaluations of `version`, which ended round `number`.

        Args:
            version: of the model.
            number: of the round.
            view: the fleet.
            is_last: whether the run ends with this version.
            subjects: the devices that have models of their own.
        """
        if self.who == "none" or (not is_last and number % self.every):
            return ()
        asked = self._evaluators(view)
        pairs = [*((info.device_id, "") for info in asked), *_of_devices(asked, subjects)]
        return tuple(
            Evaluation(
                assignment_id=_assignment_id(version, device_id, subject),
                device_id=device_id,
                version=version,
                round=number,
                subject=subject,
            )
            for device_id, subject in pairs
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


def _of_devices(asked: Sequence[DeviceInfo], subjects: Collection[str]) -> list[tuple[str, str]]:
    """Returns who evaluates whose own model; those of one subject stand together, for it is encoded once."""
    known = set(subjects)
    evaluators = [info.device_id for info in asked if info.role == Role.EVALUATOR]
    trainers = [info.device_id for info in asked if info.role == Role.TRAINER and info.device_id in known]
    by_others = [(device_id, subject) for subject in sorted(known) for device_id in evaluators]
    return [*by_others, *((device_id, device_id) for device_id in trainers)]


def _assignment_id(version: int, device_id: str, subject: str) -> str:
    # Hyphens stand in names, colons do not: two names with something between them could be another device's.
    return f"e{version}-{device_id}:{subject}" if subject else f"e{version}-{device_id}"
