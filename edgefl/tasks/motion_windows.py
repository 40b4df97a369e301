"""Cuts the MotionSense recordings (phones of 24 people at 50 Hz) into windows.

Source: Malekzadeh et al., Mobile Sensor Data Anonymization, IoTDI 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.tasks.npz import read_npz
from edgefl.types import Array

WINDOW = 128
STRIDE = 64
FIRST_TEST_TRIAL = 11
CHANNELS = 9
FILE_NAME = "motionsense.npz"
_PER_RECORDING = ("length", "subject", "activity", "trial")
_ARRAYS = ("q", "scale", *_PER_RECORDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class MotionWindows:
    """Windows of one part, and who did what in them.

    `inputs` is [n, 9, 128] float32: gravity and acceleration in g, rotation in rad/s.
    """

    inputs: Array
    labels: Array
    subjects: Array


def read_motion_windows(path: Path) -> tuple[MotionWindows, MotionWindows]:
    """Returns training and test windows; the test part is whole recordings, those of trial 11 and later.

    Raises:
        DataError: the file is missing, damaged or inconsistent.
    """
    arrays = _arrays(path)
    stops = np.cumsum(arrays["length"])
    parts: dict[bool, list[int]] = {False: [], True: []}
    for recording, trial in enumerate(arrays["trial"]):
        parts[bool(trial >= FIRST_TEST_TRIAL)].append(recording)
    train, test = (_windows_of(arrays, stops, recordings) for recordings in (parts[False], parts[True]))
    return train, test


def cut_windows(recording: Array) -> Array:
    """Returns [n, channels, 128] windows that start every 64 samples; a rest shorter than a window is dropped."""
    if recording.shape[1] < WINDOW:
        return np.empty((0, recording.shape[0], WINDOW), recording.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(recording, WINDOW, axis=1)[:, ::STRIDE]
    return windows.transpose(1, 0, 2)


def _windows_of(arrays: dict[str, Array], stops: Array, recordings: list[int]) -> MotionWindows:
    inputs, labels, subjects = [], [], []
    for recording in recordings:
        stop = int(stops[recording])
        windows = cut_windows(arrays["q"][:, stop - int(arrays["length"][recording]) : stop])
        inputs.append(windows)
        labels.append(np.full(len(windows), arrays["activity"][recording], np.int64))
        subjects.append(np.full(len(windows), arrays["subject"][recording], np.int64))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.concatenate(inputs).astype(np.float32) * arrays["scale"].astype(np.float32)
    if not np.all(np.isfinite(scaled)):
        raise DataError(f"{FILE_NAME} holds samples that are no finite float32; download it again")
    return MotionWindows(inputs=scaled, labels=np.concatenate(labels), subjects=np.concatenate(subjects))


def _arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; --data names the folder that holds {FILE_NAME}")
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, _ARRAYS)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from None
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise DataError(f"{path} has no array {missing[0]!r}; download it again")
    _check(arrays, path)
    return arrays


def _check(arrays: Mapping[str, Array], path: Path) -> None:
    """Checks that there are so many whole numbers of each recording, and so many samples as they say together."""
    lengths, shape = arrays["length"], arrays["q"].shape
    for name in _PER_RECORDING:
        found = arrays[name]
        if not np.issubdtype(found.dtype, np.integer) or found.ndim != 1 or found.shape != lengths.shape:
            raise DataError(f"{path}: {name} must be whole numbers, one a recording; download it again")
    is_number = np.issubdtype(arrays["q"].dtype, np.number) and np.issubdtype(arrays["scale"].dtype, np.floating)
    if not len(lengths) or lengths.min() < 0 or not is_number or arrays["scale"].ndim:
        raise DataError(f"{path} holds no recordings, or samples that are no numbers; download it again")
    total = sum(map(int, lengths))
    if shape != (CHANNELS, total):
        raise DataError(f"{path} holds samples {list(shape)}, its recordings add up to {[CHANNELS, total]}")
    is_test = arrays["trial"] >= FIRST_TEST_TRIAL
    if is_test.all() or not is_test.any():
        raise DataError(
            f"{path} must hold recordings of trials before {FIRST_TEST_TRIAL} and later; download it again"
        )
