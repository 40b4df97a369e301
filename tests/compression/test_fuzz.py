"""What comes from the network is damaged or made to harm: a decoder gives a CodecError or tensors as declared."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from codec_examples import EXAMPLES, SHAPES, assert_declared, encoded, sealed
from damaged_bodies import all_surfaces, damaged, decode_damaged, surfaces_of

from edgefl.compression.codec import decode_body
from edgefl.core.errors import CodecError

NUM_MUTATIONS = 6_400
MOST_BYTES = 1 << 20
"""No decoding of the small tasks needs a tenth of it."""


@contextmanager
def within_the_caps(*, is_measured: bool) -> Iterator[None]:
    """Fails when more is allocated; measuring takes longer than decoding, so not every time."""
    if not is_measured:
        yield
        return
    np.unique(np.arange(2))  # imports modules of its own at the first time
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("spec", EXAMPLES)
def test_every_cut_every_extension_and_every_damaged_byte_is_a_codec_error(spec: str) -> None:
    body = encoded(spec)
    broken = [body[:length] for length in range(len(body))]
    broken += [body + b"\x00", b"\x00" + body, body + body]
    broken += [body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :] for at in range(len(body)) for flip in (1, 255)]
    for one in broken:
        with pytest.raises(CodecError):
            decode_body(memoryview(one), SHAPES)


@pytest.mark.extended
@pytest.mark.parametrize("spec", EXAMPLES)
def test_any_damaged_byte_under_a_valid_checksum_is_a_codec_error_or_gives_the_declared_tensors(spec: str) -> None:
    body = encoded(spec)
    for at in range(len(body)):
        for flip in (1, 255):
            try:
                decoded = decode_body(sealed(body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :]), SHAPES)
            except CodecError:
                continue
            assert_declared(decoded)


@pytest.mark.parametrize("spec", EXAMPLES)
def test_mutations_under_valid_checksums_are_codec_errors_or_give_the_declared_tensors_within_the_caps(
    spec: str,
) -> None:
    luck, surfaces = np.random.default_rng(len(spec)), surfaces_of(spec)
    for number in range(-(-NUM_MUTATIONS // len(EXAMPLES))):
        surface = surfaces[number % len(surfaces)]
        content = damaged(surface.content, luck)
        try:
            with within_the_caps(is_measured=number % 5 == 0):
                decode_damaged(surface, content)
        except Exception as error:
            raise AssertionError(f"{surface.spec}: {content.hex()}") from error


def test_every_surface_that_is_damaged_is_one_of_a_valid_body() -> None:
    assert all(decode_damaged(surface, surface.content) for surface in all_surfaces())
