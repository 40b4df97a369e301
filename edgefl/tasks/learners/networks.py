"""The built-in networks: their tensors and first weights in NumPy alone, and builders of their torch modules.

A coordinator creates the first model of a torch task without torch, and every machine samples the same numbers from
the same seed. Only the builders import torch, when they are called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array, ModelSpec, TensorSpec, derive_rng

if TYPE_CHECKING:
    import torch

ADACOMP_STD = 0.1
ADACOMP_BIAS = 0.1
TRUNCATION_STD = 2.0

NUM_CLASSES = 10
RESNET_CHANNELS = (64, 128, 256, 512)
RESNET_GROUPS = 32

Chain = Mapping[str, tuple[str | int, ...]]
"""Layers one after the other: name -> the class of torch.nn, and its arguments (inputs and outputs first)."""

LENET: Chain = {
    "conv1": ("Conv2d", 1, 6, 5, 1, 2),
    "relu1": ("ReLU",),
    "pool1": ("MaxPool2d", 2),
    "conv2": ("Conv2d", 6, 16, 5),
    "relu2": ("ReLU",),
    "pool2": ("MaxPool2d", 2),
    "flat": ("Flatten",),
    "fc1": ("Linear", 400, 120),
    "relu3": ("ReLU",),
    "fc2": ("Linear", 120, 84),
    "relu4": ("ReLU",),
    "fc3": ("Linear", 84, NUM_CLASSES),
}
"""LeNet-5 with ReLU and maxima in place of its squashing and subsampling: 61,706 parameters.

Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998.
"""


def conv(name: str, outputs: int, inputs: int, *kernel: int) -> ModelSpec:
    """Returns weight and bias of a convolution."""
    return (_make_spec(f"{name}.weight", outputs, inputs, *kernel), _make_spec(f"{name}.bias", outputs))


def conv_without_bias(name: str, outputs: int, inputs: int, *kernel: int) -> ModelSpec:
    """Returns the weight of a convolution without bias."""
    return (_make_spec(f"{name}.weight", outputs, inputs, *kernel),)


def linear(name: str, outputs: int, inputs: int) -> ModelSpec:
    """Returns weight [outputs, inputs] and bias of a fully connected layer."""
    return (_make_spec(f"{name}.weight", outputs, inputs), _make_spec(f"{name}.bias", outputs))


def norm(name: str, channels: int) -> ModelSpec:
    """Returns scale and shift of a normalisation; its single dimension identifies the scale."""
    return (_make_spec(f"{name}.weight", channels), _make_spec(f"{name}.bias", channels))


def make_uniform_weights(shapes: ModelSpec, seed: int) -> dict[str, Array]:
    """Returns first weights with torch's default bounds: uniform within ±1/sqrt(fan-in), norms at identity."""
    rng = derive_rng(seed, "initial-weights")
    by_name = {spec.name: spec for spec in shapes}
    return {spec.name: _sample_uniform(spec, by_name, rng) for spec in shapes}


def make_adacomp_weights(shapes: ModelSpec, seed: int) -> dict[str, Array]:
    """Returns first weights from a normal of deviation 0.1 cut at twice that, and biases of 0.1.

    Source: the reference code of Hardy et al., AdaComp, NCA 2017.
    """
    rng = derive_rng(seed, "initial-weights")
    return {
        spec.name: np.full(spec.shape, ADACOMP_BIAS, np.float32)
        if len(spec.shape) == 1
        else _sample_truncated_normal(spec.shape, rng)
        for spec in shapes
    }


def _make_spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape)


def _sample_uniform(spec: TensorSpec, by_name: dict[str, TensorSpec], rng: Generator) -> Array:
    layer, _, kind = spec.name.rpartition(".")
    weight = by_name[f"{layer}.weight"]
    if len(weight.shape) == 1:
        return np.full(spec.shape, 1.0 if kind == "weight" else 0.0, np.float32)
    bound = 1.0 / np.sqrt(np.prod(weight.shape[1:]))
    # Sampled as float64 and rounded once, so that every platform rounds the same numbers.
    return rng.uniform(-bound, bound, spec.shape).astype(np.float32)


def _sample_truncated_normal(shape: tuple[int, ...], rng: Generator) -> Array:
    values = rng.standard_normal(shape)
    while (outside := np.abs(values) > TRUNCATION_STD).any():
        values[outside] = rng.standard_normal(int(outside.sum()))
    return (ADACOMP_STD * values).astype(np.float32)


