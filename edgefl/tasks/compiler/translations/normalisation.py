"""Batch normalisation in a training step, forward and backward.

Source: Ioffe and Szegedy, Batch Normalization, ICML 2015.
"""

from __future__ import annotations

import math
from typing import Any

from onnxscript import opset18 as op

from edgefl.core.errors import TaskError
from edgefl.tasks.compiler.translations.nodes import Value, get_shape, ints, number, numbers, reshape, sum_axes


def native_batch_norm(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Returns the output, the batch's means, and one divided by its deviations; in evaluation only the output counts.

    Inside a graph onnxruntime writes new running statistics over the old ones, even over constants, and it merges
    equal constants: the gradient was wrong by a factor of 1e5, without an error. So the old ones are values that the
    graph computes for this alone; with a momentum of 0 they do not count.
    """
    _, channels, *sizes = get_shape(x)
    ones = numbers([1.0] * channels) if weight is None else weight
    zeros = numbers([0.0] * channels) if bias is None else bias
    if not training:
        normalised = op.BatchNormalization(x, ones, zeros, running_mean, running_var, epsilon=eps)
        return normalised, op.Identity(running_mean), op.Identity(running_var)
    if running_mean is not None:
        raise TaskError("a batch normalisation that changes its running statistics in place is not in ONNX yet")
    first = op.Slice(x, ints(0, *[0] * len(sizes)), ints(1, *[1] * len(sizes)), ints(0, *range(2, len(sizes) + 2)))
    means = reshape(first, channels)
    normalised, mean, variance = op.BatchNormalization(
        x,
        ones,
        zeros,
        means,
        op.Abs(means),
        epsilon=eps,
        momentum=0.0,
        training_mode=1,
    )
    return normalised, mean, op.Reciprocal(op.Sqrt(op.Add(variance, number(eps))))


def native_batch_norm_backward(
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Any,
    running_var: Any,
    mean: Value,
    inverse_deviation: Value,
    training: bool,
    eps: float,
    output_mask: Any,
) -> tuple[Value, Value, Value]:
    """Returns the gradients of input, weight and bias.

    With x' = (x - mean) / d the first is weight / d · (grad - mean(grad) - x' · mean(grad · x')). Its terms in x are
    one linear function a channel, which BatchNormalization computes in one pass.
    """
    if not training:
        raise TaskError("batch normalisation in evaluation mode inside a training step has no gradient in ONNX yet")
    channels, rank = get_shape(x)[1], len(get_shape(x)) - 2
    axes, per_channel = (0, *range(2, rank + 2)), (channels, *[1] * rank)
    minus_share = number(-channels / math.prod(get_shape(x)))
    centred = op.Sub(x, reshape(mean, *per_channel))
    by_bias = sum_axes(grad, *axes)
    by_weight = op.Mul(sum_axes(op.Mul(grad, centred), *axes), inverse_deviation)
    scale = inverse_deviation if weight is None else op.Mul(weight, inverse_deviation)
    slope = op.Mul(op.Mul(scale, inverse_deviation), op.Mul(by_weight, minus_share))
    shift = op.Mul(scale, op.Mul(by_bias, minus_share))
    zeros, ones = numbers([0.0] * channels), numbers([1.0] * channels)
    linear = op.BatchNormalization(centred, slope, shift, zeros, ones, epsilon=0.0)
    return op.Add(op.Mul(grad, reshape(scale, *per_channel)), linear), by_weight, by_bias
