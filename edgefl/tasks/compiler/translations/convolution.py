"""Gradients of convolutions. Of equal forms the one that onnxruntime computes fastest on one thread of a CPU is here.

With x [n, in, *sizes], weight [out, in / groups, *kernel] and grad [n, out, *outputs], the gradient of the weight at
a tap of the kernel is the sum over images and positions of grad times what the tap sees of x.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from onnxscript import opset18 as op

from edgefl.tasks.compiler.translations.nodes import (
    Value,
    concat,
    cut,
    get_shape,
    number,
    pad,
    reshape,
    sum_axes,
    to_list,
    transpose,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes and settings of a convolution: of its kernel and its outputs, by spatial axis."""

    kernel: list[int]
    outputs: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def list_taps(self) -> list[tuple[int, ...]]:
        return [*itertools.product(*map(range, self.kernel))]

    def get_seen(self, padded: Value, taps: dict[int, int], *, first_axis: int) -> Value:
        """Returns the part of a padded input that is under taps of some spatial axes; the other axes stay whole."""
        if not taps:
            return padded
        starts = [tap * self.dilation[axis] for axis, tap in taps.items()]
        stops = [
            start + self.stride[axis] * (self.outputs[axis] - 1) + 1 for start, axis in zip(starts, taps, strict=True)
        ]
        axes = [axis + first_axis for axis in taps]
        return cut(padded, starts, stops, axes, [self.stride[axis] for axis in taps])


def convolution_backward(
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
) -> tuple[Value, Value, Value]:
    """Returns the gradients of input, weight and bias; where one is not asked for, a number that nothing reads."""
    rank = len(get_shape(x)) - 2
    # Of a transposed convolution input and output have changed places.
    read, written = (grad, x) if transposed else (x, grad)
    geometry = Geometry(
        kernel=list(get_shape(weight)[2:]),
        outputs=list(get_shape(written)[2:]),
        stride=to_list(stride, rank),
        padding=to_list(padding, rank),
        dilation=to_list(dilation, rank),
        groups=groups,
    )
    by_input, by_weight, by_bias = (number(0.0) for _ in range(3))
    if output_mask[0]:
        by_input = _convolve(grad, weight, geometry) if transposed else _spread(grad, x, weight, geometry)
    if output_mask[1]:
        by_weight = _compute_weight_gradient(written, read, weight, geometry)
    if output_mask[2]:
        by_bias = sum_axes(grad, 0, *range(2, rank + 2))
    return by_input, by_weight, by_bias


def _convolve(grad: Value, weight: Value, geometry: Geometry) -> Value:
    return op.Conv(
        grad,
        weight,
        group=geometry.groups,
        strides=geometry.stride,
        dilations=geometry.dilation,
        pads=geometry.padding * 2,
    )


def _spread(grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """Returns the gradient of the input; faster than a convolution with the kernel turned round."""
    reached = [
        (outputs - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        for outputs, stride, padding, dilation, kernel in zip(
            geometry.outputs, geometry.stride, geometry.padding, geometry.dilation, geometry.kernel, strict=True
        )
    ]
    return op.ConvTranspose(
        grad,
        weight,
        group=geometry.groups,
        strides=geometry.stride,
        dilations=geometry.dilation,
        pads=geometry.padding * 2,
        output_padding=[size - end for size, end in zip(get_shape(x)[2:], reached, strict=True)],
    )


def _compute_weight_gradient(grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    out_channels, per_group, *kernel = get_shape(weight)
    if geometry.groups == out_channels and per_group == 1 and get_shape(x)[1] == out_channels:
        return _sum_depth_wise(grad, x, weight, geometry)
    if geometry.groups > 1:
        return _multiply_groups(grad, x, weight, geometry)
    if math.prod(kernel) == 1:
        return _multiply_images(grad, x, weight, geometry)
    return _multiply_rows(grad, x, weight, geometry)


def _multiply_rows(grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """One product a row of the kernel, over all images and positions.

    The input is shifted along its last axis once for all rows, whose own shifts then move whole runs of memory: far
    less is copied than for im2col.
    """
    out_channels, in_channels, *kernel = get_shape(weight)
    rank = geometry.rank
    channels_first = (1, 0, *range(2, rank + 2))
    flat_grad = transpose(reshape(transpose(grad, *channels_first), out_channels, -1), 1, 0)
    padded = pad(transpose(x, *channels_first), [0, 0, *geometry.padding])
    shifted = concat([geometry.get_seen(padded, {rank - 1: tap}, first_axis=2) for tap in range(kernel[-1])], axis=0)
    products = []
    for taps in itertools.product(*map(range, kernel[:-1])):
        seen = geometry.get_seen(shifted, dict(enumerate(taps)), first_axis=2)
        products.append(op.MatMul(reshape(seen, kernel[-1] * in_channels, -1), flat_grad))
    # [*rows, last tap, in, out] to [out, in, *rows, last tap]
    stacked = reshape(concat(products, axis=0), *kernel, in_channels, out_channels)
    return transpose(stacked, rank + 1, rank, *range(rank))


def _multiply_images(grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """One product an image, for a kernel of one tap."""
    out_channels, in_channels, *_ = get_shape(weight)
    num_images = get_shape(x)[0]
    if any(geometry.padding) or max(geometry.stride) > 1:
        padded = pad(x, [0, 0, *geometry.padding])
        x = geometry.get_seen(padded, dict.fromkeys(range(geometry.rank), 0), first_axis=2)
    columns = transpose(reshape(x, num_images, in_channels, -1), 0, 2, 1)
    products = op.MatMul(reshape(grad, num_images, out_channels, -1), columns)
    return reshape(sum_axes(products, 0), *get_shape(weight))


def _sum_depth_wise(grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """Each channel by itself: for each tap a product entry by entry, and its sum over positions.

    With positions before images and channels each shift moves long runs of memory.
    """
    channels, num_images, rank = get_shape(weight)[0], get_shape(x)[0], geometry.rank
    padded = pad(_put_positions_first(x), [*geometry.padding, 0])
    grad = _put_positions_first(grad)
    sums = []
    for taps in geometry.list_taps():
        seen = geometry.get_seen(padded, dict(enumerate(taps)), first_axis=0)
        sums.append(sum_axes(op.Mul(seen, grad), *range(rank)))
    stacked = reshape(concat(sums, axis=0), len(sums), num_images, channels)
    return reshape(transpose(sum_axes(stacked, 1), 1, 0), *get_shape(weight))


def _put_positions_first(value: Value) -> Value:
    """Returns [n, channels, *sizes] as [*sizes, n * channels]."""
    num_images, channels, *sizes = get_shape(value)
    rows = reshape(value, num_images * channels, math.prod(sizes))
    return reshape(transpose(rows, 1, 0), *sizes, num_images * channels)


def _multiply_groups(grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """One product a tap, image and group."""
    out_channels, per_group, *_ = get_shape(weight)
    num_images, groups = get_shape(x)[0], geometry.groups
    padded = pad(x, [0, 0, *geometry.padding])
    by_group = reshape(grad, num_images, groups, out_channels // groups, -1)
    sums = []
    for taps in geometry.list_taps():
        seen = geometry.get_seen(padded, dict(enumerate(taps)), first_axis=2)
        columns = transpose(reshape(seen, num_images, groups, per_group, -1), 0, 1, 3, 2)
        sums.append(reshape(sum_axes(op.MatMul(by_group, columns), 0), out_channels, per_group, 1))
    return reshape(concat(sums, axis=2), *get_shape(weight))
