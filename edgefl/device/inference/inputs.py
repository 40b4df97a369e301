"""Input rows for a model from a file: .npy, .npz, .csv, or a shard of the model's task."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.core.errors import DataError, UsageError
from edgefl.core.types import Array
from edgefl.device.inference.onnx_model import OnnxModel, prepare_features
from edgefl.tasks.datasets.idx import read_idx
from edgefl.tasks.datasets.npz import read_npy, read_npz
from edgefl.tasks.registry import make_task

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
SUPPORTED_FORMATS = ".npy, .npz, .csv, an IDX file, or a shard (file or folder) of the model's task"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """Batch of rows [n, ...] and, where the file has them, labels [n]."""

    inputs: Array
    labels: Array | None = None


def read_inputs(path: Path, model: OnnxModel) -> InputBatch:
    """Returns the rows at `path`; a row without the batch dimension counts as one row.

    Raises:
        DataError: it is missing, or cannot be read as numbers.
        UsageError: a shard is given, and the model does not declare its task.
    """
    if not path.exists():
        raise DataError(f"there is no {path}; give {SUPPORTED_FORMATS}")
    if path.is_dir() or path.with_suffix(".json").is_file():
        return _read_shard(path, model)
    if path.suffix == ".npy":
        return InputBatch(inputs=model.to_batch(parse_npy(path.read_bytes(), str(path))))
    if path.suffix == ".npz":
        return _read_npz_file(path, model)
    if path.suffix in {".csv", ".txt"}:
        return InputBatch(inputs=_read_csv_file(path))
    if "idx" in path.name:
        return InputBatch(inputs=read_idx(path))
    raise DataError(f"{path} is none of {SUPPORTED_FORMATS}")


def parse_npy(content: bytes, source: str) -> Array:
    """Returns the array of a .npy file's bytes; object arrays are rejected.

    Raises:
        DataError: it is malformed.
    """
    try:
        return read_npy(content)
    except ValueError as error:
        raise DataError(f"{source} is no .npy array ({error})") from None


def _read_shard(path: Path, model: OnnxModel) -> InputBatch:
    if not model.task:
        raise UsageError(f"{path} is a shard, and {model.path} does not say of which task it is; give a .npy file")
    data = make_task(model.task, model.options).read(str(path))
    return InputBatch(inputs=prepare_features(model, data.inputs), labels=data.labels)


def _read_npz_file(path: Path, model: OnnxModel) -> InputBatch:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no readable .npz file ({error})") from None
    if "inputs" not in arrays and len(arrays) != 1:
        raise DataError(f"{path} must hold an array 'inputs', or one array alone; it has {list(arrays)}")
    inputs = arrays["inputs"] if "inputs" in arrays else next(iter(arrays.values()))
    return InputBatch(inputs=model.to_batch(inputs), labels=arrays.get("labels"))


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
