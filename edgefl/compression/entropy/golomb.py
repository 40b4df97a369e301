"""Arrays of non-negative integers in few bits: fixed width, Golomb-Rice or exp-Golomb coded.

Golomb-Rice with parameter k writes `v >> k` in unary and the lowest k bits as they are; for geometrically distributed
values that is within a few hundredths of a bit of the entropy. The unary parts and the remainders are streams of
their own, so that whole arrays are packed and unpacked at a time. Bits fill their bytes from the lowest up.

Exp-Golomb codes are for positive integers of very unequal size. A number v is of class c = floor(log2(v)); written
are the class, in unary as its rank among the classes by frequency, and the lowest c bits. Gaps between the largest
entries of a real gradient need a third less than with Golomb-Rice: they come in clusters (a row of a dense layer, a
filter), so tiny and huge gaps are frequent and others are not. The streams are the number of classes, the classes
most frequent first a byte each, the unary stream, then the low bits of each class from the lowest up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from edgefl.compression.chunked_indexing import CHUNK, gather, iterate_chunks, scatter_masked, select_masked
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

MAX_PARAMETER = 31

_MAX_COUNTED_VALUE = 2**16

MAX_CLASSES = 32


def pack_bits(values: Array, width: int) -> Array:
    """Returns the lowest `width` bits of each value, as planes from the lowest bit up."""
    if width == 1 and values.dtype == np.bool_:
        return np.packbits(values, bitorder="little")
    narrow = values.astype(np.min_scalar_type((1 << width) - 1), copy=False)
    packed, remainder = [], np.zeros(0, dtype=np.bool_)
    for bit in range(width):
        plane = np.not_equal(narrow & narrow.dtype.type(1 << bit), 0)
        # Planes follow one another without a gap, so one may begin with the last bits of the one before.
        plane = np.concatenate([remainder, plane]) if remainder.size else plane
        num_whole = plane.size - plane.size % 8
        packed.append(np.packbits(plane[:num_whole], bitorder="little"))
        remainder = plane[num_whole:]
    packed.append(np.packbits(remainder, bitorder="little"))
    return np.concatenate(packed)


def read_bits(reader: PayloadReader, count: int, width: int) -> Array:
    """Returns the [count] int64 values that `pack_bits` wrote, of at most 63 bits."""
    if count == 1:  # a small tensor sends a single entry, and its planes are its bits
        return np.array([int.from_bytes(reader.read_bytes((width + 7) // 8), "little") & (1 << width) - 1])
    return read_narrow_bits(reader, count, width).astype(np.int64)


def read_narrow_bits(reader: PayloadReader, count: int, width: int) -> Array:
    """Returns the [count] values that `pack_bits` wrote, in the narrowest type that holds them."""
    packed = np.frombuffer(reader.read_bytes((count * width + 7) // 8), dtype=np.uint8)
    kind = np.min_scalar_type((1 << width) - 1)
    if count <= CHUNK:
        planes = np.unpackbits(packed, count=width * count, bitorder="little").reshape(width, count)
        narrow: Array = np.einsum("bv,b->v", planes, kind.type(1) << np.arange(width, dtype=kind))
        return narrow
    values = np.zeros(count, dtype=kind)
    for bit in range(width):
        first, offset = divmod(bit * count, 8)
        plane = np.unpackbits(packed[first:], count=offset + count, bitorder="little")[offset:]
        # The narrowest type that holds them: most of the time goes into moving memory.
        values |= plane.astype(kind, copy=False) << kind.type(bit)
    return values


def read_binary_values(reader: PayloadReader, size: int, zero: np.float32, one: np.float32) -> Array:
    """Returns a float32 for each of the [size] bits that `pack_bits` wrote, one bit a value."""
    packed = np.frombuffer(reader.read_bytes((size + 7) // 8), dtype=np.uint8)
    # A table of all bytes: eight values at a time.
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.bool_)
    return np.take(np.where(bits, one, zero), packed, axis=0).reshape(-1)[:size]


def negate_where(values: Array, is_negative: Array) -> None:
    """Negates in place those of [n] float32 values whose [n] uint8 flag is not 0."""
    bits = values.view(np.uint32)
    for chunk in iterate_chunks(values.size):
        bits[chunk] ^= is_negative[chunk].astype(np.uint32) << np.uint32(31)


def select_rice_parameter(numbers: Array, counts: Array) -> tuple[int, int]:
    """Returns the parameter with the fewest bits for values as `count_values` returns them, and those bits."""
    size = int(counts.sum())
    estimate = int(math.log2(max(int(numbers @ counts) / size * math.log(2), 1)))
    # Clustered values have many small ones beside a few large: less than the mean suggests is often right.
    costs = {k: int((numbers >> k) @ counts) + size * (k + 1) for k in range(max(0, estimate - 3), estimate + 2)}
    best = min(costs, key=lambda k: costs[k])
    return best, costs[best]


def count_values(values: Array) -> tuple[Array, Array]:
    """Returns the distinct values of [n] non-negative integers, n > 0, and their counts, both int64.

    Values too large for the table are listed at each occurrence, with a count of 1.
    """
    highest = int(values.max())
    counts = np.zeros(min(highest, _MAX_COUNTED_VALUE) + 1, dtype=np.int64)
    for chunk in iterate_chunks(values.size):
        counts += np.bincount(np.minimum(values[chunk], counts.size - 1), minlength=counts.size)
    large = select_masked(values, values >= _MAX_COUNTED_VALUE) if highest >= _MAX_COUNTED_VALUE else np.zeros(0)
    numbers = np.flatnonzero(counts[:_MAX_COUNTED_VALUE])
    return (
        np.concatenate([numbers, large.astype(np.int64)]),
        np.concatenate([counts[numbers], np.ones(large.size, dtype=np.int64)]),
    )


def write_rice(values: Array, parameter: int) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0: length of the unary stream, the stream, the remainders."""
    return [*write_unary(values >> parameter), pack_bits(values, parameter)]


