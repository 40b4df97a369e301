"""The file of a compiled task: a training step and an evaluation as ONNX graphs, with a manifest, in safetensors.

Tensors, each [bytes] uint8:

- `train.onnx`: inputs `param:<name>`, `buffer:<name>`, `batch:inputs` [B, …] float32, `batch:targets` [B, …],
  `batch:weights` [B] float32 and `noise:<i>`, uniform in [0, 1); outputs `loss`, `grad:<name>` and `new:<name>`. The
  loss is sum(weight · loss) / sum(weight) of the examples, so that those of weight 0 fill up a short batch.
- `evaluate.onnx`: the same inputs but noise; outputs `outputs` [B, …] of the network in evaluation mode, and `loss`,
  the weighted sum.

Inputs that a graph does not need are absent from it. Both graphs are of opset 18 and ONNX's own domain, have no
external data, and a batch of the fixed size B. The metadata's `manifest` is JSON. Neither torch nor onnx is needed
to read it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save

from edgefl.core.errors import DataError
from edgefl.core.safe_parsing import SHA256, parse_message
from edgefl.core.safe_text import is_safe_text
from edgefl.core.types import Json, ModelSpec, Scalar, TensorKind, TensorSpec

VERSION = 1
SUFFIX = ".compiled"
OPSET = 18
TRAIN, EVALUATE = "train.onnx", "evaluate.onnx"
MAX_ARTEFACT_BYTES = 512 * 1024 * 1024
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_TENSORS, MAX_AXES, MAX_SIZE, MAX_VALUES = 20_000, 8, 2**31, 2**31
MAX_BATCH_SIZE = 65_536
MAX_TEXT = 500
PARAMETER, BUFFER, GRADIENT, NEW, NOISE = "param:", "buffer:", "grad:", "new:", "noise:"
INPUTS, TARGETS, WEIGHTS = "batch:inputs", "batch:targets", "batch:weights"
LOSS, OUTPUTS = "loss", "outputs"
TENSOR_TYPES = ("float32", "int64", "bool")
"""Types of a model's tensors and of targets."""

