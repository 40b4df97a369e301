"""Vectors on their way, and the sums of their products."""

import numpy as np
import pytest

from edgefl.compression.lowrank.factors import compute_sum_of_products, normalise_rows, quantise_vectors, read_vectors
from edgefl.compression.quantisation.floats import Float16, Float32
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError


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
