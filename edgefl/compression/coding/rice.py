"""Non-negative integers in few bits: a fixed number each, or Golomb-Rice coded.

Golomb-Rice with parameter k writes `v >> k` in unary and the lowest k bits as they are; for geometrically distributed
values that is within a few hundredths of a bit of the entropy. The unary parts and the remainders are streams of
their own, so that whole arrays are packed and unpacked at a time. Bits fill their bytes from the lowest up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from edgefl.compression.coding.masks import picked
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

MAX_PARAMETER = 31

_MAX_TALLIED = 2**16
# The steps of a chunk find its numbers in the cache.
_CHUNK = 2**15


def pack_bits(values: Array, width: int) -> Array:
    """Returns the lowest `width` bits of each value as bytes: first the lowest bits of all values, and so on."""
    if width == 1 and values.dtype == np.bool_:
        return np.packbits(values, bitorder="little")
    narrow = values.astype(np.min_scalar_type((1 << width) - 1), copy=False)
    packed, left = [], np.zeros(0, dtype=np.bool_)
    for bit in range(width):
        plane = np.not_equal(narrow & narrow.dtype.type(1 << bit), 0)
        # Planes follow one another without a gap, so one may begin with the last bits of the one before.
        plane = np.concatenate([left, plane]) if left.size else plane
        whole = plane.size - plane.size % 8
        packed.append(np.packbits(plane[:whole], bitorder="little"))
        left = plane[whole:]
    packed.append(np.packbits(left, bitorder="little"))
    return np.concatenate(packed)


def read_bits(reader: Reader, count: int, width: int) -> Array:
    """Returns the [count] int64 values that `pack_bits` wrote, of at most 63 bits."""
    if count == 1:  # of small tensors one entry is what travels, and its planes are its bits
        return np.array([int.from_bytes(reader.take((width + 7) // 8), "little") & (1 << width) - 1])
    return read_narrow_bits(reader, count, width).astype(np.int64)


def read_narrow_bits(reader: Reader, count: int, width: int) -> Array:
    """Returns the [count] values that `pack_bits` wrote, in the narrowest type that holds them."""
    packed = np.frombuffer(reader.take((count * width + 7) // 8), dtype=np.uint8)
    kind = np.min_scalar_type((1 << width) - 1)
    if count <= _CHUNK:
        planes = np.unpackbits(packed, count=width * count, bitorder="little").reshape(width, count)
        few: Array = np.einsum("bv,b->v", planes, kind.type(1) << np.arange(width, dtype=kind))
        return few
    values = np.zeros(count, dtype=kind)
    for bit in range(width):
        first, skipped = divmod(bit * count, 8)
        plane = np.unpackbits(packed[first:], count=skipped + count, bitorder="little")[skipped:]
        # The narrowest type that holds them: most of the time goes into moving memory.
        values |= plane.astype(kind, copy=False) << kind.type(bit)
    return values


def read_either(reader: Reader, size: int, zero: np.float32, one: np.float32) -> Array:
    """Returns a float32 for each of the [size] bits that `pack_bits` wrote, one bit a value."""
    packed = np.frombuffer(reader.take((size + 7) // 8), dtype=np.uint8)
    # All that a byte can say, looked up: eight values at a time.
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.bool_)
    return np.take(np.where(bits, one, zero), packed, axis=0).reshape(-1)[:size]


def negate(values: Array, is_negative: Array) -> None:
    """Turns the signs of those of [n] float32 values for which the [n] uint8 are 1 and not 0, in place."""
    bits = values.view(np.uint32)
    for begin in range(0, values.size, _CHUNK):
        bits[begin : begin + _CHUNK] ^= is_negative[begin : begin + _CHUNK].astype(np.uint32) << np.uint32(31)


def rice_parameter(values: Array) -> tuple[int, int]:
    """Returns the parameter with the fewest bits for [n] values, n > 0, and those bits."""
    return best_rice(*tally(values))


def best_rice(numbers: Array, counts: Array) -> tuple[int, int]:
    """Returns what `rice_parameter` does, of what `tally` gives."""
    size = int(counts.sum())
    guess = int(math.log2(max(int(numbers @ counts) / size * math.log(2), 1)))
    # Clustered values have many small ones beside a few large: less than the mean suggests is often right.
    costs = {k: int((numbers >> k) @ counts) + size * (k + 1) for k in range(max(0, guess - 3), guess + 2)}
    best = min(costs, key=lambda k: costs[k])
    return best, costs[best]


def tally(values: Array) -> tuple[Array, Array]:
    """Returns the different ones of [n] non-negative integers, n > 0, and how often each occurs, both int64.

    Those that are too large for a table stand there as often as they occur, once each time.
    """
    highest = int(values.max())
    counts = np.zeros(min(highest, _MAX_TALLIED) + 1, dtype=np.int64)
    for begin in range(0, values.size, _CHUNK):
        counts += np.bincount(np.minimum(values[begin : begin + _CHUNK], counts.size - 1), minlength=counts.size)
    large = picked(values, values >= _MAX_TALLIED) if highest >= _MAX_TALLIED else np.zeros(0)
    numbers = np.flatnonzero(counts[:_MAX_TALLIED])
    return (
        np.concatenate([numbers, large.astype(np.int64)]),
        np.concatenate([counts[numbers], np.ones(large.size, dtype=np.int64)]),
    )


def write_rice(values: Array, parameter: int) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0: length of the unary stream, the stream, the remainders."""
    return [*write_unary(values >> parameter), pack_bits(values, parameter)]


