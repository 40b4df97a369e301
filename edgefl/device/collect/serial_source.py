"""Source `serial`: lines that a microcontroller sends over a serial port, also of USB, which may be unplugged.

A line is JSON, or cells separated by commas, semicolons, tabs or blanks. What comes before the first end of a line
after each opening is the rest of one, and is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import select
import termios
import time
import tty
from collections.abc import Callable, Sequence
from pathlib import Path

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_message
from edgefl.device.collect.polled_source import parse_pointers
from edgefl.device.collect.readings import (
    Counts,
    Reading,
    SourceThread,
    UnreadReadings,
    Value,
    find_value,
    parse_value,
)
from edgefl.device.collect.settings import SerialSection
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAX_LINE_BYTES, BLOCK_BYTES = 4096, 4096
RETRY_S, WAIT_S = 2.0, 0.5
_SEPARATORS, _DECIMAL_COMMA = ";\t,", re.compile(r"([+-]?\d+),(\d+)")


class SerialSource(SourceThread):
    """Reader of one port, by a thread that opens it again whenever it is gone; `start` begins.

    Args:
        name: of the source, for counts and the log.
        section: its settings.
        texts: which of its columns hold texts.
        counts: what is left out is added to it.
        clock: seconds since 1970; it may jump.
        monotonic: seconds; it does not.

    Raises:
        ConfigError: the path, the speed or a pointer is none.
    """

    def __init__(
        self,
        name: str,
        section: SerialSection,
        texts: Sequence[str],
        counts: Counts,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name)
        self._name, self._path, self._counts, self._texts = name, Path(section.path), counts, set(texts)
        self._clock, self._monotonic = clock, monotonic
        speeds = {int(key[1:]): value for key, value in vars(termios).items() if re.fullmatch(r"B[1-9]\d*", key)}
        if section.baud not in speeds:
            raise ConfigError(f"sources.{name}.baud must be one of {', '.join(map(str, sorted(speeds)))}")
        self._speed = speeds[section.baud]
        self._pointers = parse_pointers(name, section.columns)
        self.columns = tuple(section.columns)
        self._unread = UnreadReadings(name, counts)
        self._opened_s = math.inf
        self._log = RateLimitedLog(log)

    @property
    def received_since_s(self) -> float:
        """Returns since when the port is open, by the clock of now; infinite while it is not."""
        return self._clock() - self._monotonic() + self._opened_s

    def read(self) -> list[Reading]:
        """Returns what came since the last call."""
        return self._unread.take()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with contextlib.closing(_Port(self._path, self._speed)) as port:
                    log.info("source %s reads %s", self._name, self._path)
                    self._opened_s = self._monotonic()
                    self._read_lines(port)
            except (OSError, termios.error) as error:
                self._counts[f"{self._name}.errors"] += 1
                reason = error.args[-1] if isinstance(error, termios.error) else error.strerror or error
                self._log.warning("port", "source %s: %s cannot be read: %s", self._name, self._path, reason)
            finally:
                self._opened_s = math.inf
            self._stopping.wait(RETRY_S)

    def _read_lines(self, port: _Port) -> None:
        """Reads until the port is gone; raises an `OSError` then."""
        rest, is_skipping = b"", True
        while not self._stopping.is_set():
            *lines, rest = (rest + port.read(WAIT_S)).split(b"\n")
            if lines and is_skipping:
                del lines[0]
                is_skipping = False
            for line in lines:
                self._take_line(line)
            if len(rest) > MAX_LINE_BYTES:
                self._counts[f"{self._name}.too_long"] += not is_skipping
                rest, is_skipping = b"", True

    def _take_line(self, line: bytes) -> None:
        if not line.strip():
            return
        if len(line) > MAX_LINE_BYTES:
            self._counts[f"{self._name}.too_long"] += 1
            return
        try:
            values = self._parse(line)
        except ValueError as error:
            self._counts[f"{self._name}.refused"] += 1
            self._log.warning("line", "source %s: a line is left out: %s", self._name, error)
            return
        if values:
            self._unread.add(Reading(values=values, time_s=self._clock()))

    def _parse(self, line: bytes) -> dict[str, Value]:
        """Returns the values of a line, whole or none of it: a half one has a wrong number, or too few.

        Raises:
            ValueError: it cannot be read, or lacks a value; an object may, which is about something else.
        """
        document = parse_line(line)
        values = dict[str, Value]()
        for column, pointer in self._pointers:
            try:
                values[column] = parse_value(find_value(document, pointer), is_text=column in self._texts)
            except KeyError:
                if not isinstance(document, dict):
                    raise ValueError(f"it has no {column:.80}") from None  # noqa: TRY004 of a stranger's line
            except ValueError as error:
                raise ValueError(f"{column:.80}: {error}") from None
        return values


def parse_line(line: bytes) -> object:
    """Returns the JSON value of a line, or its cells between the first of `_SEPARATORS` that it has, else blanks.

    Raises:
        ValueError: it is no text.
    """
    try:
        text = line.decode("ascii" if line.isascii() else "utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    if text.lstrip().startswith(("{", "[")):
        return parse_message(text.strip().encode())
    separator = next((one for one in _SEPARATORS if one in text), None)
    cells = [cell.strip() for cell in text.split(separator)]
    return [_DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in cells] if separator == ";" else cells


class _Port:
    """An open port, which no other program reads meanwhile; raises an `OSError` or `termios.error`."""

    def __init__(self, path: Path, speed: int) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            tty.setraw(self._handle)
            attributes = termios.tcgetattr(self._handle)
            attributes[2] |= termios.CLOCAL | termios.CREAD
            attributes[4] = attributes[5] = speed
            termios.tcsetattr(self._handle, termios.TCSANOW, attributes)
            fcntl.ioctl(self._handle, termios.TIOCEXCL)
        except BaseException:
            self.close()
            raise

    def read(self, wait_s: float) -> bytes:
        """Returns what came, after a wait at most; raises an `OSError` once the port is gone."""
        if not select.select([self._handle], [], [], wait_s)[0]:
            return b""
        content = os.read(self._handle, BLOCK_BYTES)
        if not content:
            raise OSError("it was unplugged")
        return content

    def close(self) -> None:
        os.close(self._handle)
