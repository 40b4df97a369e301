"""A learner of one weight vector whose gradients a test dictates, in NumPy or torch."""

import importlib.util

import numpy as np
import pytest

from edgefl.core.types import TrainConfig
from edgefl.tasks.local_algorithms.optimizers import to_numpy
from edgefl.tasks.local_algorithms.registry import make_local_algorithm

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: pip install '.[train]'"
)
on_each_backend = pytest.mark.parametrize("backend", ["numpy", pytest.param("torch", marks=needs_torch)])


class Dictated:
    """`weights` starts at zero unless told otherwise; every call of `follow` is one iteration."""

    def __init__(self, backend, size=1, start=0.0):
        if backend == "torch":
            import torch  # noqa: PLC0415 a test that asks for it has looked whether it is there

            self._array = lambda values: torch.tensor(values, dtype=torch.float32)
        else:
            self._array = lambda values: np.array(values, np.float32)
        self.parameters = {"w": self._array([start] * size)}
        self.gradients = {"w": self._array([0.0] * size)}

    def follow(self, step, gradients):
        """Returns the weights after each gradient."""
        seen = []
        for gradient in gradients:
            self.gradients["w"][...] = self._array(np.atleast_1d(gradient).tolist())
            step.step(self, range(1))
            seen.append(self.weights())
        return seen

    def weights(self):
        return to_numpy(self.parameters["w"])


def begun(learner, **plan):
    """A local step that has begun on this learner."""
    step = make_local_algorithm(TrainConfig(iterations=1, **plan))
    step.start(learner)
    return step
