"""Examples that a person labels: files of a shard by moving them, rows of a time by lines in the file of labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgefl.core.errors import DataError, NotFoundError
from edgefl.device.collect.file_store import UNLABELLED, KeptFile, list_files, move_example, read_file_time
from edgefl.device.collect.forgetting import iterate_rows
from edgefl.device.collect.settings import is_label
from edgefl.device.collect.shard_contents import require_state
from edgefl.device.collect.store_state import StoreState
from edgefl.system.atomic_files import make_store_error
from edgefl.system.row_labels import LabelKind, LabelLine, append_row_labels

MAX_EXAMPLES, MAX_POINTS, MAX_CURVES = 500, 600, 8
MAX_FILE_BYTES = 32 * 1024**2
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".wav": "audio/wav"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What gets a label: `file` of a shard of files, else the rows of a time, as `curves` of numbers by column."""

    since_s: float
    until_s: float
    file: KeptFile | None = None
    curves: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def key(self) -> str:
        """Returns its name on the page, which shows nothing of a path."""
        text = self.file.name if self.file is not None else f"{self.since_s!r} {self.until_s!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class LabelTarget(Protocol):
    """Shard whose examples get labels."""

    def list_unlabelled(self) -> list[Example]:
        """Returns the oldest examples without a label, at most `MAX_EXAMPLES`."""
        ...

    def list_labels(self) -> list[str]:
        """Returns the labels that there are."""
        ...

    def label(self, example: Example, label: str) -> bool:
        """Gives an example its label, durably; returns whether it is still there."""
        ...

    def undo(self, example: Example, label: str) -> bool:
        """Takes a label back that this process gave, durably; returns whether the example is still there."""
        ...


class FileTarget:
    """Shard of files, whose labels are their folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_unlabelled(self) -> list[Example]:
        files = sorted(file for file in list_files(self.folder) if file.label == UNLABELLED)[:MAX_EXAMPLES]
        times = [read_file_time(file) for file in files]
        return [Example(since_s=at, until_s=at, file=file) for at, file in zip(times, files, strict=True)]

    def list_labels(self) -> list[str]:
        return sorted({file.label for file in list_files(self.folder)} - {UNLABELLED})

    def label(self, example: Example, label: str) -> bool:
        assert example.file is not None
        return move_example(self.folder, example.file, label)

    def undo(self, example: Example, label: str) -> bool:
        assert example.file is not None
        file = example.file
        moved = KeptFile(file.name, label, file.num_bytes)
        return move_example(self.folder, moved, file.label)

    def read(self, example: Example) -> tuple[bytes, str]:
        """Returns content and media type of an example.

        Raises:
            NotFoundError: it is gone.
        """
        assert example.file is not None
        path = self.folder / example.file.label / example.file.name
        try:
            with path.open("rb") as file:
                return file.read(MAX_FILE_BYTES), MEDIA_TYPES.get(path.suffix, "application/octet-stream")
        except OSError as error:
            raise NotFoundError(f"the example is gone: {error.strerror}") from None


class RowTarget:
    """Shard of rows, cut into windows of a length; a window counts where none of its rows has a label."""

    def __init__(self, folder: Path, state: StoreState, window_s: float) -> None:
        self.folder, self._state, self._window_s = folder, state, window_s
        self._labels: set[str] = set()

    def list_unlabelled(self) -> list[Example]:
        found, rows = list[Example](), list[tuple[float, dict[str, str]]]()
        for time_s, row in iterate_rows(self.folder, require_state(self.folder)):
            if label := row.get("label", ""):
                self._labels.add(label)
            is_next = bool(rows) and (time_s - rows[0][0] >= self._window_s or row["span"] != rows[0][1]["span"])
            if (label or is_next) and rows:
                found += self._make_example(rows)
                rows = []
            if len(found) >= MAX_EXAMPLES:
                return found
            if not label:
                rows.append((time_s, row))
        return [*found, *self._make_example(rows)]

    def list_labels(self) -> list[str]:
        return sorted(self._labels)

    def label(self, example: Example, label: str) -> bool:
        self._append(example, label, LabelKind.PERSON)
        self._labels.add(label)
        return True

    def undo(self, example: Example, label: str) -> bool:  # noqa: ARG002 the protocol's
        self._append(example, "", LabelKind.CLEAR)
        return True

    def _append(self, example: Example, label: str, kind: LabelKind) -> None:
        line = LabelLine(since_s=example.since_s, until_s=example.until_s, label=label, kind=kind)
        try:
            append_row_labels(self.folder, [line])
        except OSError as error:
            raise make_store_error(self.folder, error) from None

    def _make_example(self, rows: Sequence[tuple[float, dict[str, str]]]) -> list[Example]:
        if not rows:
            return []
        step = -(-len(rows) // MAX_POINTS)
        curves = []
        for name in self._state.columns:
            try:
                curves.append((name, tuple(float(row[name]) for _, row in rows[::step])))
            except ValueError:
                continue  # a column of texts, or with a missing value
        return [Example(since_s=rows[0][0], until_s=rows[-1][0], curves=tuple(curves[:MAX_CURVES]))]


def open_target(folder: Path, window_s: float) -> FileTarget | RowTarget:
    """Returns what is labelled in a collector's folder.

    Raises:
        NotFoundError: no collector has written into it.
        StoreError: its state cannot be read.
    """
    state = require_state(folder)
    return RowTarget(folder, state, window_s) if state.columns else FileTarget(folder)


class LabelQueue:
    """Examples in the order in which they are asked about, with what was done to undo it.

    Attributes:
        num_done: labels that were given, without those that were taken back.
    """

    def __init__(self, target: LabelTarget, labels: Sequence[str]) -> None:
        self._target, self._first_labels = target, tuple(labels)
        self._queue = target.list_unlabelled()
        self._done: list[tuple[Example, str]] = []
        self.num_done = 0

    @property
    def current(self) -> Example | None:
        """Returns the next example; None where all have a label."""
        if not self._queue:
            self._queue = self._target.list_unlabelled()
        return self._queue[0] if self._queue else None

    @property
    def num_left(self) -> int:
        return len(self._queue)

    @property
    def can_undo(self) -> bool:
        return bool(self._done)

    @property
    def labels(self) -> list[str]:
        """Returns the labels of the command line, then others that there are."""
        return list(dict.fromkeys([*self._first_labels, *self._target.list_labels()]))

    def label(self, key: str, label: str) -> None:
        """Gives the current example a label; nothing where the page showed another one, as after two taps.

        Raises:
            DataError: it is no label.
            StoreError: it cannot be written.
        """
        if not is_label(label):
            raise DataError("a label is up to 80 visible characters, without a slash and no dot in front")
        example = self.current
        if example is None or example.key != key:
            return
        is_there = self._target.label(example, label)
        del self._queue[0]
        if is_there:
            self._done.append((example, label))
            del self._done[:-MAX_EXAMPLES]
            self.num_done += 1

    def skip(self, key: str) -> None:
        """Asks about the current example later."""
        if self._queue and self._queue[0].key == key:
            self._queue.append(self._queue.pop(0))

    def undo(self) -> None:
        """Takes the last label back, and asks about its example again.

        Raises:
            StoreError: it cannot be written.
        """
        if not self._done:
            return
        example, label = self._done[-1]
        is_there = self._target.undo(example, label)
        del self._done[-1]
        self.num_done -= 1
        if is_there:
            self._queue.insert(0, example)
