"""The last stage, over the payload as a whole: `zstd`, and `shuffle`, which brings equal bytes together first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from edgefl.compression.coding.frames import packed, unpacked
from edgefl.compression.stages import StageKind, whole_number
from edgefl.compression.wire import Reader, little_endian_bytes, varint
from edgefl.types import Array

LEVEL = 3
# Levels over 19 take hundreds of MB, which boards do not have.
_MAX_LEVEL = 19
_MAX_ITEM_BYTES = 16
_MAX_RUNS = 2**16


@dataclass(frozen=True, slots=True)
class Zstd:
    """One Zstandard frame, which states the length of its content."""

    kind: ClassVar[StageKind] = StageKind.LOSSLESS

    level: int = LEVEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(level=whole_number("zstd", argument, 1, _MAX_LEVEL) if argument else LEVEL)

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        return [packed(b"".join(little_endian_bytes(part) for part in parts), self.level)]

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        return memoryview(unpacked(payload, max_bytes))


@dataclass(frozen=True, slots=True)
class Shuffle:
    """All first bytes of equally wide numbers, then all second ones, …; then Zstandard.

    Exponents of neighbouring weights are much alike while the lowest bytes are noise, so they pack better apart.
    Inside the frame stands a table first: how many runs there are, and of each run its numbers' width and how many.
    """

    kind: ClassVar[StageKind] = StageKind.LOSSLESS

    level: int = LEVEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(level=whole_number("shuffle", argument, 1, _MAX_LEVEL) if argument else LEVEL)

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        filled = [part for part in parts if part.size]
        runs = [(width, list(run)) for width, run in itertools.groupby(filled, key=lambda part: part.dtype.itemsize)]
        if len(runs) > _MAX_RUNS:
            runs = [(1, filled)]
        sizes = [(width, sum(part.nbytes for part in run) // width) for width, run in runs]
        table = [varint(len(runs)), *(varint(number) for size in sizes for number in size)]
        return [packed(_planes(np.concatenate(table), runs, sizes).data, self.level)]

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        reader = Reader(memoryview(unpacked(payload, max_bytes)))
        num_runs = reader.varint(_MAX_RUNS)
        runs = [(reader.varint(_MAX_ITEM_BYTES), reader.varint(max_bytes)) for _ in range(num_runs)]
        rows = [
            np.frombuffer(reader.take(width * count), dtype=np.uint8).reshape(width, count).T.tobytes()
            for width, count in runs
        ]
        reader.finish()
        return memoryview(b"".join(rows))


def _planes(table: Array, runs: Sequence[tuple[int, Sequence[Array]]], sizes: Sequence[tuple[int, int]]) -> Array:
    """Returns the table, then the planes of each run: filled in place, so that nothing is copied twice."""
    content = np.empty(table.size + sum(width * count for width, count in sizes), dtype=np.uint8)
    content[: table.size] = table
    at = table.size
    for (width, run), (_, count) in zip(runs, sizes, strict=True):
        planes = content[at : at + width * count].reshape(width, count)
        at += planes.size
        filled = 0
        for part in run:
            rows = np.frombuffer(little_endian_bytes(part), dtype=np.uint8).reshape(-1, width)
            planes[:, filled : filled + len(rows)] = rows.T
            filled += len(rows)
    return content