def _make_two_layer_cnn(channels: tuple[int, int], kernel: int, hidden: int) -> Chain:
    """Returns two convolutions and two fully connected layers, for 28x28 images."""
    return {
        "conv1": ("Conv2d", 1, channels[0], kernel, 1, "same"),
        "relu1": ("ReLU",),
        "pool1": ("MaxPool2d", 2),
        "conv2": ("Conv2d", channels[0], channels[1], kernel, 1, "same"),
        "relu2": ("ReLU",),
        "pool2": ("MaxPool2d", 2),
        "flat": ("Flatten",),
        "fc1": ("Linear", channels[1] * 7 * 7, hidden),
        "relu3": ("ReLU",),
        "fc2": ("Linear", hidden, NUM_CLASSES),
    }


CNN: Chain = _make_two_layer_cnn((32, 64), 3, 128)
"""421,642 parameters. Source: Hardy et al., AdaComp, NCA 2017, the network of its MNIST experiments."""
CNN_SMALL: Chain = _make_two_layer_cnn((16, 32), 5, 64)
"""114,314 parameters."""
CNN_LARGE: Chain = _make_two_layer_cnn((32, 64), 5, 512)
"""1,663,370 parameters.

Source: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, its MNIST network.
"""


def make_motion_cnn(channels: int, num_classes: int) -> Chain:
    """Returns three 1-D convolutions with pooling and a mean over time, for [channels, samples] windows."""
    return {
        "conv1": ("Conv1d", channels, 32, 5, 1, 2),
        "relu1": ("ReLU",),
        "pool1": ("MaxPool1d", 2),
        "conv2": ("Conv1d", 32, 64, 5, 1, 2),
        "relu2": ("ReLU",),
        "pool2": ("MaxPool1d", 2),
        "conv3": ("Conv1d", 64, 48, 3, 1, 1),
        "relu3": ("ReLU",),
        "mean": ("AdaptiveAvgPool1d", 1),
        "flat": ("Flatten",),
        "fc1": ("Linear", 48, num_classes),
    }


def list_chain_specs(chain: Chain) -> ModelSpec:
    """Returns the tensors of `build_chain`, in its order."""
    tensors: list[TensorSpec] = []
    for name, (kind, *arguments) in chain.items():
        if kind in ("Conv1d", "Conv2d"):
            inputs, outputs, kernel = map(int, arguments[:3])
            tensors += conv(name, outputs, inputs, *[kernel] * (1 if kind == "Conv1d" else 2))
        elif kind == "Linear":
            inputs, outputs = map(int, arguments)
            tensors += linear(name, outputs, inputs)
    return tuple(tensors)


def build_chain(chain: Chain) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first lines

    return nn.Sequential(
        OrderedDict((name, getattr(nn, str(kind))(*arguments)) for name, (kind, *arguments) in chain.items())
    )


def resnet18_specs() -> ModelSpec:
    """Returns the tensors of `resnet18_gn`, in its order."""
    tensors = [*conv_without_bias("stem", 64, 1, 3, 3), *norm("stem_norm", 64)]
    inputs = RESNET_CHANNELS[0]
    for stage, outputs in enumerate(RESNET_CHANNELS, 1):
        for block in (1, 2):
            tensors += _make_block_specs(f"stage{stage}_block{block}", inputs, outputs)
            inputs = outputs
    return (*tensors, *linear("fc", NUM_CLASSES, RESNET_CHANNELS[-1]))


def resnet18_gn() -> torch.nn.Module:
    """Returns ResNet-18 with GroupNorm (batch statistics of skewed shards do not average) and a 3x3 stem."""
    from torch import nn  # noqa: PLC0415 see the module's first lines

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


def _make_block_specs(name: str, inputs: int, outputs: int) -> ModelSpec:
    body = (
        *conv_without_bias(f"{name}.body.0", outputs, inputs, 3, 3),
        *norm(f"{name}.body.1", outputs),
        *conv_without_bias(f"{name}.body.3", outputs, outputs, 3, 3),
        *norm(f"{name}.body.4", outputs),
    )
    if inputs == outputs:
        return body
    return (
        *body,
        *conv_without_bias(f"{name}.shortcut.0", outputs, inputs, 1, 1),
        *norm(f"{name}.shortcut.1", outputs),
    )


def _build_residual_block(inputs: int, outputs: int, stride: int) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first lines

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