PERMITTED_OPERATORS = (
    "Abs", "Add", "And", "AveragePool", "BatchNormalization", "Cast", "Ceil", "Clip", "Concat", "Constant",
    "ConstantOfShape", "Conv", "ConvTranspose", "Cos", "CumSum", "Div", "Elu", "Equal", "Erf", "Exp", "Expand",
    "Flatten", "Floor", "GRU", "Gather", "GatherElements", "GatherND", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "IsInf", "IsNaN",
    "LSTM", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "MaxPool",
    "Min", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pad", "Pow", "Range", "Reciprocal", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize", "Round",
    "Scan", "ScatterElements", "ScatterND", "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Slice", "Softmax", "Softplus",
    "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
)  # fmt: skip
"""Operators of ONNX's default domain that a graph may have, sorted; a Scan ends where its tensor ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledManifest:
    """Facts about a compiled task.

    Attributes:
        task, options: that were compiled.
        model: all tensors, in the task's order.
        batch_size: B of both graphs.
        input_shape: of one example after the task's `prepare`, float32.
        output_shape: of one example.
        target_shape, target_dtype: of one example's target, as the loss converts it; of a reconstruction these are
            the inputs'.
        loss: by name, with its settings.
        noise: shapes of the random numbers, batch included.
        constant: names of tensors that stay as they are, sorted: they have no gradient and no new values.
        versions: of torch, onnx and edgefl, that compiled it.
        operators: that the graphs have, sorted.
        source: SHA-256 of what was compiled: source, options and versions.
        check: the gradient report, relative error by output.
        flops: of one training step, estimated.
        peak_bytes: of the tensors of one training step, estimated.
    """

    task: str
    options: Mapping[str, Scalar] = field(default_factory=dict)
    model: ModelSpec
    batch_size: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    target_dtype: str
    loss: str
    noise: tuple[tuple[int, ...], ...] = ()
    constant: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    operators: tuple[str, ...]
    source: str
    check: Mapping[str, float] = field(default_factory=dict)
    flops: int = 0
    peak_bytes: int = 0

    def to_json(self) -> Json:
        """Returns the value that `parse` reads."""
        return {
            "v": VERSION,
            "task": self.task,
            "options": dict(self.options),
            "model": [
                {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "kind": str(spec.kind)}
                for spec in self.model
            ],
            "batch_size": self.batch_size,
            "inputs": {"shape": list(self.input_shape), "dtype": "float32"},
            "outputs": list(self.output_shape),
            "targets": {"shape": list(self.target_shape), "dtype": self.target_dtype},
            "loss": self.loss,
            "noise": [list(shape) for shape in self.noise],
            **({"constant": list(self.constant)} if self.constant else {}),
            "versions": dict(self.versions),
            "operators": list(self.operators),
            "source": self.source,
            "check": dict(self.check),
            "flops": self.flops,
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def parse(cls, value: object) -> Self:
        """Returns the manifest in a JSON value.

        Raises:
            DataError: it is of another version, or something in it is missing or makes no sense.
        """
        table = _check_table(value, "its manifest")
        if table.get("v") != VERSION:
            raise _make_error(f"it has format {table.get('v')!r:.40}, this program reads {VERSION}")
        inputs, targets = (_check_table(table.get(name), name) for name in ("inputs", "targets"))
        _check_choice(inputs.get("dtype"), ("float32",), "inputs' dtype")
        source = table.get("source")
        if not isinstance(source, str) or not SHA256.match(source):
            raise _make_error(f"source must be a SHA-256, got {source!r:.80}")
        model = _parse_model(table.get("model"))
        return cls(
            task=_check_text(table.get("task"), "task"),
            options=_parse_options(table.get("options")),
            model=model,
            batch_size=_check_number(table.get("batch_size"), "batch_size", 1, MAX_BATCH_SIZE),
            input_shape=_parse_shape(inputs.get("shape"), "inputs"),
            output_shape=_parse_shape(table.get("outputs"), "outputs"),
            target_shape=_parse_shape(targets.get("shape"), "targets"),
            target_dtype=_check_choice(targets.get("dtype"), TENSOR_TYPES, "targets' dtype"),
            loss=_check_text(table.get("loss"), "loss"),
            noise=tuple(_parse_shape(shape, "noise") for shape in _check_list(table.get("noise"), "noise")),
            constant=_parse_constant(table.get("constant", []), model),
            versions={
                _check_text(name, "versions"): _check_text(version, "versions")
                for name, version in _check_table(table.get("versions"), "versions").items()
            },
            operators=_parse_operators(table.get("operators")),
            source=source,
            check=_parse_check(table.get("check")),
            flops=_check_number(table.get("flops"), "flops", 0, 2**62),
            peak_bytes=_check_number(table.get("peak_bytes"), "peak_bytes", 0, 2**62),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTask:
    """A compiled task: two ONNX files, and the manifest that says what goes in and comes out.

    Nothing but the manifest has been checked: whoever runs a graph looks at its operators first.
    """

    train: bytes
    evaluate: bytes
    manifest: CompiledManifest


def encode_artefact(task: CompiledTask) -> bytes:
    """Returns the file of a compiled task; equal tasks give equal bytes."""
    tensors = {name: np.array(memoryview(content), np.uint8) for name, content in _list_graphs(task)}
    manifest = json.dumps(task.manifest.to_json(), sort_keys=True, allow_nan=False)
    return save(tensors, metadata={"manifest": manifest})


def parse_artefact(content: bytes) -> CompiledTask:
    """Returns the compiled task in a file.

    Raises:
        DataError: it is too large, damaged, of another version, or its manifest makes no sense.
    """
    if len(content) > MAX_ARTEFACT_BYTES:
        raise _make_error(f"it has {len(content)} bytes, at most {MAX_ARTEFACT_BYTES} are read")
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise _make_error(f"{error!r:.200}") from None
    manifest = _parse_header(content)
    if sorted(tensors) != [EVALUATE, TRAIN] or any(t.dtype != np.uint8 or t.ndim != 1 for t in tensors.values()):
        raise _make_error(
            f"its tensors must be {EVALUATE} and {TRAIN}, bytes; got {', '.join(sorted(tensors))!a:.200}"
        )
    return CompiledTask(train=tensors[TRAIN].tobytes(), evaluate=tensors[EVALUATE].tobytes(), manifest=manifest)


def read_manifest(path: Path) -> CompiledManifest | None:
    """Returns the manifest of a compiled task's file, whose graphs are not read; None of any other file."""
    try:
        with path.open("rb") as file:
            return _parse_header(file.read(8 + 2 * MAX_MANIFEST_BYTES))
    except (OSError, DataError):
        return None


