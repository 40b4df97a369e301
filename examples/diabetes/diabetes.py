"""A regression: how far does diabetes progress within a year? Ten measurements a patient, from scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.numpy_learner import DenseModel

USUAL, SPREAD = 150.0, 75.0
"""Of the progression, 25 to 346: values around 0 are learned fastest."""


class Diabetes(Task):
    """The task that the run file names: `task = "diabetes:Diabetes"`."""

    name = "diabetes:Diabetes"
    loss = "huber"
    metrics = {"rmse": "min", "r2": "max"}  # noqa: RUF012 read only
    input_shape = (10,)
    defaults = {"learning_rate": 0.05, "batch_size": 16, "epochs": 2.0}  # noqa: RUF012 read only
    model = DenseModel(sizes=(10, 1), prepare=lambda rows: (20.0 * rows).astype(np.float32))

    def read(self, path: str) -> Dataset:
        """Returns the patients of a folder's CSV files, the progression in the last column."""
        rows = np.vstack([np.loadtxt(file, delimiter=",", ndmin=2) for file in sorted(Path(path).glob("*.csv"))])
        return Dataset(inputs=rows[:, :-1], targets=(rows[:, -1] - USUAL) / SPREAD)
