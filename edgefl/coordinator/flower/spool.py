"""Spooling of bodies to anonymous temporary files."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)


class SpooledBytes:
    """Bytes in an anonymous file, which is closed with the last reference to this object."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes
        weakref.finalize(self, file.close)

    def read(self) -> bytes:
        """Returns all bytes; may be called repeatedly, in any thread.

        Raises:
            OSError: the file cannot be read completely.
        """
        content = os.pread(self._file.fileno(), self._num_bytes, 0)
        if len(content) != self._num_bytes:
            raise OSError(f"of a body of {self._num_bytes} bytes that was laid aside {len(content)} are left")
        return content


def spool_to_disk(content: bytes, folder: Path | None) -> SpooledBytes | None:
    """Writes bytes to disk; None if there is no room. `folder` is None for the system's temporary files."""
    file: IO[bytes] | None = None
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 closed by the returned object
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        log.warning("a body of %d bytes stays in memory: %s", len(content), error)
        if file is not None:
            file.close()
        return None
    return SpooledBytes(file, len(content))
