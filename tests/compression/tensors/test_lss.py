"""The sketch: what its buckets keep, what is lossless, and that it is the same everywhere."""

import subprocess
import sys

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.feedback import ErrorFeedback
from edgefl.compression.tensors.clusters import Clusters
from edgefl.compression.tensors.lss import estimate, sketch
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, TensorSpec

SHAPES: Shapes = (TensorSpec(name="a", shape=(40, 25)), TensorSpec(name="b", shape=(500,)))


def heavy_tailed(size: int, seed: int = 1) -> Array:
    return (1e-3 * np.random.default_rng(seed).standard_t(3, size)).astype(np.float32)


def tensors(seed: int = 1) -> dict[str, Array]:
    return {spec.name: heavy_tailed(spec.size, seed).reshape(spec.shape) for spec in SHAPES}


def flat(found: object) -> Array:
    assert isinstance(found, dict)
    return np.concatenate([np.asarray(tensor, dtype=np.float64).reshape(-1) for tensor in found.values()])


def decoded(spec: str, given: dict[str, Array]) -> Array:
    codec = make_codec(spec, SHAPES)
    return flat(codec.decode(codec.encode(given, np.random.default_rng(1))))


def tables_of(values: Array, labels: Array, sizes: list[int]) -> dict[int, Array]:
    used = [label for label in range(1, len(sizes)) if np.any(labels == label)]
    return dict(zip(used, sketch(values, labels, sizes), strict=True))


HAND = np.array([1, 3, 10, -2, -4], dtype=np.float32)


def test_the_hand_example() -> None:
    labels = Clusters(positive=(5.0,), negative=()).labels(HAND)
    assert labels.tolist() == [1, 1, 2, 3, 3]
    found = estimate(labels, tables_of(HAND, labels, [0, 1, 1, 1]))
    assert found.tolist() == [2, 2, 10, -3, -3]
    assert found.sum() == HAND.sum() == 8


def test_l1_the_sum_of_every_bucket_is_kept() -> None:
    values = heavy_tailed(1003)
    labels, sizes = np.where(values > 0, 1, 2), [0, 7, 5]
    found = estimate(labels, tables_of(values, labels, sizes))
    for label, num_buckets in ((1, 7), (2, 5)):
        members, means = values[labels == label].astype(np.float64), found[labels == label].astype(np.float64)
        runs = np.split(np.arange(members.size), np.flatnonzero(np.diff(means)) + 1)
        assert len(runs) == num_buckets
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        for run in runs:
            assert members[run].sum() == pytest.approx(means[run].sum(), rel=1e-5)


@pytest.mark.parametrize("spec", ["lss:1", "lss:2", "lss:4:0.01"])
def test_l1_so_the_sum_of_all_values_is_kept(spec: str) -> None:
    assert decoded(spec, tensors()).sum() == pytest.approx(flat(tensors()).sum(), abs=1e-6)


@pytest.mark.parametrize("spec", ["lss:1", "lss:2", "lss:3:0.2|fp16", "lss:6|int8"])
def test_l2_no_sign_changes_and_nothing_leaves_the_range_of_its_sign(spec: str) -> None:
    given = tensors() | {"b": np.where(np.arange(500) % 3 == 0, 0, heavy_tailed(500, 2)).astype(np.float32)}
    values, found = flat(given), decoded(spec, given)
    assert np.all((np.sign(found) == np.sign(values)) | (found == 0))
    assert not np.any(found[values == 0])
    assert found.max() <= values.max() * 1.01
    assert found.min() >= values.min() * 1.01


def test_l2_an_estimate_is_within_the_values_of_its_cluster() -> None:
    values = heavy_tailed(2000)
    labels = Clusters(positive=(1e-3, 2e-3), negative=(1e-3,)).labels(values)
    found = estimate(labels, tables_of(values, labels, [0, 3, 3, 3, 3, 3]))
    for label in range(1, 6):
        members = values[labels == label]
        assert members.min() <= found[labels == label].min() <= found[labels == label].max() <= members.max()


def test_l3_as_many_buckets_as_values_lose_nothing() -> None:
    assert np.array_equal(decoded("lss:2:1", tensors()), flat(tensors()))


