"""A torch module as ONNX nodes, by torch's dynamo exporter."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import TaskError, format_install_command
from edgefl.core.types import Array
from edgefl.tasks.export.onnx_graph import OPSET, OnnxGraph, suppress_export_logs
from edgefl.tasks.learners.accelerators import import_torch

if TYPE_CHECKING:
    import torch

_INPUT_NAME, _OUTPUT_NAME = "module_features", "module_logits"


def add_torch_module(module: torch.nn.Module, graph: OnnxGraph, features: str, example: Array) -> str:
    """Adds the module's nodes and weights to the graph and returns the name of its logits.

    Args:
        module: maps a float32 batch of any size to logits.
        graph: the graph to extend.
        features: the module's input value.
        example: one float32 batch of features, for their shape.

    Raises:
        TaskError: onnxscript is missing, or torch cannot export this module.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise TaskError(
            "an export of a torch model to ONNX needs onnxscript, which is not installed; "
            f"install it with: {format_install_command('onnxscript')}"
        )
    exported = _export_module(module.eval(), example)
    if exported.functions or any(node.domain for node in exported.graph.node):
        raise TaskError("torch's exporter left operators in the graph that are not of ONNX itself")
    for tensor in exported.graph.initializer:
        graph.constants[tensor.name] = tensor
    for node in exported.graph.node:
        node.input[:] = [features if name == _INPUT_NAME else name for name in node.input]
        graph.nodes.append(node)
    return _OUTPUT_NAME


def _export_module(module: torch.nn.Module, example: Array) -> Any:
    backend = import_torch()
    # Two examples: from one, torch would infer a constant batch size.
    batch = backend.from_numpy(np.ascontiguousarray(np.resize(example, (2, *example.shape[1:])), dtype=np.float32))
    with suppress_export_logs():
        try:
            program = backend.onnx.export(
                module,
                (batch,),
                dynamo=True,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
                input_names=[_INPUT_NAME],
                output_names=[_OUTPUT_NAME],
                dynamic_shapes=({0: backend.export.Dim("n")},),
            )
        except Exception as error:  # the exporter passes on any exception of a user's module
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TaskError(f"torch cannot export this model to ONNX: {reason}") from error
    return program.model_proto
