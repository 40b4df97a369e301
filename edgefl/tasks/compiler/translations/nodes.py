"""What translations are written with: constants, shapes, and moves of values in ONNX.

A translation gets an ATen operator's arguments: tensors as values of ONNX with fixed shapes, the rest as they are in
Python. It returns values of ONNX's default domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import opset18 as op

Value = Any
"""A value of a graph, which onnxscript has no public class for."""
FLOAT32 = 1
"""ONNX's number of the type."""


def ints(*values: int) -> Value:
    """Returns [n] int64."""
    return op.Constant(value_ints=list(values))


def number(value: float) -> Value:
    """Returns a float32 scalar."""
    return op.Constant(value_float=float(value))


def numbers(values: Sequence[float], *shape: int) -> Value:
    """Returns float32 of a shape."""
    flat = op.Constant(value_floats=[float(value) for value in values])
    return reshape(flat, *shape) if len(shape) > 1 else flat


def get_shape(value: Value) -> tuple[int, ...]:
    return tuple(int(size) for size in value.shape)


def reshape(value: Value, *shape: int) -> Value:
    return op.Reshape(value, ints(*shape))


def transpose(value: Value, *axes: int) -> Value:
    return op.Transpose(value, perm=list(axes))


def sum_axes(value: Value, *axes: int) -> Value:
    return op.ReduceSum(value, ints(*axes), keepdims=0)


def concat(values: Sequence[Value], axis: int) -> Value:
    return op.Concat(*values, axis=axis) if len(values) > 1 else values[0]


def pad(value: Value, before: Sequence[int], after: Sequence[int] | None = None) -> Value:
    """Returns the value with zeros around it, as many on each axis; `after` is as `before` unless it is given."""
    after = before if after is None else after
    return op.Pad(value, ints(*before, *after)) if any(before) or any(after) else value


def cut(
    value: Value, starts: Sequence[int], stops: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Value:
    """Returns a slice of some of the axes."""
    return op.Slice(value, ints(*starts), ints(*stops), ints(*axes), ints(*steps))


def to_list(values: Sequence[int], rank: int) -> list[int]:
    """Returns a setting of each spatial axis, where one number may stand for all."""
    return [*values] * rank if len(values) == 1 else [*values]
