"""Shards on disk: one `.npz` and its card (a JSON file with its metadata), or a growing folder of `.npz` files.

`inputs` [n, ...], or `inputs.NAME` for each array by name, `labels` [n] and, where examples have them, `weights` [n]
and `times` are stored raw (pixels as bytes); a task
turns them into features when it trains, so files stay small and a sample keeps its hash for ever. By that hash a
device splits its data into a training and a test part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.named_arrays import NamedArrays, list_arrays
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Array, Dataset, Inputs, Task
from edgefl.system.atomic_files import compute_sha256, open_atomic
from edgefl.tasks.datasets.array_files import read_npz
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.registry import check_data, find_loss
from edgefl.tasks.registry import CONFIGURED, make_task
from edgefl.tasks.stored_arrays import (
    MAX_BYTES_IN_MEMORY,
    StoredArray,
    is_stored,
    iterate_blocks,
    select_rows,
)

if TYPE_CHECKING:
    from edgefl.tasks.datasets.table_files import Survey

# A service with a user of its own must be able to read its operator's files.
SHARD_FILE_MODE = 0o644
METADATA_VERSION = 1
MAX_METADATA_BYTES = 4 * 1024 * 1024

_ARRAYS = ("inputs", "labels")
_WEIGHTS, _TIMES = "weights", "times"
_INPUT_PREFIX = "inputs."
HASH_BYTES = 8
MAX_OPEN_FILES = 64
"""Files of a folder, the largest, that stay open for that; the inputs of the others are held in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMetadata:
    """Metadata of a shard: its task, its origin and scheme, and the checksum of the `.npz`.

    `groups` names the people in a natural shard. `blocks` maps a block of a redundant shard to its rows
    [start, stop); the same block has the same rows in the same order on every device that holds it. With `is_dataset`
    the file was cut from the data of a task of one's own: it holds what that task's `read` returned, and is taken
    without it. `options` are those of a configured task that decided what this was.
    """

    task: str
    scheme: str = ""
    source: str = ""
    num_examples: int = 0
    counts: Mapping[int, int] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    blocks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    sha256: str = ""
    is_dataset: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