def _parse_header(content: bytes) -> CompiledManifest:
    # safetensors has no API for the metadata of bytes: 8 bytes of length, then JSON.
    num_bytes = int.from_bytes(content[:8], "little")
    if num_bytes > 2 * MAX_MANIFEST_BYTES:
        raise _make_error(f"its header has {num_bytes} bytes, at most {2 * MAX_MANIFEST_BYTES} are read")
    try:
        text = (parse_message(content[8 : 8 + num_bytes]).get("__metadata__") or {}).get("manifest")
        if not isinstance(text, str):
            raise _make_error("it has no manifest; `edgefl task compile` writes such files")
        return CompiledManifest.parse(parse_message(text.encode()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _make_error(f"{error!r:.200}") from None


def compute_sha256(content: bytes) -> str:
    """Returns the name of an artefact."""
    return hashlib.sha256(content).hexdigest()


def _list_graphs(task: CompiledTask) -> list[tuple[str, bytes]]:
    return [(EVALUATE, task.evaluate), (TRAIN, task.train)]


def _parse_model(value: object) -> ModelSpec:
    specs: list[TensorSpec] = []
    for entry in _check_list(value, "model"):
        table = _check_table(entry, "model")
        name = _check_text(table.get("name"), "a tensor's name")
        kind = _check_choice(table.get("kind"), tuple(map(str, TensorKind)), f"kind of {name}")
        dtype = _check_choice(table.get("dtype"), TENSOR_TYPES, f"dtype of {name}")
        specs.append(
            TensorSpec(name=name, shape=_parse_shape(table.get("shape"), name), dtype=dtype, kind=TensorKind(kind))
        )
    if len({spec.name for spec in specs}) < len(specs):
        raise _make_error("model names a tensor twice")
    return tuple(specs)


def _parse_shape(value: object, whose: str) -> tuple[int, ...]:
    sizes = _check_list(value, f"shape of {whose}", MAX_AXES)
    shape = tuple(_check_number(size, f"shape of {whose}", 0, MAX_SIZE) for size in sizes)
    if math.prod(shape) > MAX_VALUES:
        raise _make_error(f"shape of {whose} is {list(shape)}, at most {MAX_VALUES} values are taken")
    return shape


def _parse_options(value: object) -> dict[str, Scalar]:
    table = _check_table(value, "options")
    if wrong := [name for name, option in table.items() if not isinstance(option, str | int | float | list)]:
        raise _make_error(f"option {wrong[0]!a:.100} must be a text, a number, true, false, or a list")
    return table


def _parse_constant(value: object, model: ModelSpec) -> tuple[str, ...]:
    names = [_check_text(name, "constant") for name in _check_list(value, "constant")]
    if unknown := {*names} - {spec.name for spec in model}:
        raise _make_error(f"constant names {min(unknown)!a:.100}, which is no tensor of its model")
    return tuple(names)


def _parse_operators(value: object) -> tuple[str, ...]:
    return tuple(_check_text(name, "operators") for name in _check_list(value, "operators"))


def _parse_check(value: object) -> dict[str, float]:
    table = _check_table(value, "check")
    for name, error in table.items():
        if isinstance(error, bool) or not isinstance(error, int | float):
            raise _make_error(f"check of {name!a:.100} must be a number, got {error!r:.40}")
    return {name: float(error) for name, error in table.items()}


def _check_table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_TENSORS:
        raise _make_error(f"{what} must be a table, got {value!r:.40}")
    return value


def _check_list(value: object, what: str, at_most: int = MAX_TENSORS) -> list[Any]:
    if not isinstance(value, list) or len(value) > at_most:
        raise _make_error(f"{what} must be a list of at most {at_most}, got {value!r:.40}")
    return value


def _check_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not is_safe_text(value):
        raise _make_error(f"{what} must be a text of 1 to {MAX_TEXT} characters, got {value!r:.80}")
    return value


def _check_choice(value: object, choices: tuple[str, ...], what: str) -> str:
    if not isinstance(value, str) or value not in choices:
        raise _make_error(f"{what} must be one of {', '.join(choices)}, got {value!r:.40}")
    return value


def _check_number(value: object, what: str, at_least: int, at_most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise _make_error(f"{what} must be a whole number from {at_least} to {at_most}, got {value!r:.40}")
    return value


def _make_error(fault: str) -> DataError:
    return DataError(f"the compiled task cannot be read: {fault}")
