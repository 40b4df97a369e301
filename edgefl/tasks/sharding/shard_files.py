"""Shards on disk: one `.npz` and its card, or a growing folder of `.npz` files.

`inputs` [n, ...] and `labels` [n] are stored raw (pixels as bytes); a task turns them into features when it
trains, so files stay small and a sample keeps its hash for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.types import Array, Dataset, Task
from edgefl.tasks.datasets.npz import read_npz
from edgefl.tasks.sharding.shard_metadata import (
    ShardMetadata,
    compute_file_sha256,
    get_metadata_path,
    read_metadata,
    write_atomically,
    write_metadata,
)

_ARRAYS = ("inputs", "labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """Content of a shard: examples per class, and the task's missing classes (if the task names them)."""

    task: str
    path: str
    num_examples: int
    counts: Mapping[int, int]
    missing_labels: tuple[int, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardRequirements:
    task: str
    input_shape: tuple[int, ...] | None
    num_classes: int | None


def read_shard(
    path: str, task: str, *, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None
) -> Dataset:
    """Returns the examples of a shard file, or of a folder's `.npz` files by name.

    A file needs its card, to detect another task's shard or a damaged one; files in a folder are
    checked against a card where they have one. Names that start with a dot or do not end in `.npz` are
    skipped: they are still being written.

    Raises:
        DataError: no file, or one that is damaged, of another task, or invalid.
    """
    shard_path, expected = Path(path), _ShardRequirements(task=task, input_shape=input_shape, num_classes=num_classes)
    try:
        is_there = bool(path) and shard_path.exists()
        is_open = is_there and os.access(shard_path, os.R_OK | os.X_OK if shard_path.is_dir() else os.R_OK)
    except PermissionError:
        is_there, is_open = True, False
    if not is_there:
        raise DataError(f"shard {path!r} of task {task} does not exist; give a .npz file or a folder of them")
    if not is_open:
        raise DataError(
            f"shard {path!r} of task {task} may not be read by this user; let it: setfacl, chgrp or chmod"
        )
    if not shard_path.is_dir():
        if not get_metadata_path(shard_path).exists():
            raise DataError(
                f"shard {shard_path} has no card {get_metadata_path(shard_path).name}; "
                "put a file without one into a folder of its own"
            )
        return _read_file(shard_path, expected)
    files = list_shard_files(shard_path)
    if not files:
        raise DataError(f"shard folder {shard_path} holds no .npz file yet")
    return _concatenate([_read_file(file, expected) for file in files], shard_path)


def list_shard_files(folder: Path) -> list[Path]:
    """Returns the finished `.npz` files of a folder by name."""
    return sorted(file for file in folder.glob("*.npz") if not file.name.startswith("."))


def write_shard(path: Path, data: Dataset, metadata: ShardMetadata) -> ShardMetadata:
    """Writes `.npz` and card, each whole or not at all; returns the card with its counts and checksum."""
    with write_atomically(path) as file:
        np.savez(file, inputs=data.inputs, labels=data.labels)
    return write_metadata(path, metadata, counts=count_labels(data.labels), sha256=compute_file_sha256(path))


def count_labels(labels: Array) -> dict[int, int]:
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): int(count) for label, count in zip(classes, counts, strict=True)}


def check_shard(task: Task, path: str) -> ShardReport:
    """Returns the data that the task reads from `path`.

    Raises:
        DataError: the shard cannot be used.
    """
    data = task.read(path)
    counts = count_labels(data.labels)
    labels = tuple(getattr(task, "labels", ()))
    missing = tuple(label for label in range(len(labels)) if label not in counts)
    return ShardReport(
        task=task.name, path=path, num_examples=len(data), counts=counts, missing_labels=missing, labels=labels
    )


def _read_file(path: Path, requirements: _ShardRequirements) -> Dataset:
    if get_metadata_path(path).exists():
        card = read_metadata(path)
        if card.task != requirements.task:
            raise DataError(f"shard {path} is of task {card.task}, this is task {requirements.task}")
        if (checksum := compute_file_sha256(path)) != card.sha256:
            raise DataError(
                f"shard {path} is damaged: its SHA-256 is {checksum[:12]}…, "
                f"its card says {card.sha256[:12]}…; copy it again"
            )
    return _validate_dataset(_load_file(path), path, requirements)


def _load_file(path: Path) -> Dataset:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, _ARRAYS)
    except (OSError, ValueError) as error:
        raise DataError(f"shard {path} is not a readable .npz file ({error}); copy it again") from None
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise DataError(f"shard {path} has no array {missing[0]!r}, only {', '.join(arrays) or 'others'}")
    return Dataset(inputs=arrays["inputs"], labels=arrays["labels"])


def _validate_dataset(data: Dataset, path: Path, requirements: _ShardRequirements) -> Dataset:
    inputs, labels = data.inputs, data.labels
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels of shard {path} must be integers [n], got {labels.dtype} {list(labels.shape)}")
    if inputs.ndim == 0 or len(inputs) != len(labels) or not np.issubdtype(inputs.dtype, np.number):
        raise DataError(
            f"inputs of shard {path} must be numbers, one row for each of {len(labels)} labels, "
            f"got {inputs.dtype} {list(inputs.shape)}"
        )
    if not len(labels):
        raise DataError(f"shard {path} holds no examples")
    shape = requirements.input_shape
    if shape is not None and inputs.shape[1:] != shape:
        raise DataError(f"inputs of shard {path} must be {list(shape)} each, got {list(inputs.shape[1:])}")
    _check_values(data, path, requirements.num_classes)
    return data


def _check_values(data: Dataset, path: Path, num_classes: int | None) -> None:
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        limit = "" if num_classes is None else f"..{num_classes - 1}"
        raise DataError(f"labels of shard {path} must lie in 0{limit}, got {low if low < 0 else high}")
    if np.issubdtype(data.inputs.dtype, np.inexact) and not np.isfinite(data.inputs).all():
        row = int(np.argwhere(~np.isfinite(data.inputs))[0][0])
        raise DataError(f"inputs of shard {path} hold a NaN or an infinity, first in row {row}")


def _concatenate(parts: list[Dataset], folder: Path) -> Dataset:
    if len({part.inputs.shape[1:] for part in parts}) > 1:
        raise DataError(f"the files of shard folder {folder} hold inputs of different shapes")
    return Dataset(
        inputs=np.concatenate([part.inputs for part in parts]), labels=np.concatenate([part.labels for part in parts])
    )