def get_metadata_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def read_metadata(shard: Path) -> ShardMetadata:
    """Returns the card of a shard file; unknown fields of a newer edgefl are ignored.

    Raises:
        DataError: it is not a card.
    """
    path = get_metadata_path(shard)
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(
                f"shard card {path} has {path.stat().st_size} bytes, at most {MAX_METADATA_BYTES} are read"
            )
        value = parse_json(path.read_bytes())
        return ShardMetadata(
            task=_require_text(value["task"]),
            scheme=_require_text(value.get("scheme", "")),
            source=_require_text(value.get("source", "")),
            num_examples=int(value.get("num_examples", 0)),
            counts={int(label): int(count) for label, count in value.get("counts", {}).items()},
            labels=tuple(_require_text(label) for label in value.get("labels", [])),
            groups=tuple(_require_text(group) for group in value.get("groups", [])),
            blocks={int(block): (int(start), int(stop)) for block, (start, stop) in value.get("blocks", {}).items()},
            sha256=_require_text(value["sha256"]),
            is_dataset=value.get("is_dataset", False) is True,
            options={name: _require_text(text) for name, text in value.get("options", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"shard card {path} cannot be read ({type(error).__name__}: {error}); cut the shard again"
        ) from None


def compute_file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return compute_sha256(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file to write; it appears under its name only on success, and then durably.

    Creates the folder if missing.

    Raises:
        DataError: the directory cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path, mode=SHARD_FILE_MODE) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """Content of a shard: examples per class, and the task's missing classes (if the task names them).

    `target_range` is the least and the largest target where targets are values, which have no counts. `details` are
    lines that describe the shard of a configured task without its run file.
    """

    task: str
    path: str
    num_examples: int
    counts: Mapping[int, int]
    missing_labels: tuple[int, ...]
    labels: tuple[str, ...] = ()
    target_range: tuple[float, float] | None = None
    details: tuple[str, ...] = ()


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
    shard_path = Path(path)
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
            shape = "" if input_shape is None else "".join(f", {size}" for size in input_shape)
            classes = "" if num_classes is None else f" in 0..{num_classes - 1}"
            raise DataError(
                f"shard {shard_path} has no card, the file {get_metadata_path(shard_path).name} that says its task. "
                f"A file of your own is a .npz with inputs [n{shape or ', ...'}] (numbers) and labels [n] (whole "
                f"numbers{classes}) for {task}; put it into a folder and name the folder: it needs no card there. "
                "See docs/tutorials/first-task.md, Your data in a file"
            )
        is_large = bool(_select_in_place([shard_path]))
        return _read_file(shard_path, task, input_shape, num_classes, in_place=is_large)
    files = list_shard_files(shard_path)
    if not files:
        raise DataError(f"shard folder {shard_path} holds no .npz file yet")
    in_place = _select_in_place(files)
    return _concatenate(
        [_read_file(file, task, input_shape, num_classes, in_place=file in in_place) for file in files], shard_path
    )


def list_shard_files(folder: Path) -> list[Path]:
    """Returns the finished `.npz` files of a folder by name."""
    return sorted(file for file in folder.glob("*.npz") if not file.name.startswith("."))


def write_shard(path: Path, data: Dataset, metadata: ShardMetadata) -> ShardMetadata:
    """Writes `.npz` and card, each whole or not at all, without weak examples; returns the card with its counts."""
    data = drop_weak(data)
    optional = {name: getattr(data, name) for name in (_WEIGHTS, _TIMES) if getattr(data, name) is not None}
    with write_atomically(path) as file:
        arrays: dict[str, Any] = {**pack_inputs(data.inputs), "labels": data.targets, **optional}
        np.savez(file, **arrays)
    is_counted = bool(metadata.labels) or not metadata.is_dataset
    counts = count_labels(data.targets) if is_counted else {}
    written = replace(metadata, counts=counts, num_examples=len(data), sha256=compute_file_sha256(path))
    with write_atomically(get_metadata_path(path)) as file:
        file.write(json.dumps({"v": METADATA_VERSION, **asdict(written)}, indent=1).encode() + b"\n")
    return written


def count_labels(labels: Array) -> dict[int, int]:
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): int(count) for label, count in zip(classes, counts, strict=True)}


def load_task_data(task: Task, path: str | Path) -> Dataset:
    """Returns a task's data at a path: by its own `read`, or of a shard that was cut from what that returned.

    Raises:
        DataError: the shard is damaged or of another task, or its data is none for the task's loss.
    """
    data = _read_cut_file(Path(path), task) if _is_cut(Path(path)) else task.read(str(path))
    check_data(task, data)
    return data


def _is_cut(path: Path) -> bool:
    try:
        return path.is_file() and get_metadata_path(path).is_file() and read_metadata(path).is_dataset
    except DataError:  # a file of the user's own beside a shard that the task reads itself
        return False


def _read_cut_file(path: Path, task: Task) -> Dataset:
    card = _check_card(path, task.name)
    options = getattr(task, "shard_options", {})
    for name in {**options, **card.options}:
        text = options.get(name, "none")
        if card.options.get(name, "none") != text:
            raise DataError(
                f"shard {path} was cut with {name} = {card.options.get(name, 'none')!r:.200}, the run file has "
                f"{text!r:.200}; cut it again"
            )
    arrays = _load_arrays(path, None, in_place=bool(_select_in_place([path])), is_checked=True)
    is_named = not any(name == _ARRAYS[0] for name in arrays) and any(map(_is_input, arrays))
    if missing := [name for name in _ARRAYS[is_named:] if name not in arrays]:
        raise DataError(f"shard {path} has no array {missing[0]!r}; cut it again")
    if wrong := [name for name, array in arrays.items() if array.ndim == 0 or not _has_numbers(name, array)]:
        raise DataError(f"{wrong[0]} of shard {path} must be numbers [n, ...], got {arrays[wrong[0]].dtype}")
    try:
        return Dataset(
            inputs=unpack_inputs(arrays),
            targets=arrays["labels"],
            weights=arrays.get(_WEIGHTS),
            times=arrays.get(_TIMES),
        )
    except DataError as error:
        raise DataError(f"shard {path}: {error}") from None


