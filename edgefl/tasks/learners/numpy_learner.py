"""Training without torch: fully connected networks with any loss by name, backpropagated by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.named_arrays import NamedArrays
from edgefl.core.types import Array, Dataset, Inputs, ModelSpec, Tensor, TensorKind, Tensors
from edgefl.tasks.learners import networks
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.registry import LossLike, make_loss, select_targets
from edgefl.tasks.losses.value_losses import Reconstruction
from edgefl.tasks.onnx_graph import OnnxGraph
from edgefl.tasks.preparation import Prepare, call_prepare, to_features
from edgefl.tasks.registry import validate_accelerator

EVALUATION_BATCH_SIZE = 1024
GELU_FACTOR, GELU_CUBE = float(np.sqrt(2 / np.pi)), 0.044715
"""Of the approximation by tanh in Hendrycks, Gimpel, Gaussian Error Linear Units, 2016."""
CLIP_ROUNDING = 1.0 - 2.0**-18
"""Factor of clipped gradients, so that rounding to single precision leaves none above the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A function between layers.

    `compute` maps sums to values; `derive` returns its slope from sums and values; `draw` adds it to an ONNX graph.
    """

    compute: Callable[[Array], Array]
    derive: Callable[[Array, Array], Array]
    draw: Callable[[OnnxGraph, str], str]


def _compute_sigmoid(sums: Array) -> Array:
    values: Array = 0.5 * (1.0 + np.tanh(0.5 * sums))  # exp would overflow
    return values


def _compute_gelu_gate(sums: Array) -> Array:
    gate: Array = np.tanh(GELU_FACTOR * (sums + GELU_CUBE * sums**3))
    return gate


def _derive_gelu(sums: Array, _values: Array) -> Array:
    gate = _compute_gelu_gate(sums)
    inner = GELU_FACTOR * (1.0 + 3.0 * GELU_CUBE * sums**2)
    slope: Array = 0.5 * (1.0 + gate) + 0.5 * sums * (1.0 - gate**2) * inner
    return slope


def _draw_gelu(graph: OnnxGraph, sums: str) -> str:
    cube = graph.add("Mul", graph.add("Mul", sums, sums), sums)
    inner = graph.add("Add", sums, graph.add("Mul", cube, graph.add_constant(np.float32(GELU_CUBE))))
    gate = graph.add("Tanh", graph.add("Mul", inner, graph.add_constant(np.float32(GELU_FACTOR))))
    half = graph.add("Mul", sums, graph.add_constant(np.float32(0.5)))
    return graph.add("Mul", half, graph.add("Add", gate, graph.add_constant(np.float32(1.0))))


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "relu": Activation(
            compute=lambda sums: np.maximum(sums, 0.0),
            derive=lambda _sums, values: values > 0.0,
            draw=lambda graph, sums: graph.add("Relu", sums),
        ),
        "tanh": Activation(
            compute=np.tanh,
            derive=lambda _sums, values: 1.0 - values**2,
            draw=lambda graph, sums: graph.add("Tanh", sums),
        ),
        "sigmoid": Activation(
            compute=_compute_sigmoid,
            derive=lambda _sums, values: values * (1.0 - values),
            draw=lambda graph, sums: graph.add("Sigmoid", sums),
        ),
        "gelu": Activation(
            compute=lambda sums: 0.5 * sums * (1.0 + _compute_gelu_gate(sums)), derive=_derive_gelu, draw=_draw_gelu
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    """A chain of fully connected layers; two sizes make a logistic regression.

    `sizes` runs from the number of features to that of outputs: classes, values or labels. `activation`, between
    layers, is one of `ACTIVATIONS`. `prepare` turns raw inputs into features; without it they are taken as they are.
    `loss` is as of `make_loss`; a task's own goes before it.
    """

    sizes: tuple[int, ...]
    prepare: Prepare = to_features
    activation: str = "relu"
    loss: LossLike = "cross-entropy"

    @property
    def num_outputs(self) -> int:
        """Outputs of an example."""
        return self.sizes[-1]

    def shapes(self) -> ModelSpec:
        layers = [
            networks.linear(f"fc{i}", outputs, inputs) for i, (inputs, outputs) in enumerate(pairwise(self.sizes), 1)
        ]
        return tuple(spec for layer in layers for spec in layer)

    def init(self, seed: int) -> dict[str, Array]:
        return networks.make_uniform_weights(self.shapes(), seed)

    def learner(
        self,
        *,
        accelerator: str = "cpu",
        threads: int | None = None,  # noqa: ARG002 BLAS takes its threads from the environment when the process starts
        loss: LossLike | None = None,
    ) -> NumpyLearner:
        """Returns a learner on the CPU, even with an accelerator: these models are too small for one."""
        validate_accelerator(accelerator)
        return NumpyLearner(self.shapes(), self.prepare, activation=self.activation, loss=loss or self.loss)


def average_parts(
    gradients: Mapping[str, Any], num_examples: int, num_parts: int, compute: Callable[[Array], float]
) -> float:
    """Fills gradients, in NumPy or torch, with their mean over a batch's equal parts, each by its share of examples.

    Args:
        gradients: which `compute` fills for a part.
        num_examples: of the batch.
        num_parts: of it.
        compute: takes the rows of a part and returns its mean loss.

    Returns:
        The mean loss of the batch.
    """
    sums: dict[str, Any] = {}
    total = 0.0
    for rows in np.array_split(np.arange(num_examples), num_parts):
        share = len(rows) / num_examples
        total += share * compute(rows)
        for name, gradient in gradients.items():
            if name in sums:
                gradient *= share  # noqa: PLW2901 in place: the learner's own array
                sums[name] += gradient
            else:
                sums[name] = share * gradient
    for name, gradient in gradients.items():
        gradient[...] = sums[name]
    return total


class ArrayLearner:
    """Tensors and gradients of a `Learner` as arrays that stay; what inherits from it computes with them."""

    def __init__(self, shapes: ModelSpec, prepare: Prepare, loss: Loss) -> None:
        self._prepare, self._loss = prepare, loss
        self._tensors = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in shapes}
        self._parameters = {
            spec.name: self._tensors[spec.name] for spec in shapes if spec.kind == TensorKind.PARAMETER
        }
        self._gradients = {name: np.zeros_like(value) for name, value in self._parameters.items()}

    @property
    def parameters(self) -> Mapping[str, Array]:
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, Array]:
        return self._gradients

    @property
    def prepare(self) -> Prepare:
        """The function from raw inputs to the network's."""
        return self._prepare

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            target, dense = find_target(name, tensor, self._tensors)
            target[...] = dense

    def read(self) -> dict[str, Array]:
        return {name: value.copy() for name, value in self._tensors.items()}

    def freeze(self, names: Collection[str], *, needed: Collection[str] = ()) -> None:
        """Gives up the gradients of tensors that are not trained, except of those `needed` for something else."""
        self._gradients = {
            name: gradient for name, gradient in self._gradients.items() if name in needed or name not in names
        }