def read_rice(reader: PayloadReader, count: int, parameter: int, highest: int) -> Array:
    """Returns the [count] values that `write_rice` wrote, in the narrowest type that holds `highest`.

    Raises:
        CodecError: damaged, or a value is larger than `highest`.
    """
    # A valid parameter needs few bits more than fixed width: a longer stream would only cost memory.
    stream = _read_unary_stream(reader, count, count * min((highest >> parameter) + 1, highest.bit_length() + 4))
    low_bits, last = read_narrow_bits(reader, count, parameter), -1
    values = np.empty(count, dtype=np.min_scalar_type(highest))
    for start, positions in _find_unary_ends(stream):
        chunk = slice(start, start + positions.size)
        numbers = (np.diff(positions, prepend=last) - 1 << parameter) + low_bits[chunk]
        last = int(positions[-1])
        if int(numbers.max()) > highest:
            raise CodecError(f"payload holds the number {int(numbers.max())}, at most {highest} is right")
        values[chunk] = numbers
    return values


def read_rice_sums(reader: PayloadReader, count: int, parameter: int, max_sum: int, *, gap: int = 0) -> Array:
    """Returns the running sums of [count] values of `write_rice`, with `gap` between neighbours.

    Raises:
        CodecError: damaged, or the values add up to more than `max_sum`.
    """
    stream = _read_unary_stream(reader, count, count + (max_sum >> parameter))
    low_bits, last = read_narrow_bits(reader, count, parameter), 0
    sums = np.empty(count, dtype=np.int64)
    for start, positions in _find_unary_ends(stream):
        chunk_sums = np.cumsum(
            low_bits[start : start + positions.size], dtype=np.int64, out=sums[start : start + positions.size]
        )
        chunk_sums += last
        last = int(chunk_sums[-1])
        ranks = np.arange(start, start + positions.size)
        chunk_sums += positions - ranks << parameter
        if int(chunk_sums[-1]) > max_sum:
            raise CodecError(
                f"payload holds numbers that add up to {int(chunk_sums[-1])}, at most {max_sum} are right"
            )
        if gap:
            chunk_sums += gap * ranks
    return sums


