"""Small ONNX models for tests: one fully connected layer over the digits' pixels, with the metadata of an export."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CLASSES = tuple("0123456789")
SHAPE = (8, 8)


def write_model(path: Path, weight: np.ndarray, *, bias: np.ndarray | None = None, **facts: str) -> str:
    """Writes logits = pixels · weight + bias; returns the file's SHA-256. `facts` replace what the file says."""
    bias = np.zeros(weight.shape[1], np.float32) if bias is None else bias
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["inputs"], ["flat"], axis=1),
            helper.make_node("Gemm", ["flat", "weight", "bias"], ["logits"]),
        ],
        "model",
        [helper.make_tensor_value_info("inputs", TensorProto.FLOAT, ["n", *SHAPE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", weight.shape[1]])],
        [numpy_helper.from_array(weight.astype(np.float32), "weight"), numpy_helper.from_array(bias, "bias")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    told = {
        "edgefl.task": "digits",
        "edgefl.task_options": "{}",
        "edgefl.model": hashlib.sha256(weight.tobytes()).hexdigest(),
        "edgefl.preprocess": "",
        "edgefl.classes": json.dumps(CLASSES),
        **{f"edgefl.{name}": text for name, text in facts.items()},
    }
    helper.set_model_props(model, told)
    onnx.save(model, str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def constant_model(path: Path, winner: int, **facts: str) -> str:
    """Writes a model that answers `winner` to everything."""
    bias = np.zeros(10, np.float32)
    bias[winner] = 5.0
    return write_model(path, np.zeros((64, 10), np.float32), bias=bias, **facts)


def digits_model(path: Path, inputs: np.ndarray, labels: np.ndarray, *, sign: float = 1.0) -> str:
    """Writes a least-squares classifier of these digits, good to about 0.9, or with the sign -1 worse than chance."""
    rows = inputs.reshape(len(inputs), -1).astype(np.float64)
    wanted = np.eye(10)[labels] - 0.1
    weight = np.linalg.solve(rows.T @ rows + 10 * np.eye(64), rows.T @ wanted)
    return write_model(path, (sign * weight).astype(np.float32))
