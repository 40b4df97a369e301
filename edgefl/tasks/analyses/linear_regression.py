"""Linear and ridge regression in one round: boards send X'X and X'y, exactly, and the coordinator solves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from edgefl.core.analyses import BoardSums, LinearRegressionSettings
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.core.types import Array, Dataset, ModelSpec, Task, Tensors
from edgefl.tasks.analyses.analysis import Analysis, make_exact_spec
from edgefl.tasks.analyses.columns import list_classes
from edgefl.tasks.analyses.moments import (
    centre_products,
    check_values,
    find_product_fault,
    read_matrix,
    sum_cross_products,
    to_fractions,
)
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.losses.value_losses import Quantile, Reconstruction
from edgefl.tasks.metrics.exact_sums import WIDTH, carry_on

MAX_FEATURES = 256
MAX_PRODUCTS = 1 << 18
"""Features x features x outputs: so many products of fractions in each exact residual take seconds."""
NUM_REFINEMENTS = 2
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The one layer of a task's model: its tensors, and what turns raw inputs into features."""

    weight: str
    bias: str
    num_features: int
    num_outputs: int
    model: DenseModel
    spec: ModelSpec

    def read_features(self, data: Dataset) -> Array:
        """Returns the features of examples, [n, num_features] float64."""
        if not len(data):
            return np.zeros((0, self.num_features))
        features: Array = self.model.prepare(data.inputs).reshape(len(data), -1).astype(np.float64)
        check_values(features, "features")
        return features

    def make_tensors(self, weight: Array, bias: Array) -> dict[str, Array]:
        """Returns the model of a [outputs, features] weight and a bias, in single precision."""
        return {self.weight: weight.astype(np.float32), self.bias: bias.astype(np.float32)}


def find_layer(task: Task, analysis: str) -> Layer:
    """Returns the one layer of a task's model.

    Raises:
        ConfigError: its model has another form, or too many features.
    """
    model = getattr(task, "model", None)
    if not isinstance(model, DenseModel) or len(model.sizes) != 2:
        found = f"DenseModel(sizes={model.sizes})" if isinstance(model, DenseModel) else type(model).__name__
        raise ConfigError(
            f"{analysis} needs a task whose model is one layer in NumPy, such as DenseModel(sizes=(10, 1)) or "
            f"model = 'logistic'; that of task {task.name} is {found}"
        )
    spec = task.shapes()
    return Layer(
        weight=spec[0].name,
        bias=spec[1].name,
        num_features=model.sizes[0],
        num_outputs=model.sizes[1],
        model=model,
        spec=spec,
    )


def _check_size(task: Task, layer: Layer) -> None:
    """Checks that a layer is solved within seconds; raises ConfigError."""
    features, outputs = layer.num_features, layer.num_outputs
    for count, what in ((features, "features"), (outputs, "outputs")):
        if count > MAX_FEATURES:
            raise ConfigError(f"linear-regression takes at most {MAX_FEATURES} {what}, task {task.name} has {count}")
    if features * features * outputs > MAX_PRODUCTS:
        raise ConfigError(
            f"linear-regression takes at most {MAX_PRODUCTS} features x features x outputs, task {task.name} has "
            f"{features} x {features} x {outputs} = {features * features * outputs}"
        )


