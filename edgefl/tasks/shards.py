"""Shards on disk: one `.npz` and its card, or a folder of `.npz` files that grows while the board collects.

`inputs` [n, ...] and `labels` [n] are stored raw (pixels as bytes); a task turns them into features when it
trains, so files stay small and a sample keeps its hash for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.tasks.cards import ShardCard, card_path, file_sha256, read_card, write_atomically, write_card
from edgefl.tasks.npz import read_npz
from edgefl.types import Array, Dataset, Task

_ARRAYS = ("inputs", "labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """What a shard holds: examples per class, and the classes of the task that it lacks (if the task names them)."""

    task: str
    path: str
    num_examples: int
    counts: Mapping[int, int]
    missing: tuple[int, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    task: str
    input_shape: tuple[int, ...] | None
    num_classes: int | None


def read_shard(
    path: str, task: str, *, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None
) -> Dataset:
    """Returns the examples of a shard file or of every `.npz` in a folder, in the order of the names.

    A file needs its card, so that another task's shard or a damaged one is noticed; files in a folder are
    checked against a card where they have one. Names that start with a dot or do not end in `.npz` are
    passed over: the board is still writing them.

    Raises:
        DataError: nothing there, or a file that is damaged, of another task, or makes no sense.
    """
    place, expected = Path(path), _Expected(task=task, input_shape=input_shape, num_classes=num_classes)
    try:
        is_there = bool(path) and place.exists()
        is_open = is_there and os.access(place, os.R_OK | os.X_OK if place.is_dir() else os.R_OK)
    except PermissionError:
        is_there, is_open = True, False
    if not is_there:
        raise DataError(f"shard {path!r} of task {task} does not exist; give a .npz file or a folder of them")
    if not is_open:
        raise DataError(
            f"shard {path!r} of task {task} may not be read by this user; let it: setfacl, chgrp or chmod"
        )
    if not place.is_dir():
        if not card_path(place).exists():
            raise DataError(
                f"shard {place} has no card {card_path(place).name}; put a file without one into a folder of its own"
            )
        return _read_file(place, expected)
    files = shard_files(place)
    if not files:
        raise DataError(f"shard folder {place} holds no .npz file yet")
    return _joined([_read_file(file, expected) for file in files], place)


def shard_files(folder: Path) -> list[Path]:
    """Returns the finished `.npz` files of a folder by name."""
    return sorted(file for file in folder.glob("*.npz") if not file.name.startswith("."))


def write_shard(path: Path, data: Dataset, card: ShardCard) -> ShardCard:
    """Writes `.npz` and card, each whole or not at all; returns the card with its counts and checksum."""
    with write_atomically(path) as file:
        np.savez(file, inputs=data.inputs, labels=data.labels)
    return write_card(path, card, counts=count_labels(data.labels), sha256=file_sha256(path))


def count_labels(labels: Array) -> dict[int, int]:
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): int(count) for label, count in zip(classes, counts, strict=True)}


def check_shard(task: Task, path: str) -> ShardReport:
    """Returns what the task reads from `path`.

    Raises:
        DataError: the shard cannot be used.
    """
    data = task.read(path)
    counts = count_labels(data.labels)
    labels = tuple(getattr(task, "labels", ()))
    missing = tuple(label for label in range(len(labels)) if label not in counts)
    return ShardReport(
        task=task.name, path=path, num_examples=len(data), counts=counts, missing=missing, labels=labels
    )


def _read_file(path: Path, expected: _Expected) -> Dataset:
    if card_path(path).exists():
        card = read_card(path)
        if card.task != expected.task:
            raise DataError(f"shard {path} is of task {card.task}, this is task {expected.task}")
        if (found := file_sha256(path)) != card.sha256:
            raise DataError(
                f"shard {path} is damaged: its SHA-256 is {found[:12]}…, "
                f"its card says {card.sha256[:12]}…; copy it again"
            )
    return _checked(_load(path), path, expected)


def _load(path: Path) -> Dataset:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, _ARRAYS)
    except (OSError, ValueError) as error:
        raise DataError(f"shard {path} is not a readable .npz file ({error}); copy it again") from None
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise DataError(f"shard {path} has no array {missing[0]!r}, only {', '.join(arrays) or 'others'}")
    return Dataset(inputs=arrays["inputs"], labels=arrays["labels"])


def _checked(data: Dataset, path: Path, expected: _Expected) -> Dataset:
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
    shape = expected.input_shape
    if shape is not None and inputs.shape[1:] != shape:
        raise DataError(f"inputs of shard {path} must be {list(shape)} each, got {list(inputs.shape[1:])}")
    _check_values(data, path, expected.num_classes)
    return data


def _check_values(data: Dataset, path: Path, num_classes: int | None) -> None:
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        limit = "" if num_classes is None else f"..{num_classes - 1}"
        raise DataError(f"labels of shard {path} must lie in 0{limit}, got {low if low < 0 else high}")
    if np.issubdtype(data.inputs.dtype, np.inexact) and not np.isfinite(data.inputs).all():
        row = int(np.argwhere(~np.isfinite(data.inputs))[0][0])
        raise DataError(f"inputs of shard {path} hold a NaN or an infinity, first in row {row}")


def _joined(parts: list[Dataset], folder: Path) -> Dataset:
    if len({part.inputs.shape[1:] for part in parts}) > 1:
        raise DataError(f"the files of shard folder {folder} hold inputs of different shapes")
    return Dataset(
        inputs=np.concatenate([part.inputs for part in parts]), labels=np.concatenate([part.labels for part in parts])
    )
