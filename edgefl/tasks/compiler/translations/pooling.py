"""Pooling, forward where torch's exporter lacks a case, and its gradients; sizes are [n, channels, height, width]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnxscript import opset18 as op

from edgefl.core.types import Array
from edgefl.tasks.compiler.translations.nodes import (
    FLOAT32,
    Value,
    cut,
    get_shape,
    ints,
    number,
    numbers,
    pad,
    reshape,
    to_list,
)


def max_pool2d_with_indices(
    x: Value, kernel: Any, stride: Any = (), padding: Any = (0, 0), dilation: Any = (1, 1), ceil_mode: bool = False
) -> Any:
    """Indices that nothing reads are not in the file: they make pooling some fifteen times slower."""
    return op.MaxPool(x, **_make_pool_settings(kernel, stride, padding, dilation, ceil_mode))


def max_pool2d_with_indices_backward(
    grad: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Value
) -> Value:
    settings = _make_pool_settings(kernel, stride, padding, dilation, ceil_mode)
    if not _is_partition(get_shape(x), settings):
        return _scatter(grad, x, indices)
    return _find_maxima(grad, x, settings)


def _find_maxima(grad: Value, x: Value, settings: dict[str, Any]) -> Value:
    """Gives each window's gradient to the first of its maxima, which are found again by comparison.

    torch has the first, and constant backgrounds make equal ones common. So the places of a window are counted down,
    and the largest count among its maxima is the first.
    """
    height, width = settings["kernel_shape"]
    maxima, _ = op.MaxPool(x, **settings)
    is_maximum = op.Cast(op.Equal(x, _enlarge(maxima, height, width)), to=FLOAT32)
    countdown = numbers(range(height * width, 0, -1), height, width)
    counts = op.Mul(is_maximum, op.Tile(countdown, ints(*get_shape(grad)[2:])))
    largest, _ = op.MaxPool(counts, **settings)
    is_first = op.Cast(op.Equal(counts, _enlarge(largest, height, width)), to=FLOAT32)
    return op.Mul(is_first, _enlarge(grad, height, width))


def _scatter(grad: Value, x: Value, indices: Value) -> Value:
    """Adds gradients where the maxima were; ONNX counts indices through the whole tensor."""
    zeros = op.Expand(number(0.0), ints(math.prod(get_shape(x))))
    flat = op.ScatterElements(zeros, reshape(indices, -1), reshape(grad, -1), axis=0, reduction="add")
    return reshape(flat, *get_shape(x))


def _is_partition(shape: tuple[int, ...], settings: dict[str, Any]) -> bool:
    """Whether each entry is in exactly one window."""
    kernel = settings["kernel_shape"]
    is_plain = not any(settings["pads"]) and {*settings["dilations"]} == {1} and kernel == settings["strides"]
    return is_plain and all(size % length == 0 for size, length in zip(shape[2:], kernel, strict=True))


def _make_pool_settings(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> dict[str, Any]:
    sizes = to_list(kernel, 2)
    return {
        "kernel_shape": sizes,
        "strides": to_list(stride, 2) if stride else sizes,
        "pads": to_list(padding, 2) * 2,
        "dilations": to_list(dilation, 2),
        "ceil_mode": int(ceil_mode),
    }


def avg_pool2d(
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """Sums each window by a convolution with ones, and divides by what counts of it."""
    sizes, strides, paddings = _make_sizes(kernel, stride, padding)
    outputs = _count_outputs(get_shape(x)[2:], sizes, strides, paddings, ceil_mode)
    is_plain = not (ceil_mode or divisor_override or any(paddings))
    if is_plain:
        return op.AveragePool(x, kernel_shape=sizes, strides=strides)
    num_images, channels, *lengths = get_shape(x)
    reach = [(count - 1) * s + k for count, s, k in zip(outputs, strides, sizes, strict=True)]
    flat = reshape(x, num_images * channels, 1, *lengths)
    after = [end - length - p for end, length, p in zip(reach, lengths, paddings, strict=True)]
    flat = pad(flat, [0, 0, *paddings], [0, 0, *(max(0, number) for number in after)])
    ones = numbers([1.0] * math.prod(sizes), 1, 1, *sizes)
    sums = reshape(op.Conv(flat, ones, strides=strides), num_images, channels, *outputs)
    shares = _make_shares(get_shape(x)[2:], outputs, sizes, strides, paddings, (count_include_pad, divisor_override))
    return op.Mul(sums, numbers(shares.ravel().tolist(), *shares.shape))


def avg_pool2d_backward(
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """Spreads each window's gradient over its entries."""
    sizes, strides, paddings = _make_sizes(kernel, stride, padding)
    num_images, channels, *lengths = get_shape(x)
    outputs = list(get_shape(grad)[2:])
    shares = _make_shares(lengths, outputs, sizes, strides, paddings, (count_include_pad, divisor_override))
    scaled = op.Mul(grad, numbers(shares.ravel().tolist(), *shares.shape))
    reach = [(count - 1) * s + k for count, s, k in zip(outputs, strides, sizes, strict=True)]
    if sizes == strides and reach == lengths:
        return _enlarge(scaled, *sizes)
    ones = numbers([1.0] * math.prod(sizes), 1, 1, *sizes)
    flat = op.ConvTranspose(reshape(scaled, num_images * channels, 1, *outputs), ones, strides=strides)
    missing = [max(0, p + length - end) for p, length, end in zip(paddings, lengths, reach, strict=True)]
    stops = [p + length for p, length in zip(paddings, lengths, strict=True)]
    whole = cut(pad(flat, [0, 0, 0, 0], [0, 0, *missing]), paddings, stops, [2, 3], [1, 1])
    return reshape(whole, num_images, channels, *lengths)


def _make_sizes(kernel: Any, stride: Any, padding: Any) -> tuple[list[int], list[int], list[int]]:
    sizes = to_list(kernel, 2)
    return sizes, to_list(stride, 2) if stride else sizes, to_list(padding, 2)


def _count_outputs(
    lengths: tuple[int, ...], sizes: list[int], strides: list[int], paddings: list[int], ceil_mode: bool
) -> list[int]:
    counts = []
    for length, size, stride, padding in zip(lengths, sizes, strides, paddings, strict=True):
        room = length + 2 * padding - size
        count = (-(-room // stride) if ceil_mode else room // stride) + 1
        # The last window begins in the input or in the padding before it.
        counts.append(count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count)
    return counts


def _make_shares(
    lengths: Any,
    outputs: list[int],
    sizes: list[int],
    strides: list[int],
    paddings: list[int],
    rule: tuple[bool, Any],
) -> Array:
    """Returns one divided by what each window's sum is divided by, [height, width]."""
    counts_padding, divisor = rule
    if divisor:
        return np.full(outputs, 1.0 / divisor)
    counts = []
    for length, count, size, stride, padding in zip(lengths, outputs, sizes, strides, paddings, strict=True):
        starts = np.arange(count) * stride - padding
        stops = np.minimum(starts + size, length + padding)
        counts.append(stops - starts if counts_padding else np.minimum(stops, length) - np.maximum(starts, 0))
    shares: Array = 1.0 / np.outer(counts[0], counts[1])
    return shares


def _enlarge(value: Value, height: int, width: int) -> Value:
    """Returns each entry height · width times."""
    return op.Resize(
        value,
        None,
        numbers([1.0, 1.0, height, width]),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
