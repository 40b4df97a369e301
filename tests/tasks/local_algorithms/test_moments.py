import logging

import numpy as np
import pytest
from tasks.step_learner import Dictated, begun, needs_torch, on_each_backend

from edgefl.tasks.local_algorithms.moments import Moments, zeros_like
from edgefl.tasks.local_algorithms.registry import BUILT_IN, StatefulLocalAlgorithm

GRADIENTS = [2.0, -1.0, 0.5, 0.25, 3.0, -0.125]
LASTING = sorted(set(BUILT_IN) - {"gradient"})


def a_step(learner, algorithm):
    momentum = 0.9 if algorithm in ("sgd", "decay", "prox") else 0.0
    # The proximal pull is towards each assignment's own start, which two assignments do not share.
    return begun(learner, algorithm=algorithm, momentum=momentum, options={"mu": 0} if algorithm == "prox" else {})


@on_each_backend
@pytest.mark.parametrize("algorithm", LASTING)
def test_two_assignments_with_kept_state_are_one_long_one(algorithm, backend):
    whole, parts = Dictated(backend), Dictated(backend)
    whole.follow(a_step(whole, algorithm), GRADIENTS)
    first = a_step(parts, algorithm)
    parts.follow(first, GRADIENTS[:3])
    state = first.state()
    before = {name: value.copy() for name, value in state.items()}
    second = a_step(parts, algorithm)
    second.restore(state)
    parts.follow(second, GRADIENTS[3:])
    assert parts.weights() == whole.weights()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    first.step(parts, range(1))
    assert all(np.array_equal(state[name], before[name]) for name in before), "the state is a copy"


@needs_torch
def test_a_state_moves_between_the_backends():
    ours, theirs = Dictated("numpy"), Dictated("torch")
    step, other = a_step(ours, "adam"), a_step(theirs, "adam")
    ours.follow(step, GRADIENTS[:3])
    theirs.parameters["w"] += float(ours.weights()[0])
    other.restore(step.state())
    np.testing.assert_allclose(theirs.follow(other, GRADIENTS[3:]), ours.follow(step, GRADIENTS[3:]), rtol=1e-5)


def test_one_long_step_along_the_gradient_has_no_state():
    assert not isinstance(a_step(Dictated("numpy"), "gradient"), StatefulLocalAlgorithm)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"iterations": np.array(4)},
        {"iterations": np.array(4), "velocity/w": np.ones(2, np.float32)},
        {"iterations": np.array(4), "velocity/w": np.ones(1), "velocity/v": np.ones(1)},
        {"velocity/w": np.ones(1)},
    ],
    ids=["nothing", "no arrays", "another shape", "one more", "no count"],
)
def test_a_state_of_another_model_is_left_aside_with_a_warning(saved, caplog):
    moments = Moments("velocity")
    moments.reset(Dictated("numpy"))
    with caplog.at_level(logging.WARNING):
        moments.restore(saved)
    assert "begin anew" in caplog.text
    assert (moments.iterations, moments.get("w")[0].tolist()) == (0, [0.0])


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_zeros_are_arrays_of_the_same_shape_even_without_dimensions(shape):
    zeros = zeros_like({"w": np.full(shape, np.nan, np.float32)})["w"]
    assert isinstance(zeros, np.ndarray)
    assert (zeros.shape, zeros.dtype, zeros.any()) == (shape, np.float32, False)
