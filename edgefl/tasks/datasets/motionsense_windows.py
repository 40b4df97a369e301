"""Cuts the MotionSense recordings (phones of 24 people at 50 Hz) into windows.

Source: Malekzadeh et al., Mobile Sensor Data Anonymization, IoTDI 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.types import Array
from edgefl.tasks.datasets.npz import read_npz

WINDOW_SAMPLES = 128
STRIDE_SAMPLES = 64
FIRST_TEST_TRIAL = 11
CHANNELS = 9
FILE_NAME = "motionsense.npz"
_RECORDING_ARRAYS = ("length", "subject", "activity", "trial")
_ARRAYS = ("q", "scale", *_RECORDING_ARRAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MotionWindows:
    """Windows of one part, with their people and activities.

    `inputs` is [n, 9, 128] float32: gravity and acceleration in g, rotation in rad/s.
    """

    inputs: Array
    labels: Array
    subjects: Array


def read_motion_windows(path: Path) -> tuple[MotionWindows, MotionWindows]:
    """Returns training and test windows; test recordings are whole, from trial 11 on.

    Raises:
        DataError: the file is missing, damaged or inconsistent.
    """
    arrays = _load_arrays(path)
    stops = np.cumsum(arrays["length"])
    parts: dict[bool, list[int]] = {False: [], True: []}
    for recording, trial in enumerate(arrays["trial"]):
        parts[bool(trial >= FIRST_TEST_TRIAL)].append(recording)
    train, test = (_select_windows(arrays, stops, recordings) for recordings in (parts[False], parts[True]))
    return train, test


def split_windows(recording: Array) -> Array:
    """Returns [n, channels, 128] windows that start every 64 samples; a shorter remainder is dropped."""
    if recording.shape[1] < WINDOW_SAMPLES:
        return np.empty((0, recording.shape[0], WINDOW_SAMPLES), recording.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(recording, WINDOW_SAMPLES, axis=1)[:, ::STRIDE_SAMPLES]
    return windows.transpose(1, 0, 2)


def _select_windows(arrays: dict[str, Array], stops: Array, recordings: list[int]) -> MotionWindows:
    inputs, labels, subjects = [], [], []
    for recording in recordings:
        stop = int(stops[recording])
        windows = split_windows(arrays["q"][:, stop - int(arrays["length"][recording]) : stop])
        inputs.append(windows)
        labels.append(np.full(len(windows), arrays["activity"][recording], np.int64))
        subjects.append(np.full(len(windows), arrays["subject"][recording], np.int64))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.concatenate(inputs).astype(np.float32) * arrays["scale"].astype(np.float32)
    if not np.all(np.isfinite(scaled)):
        raise DataError(f"{FILE_NAME} holds samples that are no finite float32; download it again")
    return MotionWindows(inputs=scaled, labels=np.concatenate(labels), subjects=np.concatenate(subjects))


def _load_arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; --data names the folder that holds {FILE_NAME}")
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, _ARRAYS)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from None
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise DataError(f"{path} has no array {missing[0]!r}; download it again")
    _check_arrays(arrays, path)
    return arrays


def _check_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Checks that each array has one integer per recording, and that lengths match the samples."""
    lengths, shape = arrays["length"], arrays["q"].shape
    for name in _RECORDING_ARRAYS:
        array = arrays[name]
        if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1 or array.shape != lengths.shape:
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
