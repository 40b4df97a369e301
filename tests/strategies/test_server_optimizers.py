"""The coordinator's optimisers, against two steps worked out by hand, and what they leave alone."""

import math

import numpy as np
import pytest

from edgefl.core.errors import ConfigError
from edgefl.strategies.server_optimizers import KINDS, ServerOptimizer


def two_steps(optimizer, first=0.2, second=-0.1):
    moments, taken = {}, []
    for moved in (first, second):
        step = optimizer.step(moments, {"w": np.array([moved])})
        taken.append(float(step["w"][0]))
    return taken


def test_none_takes_the_displacement_itself_or_scales_it_by_a_rate():
    moved = {"w": np.array([0.2])}
    assert ServerOptimizer().step({}, moved) is moved
    assert two_steps(ServerOptimizer(learning_rate=0.5)) == pytest.approx([0.1, -0.05])


def test_momentum_keeps_a_share_of_the_old_direction():
    assert two_steps(ServerOptimizer(kind="momentum", beta1=0.5, learning_rate=2.0)) == pytest.approx([0.4, 0.0])


@pytest.mark.parametrize(
    ("kind", "second_moments"),
    [
        ("adagrad", (0.04, 0.05)),
        ("adam", (0.25 * 0.04, 0.75 * 0.01 + 0.25 * 0.01)),
        ("yogi", (0.25 * 0.04, 0.01)),  # the second time v equals the square: its sign is 0 and v stays
    ],
)
def test_adaptive_steps_are_those_of_the_paper(kind, second_moments):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1, beta1=0.5, beta2=0.75, epsilon=0.01)
    directions = (0.5 * 0.2, 0.25 * 0.2 - 0.5 * 0.1)
    expected = [0.1 * m / (math.sqrt(v) + 0.01) for m, v in zip(directions, second_moments, strict=True)]
    assert two_steps(optimizer) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_and_buffers_pass_as_they_are(kind):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1, buffers=frozenset({"mean"}))
    moved = {"mean": np.array([0.25]), "count": np.array([3])}
    step = optimizer.step({}, dict(moved))
    assert all(np.array_equal(step[name], moved[name]) for name in moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_steps_keep_shape_and_type(kind, dtype):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1)
    step = optimizer.step({}, {"w": np.full((2, 3), 0.5, dtype), "scale": np.array(0.5, dtype)})
    assert [(t.shape, t.dtype) for t in step.values()] == [((2, 3), dtype), ((), dtype)]


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ConfigError, match=r"server\.optimizer must be one of none, momentum"):
        ServerOptimizer(kind="adamw")


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_the_square_of_a_small_half_float_is_not_lost(kind):
    optimizer = ServerOptimizer(kind=kind, learning_rate=0.1, epsilon=1e-6)
    halves = optimizer.step({}, {"w": np.full(3, 1e-4, np.float16)})["w"]
    singles = optimizer.step({}, {"w": np.full(3, np.float16(1e-4), np.float32)})["w"]
    assert halves == pytest.approx(singles, rel=1e-3)