def read_rice(reader: Reader, count: int, parameter: int, highest: int) -> Array:
    """Returns the [count] values that `write_rice` wrote, in the narrowest type that holds `highest`.

    Raises:
        CodecError: damaged, or a value is larger than `highest`.
    """
    # A right parameter spends few bits more than fixed width would: what is longer would only cost memory.
    stream = _unary_stream(reader, count, count * min((highest >> parameter) + 1, highest.bit_length() + 4))
    low_bits, last = read_narrow_bits(reader, count, parameter), -1
    values = np.empty(count, dtype=np.min_scalar_type(highest))
    for begin, ends in _unary_ends(stream):
        chunk = slice(begin, begin + ends.size)
        found = (np.diff(ends, prepend=last) - 1 << parameter) + low_bits[chunk]
        last = int(ends[-1])
        if int(found.max()) > highest:
            raise CodecError(f"payload holds the number {int(found.max())}, at most {highest} is right")
        values[chunk] = found
    return values


def read_rice_sums(reader: Reader, count: int, parameter: int, max_sum: int, *, gap: int = 0) -> Array:
    """Returns the [count] running sums of the values that `write_rice` wrote, with `gap` between each and the next.

    Raises:
        CodecError: damaged, or the values add up to more than `max_sum`.
    """
    stream = _unary_stream(reader, count, count + (max_sum >> parameter))
    low_bits, last = read_narrow_bits(reader, count, parameter), 0
    sums = np.empty(count, dtype=np.int64)
    for begin, ends in _unary_ends(stream):
        found = np.cumsum(low_bits[begin : begin + ends.size], dtype=np.int64, out=sums[begin : begin + ends.size])
        found += last
        last = int(found[-1])
        ranks = np.arange(begin, begin + ends.size)
        found += ends - ranks << parameter
        if int(found[-1]) > max_sum:
            raise CodecError(f"payload holds numbers that add up to {int(found[-1])}, at most {max_sum} are right")
        if gap:
            found += gap * ranks
    return sums


def write_unary(values: Array) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0: length of the stream, and for each its zeros and a one."""
    bits = np.zeros(int(values.sum(dtype=np.int64)) + values.size, dtype=np.uint8)
    last = -1
    for begin in range(0, values.size, _CHUNK):
        ends = np.cumsum(values[begin : begin + _CHUNK].astype(np.int64) + 1)
        ends += last
        bits[ends] = 1
        last = int(ends[-1])
    stream = np.packbits(bits, bitorder="little")
    return [varint(len(stream)), stream]


def read_unary(reader: Reader, count: int, max_bits: int) -> Array:
    """Returns the places of the [count] ones in a stream that `write_unary` wrote.

    Raises:
        CodecError: damaged, or longer than `max_bits`; nothing was unpacked then.
    """
    ends = np.empty(count, dtype=np.int64)
    for begin, found in _unary_ends(_unary_stream(reader, count, max_bits)):
        ends[begin : begin + found.size] = found
    return ends


def _unary_stream(reader: Reader, count: int, max_bits: int) -> Array:
    """Returns a stream of [count] ones, after it was seen that there are so many."""
    stream = np.frombuffer(reader.take(reader.varint((max_bits + 7) // 8)), dtype=np.uint8)
    found = sum(int(np.count_nonzero(bits)) for bits in _unpacked(stream))
    if found != count:
        raise CodecError(f"payload holds {found} unary numbers, {count} are announced")
    return stream


def _unary_ends(stream: Array) -> Iterator[tuple[int, Array]]:
    """Yields the places of the ones, some at a time, and how many there were before."""
    num_before = 0
    for chunk, bits in enumerate(_unpacked(stream)):
        ends = np.flatnonzero(bits)
        if ends.size:
            ends += chunk * _CHUNK
            yield num_before, ends
            num_before += ends.size


def _unpacked(stream: Array) -> Iterator[Array]:
    """Yields the bits of a stream, so few at a time that they stay in the cache."""
    for begin in range(0, stream.size, _CHUNK // 8):
        yield np.unpackbits(stream[begin : begin + _CHUNK // 8], bitorder="little").view(np.bool_)
