"""What mosquitto says: the lines that matter go into a file of bounded size, and what it denied is told.

Mosquitto tells of denied messages only at its most talkative level, which has a line for every packet; so it writes
into a pipe, and most of that goes no further. The pipe never holds mosquitto up: what does not fit in is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import IO

from edgefl.coordinator.brokers.broker import NAMELESS, UNTRUSTED, OnDenied

log = logging.getLogger(__name__)

MAX_LOG_BYTES = 1_000_000
KEPT_LINES = 20
CLOSE_WITHIN_S = 5.0
TYPES = ("error", "warning", "notice", "debug")

_STAMP = rb"\A(?:\S+: )?"
_DENIED = re.compile(_STAMP + rb"Denied (\w+) from (\S+) \([^']*'(.*)', ")
_UNTRUSTED = re.compile(rb"certificate verify failed")
_NAMELESS = re.compile(rb"did not return a certificate")
_TRACE = re.compile(_STAMP + rb"(?:Received |Sending |Denied |No will message|Will message|\t)")


class MosquittoLog:
    """Takes mosquitto's lines out of a pipe, in a thread, until mosquitto ends."""

    def __init__(self, path: Path, on_denied: OnDenied) -> None:
        self._path, self._on_denied = path, on_denied
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread: threading.Thread | None = None
        self._num_probes = 0

    def expect_probe(self) -> None:
        """Says that the coordinator itself has just knocked without a certificate, to see that somebody is there."""
        self._num_probes += 1

    def open(self) -> int:
        """Returns the end of a new pipe to write into; close it when mosquitto has it."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._tail.clear()
        self._thread = threading.Thread(target=self._read, args=(read_end,), name="mosquitto-log", daemon=True)
        self._thread.start()
        return write_end

    def lines(self) -> list[str]:
        """Returns the last lines; call it when mosquitto has ended."""
        if self._thread is not None:
            self._thread.join(CLOSE_WITHIN_S)
        return list(self._tail)

    def _read(self, read_end: int) -> None:
        file = _BoundedFile(self._path)
        with os.fdopen(read_end, "rb") as pipe, contextlib.closing(file):
            for line in pipe:
                self._tell(line)
                if not _TRACE.search(line):
                    self._tail.append(line.decode(errors="replace").strip())
                    file.write(line)

    def _tell(self, line: bytes) -> None:
        if denied := _DENIED.search(line):
            kind, who, topic = (part.decode(errors="replace") for part in denied.groups())
            self._on_denied(who, f"{kind} to {topic!r}")
        elif _UNTRUSTED.search(line):
            self._on_denied("", UNTRUSTED)
        elif _NAMELESS.search(line) and self._num_probes:
            self._num_probes -= 1
        elif _NAMELESS.search(line):
            self._on_denied("", NAMELESS)


class _BoundedFile:
    """A log that is put aside when it is large; what a full disk does not take is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def write(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("ab")
            if self._file.tell() > MAX_LOG_BYTES:
                self.close()
                self._path.replace(self._path.with_suffix(".log.1"))
                self._file = self._path.open("ab")
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            log.debug("a line of the broker is not kept: %s", error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk did not take the last lines
                file.close()
