"""Source `lines`: lines that another program appends to a CSV file or to a file of JSON lines, through its rotation.

A rotated file is read to its end before those that followed it, also after a restart where they lie beside each
other, not compressed, under names with a number or a date behind. The position names the file by inode and by a
checksum of its beginning, since an inode may be used again. A line counts once it has its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgefl.device.collect.line_parser import LineParser
from edgefl.device.collect.readings import Counts, Reading
from edgefl.device.collect.settings import LinesSection
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 65_536
BLOCK_BYTES = 2 * MAX_LINE_BYTES
MAX_SIBLINGS = 1000
START_BYTES = 256
"""Of a file, whose checksum says that it is the same one."""
_ROTATED = re.compile(r"[.-]\d[\dT:_.-]*")


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a reader is in a file; `checksum` is of its first bytes, `START_BYTES` or `offset` of them."""

    inode: int
    offset: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.inode}:{self.offset}:{self.checksum}"

    @classmethod
    def parse(cls, text: str) -> FilePlace:
        """Returns the place of a text; raises a `ValueError` where it is none."""
        inode, offset, checksum = (int(part) for part in text.split(":"))
        if min(inode, offset, checksum) < 0:
            raise ValueError("a place has no negative numbers")
        return cls(inode, offset, checksum)

    def is_in(self, file: IO[bytes]) -> bool:
        """Returns whether an open file is this one; raises an `OSError` where it cannot be read."""
        status = os.fstat(file.fileno())
        is_same = status.st_ino == self.inode and status.st_size >= self.offset
        start = os.pread(file.fileno(), min(START_BYTES, self.offset), 0)
        return is_same and zlib.crc32(start) == self.checksum


class LinesSource:
    """Follower of one file.

    Args:
        name: of the source, for counts and the log.
        section: its settings.
        texts: which of its columns hold texts.
        counts: what is left out is added to it.
        clock: seconds since 1970.

    Raises:
        ConfigError: a pointer is none.
    """

    def __init__(
        self,
        name: str,
        section: LinesSection,
        texts: Sequence[str],
        counts: Counts,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._path, self._counts, self._clock = name, Path(section.path), counts, clock
        self._parser = LineParser(section, texts, f"sources.{name}")
        self.columns = tuple(section.columns)
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._sought: FilePlace | None = None
        self._is_skipping = False
        self._last_s, self.end_s = 0.0, math.inf
        self._log = RateLimitedLog(log)

    @property
    def position(self) -> str:
        if self._file is None:
            return str(self._sought or "")
        start = os.pread(self._file.fileno(), min(START_BYTES, self._offset), 0)
        return str(FilePlace(os.fstat(self._file.fileno()).st_ino, self._offset, zlib.crc32(start)))

    @property
    def received_since_s(self) -> float:
        """Returns since when all lines were read or will be: ever, or infinite while the file cannot be read."""
        return math.inf if self._file is None else 0.0

    def resume(self, position: str) -> None:
        """Goes on at a position, in the file or in a rotated one beside it; where it is gone, at the beginning.

        The position stays while the source's file is absent, as before its disk is mounted.
        """
        if not position:
            return
        try:
            self._sought = FilePlace.parse(position)
        except ValueError:
            self._sought = FilePlace(0, 0, 0)
        self._open_sought(self._sought)

    def read(self) -> list[Reading]:
        """Returns the readings of new lines, of at most `BLOCK_BYTES` at once."""
        self.end_s = math.inf
        if self._file is None and not (self._open_sought(self._sought) if self._sought else self._open(self._path)):
            return []
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._offset:
            self._offset, self._is_skipping = 0, False  # somebody has emptied it
            self._parser.forget_header()
        if self._offset and self._parser.needs_header:
            self._parser.read_header(os.pread(self._file.fileno(), MAX_LINE_BYTES, 0).partition(b"\n")[0])
        block = os.pread(self._file.fileno(), BLOCK_BYTES, self._offset)
        end = block.rfind(b"\n") + 1
        if not end and len(block) > MAX_LINE_BYTES:
            self._counts[f"{self._name}.too_long"] += not self._is_skipping
            self._is_skipping, end = True, len(block)
            self._offset += end
            self.end_s = self._last_s if len(block) == BLOCK_BYTES else math.inf
            return []
        if not end and (following := self._find_following()) is not None:
            return self.read() if self._open(following) else []
        self._offset += end
        lines = block[:end].split(b"\n")[:-1]
        if self._is_skipping and lines:
            self._is_skipping, lines = False, lines[1:]
        readings = self._parse(lines)
        self._last_s = readings[-1].time_s if readings else self._last_s
        if len(block) == BLOCK_BYTES or (end and self._find_following() is not None):
            self.end_s = self._last_s
        return readings

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset, self._is_skipping = None, 0, False
        self._parser.forget_header()

    def _open(self, path: Path) -> bool:
        """Opens a file in place of the one that is open, which stays where that is not possible."""
        try:
            file = path.open("rb", buffering=0)
        except OSError as error:
            self._log.warning("open", "source %s: %s cannot be read yet: %s", self._name, path, error.strerror)
            return False
        self.close()
        self._file = file
        return True

    def _open_sought(self, sought: FilePlace) -> bool:
        """Opens the file of a place; the source's at its beginning once that can be read and is another one."""
        is_gone = False
        for path in [self._path, *self._list_rotated()]:
            with contextlib.suppress(OSError):
                if not self._open(path) or self._file is None:
                    continue
                if sought.is_in(self._file):
                    self._offset, self._sought = sought.offset, None
                    return True
                is_gone |= path == self._path
        self.close()
        if not is_gone or not self._open(self._path):
            return False
        log.warning("source %s: the file that was read is gone; beginning %s anew", self._name, self._path)
        self._counts[f"{self._name}.gone"] += 1
        self._sought = None
        return True

    def _find_following(self) -> Path | None:
        """Returns the next file once this one was rotated and that has something in it; None until then."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            newest = self._path.stat()
        except OSError:
            return None
        if not newest.st_size or newest.st_ino == own.st_ino:
            return None
        later = [(newest.st_mtime_ns, self._path)]
        for path in self._list_rotated():
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_ino != own.st_ino and own.st_mtime_ns < status.st_mtime_ns < newest.st_mtime_ns:
                    later.append((status.st_mtime_ns, path))
        return min(later)[1]

    def _list_rotated(self) -> list[Path]:
        """Returns the files beside the source's whose names are its own and a number or a date."""
        try:
            siblings = [path for _, path in zip(range(MAX_SIBLINGS), self._path.parent.iterdir(), strict=False)]
        except OSError:
            return []
        start = self._path.name
        return [
            path for path in siblings if path.name.startswith(start) and _ROTATED.fullmatch(path.name[len(start) :])
        ]

    def _parse(self, lines: Sequence[bytes]) -> list[Reading]:
        now_s, readings = self._clock(), list[Reading]()
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                self._counts[f"{self._name}.too_long"] += 1
                continue
            if self._parser.needs_header:
                self._parser.read_header(line)
                continue
            try:
                reading = self._parser.parse_line(line, now_s)
            except ValueError as error:
                self._counts[f"{self._name}.refused"] += 1
                self._log.warning("line", "source %s: a line of %s is left out: %s", self._name, self._path, error)
                continue
            if reading is not None:
                readings.append(reading)
        return readings