def _has_numbers(name: str, array: Array) -> bool:
    """Returns whether an array of a file holds numbers; targets may hold some by name, which their losses check."""
    return array.dtype.kind in "fiub" or (name == _ARRAYS[1] and array.dtype.names is not None and array.ndim == 1)


def pack_inputs(inputs: Inputs) -> dict[str, Array]:
    """Returns inputs as arrays of a file: `inputs`, or `inputs.NAME` for each name."""
    if not isinstance(inputs, NamedArrays):
        return {_ARRAYS[0]: inputs}
    return {f"{_INPUT_PREFIX}{name}": array for name, array in inputs.to_dict().items()}


def unpack_inputs(arrays: Mapping[str, Array]) -> Inputs:
    """Returns the inputs among the arrays of a file, as `pack_inputs` names them; there are some.

    Raises:
        DataError: arrays by name are no inputs.
    """
    if _ARRAYS[0] in arrays:
        return arrays[_ARRAYS[0]]
    return NamedArrays({name.removeprefix(_INPUT_PREFIX): arrays[name] for name in arrays if _is_input(name)})


def _is_input(name: str) -> bool:
    return name == _ARRAYS[0] or name.startswith(_INPUT_PREFIX)


def is_of_classes(task: Task, data: Dataset) -> bool:
    """Returns whether targets are classes: [n] whole numbers that the task names, or its loss takes for classes."""
    is_whole = data.targets.ndim == 1 and data.targets.dtype.kind in "iu"
    return is_whole and (bool(getattr(task, "labels", ())) or isinstance(find_loss(task), CrossEntropy))


def inspect_shard(name: str, path: str, *, is_detailed: bool = False) -> ShardReport:
    """Returns what a shard holds for the task of that name with its usual options.

    A configured task has none: its examples are counted, and its run file says later which columns and classes count.

    Raises:
        EdgeflError: there is no such task, or the shard cannot be used.
    """
    if name not in CONFIGURED:
        return check_shard(make_task(name), path)
    if _is_cut(Path(path)):
        card = _check_card(Path(path), name)
        count, details = card.num_examples, tuple(f"{option} = {text}" for option, text in card.options.items())
    else:
        survey = _find_survey(name)(Path(path), name, is_detailed=is_detailed)
        count, details = survey.num_examples, survey.details
    return ShardReport(task=name, path=path, num_examples=count, counts={}, missing_labels=(), details=details)


def _find_survey(name: str) -> Callable[..., Survey]:
    """Returns what counts the examples of a configured task's shard without its run file."""
    from edgefl.tasks.datasets.class_folders import survey_class_folders, survey_sounds  # noqa: PLC0415 memory
    from edgefl.tasks.datasets.table_files import survey_table  # noqa: PLC0415 likewise

    if name in ("series", "table", "text"):
        return survey_table
    return survey_sounds if name == "audio" else survey_class_folders


def check_shard(task: Task, path: str) -> ShardReport:
    """Returns the data that the task reads from `path`.

    Raises:
        DataError: the shard cannot be used.
    """
    data = load_task_data(task, path)
    labels = tuple(getattr(task, "labels", ()))
    has_classes = is_of_classes(task, data) or (bool(labels) and data.targets.ndim == 1)
    counts = count_labels(data.targets) if has_classes else {}
    missing = tuple(label for label in range(len(labels)) if label not in counts)
    return ShardReport(
        task=task.name,
        path=path,
        num_examples=len(data),
        counts=counts,
        missing_labels=missing,
        labels=labels,
        target_range=None
        if has_classes or not data.targets.size or data.targets.dtype.names
        else (float(data.targets.min()), float(data.targets.max())),
    )


def _select_in_place(files: list[Path]) -> set[Path]:
    """Returns the files whose inputs are read when they are needed, and not before: the largest of a large shard."""
    try:
        sizes = {file: file.stat().st_size for file in files}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    if sum(sizes.values()) <= MAX_BYTES_IN_MEMORY:
        return set()
    return set(sorted(sizes, key=lambda file: -sizes[file])[:MAX_OPEN_FILES])


