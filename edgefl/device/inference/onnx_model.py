"""A model in ONNX, run by onnxruntime with as little memory as it can do with; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.errors import DataError, TaskError
from edgefl.types import Array, Dataset, Json
from edgefl.untrusted import parse_json

OUTPUT = "logits"
BATCH_VALUES = 200_000
"""A batch holds about so many input values: enough to be fast, little enough for a small board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The likeliest class of one row, its name, and its probability."""

    index: int
    name: str
    probability: float

    def to_json(self) -> Json:
        return {"class": self.name, "index": self.index, "probability": round(self.probability, 6)}


class OnnxModel:
    """A session of onnxruntime and what the file says of itself.

    Attributes:
        model: SHA-256 of the tensors that it was made from; empty where the file does not say.
        task, options: what it was trained for; empty likewise.
        classes: their names, in order; empty likewise.
        preprocess: what the task's own code has to do to its inputs before; empty where the file does all of it.
        input_shape: of one row; None for a dimension that is not fixed.
    """

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        """Loads the file.

        Raises:
            TaskError: onnxruntime is missing.
            DataError: the file is missing or is no model that can be used.
        """
        self.path = path
        self._session = _session(path, threads)
        facts: Mapping[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        self.model = facts.get("edgefl.model", "")
        self.task = facts.get("edgefl.task", "")
        self.options: Json = _json(path, facts, "edgefl.task_options", dict)
        self.preprocess: Json = _json(path, facts, "edgefl.preprocess", dict)
        self.classes: tuple[str, ...] = tuple(map(str, _json(path, facts, "edgefl.classes", list)))
        inputs, outputs = self._session.get_inputs(), [found.name for found in self._session.get_outputs()]
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            raise DataError(f"{path} must take one float32 input, it takes {[(i.name, i.type) for i in inputs]}")
        self._input = inputs[0].name
        self._output = OUTPUT if OUTPUT in outputs else outputs[0]
        self.input_shape = tuple(size if isinstance(size, int) else None for size in inputs[0].shape[1:])

    def batch(self, rows: Array) -> Array:
        """Returns `rows`, or a batch of one where it is a single row, whether in the model's shape or flat."""
        is_flat_row = rows.ndim == 1 and self._is_flat(rows.shape)
        return rows[None] if self._fits(rows.shape) or is_flat_row else rows

    def logits(self, rows: Array) -> Array:
        """Returns [n, classes] for rows [n, ...] of any number type.

        Raises:
            DataError: the rows have another shape than the model takes, or are no numbers.
        """
        rows = self._checked(rows)
        parts = [self._run(rows[piece]) for piece in _batches(rows)]
        return np.concatenate(parts) if parts else np.zeros((0, max(1, len(self.classes))), np.float32)

    def predict(self, rows: Array) -> list[Prediction]:
        """Returns the likeliest class of every row; raises as `logits`."""
        return [self._prediction(row) for row in softmax(self.logits(rows))]

    def accuracy(self, data: Dataset) -> float:
        """Returns the fraction of examples whose likeliest class is their label; raises as `logits`."""
        correct = sum(
            int((self._run(self._checked(data.inputs[piece])).argmax(axis=1) == data.labels[piece]).sum())
            for piece in _batches(data.inputs)
        )
        return correct / max(1, len(data))

    def _run(self, rows: Array) -> Array:
        try:
            found: Array = self._session.run([self._output], {self._input: rows.astype(np.float32)})[0]
        except Exception as error:  # noqa: BLE001 onnxruntime's errors have no class in common but this one
            raise DataError(f"{self.path} cannot be run: {str(error).splitlines()[0]}") from None
        if found.ndim != 2 or len(found) != len(rows):
            raise DataError(f"{self.path} gives {list(found.shape)} for {len(rows)} rows, not one row of logits each")
        if not np.isfinite(found).all():
            raise DataError(f"{self.path} gives a NaN or an infinity: the model has diverged")
        return found

    def _checked(self, rows: Array) -> Array:
        if not (np.issubdtype(rows.dtype, np.number) or rows.dtype == np.bool_):
            raise DataError(f"rows must be numbers, got {rows.dtype}")
        if rows.ndim and self._fits(rows.shape[1:]):
            return rows
        if rows.ndim > 1 and self._is_flat(rows.shape[1:]):
            return rows.reshape(len(rows), *(size or 1 for size in self.input_shape))
        shown = ["any" if size is None else size for size in self.input_shape]
        raise DataError(f"a row must have shape {shown}, got {list(rows.shape[1:])}")

    def _fits(self, shape: tuple[int, ...]) -> bool:
        wanted = self.input_shape
        return len(shape) == len(wanted) and all(
            want in {None, size} for size, want in zip(shape, wanted, strict=True)
        )

    def _is_flat(self, shape: tuple[int, ...]) -> bool:
        return None not in self.input_shape and shape == (_product(self.input_shape),)

    def _prediction(self, probabilities: Array) -> Prediction:
        index = int(probabilities.argmax())
        name = self.classes[index] if index < len(self.classes) else str(index)
        return Prediction(index=index, name=name, probability=float(probabilities[index]))


def features(model: OnnxModel, inputs: Array) -> Array:
    """Returns what a shard holds as the model takes it.

    A task of the user's own may prepare inputs in a way that no graph has: then its code does it, which such a board
    has, since its shards need it as well.

    Raises:
        TaskError: the task is unknown here, or its learner has no `prepare`.
    """
    if not model.preprocess:
        return inputs
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 only such tasks need it

    prepare = getattr(make_task(model.task, model.options).learner(), "prepare", None)
    if prepare is None:
        raise TaskError(f"task {model.task} has no code on this board that prepares its inputs")
    prepared: Array = np.asarray(prepare(inputs))
    return prepared


def softmax(logits: Array) -> Array:
    """Returns the probabilities of [n, classes] logits."""
    shifted: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    shifted /= shifted.sum(axis=1, keepdims=True)
    return shifted


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 its 40 MB are only for those who run models
    except ImportError:
        raise TaskError("onnxruntime is not installed; pip install onnxruntime") from None
    if not path.is_file():
        raise DataError(f"there is no model file {path}")
    options = onnxruntime.SessionOptions()
    # Both keep freed memory for the next run; a board would rather have it back.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 onnxruntime's errors have no class in common but this one
        raise DataError(f"{path} is no model that can be used: {str(error).splitlines()[0]}") from None


def _json(path: Path, facts: Mapping[str, str], name: str, kind: type[Any]) -> Any:
    try:
        value = parse_json(facts.get(name) or "null")
    except ValueError:
        value = False
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{path} says nonsense in its {name}: {facts[name]!r:.60}")
    return kind() if value is None else value


def _batches(rows: Array) -> Iterator[slice]:
    size = max(1, BATCH_VALUES // max(1, _product(rows.shape[1:])))
    return (slice(start, start + size) for start in range(0, len(rows), size))


def _product(shape: tuple[int | None, ...]) -> int:
    return int(np.prod([size or 1 for size in shape], dtype=np.int64))
