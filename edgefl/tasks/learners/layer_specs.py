"""Tensor layouts of the built-in models and their first weights, in NumPy alone.

A coordinator creates the first model of a torch task without torch, and every machine samples the same numbers
from the same seed.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array, ModelSpec, TensorSpec, derive_rng

ADACOMP_STD = 0.1
ADACOMP_BIAS = 0.1
TRUNCATION_STD = 2.0


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


def count_parameters(shapes: ModelSpec) -> int:
    return sum(spec.size for spec in shapes)


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
