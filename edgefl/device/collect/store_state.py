"""State of a row store: its segments, where each source goes on, and what was written and left out."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgefl.core.errors import StoreBusyError, StoreError
from edgefl.core.safe_parsing import parse_message, parse_record
from edgefl.system.atomic_files import make_store_error, write_atomic

STATE_NAME, LOCK_NAME = ".collect.json", ".collect.lock"
MAX_DAYS_SHOWN = 31
MAX_STATE_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A file of rows; what lies behind `num_bytes` does not count."""

    name: str
    num_rows: int = 0
    num_bytes: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """What the state file holds.

    Attributes:
        columns: of the rows, without those of the collector itself.
        segments: oldest first; the last one grows.
        number: of the newest segment that there ever was.
        span: of the newest row.
        positions: by source, where it goes on.
        written: bytes that were written, by day (UTC).
        counts: what was refused or lost, by source and reason.
    """

    columns: tuple[str, ...]
    segments: tuple[Segment, ...] = ()
    number: int = 0
    span: int = 0
    positions: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def last_row_s(self) -> float:
        """Time of the newest row; 0 for none."""
        return self.segments[-1].last_s if self.segments else 0.0


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks a collector's folder; the lock ends with the process.

    Raises:
        StoreBusyError: another collector uses it.
        StoreError: it cannot be written.
    """
    try:
        lock = (folder / LOCK_NAME).open("w")
    except OSError as error:
        raise make_store_error(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusyError(f"another collector writes into {folder}; stop it, or take another folder") from None
        yield


def save_store_state(folder: Path, state: StoreState) -> None:
    """Replaces the state file, durably; raises a `StoreError` where it cannot be written."""
    write_atomic(folder / STATE_NAME, encode_state(state))


def count_written(state: StoreState, num_bytes: int, now_s: float) -> StoreState:
    """Returns the state with what a commit writes, itself included, counted to today."""
    day = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    written = dict(sorted(state.written.items())[-MAX_DAYS_SHOWN:])
    written[day] = written.get(day, 0) + num_bytes
    written[day] += len(encode_state(replace(state, written=written)))
    return replace(state, written=written)


def read_store_state(folder: Path) -> StoreState | None:
    """Returns the state of a folder that a collector writes; None where none does.

    Raises:
        StoreError: it is damaged.
    """
    path = folder / STATE_NAME
    try:
        with path.open("rb") as file:
            value = parse_message(file.read(MAX_STATE_BYTES + 1))
        state = _parse_state(value)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged ({error!s:.100}); collect into another folder") from None
    return state


def encode_state(state: StoreState) -> bytes:
    return json.dumps({"v": 1, **asdict(state)}, separators=(",", ":")).encode()


def _parse_segment(value: Any) -> Segment:
    segment = parse_record(Segment, value)
    if segment is None or not isinstance(segment.name, str) or not segment.name.startswith("rows-"):
        raise ValueError("a segment has no name")
    if "/" in segment.name or not _are_counts([segment.num_rows, segment.num_bytes]):
        raise ValueError("a segment's name or size is none")
    return replace(segment, first_s=float(segment.first_s), last_s=float(segment.last_s))


def _parse_state(value: Any) -> StoreState:
    if value.pop("v", None) != 1:
        raise ValueError("it is not of version 1")
    segments = tuple(_parse_segment(entry) for entry in value.pop("segments"))
    state = StoreState(**{**value, "columns": tuple(value["columns"]), "segments": segments})
    if not all(isinstance(name, str) for name in state.columns) or not _are_counts([state.number, state.span]):
        raise ValueError("columns must be texts, number and span counts")
    if not all(isinstance(text, str) for text in state.positions.values()):
        raise ValueError("positions must be texts")
    if not _are_counts([*state.written.values(), *state.counts.values()]):
        raise ValueError("written and counts must be counts")
    return state


def _are_counts(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
