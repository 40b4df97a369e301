"""Builder of an ONNX graph, and torch modules as its nodes; imports onnx and torch on first use.

Learners add their model, and a task's `prepare` may add itself, so that the file takes a shard's raw inputs and a
device needs no code of the task.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from edgefl.core.errors import TaskError, format_install_command
from edgefl.core.types import Array, Inputs
from edgefl.tasks.registry import import_extra, import_torch

if TYPE_CHECKING:
    import torch

OPSET = 18
"""The default of torch's exporter, so nothing has to be translated; every onnxruntime since 1.14 reads it."""
ML_DOMAIN, ML_OPSET = "ai.onnx.ml", 3
"""Of trees; every onnxruntime that reads the other."""
IR_VERSION = 8
"""Of ONNX 1.12, the first that supports this opset."""

_BUILDER_ATTRIBUTE = "onnx_steps"

NodeBuilder = Callable[["OnnxGraph", str], str]
"""(graph, name of a value) -> name of the value after the added steps."""
Sources = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of one example of each input of a graph, by name."""
Prepare = TypeVar("Prepare", bound=Callable[[Array], Array])

INPUTS, LOGITS = "inputs", "logits"
PREPARE, MODEL = "prepare", "model"

_INPUT_NAME, _OUTPUT_NAME = "module_features", "module_logits"


class OnnxGraph:
    """Nodes and constants of a graph, in the order of addition.

    `stage` is the name prefix of new nodes: those of `PREPARE` compute features, and are never quantised.
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

    def add_constant(self, value: Any, *, dtype: str = "float32", name: str | None = None) -> str:
        """Adds a tensor stored in the file, and returns its name."""
        name = name or f"constant_{len(self.constants)}"
        array = np.ascontiguousarray(np.asarray(value, dtype=dtype)) if np.ndim(value) else np.asarray(value, dtype)
        self.constants[name] = self.onnx.numpy_helper.from_array(array, name=name)
        return name

    def build_model(self, *, sources: Sources, result: str, num_classes: int) -> Any:
        """Returns the ModelProto from its inputs by name, [n, *shape] each, to float32 `logits` [n, num_classes].

        Raises:
            TaskError: the graph is invalid for ONNX, or has a value with the name of an input.
        """
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        values = {*self.constants, LOGITS, *(name for node in self.nodes for name in node.output)}
        if taken := sorted(values.intersection(sources)):
            raise TaskError(
                f"input {taken[0]!r} has the name of another value of the ONNX graph; give it another name"
            )
        last = helper.make_node("Identity", [result], [LOGITS], name="name_logits")
        graph = helper.make_graph(
            [*self.nodes, last],
            "edgefl",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["n", *shape])
                for name, (dtype, shape) in sources.items()
            ],
            [helper.make_tensor_value_info(LOGITS, kind, ["n", num_classes])],
            initializer=list(self.constants.values()),
        )
        versions = {"": OPSET, **({ML_DOMAIN: ML_OPSET} if any(node.domain for node in self.nodes) else {})}
        onnx_model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in versions.items()],
            producer_name="edgefl",
            ir_version=IR_VERSION,
        )
        try:
            self.onnx.checker.check_model(onnx_model, full_check=True)
        except (self.onnx.checker.ValidationError, self.onnx.shape_inference.InferenceError) as error:
            raise TaskError(f"the model makes no valid ONNX graph: {get_first_line(error)}") from error
        return onnx_model


def register_node_builder(builder: NodeBuilder) -> Callable[[Prepare], Prepare]:
    """Registers the ONNX node builder of a task's `prepare`."""

    def mark(prepare: Prepare) -> Prepare:
        setattr(prepare, _BUILDER_ATTRIBUTE, builder)
        return prepare

    return mark


def get_node_builder(prepare: object) -> NodeBuilder | None:
    """Returns the node builder of a `prepare`; None without one."""
    builder: NodeBuilder | None = getattr(prepare, _BUILDER_ATTRIBUTE, None)
    return builder


