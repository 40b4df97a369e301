"""Consistency on examples without a label: what the model is sure of in one view is its target in a changed one.

Source: Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence, NeurIPS 2020,
equations 3 and 4. Differs from the paper: a step has as many examples without a label as with one, theirs seven times
as many; the changes of the second view are fixed ones, theirs RandAugment or CTAugment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import ConfigError
from edgefl.core.types import Dataset, Learner
from edgefl.tasks.augmentation import augment_strongly
from edgefl.tasks.local_algorithms.registry import LocalAlgorithm
from edgefl.tasks.losses.class_losses import softmax


class ConsistentAlgorithm:
    """A local algorithm on the loss plus λ times that of unlabelled examples, whose targets the model says itself.

    Args:
        inner: makes the step from the gradient of both.
        batches: of unlabelled examples, changed by the task's own hook: the first view.
        weight: λ.
        threshold: least probability of a target; examples below it count as 0 in their mean.
        rng: of the second view.
    """

    def __init__(
        self, inner: LocalAlgorithm, batches: Iterator[Dataset], *, weight: float, threshold: float, rng: Generator
    ) -> None:
        self._inner, self._batches = inner, batches
        self._weight, self._threshold, self._rng = weight, threshold, rng

    def start(self, learner: Learner) -> None:
        """Starts the inner algorithm.

        Raises:
            ConfigError: the learner says no probabilities.
        """
        if getattr(learner, "logits", None) is None:
            raise ConfigError(
                "strategy.consistency_weight needs a model in NumPy or torch that gives classes; leave it out"
            )
        self._inner.start(learner)

    def step(self, learner: Learner, batch: Dataset) -> None:
        views, model = next(self._batches), cast("Any", learner)
        probabilities = softmax(model.logits(views.inputs))
        if (is_sure := probabilities.max(axis=1) >= self._threshold).any():
            supervised = {name: gradient + 0.0 for name, gradient in learner.gradients.items()}
            learner.gradient(
                Dataset(
                    inputs=augment_strongly(views.inputs, self._rng),
                    targets=probabilities.argmax(axis=1).astype(views.targets.dtype),
                    weights=is_sure.astype(np.float32),
                )
            )
            for name, gradient in learner.gradients.items():
                gradient *= self._weight  # noqa: PLW2901 in place: the learner's own array
                gradient += supervised[name]  # noqa: PLW2901 likewise
        self._inner.step(learner, batch)

    def finish(self, learner: Learner) -> None:
        self._inner.finish(learner)
