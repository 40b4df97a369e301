"""Batches that a compiled step is traced with and checked on: random ones, and real ones where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator

from edgefl.core.errors import TaskError
from edgefl.core.types import Array, Dataset, Task
from edgefl.tasks.compiled.artefact import INPUTS, NOISE, TARGETS, WEIGHTS
from edgefl.tasks.compiled.board.graph_task import get_prepare
from edgefl.tasks.learners.torch_learner import TorchLearner
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.registry import FunctionLoss, select_targets
from edgefl.tasks.losses.value_losses import BinaryCrossEntropy, Poisson, Reconstruction
from edgefl.tasks.onnx_graph import get_first_line

Batch = Mapping[str, Array]
"""`batch:inputs`, `batch:targets` and `batch:weights`."""

MAX_RANDOM_INPUT = 20.0
"""Larger features of random bytes are those of a task whose inputs are numbers of about 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """Makes batches for a task's network.

    Attributes:
        task: whose inputs they are.
        learner: of the task, with `prepare` and loss.
        size: examples of a batch.
        data: real examples, None for none.
    """

    task: Task
    learner: TorchLearner
    size: int
    data: Dataset | None = None

    def make_random(self, rng: Generator) -> Batch:
        """Returns a batch of random inputs and targets, whose last example has weight 0 as if it filled it up.

        Raises:
            TaskError: the shape of the task's inputs or targets is not known without data.
        """
        features = self._make_random_features(rng)
        targets = self._make_random_targets(rng, features, self.compute_output_shape(features))
        weights = rng.uniform(0.5, 2.0, self.size).astype(np.float32)
        weights[-1] = 0.0 if self.size > 1 else 1.0
        return {INPUTS: features, TARGETS: targets, WEIGHTS: weights}

    def select_real(self, rng: Generator) -> Batch | None:
        """Returns a batch of real examples; None without data."""
        if self.data is None:
            return None
        batch = self.data.take(rng.integers(len(self.data), size=self.size))
        features = self._prepare(batch.inputs)
        targets = select_targets(self.learner.loss, batch, features, self.compute_output_shape(features))
        weights = np.ones(self.size) if batch.weights is None else batch.weights
        return {INPUTS: features, TARGETS: targets, WEIGHTS: weights.astype(np.float32)}

    def compute_output_shape(self, features: Array) -> tuple[int, ...]:
        """Returns the shape of the network's outputs.

        Raises:
            TaskError: it does not take these features, or does not return one tensor.
        """
        try:
            with torch.no_grad():
                outputs = self.learner.module.eval()(torch.from_numpy(features))
        except Exception as error:  # a module may raise anything
            raise TaskError(
                f"the network does not take inputs {list(features.shape)}: {get_first_line(error)}; "
                "give real examples with --data if it takes only such"
            ) from error
        if not torch.is_tensor(outputs):
            raise TaskError(f"the network must return one tensor, got a {type(outputs).__name__}")
        return tuple(outputs.shape)

    def _prepare(self, inputs: Array) -> Array:
        features, on_boards = (
            np.ascontiguousarray(prepare(inputs), dtype=np.float32)
            for prepare in (self.learner.prepare, get_prepare(self.task))
        )
        if not np.array_equal(features, on_boards, equal_nan=True):
            raise TaskError(
                f"task {self.task.name} prepares its inputs in its learner alone, which boards do not make; give the "
                "task or its model the function as `prepare`"
            )
        return features

    def _make_random_features(self, rng: Generator) -> Array:
        if self.data is not None:
            inputs = self.data.inputs[rng.integers(len(self.data), size=self.size)]
            return self._prepare(rng.permuted(inputs, axis=0))
        shape: tuple[int, ...] | None = getattr(self.task, "input_shape", None)
        if shape is None:
            raise TaskError(
                f"task {self.task.name} does not say the shape of its inputs (input_shape); give real examples with "
                "--data"
            )
        features = self._prepare(rng.integers(256, size=(self.size, *shape)).astype(np.uint8))
        if np.abs(features).max() <= MAX_RANDOM_INPUT:
            return features
        return self._prepare(rng.standard_normal((self.size, *shape), np.float32))

    def _make_random_targets(self, rng: Generator, features: Array, outputs: tuple[int, ...]) -> Array:
        loss: Any = self.learner.loss
        if isinstance(loss, Reconstruction):
            return loss.convert_targets(features, outputs)
        if isinstance(loss, FunctionLoss) and self.data is not None:
            rows = rng.integers(len(self.data), size=self.size)
            return loss.convert_targets(self.data.targets[rows], outputs)
        has_classes = isinstance(loss, FunctionLoss) and bool(getattr(self.task, "labels", None))
        if isinstance(loss, CrossEntropy) or has_classes:
            if len(outputs) < 2:
                raise TaskError(f"with {loss.name} the network must have outputs [n, classes], got {list(outputs)}")
            return rng.integers(outputs[1], size=(outputs[0], *outputs[2:]))
        if isinstance(loss, BinaryCrossEntropy | Poisson):
            return rng.integers(2, size=outputs).astype(np.float32)
        return rng.standard_normal(outputs, np.float32)


def draw_noise(shapes: tuple[tuple[int, ...], ...], rng: Generator) -> dict[str, Array]:
    """Returns the random inputs of a training step."""
    return {f"{NOISE}{index}": rng.random(shape, np.float32) for index, shape in enumerate(shapes)}