class NumpyLearner(ArrayLearner):
    """A `Learner` over float32 arrays; its gradients are buffers that every batch overwrites."""

    def __init__(
        self, shapes: ModelSpec, prepare: Prepare, *, activation: str = "relu", loss: LossLike = "cross-entropy"
    ) -> None:
        """Starts at zero weights; `shapes` alternates weight [out, in] and bias [out], first layer first.

        Raises:
            ConfigError: there is no such loss, or it needs torch.
        """
        super().__init__(shapes, prepare, make_loss(loss))
        self._shapes, self._activation = shapes, ACTIVATIONS[activation]
        if self._loss.needs_torch:
            raise ConfigError(f"loss {self._loss.name} needs a model of torch; one in NumPy takes another loss")
        self._layers = [(spec.name, bias.name) for spec, bias in zip(shapes[::2], shapes[1::2], strict=True)]
        self._first_trained = 0

    def freeze(self, names: Collection[str], *, needed: Collection[str] = ()) -> None:
        super().freeze(names, needed=needed)
        trained = (
            number for number, layer in enumerate(self._layers) if not self._gradients.keys().isdisjoint(layer)
        )
        self._first_trained = next(trained, 0)

    def check_inputs(self, inputs: Inputs) -> None:
        """Raises a `TaskError` where raw inputs are arrays by name that no `prepare` joins to one."""
        if isinstance(inputs, NamedArrays) and len(inputs):
            self._compute_features(inputs[:1])

    def logits(self, inputs: Inputs) -> Array:
        """Returns the model's logits of raw inputs, [n, classes]."""
        return self._forward(inputs)[1][-1]

    def draw(self, graph: OnnxGraph, features: str, example: Array) -> str:  # noqa: ARG002 the shapes are known
        """Adds the model to an ONNX graph and returns the name of its logits."""
        value = graph.add("Flatten", features, axis=1)
        for weight, bias in self._layers:
            tensors = (graph.add_constant(self._parameters[name], name=name) for name in (weight, bias))
            value = graph.add("Gemm", value, *tensors, transB=1)
            if (weight, bias) != self._layers[-1]:
                value = self._activation.draw(graph, value)
        return value

    def gradient(self, batch: Dataset) -> float:
        with np.errstate(over="ignore", invalid="ignore"):  # the coordinator handles a diverged model
            return self._compute_gradient(batch, *self._forward(batch.inputs))

    def copy_in_double(self) -> NumpyLearner:
        """Returns a copy in double precision, whose inputs are features."""
        learner = copy.copy(self)
        shapes = tuple(replace(spec, dtype="float64") for spec in self._shapes)
        ArrayLearner.__init__(learner, shapes, lambda features: features, self._loss)
        learner.load(self.read())
        return learner

    def compute_input_slopes(self, batch: Dataset) -> Array:
        """Returns the gradient of the mean loss by the features, [n, size]."""
        inputs, sums = self._forward(batch.inputs)
        targets = select_targets(self._loss, batch, inputs[0], sums[-1].shape)
        delta = self._loss.compute_mean(sums[-1], targets, batch.weights)[1]
        for _, of_layer in self._iterate_deltas(inputs, sums, delta):
            delta = of_layer
        slopes: Array = delta @ self._parameters[self._layers[0][0]]
        return slopes

    def compute_features(self, inputs: Inputs) -> Array | None:
        """Returns what the first layer that is trained gets, [n, size]; None where that are the inputs themselves."""
        if not self._first_trained or isinstance(self._loss, Reconstruction):
            return None
        return self._forward(inputs)[0][self._first_trained]

    def compute_feature_gradient(self, batch: Dataset) -> float:
        """Does what `gradient` does, for a batch whose inputs are features."""
        with np.errstate(over="ignore", invalid="ignore"):
            inputs, sums = self._run_layers(batch.inputs, self._layers[self._first_trained :])
            blank: list[Array] = [inputs[0]] * self._first_trained
            return self._compute_gradient(batch, [*blank, *inputs], [*blank, *sums])

    def _compute_gradient(self, batch: Dataset, inputs: list[Array], sums: list[Array]) -> float:
        targets = select_targets(self._loss, batch, inputs[0], sums[-1].shape)
        loss, delta = self._loss.compute_mean(sums[-1], targets, batch.weights)
        self._backward(inputs, sums, delta)
        return loss

    def sum_clipped_gradients(self, batch: Dataset, clip: float) -> float:
        """Fills `gradients` with the sum of the examples' clipped gradients; see `ExampleGradients`.

        The gradient of a layer's weights by one example is an outer product, whose norm is that of its factors: none
        is ever written out.

        Source: Goodfellow, Efficient Per-Example Gradient Computations, 2015.
        """
        if not len(batch):
            for gradient in self._gradients.values():
                gradient[...] = 0.0
            return 0.0
        inputs, sums = self._forward(batch.inputs)
        targets = select_targets(self._loss, batch, inputs[0], sums[-1].shape)
        values, delta = self._loss.compute(sums[-1], targets)
        if batch.weights is not None:
            values, delta = values * batch.weights, delta * batch.weights[:, None].astype(delta.dtype)
        layers, squares = [], np.zeros(len(batch))
        for number, row in self._iterate_deltas(inputs, sums, delta):
            weight, bias = self._layers[number]
            of_row = np.square(row, dtype=np.float64).sum(axis=1)
            if weight in self._gradients:
                squares += of_row * np.square(inputs[number], dtype=np.float64).sum(axis=1)
            if bias in self._gradients:
                squares += of_row
            layers.append((number, row))
        factors = compute_clip_factors(np.sqrt(squares), clip)
        for number, row in layers:
            # Not by a factor of 0: a NaN would stay.
            kept = np.where(factors[:, None] > 0.0, row * factors[:, None], 0.0).astype(row.dtype)
            layer_inputs = np.where(factors[:, None] > 0.0, inputs[number], 0.0).astype(row.dtype)
            self._fill_gradients(number, layer_inputs, kept)
        return float(values[factors > 0.0].sum())

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        with np.errstate(over="ignore", invalid="ignore"):
            return evaluate_in_batches(data, EVALUATION_BATCH_SIZE, self._evaluate_batch)

    def _evaluate_batch(self, batch: Dataset) -> tuple[float, float]:
        inputs, sums = self._forward(batch.inputs)
        outputs = sums[-1]
        targets = select_targets(self._loss, batch, inputs[0], outputs.shape)
        loss = len(batch) * self._loss.compute_mean(outputs, targets, batch.weights)[0]
        return loss, self._loss.count_right(outputs, batch.targets)

    def _compute_features(self, inputs: Inputs) -> Array:
        features = call_prepare(self._prepare, inputs)
        if isinstance(features, Mapping):
            raise TaskError(
                f"inputs are arrays by name ({', '.join(features)}), and a model in NumPy takes one; give it a "
                "`prepare` that joins them, or take a model of torch"
            )
        return features

    def _forward(self, inputs: Inputs) -> tuple[list[Array], list[Array]]:
        """Returns the input of every layer, and the sums that it makes of it; the last sums are the logits."""
        return self._run_layers(self._compute_features(inputs).reshape(len(inputs), -1), self._layers)

    def _run_layers(self, hidden: Array, layers: Sequence[tuple[str, str]]) -> tuple[list[Array], list[Array]]:
        layer_inputs: list[Array] = []
        sums: list[Array] = []
        for weight, bias in layers:
            layer_inputs.append(hidden if not sums else self._activation.compute(sums[-1]))
            sums.append(layer_inputs[-1] @ self._parameters[weight].T)
            sums[-1] += self._parameters[bias]
        return layer_inputs, sums

    def _backward(self, layer_inputs: list[Array], sums: list[Array], delta: Array) -> None:
        for layer, of_layer in self._iterate_deltas(layer_inputs, sums, delta):
            self._fill_gradients(layer, layer_inputs[layer], of_layer)

    def _iterate_deltas(
        self, layer_inputs: list[Array], sums: list[Array], delta: Array
    ) -> Iterator[tuple[int, Array]]:
        """Yields each layer, last first, and the slopes of the loss by its sums, [n, outputs]."""
        for layer in reversed(range(len(self._layers))):
            yield layer, delta
            if layer > self._first_trained:
                slope = self._activation.derive(sums[layer - 1], layer_inputs[layer])
                delta = (delta @ self._parameters[self._layers[layer][0]]) * slope

    def _fill_gradients(self, layer: int, layer_inputs: Array, delta: Array) -> None:
        weight, bias = self._layers[layer]
        if weight in self._gradients:
            np.matmul(delta.T, layer_inputs, out=self._gradients[weight])
        if bias in self._gradients:
            np.sum(delta, axis=0, out=self._gradients[bias])


def compute_clip_factors(norms: Array, clip: float) -> Array:
    """Returns the factors by which gradients of these norms are shortened to `clip`; 0 without a finite norm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(norms > clip * CLIP_ROUNDING, clip / norms * CLIP_ROUNDING, 1.0)
    return np.where(np.isfinite(norms), factors, 0.0)


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
    data: Dataset, batch_size: int, evaluate_batch: Callable[[Dataset], tuple[float, float]]
) -> tuple[float, float]:
    """Returns mean loss and accuracy; `evaluate_batch` returns the summed loss and the number of right examples."""
    loss, correct = 0.0, 0.0
    for start in range(0, len(data), batch_size):
        batch_loss, batch_correct = evaluate_batch(data.take(slice(start, start + batch_size)))
        loss, correct = loss + batch_loss, correct + batch_correct
    return loss / max(1, len(data)), correct / max(1, len(data))
