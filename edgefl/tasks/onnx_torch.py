"""A torch module as ONNX nodes, by torch's dynamo exporter."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.errors import TaskError, install_line
from edgefl.tasks.accelerators import import_torch
from edgefl.tasks.onnx_steps import OPSET, Graph, quiet
from edgefl.types import Array

if TYPE_CHECKING:
    import torch

_FEATURES, _RESULT = "module_features", "module_logits"


def draw_module(module: torch.nn.Module, graph: Graph, features: str, example: Array) -> str:
    """Adds the module's nodes and weights to the graph and returns the name of its logits.

    Args:
        module: maps a float32 batch of any size to logits.
        graph: what is drawn.
        features: the value that the module takes.
        example: one float32 batch of features, for their shape.

    Raises:
        TaskError: onnxscript is missing, or torch cannot export this module.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise TaskError(
            "an export of a torch model to ONNX needs onnxscript, which is not installed; "
            f"install it with: {install_line('onnxscript')}"
        )
    made = _exported(module.eval(), example)
    if made.functions or any(node.domain for node in made.graph.node):
        raise TaskError("torch's exporter left operators in the graph that are not of ONNX itself")
    for tensor in made.graph.initializer:
        graph.constants[tensor.name] = tensor
    for node in made.graph.node:
        node.input[:] = [features if name == _FEATURES else name for name in node.input]
        graph.nodes.append(node)
    return _RESULT


def _exported(module: torch.nn.Module, example: Array) -> Any:
    backend = import_torch()
    # Two examples: of one, torch would conclude that there is never more.
    batch = backend.from_numpy(np.ascontiguousarray(np.resize(example, (2, *example.shape[1:])), dtype=np.float32))
    with quiet():
        try:
            program = backend.onnx.export(
                module,
                (batch,),
                dynamo=True,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
                input_names=[_FEATURES],
                output_names=[_RESULT],
                dynamic_shapes=({0: backend.export.Dim("n")},),
            )
        except Exception as error:  # the exporter passes on whatever tracing somebody's module raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TaskError(f"torch cannot export this model to ONNX: {reason}") from error
    return program.model_proto
