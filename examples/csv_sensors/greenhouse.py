"""A task: should the window of a greenhouse be open? Four sensors a line of CSV, the answer in the fifth column."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.numpy_learner import DenseModel

COLUMNS = ("indoor_c", "outdoor_c", "humidity_percent", "light_lux", "is_open")
MEAN = np.array([22.0, 15.0, 60.0, 20_000.0], np.float32)
SPREAD = np.array([6.0, 8.0, 15.0, 15_000.0], np.float32)


def standardised(rows: np.ndarray) -> np.ndarray:
    """Returns [n, 4] readings with about zero mean and unit spread; the constants are the same on every board."""
    return (rows.astype(np.float32) - MEAN) / SPREAD


class Greenhouse(Task):
    """The task that the run file names: `task = "greenhouse:Greenhouse"`."""

    name = "greenhouse:Greenhouse"
    labels = ("closed", "open")
    defaults = {"learning_rate": 0.2, "batch_size": 16, "epochs": 1.0}  # noqa: RUF012 read only

    def __init__(self, hidden: int = 16) -> None:
        model = DenseModel(sizes=(4, hidden, 2), prepare=standardised)
        self.shapes, self.init, self.learner = model.shapes, model.init, model.learner

    def read(self, path: str) -> Dataset:
        """Returns all lines of all CSV files in a folder; it is read again when the folder has grown."""
        files = sorted(Path(path).glob("*.csv"))
        rows = np.vstack([np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2) for file in files])
        return Dataset(inputs=rows[:, :4], targets=rows[:, 4].astype(np.int64))
