"""The no-op task on a board that trains: nothing is learnt, and it takes as long as the run file says.

Give coordinator and devices this folder on the PYTHONPATH; the task is `long_noop:LongNoop`.
"""

from __future__ import annotations

import time
from typing import Any

from edgefl.tasks.noop import DEFAULT_MODEL_BYTES, NoopTask

NAME = "long_noop:LongNoop"


class LongNoop(NoopTask):
    """Takes `train_s` seconds for a gradient; a round has one, if the plan is one epoch."""

    name = NAME

    def __init__(self, *, size_bytes: int = DEFAULT_MODEL_BYTES, train_s: float = 1.0) -> None:
        super().__init__(size_bytes=size_bytes)
        self._train_s = train_s

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Any:
        return _LongLearner(super().learner(accelerator=accelerator, threads=threads), self._train_s)


class _LongLearner:
    def __init__(self, learner: Any, train_s: float) -> None:
        self._learner, self._train_s = learner, train_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, batch: Any) -> float:
        time.sleep(self._train_s)
        return float(self._learner.gradient(batch))
