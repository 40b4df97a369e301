"""Export of a model as a file independent of the task's code: ONNX, or a torch state dict; checked before it appears.

The ONNX file takes the inputs of the task's `read`, as float32 (or by name, as its module does), and returns
`logits`: the task's own preparation of raw inputs is part of the graph. A user's `prepare` without a node builder is
omitted, and the metadata notes it.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from edgefl.core.clusters import is_stack, split_stack
from edgefl.core.errors import TaskError
from edgefl.core.named_arrays import NamedArrays, unwrap_inputs, wrap_inputs
from edgefl.core.types import Array, Dataset, Inputs, Json, Scalar, Task, Tensors, derive_rng
from edgefl.system.atomic_files import make_store_error, open_atomic
from edgefl.tasks.export.result_model import ResultModel, find_result_model
from edgefl.tasks.losses.class_losses import softmax
from edgefl.tasks.losses.registry import has_classes
from edgefl.tasks.onnx_graph import (
    INPUTS,
    LOGITS,
    MODEL,
    OPSET,
    PREPARE,
    OnnxGraph,
    Sources,
    get_node_builder,
    import_onnx,
    suppress_export_logs,
)
from edgefl.tasks.preparation import Prepare, prepare_inputs, to_features
from edgefl.tasks.registry import import_extra, import_torch

TOLERANCE = 5e-5
"""Relative to the largest logit, at least 1: float32 sums are added in another order."""
MAX_ROUNDED = 0.01
"""Part of the samples whose answers float32 may change: a value may lie on the very edge of a bin."""
BATCH_SIZE = 256

NUM_RANDOM_INPUTS = 64
FILE_MODE = 0o644


def open_session(content: bytes) -> Any:
    """Returns an onnxruntime session of a file's bytes, on the CPU.

    Raises:
        TaskError: onnxruntime is missing or cannot load the file.
    """
    runtime = import_extra(
        "onnxruntime", "an exported model is checked with onnxruntime", "pip install onnxruntime -c constraints.txt"
    )
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common base class
        raise TaskError(f"onnxruntime cannot load the exported model: {error}") from error


def verify_logits(
    session: Any, features: Inputs, expected: Array, *, as_probabilities: bool = False
) -> tuple[float, float]:
    """Returns the largest difference of the file's logits from the expected ones, and its tolerance.

    Args:
        session: of the file.
        features: [n, ...], its inputs.
        expected: [n, outputs].
        as_probabilities: compares those of the classes; a logarithm far below the others would allow anything.

    Raises:
        TaskError: it is larger, or a value is NaN.
    """
    run = partial(_compute_logits, session)
    logits = np.concatenate([run(features[:1]), *run_in_batches(run, features[1:])])
    if logits.shape != expected.shape:
        raise TaskError(f"the ONNX file gives logits {list(logits.shape)}, the task {list(expected.shape)}")
    if as_probabilities:
        logits, expected = softmax(logits), softmax(expected)
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(logits - expected).max())
    if not difference <= tolerance:
        what = "probabilities" if as_probabilities else "logits"
        raise TaskError(
            f"the ONNX file does not compute what the task computes: {what} differ by up to {difference:.2e} on "
            f"{len(features)} inputs, {tolerance:.2e} would be allowed; nothing was written"
        )
    return difference, tolerance


def _check_float32(model: ResultModel, inputs: Inputs) -> None:
    """Raises a `TaskError` where a result answers otherwise once the raw inputs are float32, as files take them."""
    if model.prepare is not to_features or not isinstance(inputs, np.ndarray):
        return
    count = int(np.concatenate([*run_in_batches(partial(_find_rounded, model), inputs)]).sum())
    if count > MAX_ROUNDED * len(inputs):
        raise TaskError(
            f"{count} of {len(inputs)} inputs have another answer as float32, which the file takes: it keeps 7 "
            f"digits of values up to {float(np.abs(inputs).max()):.7g}; give the task smaller ones, such as times "
            "since a start"
        )


def _find_rounded(model: ResultModel, inputs: Inputs) -> Array:
    """Returns [n], whether an input has another answer as float32."""
    rows = np.asarray(inputs).reshape(len(inputs), -1)
    found, exact = (model.compute(array) for array in (rows.astype(np.float32), rows))
    if model.classes:
        found, exact = softmax(found), softmax(exact)
    differences: Array = np.abs(found - exact).max(axis=1)
    return differences > TOLERANCE * max(1.0, float(np.abs(exact).max()))


def compute_accuracy(session: Any, features: Inputs, labels: Array | None) -> float | None:
    """Returns the fraction of correct predictions of the file; None without labels, or where they are no classes."""
    if labels is None or not len(labels) or labels.dtype.kind not in "iu" or labels.ndim != 1:
        return None
    outputs = [*run_in_batches(partial(_compute_logits, session), features)]
    if outputs[0].ndim != 2 or outputs[0].shape[1] < 2:
        return None
    predictions = np.concatenate([logits.argmax(axis=1) for logits in outputs])
    return float((predictions == labels).mean())


def quantise_model(content: bytes) -> Any:
    """Returns the model with int8 weights; activations are quantised dynamically, so no data is needed.

    Raises:
        TaskError: onnxruntime fails.
    """
    onnx = import_onnx()
    with suppress_export_logs():
        try:
            from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415 slow to load

            with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
                source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
                source.write_bytes(content)
                features = [node.name for node in onnx.load(source).graph.node if node.name.startswith(PREPARE)]
                # Unsigned weights: onnxruntime has no convolution of signed ones on the CPU.
                quantize_dynamic(source, target, weight_type=QuantType.QUInt8, nodes_to_exclude=features)
                return onnx.load(target)
        except Exception as error:  # as above
            raise TaskError(f"onnxruntime cannot quantise this model: {error}") from error


def run_in_batches(function: Callable[[Inputs], Array], inputs: Inputs) -> Iterator[Array]:
    """Yields a function's results by batch: a whole test set at once needs too much memory."""
    for start in range(0, len(inputs), BATCH_SIZE):
        yield function(inputs[start : start + BATCH_SIZE])


