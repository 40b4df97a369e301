"""Recorder: a source that makes files itself, such as frames of a camera, by a thread of its own.

A device that is gone, as one of USB that is unplugged, is opened again every two seconds. Each time is counted, and
said once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edgefl.device.collect.readings import Counts, SourceThread

log = logging.getLogger(__name__)

RETRY_S = 2.0
MAX_UNREAD_BYTES = 32_000_000


class RecordingDevice(Protocol):
    """Open device that files are made of."""

    def read(self, stopping: threading.Event) -> bytes:
        """Returns the next file once it is due; an empty one where there is nothing to keep, or it has to stop.

        Raises:
            OSError: the device is gone.
        """
        ...

    def accept(self) -> None:
        """Is called once the last file is kept, and not where there is no room for it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A file that was recorded, and the time of its start, in seconds since 1970."""

    content: bytes
    suffix: str
    time_s: float


class Recorder(SourceThread):
    """Thread that records from a device; `start` begins.

    Args:
        name: of the source, for counts and the log.
        suffix: of its files' names.
        open_device: opens it, or raises an `OSError`.
        counts: to which `NAME.errors` and `NAME.unread` are added.
        length_s: seconds from the start of a recording to the time at which it can be read.
        clock: seconds since 1970; it may jump.
    """

    def __init__(
        self,
        name: str,
        suffix: str,
        open_device: Callable[[], RecordingDevice],
        counts: Counts,
        *,
        length_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name)
        self._name, self._suffix, self._open, self._counts = name, suffix, open_device, counts
        self._length_s, self._clock = length_s, clock
        self._unread: deque[Recording] = deque()
        # One thread adds to each of the two, so that neither needs a lock.
        self._recorded_bytes = self._read_bytes = 0
        self._is_gone = False

    def read(self) -> Recording | None:
        """Returns the oldest recording that was not taken yet, if there is one; does not wait."""
        return self._unread[0] if self._unread else None

    def advance(self) -> None:
        """Marks what `read` returns as taken."""
        self._read_bytes += len(self._unread.popleft().content)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with contextlib.closing(self._open()) as device:
                    self._record(device)
            except Exception as error:  # noqa: BLE001 the boundary of the thread: once opened again it may record
                self._counts[f"{self._name}.errors"] += 1
                if not self._is_gone:
                    reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    log.warning("source %s is opened again until it records: %s", self._name, reason)
                self._is_gone = True
            self._stopping.wait(RETRY_S)

    def _record(self, device: RecordingDevice) -> None:
        """Records until the device is gone; raises an `OSError` then."""
        while not self._stopping.is_set():
            content = device.read(self._stopping)
            if self._is_gone:
                log.info("source %s records again", self._name)
                self._is_gone = False
            if not content:
                continue
            if self._recorded_bytes - self._read_bytes + len(content) > MAX_UNREAD_BYTES:
                self._counts[f"{self._name}.unread"] += 1
                continue
            self._recorded_bytes += len(content)
            self._unread.append(
                Recording(content=content, suffix=self._suffix, time_s=self._clock() - self._length_s)
            )
            device.accept()
