"""ONNX model, run by onnxruntime with minimal memory and without torch, and input rows for it from a file.

Models are checked, and shards predicted, in a process that isolates bad files and the code of others' tasks. It also
returns its memory: an agent that only trains holds no onnxruntime.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edgefl.core.errors import DataError, EdgeflError, TaskError, UsageError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Array, Dataset, Json, Role
from edgefl.device.hardware.requirements import make_confinement
from edgefl.system.processes import call_in_subprocess, serve_call
from edgefl.tasks.datasets.array_files import read_idx, read_npy, read_npz
from edgefl.tasks.datasets.shards import drop_weak, load_task_data, split_train_test
from edgefl.tasks.losses.class_losses import softmax
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.registry import find_loss, has_classes
from edgefl.tasks.losses.value_losses import Reconstruction
from edgefl.tasks.registry import CONFIGURED, find_split_period_s, make_task

if TYPE_CHECKING:
    from edgefl.tasks.configured.options import ConfiguredTask

log = logging.getLogger(__name__)

LOGITS_OUTPUT = "logits"
MAX_BATCH_VALUES = 200_000
"""Approximate input values of a batch: enough to be fast, few enough for a small board."""

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
SUPPORTED_FORMATS = (
    ".npy, .npz, .csv, an IDX file, a file as the model's task reads it, or a shard (file or folder) of that task"
)

MAX_SHOWN_INPUTS = 5
MAX_TEXTS = 256
"""Of one request: up to 4 MB of features."""
MAX_REQUEST_CHARS = 100_000
"""Of all texts together: some seconds of a small board with as many n-grams as there may be."""
CHECK_TIMEOUT_S = 600.0
MODULE = "edgefl.device.inference.onnx_model"


class OnnxModel:
    """onnxruntime session with the metadata of its file.

    Attributes:
        model: SHA-256 of the tensors that it was made from; empty when unknown.
        task, options: of its training; empty when unknown.
        classes: names in order; empty when unknown.
        has_classes: whether the largest output is the answer; else all outputs are, as values.
        has_targets: whether the task's targets say how good an answer is; of clusters and components they do not.
        preprocess: preparation of inputs by the task's own code; empty where the graph contains all of it.
        input_shape: of one row; None for a variable dimension.
    """

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        """Loads the file.

        Raises:
            TaskError: onnxruntime is missing.
            DataError: the file is missing or no usable model.
        """
        self.path = path
        self._session = _create_session(path, threads)
        metadata: Mapping[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        self.model = metadata.get("edgefl.model", "")
        self.task = metadata.get("edgefl.task", "")
        self.options: Json = _parse_metadata(path, metadata, "edgefl.task_options", dict)
        self.preprocess: Json = _parse_metadata(path, metadata, "edgefl.preprocess", dict)
        self.classes: tuple[str, ...] = tuple(map(str, _parse_metadata(path, metadata, "edgefl.classes", list)))
        self.has_classes = metadata.get("edgefl.outputs") != "values"
        self.has_targets = metadata.get("edgefl.targets") != "none"
        inputs, outputs = self._session.get_inputs(), [output.name for output in self._session.get_outputs()]
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            found = ", ".join(f"{one.name} of {one.type}" for one in inputs[:MAX_SHOWN_INPUTS])
            raise DataError(
                f"{path} must take one float32 input to run on a board, it takes {found}; run one with inputs by "
                "name by onnxruntime itself"
            )
        self._input = inputs[0].name
        self._output = LOGITS_OUTPUT if LOGITS_OUTPUT in outputs else outputs[0]
        self.input_shape = tuple(size if isinstance(size, int) else None for size in inputs[0].shape[1:])

    @cached_property
    def configured_task(self) -> ConfiguredTask | None:
        """Returns the task of the model where that is one of a run file's options; raises as `make_task`."""
        if self.task not in CONFIGURED:
            return None
        return cast("ConfiguredTask", make_task(self.task, self.options))

    def to_batch(self, rows: Array) -> Array:
        """Returns `rows` as a batch; a single row, shaped or flat, becomes a batch of one."""
        is_flat_row = rows.ndim == 1 and self._is_flat(rows.shape)
        return rows[None] if self._has_model_shape(rows.shape) or is_flat_row else rows

    def logits(self, rows: Array) -> Array:
        """Returns [n, classes] for rows [n, ...] of any number type.

        Raises:
            DataError: the rows have a wrong shape, or are not numeric.
        """
        rows = self._validate_rows(rows)
        parts = [self._run(rows[batch_slice]) for batch_slice in _make_batch_slices(rows)]
        return np.concatenate(parts) if parts else np.zeros((0, max(1, len(self.classes))), np.float32)

    def predict(self, rows: Array) -> list[Json]:
        """Returns the most probable `class` of every row, its `index`, `probability` and `margin`, or its `values`.

        Raises:
            DataError: as `logits`.
        """
        if not self.has_classes:
            return [{"values": [float(value) for value in row]} for row in self.logits(rows)]
        return [self._make_prediction(row) for row in softmax(self.logits(rows))]

    def get_class_name(self, index: int) -> str:
        """Returns the name of a class, or its number where the file has no name of it."""
        return self.classes[index] if index < len(self.classes) else str(index)

    def accuracy(self, data: Dataset) -> float:
        """Returns the accuracy in 0-1 on the examples; raises as `logits`."""
        return self._compute_mean(data, lambda outputs, targets: float((outputs.argmax(axis=1) == targets).sum()))

    def loss(self, data: Dataset, loss: Loss) -> float:
        """Returns the mean loss on the examples; raises as `logits`, and `TaskError` where targets do not fit."""

        def add_up(outputs: Array, targets: Array) -> float:
            return len(outputs) * loss.compute_mean(outputs, loss.convert_targets(targets, outputs.shape))[0]

        return self._compute_mean(data, add_up)

    def _compute_mean(self, data: Dataset, add_up: Callable[[Array, Array], float]) -> float:
        total = sum(
            add_up(self._run(self._validate_rows(data.inputs[rows])), data.targets[rows])
            for rows in _make_batch_slices(data.inputs)
        )
        return total / max(1, len(data))

    def _run(self, rows: Array) -> Array:
        try:
            logits: Array = self._session.run([self._output], {self._input: rows.astype(np.float32)})[0]
        except Exception as error:  # noqa: BLE001 onnxruntime's errors have no class in common but this one
            raise DataError(f"{self.path} cannot be run: {str(error).splitlines()[0]}") from None
        if logits.ndim != 2 or len(logits) != len(rows):
            raise DataError(
                f"{self.path} gives {list(logits.shape)} for {len(rows)} rows, not one row of logits each"
            )
        if not np.isfinite(logits).all():
            raise DataError(f"{self.path} gives a NaN or an infinity: the model has diverged")
        return logits

    def _validate_rows(self, rows: Array) -> Array:
        if not (np.issubdtype(rows.dtype, np.number) or rows.dtype == np.bool_):
            raise DataError(f"rows must be numbers, got {rows.dtype}")
        if rows.ndim and self._has_model_shape(rows.shape[1:]):
            return rows
        if rows.ndim > 1 and self._is_flat(rows.shape[1:]):
            return rows.reshape(len(rows), *(size or 1 for size in self.input_shape))
        expected_shape = ["any" if size is None else size for size in self.input_shape]
        raise DataError(f"a row must have shape {expected_shape}, got {list(rows.shape[1:])}")

    def _has_model_shape(self, shape: tuple[int, ...]) -> bool:
        expected = self.input_shape
        return len(shape) == len(expected) and all(
            expected_size in {None, size} for size, expected_size in zip(shape, expected, strict=True)
        )

    def _is_flat(self, shape: tuple[int, ...]) -> bool:
        return None not in self.input_shape and shape == (_product(self.input_shape),)

    def _make_prediction(self, probabilities: Array) -> Json:
        index = int(probabilities.argmax())
        return {
            "class": self.get_class_name(index),
            "index": index,
            "probability": round(float(probabilities[index]), 6),
            "margin": round(compute_margin(probabilities), 6),
        }


