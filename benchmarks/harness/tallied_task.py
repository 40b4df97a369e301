"""A model of any size that says which trainings it was made of: none may be missing, and none may count twice.

The tensor `tally` is [devices, trainings]. Each of its columns adds up to 1 as soon as the mean of one training of
each device has moved the model, so that their sum says how many there were: a device adds 1 to its row of the next
column. `weights` has the remaining bytes; each device pulls it a part of the way towards numbers of its own, as a
gradient does. Give coordinator and devices this folder on the PYTHONPATH.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.types import TensorSpec, derive_rng
from edgefl.tasks.noop import DEFAULT_MODEL_BYTES, FLOAT_BYTES, NoopLearner, NoopTask

NAME = "tallied_task:TalliedTask"
RATE = 0.1
"""How far `weights` goes towards a device's numbers in a training; `tally` goes all the way."""
MIN_SHARE, TOLERANCE = 1e-3, 1e-4
"""Of a training, that a device has at least (there are at most 128), and by which rounding may change one."""


class TalliedTask(NoopTask):
    """The shard's file is named after the device's number, from 0; `train_s` is how long a training takes."""

    name = NAME

    def __init__(
        self, *, devices: int = 4, trainings: int = 32, size_bytes: int = DEFAULT_MODEL_BYTES, train_s: float = 0.0
    ) -> None:
        super().__init__(size_bytes=max(FLOAT_BYTES, size_bytes - FLOAT_BYTES * devices * trainings))
        self._shapes = (*self._shapes, TensorSpec(name="tally", shape=(devices, trainings)))
        self.train_s, self.number = train_s, 0

    def init(self, seed: int) -> Any:
        return super().init(seed) | {"tally": np.zeros(self._shapes[-1].shape, np.float32)}

    def read(self, path: str) -> Any:
        self.number = int(Path(path).stem)
        return super().read(path)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Any:  # noqa: ARG002 as the task
        return _TalliedLearner(self)


class _TalliedLearner(NoopLearner):
    def __init__(self, task: TalliedTask) -> None:
        super().__init__(task.shapes())
        self._task = task
        self._numbers: tuple[int, Any] = (-1, None)

    def gradient(self, batch: Any) -> float:  # noqa: ARG002 the device's number is its data
        number = self._task.number
        if self._numbers[0] != number:
            size = self._parameters["weights"].size
            self._numbers = number, derive_rng("tallied", number).standard_normal(size, dtype=np.float32)
        time.sleep(self._task.train_s)
        tally = self._parameters["tally"]
        self._gradients["weights"][:] = RATE * (self._parameters["weights"] - self._numbers[1])
        self._gradients["tally"][:] = 0.0
        self._gradients["tally"][number, round(float(tally.sum()))] = -1.0
        return float(np.mean(np.square(self._gradients["weights"])))


def list_faults(model: Mapping[str, Any], rounds: Sequence[tuple[int, frozenset[int]]]) -> list[str]:
    """Returns what is wrong with a tally: each training is to be the even mean of the devices that took part.

    Args:
        model: the last of a run.
        rounds: by the run's rows, how many trainings each had, and the numbers of devices whose updates were used.
    """
    tally, faults, start = np.asarray(model["tally"], np.float64), list[str](), 0
    for number, (num_trainings, used) in enumerate(rounds, 1):
        columns = tally.T[start : start + num_trainings]
        start += num_trainings
        members = [frozenset(np.flatnonzero(entries > MIN_SHARE).tolist()) for entries in columns]
        wrong = [f"{name}: {_format_row(entries)}" for entries in columns if (name := _judge(entries))]
        if members[-1] != used or any(not used <= others for others in members):
            wrong.append(f"lost or doubled: {sorted(members[-1])} are in it, the updates of {sorted(used)} were used")
        faults += [f"round {number}, {text}" for text in wrong]
    if np.abs(tally[:, start:]).max(initial=0.0) > MIN_SHARE:
        faults.append(f"doubled: there are more than {start} trainings")
    return faults


def _judge(entries: Any) -> str:
    """Returns `lost` or `doubled` where the entries are not equal shares of 1, else nothing."""
    shares = entries[entries > MIN_SHARE]
    if abs(entries.sum() - 1.0) > TOLERANCE:
        return "lost" if entries.sum() < 1.0 else "doubled"
    return "doubled" if np.abs(shares - 1.0 / len(shares)).max() > TOLERANCE else ""


def _format_row(entries: Sequence[float]) -> str:
    return ", ".join(f"{entry:.4g}" for entry in entries)
