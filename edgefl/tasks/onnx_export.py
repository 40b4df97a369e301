"""A trained model as one ONNX file that runs without the task's code, checked against the task before it is there.

The file takes what the task's `read` gives, as float32, and answers with `logits`: the task's own preparation of raw
inputs is drawn into the graph. A user's `prepare` that nobody has drawn is left out, and the metadata says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from edgefl.errors import TaskError
from edgefl.files import open_whole, store_error
from edgefl.tasks.onnx_check import accuracy_of, checked_difference, in_batches, open_session, quantised
from edgefl.tasks.onnx_steps import INPUTS, LOGITS, MODEL, OPSET, Graph, steps_of
from edgefl.types import Array, Dataset, Json, Scalar, Task, Tensors, derived_rng

NUM_MADE_UP = 64
FILE_MODE = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxReport:
    """What was written and how it was checked.

    Attributes:
        sha256, bytes_file: of the file.
        opset: the version of ONNX's operators.
        input_name, input_shape: what it takes, float32; None stands for any number of examples.
        output_name, num_classes: what it gives, float32 [n, num_classes].
        max_difference: between its logits and the task's own, the largest over `num_checked` inputs. Of a quantised
            file it is that of the file before.
        tolerance: how large it might have been.
        num_checked, is_made_up: how many inputs; whether they were made up, since none were given.
        preprocess: what has to be done to the inputs before; empty when the file takes them as the task reads them.
        accuracy: of the float32 file on labelled samples, None without any.
        is_quantised, accuracy_quantised, bytes_float32: whether its weights are int8, the accuracy with them, and how
            large the float32 file would be.
    """

    sha256: str
    bytes_file: int
    opset: int
    input_name: str
    input_shape: tuple[int | None, ...]
    output_name: str
    num_classes: int
    max_difference: float
    tolerance: float
    num_checked: int
    is_made_up: bool
    preprocess: Mapping[str, Any]
    accuracy: float | None
    is_quantised: bool
    accuracy_quantised: float | None
    bytes_float32: int


class Drawable(Protocol):
    """What a learner needs beyond `Learner` so that its model can be exported."""

    @property
    def prepare(self) -> Callable[[Array], Array]: ...
    def logits(self, inputs: Array) -> Array: ...
    def draw(self, graph: Graph, features: str, example: Array) -> str: ...


def export_onnx(  # noqa: PLR0913 all but three by name
    task: Task,
    model: Tensors,
    path: Path,
    *,
    quantise: bool = False,
    samples: Dataset | Array | None = None,
    options: Mapping[str, Scalar] | None = None,
    model_sha256: str = "",
) -> OnnxReport:
    """Writes a model as an ONNX file and returns what was found out about it.

    Args:
        task: whose model it is.
        model: tensors by name; those that stay on boards (`shared=False`) may be missing.
        path: of the new file; it appears only when it has been checked.
        quantise: weights become int8, and activations while it runs.
        samples: inputs as the task's `read` gives them, to check the file with; with labels they also tell the
            accuracy. None makes some up.
        options: of the task, for the file's metadata.
        model_sha256: of the model's safetensors file, likewise.

    Raises:
        TaskError: onnx or torch is missing, the model cannot be exported, or the file does not compute what the task
            computes.
        StoreError: the file cannot be written.
    """
    inputs, labels = _given(task, samples)
    learner = _loaded_learner(task, model)
    preprocess, made = _drawn(learner, inputs)
    facts = _metadata(task, options, model_sha256, preprocess)
    content = _with_metadata(made, facts, "float32")
    features = _features(learner, inputs, preprocess)
    session = open_session(content)
    difference, tolerance = checked_difference(
        session, features, np.concatenate([*in_batches(learner.logits, inputs)])
    )
    accuracy, after, bytes_float32 = accuracy_of(session, features, labels), None, len(content)
    if quantise:
        content = _with_metadata(quantised(content), facts, "int8")
        after = accuracy_of(open_session(content), features, labels)
    _write(path, content)
    return OnnxReport(
        sha256=hashlib.sha256(content).hexdigest(),
        bytes_file=len(content),
        opset=OPSET,
        input_name=INPUTS,
        input_shape=(None, *features.shape[1:]),
        output_name=LOGITS,
        num_classes=made.graph.output[0].type.tensor_type.shape.dim[1].dim_value,
        max_difference=difference,
        tolerance=tolerance,
        num_checked=len(inputs),
        is_made_up=samples is None,
        preprocess=preprocess,
        accuracy=accuracy,
        is_quantised=quantise,
        accuracy_quantised=after,
        bytes_float32=bytes_float32,
    )


def _given(task: Task, samples: Dataset | Array | None) -> tuple[Array, Array | None]:
    if isinstance(samples, Dataset):
        inputs, labels = samples.inputs, samples.labels
    else:
        inputs, labels = (_made_up(task) if samples is None else samples), None
    if not len(inputs):
        raise TaskError(
            f"there are no inputs to check the ONNX file of task {task.name} with; give a shard that holds some"
        )
    return inputs, labels


def _made_up(task: Task) -> Array:
    """Returns inputs of the right shape, some like dark, some like bright pixels."""
    shape: tuple[int, ...] | None = getattr(task, "input_shape", None)
    if shape is None:
        raise TaskError(
            f"task {task.name} does not say the shape of its inputs (input_shape); give inputs of a real shard"
        )
    rng = derived_rng("onnx", task.name)
    scales = np.where(np.arange(NUM_MADE_UP) % 2, 255.0, 16.0).reshape(-1, *[1] * len(shape))
    return np.floor(rng.random((NUM_MADE_UP, *shape)) * scales).astype(np.uint8)


def _loaded_learner(task: Task, model: Tensors) -> Drawable:
    learner = task.learner()
    if not all(hasattr(learner, name) for name in ("prepare", "logits", "draw")):
        raise TaskError(
            f"the learner of task {task.name} cannot be exported: a {type(learner).__name__} has no prepare, logits "
            "and draw; export as safetensors, or train with NumpyLearner or TorchLearner"
        )
    missing = [spec.name for spec in task.shapes() if spec.shared and spec.name not in model]
    if missing:
        raise TaskError(
            f"the model lacks tensor {missing[0]!r} of task {task.name}; it is of another task or options"
        )
    learner.load(model)
    return cast("Drawable", learner)


def _drawn(learner: Drawable, inputs: Array) -> tuple[Json, Any]:
    """Returns what is left to do before the graph, and the graph."""
    graph, prepared = Graph(), learner.prepare(inputs[:2])
    steps = steps_of(learner.prepare)
    preprocess: Json = {}
    if steps is not None:
        features = steps(graph, INPUTS)
    elif _is_identity(learner.prepare, inputs):
        features = INPUTS
    else:
        features, preprocess = INPUTS, {"kind": "task"}
    graph.stage = MODEL
    shape = prepared.shape[1:] if preprocess else inputs.shape[1:]
    result = learner.draw(graph, features, np.ascontiguousarray(prepared, dtype=np.float32))
    num_classes = learner.logits(inputs[:1]).shape[1]
    return preprocess, graph.model(source=INPUTS, shape=shape, result=result, num_classes=num_classes)


def _is_identity(prepare: Callable[[Array], Array], inputs: Array) -> bool:
    prepared = np.asarray(prepare(inputs))
    return prepared.shape == inputs.shape and bool(np.array_equal(prepared, inputs.astype(np.float32)))


def _features(learner: Drawable, inputs: Array, preprocess: Json) -> Array:
    return np.ascontiguousarray(learner.prepare(inputs) if preprocess else inputs, dtype=np.float32)


def _metadata(task: Task, options: Mapping[str, Scalar] | None, sha256: str, preprocess: Json) -> dict[str, str]:
    labels = [str(label) for label in getattr(task, "labels", ())]
    return {
        "edgefl.task": task.name,
        "edgefl.task_options": json.dumps(dict(options or {}), sort_keys=True),
        "edgefl.model": sha256,
        "edgefl.preprocess": json.dumps(preprocess) if preprocess else "",
        "edgefl.classes": json.dumps(labels) if labels else "",
    }


def _with_metadata(made: Any, facts: Mapping[str, str], numbers: str) -> bytes:
    del made.metadata_props[:]
    for key, value in {**facts, "edgefl.numbers": numbers}.items():
        made.metadata_props.add(key=key, value=value)
    try:
        content: bytes = made.SerializeToString(deterministic=True)
    except ValueError as error:
        raise TaskError(f"the model is too large for one ONNX file: {error}") from error
    return content


def _write(path: Path, content: bytes) -> None:
    try:
        with open_whole(path, mode=FILE_MODE) as file:
            file.write(content)
    except OSError as error:
        raise store_error(path, error) from None
