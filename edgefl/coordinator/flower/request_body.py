"""Streamed request bodies: small ones in memory, large ones spooled to disk.

A thousand devices that answer at once send a thousand models' worth of bytes, while a few threads process them one
after the other. A body that waits, or arrives slowly, is in an anonymous temporary file.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import IO, Self

log = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 256 * 1024
"""Larger bodies go to disk; above the size of an inline body (`protocol.INLINE_BODY_BYTES`)."""


class SpooledRequestBody:
    """A request body; a context manager. Not thread-safe.

    `folder` is for its file, None for the system's temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._chunks: list[bytes] = []
        self._num_buffered = 0
        self._file: IO[bytes] | None = None
        self._can_spill = True
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks = []
        if self._file is not None:
            self._file.close()

    def append(self, chunk: bytes) -> None:
        """Adds the next chunk."""
        self._chunks.append(chunk)
        self._num_buffered += len(chunk)
        self.num_bytes += len(chunk)
        if self._can_spill and (self._file is not None or self._num_buffered > MAX_MEMORY_BYTES):
            self._spill()

    def read(self) -> bytes:
        """Returns the whole body; may wait for the disk."""
        if self._file is None:
            return b"".join(self._chunks)
        self._file.seek(0)
        return b"".join([self._file.read(), *self._chunks])

    def _spill(self) -> None:
        """Writes the buffered chunks to the file; if there is no room, they stay in memory."""
        start = self.num_bytes - self._num_buffered
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 closed at the exit
            for chunk in self._chunks:
                view = memoryview(chunk)
                while view:
                    view = view[self._write(view) :]
        except OSError as error:
            log.warning("a body that arrives stays in memory: %s", error)
            self._can_spill = False
            if self._file is not None:
                self._file.truncate(start)
            return
        self._chunks, self._num_buffered = [], 0

    def _write(self, chunk: memoryview) -> int:
        """Appends a chunk to the file; returns the number of bytes written."""
        assert self._file is not None
        return self._file.write(chunk)
