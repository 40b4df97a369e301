"""Cuts the MotionSense recordings (phones of 24 people at 50 Hz) into windows.

Source: Malekzadeh et al., Mobile Sensor Data Anonymization, IoTDI 2019.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.types import Array

WINDOW = 128
STRIDE = 64
FIRST_TEST_TRIAL = 11
CHANNELS = 9
FILE_NAME = "motionsense.npz"
_ARRAYS = ("q", "scale", "length", "subject", "activity", "trial")


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
    scaled = np.concatenate(inputs).astype(np.float32) * np.float32(arrays["scale"])
    return MotionWindows(inputs=scaled, labels=np.concatenate(labels), subjects=np.concatenate(subjects))


def _arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; --data names the folder that holds {FILE_NAME}")
    try:
        # Opened here, since np.load leaves a file that is no zip open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from None
    total, shape = int(arrays["length"].sum()), arrays["q"].shape
    if shape != (CHANNELS, total):
        raise DataError(f"{path} holds samples {list(shape)}, its recordings add up to {[CHANNELS, total]}")
    return arrays