def make_scaling(factor: float, *, shape: tuple[int, ...] | None = None) -> NodeBuilder:
    """Returns the steps that multiply and, where a shape is given, reshape each example to it."""

    def steps(graph: OnnxGraph, value: str) -> str:
        value = graph.add("Mul", value, graph.add_constant(np.float32(factor)))
        return value if shape is None else add_reshape(graph, value, shape)

    return steps


def add_reshape(graph: OnnxGraph, value: str, shape: tuple[int, ...]) -> str:
    """Returns the value with examples of this shape."""
    return graph.add("Reshape", value, graph.add_constant([-1, *shape], dtype="int64"))


def add_reduction(graph: OnnxGraph, operator: str, value: str, axis: int) -> str:
    """Returns `ReduceMean`, `ReduceMax`, … over one axis, which stays with one entry."""
    return graph.add(operator, value, graph.add_constant([axis], dtype="int64"), keepdims=1)


def add_standard_deviation(graph: OnnxGraph, centred: str, axis: int) -> str:
    """Returns the standard deviation of a value with mean 0 along an axis."""
    squares = graph.add("Mul", centred, centred)
    return graph.add("Sqrt", add_reduction(graph, "ReduceMean", squares, axis))


def import_onnx() -> Any:
    """Returns onnx, with the modules that are used here.

    Raises:
        TaskError: it is not installed.
    """
    purpose, command = "an export to ONNX needs onnx", format_install_command("onnx")
    for module in ("checker", "helper", "numpy_helper", "shape_inference"):
        import_extra(f"onnx.{module}", purpose, command)
    return import_extra("onnx", purpose, command)


@contextlib.contextmanager
def suppress_export_logs() -> Iterator[None]:
    """Keeps exporters' remarks on internals and missing tools out of the log."""
    original_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(original_level)


def get_first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def add_torch_module(module: torch.nn.Module, graph: OnnxGraph, features: str, example: Inputs) -> str:
    """Adds the module's nodes and weights to the graph and returns the name of its logits.

    Args:
        module: maps a float32 batch of any size to logits.
        graph: the graph to extend.
        features: the module's input value; inputs by name are those values.
        example: one batch of features, for their types and shapes.

    Raises:
        TaskError: onnxscript is missing, or torch cannot export this module.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise TaskError(
            "an export of a torch model to ONNX needs onnxscript, which is not installed; "
            f"install it with: {format_install_command('onnxscript')}"
        )
    exported = _export_module(module.eval(), example)
    named = {f"{_INPUT_NAME}_{name}": name for name in example} if isinstance(example, Mapping) else {}
    values = named or {_INPUT_NAME: features}
    if exported.functions or any(node.domain for node in exported.graph.node):
        raise TaskError("torch's exporter left operators in the graph that are not of ONNX itself")
    for tensor in exported.graph.initializer:
        graph.constants[tensor.name] = tensor
    for node in exported.graph.node:
        node.input[:] = [values.get(name, name) for name in node.input]
        graph.nodes.append(node)
    return _OUTPUT_NAME


def _export_module(module: torch.nn.Module, example: Inputs) -> Any:
    backend = import_torch()
    is_named = isinstance(example, Mapping)
    named: Mapping[str, Array] = (
        example if isinstance(example, Mapping) else {"": np.asarray(example, dtype=np.float32)}
    )
    # Two examples: from one, torch would infer a constant batch size.
    batches = {name: backend.from_numpy(np.resize(array, (2, *array.shape[1:]))) for name, array in named.items()}
    sizes = {name: {0: backend.export.Dim("n")} for name in named}
    with suppress_export_logs():
        try:
            program = backend.onnx.export(
                module,
                () if is_named else tuple(batches.values()),
                kwargs=batches if is_named else None,
                dynamo=True,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
                input_names=[f"{_INPUT_NAME}_{name}" for name in named] if is_named else [_INPUT_NAME],
                output_names=[_OUTPUT_NAME],
                dynamic_shapes=sizes if is_named else tuple(sizes.values()),
            )
        except Exception as error:  # the exporter passes on any exception of a user's module
            raise TaskError(f"torch cannot export this model to ONNX: {get_first_line(error)}") from error
    return program.model_proto
