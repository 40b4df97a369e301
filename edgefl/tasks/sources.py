"""Central data sets, for experiments that cut shards from one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.errors import DataError, MissingPackageError, TaskError, install_line
from edgefl.tasks.idx import read_image_set
from edgefl.tasks.motion_windows import FILE_NAME, MotionWindows, read_motion_windows
from edgefl.tasks.noop import noop_data
from edgefl.tasks.splits import local_split
from edgefl.types import Array, Dataset

DATA_VARIABLE = "EDGEFL_DATA"
DIGITS_TEST_FRACTION = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralData:
    """A data set in one place: what devices train on, what the coordinator tests on, and who each row is from."""

    train: Dataset
    test: Dataset
    source: str
    groups: Array | None = None


def central_data(task: str, folder: Path | None = None) -> CentralData:
    """Returns the data set of a built-in task.

    Args:
        task: its name.
        folder: where the files lie; None means the folder of the task's name in `$EDGEFL_DATA`.

    Raises:
        DataError: the files are not there or not the right ones.
        TaskError: the task has no central data set.
    """
    readers: dict[str, Callable[[], CentralData]] = {
        "digits": _digits,
        "mnist": lambda: _images(task, data_folder(task, folder)),
        "fashion-mnist": lambda: _images(task, data_folder(task, folder)),
        "motionsense": lambda: _motionsense(data_folder(task, folder)),
        "noop": _noop,
    }
    if task not in readers:
        raise TaskError(f"task {task!r} has no data set to cut; cut one of {', '.join(readers)}, or bring shards")
    return readers[task]()


def data_folder(task: str, folder: Path | None) -> Path:
    """Returns the folder to read, the given one or the task's in `$EDGEFL_DATA`.

    Raises:
        DataError: it does not exist, or nothing names one.
    """
    root = os.environ.get(DATA_VARIABLE)
    if folder is None and not root:
        raise DataError(
            f"task {task} needs data: name the folder with --data DIR, or its parent with {DATA_VARIABLE}"
        )
    chosen = folder if folder is not None else Path(root or "") / task
    if not chosen.is_dir():
        raise DataError(f"data folder {chosen} of task {task} does not exist")
    return chosen


def _digits() -> CentralData:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 only experiments need scikit-learn, boards do not
    except ImportError:
        raise MissingPackageError(
            f"the digits come with scikit-learn; install it with: {install_line('sklearn')}"
        ) from None
    bunch = load_digits()
    everything = Dataset(inputs=bunch.images.astype(np.uint8), labels=bunch.target.astype(np.int64))
    train, test = local_split(everything, DIGITS_TEST_FRACTION, salt="digits")
    return CentralData(train=train, test=test, source="scikit-learn load_digits")


def _images(task: str, folder: Path) -> CentralData:
    return CentralData(
        train=read_image_set(folder, task, "train"),
        test=read_image_set(folder, task, "t10k"),
        source=f"{task} IDX files",
    )


def _motionsense(folder: Path) -> CentralData:
    train, test = read_motion_windows(folder / FILE_NAME)
    return CentralData(
        train=_examples(train), test=_examples(test), source="MotionSense, test = trials 11-16", groups=train.subjects
    )


def _examples(windows: MotionWindows) -> Dataset:
    return Dataset(inputs=windows.inputs, labels=windows.labels)


def _noop() -> CentralData:
    return CentralData(train=noop_data(), test=noop_data(), source="nothing")