def write_unary(values: Array) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0: length of the stream, and for each its zeros and a one."""
    bits = np.zeros(int(values.sum(dtype=np.int64)) + values.size, dtype=np.uint8)
    last = -1
    for chunk in iterate_chunks(values.size):
        positions = np.cumsum(values[chunk].astype(np.int64) + 1)
        positions += last
        bits[positions] = 1
        last = int(positions[-1])
    stream = np.packbits(bits, bitorder="little")
    return [encode_varint(len(stream)), stream]


def read_unary(reader: PayloadReader, count: int, max_bits: int) -> Array:
    """Returns the positions of the [count] ones in a stream that `write_unary` wrote.

    Raises:
        CodecError: damaged, or longer than `max_bits`; nothing was unpacked then.
    """
    positions = np.empty(count, dtype=np.int64)
    for start, chunk in _find_unary_ends(_read_unary_stream(reader, count, max_bits)):
        positions[start : start + chunk.size] = chunk
    return positions


def _read_unary_stream(reader: PayloadReader, count: int, max_bits: int) -> Array:
    """Returns a stream, checked to have [count] ones."""
    stream = np.frombuffer(reader.read_bytes(reader.read_varint((max_bits + 7) // 8)), dtype=np.uint8)
    num_ones = sum(int(np.count_nonzero(bits)) for bits in _unpack_bits(stream))
    if num_ones != count:
        raise CodecError(f"payload holds {num_ones} unary numbers, {count} are announced")
    return stream


def _find_unary_ends(stream: Array) -> Iterator[tuple[int, Array]]:
    """Yields the positions of the ones, some at a time, and the number of earlier ones."""
    num_before = 0
    for chunk, bits in enumerate(_unpack_bits(stream)):
        positions = np.flatnonzero(bits)
        if positions.size:
            positions += chunk * CHUNK
            yield num_before, positions
            num_before += positions.size


def _unpack_bits(stream: Array) -> Iterator[Array]:
    """Yields the bits of a stream, in chunks that stay in the cache."""
    for chunk in iterate_chunks(stream.size, CHUNK // 8):
        yield np.unpackbits(stream[chunk], bitorder="little").view(np.bool_)


def compute_exp_golomb_cost(numbers: Array, counts: Array) -> int:
    """Returns the bits of values as `count_values` returns them, each from 1 to 2**32 - 1."""
    counts = np.bincount(_compute_classes(numbers), weights=counts).astype(np.int64)
    by_frequency = np.sort(counts[counts > 0])[::-1]
    ranks = np.arange(1, by_frequency.size + 1)
    return int(by_frequency @ ranks + counts @ np.arange(counts.size)) + 8 * (by_frequency.size + 3)


def write_exp_golomb(values: Array) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0 and each from 1 to 2**32 - 1."""
    classes = _compute_classes(values)
    counts = _count_classes(classes)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    ranks = np.zeros(MAX_CLASSES, dtype=np.uint8)
    ranks[order] = np.arange(order.size)
    low_bits = [
        pack_bits(select_masked(values, classes == bit_class), bit_class)
        for bit_class in np.flatnonzero(counts).tolist()
    ]
    return [encode_varint(order.size), order.astype(np.uint8), *write_unary(gather(ranks, classes)), *low_bits]


def read_exp_golomb(reader: PayloadReader, count: int) -> Array:
    """Returns the [count] int64 values that `write_exp_golomb` wrote.

    Raises:
        CodecError: damaged.
    """
    order = np.frombuffer(reader.read_bytes(reader.read_varint(MAX_CLASSES)), dtype=np.uint8)
    if np.any(order >= MAX_CLASSES) or len(set(order.tolist())) < order.size:
        raise CodecError(f"payload lists the classes {order.tolist()}, expected different ones below {MAX_CLASSES}")
    ranks = np.diff(read_unary(reader, count, count * order.size), prepend=-1) - 1
    if np.any(ranks >= order.size):
        raise CodecError(f"payload holds class number {int(ranks.max())} of {order.size}")
    classes = order[ranks]
    counts = _count_classes(classes) if count else np.zeros(0)
    values = np.empty(count, dtype=np.int64)
    for bit_class in np.flatnonzero(counts).tolist():
        scatter_masked(
            (1 << bit_class) + read_bits(reader, int(counts[bit_class]), bit_class), classes == bit_class, values
        )
    return values


def _compute_classes(values: Array) -> Array:
    """Returns floor(log2(v)) of each value, exactly."""
    classes = np.empty(values.size, dtype=np.uint8)
    for chunk in iterate_chunks(values.size):
        classes[chunk] = np.frexp(values[chunk].astype(np.float64))[1] - 1
    return classes


def _count_classes(classes: Array) -> Array:
    numbers, occurrences = count_values(classes)
    counts = np.zeros(MAX_CLASSES, dtype=np.int64)
    counts[numbers] = occurrences
    return counts
