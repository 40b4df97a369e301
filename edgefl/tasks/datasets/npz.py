"""Reader of `.npz` and `.npy` files of others; sizes are checked before anything is allocated.

NumPy itself trusts the header: it allocates an array of a declared terabyte, and unpacks compressed zeros to any
size. Both reject pickled objects.
"""

from __future__ import annotations

import io
import lzma
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from typing import IO

import numpy as np

from edgefl.core.types import Array

MAX_UNPACKED_BYTES = 4 * 1024**3
"""Maximum total size of the arrays of one archive."""
MIN_RATIO_CHECK_BYTES = 64 * 1024**2
MAX_EXPANSION_RATIO = 100
"""Maximum expansion of an archive over `MIN_RATIO_CHECK_BYTES`: beyond it are zip bombs, not measurements."""
MAX_MEMBERS = 65_536
_NPY_MAGIC = b"\x93NUMPY"

# Raised by zipfile, its decompressors and NumPy for damaged headers. RuntimeError and its NotImplementedError: for
# apparent encryption, or an unknown method or version.
_READ_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError, RuntimeError,
    SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def read_npz(file: IO[bytes], names: Collection[str] | None = None) -> dict[str, Array]:
    """Returns the arrays of an open `.npz` file by name; with `names`, the existing ones of these.

    Raises:
        ValueError: it is damaged, no archive of arrays, holds objects, or would unpack to more than its limit.
        OSError: it cannot be read.
    """
    if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
        raise ValueError("one array without a name, no archive: save it by np.savez")
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _check_sizes(list(infos.values()), os.fstat(file.fileno()).st_size)
            requested = infos if names is None else {name: infos[name] for name in names if name in infos}
            return {name: _read_member(archive, info) for name, info in requested.items()}
    except _READ_ERRORS as error:
        raise ValueError(str(error) or type(error).__name__) from None


def read_npy(content: bytes) -> Array:
    """Returns the array in the bytes of a `.npy` file.

    Raises:
        ValueError: it is damaged, no array, or one of objects.
    """
    try:
        _check_header(io.BytesIO(content), len(content))
        array: Array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except _READ_ERRORS as error:
        raise ValueError(str(error) or type(error).__name__) from None
    return array


def _check_sizes(members: list[zipfile.ZipInfo], packed_bytes: int) -> None:
    total = sum(info.file_size for info in members)
    if len(members) > MAX_MEMBERS or total > MAX_UNPACKED_BYTES:
        raise ValueError(
            f"it would unpack to {len(members)} arrays of {total} bytes, at most {MAX_MEMBERS} of "
            f"{MAX_UNPACKED_BYTES} are read"
        )
    if total > max(MIN_RATIO_CHECK_BYTES, MAX_EXPANSION_RATIO * packed_bytes):
        raise ValueError(
            f"its {packed_bytes} bytes would unpack to {total}, more than {MAX_EXPANSION_RATIO} times as much; "
            "if that is right, save it unpacked, by np.savez"
        )


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        _check_header(member, info.file_size)
    with archive.open(info) as member:
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):
            raise ValueError(f"{info.filename} holds more than its array")
    return array


def _check_header(file: IO[bytes], num_bytes: int) -> None:
    """Checks that the declared array is as large as the following data."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of format {version[0]}.{version[1]}, only 1.0 and 2.0 are read")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not read")
    declared_bytes, num_left = math.prod(shape) * dtype.itemsize, num_bytes - file.tell()
    if min(shape, default=0) < 0 or declared_bytes != num_left:
        raise ValueError(f"an array of {list(shape)} {dtype} has {declared_bytes} bytes, {num_left} are there")
