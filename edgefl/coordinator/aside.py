"""Bodies that are in nobody's memory: in files that have no name and end with whoever holds them."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)


class LaidAside:
    """Bytes in a file without a name, which is closed when nobody holds this any more."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes
        weakref.finalize(self, file.close)

    def read(self) -> bytes:
        """Returns all of it, as often as it is asked for, in any thread.

        Raises:
            OSError: the disk does not give it back.
        """
        content = os.pread(self._file.fileno(), self._num_bytes, 0)
        if len(content) != self._num_bytes:
            raise OSError(f"of a body of {self._num_bytes} bytes that was laid aside {len(content)} are left")
        return content


def lay_aside(content: bytes, folder: Path | None) -> LaidAside | None:
    """Returns the bytes on disk, or None where there is no room for them; `folder` is None for a usual place."""
    file: IO[bytes] | None = None
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 closed by what is returned
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        log.warning("a body of %d bytes stays in memory: %s", len(content), error)
        if file is not None:
            file.close()
        return None
    return LaidAside(file, len(content))
