"""Functions of `torch.nn.functional` in forms that a pure graph can have.

They are exchanged in that module, so torch's layers use them too. What a user's file imported from it by name stays
as it is; a random function is then refused after tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edgefl.core.errors import TaskError
from edgefl.core.types import Array
from edgefl.tasks.compiler.recurrent import run_layer, run_levels

Draw = Callable[[tuple[int, ...]], torch.Tensor]
"""Returns uniform random numbers in [0, 1) of a shape."""


def list_noise_shapes(forward: Callable[[], object]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the random numbers that dropout and stochastic depth draw in `forward`."""
    shapes: list[tuple[int, ...]] = []

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        shapes.append(shape)
        return torch.rand(shape)

    with torch.no_grad(), _exchange_random(draw), _exchange_recurrent(run_levels):
        forward()
    return tuple(shapes)


@contextmanager
def use_noise(noise: list[torch.Tensor]) -> Iterator[None]:
    """Dropout and stochastic depth take their random numbers from a list; all else stays as it is."""
    left = iter(noise)
    with _exchange_random(lambda _: next(left)), _exchange_recurrent(run_levels):
        yield


@contextmanager
def use_pure_functions(noise: list[torch.Tensor]) -> Iterator[None]:
    """Besides, nothing changes a tensor of the module unseen, and pooling and resizing are products of matrices."""
    with use_noise(noise), _exchange(functional, _PURE_FUNCTIONS), _exchange_recurrent(run_layer):
        yield


