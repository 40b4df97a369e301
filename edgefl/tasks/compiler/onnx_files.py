"""ONNX files of traced graphs: written by torch's exporter, stripped, and checked for what boards permit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import onnx
import torch
from onnxscript import ir
from onnxscript.optimizer import fold_constants_ir

from edgefl.core.errors import TaskError
from edgefl.tasks.compiled.artefact import OPSET, PERMITTED_OPERATORS
from edgefl.tasks.compiler.tracing import TracedGraph, make_program
from edgefl.tasks.compiler.translations.recurrent import expand_scans
from edgefl.tasks.compiler.translations.registry import TRANSLATIONS
from edgefl.tasks.onnx_graph import get_first_line, suppress_export_logs

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_OPERATOR_NAME = re.compile(r"aten[.:]+(\w+(?:\.\w+)?)")


def export_graph(graph: TracedGraph) -> onnx.ModelProto:
    """Returns a traced graph as an ONNX model, without what only helps its authors.

    Raises:
        TaskError: an operator has no form in ONNX, or one that boards do not permit.
    """
    with suppress_export_logs():
        try:
            program = torch.onnx.export(
                make_program(graph),
                dynamo=True,
                opset_version=OPSET,
                input_names=[*graph.inputs],
                custom_translation_table=dict(TRANSLATIONS),
                external_data=False,
                optimize=False,
                verbose=False,
            )
        except TaskError:
            raise
        except Exception as error:  # the exporter wraps whatever it meets
            raise _make_export_error(error) from error
        assert program is not None
        _simplify(program.model)
        # After that: of two outputs with one value only one would keep its name.
        for output, name in zip(program.model.graph.outputs, graph.outputs, strict=True):
            output.name = name
    model = program.model_proto
    expand_scans(model)
    _strip(model)
    check_operators(model)
    return model


def list_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Returns the names of a model's operators, those of inner graphs too, sorted."""
    return tuple(sorted({node.op_type for node in _list_nodes(model.graph)}))


def check_operators(model: onnx.ModelProto) -> None:
    """Raises a `TaskError` where a model has an operator that boards do not permit."""
    foreign = sorted({
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in _list_nodes(model.graph)
        if node.domain not in {"", "ai.onnx"} or node.op_type not in PERMITTED_OPERATORS
    })  # fmt: skip
    if foreign or model.functions:
        raise TaskError(f"the graph needs operators that boards do not permit: {', '.join(foreign) or 'functions'}")


def estimate_peak_bytes(model: onnx.ModelProto) -> int:
    """Returns the most bytes of tensors that are alive at once, when each goes after its last use."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    sizes = {value.name: _count_bytes(value) for value in (*graph.value_info, *graph.input, *graph.output)}
    kept = {value.name for value in (*graph.input, *graph.output)}
    last_use = {name: index for index, node in enumerate(graph.node) for name in node.input}
    alive: int = sum(sizes[value.name] for value in graph.input)
    alive += sum(math.prod(tensor.dims) * 4 for tensor in graph.initializer)
    peak = alive
    for index, node in enumerate(graph.node):
        alive += sum(sizes.get(name, 0) for name in node.output)
        peak = max(peak, alive)
        ended = {name for name in node.input if last_use[name] == index and name not in kept}
        alive -= sum(sizes.get(name, 0) for name in ended)
    return peak


def estimate_flops(model: onnx.ModelProto) -> int:
    """Returns the floating-point operations of products and convolutions, two for each product and its sum."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes = {value.name: _get_shape(value) for value in (*graph.value_info, *graph.input, *graph.output)}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    total = 0
    for node in graph.node:
        if node.op_type not in _PRODUCTS:
            continue
        left, right, result = (shapes.get(name, ()) for name in (node.input[0], node.input[1], node.output[0]))
        if node.op_type == "Conv":
            total += 2 * math.prod(result) * math.prod(right[1:])
        elif node.op_type == "ConvTranspose":
            total += 2 * math.prod(left) * math.prod(right[1:])
        elif left:
            is_turned = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
            total += 2 * math.prod(result) * left[-2 if is_turned and len(left) > 1 else -1]
    return total


def _get_shape(value: Any) -> tuple[int, ...]:
    return tuple(int(size.dim_value) for size in value.type.tensor_type.shape.dim)


def _count_bytes(value: Any) -> int:
    element = value.type.tensor_type.elem_type
    item_bytes = onnx.helper.tensor_dtype_to_np_dtype(element).itemsize if element else 4
    return math.prod(_get_shape(value)) * int(item_bytes)


def _list_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _list_nodes(inner)


def _simplify(model: Any) -> None:
    """Folds constants, joins equal nodes and removes those that nothing reads.

    The exporter's own way also tries its rules for patterns at every node, which takes time.
    onnxruntime knows those patterns when it loads a graph.
    """
    passes = ir.passes.common
    passes.InlinePass()(model)
    fold_constants_ir(model, onnx_shape_inference=True)
    for simplify in (
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        simplify(model)


def _strip(model: onnx.ModelProto) -> None:
    """Removes stack traces and places in sources, which are most of an exported file."""
    for node in _list_nodes(model.graph):
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
    for field in (model.graph.value_info, model.graph.metadata_props, model.metadata_props):
        del field[:]
    model.graph.doc_string = model.doc_string = ""


def _make_export_error(error: Exception) -> TaskError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TaskError):
            return cause
        cause = cause.__cause__ or cause.__context__
    names = dict.fromkeys(_OPERATOR_NAME.findall(str(error)))
    if names:
        return TaskError(f"operator aten.{', aten.'.join(names)} has no form in ONNX here")
    return TaskError(f"torch cannot export the training step to ONNX: {get_first_line(error)}")
