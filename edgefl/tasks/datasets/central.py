"""Central data sets, for experiments that cut shards from one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.core.errors import DataError, MissingPackageError, TaskError, format_install_command
from edgefl.core.types import Array, Dataset
from edgefl.tasks.datasets.idx import read_image_set
from edgefl.tasks.datasets.motionsense_windows import FILE_NAME, MotionWindows, read_motion_windows
from edgefl.tasks.datasets.train_test_split import split_train_test
from edgefl.tasks.noop import make_noop_data

DATA_ENV_VARIABLE = "EDGEFL_DATA"
DIGITS_TEST_FRACTION = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralData:
    """A central data set: training data, the coordinator's test data, and the origin of each row."""

    train: Dataset
    test: Dataset
    source: str
    groups: Array | None = None


def load_central_data(task: str, folder: Path | None = None) -> CentralData:
    """Returns the data set of a built-in task.

    Args:
        task: its name.
        folder: of the files; None means the folder of the task's name in `$EDGEFL_DATA`.

    Raises:
        DataError: the files are not there or not the right ones.
        TaskError: the task has no central data set.
    """
    readers: dict[str, Callable[[], CentralData]] = {
        "digits": _load_digits,
        "mnist": lambda: _load_images(task, find_data_folder(task, folder)),
        "fashion-mnist": lambda: _load_images(task, find_data_folder(task, folder)),
        "motionsense": lambda: _load_motionsense(find_data_folder(task, folder)),
        "noop": _make_noop,
    }
    if task not in readers:
        raise TaskError(f"task {task!r} has no data set to cut; cut one of {', '.join(readers)}, or bring shards")
    return readers[task]()


def find_data_folder(task: str, folder: Path | None) -> Path:
    """Returns the data folder, the given one or the task's in `$EDGEFL_DATA`.

    Raises:
        DataError: it does not exist, or none is set.
    """
    root = os.environ.get(DATA_ENV_VARIABLE)
    if folder is None and not root:
        raise DataError(
            f"task {task} needs data: name the folder with --data DIR, or its parent with {DATA_ENV_VARIABLE}"
        )
    data_folder = folder if folder is not None else Path(root or "") / task
    if not data_folder.is_dir():
        raise DataError(f"data folder {data_folder} of task {task} does not exist")
    return data_folder


def _load_digits() -> CentralData:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 only experiments need scikit-learn, devices do not
    except ImportError:
        raise MissingPackageError(
            f"the digits come with scikit-learn; install it with: {format_install_command('sklearn')}"
        ) from None
    raw = load_digits()
    dataset = Dataset(inputs=raw.images.astype(np.uint8), labels=raw.target.astype(np.int64))
    train, test = split_train_test(dataset, DIGITS_TEST_FRACTION, salt="digits")
    return CentralData(train=train, test=test, source="scikit-learn load_digits")


def _load_images(task: str, folder: Path) -> CentralData:
    return CentralData(
        train=read_image_set(folder, task, "train"),
        test=read_image_set(folder, task, "t10k"),
        source=f"{task} IDX files",
    )


def _load_motionsense(folder: Path) -> CentralData:
    train, test = read_motion_windows(folder / FILE_NAME)
    return CentralData(
        train=_to_dataset(train),
        test=_to_dataset(test),
        source="MotionSense, test = trials 11-16",
        groups=train.subjects,
    )


def _to_dataset(windows: MotionWindows) -> Dataset:
    return Dataset(inputs=windows.inputs, labels=windows.labels)


def _make_noop() -> CentralData:
    return CentralData(train=make_noop_data(), test=make_noop_data(), source="nothing")
