"""Evaluation schedule: which devices evaluate which models, and when. Evaluation never blocks a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from edgefl.core.types import DeviceInfo, EvaluateInstruction, FleetView, Role

Evaluators = Literal["auto", "coordinator", "evaluator", "devices", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """Schedules evaluations after every `every` rounds and after the last one.

    `evaluate_on` is one source, or `auto`: every evaluator (the coordinator's own shard, devices with the role
    evaluator), and without any, the devices' local test splits. Where devices have models of their own, an evaluator
    evaluates the global model and each of them, a device the global one and its own.
    """

    every: int = 1
    evaluate_on: Evaluators = "auto"

    def __call__(
        self, version: int, round_number: int, view: FleetView, is_last: bool, model_owners: Collection[str] = ()
    ) -> Sequence[EvaluateInstruction]:
        """Returns the evaluations of `version`, which ended round `round_number`.

        Args:
            version: of the model.
            round_number: of the round.
            view: the fleet.
            is_last: whether the run ends with this version.
            model_owners: the devices that have models of their own.
        """
        if self.evaluate_on == "none" or (not is_last and round_number % self.every):
            return ()
        evaluators = self._find_evaluators(view)
        pairs = [*((info.device_id, "") for info in evaluators), *_pair_with_models(evaluators, model_owners)]
        return tuple(
            EvaluateInstruction(
                assignment_id=_format_assignment_id(version, device_id, subject),
                device_id=device_id,
                version=version,
                round=round_number,
                subject=subject,
            )
            for device_id, subject in pairs
        )

    def _find_evaluators(self, view: FleetView) -> list[DeviceInfo]:
        devices = [view.devices[device_id] for device_id in sorted(view.devices)]
        evaluators = [info for info in devices if info.role == Role.EVALUATOR]
        match self.evaluate_on:
            case "coordinator" | "evaluator":
                return [info for info in evaluators if info.source == self.evaluate_on]
            case "devices":
                return [info for info in devices if info.role == Role.TRAINER]
            case _:
                return evaluators or [info for info in devices if info.role == Role.TRAINER]


def _pair_with_models(devices: Sequence[DeviceInfo], model_owners: Collection[str]) -> list[tuple[str, str]]:
    """Returns pairs of evaluator and model owner, grouped by owner, as each model is encoded once."""
    owners = set(model_owners)
    evaluators = [info.device_id for info in devices if info.role == Role.EVALUATOR]
    trainers = [info.device_id for info in devices if info.role == Role.TRAINER and info.device_id in owners]
    evaluator_pairs = [(device_id, subject) for subject in sorted(owners) for device_id in evaluators]
    return [*evaluator_pairs, *((device_id, device_id) for device_id in trainers)]


def _format_assignment_id(version: int, device_id: str, model_owner: str) -> str:
    # Names may contain hyphens, but no colons, so the separator keeps the id unambiguous.
    return f"e{version}-{device_id}:{model_owner}" if model_owner else f"e{version}-{device_id}"