def prepare_features(model: OnnxModel, inputs: Array) -> Array:
    """Returns a shard's inputs prepared for the model.

    A custom task may prepare inputs outside the graph: then its code, which the board has for its shards, is called.

    Raises:
        TaskError: the task is unknown here, or its learner has no `prepare`.
    """
    if not model.preprocess:
        return inputs
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 only such tasks need it

    prepare = getattr(make_task(model.task, model.options).learner(), "prepare", None)
    if prepare is None:
        raise TaskError(f"task {model.task} has no code on this board that prepares its inputs")
    features: Array = np.asarray(prepare(inputs))
    return features


def convert_texts(model: OnnxModel, texts: Sequence[object]) -> Array:
    """Returns the inputs of texts, [n, ...], as the model's task makes them.

    Raises:
        DataError: the model is of no task of texts, or these are none or too many.
    """
    task = model.configured_task
    if task is None or task.text_converter is None:
        raise DataError("the model takes rows of numbers, and no texts")
    if not 0 < len(texts) <= MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise DataError(f"texts must be 1 to {MAX_TEXTS} strings")
    if (num_chars := sum(map(len, map(str, texts)))) > MAX_REQUEST_CHARS:
        raise DataError(f"texts must have at most {MAX_REQUEST_CHARS:,} characters in all, got {num_chars:,}")
    return task.text_converter(list(map(str, texts)))