def _read_file(
    path: Path, task: str, input_shape: tuple[int, ...] | None, num_classes: int | None, *, in_place: bool
) -> Dataset:
    has_card = get_metadata_path(path).exists()
    if has_card:
        _check_card(path, task)
    arrays = _load_arrays(path, _ARRAYS, in_place=in_place, is_checked=has_card)
    data = Dataset(inputs=arrays["inputs"], targets=arrays["labels"], weights=arrays.get(_WEIGHTS))
    _check_dataset(data, path, input_shape)
    _check_values(data, path, num_classes)
    return data


def _check_card(path: Path, task: str) -> ShardMetadata:
    card = read_metadata(path)
    if card.task != task:
        raise DataError(f"shard {path} is of task {card.task}, this is task {task}")
    if (checksum := compute_file_sha256(path)) != card.sha256:
        raise DataError(
            f"shard {path} is damaged: its SHA-256 is {checksum[:12]}…, "
            f"its card says {card.sha256[:12]}…; copy it again"
        )
    return card


def _load_arrays(path: Path, names: Collection[str] | None, *, in_place: bool, is_checked: bool) -> dict[str, Array]:
    try:
        with path.open("rb") as file:
            in_place_inputs = _is_input if in_place else None
            return read_npz(file, names, optional=(_WEIGHTS,), in_place=in_place_inputs, is_checked=is_checked)
    except (OSError, ValueError) as error:
        raise DataError(f"shard {path} is not a readable .npz file ({error}); copy it again") from None


def _check_dataset(data: Dataset, path: Path, shape: tuple[int, ...] | None) -> None:
    inputs, labels = data.inputs, data.targets
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels of shard {path} must be integers [n], got {labels.dtype} {list(labels.shape)}")
    if inputs.ndim == 0 or len(inputs) != len(labels) or not np.issubdtype(inputs.dtype, np.number):
        raise DataError(
            f"inputs of shard {path} must be numbers, one row for each of {len(labels)} labels, "
            f"got {inputs.dtype} {list(inputs.shape)}"
        )
    if not len(labels):
        raise DataError(f"shard {path} holds no examples")
    if shape is not None and inputs.shape[1:] != shape:
        raise DataError(f"inputs of shard {path} must be {list(shape)} each, got {list(inputs.shape[1:])}")


