import importlib.util
import logging

import numpy as np
import pytest
from tasks.step_learner import Dictated

from edgefl.tasks.local_steps import BUILT_IN, LastingStep, make_local_step
from edgefl.tasks.moments import Moments, zeros_like
from edgefl.types import LocalPlan

HAS_TORCH = importlib.util.find_spec("torch") is not None
BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.skipif(not HAS_TORCH, reason="torch is missing"))]
GRADIENTS = [2.0, -1.0, 0.5, 0.25, 3.0, -0.125]
LASTING = sorted(set(BUILT_IN) - {"gradient"})


def a_step(algorithm):
    momentum = 0.9 if algorithm in ("sgd", "decay", "prox") else 0.0
    # The proximal pull is towards each assignment's own start, which two assignments do not share.
    options = {"mu": 0} if algorithm == "prox" else {}
    return make_local_step(LocalPlan(algorithm=algorithm, iterations=1, momentum=momentum, options=options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", LASTING)
def test_two_assignments_with_kept_state_are_one_long_one(algorithm, backend):
    whole, parts = Dictated(backend), Dictated(backend)
    step = a_step(algorithm)
    step.begin(whole)
    whole.follow(step, GRADIENTS)
    first, second = a_step(algorithm), a_step(algorithm)
    first.begin(parts)
    parts.follow(first, GRADIENTS[:3])
    second.begin(parts)
    second.restore(first.state())
    parts.follow(second, GRADIENTS[3:])
    assert parts.weights() == whole.weights()


@pytest.mark.parametrize("algorithm", LASTING)
def test_a_state_is_a_copy_in_numpy_that_later_iterations_do_not_change(algorithm):
    learner, step = Dictated("numpy"), a_step(algorithm)
    step.begin(learner)
    learner.follow(step, [1.0])
    state = step.state()
    before = {name: value.copy() for name, value in state.items()}
    learner.follow(step, [5.0])
    assert all(isinstance(value, np.ndarray) for value in state.values())
    assert all(np.array_equal(state[name], before[name]) for name in before)


@pytest.mark.skipif(not HAS_TORCH, reason="torch is missing")
def test_a_state_moves_between_the_backends():
    ours, theirs = Dictated("numpy"), Dictated("torch")
    step, other = a_step("adam"), a_step("adam")
    step.begin(ours)
    ours.follow(step, GRADIENTS[:3])
    other.begin(theirs)
    theirs.parameters["w"] += float(ours.weights()[0])
    other.restore(step.state())
    np.testing.assert_allclose(theirs.follow(other, GRADIENTS[3:]), ours.follow(step, GRADIENTS[3:]), rtol=1e-5)


def test_one_long_step_along_the_gradient_has_no_state():
    assert not isinstance(a_step("gradient"), LastingStep)


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
    moments.begin(Dictated("numpy"))
    with caplog.at_level(logging.WARNING):
        moments.restore(saved)
    assert "begin anew" in caplog.text
    assert moments.iterations == 0
    assert moments.of("w")[0].tolist() == [0.0]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_zeros_are_arrays_of_the_same_shape_even_without_dimensions(shape):
    zeros = zeros_like({"w": np.full(shape, np.nan, np.float32)})["w"]
    assert isinstance(zeros, np.ndarray)
    assert (zeros.shape, zeros.dtype) == (shape, np.float32)
    assert not zeros.any()
