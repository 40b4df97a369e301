"""Results of analyses as models: what trees, clusters, normal distributions or components say of an example.

Sums are in double precision, here as in the ONNX graph: inputs are not standardised, and may lie far from zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array, Dataset, Inputs, Task, Tensors
from edgefl.tasks.analyses.analysis import RESULT, read_result
from edgefl.tasks.analyses.columns import list_classes, list_input_columns
from edgefl.tasks.analyses.linear_regression import find_layer
from edgefl.tasks.analyses.trees.ensemble import LOGISTIC, NO_SPLIT, add_up_trees, to_trees
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.onnx_graph import ML_DOMAIN, OnnxGraph
from edgefl.tasks.preparation import Prepare, prepare_inputs, to_features

_FLOAT, _DOUBLE = 1, 11
"""Numbers of ONNX's types."""
MIN_LOG_PROBABILITY = -1e30
"""Double has less, float32 has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultModel(ABC):
    """A result that answers for examples.

    Attributes:
        task: whose examples it answers for.
        classes: names of the outputs, which are logits; none where they are values.
        has_targets: whether the targets of the task say how good an answer is.
        prepare: turns raw inputs into features.
    """

    task: Task
    classes: tuple[str, ...]
    has_targets: bool
    prepare: Prepare = to_features

    def logits(self, inputs: Inputs) -> Array:
        """Returns the outputs for raw inputs, [n, outputs] float32."""
        features = np.asarray(prepare_inputs(self.prepare, inputs))
        return self.compute(features.reshape(len(features), -1)).astype(np.float32)

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        """Returns mean loss, of classes the cross-entropy, and accuracy, NaN without classes, by the task's targets.

        Raises:
            TaskError: these say nothing of its answers.
        """
        loss = CrossEntropy() if self.classes else find_loss(self.task)
        if not self.has_targets or loss is None:
            raise TaskError(
                f"no target of task {self.task.name} says how good its clusters or components are; export them, and "
                "see edgefl run result"
            )
        outputs = self.logits(data.inputs)
        value, _ = loss.compute_mean(outputs, loss.convert_targets(data.targets, outputs.shape), data.weights)
        return value, loss.count_right(outputs, data.targets) / max(1, len(data))

    @abstractmethod
    def compute(self, features: Array) -> Array:
        """Returns the outputs for features, [n, outputs] of [n, numbers of an example]."""

    @abstractmethod
    def draw(self, graph: OnnxGraph, features: str, example: Inputs) -> str:
        """Adds it to an ONNX graph and returns the name of its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticModel(ResultModel):
    """Outputs y² squares + y linear + bias of y = x - offset; as logarithms of probabilities where it has classes.

    Attributes:
        places: of the columns x among the numbers of an example.
        offset: [columns].
        linear: [columns, outputs].
        bias: [outputs].
        squares: [columns, outputs], None for none.
    """

    places: Sequence[int]
    offset: Array
    linear: Array
    bias: Array
    squares: Array | None = None

    def compute(self, features: Array) -> Array:
        values = features[:, self.places].astype(np.float64) - self.offset
        outputs: Array = values @ self.linear + self.bias
        if self.squares is not None:
            outputs += (values * values) @ self.squares
        if self.classes:
            outputs -= outputs.max(axis=1, keepdims=True)
            outputs -= np.log(np.exp(outputs).sum(axis=1, keepdims=True))
            outputs = np.maximum(outputs, MIN_LOG_PROBABILITY)
        return outputs

    def draw(self, graph: OnnxGraph, features: str, example: Inputs) -> str:  # noqa: ARG002 its shape is not needed
        values = graph.add("Sub", add_columns(graph, features, self.places), add_double(graph, self.offset))
        outputs = graph.add("MatMul", values, add_double(graph, self.linear))
        outputs = graph.add("Add", outputs, add_double(graph, self.bias))
        if self.squares is not None:
            squared = graph.add("MatMul", graph.add("Mul", values, values), add_double(graph, self.squares))
            outputs = graph.add("Add", outputs, squared)
        if self.classes:
            outputs = graph.add("LogSoftmax", outputs, axis=1)
            outputs = graph.add("Max", outputs, add_double(graph, MIN_LOG_PROBABILITY))
        return graph.add("Cast", outputs, to=_FLOAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreesModel(ResultModel):
    """Gradient-boosted trees: a value, or the logits of two classes, which are half the sum of leaves, less and more.

    Attributes:
        result: of the analysis.
    """

    result: Mapping[str, Any]

    def compute(self, features: Array) -> Array:
        sums = add_up_trees(self.result, features)[:, None]
        return sums * np.array([[-0.5, 0.5]]) if self.classes else sums

    def draw(self, graph: OnnxGraph, features: str, example: Inputs) -> str:  # noqa: ARG002 as above
        nodes = _list_nodes(self.result)
        leaves = [node for node in nodes if node.is_leaf]

        def make_tensor(name: str, values: Sequence[float]) -> Any:
            return graph.onnx.helper.make_tensor(name, _DOUBLE, [len(values)], values)

        sums = graph.add(
            "TreeEnsembleRegressor",
            add_columns(graph, features, self.result["places"]),
            domain=ML_DOMAIN,
            n_targets=1,
            base_values_as_tensor=make_tensor("base_values", [self.result["base"]]),
            nodes_treeids=[node.tree for node in nodes],
            nodes_nodeids=[node.number for node in nodes],
            nodes_modes=["LEAF" if node.is_leaf else "BRANCH_LT" for node in nodes],
            nodes_featureids=[max(0, node.column) for node in nodes],
            nodes_values_as_tensor=make_tensor("edges", [node.edge for node in nodes]),
            nodes_truenodeids=[0 if node.is_leaf else 2 * node.number + 1 for node in nodes],
            nodes_falsenodeids=[0 if node.is_leaf else 2 * node.number + 2 for node in nodes],
            target_treeids=[leaf.tree for leaf in leaves],
            target_nodeids=[leaf.number for leaf in leaves],
            target_ids=[0] * len(leaves),
            target_weights_as_tensor=make_tensor("leaves", [leaf.value for leaf in leaves]),
        )
        return graph.add("MatMul", sums, graph.add_constant([[-0.5, 0.5]])) if self.classes else sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node of a tree that an example can reach; a value below `edge` in `column` goes left."""

    tree: int
    number: int
    column: int
    edge: float
    value: float

    @property
    def is_leaf(self) -> bool:
        return self.column == NO_SPLIT


def find_result_model(task: Task, model: Tensors) -> ResultModel | None:
    """Returns the model that a result is; None where the tensors are those of a model of the task.

    Raises:
        TaskError: the result answers for no example, or its columns are not all inputs.
    """
    if set(model) != {RESULT} or any(spec.name == RESULT for spec in task.shapes()):
        return None
    found = read_result(model)
    for key, make in _BY_KEY.items():
        if key in found:
            return make(task, found)
    raise TaskError("the result is of no analysis whose answer is a model, or of a run that has only begun")


def add_columns(graph: OnnxGraph, features: str, places: Sequence[int]) -> str:
    """Returns the name of columns of an example, [n, columns] in double precision."""
    flat = graph.add("Flatten", features, axis=1)
    columns = graph.add("Gather", flat, graph.add_constant(list(places), dtype="int64"), axis=1)
    return graph.add("Cast", columns, to=_DOUBLE)


def add_double(graph: OnnxGraph, value: Array | float) -> str:
    return graph.add_constant(value, dtype="float64")


def _make_trees(task: Task, result: Mapping[str, Any]) -> TreesModel:
    if not result["num_trees"]:
        raise TaskError("the result has no whole tree yet; export it when its run has gone on")
    classes = list_classes(task) if result["objective"] == LOGISTIC else ()
    return TreesModel(task=task, classes=classes, has_targets=True, result=result)


def _list_nodes(result: Mapping[str, Any]) -> list[_Node]:
    """Returns the nodes of all whole trees, each tree's root first."""
    trees, edges = to_trees(result), result["edges"]
    inner, nodes = trees.columns.shape[1], list[_Node]()
    for tree in range(result["num_trees"]):
        numbers = [0]
        for number in numbers:
            column = int(trees.columns[tree, number]) if number < inner else NO_SPLIT
            is_leaf = column == NO_SPLIT
            edge = 0.0 if is_leaf else float(edges[column][int(trees.bins[tree, number])])
            value = float(trees.values[tree, number])
            nodes.append(_Node(tree=tree, number=number, column=column, edge=edge, value=value))
            numbers += [] if is_leaf else [2 * number + 1, 2 * number + 2]
    return nodes


def _make_clusters(task: Task, result: Mapping[str, Any]) -> QuadraticModel:
    """Returns equal normal distributions around the centres, of the variance that the inertia says."""
    if result.get("counts") is None:
        raise TaskError("the first round of k-means finds no clusters; let its run take more")
    centres, count = np.array(result["centres"]), sum(result["counts"])
    variance = result["inertia"] / (count * centres.shape[1]) or 1.0
    offset = centres.mean(axis=0)
    moved = centres - offset
    return QuadraticModel(
        task=task,
        classes=tuple(f"cluster-{number}" for number in range(len(centres))),
        has_targets=False,
        places=_find_places(task, result["columns"]),
        offset=offset,
        linear=moved.T / variance,
        bias=-0.5 * (moved * moved).sum(axis=1) / variance,
    )


def _make_components(task: Task, result: Mapping[str, Any]) -> QuadraticModel:
    components = np.array(result["components"])
    return QuadraticModel(
        task=task,
        classes=(),
        has_targets=False,
        places=_find_places(task, result["columns"]),
        offset=np.array(result["mean"]),
        linear=components.T,
        bias=np.zeros(len(components)),
    )


def _make_distributions(task: Task, result: Mapping[str, Any]) -> QuadraticModel:
    """Returns log p(class) + log p(features | class), less what all classes share."""
    priors, means, variances = (np.array(result[name]) for name in ("priors", "means", "variances"))
    if not (variances > 0).all():
        raise TaskError("a feature does not vary within a class; strategy.smoothing above 0 makes a model of it")
    offset = priors @ means
    moved = means - offset
    spread = moved * moved / variances + np.log(variances)
    return QuadraticModel(
        task=task,
        classes=tuple(result["classes"]),
        has_targets=True,
        prepare=find_layer(task, "naive-bayes").model.prepare,
        places=range(means.shape[1]),
        offset=offset,
        linear=(moved / variances).T,
        bias=np.log(priors) - 0.5 * spread.sum(axis=1),
        squares=(-0.5 / variances).T,
    )


def _find_places(task: Task, columns: Sequence[str]) -> list[int]:
    """Returns the places of input columns among the numbers of an example.

    Raises:
        TaskError: one is no input.
    """
    places = {name: place for place, name in enumerate(list_input_columns(task).names)}
    if missing := [name for name in columns if name not in places]:
        raise TaskError(
            f"column {missing[0]!r} of the result is no input of task {task.name}, and a board that asks has no "
            "target yet; name the inputs in strategy.columns"
        )
    return [places[name] for name in columns]


_BY_KEY = {
    "objective": _make_trees,
    "centres": _make_clusters,
    "components": _make_components,
    "priors": _make_distributions,
}
"""What makes a model of a result that has this key."""
