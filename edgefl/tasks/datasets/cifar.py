"""Reader of CIFAR-10: its published binary version, or the same batches as `.npz`.

A record of the binary version is a label and 32x32 red, green and blue bytes: https://www.cs.toronto.edu/~kriz/cifar.html.
The Python version, which is pickled, is not read. In an `.npz` are `labels` [n], and pixels as `residual`
[n, 3, 32, 32] uint8: differences along rows and columns, of green, red - green and blue - green, modulo 256.

Source of the data: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.types import Array, Dataset
from edgefl.tasks.datasets.array_files import read_npz

TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
NUM_CLASSES = 10
MAX_EXAMPLES = 10_000
"""Of one batch."""
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
BINARY_FOLDER = "cifar-10-batches-bin"
"""Folder in the published archive."""


def read_train_batches(folder: Path) -> tuple[Dataset, int]:
    """Returns images [n, 3, 32, 32] uint8 with labels [n], and the number of training batches; it may be below five.

    Raises:
        DataError: there is none, or one is damaged.
    """
    paths = [path for name in TRAIN_BATCHES if (path := _find_batch(folder, name))]
    if not paths:
        raise DataError(_describe_missing(folder, TRAIN_BATCHES[0]))
    batches = [_read_batch(path) for path in paths]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Dataset(inputs=images, targets=labels), len(batches)


def read_test_batch(folder: Path) -> Dataset:
    """Returns the test images and labels.

    Raises:
        DataError: they are missing or damaged.
    """
    path = _find_batch(folder, TEST_BATCH)
    if path is None:
        raise DataError(_describe_missing(folder, TEST_BATCH))
    images, labels = _read_batch(path)
    return Dataset(inputs=images, targets=labels)


def _find_batch(folder: Path, name: str) -> Path | None:
    places = (folder / f"{name}.npz", folder / f"{name}.bin", folder / BINARY_FOLDER / f"{name}.bin")
    return next((path for path in places if path.is_file()), None)


def _describe_missing(folder: Path, name: str) -> str:
    if (folder / name).is_file() or (folder / "cifar-10-batches-py").is_dir():
        return (
            f"{folder} holds CIFAR-10 as pickles, which are not read; download its binary version (data_batch_1.bin)"
        )
    return f"{folder / name}.bin does not exist; --data names the folder that holds CIFAR-10's binary version"


def _read_batch(path: Path) -> tuple[Array, Array]:
    images, labels = _read_npz_batch(path) if path.suffix == ".npz" else _read_binary_batch(path)
    if wrong := [int(label) for label in np.unique(labels) if not 0 <= label < NUM_CLASSES]:
        raise DataError(f"{path} is no batch of CIFAR-10: a label is {wrong[0]}, expected 0 to {NUM_CLASSES - 1}")
    return images, labels.astype(np.int64)


def _read_binary_batch(path: Path) -> tuple[Array, Array]:
    try:
        with path.open("rb") as file:
            content = file.read(RECORD_BYTES * MAX_EXAMPLES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if not content or len(content) % RECORD_BYTES:
        raise DataError(
            f"{path} is no batch of CIFAR-10: it must be 1 to {MAX_EXAMPLES} records of {RECORD_BYTES} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    return records[:, 1:].reshape(-1, *IMAGE_SHAPE), records[:, 0]


def _read_npz_batch(path: Path) -> tuple[Array, Array]:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, ("labels", "residual"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable .npz file ({error}); copy it again") from None
    labels, residual = arrays["labels"], arrays["residual"]
    if (
        residual.dtype != np.uint8
        or residual.shape[1:] != IMAGE_SHAPE
        or labels.shape != residual.shape[:1]
        or not np.issubdtype(labels.dtype, np.integer)
        or not 1 <= len(labels) <= MAX_EXAMPLES
    ):
        raise DataError(
            f"{path} is no batch of CIFAR-10: labels {labels.dtype} {list(labels.shape)} and residual "
            f"{residual.dtype} {list(residual.shape)}, expected integers [n] and uint8 [n, 3, 32, 32]"
        )
    return _restore_images(residual), labels


def _restore_images(residual: Array) -> Array:
    """Returns the pixels whose differences these are; all arithmetic is modulo 256."""
    sums = residual.cumsum(axis=2, dtype=np.uint8).cumsum(axis=3, dtype=np.uint8)
    green = sums[:, 0]
    images: Array = np.stack([sums[:, 1] + green, green, sums[:, 2] + green], axis=1)
    return images
