"""A graph of ONNX nodes while it is being drawn; imports onnx only when a drawing begins.

Learners draw their model, and a task's `prepare` may draw itself, so that the file takes what a shard holds and a
board needs no code of the task.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from edgefl.errors import TaskError, install_line
from edgefl.types import Array

OPSET = 18
"""What torch's exporter writes by itself, so nothing has to be translated; every onnxruntime since 1.14 reads it."""
IR_VERSION = 8
"""Of ONNX 1.12, the first that may hold this opset."""

_MARK = "onnx_steps"

Steps = Callable[["Graph", str], str]
"""(graph, name of a value) -> name of the value after some steps that were added to the graph."""
Prepare = TypeVar("Prepare", bound=Callable[[Array], Array])


class Graph:
    """Nodes and constants in the order in which they were added.

    `stage` is what the names of new nodes begin with: those of `PREPARE` compute features, and are never quantised.
    """

    def __init__(self) -> None:
        self.onnx = import_onnx()
        self.stage = PREPARE
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node and returns the name of its only output."""
        name = f"{self.stage}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, *, dtype: str = "float32", name: str | None = None) -> str:
        """Adds a tensor that lies in the file, and returns its name."""
        name = name or f"constant_{len(self.constants)}"
        array = np.ascontiguousarray(np.asarray(value, dtype=dtype)) if np.ndim(value) else np.asarray(value, dtype)
        self.constants[name] = self.onnx.numpy_helper.from_array(array, name=name)
        return name

    def model(self, *, source: str, shape: tuple[int, ...], result: str, num_classes: int) -> Any:
        """Returns the ModelProto from float32 `inputs` [n, *shape], the value `source`, to `logits` [n, num_classes].

        Raises:
            TaskError: the graph is none that ONNX allows.
        """
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        last = helper.make_node("Identity", [result], [LOGITS], name="name_logits")
        graph = helper.make_graph(
            [*self.nodes, last],
            "edgefl",
            [helper.make_tensor_value_info(source, kind, ["n", *shape])],
            [helper.make_tensor_value_info(LOGITS, kind, ["n", num_classes])],
            initializer=list(self.constants.values()),
        )
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="edgefl", ir_version=IR_VERSION
        )
        try:
            self.onnx.checker.check_model(made, full_check=True)
        except (self.onnx.checker.ValidationError, self.onnx.shape_inference.InferenceError) as error:
            raise TaskError(f"the model makes no valid ONNX graph: {_first_line(error)}") from error
        return made


INPUTS, LOGITS = "inputs", "logits"
PREPARE, MODEL = "prepare", "model"


def drawn_as(steps: Steps) -> Callable[[Prepare], Prepare]:
    """Marks a task's `prepare` with the ONNX nodes that compute the same."""

    def mark(prepare: Prepare) -> Prepare:
        setattr(prepare, _MARK, steps)
        return prepare

    return mark


def steps_of(prepare: object) -> Steps | None:
    """Returns how a `prepare` is drawn, None where nobody has said it."""
    found: Steps | None = getattr(prepare, _MARK, None)
    return found


def scaled(factor: float, *, shape: tuple[int, ...] | None = None) -> Steps:
    """Returns the steps that multiply and, where a shape is given, reshape each example to it."""

    def steps(graph: Graph, value: str) -> str:
        value = graph.add("Mul", value, graph.constant(np.float32(factor)))
        return value if shape is None else reshaped(graph, value, shape)

    return steps


def reshaped(graph: Graph, value: str, shape: tuple[int, ...]) -> str:
    """Returns the value with examples of this shape."""
    return graph.add("Reshape", value, graph.constant([-1, *shape], dtype="int64"))


def reduced(graph: Graph, operator: str, value: str, axis: int, *, keep: bool = True) -> str:
    """Returns `ReduceMean`, `ReduceMax`, … over one axis."""
    return graph.add(operator, value, graph.constant([axis], dtype="int64"), keepdims=int(keep))


def deviation(graph: Graph, centred: str, axis: int, *, keep: bool = True) -> str:
    """Returns the standard deviation of what has the mean 0 along an axis."""
    squares = graph.add("Mul", centred, centred)
    return graph.add("Sqrt", reduced(graph, "ReduceMean", squares, axis, keep=keep))


def import_onnx() -> Any:
    """Returns onnx.

    Raises:
        TaskError: it is not installed.
    """
    try:
        import onnx  # noqa: PLC0415 an extra, and slow to load
        import onnx.checker  # noqa: PLC0415 likewise
        import onnx.helper  # noqa: PLC0415 likewise
        import onnx.numpy_helper  # noqa: PLC0415 likewise
        import onnx.shape_inference  # noqa: PLC0415 likewise
    except ImportError as error:
        raise TaskError(
            f"an export to ONNX needs onnx, which cannot be imported ({error}); "
            f"install it with: {install_line('onnx')}"
        ) from None
    return onnx


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps remarks of exporters about their own insides, and about tools that nobody has, out of the log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
