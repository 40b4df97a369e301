"""Replies of devices, bodies that are sent to them, replies whose chunks arrive, and bytes on disk."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

from edgefl.core.types import Json

log = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One complete reply of a device. `header` is its JSON, `body` one codec body (may be empty).

    `base_bytes` are those of `bytes_down` that were of a base and compiled task.
    """

    node_id: int
    instruction_id: str
    header: Json
    body: bytes
    bytes_up: int
    bytes_down: int
    base_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBody:
    """A body ready for many devices: inline, or split into content-addressed chunks hashed once."""

    inline: bytes | None
    chunk_ids: tuple[str, ...] = ()
    chunks: tuple[bytes, ...] = ()


class ReplyAssembler(Generic[R]):
    """Announced replies with missing chunks, by the session that pushes them.

    Thread-safe; a complete reply is returned once.
    """

    def __init__(self) -> None:
        self._partial: dict[str, tuple[R, set[str]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._partial)

    def start(self, session_id: str, reply: R, missing_ids: Iterable[str]) -> None:
        """Adds a reply and the ids of its missing chunks."""
        with self._lock:
            self._partial[session_id] = reply, set(missing_ids)

    def get(self, session_id: str) -> R | None:
        """Returns the reply of a session, while chunks of it are missing."""
        with self._lock:
            return self._partial[session_id][0] if session_id in self._partial else None

    def is_missing(self, session_id: str, object_id: str) -> bool:
        """Returns whether a chunk of the reply of a session is missing."""
        with self._lock:
            return session_id in self._partial and object_id in self._partial[session_id][1]

    def add_object(self, session_id: str, object_id: str) -> R | None:
        """Returns the reply of a session if this was its last missing chunk."""
        with self._lock:
            if session_id not in self._partial:
                return None
            reply, missing = self._partial[session_id]
            missing.discard(object_id)
            if missing:
                return None
            del self._partial[session_id]
            return reply

    def remove(self, session_id: str) -> None:
        """Removes the reply of a session, if there is one."""
        with self._lock:
            self._partial.pop(session_id, None)


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
