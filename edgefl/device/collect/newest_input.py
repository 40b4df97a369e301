"""Newest input of a collector, about which the deployed model is asked: rows of a span, or a file.

What is sent is what stands in the shard: the text of rows, or the bytes of a file.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, KeptFile, read_file_time
from edgefl.device.collect.row_store import encode_lines, round_time
from edgefl.system.row_labels import MEDIA_TYPES

MAX_ROWS, MAX_CELLS = 4096, 200_000
"""That are held for the newest window."""
MAX_FILE_BYTES = 8 * 1024**2
"""That the inference server takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The served model: its tensors' SHA-256 and its deployment, its classes, and what it makes an example of.

    A model of a file has no deployment. `num_rows` is 0 where examples are no rows, and `suffixes` are of the files
    that are examples.
    """

    model: str | None
    deployment: str | None
    classes: tuple[str, ...]
    num_rows: int = 0
    suffixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a model is asked about.

    Attributes:
        content: text of rows, or a file.
        media_type: of it.
        time_s: of the newest row, or of the file.
        number: how many rows or files had been added by then.
        noted: first and last time by which the shard's example is found; None where it has no use for a label.
    """

    content: bytes
    media_type: str
    time_s: float
    number: int
    noted: tuple[float, float] | None


NewItem_contra = TypeVar("NewItem_contra", contravariant=True)
"""What a collector adds: rows, or a file."""


class NewestInput(Protocol[NewItem_contra]):
    """Source of questions. One thread adds to it, another reads."""

    @property
    def newest(self) -> tuple[int, float]:
        """Returns how many rows or files were added, and the newest one's time, minus infinity without one."""
        ...

    def add(self, item: NewItem_contra) -> None: ...

    def clear(self) -> None: ...

    def make_question(self, model: ModelFacts) -> Question | None:
        """Returns what to ask a model; None where that needs more rows than there are.

        Raises:
            ValueError: the model makes no examples of this.
        """
        ...


class NewestRows:
    """Newest rows of one span.

    Args:
        columns: of the rows.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns, self._lock = tuple(columns), threading.Lock()
        self._max_rows = max(1, min(MAX_ROWS, MAX_CELLS // len(self._columns)))
        self._rows, self._num_added = deque[Row](maxlen=self._max_rows), 0

    @property
    def newest(self) -> tuple[int, float]:
        with self._lock:
            return self._num_added, self._rows[-1].time_s if self._rows else -math.inf

    def add(self, item: Sequence[Row]) -> None:
        with self._lock:
            for row in item:
                if self._rows and self._rows[-1].span != row.span:
                    self._rows.clear()  # no window over a gap
                self._rows.append(row)
            self._num_added += len(item)

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()

    def make_question(self, model: ModelFacts) -> Question | None:
        if not model.num_rows:
            raise ValueError("the model makes no examples of rows: deploy one of the task series or table")
        if model.num_rows > self._max_rows:
            raise ValueError(f"the model looks at {model.num_rows} rows, of {len(self._columns)} columns fit fewer")
        with self._lock:
            window, number = list(self._rows)[-model.num_rows :], self._num_added
        if len(window) < model.num_rows:
            return None
        return Question(
            content=encode_lines(self._columns, window),
            media_type="text/csv",
            time_s=window[-1].time_s,
            number=number,
            noted=(round_time(window[0].time_s), round_time(window[-1].time_s)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that came; `kept` is what it is in the store, None where that has left it out as one more of a kind."""

    content: bytes
    suffix: str
    time_s: float
    kept: KeptFile | None


class NewestFile:
    """Newest file that came."""

    def __init__(self) -> None:
        self._lock, self._num_added = threading.Lock(), 0
        self._newest: NewFile | None = None

    @property
    def newest(self) -> tuple[int, float]:
        with self._lock:
            return self._num_added, -math.inf if self._newest is None else self._newest.time_s

    def add(self, item: NewFile) -> None:
        with self._lock:
            self._newest = item if len(item.content) <= MAX_FILE_BYTES else replace(item, content=b"")
            self._num_added += 1

    def clear(self) -> None:
        with self._lock:
            self._newest = None

    def make_question(self, model: ModelFacts) -> Question | None:
        with self._lock:
            newest, number = self._newest, self._num_added
        if newest is None:
            return None
        if newest.suffix not in model.suffixes:
            raise ValueError(f"the model reads no {newest.suffix} files: deploy one of the task pictures or audio")
        if not newest.content:
            raise ValueError(f"the file has more than {MAX_FILE_BYTES:,} bytes, which the server does not take")
        noted = None
        if newest.kept is not None and newest.kept.label == UNLABELLED:
            noted = (read_file_time(newest.kept),) * 2
        media_type = MEDIA_TYPES[newest.suffix]
        return Question(
            content=newest.content, media_type=media_type, time_s=newest.time_s, number=number, noted=noted
        )