def _check_values(data: Dataset, path: Path, num_classes: int | None) -> None:
    low, high = int(data.targets.min()), int(data.targets.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        limit = "" if num_classes is None else f"..{num_classes - 1}"
        raise DataError(f"labels of shard {path} must lie in 0{limit}, got {low if low < 0 else high}")
    row = 0
    for block in iterate_blocks(data.inputs) if np.issubdtype(data.inputs.dtype, np.inexact) else ():
        if not np.isfinite(block).all():
            row += int(np.argwhere(~np.isfinite(block))[0][0])
            raise DataError(f"inputs of shard {path} hold a NaN or an infinity, first in row {row}")
        row += len(block)


def _concatenate(parts: list[Dataset], folder: Path) -> Dataset:
    if len({part.inputs.shape[1:] for part in parts}) > 1:
        raise DataError(f"the files of shard folder {folder} hold inputs of different shapes")
    if not any(is_stored(part.inputs) for part in parts):
        return Dataset.concatenate(parts)
    without = Dataset.concatenate([replace(part, inputs=np.empty((len(part), 0), np.uint8)) for part in parts])
    return replace(without, inputs=StoredArray.concatenate([part.inputs for part in parts]))


def split_train_test(
    data: Dataset, test_fraction: float = 0.1, salt: str = "", *, period_s: float | None = None
) -> tuple[Dataset, Dataset]:
    """Returns (train, test), as `find_sides` says; either part of a very small shard may be empty.

    Raises:
        ConfigError, DataError: as `find_sides`.
    """
    in_train, in_test = find_sides(data, test_fraction, salt, period_s=period_s)
    return select_rows(data, in_train), select_rows(data, in_test)


def find_sides(
    data: Dataset, test_fraction: float, salt: str = "", *, period_s: float | None = None
) -> tuple[Array, Array]:
    """Returns [n] whether examples are trained on, and [n] whether they are tested on; a side is one for ever.

    An example's side depends on its own bytes only, or with `period_s` on the number of its period since 1970. So
    growing data never moves an example, and without periods copies of one stay on one side; no example is ever
    trained on and used for a test. Weak ones are never tested on. One whose time reaches from a period of one side
    into that of the other, or over more than two, is on neither.

    Args:
        data: the examples.
        test_fraction: of the examples, or of the periods.
        salt: of the hash.
        period_s: seconds of a period; None for no periods.

    Raises:
        ConfigError: `test_fraction` is not in [0, 1).
        DataError: with `period_s`, no times are known, or no example lies on one side.
    """
    if not 0.0 <= test_fraction < 1.0:
        raise ConfigError(f"test fraction must be in [0, 1), got {test_fraction}")
    limit = np.uint64(test_fraction * 2.0**64)
    if period_s is None:
        in_test, filled = np.zeros(len(data), bool), 0
        for hashes in _iterate_sample_hashes(data.inputs, salt):
            in_test[filled : filled + len(hashes)] = hashes < limit
            filled += len(hashes)
        in_train = ~in_test
    else:
        in_train, in_test = _find_sides_by_period(data, limit, salt, period_s)
    if data.weak is not None:
        # By its own bytes a weak example is trained on; in a period that is kept for testing it is not.
        in_train, in_test = in_train | (in_test & data.weak & (period_s is None)), in_test & ~data.weak
    return in_train, in_test


def _find_sides_by_period(data: Dataset, limit: np.uint64, salt: str, period_s: float) -> tuple[Array, Array]:
    if not limit:
        return np.ones(len(data), bool), np.zeros(len(data), bool)
    if data.times is None:
        raise DataError(
            f"the data is to be split by periods of {period_s:g} s (split_period), and nothing says when its "
            "examples were taken; let read return times, or cut the shards again from data that has them"
        )
    spans = data.times[:, None] if data.times.ndim == 1 else data.times
    periods = np.floor(spans.astype(np.float64) / period_s).astype("<i8")
    numbers, places = np.unique(periods, return_inverse=True)
    hashes = np.concatenate([np.zeros(0, "<u8"), *_iterate_sample_hashes(numbers[:, None], f"period {salt}")])
    is_test = (hashes < limit)[places.reshape(periods.shape)]
    is_near = periods[:, -1] - periods[:, 0] <= 1  # of more periods the ones between would have to be asked, too
    in_train, in_test = ~is_test.any(axis=1) & is_near, is_test.all(axis=1) & is_near
    if len(data) and not (in_train.any() or in_test.any()):
        raise DataError(
            f"no example lies within periods of one side: they last longer than split_period, {period_s:g} s"
        )
    return in_train, in_test


def drop_unlabelled(data: Dataset) -> Dataset:
    """Returns the examples that have a label, also a weak one."""
    unlabelled = data.find_unlabelled()
    return data if unlabelled is None else select_rows(data, np.flatnonzero(~unlabelled))


def drop_weak(data: Dataset) -> Dataset:
    """Returns the examples whose targets are no guesses."""
    return data if data.weak is None else select_rows(data, ~data.weak)


def compute_root_fraction(num_available: int, num_examples: int) -> float:
    """Returns the test fraction whose test part has about `num_examples`, at most half: a coordinator's root."""
    return min(0.5, num_examples / max(1, num_available))


def compute_sample_hashes(inputs: Inputs, salt: str = "") -> Array:
    """Returns [n] uint64, uniform, the same for equal samples on every machine; of all arrays by name together."""
    return np.concatenate([np.zeros(0, "<u8"), *_iterate_sample_hashes(inputs, salt)])


def _iterate_sample_hashes(inputs: Inputs, salt: str) -> Iterator[Array]:
    """Yields the hashes of samples, a block of them at a time where they are in files."""
    start = hashlib.blake2b(digest_size=HASH_BYTES, key=hashlib.sha256(salt.encode()).digest())
    for block in iterate_blocks(inputs) if inputs.size else ():
        digests = bytearray()
        parts = [_to_bytes(array) for array in list_arrays(block) if array.size]
        for row in zip(*parts, strict=True):
            digest = start.copy()
            for part in row:
                digest.update(part.data)
            digests += digest.digest()
        yield np.frombuffer(digests, dtype="<u8")


def _to_bytes(array: Array) -> Array:
    """Returns the bytes of each row, [n, bytes], the same on every machine."""
    rows = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return rows.reshape(len(rows), -1).view(np.uint8)
