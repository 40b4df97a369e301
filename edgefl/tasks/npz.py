"""Arrays in `.npz` and `.npy` files that somebody else wrote: looked at before anything is allocated for them.

NumPy alone believes the header: an array that is said to have a terabyte is allocated, a packed one of zeros unpacked
to whatever it has. Pickled objects are refused by both.
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

from edgefl.types import Array

MAX_UNPACKED_BYTES = 4 * 1024**3
"""What the arrays of one archive may have together."""
USUAL_BYTES = 64 * 1024**2
MAX_RATIO = 100
"""An archive of more than `USUAL_BYTES` may unpack to so many times its size: measurements do not, bombs do."""
MAX_MEMBERS = 65_536
_NPY_MAGIC = b"\x93NUMPY"

# What zipfile, its decompressors and NumPy make of damaged headers. RuntimeError and its NotImplementedError: what
# looks like encryption, or like a method or version to come.
_UNREADABLE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError, RuntimeError,
    SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def read_npz(file: IO[bytes], names: Collection[str] | None = None) -> dict[str, Array]:
    """Returns the arrays of an open `.npz` file by name; with `names`, those that are there of these.

    Raises:
        ValueError: it is damaged, no archive of arrays, holds objects, or would unpack to more than it may.
        OSError: it cannot be read.
    """
    if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
        raise ValueError("one array without a name, no archive: save it by np.savez")
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _check_sizes(list(members.values()), os.fstat(file.fileno()).st_size)
            wanted = members if names is None else {name: members[name] for name in names if name in members}
            return {name: _read_member(archive, info) for name, info in wanted.items()}
    except _UNREADABLE as error:
        raise ValueError(str(error) or type(error).__name__) from None


def read_npy(content: bytes) -> Array:
    """Returns the array in the bytes of a `.npy` file.

    Raises:
        ValueError: it is damaged, none, or one of objects.
    """
    try:
        _check_header(io.BytesIO(content), len(content))
        array: Array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except _UNREADABLE as error:
        raise ValueError(str(error) or type(error).__name__) from None
    return array


def _check_sizes(members: list[zipfile.ZipInfo], packed_bytes: int) -> None:
    total = sum(info.file_size for info in members)
    if len(members) > MAX_MEMBERS or total > MAX_UNPACKED_BYTES:
        raise ValueError(
            f"it would unpack to {len(members)} arrays of {total} bytes, at most {MAX_MEMBERS} of "
            f"{MAX_UNPACKED_BYTES} are read"
        )
    if total > max(USUAL_BYTES, MAX_RATIO * packed_bytes):
        raise ValueError(
            f"its {packed_bytes} bytes would unpack to {total}, more than {MAX_RATIO} times as much; if that is "
            "right, save it unpacked, by np.savez"
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
    """Checks that the array that is announced is as large as what follows."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of format {version[0]}.{version[1]}, only 1.0 and 2.0 are read")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not read")
    told, left = math.prod(shape) * dtype.itemsize, num_bytes - file.tell()
    if min(shape, default=0) < 0 or told != left:
        raise ValueError(f"an array of {list(shape)} {dtype} has {told} bytes, {left} are there")
