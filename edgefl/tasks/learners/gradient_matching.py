"""How far a batch's gradient is from one that was seen, and the slope of that distance by the batch's features.

The distance is 1 minus the cosine, which does not depend on learning rate or number of examples (Geiping et al.,
Inverting Gradients, NeurIPS 2020). Its slope is a product of the mixed second derivative of the loss with a vector v
in the parameters: that of the loss by the features, differentiated along v. In NumPy that is a central difference of
two gradients in double precision; torch differentiates twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array, Dataset, Learner
from edgefl.tasks.learners.numpy_learner import NumpyLearner

if TYPE_CHECKING:
    import torch

STEP = 1e-6
"""Step of the central difference, as a part of the parameters' norm."""
_TINY = 1e-300


class GradientMatcher(Protocol):
    """A network at fixed weights, beside a gradient that was seen."""

    def compute(self, features: Array) -> tuple[float, Array]:
        """Returns the distance, 0 to 2, of the gradient of these features, and its slope by them."""


def make_matcher(learner: Learner, seen: Mapping[str, Array], targets: Array) -> GradientMatcher:
    """Returns what compares gradients of a learner's network, at its weights, with one that was seen.

    Args:
        learner: with the weights at which the gradient is.
        seen: gradients by parameter; what is exactly 0 was not sent, and is not compared.
        targets: [n, ...] of the batch.

    Raises:
        TaskError: the learner is neither in NumPy nor in torch, or nothing of the gradient was seen.
    """
    if not any(np.any(array) for array in seen.values()):
        raise TaskError("an update of zeros tells nothing")
    if isinstance(learner, NumpyLearner):
        return _NumpyMatcher(learner, seen, targets)
    if hasattr(learner, "module"):
        return _TorchMatcher(learner, seen, targets)
    raise TaskError(f"gradients of {type(learner).__name__} cannot be matched: it has no network in NumPy or torch")


class _NumpyMatcher:
    def __init__(self, learner: NumpyLearner, seen: Mapping[str, Array], targets: Array) -> None:
        self._learner, self._targets = learner.copy_in_double(), targets
        self._names = [name for name in self._learner.parameters if name in seen]
        self._seen = self._flatten(seen)
        self._is_seen = self._seen != 0.0
        self._seen /= np.linalg.norm(self._seen)
        self._weights = self._flatten(self._learner.parameters)

    def compute(self, features: Array) -> tuple[float, Array]:
        batch = Dataset(inputs=features, targets=self._targets)
        self._learner.gradient(batch)
        found = self._flatten(self._learner.gradients) * self._is_seen
        norm = max(_TINY, float(np.linalg.norm(found)))
        cosine = float(found @ self._seen) / norm
        along = (cosine * found / norm - self._seen) / norm
        length = max(_TINY, float(np.linalg.norm(along)))
        step = STEP * max(1.0, float(np.linalg.norm(self._weights))) / length
        ahead, behind = (self._compute_slopes(batch, sign * step * along) for sign in (1.0, -1.0))
        self._load(self._weights)
        return 1.0 - cosine, (ahead - behind) / (2.0 * step)

    def _compute_slopes(self, batch: Dataset, move: Array) -> Array:
        self._load(self._weights + move)
        return self._learner.compute_input_slopes(batch)

    def _load(self, flat: Array) -> None:
        start = 0
        for name in self._names:
            target = self._learner.parameters[name]
            target[...] = flat[start : start + target.size].reshape(target.shape)
            start += target.size

    def _flatten(self, tensors: Mapping[str, Array]) -> Array:
        return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in self._names])


class _TorchMatcher:
    """Differentiates in double precision, in the mode of an evaluation: without dropout."""

    def __init__(self, learner: Learner, seen: Mapping[str, Array], targets: Array) -> None:
        from edgefl.tasks.learners.torch_losses import TorchLoss  # noqa: PLC0415 likewise
        from edgefl.tasks.registry import import_torch  # noqa: PLC0415 likewise

        self._torch = torch = import_torch()
        self._module = copy.deepcopy(learner.module).double().cpu().eval()  # type: ignore[attr-defined]
        self._loss, self._learner = TorchLoss(learner.loss, torch.device("cpu")), learner  # type: ignore[attr-defined]
        self._targets = targets
        self._parameters = {name: value for name, value in self._module.named_parameters() if name in seen}
        self._seen = self._join([torch.from_numpy(np.array(seen[name], np.float64)) for name in self._parameters])
        self._is_seen = self._seen != 0.0
        self._seen = self._seen / self._seen.norm()

    def compute(self, features: Array) -> tuple[float, Array]:
        inputs = self._torch.from_numpy(np.array(features, np.float64)).requires_grad_()
        outputs = self._module(inputs)
        targets = self._learner.loss.convert_targets(self._targets, tuple(outputs.shape))  # type: ignore[attr-defined]
        loss = self._loss.compute_mean(outputs, targets)
        parts = self._torch.autograd.grad(loss, list(self._parameters.values()), create_graph=True)
        found = self._join(list(parts)) * self._is_seen
        distance = 1.0 - (found @ self._seen) / found.norm().clamp(min=math.sqrt(_TINY))
        (slope,) = self._torch.autograd.grad(distance, [inputs])
        return float(distance.detach()), np.array(slope.numpy())

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        joined: torch.Tensor = self._torch.cat([tensor.reshape(-1) for tensor in tensors])
        return joined
