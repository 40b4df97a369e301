"""Log of mosquitto: relevant lines go into a rotating file, denied actions to a callback.

Mosquitto logs denied messages only at debug level, which has a line for every packet; so it writes into a pipe, and
most lines are discarded. The pipe never blocks mosquitto: lines that do not fit are lost.
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

from edgefl.coordinator.brokers.broker import MISSING_CERTIFICATE, UNTRUSTED_CERTIFICATE, OnDenied

log = logging.getLogger(__name__)

MAX_LOG_BYTES = 1_000_000
MAX_TAIL_LINES = 20
CLOSE_TIMEOUT_S = 5.0
LOG_TYPES = ("error", "warning", "notice", "debug")

_STAMP = rb"\A(?:\S+: )?"
_DENIED_LINE = re.compile(_STAMP + rb"Denied (\w+) from (\S+) \([^']*'(.*)', ")
_UNTRUSTED_LINE = re.compile(rb"certificate verify failed")
_NO_CERTIFICATE_LINE = re.compile(rb"did not return a certificate")
_TRACE_LINE = re.compile(_STAMP + rb"(?:Received |Sending |Denied |No will message|Will message|\t)")


class MosquittoLog:
    """Reads mosquitto's lines from a pipe, in a thread, until mosquitto ends."""

    def __init__(self, path: Path, on_denied: OnDenied) -> None:
        self._path, self._on_denied = path, on_denied
        self._tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._thread: threading.Thread | None = None
        self._num_probes = 0

    def expect_probe(self) -> None:
        """Announces a probe of the coordinator itself, which connects without a certificate."""
        self._num_probes += 1

    def open(self) -> int:
        """Returns the write end of a new pipe; close it once mosquitto has it."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._tail.clear()
        self._thread = threading.Thread(target=self._read, args=(read_end,), name="mosquitto-log", daemon=True)
        self._thread.start()
        return write_end

    def read_tail(self) -> list[str]:
        """Returns the last lines; call it after mosquitto has ended."""
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        return list(self._tail)

    def _read(self, read_end: int) -> None:
        file = _RotatingLogFile(self._path)
        with os.fdopen(read_end, "rb") as pipe, contextlib.closing(file):
            for line in pipe:
                self._report_denied(line)
                if not _TRACE_LINE.search(line):
                    self._tail.append(line.decode(errors="replace").strip())
                    file.write(line)

    def _report_denied(self, line: bytes) -> None:
        if match := _DENIED_LINE.search(line):
            kind, identity, topic = (part.decode(errors="replace") for part in match.groups())
            self._on_denied(identity, f"{kind} to {topic!r}")
        elif _UNTRUSTED_LINE.search(line):
            self._on_denied("", UNTRUSTED_CERTIFICATE)
        elif _NO_CERTIFICATE_LINE.search(line) and self._num_probes:
            self._num_probes -= 1
        elif _NO_CERTIFICATE_LINE.search(line):
            self._on_denied("", MISSING_CERTIFICATE)


class _RotatingLogFile:
    """A rotating log file; lines that cannot be written are lost."""

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
            with contextlib.suppress(OSError):  # the last lines are lost on a full disk
                file.close()
