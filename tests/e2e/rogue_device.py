"""A rogue device: `claims` claims 2^53 of everything, and that every model is perfect; `opposed` sends its update
times -10. Else it is `edgefl`."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from edgefl.cli.main import main
from edgefl.device.training.trainer import DeviceTrainer

HUGE = 2**53
CLAIMS = {"num_examples": HUGE, "iterations": HUGE, "compute_s": float(HUGE)}
SCORES = {"num_examples": HUGE, "loss": 0.0, "accuracy": 1.0}


def _lie(honest: Callable[..., Any], claims: dict[str, float]) -> Callable[..., Any]:
    def lying(self: DeviceTrainer, *arguments: Any) -> Any:
        reply, body = honest(self, *arguments)
        return {**reply, "metrics": {**reply["metrics"], **claims}}, body

    return lying


def _oppose(honest: Callable[..., bytes]) -> Callable[..., bytes]:
    def opposed(self: DeviceTrainer, instruction: Any, task: Any, delta: Mapping[str, Any]) -> bytes:
        return honest(self, instruction, task, {name: -10 * tensor for name, tensor in delta.items()})

    return opposed


if sys.argv.pop(1) == "opposed":
    DeviceTrainer._encode_update = _oppose(DeviceTrainer._encode_update)  # type: ignore[method-assign]
else:
    DeviceTrainer._train = _lie(DeviceTrainer._train, CLAIMS)  # type: ignore[method-assign]
    DeviceTrainer._evaluate = _lie(DeviceTrainer._evaluate, SCORES)  # type: ignore[method-assign]
sys.exit(main())
