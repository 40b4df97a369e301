"""Readers of array files of others (`.npz`, `.npy`, IDX); sizes are checked before anything is allocated.

NumPy itself trusts the header: it allocates an array of a declared terabyte, and unpacks compressed zeros to any
size. Both reject pickled objects. IDX files, gzipped or plain, are those of MNIST and Fashion-MNIST, recognised by
their checksums; the format is described at http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.types import Array, Dataset
from edgefl.tasks.stored_arrays import FileRows, StoredArray

MAX_UNPACKED_BYTES = 4 * 1024**3
"""Maximum total size of the arrays of one archive."""
MIN_RATIO_CHECK_BYTES = 64 * 1024**2
MAX_EXPANSION_RATIO = 100
"""Maximum expansion of an archive over `MIN_RATIO_CHECK_BYTES`: beyond it are zip bombs, not measurements."""
MAX_MEMBERS = 65_536
CHECK_BYTES = 1024 * 1024
"""Bytes of an array in place that are read at once for its checksum."""
_NPY_MAGIC = b"\x93NUMPY"
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Before the bytes of an archive's member: lengths of its name and of more fields (PKWARE, APPNOTE, 4.3.7)."""

# Raised by zipfile, its decompressors and NumPy for damaged headers. RuntimeError and its NotImplementedError: for
# apparent encryption, or an unknown method or version.
_READ_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError, RuntimeError,
    SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip

UNSIGNED_BYTE = 0x08
GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 64 * 1024 * 1024

PUBLISHED_MD5 = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}
"""MD5 of the decompressed bytes, so that a recompressed file is still recognised."""


def read_npz(
    file: IO[bytes],
    names: Collection[str] | None = None,
    *,
    optional: Collection[str] = (),
    in_place: Callable[[str], bool] | None = None,
    is_checked: bool = False,
) -> dict[str, Array]:
    """Returns the arrays of an open `.npz` file by name; with `names`, these, and of the `optional` what it has.

    Those for whose name `in_place` is true stay in the file, as `StoredArray`, where they lie there unpacked and row
    by row. With `is_checked` their checksums are not computed.

    Raises:
        ValueError: it is damaged, no archive of arrays, lacks one of `names`, holds objects, or would unpack to more
            than its limit.
        OSError: it cannot be read.
    """
    if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
        raise ValueError("one array without a name, no archive: save it by np.savez")
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _check_sizes(list(infos.values()), os.fstat(file.fileno()).st_size)
            if missing := sorted(set(names or ()) - set(infos)):
                raise ValueError(f"it has no array {missing[0]!r}, only {', '.join(infos)[:200] or 'others'}")
            found = None if names is None else (*names, *(name for name in optional if name in infos))
            requested = infos if found is None else {name: infos[name] for name in found}
            return {
                name: (
                    _store_member(file, archive, info, is_checked=is_checked)
                    if in_place is not None and in_place(name)
                    else None
                )
                or _read_member(archive, info)
                for name, info in requested.items()
            }
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


def _store_member(
    file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo, *, is_checked: bool
) -> Array | None:
    """Returns numbers that stay in their file; None where they are packed there, none, or lie column by column."""
    with archive.open(info) as member:
        shape, is_by_column, dtype = _check_header(member, info.file_size)
        start = member.tell()
        is_by_row = len(shape) == 1 or not is_by_column
        if info.compress_type != zipfile.ZIP_STORED or not is_by_row or not shape or 0 in shape:
            return None
        if dtype.kind not in "biufc":
            return None
        while not is_checked and member.read(CHECK_BYTES):
            pass
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start += info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if start + math.prod(shape) * dtype.itemsize > os.fstat(file.fileno()).st_size:
        raise ValueError(f"it ends within its array {info.filename.removesuffix('.npy')!r}")
    return StoredArray([FileRows(file.fileno(), str(file.name), start, shape, dtype)]).to_array()


def _check_header(file: IO[bytes], num_bytes: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Checks that the declared array is as large as the following data; returns shape, order by column and type."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of format {version[0]}.{version[1]}, only 1.0 and 2.0 are read")
    shape, is_by_column, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not read")
    declared_bytes, num_left = math.prod(shape) * dtype.itemsize, num_bytes - file.tell()
    if min(shape, default=0) < 0 or declared_bytes != num_left:
        raise ValueError(f"an array of {list(shape)} {dtype} has {declared_bytes} bytes, {num_left} are there")
    return shape, is_by_column, dtype


def read_image_set(folder: Path, task: str, part: str) -> Dataset:
    """Returns images [n, 28, 28] uint8 and labels [n] of `part` train or t10k.

    Raises:
        DataError: a file is missing, damaged or not the published one, or the counts differ.
    """
    images_name, labels_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    images = read_idx(_find_file(folder, images_name), md5=PUBLISHED_MD5[task][images_name])
    labels = read_idx(_find_file(folder, labels_name), md5=PUBLISHED_MD5[task][labels_name])
    if len(images) != len(labels):
        raise DataError(f"{folder / images_name} holds {len(images)} images, {labels_name} {len(labels)} labels")
    return Dataset(inputs=images, targets=labels.astype(np.int64))


def read_idx(path: Path, *, md5: str | None = None) -> Array:
    """Returns the array of unsigned bytes in one IDX file.

    Raises:
        DataError: it cannot be read, is no IDX file, has another length than its header says, or its
            decompressed bytes have another MD5.
    """
    content = _read_decompressed(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE or not 1 <= content[3] <= 4:
        raise DataError(f"{path} is no IDX file of unsigned bytes: it starts with {content[:4].hex() or 'nothing'}")
    num_dimensions = content[3]
    start = 4 + 4 * num_dimensions
    if len(content) < start:
        raise DataError(f"{path} ends within its header, after {len(content)} bytes")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataError(f"{path} has {len(content)} bytes, its header {list(shape)} asks for {expected}")
    checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 is not None and checksum != md5:
        raise DataError(f"{path} is not the published file: its decompressed MD5 is {checksum}, expected {md5}")
    try:
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except ValueError as error:  # empty, but along axes that are too long together
        raise DataError(f"{path}: its header {list(shape)} is no shape of an array") from error


def _find_file(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise DataError(f"{folder / name}.gz does not exist; --data names the folder that holds the four IDX files")


def _read_decompressed(path: Path) -> bytes:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if not packed:
                content = raw.read(MAX_BYTES + 1)
            else:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    content = unpacked.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from None
    if len(content) > MAX_BYTES:
        raise DataError(f"{path} unpacks to more than {MAX_BYTES} bytes, which no file of this data set does")
    return content
