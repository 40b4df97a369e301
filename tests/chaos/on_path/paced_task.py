"""A task on the PYTHONPATH of the processes under test: the digits, as slow as a file says at every iteration.

Slow, things happen in the middle of its rounds; when nothing more is to happen, the rest is trained at full speed.
The numbers are those of the digits.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, ClassVar

from edgefl import Task
from edgefl.tasks.registry import make_task

NAME = "paced_task:PacedDigits"


class PacedDigits(Task):
    name = NAME
    defaults: ClassVar = {"learning_rate": 0.5, "batch_size": 8, "iterations": 1}

    def __init__(self, *, pace: str = "") -> None:
        self._digits = make_task("digits")
        self._pace = Path(pace)

    def shapes(self) -> Any:
        return self._digits.shapes()

    def init(self, seed: int) -> Any:
        return self._digits.init(seed)

    def read(self, path: str) -> Any:
        return self._digits.read(path)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Any:
        return PacedLearner(self._digits.learner(accelerator=accelerator, threads=threads), self._pace)


class PacedLearner:
    def __init__(self, learner: Any, pace: Path) -> None:
        self._learner, self._pace = learner, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, batch: Any) -> float:
        with contextlib.suppress(OSError, ValueError):
            time.sleep(float(self._pace.read_text()))
        return float(self._learner.gradient(batch))
