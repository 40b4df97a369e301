"""Forms in ONNX by ATen operator, as `torch.onnx.export` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from onnxscript import opset18 as op

from edgefl.tasks.compiler.recurrent import run_gru  # noqa: F401 registers the operators
from edgefl.tasks.compiler.translations import convolution, normalisation, pooling, recurrent
from edgefl.tasks.compiler.translations.nodes import Value, ints, number

aten = torch.ops.aten


def hardtanh(x: Value, minimum: float = -1.0, maximum: float = 1.0) -> Value:
    return op.Clip(x, number(minimum), number(maximum))


def hardtanh_backward(grad: Value, x: Value, minimum: float, maximum: float) -> Value:
    return _drop(grad, op.Or(op.LessOrEqual(x, number(minimum)), op.GreaterOrEqual(x, number(maximum))))


def threshold_backward(grad: Value, x: Value, threshold: float) -> Value:
    """Of ReLU, whose output is x."""
    return _drop(grad, op.LessOrEqual(x, number(threshold)))


def _drop(grad: Value, is_dropped: Value) -> Value:
    """Returns 0 there, also of a gradient that is not finite, which a factor of 0 would make NaN."""
    return op.Where(is_dropped, number(0.0), grad)


def empty_permuted(size: Any, physical_layout: Any, **_: Any) -> Value:
    """Returns zeros for memory that will be written over."""
    return op.Expand(number(0.0), ints(*size))


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    aten.avg_pool2d.default: pooling.avg_pool2d,
    aten.avg_pool2d_backward.default: pooling.avg_pool2d_backward,
    aten.convolution_backward.default: convolution.convolution_backward,
    aten.empty_permuted.default: empty_permuted,
    aten.hardtanh.default: hardtanh,
    aten.hardtanh_backward.default: hardtanh_backward,
    aten.max_pool2d_with_indices.default: pooling.max_pool2d_with_indices,
    aten.max_pool2d_with_indices_backward.default: pooling.max_pool2d_with_indices_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.native_batch_norm.default: normalisation.native_batch_norm,
    aten.native_batch_norm_backward.default: normalisation.native_batch_norm_backward,
    torch.ops.edgefl.gru.default: recurrent.gru,
    torch.ops.edgefl.gru_gradient.default: recurrent.gru_gradient,
    torch.ops.edgefl.lstm.default: recurrent.lstm,
    torch.ops.edgefl.lstm_cells.default: recurrent.lstm_cells,
    torch.ops.edgefl.lstm_gradient.default: recurrent.lstm_gradient,
}
