"""Tensors as matrices, and vectors on their way: every rule can be undone, on every shape."""

import numpy as np
import pytest

from edgefl.compression.low_rank import (
    MatrixRule,
    compute_matrix_shape,
    compute_sum_of_products,
    from_matrix,
    is_smaller_as_vectors,
    normalise_rows,
    parse_rule,
    quantise_vectors,
    read_vectors,
    to_matrix,
)
from edgefl.compression.quantisation.rounding import Float16, Float32
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError

SHAPES = [(), (0,), (7,), (8,), (3, 0, 2), (5, 3), (3, 5, 7), (2, 4, 3), (4, 3, 1, 1), (3, 5, 2, 7), (2, 3, 4, 5, 3)]


@pytest.mark.parametrize("rule", MatrixRule)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_comes_back_from_its_matrix(shape: tuple[int, ...], rule: MatrixRule) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    matrix = to_matrix(array, rule)
    assert matrix.shape == compute_matrix_shape(shape, rule)
    assert matrix.flags.c_contiguous
    assert np.array_equal(from_matrix(matrix, shape, rule), array)


@pytest.mark.parametrize(
    ("shape", "kernel", "out", "atomo"),
    [
        ((64, 3, 7, 7), (448, 21), (64, 147), (96, 98)),
        ((512, 512, 3, 3), (1536, 1536), (512, 4608), (131072, 18)),
        ((4, 3, 1, 1), (4, 3), (4, 3), (4, 3)),
        ((512,), (512, 1), (512, 1), (256, 2)),
        ((10, 128), (10, 128), (10, 128), (10, 128)),
        # An odd number of rows cannot be halved.
        ((3, 5, 2, 7), (6, 35), (3, 70), (15, 14)),
        ((7,), (7, 1), (7, 1), (7, 1)),
        ((), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_the_rules_make_the_matrices_that_they_say(
    shape: tuple[int, ...], kernel: tuple[int, int], out: tuple[int, int], atomo: tuple[int, int]
) -> None:
    assert [compute_matrix_shape(shape, rule) for rule in (MatrixRule.KERNEL, MatrixRule.OUT, MatrixRule.ATOMO)] == [
        kernel,
        out,
        atomo,
    ]


def test_a_kernel_that_is_a_product_of_its_rows_and_columns_has_rank_one() -> None:
    rng = np.random.default_rng(1)
    by_row, by_column = rng.standard_normal((4, 3)), rng.standard_normal((5, 3))
    kernel = np.einsum("oh,iw->oihw", by_row, by_column)
    assert np.linalg.matrix_rank(to_matrix(kernel, MatrixRule.KERNEL)) == 1
    assert np.linalg.matrix_rank(to_matrix(kernel, MatrixRule.OUT)) > 1


def test_vectors_pay_when_they_are_fewer_numbers_than_the_matrix() -> None:
    assert is_smaller_as_vectors(1, (3, 3))
    assert not is_smaller_as_vectors(1, (1, 100))
    assert not is_smaller_as_vectors(2, (3, 5))
    assert not is_smaller_as_vectors(1, (0, 4))


def test_a_rule_that_is_none_is_refused() -> None:
    assert parse_rule("powersgd", "") == MatrixRule.KERNEL
    with pytest.raises(CodecError, match="'powersgd' makes matrices by one of kernel, out, atomo, got 'KERNEL'"):
        parse_rule("powersgd", "KERNEL")


def test_the_sum_of_products_is_that_of_its_triples() -> None:
    left, right = np.array([[1, 0], [0, 2]], dtype=np.float32), np.array([[1, 2, 3], [0, 0, 1]], dtype=np.float32)
    product = compute_sum_of_products(left, np.array([10, 5], dtype=np.float32), right)
    assert product.tolist() == [[10, 20, 30], [0, 0, 10]]


@pytest.mark.parametrize(("left", "weight", "right"), [(1e30, 1e30, 1e-30), (1e20, 1, 1e20), (1, 3e38, 2)])
def test_vectors_whose_product_could_be_infinite_are_refused(left: float, weight: float, right: float) -> None:
    runs = [np.full((1, 3), value, dtype=np.float32) for value in (left, right)]
    with pytest.raises(CodecError, match="beyond float32"):
        compute_sum_of_products(runs[0], np.array([weight], dtype=np.float32), runs[1])


def test_what_passes_a_value_stage_is_what_the_receiver_reads() -> None:
    vectors = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    found, parts = quantise_vectors(vectors, Float16(), np.random.default_rng(1))
    assert np.array_equal(found, vectors.astype(np.float16).astype(np.float32))
    assert sum(part.nbytes for part in parts) == 30


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_is_refused(value: float) -> None:
    body = np.array([1, value, 2, 3], dtype="<f4").tobytes()
    with pytest.raises(CodecError, match="vector that is not finite"):
        read_vectors(PayloadReader(memoryview(body)), 2, 2, Float32)


def test_directions_have_length_one_however_small_or_large_the_vectors_are() -> None:
    vectors = np.array([[3e38, 3e38], [1e-45, 0], [0, 0], [3, -4]], dtype=np.float32)
    np.testing.assert_allclose(normalise_rows(vectors), [[2**-0.5, 2**-0.5], [1, 0], [0, 0], [0.6, -0.8]], rtol=1e-6)
