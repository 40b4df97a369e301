"""Bodies of requests while they arrive: small ones in memory, of a large one only its beginning.

A thousand devices that answer at once send a thousand models' worth of bytes, while a few threads look at them one
after the other. What waits for its turn, or arrives slowly, lies in a file that has no name and ends with it.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import IO, Self

log = logging.getLogger(__name__)

IN_MEMORY_BYTES = 256 * 1024
"""What is larger than a small body in a message (`protocol.INLINE_BODY_BYTES`) goes to disk."""


class ArrivingBody:
    """Used by one thread at a time; a context manager. `folder` is where the file is made, None for a usual place."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._pieces: list[bytes] = []
        self._num_held = 0
        self._file: IO[bytes] | None = None
        self._may_spill = True
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces = []
        if self._file is not None:
            self._file.close()

    def add(self, piece: bytes) -> None:
        """Takes the next piece."""
        self._pieces.append(piece)
        self._num_held += len(piece)
        self.num_bytes += len(piece)
        if self._may_spill and (self._file is not None or self._num_held > IN_MEMORY_BYTES):
            self._spill()

    def whole(self) -> bytes:
        """Returns all of it; may wait for the disk."""
        if self._file is None:
            return b"".join(self._pieces)
        self._file.seek(0)
        return b"".join([self._file.read(), *self._pieces])

    def _spill(self) -> None:
        """Writes what is held to the file; where there is no room for it, it stays in memory."""
        start = self.num_bytes - self._num_held
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 closed at the exit
            for piece in self._pieces:
                view = memoryview(piece)
                while view:
                    view = view[self._write(view) :]
        except OSError as error:
            log.warning("a body that arrives stays in memory: %s", error)
            self._may_spill = False
            if self._file is not None:
                self._file.truncate(start)
            return
        self._pieces, self._num_held = [], 0

    def _write(self, piece: memoryview) -> int:
        """Writes a beginning of a piece to the end of the file; returns how much."""
        assert self._file is not None
        return self._file.write(piece)
