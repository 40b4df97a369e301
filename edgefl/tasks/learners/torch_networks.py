"""The built-in torch networks, each with the layout of its tensors. Builders import torch when they are called."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from edgefl.core.types import ModelSpec
from edgefl.tasks.learners import layer_specs

if TYPE_CHECKING:
    import torch

NUM_CLASSES = 10
RESNET_CHANNELS = (64, 128, 256, 512)
RESNET_GROUPS = 32

CNN: ModelSpec = (
    *layer_specs.conv("conv1", 32, 1, 3, 3),
    *layer_specs.conv("conv2", 64, 32, 3, 3),
    *layer_specs.linear("fc1", 128, 3136),
    *layer_specs.linear("fc2", NUM_CLASSES, 128),
)
CNN_SMALL: ModelSpec = (
    *layer_specs.conv("conv1", 16, 1, 5, 5),
    *layer_specs.conv("conv2", 32, 16, 5, 5),
    *layer_specs.linear("fc1", 64, 1568),
    *layer_specs.linear("fc2", NUM_CLASSES, 64),
)
CNN_LARGE: ModelSpec = (
    *layer_specs.conv("conv1", 32, 1, 5, 5),
    *layer_specs.conv("conv2", 64, 32, 5, 5),
    *layer_specs.linear("fc1", 512, 3136),
    *layer_specs.linear("fc2", NUM_CLASSES, 512),
)
LENET: ModelSpec = (
    *layer_specs.conv("conv1", 6, 1, 5, 5),
    *layer_specs.conv("conv2", 16, 6, 5, 5),
    *layer_specs.linear("fc1", 120, 400),
    *layer_specs.linear("fc2", 84, 120),
    *layer_specs.linear("fc3", NUM_CLASSES, 84),
)


def cnn() -> torch.nn.Module:
    """Returns conv 3x3x32, conv 3x3x64, 128, 10 on 28x28 images: 421,642 parameters.

    Source: Hardy et al., AdaComp, NCA 2017, the network of its MNIST experiments.
    """
    return _build_two_layer_cnn(channels=(32, 64), kernel=3, hidden=128)


def cnn_small() -> torch.nn.Module:
    """Returns conv 5x5x16, conv 5x5x32, 64, 10 on 28x28 images: 114,314 parameters."""
    return _build_two_layer_cnn(channels=(16, 32), kernel=5, hidden=64)


def cnn_large() -> torch.nn.Module:
    """Returns conv 5x5x32, conv 5x5x64, 512, 10 on 28x28 images: 1,663,370 parameters.

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, its MNIST network.
    """
    return _build_two_layer_cnn(channels=(32, 64), kernel=5, hidden=512)


def lenet() -> torch.nn.Module:
    """Returns LeNet-5 with ReLU and maxima in place of its squashing and subsampling: 61,706 parameters.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998.
    """
    from torch import nn  # noqa: PLC0415 see the module's first line

    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, 6, 5, padding=2),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(400, 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, NUM_CLASSES),
    }
    return nn.Sequential(OrderedDict(layers))


def motion_specs(channels: int, num_classes: int) -> ModelSpec:
    return (
        *layer_specs.conv("conv1", 32, channels, 5),
        *layer_specs.conv("conv2", 64, 32, 5),
        *layer_specs.conv("conv3", 48, 64, 3),
        *layer_specs.linear("fc1", num_classes, 48),
    )


def motion_cnn(channels: int, num_classes: int) -> torch.nn.Module:
    """Returns three 1-D convolutions with pooling and a mean over time, for [channels, samples] windows."""
    from torch import nn  # noqa: PLC0415 see the module's first line

    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv1d(channels, 32, 5, padding=2),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool1d(2),
        "conv2": nn.Conv1d(32, 64, 5, padding=2),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool1d(2),
        "conv3": nn.Conv1d(64, 48, 3, padding=1),
        "relu3": nn.ReLU(),
        "mean": nn.AdaptiveAvgPool1d(1),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(48, num_classes),
    }
    return nn.Sequential(OrderedDict(layers))


def resnet18_specs() -> ModelSpec:
    """Returns the tensors of `resnet18_gn`, in its order."""
    tensors = [*layer_specs.conv_without_bias("stem", 64, 1, 3, 3), *layer_specs.norm("stem_norm", 64)]
    inputs = RESNET_CHANNELS[0]
    for stage, outputs in enumerate(RESNET_CHANNELS, 1):
        for block in (1, 2):
            tensors += _make_block_specs(f"stage{stage}_block{block}", inputs, outputs)
            inputs = outputs
    return (*tensors, *layer_specs.linear("fc", NUM_CLASSES, RESNET_CHANNELS[-1]))


def resnet18_gn() -> torch.nn.Module:
    """Returns ResNet-18 with GroupNorm (batch statistics of skewed shards do not average) and a 3x3 stem."""
    from torch import nn  # noqa: PLC0415 see the module's first line

    layers: dict[str, nn.Module] = {
        "stem": nn.Conv2d(1, 64, 3, padding=1, bias=False),
        "stem_norm": nn.GroupNorm(RESNET_GROUPS, 64),
        "stem_relu": nn.ReLU(),
    }
    inputs = RESNET_CHANNELS[0]
    for stage, outputs in enumerate(RESNET_CHANNELS, 1):
        for block in (1, 2):
            stride = 2 if block == 1 and stage > 1 else 1
            layers[f"stage{stage}_block{block}"] = _build_residual_block(inputs, outputs, stride)
            inputs = outputs
    layers |= {
        "mean": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(RESNET_CHANNELS[-1], NUM_CLASSES),
    }
    return nn.Sequential(OrderedDict(layers))


def _build_two_layer_cnn(*, channels: tuple[int, int], kernel: int, hidden: int) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first line

    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, channels[0], kernel, padding="same"),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(channels[0], channels[1], kernel, padding="same"),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(channels[1] * 7 * 7, hidden),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(hidden, NUM_CLASSES),
    }
    return nn.Sequential(OrderedDict(layers))


def _make_block_specs(name: str, inputs: int, outputs: int) -> ModelSpec:
    body = (
        *layer_specs.conv_without_bias(f"{name}.body.0", outputs, inputs, 3, 3),
        *layer_specs.norm(f"{name}.body.1", outputs),
        *layer_specs.conv_without_bias(f"{name}.body.3", outputs, outputs, 3, 3),
        *layer_specs.norm(f"{name}.body.4", outputs),
    )
    if inputs == outputs:
        return body
    return (
        *body,
        *layer_specs.conv_without_bias(f"{name}.shortcut.0", outputs, inputs, 1, 1),
        *layer_specs.norm(f"{name}.shortcut.1", outputs),
    )


def _build_residual_block(inputs: int, outputs: int, stride: int) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first line

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
                nn.GroupNorm(RESNET_GROUPS, outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                nn.GroupNorm(RESNET_GROUPS, outputs),
            )
            self.shortcut: nn.Module = nn.Identity()
            if inputs != outputs:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.GroupNorm(RESNET_GROUPS, outputs)
                )
            self.relu = nn.ReLU()

        def forward(self, x: torch.Tensor) -> Any:
            return self.relu(self.body(x) + self.shortcut(x))

    return Residual()
