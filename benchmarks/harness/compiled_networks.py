"""Networks that `compiled_steps.py` compiles and trains, as tasks; torch is imported when one is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgefl.core.config import AdaptSection
from edgefl.core.types import Array, Dataset, ModelSpec, Task
from edgefl.tasks.learners.torch_learner import TorchLearner, TorchModel
from edgefl.tasks.registry import make_task

BLOCKS = ((16, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2))
"""Inputs, outputs and stride of depth-wise separable blocks (Howard et al., MobileNets, 2017)."""


@dataclass(frozen=True)
class OwnNetwork(Task):
    """A network on numbers, with a loss by name."""

    build: Callable[[], Any]
    input_shape: tuple[int, ...]
    loss: str = "cross-entropy"
    labels: tuple[str, ...] = tuple("abcdefghij")
    name: str = "network"

    @property
    def model(self) -> TorchModel:
        return TorchModel(build=self.build)

    def shapes(self) -> ModelSpec:
        return self.model.shapes()

    def init(self, seed: int) -> dict[str, Array]:
        return self.model.init(seed)

    def read(self, path: str) -> Dataset:
        raise NotImplementedError(path)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> TorchLearner:
        return self.model.learner(accelerator=accelerator, threads=threads, loss=self.loss)


def _build_mlp() -> Any:
    from torch import nn  # noqa: PLC0415 see the first line

    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def _build_depth_wise() -> Any:
    from torch import nn  # noqa: PLC0415 see the first line

    layers = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    for inputs, outputs, stride in BLOCKS:
        layers += [nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.BatchNorm2d(inputs)]
        layers += [nn.ReLU6(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _build_small_mobile() -> Any:
    """The same blocks with group normalisation, whose statistics can be frozen, and two dense layers."""
    from torch import nn  # noqa: PLC0415 see the first line

    layers = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU6()]
    for inputs, outputs, stride in BLOCKS:
        layers += [nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.GroupNorm(4, inputs)]
        layers += [nn.ReLU6(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU6()]
    base = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(base, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _make_gru() -> Task:
    columns = ("a", "b", "c", "d", "e", "f")
    return make_task(
        "series", {"columns": columns, "window": 32, "model": "gru", "hidden": 48, "target": "y", "labels": columns}
    )


NETWORKS: Mapping[str, Callable[[], Task]] = {
    "mnist-cnn": lambda: make_task("mnist"),
    "motion-cnn": lambda: make_task("motionsense"),
    "gru": _make_gru,
    "mlp": lambda: OwnNetwork(_build_mlp, (16,), "mse", ()),
    "depth-wise": lambda: OwnNetwork(_build_depth_wise, (3, 32, 32)),
    "mobile-lora": lambda: OwnNetwork(_build_small_mobile, (3, 32, 32)),
}
ADAPTERS: Mapping[str, AdaptSection] = {
    "mobile-lora": AdaptSection(method="lora", rank=4, targets=("1.weight",), shared=("3.*",)),
    "vit-lora": AdaptSection(method="lora", rank=4, targets=("layers.*.self_attn.*weight",), shared=("head.*",)),
}
"""What is trained of a network, where that is not all: `[adapt]` of a run file."""
