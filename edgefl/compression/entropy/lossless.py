"""Lossless stages over the whole payload: `zstd`, and `shuffle`, which groups equal bytes first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from edgefl.compression.entropy.zstd_frames import compress, decompress
from edgefl.compression.stages import StageKind, parse_int_argument
from edgefl.compression.wire import PayloadReader, encode_varint, to_little_endian
from edgefl.core.types import Array

DEFAULT_LEVEL = 3
# Levels over 19 take hundreds of MB, too much for small devices.
_MAX_LEVEL = 19
_MAX_NUMBER_BYTES = 16
_MAX_RUNS = 2**16


@dataclass(frozen=True, slots=True)
class Zstd:
    """One Zstandard frame, which states the length of its content."""

    kind: ClassVar[StageKind] = StageKind.LOSSLESS

    level: int = DEFAULT_LEVEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(level=parse_int_argument("zstd", argument, 1, _MAX_LEVEL) if argument else DEFAULT_LEVEL)

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        return [compress(b"".join(to_little_endian(part) for part in parts), self.level)]

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        return memoryview(decompress(payload, max_bytes))


@dataclass(frozen=True, slots=True)
class ByteShuffle:
    """All first bytes of equally wide numbers, then all second ones, …; then Zstandard.

    Exponents of neighbouring weights are much alike while the lowest bytes are noise, so they pack better apart.
    The frame starts with a table: the number of runs, and each run's number width and count.
    """

    kind: ClassVar[StageKind] = StageKind.LOSSLESS

    level: int = DEFAULT_LEVEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(level=parse_int_argument("shuffle", argument, 1, _MAX_LEVEL) if argument else DEFAULT_LEVEL)

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        non_empty = [part for part in parts if part.size]
        runs = [
            (width, list(run)) for width, run in itertools.groupby(non_empty, key=lambda part: part.dtype.itemsize)
        ]
        if len(runs) > _MAX_RUNS:
            runs = [(1, non_empty)]
        sizes = [(width, sum(part.nbytes for part in run) // width) for width, run in runs]
        table = [encode_varint(len(runs)), *(encode_varint(number) for size in sizes for number in size)]
        return [compress(_shuffle_bytes(np.concatenate(table), runs, sizes).data, self.level)]

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        reader = PayloadReader(memoryview(decompress(payload, max_bytes)))
        num_runs = reader.read_varint(_MAX_RUNS)
        runs = [(reader.read_varint(_MAX_NUMBER_BYTES), reader.read_varint(max_bytes)) for _ in range(num_runs)]
        rows = [
            np.frombuffer(reader.read_bytes(width * count), dtype=np.uint8).reshape(width, count).T.tobytes()
            for width, count in runs
        ]
        reader.require_end()
        return memoryview(b"".join(rows))


def _shuffle_bytes(
    table: Array, runs: Sequence[tuple[int, Sequence[Array]]], sizes: Sequence[tuple[int, int]]
) -> Array:
    """Returns the table, then the planes of each run; filled in place, without extra copies."""
    content = np.empty(table.size + sum(width * count for width, count in sizes), dtype=np.uint8)
    content[: table.size] = table
    at = table.size
    for (width, run), (_, count) in zip(runs, sizes, strict=True):
        planes = content[at : at + width * count].reshape(width, count)
        at += planes.size
        num_filled = 0
        for part in run:
            rows = np.frombuffer(to_little_endian(part), dtype=np.uint8).reshape(-1, width)
            planes[:, num_filled : num_filled + len(rows)] = rows.T
            num_filled += len(rows)
    return content
