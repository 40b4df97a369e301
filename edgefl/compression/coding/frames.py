"""Zstandard frames that state the length of their content, which is held against a cap before memory is taken."""

from __future__ import annotations

import numpy as np
import zstandard

from edgefl.errors import CodecError
from edgefl.types import Array


def packed(content: bytes | memoryview, level: int, **settings: int) -> Array:
    """Returns the frame as uint8; `settings` are Zstandard's own, in place of those of the level."""
    parameters = zstandard.ZstdCompressionParameters.from_level(level, **settings)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return np.frombuffer(compressor.compress(content), dtype=np.uint8)


def unpacked(frame: memoryview, max_bytes: int) -> bytes:
    """Returns the content of a frame.

    Raises:
        CodecError: it is damaged, or states a length over `max_bytes`; nothing was unpacked.
    """
    try:
        # The length is the frame's own claim, and memory is taken by it: it is held against the cap first.
        length = zstandard.get_frame_parameters(frame).content_size
        if length == zstandard.CONTENTSIZE_UNKNOWN:
            raise CodecError("payload cannot be unpacked: it does not state its length")
        if length > max_bytes:
            raise CodecError(f"payload unpacks to over {max_bytes} bytes, more than the task's tensors can take")
        if not length:  # of an empty frame the library looks at nothing else
            return _nothing(frame)
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"payload cannot be unpacked: {error}") from None


def _nothing(frame: memoryview) -> bytes:
    """Returns the content of an empty frame, and looks at all of it."""
    reader = zstandard.ZstdDecompressor().decompressobj()
    content = reader.decompress(frame)
    if content or not reader.eof or reader.unused_data:
        raise CodecError("payload cannot be unpacked: more than the empty frame that it states")
    return content
