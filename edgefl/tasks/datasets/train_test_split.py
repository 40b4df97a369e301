"""The split of a device's own data into a training and a test part."""

from __future__ import annotations

import hashlib

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset

HASH_BYTES = 8


def split_train_test(data: Dataset, test_fraction: float = 0.1, salt: str = "") -> tuple[Dataset, Dataset]:
    """Returns (train, test); a sample's side depends on its own bytes only.

    Growing data never moves a sample, and copies of a sample stay on one side, so no trained sample is ever used
    for a test. Either part of a very small shard may be empty.

    Raises:
        ConfigError: `test_fraction` is not in [0, 1).
    """
    if not 0.0 <= test_fraction < 1.0:
        raise ConfigError(f"test fraction must be in [0, 1), got {test_fraction}")
    in_test = compute_sample_hashes(data.inputs, salt) < np.uint64(test_fraction * 2.0**64)
    return data.take(np.flatnonzero(~in_test)), data.take(np.flatnonzero(in_test))


def compute_sample_hashes(inputs: Array, salt: str = "") -> Array:
    """Returns [n] uint64, uniform, the same for equal samples on every machine."""
    rows = np.ascontiguousarray(inputs).astype(inputs.dtype.newbyteorder("<"), copy=False)
    start = hashlib.blake2b(digest_size=HASH_BYTES, key=hashlib.sha256(salt.encode()).digest())
    digests = []
    for row in rows.reshape(len(rows), -1).view(np.uint8) if rows.size else ():
        digest = start.copy()
        digest.update(row.data)
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8")
