"""A compiled task drawn by hand: two fully connected layers, relu and cross-entropy, as `DenseModel` has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgefl.core.types import TensorKind, TensorSpec
from edgefl.tasks.compiled.artefact import TRAIN, CompiledManifest, CompiledTask
from edgefl.tasks.learners.numpy_learner import DenseModel

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install '.[export]'")
TensorProto, helper, numpy_helper = onnx.TensorProto, onnx.helper, onnx.numpy_helper

SIZES, BATCH_SIZE = (4, 5, 3), 6
MODEL = DenseModel(sizes=SIZES)
SEEN = TensorSpec(name="seen", shape=(), dtype="int64", kind=TensorKind.BUFFER)
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
PARAMETERS = {"fc1.weight": (5, 4), "fc1.bias": (5,), "fc2.weight": (3, 5), "fc2.bias": (3,)}

FORWARD = (
    ("Gemm", ("batch:inputs", "param:fc1.weight", "param:fc1.bias"), "sums", {"transB": 1}),
    ("Relu", ("sums",), "raw", {}),
    ("Gemm", ("hidden", "param:fc2.weight", "param:fc2.bias"), "outputs", {"transB": 1}),
    ("LogSoftmax", ("outputs",), "log", {"axis": 1}),
    ("Unsqueeze", ("batch:targets", "one"), "column", {}),
    ("Equal", ("column", "classes"), "is_right", {}),
    ("Cast", ("is_right",), "right", {"to": FLOAT}),
    ("Mul", ("log", "right"), "chosen", {}),
    ("ReduceSum", ("chosen", "one"), "negative", {"keepdims": 0}),
    ("Neg", ("negative",), "losses", {}),
    ("Mul", ("losses", "batch:weights"), "weighted", {}),
    ("ReduceSum", ("weighted",), "sum", {"keepdims": 0}),
)
BACKWARD = (
    ("ReduceSum", ("batch:weights",), "total", {"keepdims": 0}),
    ("Div", ("sum", "total"), "loss", {}),
    ("Softmax", ("outputs",), "probable", {"axis": 1}),
    ("Sub", ("probable", "right"), "difference", {}),
    ("Div", ("batch:weights", "total"), "shares", {}),
    ("Unsqueeze", ("shares", "one"), "share", {}),
    ("Mul", ("difference", "share"), "delta", {}),
    ("Gemm", ("delta", "hidden"), "grad:fc2.weight", {"transA": 1}),
    ("ReduceSum", ("delta", "zero"), "grad:fc2.bias", {"keepdims": 0}),
    ("MatMul", ("delta", "param:fc2.weight"), "back", {}),
    ("Greater", ("hidden", "nothing"), "is_on", {}),
    ("Cast", ("is_on",), "on", {"to": FLOAT}),
    ("Mul", ("back", "on"), "inner", {}),
    ("Gemm", ("inner", "batch:inputs"), "grad:fc1.weight", {"transA": 1}),
    ("ReduceSum", ("inner", "zero"), "grad:fc1.bias", {"keepdims": 0}),
    ("Add", ("buffer:seen", "one_more"), "new:seen", {}),
)
CONSTANTS = {
    "one": np.array([1]), "zero": np.array([0]), "classes": np.arange(3)[None], "one_more": np.array(1),
    "nothing": np.array(0, np.float32), "half": np.array(0.5, np.float32),
}  # fmt: skip


def make_nodes(steps):
    return [
        helper.make_node(operator, list(inputs), [output], **options) for operator, inputs, output, options in steps
    ]


def make_model(steps, inputs, outputs, *, constants=CONSTANTS, opset=18):
    """Returns the bytes of a model; inputs and outputs are name -> (type, shape)."""
    graph = helper.make_graph(
        make_nodes(steps) if steps and isinstance(steps[0], tuple) else list(steps),
        "graph",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        initializer=[numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8).SerializeToString()


def make_compiled(*, has_noise=False, size=BATCH_SIZE):
    """Returns a compiled task of batches of `size`; with noise, half of the hidden values are left out at random."""
    ends = {f"param:{name}": (FLOAT, shape) for name, shape in PARAMETERS.items()}
    inputs = {
        **ends, "batch:inputs": (FLOAT, [size, 4]), "batch:targets": (INT, [size]), "batch:weights": (FLOAT, [size])
    }  # fmt: skip
    dropped = (
        ("Greater", ("noise:0", "half"), "is_kept", {}),
        ("Cast", ("is_kept",), "kept", {"to": FLOAT}),
        ("Mul", ("raw", "kept"), "hidden", {}),
    )
    whole = (("Identity", ("raw",), "hidden", {}),)
    forward = lambda middle: (*FORWARD[:2], *middle, *FORWARD[2:])  # noqa: E731 as short as what it says
    noise = {"noise:0": (FLOAT, [size, 5])} if has_noise else {}
    gradients = {f"grad:{name}": (FLOAT, shape) for name, shape in PARAMETERS.items()}
    train = make_model(
        (*forward(dropped if has_noise else whole), *BACKWARD),
        {**inputs, **noise, "buffer:seen": (INT, [])},
        {"loss": (FLOAT, []), **gradients, "new:seen": (INT, [])},
    )
    evaluate = make_model(
        (*forward(whole), ("Identity", ("sum",), "loss", {})),
        inputs,
        {"outputs": (FLOAT, [size, 3]), "loss": (FLOAT, [])},
    )
    manifest = CompiledManifest(
        task="dense",
        model=(*MODEL.shapes(), SEEN),
        batch_size=size,
        input_shape=(4,),
        output_shape=(3,),
        target_shape=(),
        target_dtype="int64",
        loss="cross-entropy",
        noise=((size, 5),) if has_noise else (),
        operators=tuple(sorted({step[0] for step in (*FORWARD, *BACKWARD)})),
        source="0" * 64,
    )
    return CompiledTask(train=train, evaluate=evaluate, manifest=manifest)


def change_graph(compiled, change, name=TRAIN):
    """Returns a compiled task one graph of which was changed in place by a function of the model."""
    graph = compiled.train if name == TRAIN else compiled.evaluate
    model = onnx.load_from_string(graph)
    change(model)
    return replace(compiled, **{"train" if name == TRAIN else "evaluate": model.SerializeToString()})
