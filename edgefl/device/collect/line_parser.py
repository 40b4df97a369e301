"""Lines of CSV files and JSON lines to readings."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_message
from edgefl.device.collect.readings import Reading, Value, find_value, parse_pointer, parse_value
from edgefl.device.collect.settings import LinesSection

MAX_CELLS = 10_000
MAX_TIME_S = 1e11
JSON_SUFFIXES = (".jsonl", ".ndjson")
_DELIMITERS = (",", ";", "\t")


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
