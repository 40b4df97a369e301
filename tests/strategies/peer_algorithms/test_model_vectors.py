"""Updates as vectors that add up, and the mean in their sum."""

import numpy as np

from edgefl.strategies.peer_algorithms.model_vectors import pack_update, unpack_mean


def test_the_mean_is_weighted_keeps_types_and_takes_counters_of_the_first_member():
    updates = [
        {
            "w": np.full((2, 2), value, np.float32),
            "h": np.array([60_000 * value], np.float16),
            "n": np.array(value, np.int64),
        }
        for value in (1.0, 0.5)
    ]
    vectors = [
        pack_update(update, weight=weight, is_first=index == 0)
        for index, (update, weight) in enumerate(zip(updates, (10.0, 30.0), strict=True))
    ]
    assert vectors[0].dtype == np.float32
    mean = unpack_mean(vectors[0] + vectors[1], updates[0])
    assert mean["w"].tolist() == [[0.625, 0.625], [0.625, 0.625]]
    assert mean["h"].tolist() == [37504.0], "sums beyond what a half float holds"
    assert (mean["n"].item(), mean["n"].shape, mean["n"].dtype) == (1, (), np.int64)


def test_double_precision_stays():
    update = {"w": np.array([1e-12, 1.0])}
    vector = pack_update(update, weight=1.0, is_first=True)
    assert unpack_mean(vector, update)["w"].tolist() == [1e-12, 1.0]
