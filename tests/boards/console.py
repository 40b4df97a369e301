"""A board's console: every line with the moment at which it came, so that a boot can be waited for and timed."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# Colours and cursor movements of systemd's lines.
_ESCAPES = re.compile(rb"\x1b[\[\]()][0-9;?=]*[A-Za-z]?")


@dataclass(slots=True)
class Console:
    """Reads a terminal in a thread of its own until its other side is closed, and keeps a copy in `log`."""

    log: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def follow(self, terminal: int) -> None:
        """Reads from this file descriptor, and closes it at its end."""
        threading.Thread(target=self._read, args=(terminal,), name="console", daemon=True).start()

    def wait_for(self, pattern: str, *, timeout_s: float, since: int = 0) -> float:
        """Returns when a line with the pattern came (Unix seconds), from line number `since` on.

        Raises:
            AssertionError: it did not come in time, or the board ended; the last lines are in it.
        """
        seek, until_s = re.compile(pattern), time.monotonic() + timeout_s
        at = since
        with self._news:
            while True:
                for moment, line in self.lines[at:]:
                    if seek.search(line):
                        return moment
                at = len(self.lines)
                left_s = until_s - time.monotonic()
                assert not self._closed, f"the board ended before it said {pattern!r}:\n{self.tail()}"
                assert left_s > 0, f"the board did not say {pattern!r} within {timeout_s:.0f} s:\n{self.tail()}"
                self._news.wait(left_s)

    def first(self, pattern: str, *, since: int = 0) -> float | None:
        """Returns when the first line with the pattern came, or None."""
        seek = re.compile(pattern)
        return next((moment for moment, line in self.lines[since:] if seek.search(line)), None)

    def tail(self, num_lines: int = 40) -> str:
        """Returns the last lines."""
        return "\n".join(line for _, line in self.lines[-num_lines:])

    def _read(self, terminal: int) -> None:
        rest = b""
        with self.log.open("ab", buffering=0) as copy:
            while body := _some(terminal):
                copy.write(body)
                *whole, rest = (rest + body).split(b"\n")
                now = time.time()
                with self._news:
                    self.lines += [(now, _ESCAPES.sub(b"", line).decode(errors="replace").strip()) for line in whole]
                    self._news.notify_all()
        os.close(terminal)
        with self._news:
            self._closed = True
            self._news.notify_all()


def _some(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # a terminal whose other side is closed gives EIO
        return b""