@contextmanager
def _exchange(owner: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


@contextmanager
def _exchange_recurrent(forward: Callable[..., Any]) -> Iterator[None]:
    with _exchange(nn.GRU, {"forward": forward}), _exchange(nn.LSTM, {"forward": forward}):
        yield


@contextmanager
def _exchange_random(draw: Draw) -> Iterator[None]:
    def fill(x: torch.Tensor, p: float = 0.5) -> torch.Tensor:
        """Stochastic depth draws so (Huang et al., ECCV 2016, as in torchvision)."""
        return x.copy_(draw(tuple(x.shape)) < p)

    with _exchange(functional, _make_random_functions(draw)), _exchange(torch.Tensor, {"bernoulli_": fill}):
        yield


def _make_random_functions(draw: Draw) -> dict[str, Callable[..., Any]]:
    def scale(x: torch.Tensor, p: float, shape: tuple[int, ...]) -> torch.Tensor:
        return x * ((draw(shape) >= p).to(x.dtype) / (1.0 - p))

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return scale(x, p, tuple(x.shape)) if training and p > 0 else x

    def drop_channels(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return scale(x, p, (*x.shape[:2], *[1] * (x.ndim - 2))) if training and p > 0 else x

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            raise TaskError("attention with fewer keys than queries (enable_gqa) has no form in ONNX yet")
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.from_numpy(np.tri(query.shape[-2], key.shape[-2], dtype=bool))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return dropout(scores.softmax(-1), dropout_p) @ value

    channel_names = ("dropout1d", "dropout2d", "dropout3d")
    return {"dropout": dropout, "scaled_dot_product_attention": attend, **dict.fromkeys(channel_names, drop_channels)}


def _normalise_batch(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Batch normalisation (Ioffe and Szegedy, ICML 2015) whose new running statistics are seen as changes."""
    if not training:
        assert running_mean is not None
        assert running_var is not None
        scale = torch.rsqrt(running_var + eps)
        scale = scale if weight is None else scale * weight
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        per_channel = (1, -1, *[1] * (x.ndim - 2))
        return x * scale.view(per_channel) + shift.view(per_channel)
    output, mean, inverse_deviation = torch.native_batch_norm(x, weight, bias, None, None, True, momentum, eps)
    if running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        variance = (inverse_deviation.detach() ** -2 - eps) * (count / max(1, count - 1))
        running_mean.lerp_(mean.detach(), momentum)
        running_var.lerp_(variance, momentum)
    return output


def _normalise_instances(
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise TaskError("instance normalisation with running statistics has no form in ONNX yet")
    return functional.group_norm(x, x.shape[1], weight, bias, eps)


def _pool_average_1d(x: torch.Tensor, output_size: Any) -> torch.Tensor:
    (length,) = _to_sizes(output_size, x.shape[-1:])
    return _pool_axis(x, -1, length)


def _pool_average_2d(x: torch.Tensor, output_size: Any) -> torch.Tensor:
    height, width = _to_sizes(output_size, x.shape[-2:])
    if (height, width) == (1, 1):
        return x.mean((-2, -1), keepdim=True)
    return _pool_axis(_pool_axis(x, -1, width), -2, height)


def _pool_axis(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Averages the entries floor(j n / size) to ceil((j + 1) n / size) of an axis, as torch does."""
    length = x.shape[axis]
    if size == 1:
        return x.mean(axis, keepdim=True)
    matrix = np.zeros((length, size))
    for column in range(size):
        start, stop = column * length // size, -(-(column + 1) * length // size)
        matrix[start:stop, column] = 1.0 / (stop - start)
    return _multiply_axis(x, axis, matrix)


def _interpolate(
    x: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    rank = x.ndim - 2
    if rank > 2 or antialias or mode not in {"nearest", "nearest-exact", "linear", "bilinear"}:
        raise TaskError(f"resizing of {rank} axes by mode {mode!r} has no form in ONNX yet")
    factors = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor,) * rank
    sizes = _to_sizes(size, x.shape[2:]) if scale_factor is None else None
    for axis in range(rank):
        length, factor = x.shape[2 + axis], factors[axis]
        new = sizes[axis] if sizes is not None else int(length * factor)
        ratio = length / new if sizes is not None or recompute_scale_factor else 1.0 / factor
        x = _resize_axis(x, axis - rank, new, ratio, mode=mode, has_corners=bool(align_corners))
    return x


def _resize_axis(
    x: torch.Tensor, axis: int, size: int, ratio: float, *, mode: str, has_corners: bool
) -> torch.Tensor:
    """Resizes one axis; a place of the result is `ratio` places of the input wide."""
    length, places = x.shape[axis], np.arange(size)
    if size == length and ratio == 1.0:
        return x
    if mode == "nearest" and size == length * round(1.0 / ratio):
        return x.repeat_interleave(size // length, axis)
    if mode.startswith("nearest"):
        before = after = np.floor((places + (0.5 if mode == "nearest-exact" else 0.0)) * ratio)
        share = np.zeros(size)
    else:
        corners = (length - 1) / max(1, size - 1)
        source = places * corners if has_corners else np.maximum(0.0, (places + 0.5) * ratio - 0.5)
        before = np.floor(source)
        after, share = before + 1, source - before
    matrix = np.zeros((length, size))
    np.add.at(matrix, (np.minimum(before, length - 1).astype(int), places), 1.0 - share)
    np.add.at(matrix, (np.minimum(after, length - 1).astype(int), places), share)
    return _multiply_axis(x, axis, matrix)


def _multiply_axis(x: torch.Tensor, axis: int, matrix: Array) -> torch.Tensor:
    """Multiplies the last axis, or that before it, with [old size, new size]."""
    factor = torch.from_numpy(matrix.astype(np.float32)).to(x.dtype)
    return x @ factor if axis == -1 else factor.transpose(0, 1) @ x


def _pool_max(name: str) -> Callable[..., torch.Tensor]:
    """Returns adaptive max pooling where its windows are all of one size and do not overlap."""

    def pool(x: torch.Tensor, output_size: Any, return_indices: bool = False) -> torch.Tensor:
        rank = int(name[-2])
        sizes = _to_sizes(output_size, x.shape[-rank:])
        if return_indices or any(size % requested for size, requested in zip(x.shape[-rank:], sizes, strict=True)):
            raise TaskError(
                f"adaptive max pooling of {list(x.shape[-rank:])} to {list(sizes)} has no form in ONNX yet"
            )
        kernel = [size // requested for size, requested in zip(x.shape[-rank:], sizes, strict=True)]
        pooled: torch.Tensor = getattr(functional, name)(x, kernel)
        return pooled

    return pool


def _to_sizes(output_size: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    requested = (output_size,) * len(sizes) if isinstance(output_size, int) else tuple(output_size)
    return tuple(size if new is None else int(new) for new, size in zip(requested, sizes, strict=True))


_PURE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "adaptive_avg_pool1d": _pool_average_1d,
    "adaptive_avg_pool2d": _pool_average_2d,
    "adaptive_max_pool1d": _pool_max("max_pool1d"),
    "adaptive_max_pool2d": _pool_max("max_pool2d"),
    "batch_norm": _normalise_batch,
    "instance_norm": _normalise_instances,
    "interpolate": _interpolate,
}
