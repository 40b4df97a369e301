"""Non-negative integers in few bits: a fixed number each, or Golomb-Rice coded.

Golomb-Rice with parameter k writes `v >> k` in unary and the lowest k bits as they are; for geometrically distributed
values that is within a few hundredths of a bit of the entropy. The unary parts and the remainders are streams of
their own, so that whole arrays are packed and unpacked at a time. Bits fill their bytes from the lowest up.
"""

from __future__ import annotations

import math

import numpy as np

from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

MAX_PARAMETER = 31


def pack_bits(values: Array, width: int) -> Array:
    """Returns the lowest `width` bits of each value as bytes: first the lowest bits of all values, and so on."""
    planes = np.empty((width, values.size), dtype=np.uint8)
    for bit in range(width):
        planes[bit] = (values >> bit) & 1
    return np.packbits(planes, axis=None, bitorder="little")


def read_bits(reader: Reader, count: int, width: int) -> Array:
    """Returns the [count] int64 values that `pack_bits` wrote."""
    packed = np.frombuffer(reader.take((count * width + 7) // 8), dtype=np.uint8)
    planes = np.unpackbits(packed, count=count * width, bitorder="little").reshape(width, count)
    # The narrowest type that holds them: most of the time goes into moving memory.
    values = np.zeros(count, dtype=np.min_scalar_type((1 << width) - 1))
    for bit in range(width):
        values |= planes[bit].astype(values.dtype) << values.dtype.type(bit)
    return values.astype(np.int64)


def rice_parameter(values: Array) -> tuple[int, int]:
    """Returns the parameter with the fewest bits for [n] values, n > 0, and those bits."""
    guess = int(math.log2(max(float(values.mean()) * math.log(2), 1)))
    # Clustered values have many small ones beside a few large: less than the mean suggests is often right.
    costs = {k: int((values >> k).sum()) + values.size * (k + 1) for k in range(max(0, guess - 3), guess + 2)}
    best = min(costs, key=lambda k: costs[k])
    return best, costs[best]


def write_rice(values: Array, parameter: int) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0: length of the unary stream, the stream, the remainders."""
    return [*write_unary(values >> parameter), pack_bits(values, parameter)]


def read_rice(reader: Reader, count: int, parameter: int, highest: int) -> Array:
    """Returns the [count] values that `write_rice` wrote.

    Raises:
        CodecError: damaged, or a value is larger than `highest`.
    """
    # A right parameter spends few bits more than fixed width would: what is longer would only cost memory.
    ends = read_unary(reader, count, count * min((highest >> parameter) + 1, highest.bit_length() + 4))
    values: Array = (np.diff(ends, prepend=-1) - 1 << parameter) + read_bits(reader, count, parameter)
    if count and int(values.max()) > highest:
        raise CodecError(f"payload holds the number {int(values.max())}, at most {highest} is right")
    return values


def read_rice_sums(reader: Reader, count: int, parameter: int, max_sum: int) -> Array:
    """Returns the [count] running sums of the values that `write_rice` wrote.

    Raises:
        CodecError: damaged, or the values add up to more than `max_sum`.
    """
    ends = read_unary(reader, count, count + (max_sum >> parameter))
    quotients = ends - np.arange(count)
    sums: Array = (quotients << parameter) + np.cumsum(read_bits(reader, count, parameter))
    if count and int(sums[-1]) > max_sum:
        raise CodecError(f"payload holds numbers that add up to {int(sums[-1])}, at most {max_sum} are right")
    return sums


def write_unary(values: Array) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0: length of the stream, and for each its zeros and a one."""
    ends = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1, dtype=np.uint8)
    bits[ends] = 1
    stream = np.packbits(bits, bitorder="little")
    return [varint(len(stream)), stream]


def read_unary(reader: Reader, count: int, max_bits: int) -> Array:
    """Returns the places of the [count] ones in a stream that `write_unary` wrote.

    Raises:
        CodecError: damaged, or longer than `max_bits`; nothing was unpacked then.
    """
    length = reader.varint((max_bits + 7) // 8)
    bits = np.unpackbits(np.frombuffer(reader.take(length), dtype=np.uint8), bitorder="little").view(np.bool_)
    found = int(np.count_nonzero(bits))
    if found != count:
        raise CodecError(f"payload holds {found} unary numbers, {count} are announced")
    return np.flatnonzero(bits)
