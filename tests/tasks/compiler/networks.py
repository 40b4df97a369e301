"""Networks whose layers together are what is compiled, each as a task with made-up data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edgefl.core.types import Array, Dataset, Task
from edgefl.tasks.learners.torch_learner import TorchLearner, TorchModel
from edgefl.tasks.losses.class_losses import CrossEntropy


@dataclass(frozen=True)
class Example(Task):
    """A task of a network on numbers of about 1."""

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    loss: Any = "cross-entropy"
    labels: tuple[str, ...] = ("a", "b", "c")
    name: str = "example"
    has_pixels: bool = False
    """Whether each place of the input has a class."""

    @property
    def model(self) -> TorchModel:
        return TorchModel(build=self.build, prepare=_to_small_numbers)

    def shapes(self):
        return self.model.shapes()

    def init(self, seed):
        return self.model.init(seed)

    def read(self, path):
        rng = np.random.default_rng(0)
        inputs = rng.integers(256, size=(12, *self.input_shape)).astype(np.uint8)
        shape = self.input_shape[1:] if self.has_pixels else ()
        return Dataset(inputs=inputs, targets=rng.integers(3, size=(12, *shape)), weights=rng.uniform(0.1, 1.0, 12))

    def learner(self, *, accelerator="cpu", threads=None) -> TorchLearner:
        return self.model.learner(accelerator=accelerator, threads=threads, loss=self.loss)


def _to_small_numbers(inputs: Array) -> Array:
    return inputs.astype(np.float32) / np.float32(255.0 if inputs.dtype == np.uint8 else 1.0)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, of which the last step counts, and a linear layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Tokens(nn.Module):
    """A transformer's layer over the embedded entries of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encode(self.embed((x * 255).long())).mean(1))


class Joined(nn.Module):
    """Two branches whose channels are joined, a residual connection, and a buffer that is assigned to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.mix = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.batches = self.batches + 1
        both = torch.cat([self.left(x), self.right(x)], dim=1)
        return self.head(functional.relu(both + self.mix(both)).amax((2, 3)))


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none") + 0.1 * outputs.square().sum(1)


def _conv2d():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU6(),
        nn.Conv2d(4, 8, 3, groups=2, padding=1), nn.GroupNorm(2, 8), nn.Hardswish(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(),
        nn.Conv2d(8, 8, (3, 2), padding=(2, 0), dilation=(2, 1)), nn.SiLU(),
        nn.Conv2d(8, 16, 3, groups=8, stride=2), nn.ELU(), nn.Conv2d(16, 3, 1, stride=2), nn.Flatten(),
    )  # fmt: skip


def _conv1d():
    return nn.Sequential(
        nn.Conv1d(3, 6, 5, padding=2), nn.ReLU(), nn.AvgPool1d(3, 2, ceil_mode=True), nn.Conv1d(6, 6, 5, groups=6),
        nn.MaxPool1d(2), nn.Dropout1d(0.2), nn.Conv1d(6, 4, 3, stride=2, dilation=2), nn.GELU(),
        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _pools():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 1),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.Conv2d(4, 4, 1),
        nn.AdaptiveAvgPool2d((2, 2)), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def _autoencoder():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.Tanh(), nn.ConvTranspose2d(4, 2, 4, 2, 1), nn.Sigmoid(),
        nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3, 2, 1), nn.Upsample(size=(9, 9), mode="bilinear"),
        nn.Upsample(size=8), nn.Conv2d(2, 1, 3, padding=1),
    )  # fmt: skip


def _dense():
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.SELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.BatchNorm1d(16),
        nn.PReLU(), nn.Linear(16, 16), nn.Mish(), nn.utils.parametrizations.weight_norm(nn.Linear(16, 6)), nn.GLU(),
    )  # fmt: skip


class StochasticDepth(nn.Module):
    """A residual branch that is left out for some examples, drawn as torchvision does."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.head(x + self.branch(x))
        kept = torch.empty((x.shape[0], 1), dtype=x.dtype).bernoulli_(0.6)
        return self.head(x + self.branch(x) * kept.div_(0.6))


NETWORKS: Mapping[str, Callable[[], Example]] = {
    "conv2d": lambda: Example(_conv2d, (2, 19, 21)),
    "conv1d": lambda: Example(_conv1d, (3, 48)),
    "pools": lambda: Example(_pools, (1, 24, 24)),
    "autoencoder": lambda: Example(_autoencoder, (1, 8, 8), "reconstruction", ()),
    "dense": lambda: Example(_dense, (8,), CrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.1)),
    "joined": lambda: Example(Joined, (2, 6, 6), own_loss),
    "tokens": lambda: Example(Tokens, (10,)),
    "lstm": lambda: Example(lambda: Recurrent(nn.LSTM(4, 6, batch_first=True)), (9, 4)),
    "gru": lambda: Example(
        lambda: Recurrent(nn.GRU(4, 6, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)), (5, 4)
    ),
    "stochastic-depth": lambda: Example(StochasticDepth, (6,)),
    "pixels": lambda: Example(lambda: nn.Conv2d(1, 3, 3, padding=1), (1, 6, 6), has_pixels=True),
}
"""Tasks by what they cover."""