class LinearRegression(Analysis):
    """The least squares of a task's one layer, with a penalty on its weights where there is one."""

    is_of_whole_shard = False
    has_task_model = True

    def __init__(self, task: Task, settings: LinearRegressionSettings) -> None:
        """Raises ConfigError: the task has another model, or targets that are no values, or is too large."""
        self._task, self._settings, self._layer = task, settings, find_layer(task, "linear-regression")
        if list_classes(task):
            raise ConfigError(
                f"linear-regression needs targets that are values; those of task {task.name} are classes"
            )
        loss = find_loss(task)
        if isinstance(loss, Quantile | Reconstruction | MultiTask):
            raise ConfigError(
                f"linear-regression needs a target for each output, and finds means; the loss of task {task.name} is "
                f"{loss.name}, which rounds of training lower"
            )
        _check_size(task, self._layer)
        size = self._layer.num_features + self._layer.num_outputs + 1
        self.request_spec = self._layer.spec
        self.sums_spec = (make_exact_spec("products", size, size, WIDTH),)

    def make_model(self) -> dict[str, Array]:
        return self._task.init(0)

    def make_request(self, model: Tensors) -> dict[str, Array]:
        return {spec.name: np.asarray(model[spec.name]) for spec in self.request_spec}

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:  # noqa: ARG002 the same in every round
        """Returns the sums of products of features, targets and a column of ones, each example by its weight."""
        size = self.sums_spec[0].shape[0]
        if len(data) < self._settings.min_group:
            return {"products": np.zeros((size, size, WIDTH), np.int64)}
        targets = data.targets.reshape(len(data), self._layer.num_outputs).astype(np.float64)
        check_values(targets, "targets")
        columns = np.hstack([self._layer.read_features(data), targets, np.ones((len(data), 1))])
        weighted = columns if data.weights is None else columns * data.weights.astype(np.float64)[:, None]
        return {"products": sum_cross_products(weighted, columns)}

    def find_fault(self, sums: Tensors) -> str | None:
        return find_product_fault(np.asarray(sums["products"]), is_weighted=True)

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:  # noqa: ARG002 one round is all
        """Returns the layer that minimises the sum of squared errors and `ridge` times that of squared weights.

        Raises:
            RunFailedError: no board has enough examples.
        """
        weight, bias = solve_ridge(add_products(boards), self._layer.num_features, self._settings.ridge)
        return self._layer.make_tensors(weight, bias)


def add_products(boards: Iterable[BoardSums]) -> Array:
    """Returns the exact sums of products over all boards, [p, p] fractions.

    Raises:
        RunFailedError: no board has enough examples.
    """
    total: Array | None = None
    for board in boards:
        part = np.asarray(board.sums["products"])
        total = part.copy() if total is None else carry_on(total + part)
    products = np.zeros((1, 1), object) if total is None else read_matrix(total)
    if not products[-1, -1]:
        raise RunFailedError("no board has as many examples as strategy.min_group says")
    return products


def solve_ridge(products: Array, num_features: int, ridge: float) -> tuple[Array, Array]:
    """Returns weight, [outputs, features], and bias, [outputs], in double precision.

    Where features depend on each other and there is no penalty, the weight is the shortest of those that fit, with
    features about in units of their deviations.

    Args:
        products: [p, p] fractions, sums of products of features, targets and ones.
        num_features: the first columns.
        ridge: penalty on squared weights; the bias has none.
    """
    _, means, centred = centre_products(products)
    penalised = centred[:num_features, :num_features] + np.diag([Fraction(ridge)] * num_features)
    right = centred[:num_features, num_features:]
    inverse = _invert(penalised.astype(float))
    weight = np.zeros(right.shape)
    for _ in range(1 + NUM_REFINEMENTS):  # with exact residuals
        weight = weight + inverse @ (right - penalised @ to_fractions(weight)).astype(float)
    bias = means[num_features:] - means[:num_features] @ to_fractions(weight)
    return weight.T, bias.astype(float)


def _invert(matrix: Array) -> Array:
    """Returns the pseudo-inverse of a symmetric matrix that is positive or zero in every direction.

    Its rows and columns are scaled before, so that the units of features do not matter.
    """
    diagonal = np.diagonal(matrix)
    scale = np.where(diagonal > 0, 1.0, 0.0)
    scale[diagonal > 0] = 2.0 ** np.round(-0.5 * np.log2(diagonal[diagonal > 0]))
    scaled = scale[:, None] * matrix * scale[None, :]
    return scale[:, None] * np.linalg.pinv(scaled, rcond=len(matrix) * _EPSILON, hermitian=True) * scale[None, :]
