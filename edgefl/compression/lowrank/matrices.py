"""Tensors as matrices and back, for codecs that send a few pairs of vectors per matrix.

The rules, for a kernel of shape (outputs, inputs, height, width):

    kernel  (outputs * height, inputs * width): its ranks are the lowest and its sides the shortest
    out     (outputs, inputs * height * width), as in PowerSGD
    atomo   (outputs * inputs / 2, 2 * height * width), and n numbers as (n / 2, 2), as in ATOMO's
            code; odd sizes stay whole

A matrix is itself by all of them. Numbers of rules are on the wire and are never changed.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from edgefl.core.errors import CodecError
from edgefl.core.types import Array


class MatrixRule(IntEnum):
    KERNEL = 0
    OUT = 1
    ATOMO = 2


def parse_rule(name: str, argument: str) -> MatrixRule:
    """Returns the rule of a stage's last argument, `kernel` by default.

    Raises:
        CodecError: no such rule.
    """
    names = {rule.name.lower(): rule for rule in MatrixRule}
    if (argument or "kernel") not in names:
        raise CodecError(f"codec stage {name!r} makes matrices by one of {', '.join(names)}, got {argument!r}")
    return names[argument or "kernel"]


def compute_matrix_shape(shape: tuple[int, ...], rule: MatrixRule) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix."""
    if rule == MatrixRule.ATOMO:
        return _halve_shape(shape)
    if rule == MatrixRule.KERNEL and len(shape) > 3:
        return shape[0] * shape[2], shape[1] * math.prod(shape[3:])
    return (shape[0] if shape else 1), math.prod(shape[1:])


def to_matrix(array: Array, rule: MatrixRule) -> Array:
    """Returns a tensor as a row-major matrix, the same memory where that is possible.

    Products of matrices in another layout differ in the last bit, and so would the bytes.
    """
    is_kernel = rule == MatrixRule.KERNEL and array.ndim > 3
    ordered = np.ascontiguousarray(array.swapaxes(1, 2) if is_kernel else array)
    return ordered.reshape(compute_matrix_shape(array.shape, rule))


def from_matrix(matrix: Array, shape: tuple[int, ...], rule: MatrixRule) -> Array:
    """Returns the tensor of a matrix made by `to_matrix`."""
    if rule == MatrixRule.KERNEL and len(shape) > 3:
        return matrix.reshape(shape[0], shape[2], shape[1], *shape[3:]).swapaxes(1, 2)
    return matrix.reshape(shape)


def is_smaller_as_vectors(num_pairs: int, sides: tuple[int, int]) -> bool:
    """Whether `num_pairs` pairs of vectors, with a number each, are fewer numbers than the matrix."""
    return num_pairs * (sum(sides) + 1) < math.prod(sides)


def _halve_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 2:
        return shape[0], shape[1]
    rows, columns = math.prod(shape[:2]), math.prod(shape[2:])
    if len(shape) > 2 and columns == 1:
        return shape[0], shape[1]
    return (rows, columns) if rows % 2 else (rows // 2, 2 * columns)
