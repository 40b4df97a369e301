"""Source `lines`: lines that another program appends to a CSV file or to a file of JSON lines, through its rotation.

A rotated file is read to its end before the new one, also after a restart where it lies beside that one. The position
names the file by inode and by a checksum of its beginning, since an inode may be used again. A line counts once it
has its end.
"""

from __future__ import annotations

import csv
import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_message
from edgefl.device.collect.readings import Counts, Reading, Value, find_value, parse_pointer, parse_value
from edgefl.device.collect.settings import LinesSection
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 65_536
BLOCK_BYTES = 2 * MAX_LINE_BYTES
MAX_SIBLINGS = 1000
MAX_CELLS = 10_000
START_BYTES = 256
"""Of a file, whose checksum says that it is the same one."""
MAX_TIME_S = 1e11
JSON_SUFFIXES = (".jsonl", ".ndjson")
_DELIMITERS = (",", ";", "\t")


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

    def is_in(self, path: Path) -> bool:
        """Returns whether a file is this one."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_same = status.st_ino == self.inode and status.st_size >= self.offset
                return is_same and zlib.crc32(file.read(min(START_BYTES, self.offset))) == self.checksum
        except OSError:
            return False


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
        self._is_skipping = False
        self._log = RateLimitedLog(log)

    @property
    def position(self) -> str:
        if self._file is None:
            return ""
        start = os.pread(self._file.fileno(), min(START_BYTES, self._offset), 0)
        return str(FilePlace(os.fstat(self._file.fileno()).st_ino, self._offset, zlib.crc32(start)))

    def resume(self, position: str) -> None:
        """Goes on at a position, in the file or in a rotated one beside it; where it is gone, at the beginning."""
        if not position:
            return
        try:
            place = FilePlace.parse(position)
            siblings = [path for _, path in zip(range(MAX_SIBLINGS), self._path.parent.iterdir(), strict=False)]
        except (OSError, ValueError):
            siblings, place = [], FilePlace(0, 0, 0)
        for path in [self._path, *(path for path in siblings if path.name.startswith(self._path.name))]:
            if place.is_in(path) and self._open(path):
                self._offset = place.offset
                return
        log.warning("source %s: the file that was read is gone; beginning %s anew", self._name, self._path)

    def read(self) -> list[Reading]:
        """Returns the readings of new lines, of at most `BLOCK_BYTES` at once."""
        if self._file is None and not self._open(self._path):
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
            return []
        if not end and self._is_rotated():
            self.close()
            return self.read() if self._open(self._path) else []
        self._offset += end
        lines = block[:end].split(b"\n")[:-1]
        if self._is_skipping and lines:
            self._is_skipping, lines = False, lines[1:]
        return self._parse(lines)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset, self._is_skipping = None, 0, False
        self._parser.forget_header()

    def _open(self, path: Path) -> bool:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            self._log.warning("open", "source %s: %s cannot be read yet: %s", self._name, path, error.strerror)
            return False
        return True

    def _is_rotated(self) -> bool:
        """Returns whether another file with something in it has taken the place of this one."""
        assert self._file is not None
        try:
            status = self._path.stat()
        except OSError:
            return False
        return status.st_size > 0 and status.st_ino != os.fstat(self._file.fileno()).st_ino

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


class LineParser:
    """Parser of lines of one file; of a CSV file the first line is read by `read_header`."""

    def __init__(self, section: LinesSection, texts: Sequence[str], path: str) -> None:
        self._is_json = Path(section.path).suffix in JSON_SUFFIXES
        self._places = {column: str(place) for column, place in section.columns.items()}
        self._texts, self._time = set(texts), section.time
        self._header: list[str] | None = None
        self._delimiter = ","
        try:
            places = [*self._places.values(), *([self._time] if self._time else [])]
            self._pointers = {place: parse_pointer(place) for place in places if self._is_json}
        except ValueError as error:
            raise ConfigError(f"{path}.columns of JSON lines: {error}") from None
        if not section.path.startswith("/"):
            raise ConfigError(f"{path}.path must be an absolute path, got {section.path!r:.80}")

    @property
    def needs_header(self) -> bool:
        return self._header is None and not self._is_json

    def read_header(self, line: bytes) -> None:
        text = line.decode("utf-8-sig", errors="replace")
        self._delimiter = max(_DELIMITERS, key=text.count)
        try:
            self._header = [cell.strip() for cell in self._split(text)]
        except ValueError:
            self._header = []  # no line fits it, and each is counted

    def forget_header(self) -> None:
        self._header = None

    def parse_line(self, line: bytes, now_s: float) -> Reading | None:
        """Returns the reading of a line, at its own time or else at `now_s`; None for an empty one.

        Raises:
            ValueError: it cannot be read, has no time where it must, or a value is none.
        """
        if not line.strip():
            return None
        cells = parse_message(line) if self._is_json else self._read_cells(line.decode())
        time_s = now_s
        if self._time:
            try:
                time_s = parse_time(self._find(cells, self._time))
            except KeyError:
                raise ValueError(f"it has no {self._time:.80}") from None
        values = dict[str, Value]()
        for column, place in self._places.items():
            try:
                values[column] = parse_value(self._find(cells, place), is_text=column in self._texts)
            except KeyError:
                continue
            except ValueError as error:
                raise ValueError(f"{column}: {error}") from None
        return Reading(values=values, time_s=time_s)

    def _find(self, cells: object, place: str) -> object:
        return find_value(cells, self._pointers[place] if self._is_json else (place,))

    def _read_cells(self, line: str) -> dict[str, str]:
        cells, header = self._split(line), self._header or []
        if len(cells) != len(header):
            raise ValueError(f"it has {len(cells)} cells, the first line {len(header)}")
        if self._delimiter == ";":
            cells = [
                cell.replace(",", ".") if name not in self._texts else cell
                for cell, name in zip(cells, header, strict=True)
            ]
        return dict(zip(header, cells, strict=True))

    def _split(self, text: str) -> list[str]:
        try:
            cells = next(csv.reader([text.rstrip("\r\n")], delimiter=self._delimiter, strict=True), [])
        except csv.Error as error:
            raise ValueError(str(error)) from None
        if len(cells) > MAX_CELLS:
            raise ValueError(f"it has {len(cells)} cells, at most are {MAX_CELLS}")
        return cells


def parse_time(value: object) -> float:
    """Returns a time in seconds since 1970, of such a number or an ISO 8601 text; without a zone it is the board's.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("a time is seconds since 1970 or an ISO 8601 text")  # noqa: TRY004 of a stranger's value
    try:
        time_s = float(value)
    except ValueError:
        try:
            time_s = datetime.fromisoformat(str(value).strip()).timestamp()
        except (ValueError, OverflowError, OSError):
            # No cell goes into the log.
            raise ValueError("a time is seconds since 1970 or an ISO 8601 text of this era") from None
    if not 0 <= time_s <= MAX_TIME_S:
        raise ValueError("a time is out of range; it is in seconds since 1970")
    return time_s