def _compute_logits(session: Any, features: Inputs) -> Array:
    named = features.to_dict() if isinstance(features, NamedArrays) else {INPUTS: features}
    (logits,) = session.run([LOGITS], {name: np.ascontiguousarray(array) for name, array in named.items()})
    return np.asarray(logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxExportReport:
    """Report on a written file and its checks.

    Attributes:
        sha256, bytes_file: of the file.
        opset: the version of ONNX's operators.
        inputs: its inputs, as `float32 inputs [n, 8, 8]`.
        output_name, num_classes: its output, float32 [n, num_classes].
        max_difference: between its logits and the task's own, the largest over `num_checked` inputs; of a result with
            classes between their probabilities. For a quantised file it is that of the float32 file.
        tolerance: upper limit of the difference.
        num_checked: number of inputs; they are random where none were given.
        preprocess: preparation of inputs outside the file; empty when it takes the task's raw inputs.
        accuracy: of the float32 file on labelled samples, None without any.
        is_quantised, accuracy_quantised, bytes_float32: whether its weights are int8, the accuracy with them, and
            the size of the float32 file.
    """

    sha256: str
    bytes_file: int
    opset: int
    inputs: str
    output_name: str
    num_classes: int
    max_difference: float
    tolerance: float
    num_checked: int
    preprocess: Mapping[str, Any]
    accuracy: float | None
    is_quantised: bool
    accuracy_quantised: float | None
    bytes_float32: int


class OnnxExportable(Protocol):
    """Interface of a learner, beyond `Learner`, whose model can be exported."""

    @property
    def prepare(self) -> Prepare: ...
    def logits(self, inputs: Inputs) -> Array: ...
    def draw(self, graph: OnnxGraph, features: str, example: Inputs) -> str: ...


def export_onnx(  # noqa: PLR0913 all but three by name
    task: Task,
    model: Tensors,
    path: Path,
    *,
    quantise: bool = False,
    samples: Dataset | Inputs | None = None,
    options: Mapping[str, Scalar] | None = None,
    model_sha256: str = "",
) -> OnnxExportReport:
    """Writes a model as an ONNX file and returns a report.

    Args:
        task: of the model.
        model: tensors by name, local ones (`shared=False`) included; or the result of an analysis.
        path: of the new file; it appears only after the checks.
        quantise: weights become int8, and activations while it runs.
        samples: inputs of the task's `read`, to check the file with; with labels they also give the accuracy.
            None makes random ones.
        options: of the task, for the file's metadata.
        model_sha256: of the model's safetensors file, likewise.

    Raises:
        TaskError: onnx or torch is missing, the model cannot be exported, the file's results differ from the
            task's, or the samples are too large for float32.
        StoreError: the file cannot be written.
    """
    inputs, labels = _select_inputs(task, samples)
    learner = load_learner(task, model)
    if isinstance(learner, ResultModel):
        labels = labels if learner.has_targets else None
        if quantise:
            raise TaskError("the result of an analysis has no weights that 8 bits could hold; leave out --quantise")
        if samples is not None:
            _check_float32(learner, inputs)
    preprocess, built = _build_graph(learner, inputs)
    facts = _make_metadata(task, options, model_sha256, preprocess) | _describe_result(learner)
    content = _encode_with_metadata(built, facts, "float32")
    features = _compute_features(learner, inputs, preprocess)
    session = open_session(content)
    difference, tolerance = verify_logits(
        session,
        features,
        np.concatenate([*run_in_batches(learner.logits, inputs)]),
        as_probabilities=isinstance(learner, ResultModel) and bool(learner.classes),
    )
    accuracy, quantised_accuracy, bytes_float32 = compute_accuracy(session, features, labels), None, len(content)
    if quantise:
        content = _encode_with_metadata(quantise_model(content), facts, "int8")
        quantised_accuracy = compute_accuracy(open_session(content), features, labels)
    _write_file(path, content)
    return OnnxExportReport(
        sha256=hashlib.sha256(content).hexdigest(),
        bytes_file=len(content),
        opset=OPSET,
        inputs=_format_inputs(features),
        output_name=LOGITS,
        num_classes=built.graph.output[0].type.tensor_type.shape.dim[1].dim_value,
        max_difference=difference,
        tolerance=tolerance,
        num_checked=len(inputs),
        preprocess=preprocess,
        accuracy=accuracy,
        is_quantised=quantise,
        accuracy_quantised=quantised_accuracy,
        bytes_float32=bytes_float32,
    )


def _select_inputs(task: Task, samples: Dataset | Inputs | None) -> tuple[Inputs, Array | None]:
    if isinstance(samples, Dataset):
        inputs, labels = samples.inputs, samples.targets
    else:
        inputs, labels = (_make_random_inputs(task) if samples is None else samples), None
    if not len(inputs):
        raise TaskError(
            f"there are no inputs to check the ONNX file of task {task.name} with; give a shard that holds some"
        )
    return inputs, labels


def _make_random_inputs(task: Task) -> Array:
    """Returns random inputs of the right shape, some like dark, some like bright pixels."""
    shape: tuple[int, ...] | None = getattr(task, "input_shape", None)
    if shape is None:
        raise TaskError(
            f"task {task.name} does not say the shape of its inputs (input_shape); give inputs of a real shard"
        )
    rng = derive_rng("onnx", task.name)
    scales = np.where(np.arange(NUM_RANDOM_INPUTS) % 2, 255.0, 16.0).reshape(-1, *[1] * len(shape))
    return np.floor(rng.random((NUM_RANDOM_INPUTS, *shape)) * scales).astype(np.uint8)


def load_learner(task: Task, model: Tensors) -> OnnxExportable:
    """Returns what computes the outputs of a model: the task's learner with its tensors, or an analysis' result.

    Raises:
        TaskError: the model is not whole, of another task or of several clusters, or its learner computes none.
    """
    if (result := find_result_model(task, model)) is not None:
        return result
    learner = task.learner()
    if not all(hasattr(learner, name) for name in ("prepare", "logits", "draw")):
        raise TaskError(
            f"the learner of task {task.name} cannot be exported or asked: a {type(learner).__name__} has no "
            "prepare, logits and draw; export as safetensors, or train with NumpyLearner or TorchLearner"
        )
    check_whole(task, model)
    learner.load(model)
    return cast("OnnxExportable", learner)


def check_whole(task: Task, model: Tensors) -> None:
    """Checks that a model has every tensor of its task: an untrained one would stand in for one that is absent.

    Raises:
        TaskError: it lacks one.
    """
    missing = [spec for spec in task.shapes() if spec.name not in model]
    if missing and is_stack(model):
        raise TaskError(
            f"the model is {len(split_stack(model))} models of task {task.name}, one for each cluster of devices; "
            "take one by --cluster NUMBER of edgefl model export, or deploy"
        )
    if any(spec.shared for spec in missing):
        name = next(spec.name for spec in missing if spec.shared)
        raise TaskError(
            f"the model lacks tensor {name!r} of task {task.name}: it is of another task or options, or the tensor "
            "stayed on the devices (adapt.local); a board's own are added by --local"
        )
    if missing:
        raise TaskError(
            f"tensor {missing[0].name!r} of task {task.name} stays on each device, so the model here is not whole; "
            "say whose: --local and the file of that board"
        )


def _build_graph(learner: OnnxExportable, inputs: Inputs) -> tuple[Json, Any]:
    """Returns the preparation outside the graph, and the graph."""
    graph, prepared = OnnxGraph(), prepare_inputs(learner.prepare, inputs[:2])
    steps = get_node_builder(learner.prepare)
    preprocess: Json = {}
    if steps is not None and not isinstance(inputs, NamedArrays):
        features = steps(graph, INPUTS)
    elif _is_identity(learner.prepare, inputs):
        features = INPUTS
    else:
        features, preprocess = INPUTS, {"kind": "task"}
    graph.stage = MODEL
    sources = _list_sources(prepared if preprocess else to_features(unwrap_inputs(inputs)))
    result = learner.draw(graph, features, prepared)
    num_classes = learner.logits(inputs[:1]).shape[1]
    return preprocess, graph.build_model(sources=sources, result=result, num_classes=num_classes)


def _list_sources(features: Inputs) -> Sources:
    """Returns type and shape of one example of each input of the graph, by name."""
    named = features if isinstance(features, Mapping) else {INPUTS: features}
    return {name: (str(array.dtype), tuple(array.shape[1:])) for name, array in named.items()}


def _format_inputs(features: Inputs) -> str:
    sources = _list_sources(unwrap_inputs(features))
    return ", ".join(
        f"{dtype} {name} [{', '.join(['n', *map(str, shape)])}]" for name, (dtype, shape) in sources.items()
    )


def _is_identity(prepare: Prepare, inputs: Inputs) -> bool:
    prepared, plain = (prepare_inputs(each, inputs) for each in (prepare, to_features))
    if isinstance(prepared, Mapping) and isinstance(plain, Mapping):
        return prepared.keys() == plain.keys() and all(
            np.array_equal(prepared[name], plain[name]) and prepared[name].dtype == plain[name].dtype
            for name in plain
        )
    return not isinstance(prepared, Mapping) and not isinstance(plain, Mapping) and np.array_equal(prepared, plain)


def _compute_features(learner: OnnxExportable, inputs: Inputs, preprocess: Json) -> Inputs:
    return wrap_inputs(prepare_inputs(learner.prepare if preprocess else to_features, inputs))


def _make_metadata(task: Task, options: Mapping[str, Scalar] | None, sha256: str, preprocess: Json) -> dict[str, str]:
    labels = [str(label) for label in getattr(task, "labels", ())]
    return {
        "edgefl.task": task.name,
        "edgefl.task_options": json.dumps(dict(options or {}), sort_keys=True),
        "edgefl.model": sha256,
        "edgefl.preprocess": json.dumps(preprocess) if preprocess else "",
        "edgefl.classes": json.dumps(labels) if labels else "",
        **({} if has_classes(task) else {"edgefl.outputs": "values"}),
    }


def _describe_result(learner: OnnxExportable) -> dict[str, str]:
    """Returns what the metadata say otherwise of the result of an analysis than of a model of the task."""
    if not isinstance(learner, ResultModel):
        return {}
    return {
        "edgefl.classes": json.dumps(learner.classes) if learner.classes else "",
        "edgefl.outputs": "classes" if learner.classes else "values",
        "edgefl.targets": "task" if learner.has_targets else "none",
    }


def _encode_with_metadata(model: Any, metadata: Mapping[str, str], numbers: str) -> bytes:
    del model.metadata_props[:]
    for key, value in {**metadata, "edgefl.numbers": numbers}.items():
        model.metadata_props.add(key=key, value=value)
    try:
        content: bytes = model.SerializeToString(deterministic=True)
    except ValueError as error:
        raise TaskError(f"the model is too large for one ONNX file: {error}") from error
    return content


def _write_file(path: Path, content: bytes | memoryview) -> None:
    try:
        with open_atomic(path, mode=FILE_MODE) as file:
            file.write(content)
    except OSError as error:
        raise make_store_error(path, error) from None


def export_torch(model: Tensors, path: Path) -> int:
    """Writes the tensors by name and returns the file's bytes; it appears only after being read back.

    Raises:
        TaskError: torch is missing, or reads back other tensors.
        StoreError: the file cannot be written.
    """
    backend = import_torch()
    # torch takes writable arrays only, so each is copied.
    dense = {name: np.array(t if isinstance(t, np.ndarray) else t.dense()) for name, t in model.items()}
    content = io.BytesIO()
    backend.save({name: backend.from_numpy(array) for name, array in dense.items()}, content)
    content.seek(0)
    read_back = backend.load(content, weights_only=True)
    if list(read_back) != list(dense) or any(
        not np.array_equal(read_back[n].numpy(), a, equal_nan=True) for n, a in dense.items()
    ):
        raise TaskError("torch does not read back the tensors that it was given; nothing was written")
    _write_file(path, content.getbuffer())
    return content.getbuffer().nbytes
