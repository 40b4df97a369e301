"""How the gradient of a batch is made: in parts that add up, and clipped, whatever the learner and the algorithm."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Dataset, Learner, TrainConfig
from edgefl.tasks.learners.numpy_learner import average_parts
from edgefl.tasks.losses.torch_only_losses import Contrastive

SMALL = 2.0**-80
"""Times the largest number of float32 it has a square of which a billion have a sum."""


class _BoundedLearner:
    """A learner whose `gradient` takes a batch in parts, and is clipped; everything else is the learner's own.

    The mean over a batch is the sum of its parts' means, each times its share of the examples, so that the result is
    that of the whole batch but for rounding, and for networks that normalise over the batch: each part has its own
    statistics.
    """

    def __init__(self, learner: Learner, plan: TrainConfig) -> None:
        self._learner = learner
        self._part_size, self._max_norm = plan.micro_batch_size, plan.max_gradient_norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, batch: Dataset) -> float:
        loss = self._add_parts(batch)
        if self._max_norm is not None:
            clip_gradients(self._learner, self._max_norm)
        return loss

    def _add_parts(self, batch: Dataset) -> float:
        count = 1 if self._part_size is None else math.ceil(len(batch) / self._part_size)
        if count <= 1:
            return self._learner.gradient(batch)
        return average_parts(
            self._learner.gradients, len(batch), count, lambda rows: self._learner.gradient(batch.take(rows))
        )


def bound_learner(learner: Learner, plan: TrainConfig) -> Learner:
    """Returns a learner that makes gradients as a plan says; itself where that says nothing of them.

    Raises:
        ConfigError: as of `check_parts`.
    """
    if plan.micro_batch_size is None and plan.max_gradient_norm is None:
        return learner
    check_parts(getattr(learner, "loss", None), plan.micro_batch_size)
    return cast("Learner", _BoundedLearner(learner, plan))


def check_parts(loss: object, micro_batch_size: object) -> None:
    """Checks that the loss of a batch is the mean of its parts'.

    Raises:
        ConfigError: it tells the examples of a batch apart, and a part would have others than the batch.
    """
    if isinstance(loss, Contrastive) and micro_batch_size is not None:
        raise ConfigError(
            f"strategy.micro_batch_size = {micro_batch_size!r:.60} does not go with the loss {loss.name}, which "
            "compares all examples of a batch; leave it out"
        )


def clip_gradients(learner: Learner, max_norm: float) -> None:
    """Shortens the gradient of all trained tensors together to a norm; one that is not finite stays as it is.

    Source: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks, ICML 2013, algorithm 1.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norm = _compute_norm(learner, 1.0)
        if math.isinf(norm):  # an entry above 1.8e19 has no square in float32
            norm = _compute_norm(learner, SMALL) / SMALL
    if max_norm < norm < math.inf:
        for gradient in learner.gradients.values():
            gradient *= max_norm / norm  # noqa: PLW2901 in place: the learner's own array


def _compute_norm(learner: Learner, factor: float) -> float:
    """Returns the norm of the gradient times a factor."""
    total = 0.0
    for gradient in learner.gradients.values():
        scaled = gradient if factor == 1.0 else factor * gradient
        total += float((scaled * scaled).sum())
    return math.sqrt(total)


def set_precision(learner: Learner, plan: TrainConfig) -> None:
    """Makes a learner compute in a plan's precision; those in NumPy and by compiled tasks compute in float32 alone.

    Raises:
        TaskError: the accelerator does not have it.
    """
    change = getattr(learner, "set_precision", None)
    if change is not None:
        change(plan.precision or "float32")
