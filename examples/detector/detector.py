"""A task: what is where in a picture? A network without anchors; it says in each cell whether a centre lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from boxes import CELL, GRID, HEAT, LABELS, SIDE

from edgefl.core.types import Dataset, Task
from edgefl.tasks.augmentation import make_mirroring
from edgefl.tasks.learners.torch_learner import TorchModel

if TYPE_CHECKING:
    import torch

NUM_MAPS = len(LABELS) + 4


def build_network() -> torch.nn.Module:
    """Returns a module from [n, 1, 32, 32] to maps [n, 6, 8, 8]: logits of centres, then sizes and places."""
    from torch import nn  # noqa: PLC0415 here, since boards may train a compiled form of it without torch

    head = nn.Conv2d(32, NUM_MAPS, 1)
    nn.init.constant_(head.bias[HEAT], -2.0)  # most cells are empty
    sizes = (1, 16, 2), (16, 32, 2), (32, 32, 1), (32, 32, 1)
    layers = [(nn.Conv2d(i, o, 3, step, 1), nn.GroupNorm(4, o), nn.ReLU()) for i, o, step in sizes]
    return nn.Sequential(*(layer for group in layers for layer in group), head)


class Detector(Task):
    """Scenes and their boxes from one `.npz` file; targets are maps like the outputs, with 1 where a centre lies."""

    name = "detector:Detector"
    metrics = {"boxes:MeanAveragePrecision": "max"}  # noqa: RUF012 read only
    num_outputs, input_shape = NUM_MAPS, (1, SIDE, SIDE)
    model = TorchModel(build=build_network, prepare=lambda x: (x.astype(np.float32) - 128) / 64)
    augment = make_mirroring(negated=[-2])  # the centre's place across its cell

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Focal loss of the centres and distance of sizes and places there (Zhou et al., Objects as Points, 2019)."""
        heat, wanted = outputs[:, HEAT].sigmoid().clamp(1e-4, 1 - 1e-4), targets[:, HEAT]
        near = (1 - wanted) ** 4 * heat**2 * (1 - heat).log()
        centres = ((1 - heat) ** 2 * heat.log()).where(wanted == 1, near).sum((1, 2, 3))
        is_centre = (wanted == 1).any(1, keepdim=True)
        boxes = (is_centre * (outputs - targets).abs()[:, len(LABELS) :]).sum((1, 2, 3))
        return (0.5 * boxes - centres) / is_centre.sum((1, 2, 3)).clamp(min=1)

    def read(self, path: str) -> Dataset:
        with np.load(path) as file:
            scenes, objects = file["scenes"], file["boxes"]
        targets = np.zeros((len(scenes), NUM_MAPS, GRID, GRID), np.float32)
        rows, columns = np.mgrid[:GRID, :GRID]
        for maps, boxes in zip(targets, objects, strict=True):
            for label, x, y, width, height in boxes[boxes[:, 0] >= 0] / (1, CELL, CELL, CELL, CELL):
                row, column = int(y), int(x)
                distance = ((rows - row) / height) ** 2 + ((columns - column) / width) ** 2
                maps[int(label)] = np.maximum(maps[int(label)], np.exp(-8.0 * distance))
                maps[len(LABELS) :, row, column] = width, height, x - column - 0.5, y - row - 0.5
        return Dataset(inputs=scenes[:, None], targets=targets)
