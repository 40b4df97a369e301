"""Networks as chains of layers: their tensors and first weights in NumPy alone, and builders of their torch modules.

A coordinator creates the first model of a torch task without torch, and every machine samples the same numbers from
the same seed. Only the builders import torch, when they are called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array, ModelSpec, TensorKind, TensorSpec, derive_rng

if TYPE_CHECKING:
    import torch

ADACOMP_STD = 0.1
ADACOMP_BIAS = 0.1
TRUNCATION_STD = 2.0

_CONV_DEFAULTS = (1, 0, 1, 1, True)
"""Stride, padding, dilation, groups and bias of a convolution of torch."""
_PARTS: Mapping[str, Sequence[str]] = {
    "Residual": ("body", "shortcut"),
    "Concat": ("branch1", "branch2", "branch3", "branch4"),
}
"""Blocks, and the names of their chains."""

Layer = tuple[Any, ...]
"""The class of torch.nn and its arguments (inputs and outputs first), or a block of chains:

`("Residual", body, shortcut)` adds what two chains make of its input, `("Concat", chain, …)` puts their channels one
after the other, `("Subsample", stride, channels)` keeps each stride-th pixel and appends channels of zeros, and
`("GRU", channels, hidden)` makes of [n, channels, samples] its state after the last sample.
"""
Chain = Mapping[str, Layer]
"""Layers one after the other, by name."""
IDENTITY: Chain = {}


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
    if spec.kind == TensorKind.BUFFER:
        return np.full(spec.shape, 1.0 if kind == "running_var" else 0.0, spec.dtype)
    weight = by_name[f"{layer}.weight_hh_l0" if kind.endswith("_l0") else f"{layer}.weight"]
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


def make_gru(channels: int, hidden: int, num_outputs: int) -> Chain:
    """Returns gated recurrent units (Cho et al., EMNLP 2014), of which the last state counts, for such windows."""
    return {"gru": ("GRU", channels, hidden), "fc1": ("Linear", hidden, num_outputs)}


def list_chain_specs(chain: Chain) -> ModelSpec:
    """Returns the tensors of `build_chain`, in its order: parameters, then buffers."""
    tensors = [spec for name, layer in chain.items() for spec in _list_layer_specs(name, layer)]
    return tuple(sorted(tensors, key=lambda spec: spec.kind == TensorKind.BUFFER))


def _list_layer_specs(name: str, layer: Layer) -> ModelSpec:
    kind, *arguments = layer
    if kind in ("Conv1d", "Conv2d"):
        settings = [*arguments, *_CONV_DEFAULTS[len(arguments) - 3 :]]
        inputs, outputs, kernel, _, _, _, groups, has_bias = settings
        make_specs = conv if has_bias else conv_without_bias
        return make_specs(name, outputs, inputs // groups, *[kernel] * (1 if kind == "Conv1d" else 2))
    if kind == "Linear":
        inputs, outputs = arguments
        return linear(name, outputs, inputs)
    if kind in _SPECS:
        return _SPECS[kind](name, *arguments)
    if kind in _PARTS:
        parts = zip(_PARTS[kind], arguments, strict=False)
        return tuple(
            replace(spec, name=f"{name}.{part}.{spec.name}")
            for part, chain in parts
            for spec in list_chain_specs(chain)
        )
    return ()


def _list_group_norm_specs(name: str, _groups: int, channels: int) -> ModelSpec:
    return norm(name, channels)


def _list_batch_norm_specs(name: str, channels: int) -> ModelSpec:
    return (*norm(name, channels), *_list_statistics_specs(name, channels))


def _list_gru_specs(name: str, inputs: int, hidden: int) -> ModelSpec:
    """Returns the tensors of `torch.nn.GRU`, whose three gates are one above the other."""
    return (
        _make_spec(f"{name}.weight_ih_l0", 3 * hidden, inputs),
        _make_spec(f"{name}.weight_hh_l0", 3 * hidden, hidden),
        _make_spec(f"{name}.bias_ih_l0", 3 * hidden),
        _make_spec(f"{name}.bias_hh_l0", 3 * hidden),
    )


def _list_statistics_specs(name: str, channels: int) -> ModelSpec:
    statistics = {"running_mean": (channels,), "running_var": (channels,), "num_batches_tracked": ()}
    return tuple(
        TensorSpec(
            name=f"{name}.{statistic}",
            shape=shape,
            dtype="float32" if shape else "int64",
            kind=TensorKind.BUFFER,
        )
        for statistic, shape in statistics.items()
    )


_SPECS: Mapping[str, Callable[..., ModelSpec]] = {
    "BatchNorm2d": _list_batch_norm_specs,
    "GRU": _list_gru_specs,
    "GroupNorm": _list_group_norm_specs,
}


def build_chain(chain: Chain) -> torch.nn.Module:
    """Returns the torch module of a chain."""
    from torch import nn  # noqa: PLC0415 see the module's first lines

    return nn.Sequential(OrderedDict((name, _build_layer(*layer)) for name, layer in chain.items()))


def _build_layer(kind: str, *arguments: Any) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first lines

    if kind in _BUILDERS:
        return _BUILDERS[kind](*arguments)
    if kind not in _PARTS:
        layer: nn.Module = getattr(nn, kind)(*arguments)
        return layer
    return _build_block(kind, dict(zip(_PARTS[kind], arguments, strict=False)))


def _build_block(kind: str, parts: Mapping[str, Chain]) -> torch.nn.Module:
    import torch  # noqa: PLC0415 see the module's first lines

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, chain in parts.items():
                self.add_module(name, build_chain(chain))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results = [part(x) for part in self.children()]
            return results[0] + results[1] if kind == "Residual" else torch.cat(results, dim=1)

    return Block()


def _build_subsampling(stride: int, channels: int) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first lines

    class Subsample(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, channels))

    return Subsample()


def _build_gru(channels: int, hidden: int) -> torch.nn.Module:
    from torch import nn  # noqa: PLC0415 see the module's first lines

    class LastState(nn.GRU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            states: torch.Tensor = super().forward(x.transpose(1, 2))[0]
            return states[:, -1]

    return LastState(channels, hidden, batch_first=True)


_BUILDERS = {"GRU": _build_gru, "Subsample": _build_subsampling}
"""What builds the layers that torch has not as they are here."""
