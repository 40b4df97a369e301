"""The digits on a board that is made slower: a file `.delay` beside the shard has the seconds to add to an iteration.

Give devices, coordinator and simulator this folder on the PYTHONPATH; the task is `throttled_task:ThrottledDigits`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from edgefl import Task
from edgefl.tasks.registry import make_task

NAME = "throttled_task:ThrottledDigits"


class ThrottledDigits(Task):
    name = NAME

    def __init__(self) -> None:
        self._digits = make_task("digits")
        self.delay_s = 0.0

    def shapes(self) -> Any:
        return self._digits.shapes()

    def init(self, seed: int) -> Any:
        return self._digits.init(seed)

    def read(self, path: str) -> Any:
        file = Path(path).with_suffix(".delay")
        self.delay_s = float(file.read_text()) if file.exists() else 0.0
        return self._digits.read(path)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Any:
        return ThrottledLearner(self, self._digits.learner(accelerator=accelerator, threads=threads))


class ThrottledLearner:
    """A learner whose every gradient takes the delay longer; the delay is that of the shard read last."""

    def __init__(self, task: ThrottledDigits, learner: Any) -> None:
        self._task, self._learner = task, learner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, batch: Any) -> float:
        time.sleep(self._task.delay_s)
        return float(self._learner.gradient(batch))