def compute_margin(probabilities: Array) -> float:
    """Returns by how much the most probable of [classes] is more probable than the next one."""
    largest = np.sort(probabilities)[::-1]
    return float(largest[0]) - (float(largest[1]) if len(largest) > 1 else 0.0)


def _create_session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 its 40 MB are only needed to run models
    except ImportError:
        raise TaskError("onnxruntime is not installed; pip install onnxruntime") from None
    if not path.is_file():
        raise DataError(f"there is no model file {path}")
    onnxruntime.disable_telemetry_events()  # what a board computes is nobody else's business
    options = onnxruntime.SessionOptions()
    # Both keep freed memory for the next run; a board needs it back.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 onnxruntime's errors have no class in common but this one
        raise DataError(f"{path} is no model that can be used: {str(error).splitlines()[0]}") from None


def _parse_metadata(path: Path, metadata: Mapping[str, str], name: str, kind: type[Any]) -> Any:
    try:
        value = parse_json(metadata.get(name) or "null")
    except ValueError:
        value = False
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{path} says nonsense in its {name}: {metadata[name]!r:.60}")
    return kind() if value is None else value


def _make_batch_slices(rows: Array) -> Iterator[slice]:
    size = max(1, MAX_BATCH_VALUES // max(1, _product(rows.shape[1:])))
    return (slice(start, start + size) for start in range(0, len(rows), size))


def _product(shape: tuple[int | None, ...]) -> int:
    return int(np.prod([size or 1 for size in shape], dtype=np.int64))


def read_inputs(path: Path, model: OnnxModel) -> tuple[Array, Array | None]:
    """Returns the rows [n, ...] at `path` and, where it has them, their labels [n].

    A row without the batch dimension counts as one row.

    Raises:
        DataError: it is missing, or cannot be read as numbers.
        UsageError: a shard is given, and the model does not declare its task.
    """
    if not path.exists():
        raise DataError(f"there is no {path}; give {SUPPORTED_FORMATS}")
    if is_shard(path):
        return _read_shard(path, model)
    if (inputs := _read_by_task(path, model)) is not None:
        return inputs, None
    if path.suffix == ".npy":
        return model.to_batch(parse_npy(path.read_bytes(), str(path))), None
    if path.suffix == ".npz":
        return _read_npz_file(path, model)
    if path.suffix in {".csv", ".txt"}:
        return _read_csv_file(path), None
    if "idx" in path.name:
        return read_idx(path), None
    raise DataError(f"{path} is none of {SUPPORTED_FORMATS}")


def is_shard(path: Path) -> bool:
    """Returns whether rows are read by the code of the model's task: a folder, or a file with a card."""
    return path.is_dir() or path.with_suffix(".json").is_file()


def parse_npy(content: bytes, source: str) -> Array:
    """Returns the array of a .npy file's bytes; object arrays are rejected.

    Raises:
        DataError: it is malformed.
    """
    try:
        return read_npy(content)
    except ValueError as error:
        raise DataError(f"{source} is no .npy array ({error})") from None


def _read_shard(path: Path, model: OnnxModel) -> tuple[Array, Array | None]:
    if not model.task:
        raise UsageError(f"{path} is a shard, and {model.path} does not say of which task it is; give a .npy file")
    data = drop_weak(load_task_data(make_task(model.task, model.options), path))
    return prepare_features(model, data.inputs), data.targets


def _read_by_task(path: Path, model: OnnxModel) -> Array | None:
    """Returns the inputs of a file in which they are no numbers, as a configured task reads it; None of others."""
    return None if model.configured_task is None else read_task_input(model.configured_task, path)


def read_task_input(task: ConfiguredTask, path: Path) -> Array | None:
    """Returns the inputs of a file in which they are no numbers, by a configured task; None of others."""
    if task.input_reader is None or path.suffix.lower() not in task.input_suffixes:
        return None
    return task.input_reader(path)


def _read_npz_file(path: Path, model: OnnxModel) -> tuple[Array, Array | None]:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no readable .npz file ({error})") from None
    if "inputs" not in arrays and len(arrays) != 1:
        raise DataError(f"{path} must hold an array 'inputs', or one array alone; it has {list(arrays)}")
    inputs = arrays["inputs"] if "inputs" in arrays else next(iter(arrays.values()))
    return model.to_batch(inputs), arrays.get("labels")


def _read_csv_file(path: Path) -> Array:
    """Returns the numbers of a CSV file; a non-numeric first line is skipped as header."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if lines and not _is_number(lines[0][0]):
        del lines[0]
    if not lines:
        raise DataError(f"{path} holds no row of numbers")
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise DataError(f"{path}: row {number} has {len(line)} values, the first has {len(lines[0])}")
        invalid = [cell for cell in line if not _is_number(cell)]
        if invalid:
            raise DataError(f"{path}: row {number} holds {invalid[0]!r:.80}, not a number of float32")
    return np.array(lines, dtype=np.float32)


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= _MAX_FLOAT32
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheckRequest:
    """Models to check, and their data: a trainer's test split, all of an evaluator's shard.

    `state_dir` is kept from the process that checks; with None it is not confined.
    """

    path: str
    former_path: str | None
    task: str
    options: Mapping[str, Any]
    shard: str
    role: str
    test_fraction: float
    state_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheckResult:
    """Accuracy of the new and the former model, or their loss where targets are no classes; None if unknown."""

    num_examples: int
    accuracy: float | None = None
    former_accuracy: float | None = None
    loss: float | None = None
    former_loss: float | None = None


def check_in_subprocess(request: ModelCheckRequest, *, timeout_s: float = CHECK_TIMEOUT_S) -> ModelCheckResult:
    """Returns the scores, computed in a child process, confined where the request has a `state_dir`.

    Raises:
        DataError: the model cannot be used.
    """
    paths = [path for path in (request.shard, request.path, request.former_path) if path is not None]
    state_dir = request.state_dir
    confinement = None if state_dir is None else make_confinement(Path(state_dir), "model-check", paths, "cpu")
    try:
        reply = call_in_subprocess(
            MODULE,
            asdict(request),
            description="checking the model",
            timeout_s=timeout_s,
            confinement=confinement,
        )
        return ModelCheckResult(**reply)
    except EdgeflError as error:
        raise DataError(str(error)) from None


def check_model(request: ModelCheckRequest) -> ModelCheckResult:
    """Returns the scores; None for a former model that cannot be run any more.

    Raises:
        EdgeflError: the new model or the data cannot be used.
    """
    task = make_task(request.task, request.options)
    data = select_check_data(task.read(request.shard), request, period_s=find_split_period_s(task))
    if not len(data):
        raise DataError(f"the shard {request.shard} holds no examples to check a model on; weak labels do not count")
    model = OnnxModel(Path(request.path))
    if model.task not in {"", request.task}:
        raise DataError(f"the model is of task {model.task}, not of {request.task}")
    loss = None if has_classes(task) else find_loss(task)
    score = _compute_score(model, data, loss)
    del model
    former = _compute_former_score(request, data, loss)
    if loss is None:
        return ModelCheckResult(accuracy=score, former_accuracy=former, num_examples=len(data))
    return ModelCheckResult(loss=score, former_loss=former, num_examples=len(data))


def predict_file(
    path: Path, source: Path, *, state_dir: Path, policy: str = "auto", threads: int = 1
) -> tuple[list[Json], list[Any] | None]:
    """Returns the predictions of a model for the rows of a file, and their labels or values where it has them.

    A shard is read and prepared by its task's code. Both that and the graph run in a confined process.

    Args:
        path: of the model.
        source: see `read_inputs`.
        state_dir: of the device, which is kept from the process.
        policy: `never` confines nothing; all others do.
        threads: of the model.

    Raises:
        EdgeflError: the model or the file cannot be used, or the process ended badly.
    """
    if not path.is_file():
        raise DataError(f"there is no model file {path}")
    if policy == "never":
        reply = _predict(str(path), str(source), threads)
    else:
        question: Json = {"path": str(path.absolute()), "source": str(source.absolute()), "threads": threads}
        with contextlib.ExitStack() as stack:
            if not state_dir.is_dir():
                state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            confinement = make_confinement(state_dir, "infer", [question["source"], question["path"]], "cpu")
            reply = call_in_subprocess(
                MODULE,
                question,
                description="the prediction",
                timeout_s=CHECK_TIMEOUT_S,
                confinement=confinement,
            )
    return reply["rows"], reply["labels"]


def _predict(path: str, source: str, threads: int) -> Json:
    model = OnnxModel(Path(path), threads=threads)
    inputs, labels = read_inputs(Path(source), model)
    has_labels = labels is not None and model.has_targets
    return {"rows": model.predict(inputs), "labels": np.asarray(labels).tolist() if has_labels else None}


def select_check_data(data: Dataset, request: ModelCheckRequest, *, period_s: float | None = None) -> Dataset:
    """Returns the check data: as in a run's evaluations, but all rows without a test split; no weak labels."""
    strong = drop_weak(data)
    if request.role == Role.EVALUATOR:
        return strong
    test = split_train_test(data, request.test_fraction, period_s=period_s)[1]
    return test if len(test) else strong


def _compute_former_score(request: ModelCheckRequest, data: Dataset, loss: Loss | None) -> float | None:
    if request.former_path is None:
        return None
    try:
        return _compute_score(OnnxModel(Path(request.former_path)), data, loss)
    except EdgeflError as error:
        log.warning("the model before cannot be judged: %s", error)
        return None


def _compute_score(model: OnnxModel, data: Dataset, loss: Loss | None) -> float | None:
    """Returns the accuracy, or with a `loss` that one; None of one that only torch computes, and without targets."""
    features = prepare_features(model, data.inputs)
    if not model.has_targets:
        model.logits(features)
        return None
    if loss is None:
        return model.accuracy(Dataset(inputs=features, targets=data.targets))
    if loss.needs_torch:
        model.logits(features)
        return None
    targets = features.astype(np.float32) if isinstance(loss, Reconstruction) else data.targets
    return model.loss(Dataset(inputs=features, targets=targets), loss)


if __name__ == "__main__":
    serve_call(
        lambda question: (
            _predict(**question) if "source" in question else asdict(check_model(ModelCheckRequest(**question)))
        )
    )
