"""A task: which shape is in a small picture? A convolutional network in torch; `make_data.py` draws the pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.torch_learner import TorchModel

if TYPE_CHECKING:
    import torch

SIDE = 16
LABELS = ("disc", "square", "cross")


def build_network() -> torch.nn.Module:
    """Returns a module from [n, 1, 16, 16] pictures to [n, 3] logits."""
    from torch import nn  # noqa: PLC0415 here, since boards may train a compiled form of it without torch

    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, len(LABELS)),
    )  # fmt: skip


def grey(pictures: np.ndarray) -> np.ndarray:
    """Returns [n, 1, 16, 16] float32 in 0 to 1 from [n, 16, 16] bytes."""
    return (pictures.astype(np.float32) / 255.0)[:, None]


class Shapes(Task):
    """The task that the run file names: `task = "shapes:Shapes"`."""

    name = "shapes:Shapes"
    labels = LABELS
    defaults = {"learning_rate": 0.1, "batch_size": 16, "epochs": 1.0}  # noqa: RUF012 read only
    model, input_shape = TorchModel(build=build_network, prepare=grey), (SIDE, SIDE)

    def read(self, path: str) -> Dataset:
        """Returns the pictures of one `.npz` file."""
        with np.load(path) as file:
            return Dataset(inputs=file["inputs"], targets=file["labels"])
