"""Tensors as matrices and back, for codecs that send few pairs of vectors in place of a matrix.

The rules, for a kernel of shape (outputs, inputs, height, width):

    kernel  (outputs * height, inputs * width): its ranks are the lowest and its sides the shortest
    out     (outputs, inputs * height * width), as PowerSGD has it
    atomo   (outputs * inputs / 2, 2 * height * width), and n numbers as (n / 2, 2), as ATOMO's authors have it; what
            cannot be halved stays whole

A matrix is itself by all of them. Numbers of rules are on the wire and are never changed.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from edgefl.errors import CodecError
from edgefl.types import Array


class Rule(IntEnum):
    KERNEL = 0
    OUT = 1
    ATOMO = 2


def parse_rule(name: str, argument: str) -> Rule:
    """Returns the rule that was typed as a stage's last argument, `kernel` when nothing was.

    Raises:
        CodecError: no such rule.
    """
    names = {rule.name.lower(): rule for rule in Rule}
    if (argument or "kernel") not in names:
        raise CodecError(f"codec stage {name!r} makes matrices by one of {', '.join(names)}, got {argument!r}")
    return names[argument or "kernel"]


def matrix_shape(shape: tuple[int, ...], rule: Rule) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix."""
    if rule == Rule.ATOMO:
        return _halved(shape)
    if rule == Rule.KERNEL and len(shape) > 3:
        return shape[0] * shape[2], shape[1] * math.prod(shape[3:])
    return (shape[0] if shape else 1), math.prod(shape[1:])


def as_matrix(array: Array, rule: Rule) -> Array:
    """Returns a tensor as a matrix whose rows lie one behind the other, the same memory where that is possible.

    Products of matrices that lie otherwise differ in the last bit, and so would the bytes.
    """
    is_kernel = rule == Rule.KERNEL and array.ndim > 3
    ordered = np.ascontiguousarray(array.swapaxes(1, 2) if is_kernel else array)
    return ordered.reshape(matrix_shape(array.shape, rule))


def from_matrix(matrix: Array, shape: tuple[int, ...], rule: Rule) -> Array:
    """Returns the tensor that `as_matrix` made the matrix of."""
    if rule == Rule.KERNEL and len(shape) > 3:
        return matrix.reshape(shape[0], shape[2], shape[1], *shape[3:]).swapaxes(1, 2)
    return matrix.reshape(shape)


def pays(count: int, sides: tuple[int, int]) -> bool:
    """Says whether `count` pairs of vectors, with a number each, are fewer numbers than the matrix."""
    return count * (sum(sides) + 1) < math.prod(sides)


def _halved(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 2:
        return shape[0], shape[1]
    rows, columns = math.prod(shape[:2]), math.prod(shape[2:])
    if len(shape) > 2 and columns == 1:
        return shape[0], shape[1]
    return (rows, columns) if rows % 2 else (rows // 2, 2 * columns)
