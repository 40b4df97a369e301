"""A user's own task, as the README shows it: the digits, held back until a test lets them go.

It lies on the PYTHONPATH of the processes under test. Every iteration says that it began, by a file named after its
device's process in the folder `gate`, and waits until that folder has a file `open`. While a shard has a file `.pace`
beside it, its device takes that many seconds longer for each.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

from edgefl import Task
from edgefl.tasks.registry import make_task

NAME = "gated_task:GatedDigits"


class GatedDigits(Task):
    name = NAME
    defaults: ClassVar = {"learning_rate": 0.5, "batch_size": 8, "iterations": 1}

    def __init__(self, *, gate: str = "", pace_s: float = 0.0) -> None:
        self._digits = make_task("digits")
        self._gate, self._pace_s, self._pace = Path(gate) if gate else None, pace_s, Path()

    def shapes(self) -> Any:
        return self._digits.shapes()

    def init(self, seed: int) -> Any:
        return self._digits.init(seed)

    def read(self, path: str) -> Any:
        self._pace = Path(path).with_suffix(".pace")
        return self._digits.read(path)

    def pace_s(self) -> float:
        return self._pace_s + (float(self._pace.read_text()) if self._pace.exists() else 0.0)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Any:
        return GatedLearner(self, self._digits.learner(accelerator=accelerator), self._gate)


class GatedLearner:
    def __init__(self, task: GatedDigits, learner: Any, gate: Path | None) -> None:
        self._task, self._learner, self._gate = task, learner, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, batch: Any) -> float:
        time.sleep(self._task.pace_s())
        if self._gate is not None:
            (self._gate / str(os.getpid())).touch()
            while not (self._gate / "open").exists():
                time.sleep(0.02)
        return float(self._learner.gradient(batch))