def test_l3_one_bucket_for_a_cluster_is_its_mean() -> None:
    values = heavy_tailed(300)
    labels = np.where(values > 0, 1, 2)
    found = estimate(labels, tables_of(values, labels, [0, 1, 1]))
    np.testing.assert_allclose(found[labels == 1], values[labels == 1].mean(), rtol=1e-5)
    np.testing.assert_allclose(found[labels == 2], values[labels == 2].mean(), rtol=1e-5)


PROCESS = """
import sys, zlib
import numpy as np
from edgefl.compression.codec import make_codec
from edgefl.types import TensorSpec
values = (1e-3 * np.random.default_rng(1).standard_t(3, 150_000)).astype(np.float32)
codec = make_codec("lss:3|fp16", (TensorSpec(name="w", shape=values.shape),))
body = codec.encode({"w": values}, np.random.default_rng(2))
print(zlib.crc32(body), zlib.crc32(codec.decode(body)["w"].tobytes()))
"""


def test_l4_two_processes_with_other_hash_seeds_encode_and_decode_alike() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", PROCESS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_l5_with_error_feedback_what_was_sent_and_what_is_left_make_what_was_meant() -> None:
    codec = make_codec("ef|lss:2|fp16", SHAPES)
    feedback, sent, meant = ErrorFeedback(codec), np.zeros(1500), np.zeros(1500)
    for step in range(20):
        given = tensors(step)
        sent += flat(codec.decode(feedback.encode(f"a{step}", given, np.random.default_rng(step))))
        feedback.settle([f"a{step}"])
        meant += flat(given)
    left = feedback.state()
    residual = flat({name: left[f"residual/{name}"] for name in ("a", "b")})
    np.testing.assert_allclose(sent - meant, -residual, atol=1e-7)


def test_l6_the_mean_of_tables_decodes_to_the_mean_of_decodings_where_clusters_are_the_same() -> None:
    labels, sizes = np.random.default_rng(1).integers(1, 4, 900), [0, 30, 7, 1]
    workers = [tables_of(heavy_tailed(900, seed), labels, sizes) for seed in range(4)]
    merged = {label: np.mean([tables[label] for tables in workers], axis=0) for label in (1, 2, 3)}
    mean = np.mean([estimate(labels, tables) for tables in workers], axis=0)
    np.testing.assert_allclose(estimate(labels, merged), mean, rtol=1e-5, atol=1e-9)


def test_outliers_come_through_where_buckets_are_few() -> None:
    values = flat(tensors())
    found = decoded("lss:2:0.1", tensors())
    large = np.argsort(-np.abs(values))[:50]
    np.testing.assert_allclose(found[large], values[large], rtol=1e-6)


def test_more_buckets_are_less_error_and_more_bytes() -> None:
    specs = ("lss:2:0.02", "lss:2:0.1", "lss:2:0.5")
    errors = [float(np.linalg.norm(decoded(spec, tensors()) - flat(tensors()))) for spec in specs]
    sizes = [len(make_codec(spec, SHAPES).encode(tensors(), np.random.default_rng(1))) for spec in specs]
    assert errors[0] > errors[1] > errors[2]
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_sparse_tensor_and_one_sign_alone_are_no_trouble() -> None:
    shapes = (TensorSpec(name="w", shape=(6,)),)
    codec = make_codec("lss:2", shapes)
    given = {"w": SparseTensor(indices=np.array([1, 4]), values=np.array([2, 5], dtype=np.float32), shape=(6,))}
    assert flat(codec.decode(codec.encode(given, np.random.default_rng(1)))).tolist() == [0, 2, 0, 0, 5, 0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lss", "'lss' needs a whole number from 1 to 6, got lss:"),
        ("lss:7", "got lss:7"),
        ("lss:2:0", "'lss' needs buckets for a fraction over 0 and at most 1, got 0"),
        ("lss:2:nan", "got nan"),
        ("lss:2:much", "got much"),
    ],
)
def test_an_argument_that_makes_no_sense_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        make_codec(spec, SHAPES)
