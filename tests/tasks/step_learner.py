"""A learner of one weight vector whose gradients a test dictates, in NumPy or torch."""

import numpy as np

from edgefl.tasks.moments import as_numpy


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

    def dictate(self, *gradient):
        self.gradients["w"][...] = self._array(gradient)

    def follow(self, step, gradients):
        """Returns the weights after each gradient."""
        seen = []
        for gradient in gradients:
            self.dictate(*np.atleast_1d(gradient).tolist())
            step.step(self, range(1))
            seen.append(self.weights())
        return seen

    def weights(self):
        return as_numpy(self.parameters["w"])
