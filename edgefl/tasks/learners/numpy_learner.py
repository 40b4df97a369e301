"""Training without torch: fully connected networks with softmax cross-entropy, backpropagated by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array, Dataset, ModelSpec, Tensor, Tensors
from edgefl.tasks.export.onnx_graph import OnnxGraph
from edgefl.tasks.learners import networks
from edgefl.tasks.registry import validate_accelerator

Prepare = Callable[[Array], Array]
"""Turns a batch of a shard's raw inputs into float32 features; raw shards are small and hash the same for ever."""

EVALUATION_BATCH_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    """A chain of fully connected layers with ReLU between them; two sizes make a logistic regression.

    `sizes` runs from the number of features to the number of classes.
    """

    sizes: tuple[int, ...]
    prepare: Prepare

    def shapes(self) -> ModelSpec:
        layers = [
            networks.linear(f"fc{i}", outputs, inputs) for i, (inputs, outputs) in enumerate(pairwise(self.sizes), 1)
        ]
        return tuple(spec for layer in layers for spec in layer)

    def init(self, seed: int) -> dict[str, Array]:
        return networks.make_uniform_weights(self.shapes(), seed)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> NumpyLearner:  # noqa: ARG002 BLAS takes its threads from the environment when the process starts
        """Returns a learner on the CPU, even with an accelerator: these models are too small for one."""
        validate_accelerator(accelerator)
        return NumpyLearner(self.shapes(), self.prepare)


class NumpyLearner:
    """A `Learner` over float32 arrays; its gradients are buffers that every batch overwrites."""

    def __init__(self, shapes: ModelSpec, prepare: Prepare) -> None:
        """Starts at zero weights; `shapes` alternates weight [out, in] and bias [out], first layer first."""
        self._prepare = prepare
        self._parameters = {spec.name: np.zeros(spec.shape, np.float32) for spec in shapes}
        self._gradients = {name: np.zeros_like(value) for name, value in self._parameters.items()}
        self._layers = [(spec.name, bias.name) for spec, bias in zip(shapes[::2], shapes[1::2], strict=True)]

    @property
    def parameters(self) -> Mapping[str, Array]:
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, Array]:
        return self._gradients

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            target, dense = find_target(name, tensor, self._parameters)
            target[...] = dense

    def read(self) -> dict[str, Array]:
        return {name: value.copy() for name, value in self._parameters.items()}

    @property
    def prepare(self) -> Prepare:
        """The function from raw inputs to features."""
        return self._prepare

    def logits(self, inputs: Array) -> Array:
        """Returns the model's logits of raw inputs, [n, classes]."""
        return self._forward(inputs)[-1]

    def draw(self, graph: OnnxGraph, features: str, example: Array) -> str:  # noqa: ARG002 the shapes are known
        """Adds the model to an ONNX graph and returns the name of its logits."""
        value = graph.add("Flatten", features, axis=1)
        for weight, bias in self._layers:
            tensors = (graph.add_constant(self._parameters[name], name=name) for name in (weight, bias))
            value = graph.add("Gemm", value, *tensors, transB=1)
            if (weight, bias) != self._layers[-1]:
                value = graph.add("Relu", value)
        return value

    def gradient(self, batch: Dataset) -> float:
        with np.errstate(over="ignore", invalid="ignore"):  # the coordinator handles a diverged model
            activations = self._forward(batch.inputs)
            loss, delta = _compute_loss_and_delta(activations.pop(), batch.labels)
            self._backward(activations, delta)
        return loss

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        with np.errstate(over="ignore", invalid="ignore"):
            return evaluate_in_batches(data, EVALUATION_BATCH_SIZE, self._evaluate_batch)

    def _evaluate_batch(self, inputs: Array, labels: Array) -> tuple[float, int]:
        logits = self._forward(inputs)[-1]
        loss = len(labels) * _compute_loss_and_delta(logits, labels)[0]
        return loss, int((logits.argmax(axis=1) == labels).sum())

    def _forward(self, inputs: Array) -> list[Array]:
        """Returns the input of every layer and, last, the logits."""
        hidden = self._prepare(inputs).reshape(len(inputs), -1)
        activations = [hidden]
        for weight, bias in self._layers:
            hidden = hidden @ self._parameters[weight].T
            hidden += self._parameters[bias]
            if (weight, bias) != self._layers[-1]:
                np.maximum(hidden, 0.0, out=hidden)
            activations.append(hidden)
        return activations

    def _backward(self, activations: list[Array], delta: Array) -> None:
        for (weight, bias), inputs in zip(reversed(self._layers), reversed(activations), strict=True):
            np.matmul(delta.T, inputs, out=self._gradients[weight])
            np.sum(delta, axis=0, out=self._gradients[bias])
            if inputs is not activations[0]:
                delta = (delta @ self._parameters[weight]) * (inputs > 0.0)


def find_target(name: str, tensor: Tensor, into: Mapping[str, Any]) -> tuple[Any, Array]:
    """Returns a model's array (NumPy's or torch's) that a tensor goes into, and the tensor as a dense array.

    Raises:
        TaskError: the model has no such tensor, or another shape.
    """
    dense = tensor if isinstance(tensor, np.ndarray) else tensor.dense()
    if name not in into:
        raise TaskError(f"the model has no tensor {name!r}, only {', '.join(into)}")
    shape = tuple(into[name].shape)
    if shape != dense.shape:
        raise TaskError(f"tensor {name} has shape {dense.shape}, the model needs {shape}")
    return into[name], dense


def evaluate_in_batches(
    data: Dataset, batch_size: int, evaluate_batch: Callable[[Array, Array], tuple[float, int]]
) -> tuple[float, float]:
    """Returns mean loss and accuracy; `evaluate_batch` returns the summed loss and the number of right classes."""
    loss, correct = 0.0, 0
    for start in range(0, len(data), batch_size):
        rows = slice(start, start + batch_size)
        batch_loss, batch_correct = evaluate_batch(data.inputs[rows], data.labels[rows])
        loss, correct = loss + batch_loss, correct + batch_correct
    return loss / max(1, len(data)), correct / max(1, len(data))


def _compute_loss_and_delta(logits: Array, labels: Array) -> tuple[float, Array]:
    """Returns the mean cross-entropy and its gradient with respect to the logits."""
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    delta: Array = np.exp(shifted)
    total = delta.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) - shifted[rows, labels]))
    delta /= total
    delta[rows, labels] -= 1.0
    delta /= len(labels)
    return loss, delta
