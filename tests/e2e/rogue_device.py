"""A device that claims 2^53 of everything, and that every model is perfect; else it is `edgefl`."""

import sys
from collections.abc import Callable
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


DeviceTrainer._train = _lie(DeviceTrainer._train, CLAIMS)  # type: ignore[method-assign]
DeviceTrainer._evaluate = _lie(DeviceTrainer._evaluate, SCORES)  # type: ignore[method-assign]
sys.exit(main())
