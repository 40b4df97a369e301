"""Networks of other frameworks' CIFAR-10 experiments, for `task.model`: [n, 3, 32, 32] to 10 logits."""

from __future__ import annotations

from torch import nn

CLASSES = 10


class FlareNetwork(nn.Sequential):
    """The network of NVIDIA FLARE's edge example: LeNet-5's sizes, strides in place of pooling, 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 6, 5, stride=2), nn.ReLU(), nn.Conv2d(6, 16, 5, stride=2), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
        )


class FlotillaNetwork(nn.Sequential):
    """The network `FedAT_CNN` of Flotilla's repository: three convolutions with pooling, 122,570 parameters."""

    def __init__(self) -> None:
        convolutions = [
            layer
            for inputs, outputs in ((3, 32), (32, 64), (64, 64))
            for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(2), nn.ReLU())
        ]
        head = (nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        super().__init__(*convolutions, *head)
