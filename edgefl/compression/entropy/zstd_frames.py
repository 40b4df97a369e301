"""Zstandard frames that state their content's length, which is capped before memory is allocated."""

from __future__ import annotations

import numpy as np
import zstandard

from edgefl.core.errors import CodecError
from edgefl.core.types import Array


def compress(content: bytes | memoryview, level: int, **settings: int) -> Array:
    """Returns the frame as uint8; `settings` are Zstandard's own and override those of the level."""
    parameters = zstandard.ZstdCompressionParameters.from_level(level, **settings)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return np.frombuffer(compressor.compress(content), dtype=np.uint8)


def decompress(frame: memoryview, max_bytes: int) -> bytes:
    """Returns the content of a frame.

    Raises:
        CodecError: it is damaged, or states a length over `max_bytes`; nothing was unpacked.
    """
    try:
        # The length is the frame's own claim, and memory is allocated by it: it is checked against the cap first.
        length = zstandard.get_frame_parameters(frame).content_size
        if length == zstandard.CONTENTSIZE_UNKNOWN:
            raise CodecError("payload cannot be unpacked: it does not state its length")
        if length > max_bytes:
            raise CodecError(f"payload unpacks to over {max_bytes} bytes, more than the task's tensors can take")
        if not length:  # the library checks nothing else of an empty frame
            return _decompress_empty(frame)
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"payload cannot be unpacked: {error}") from None


def _decompress_empty(frame: memoryview) -> bytes:
    """Returns the content of an empty frame after reading all of it."""
    reader = zstandard.ZstdDecompressor().decompressobj()
    content = reader.decompress(frame)
    if content or not reader.eof or reader.unused_data:
        raise CodecError("payload cannot be unpacked: more than the empty frame that it states")
    return content
