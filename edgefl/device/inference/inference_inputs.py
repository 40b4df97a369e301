"""Rows to run a model on, from a file that a person names: .npy, .npz, .csv, or whatever the model's task reads."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.device.inference.onnx_model import OnnxModel, features
from edgefl.errors import DataError, UsageError
from edgefl.tasks.idx import read_idx
from edgefl.tasks.npz import read_npy, read_npz
from edgefl.tasks.registry import make_task
from edgefl.types import Array

_LARGEST = float(np.finfo(np.float32).max)
KINDS = ".npy, .npz, .csv, an IDX file, or a shard (file or folder) of the model's task"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows [n, ...] and, where the file has them, their labels [n]."""

    inputs: Array
    labels: Array | None = None


def read_rows(path: Path, model: OnnxModel) -> Rows:
    """Returns what lies at `path`; one row without its first dimension counts as one row.

    Raises:
        DataError: nothing is there, or it cannot be read as numbers.
        UsageError: a shard is given, and the model does not say of which task it is.
    """
    if not path.exists():
        raise DataError(f"there is no {path}; give {KINDS}")
    if path.is_dir() or path.with_suffix(".json").is_file():
        return _shard(path, model)
    if path.suffix == ".npy":
        return Rows(inputs=model.batch(npy_array(path.read_bytes(), str(path))))
    if path.suffix == ".npz":
        return _npz(path, model)
    if path.suffix in {".csv", ".txt"}:
        return Rows(inputs=_csv(path))
    if "idx" in path.name:
        return Rows(inputs=read_idx(path))
    raise DataError(f"{path} is none of {KINDS}")


def npy_array(content: bytes, what: str) -> Array:
    """Returns the array of a .npy file's bytes; one of objects is refused.

    Raises:
        DataError: it is none.
    """
    try:
        return read_npy(content)
    except ValueError as error:
        raise DataError(f"{what} is no .npy array ({error})") from None


def _shard(path: Path, model: OnnxModel) -> Rows:
    if not model.task:
        raise UsageError(f"{path} is a shard, and {model.path} does not say of which task it is; give a .npy file")
    data = make_task(model.task, model.options).read(str(path))
    return Rows(inputs=features(model, data.inputs), labels=data.labels)


def _npz(path: Path, model: OnnxModel) -> Rows:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no readable .npz file ({error})") from None
    if "inputs" not in arrays and len(arrays) != 1:
        raise DataError(f"{path} must hold an array 'inputs', or one array alone; it has {list(arrays)}")
    inputs = arrays["inputs"] if "inputs" in arrays else next(iter(arrays.values()))
    return Rows(inputs=model.batch(inputs), labels=arrays.get("labels"))


def _csv(path: Path) -> Array:
    """Returns the numbers of a CSV file; a first line that is none is taken for names of columns."""
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
        bad = [cell for cell in line if not _is_number(cell)]
        if bad:
            raise DataError(f"{path}: row {number} holds {bad[0]!r:.80}, not a number of float32")
    return np.array(lines, dtype=np.float32)


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= _LARGEST
    except ValueError:
        return False
