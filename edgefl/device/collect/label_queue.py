"""Examples that a person labels: files of a shard by moving them, rows of a time by lines in the file of labels."""

from __future__ import annotations

import hashlib
import logging
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from edgefl.core.errors import ConfigError, DataError, EdgeflError, NotFoundError, StoreBusyError, StoreError
from edgefl.device.collect.file_store import UNLABELLED, KeptFile, list_class_files, move_example, read_file_time
from edgefl.device.collect.forgetting import iterate_rows
from edgefl.device.collect.label_guesses import Draw, Guess, Guesser, NotedGuesser, Source, order_examples
from edgefl.device.collect.settings import is_label
from edgefl.device.collect.shard_contents import require_state
from edgefl.device.collect.store_state import STATE_NAME, StoreState, lock_folder
from edgefl.device.collect.uncertain_times import UncertainTime
from edgefl.system.atomic_files import make_store_error
from edgefl.system.row_labels import (
    LABEL_COLUMN,
    LABELS_NAME,
    MEDIA_TYPES,
    LabelKind,
    LabelLine,
    RowLabels,
    append_row_labels,
    read_row_labels,
)

log = logging.getLogger(__name__)

MAX_EXAMPLES, MAX_POINTS, MAX_CURVES = 500, 300, 8
MAX_GUESSED = 2000
MAX_MOVES = 4
NUM_ROWS = 1000
"""That are looked up in the labels at once."""
ASKED = "asked"

Version = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What gets a label: `file` of a shard of files, else the rows of a time, as `curves` of numbers by column.

    `label` is the one that an event or a default has given; `times` are those of the curves' points. `texts` are
    cells by column, where all rows are there.
    """

    since_s: float
    until_s: float
    label: str = ""
    file: KeptFile | None = None
    curves: tuple[tuple[str, Sequence[float]], ...] = ()
    times: Sequence[float] = ()
    texts: tuple[tuple[str, Sequence[str]], ...] = ()

    @property
    def key(self) -> str:
        """Returns its name on the page, which shows nothing of a path."""
        text = self.file.name if self.file is not None else f"{self.since_s!r} {self.until_s!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def source(self) -> Source:
        """Returns where a model finds it in the shard."""
        return (self.since_s, self.until_s) if self.file is None else (self.file.label, self.file.name)


class LabelTarget(Protocol):
    """Shard whose examples get labels, in `folder`."""

    folder: Path

    def list_examples(self, draw: Draw | None = None) -> list[Example]:
        """Returns the oldest that no person has labelled, at most `MAX_EXAMPLES`: first those without a label.

        With `draw` files are sampled from all instead, at most `MAX_GUESSED`, for a model to say what comes first.
        """
        ...

    def list_labels(self) -> list[str]:
        """Returns the labels that there are."""
        ...

    def read_version(self) -> Version:
        """Returns what changes whenever the list may have changed, and is read at once."""
        ...

    def label(self, example: Example, label: str) -> bool:
        """Gives an example its label, durably; returns whether it is still there."""
        ...

    def undo(self, example: Example) -> bool:
        """Takes a label back that this process gave, durably; returns whether the example is still there."""
        ...


class FileTarget:
    """Shard of files, whose labels are their folders.

    Args:
        folder: of the shard.
        times: of which files are asked about; None for all.
    """

    def __init__(self, folder: Path, times: Sequence[UncertainTime] | None = None) -> None:
        self.folder = folder
        self._times_s = None if times is None else {time.since_s for time in times}

    def list_examples(self, draw: Draw | None = None) -> list[Example]:
        files = sorted(list_class_files(self.folder, UNLABELLED))
        if self._times_s is not None:
            files = [file for file in files if read_file_time(file) in self._times_s]
        if draw is None:
            del files[MAX_EXAMPLES:]
        elif len(files) > MAX_GUESSED:
            files = [files[place] for place in sorted(draw(len(files), MAX_GUESSED))]
        times = [read_file_time(file) for file in files]
        return [Example(since_s=at, until_s=at, file=file) for at, file in zip(times, files, strict=True)]

    def list_labels(self) -> list[str]:
        return sorted(filter(is_label, self._list_folders()))

    def read_version(self) -> Version:
        return _read_version(self.folder / UNLABELLED)

    def label(self, example: Example, label: str) -> bool:
        return self._move(example, label)

    def undo(self, example: Example) -> bool:
        return self._move(example, UNLABELLED)

    def open(self, example: Example) -> tuple[BinaryIO, str]:
        """Returns the opened file and the media type of an example.

        Raises:
            NotFoundError: it is gone.
        """
        for _ in range(MAX_MOVES):
            file = self._find(example)
            if file is None:
                break
            path = self.folder / file.label / file.name
            try:
                return path.open("rb"), MEDIA_TYPES.get(path.suffix, "application/octet-stream")
            except FileNotFoundError:
                continue
        raise NotFoundError("the example is gone: forgotten, or too old")

    def _move(self, example: Example, label: str) -> bool:
        """Moves a file from wherever it is: a collector may move it meanwhile, and the person counts more."""
        for _ in range(MAX_MOVES):
            file = self._find(example)
            if file is None:
                return False
            if file.label == label or move_example(self.folder, file, label):
                return True
        return False

    def _find(self, example: Example) -> KeptFile | None:
        assert example.file is not None
        for label in (example.file.label, *self._list_folders()):
            if (self.folder / label / example.file.name).exists():
                return replace(example.file, label=label)
        return None

    def _list_folders(self) -> list[str]:
        try:
            return [path.name for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()]
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be read: {error.strerror}") from None


class RowTarget:
    """Shard of rows, cut into windows of a length in which all have the same label, and none a person's.

    A last window that a running collector may still add to is left out. With `times` only rows of those are asked
    about.
    """

    def __init__(
        self,
        folder: Path,
        state: StoreState,
        window_s: float,
        times: Sequence[UncertainTime] | None = None,
        *,
        max_examples: int = MAX_EXAMPLES,
    ) -> None:
        self.folder, self._state, self._window_s, self._max_examples = folder, state, window_s, max_examples
        self._labels: set[str] = set()
        self._asked = None if times is None else RowLabels([_make_asked(time) for time in times])

    def list_examples(self, draw: Draw | None = None) -> list[Example]:  # noqa: ARG002 curves of all are too large
        unlabelled, others = list[Example](), list[Example]()
        for example in self._iterate_windows():
            (others if example.label else unlabelled).append(example)
            del others[max(0, self._max_examples - len(unlabelled)) :]
            if len(unlabelled) >= self._max_examples:
                return unlabelled
        return [*unlabelled, *others][: self._max_examples]

    def iterate_whole(self) -> Iterator[Example]:
        """Yields all windows in the order of time, with all rows of all columns: NaN where a cell is no number.

        Columns with cells that are neither numbers nor empty are `texts` as well.
        """
        return self._iterate_windows(is_whole=True)

    def list_labels(self) -> list[str]:
        return sorted(self._labels)

    def read_version(self) -> Version:
        state, labels = _read_version(self.folder / STATE_NAME), _read_version(self.folder / LABELS_NAME)
        return (state, labels, _is_collected(self.folder))

    def label(self, example: Example, label: str) -> bool:
        self._append(example, label, LabelKind.PERSON)
        self._labels.add(label)
        return True

    def undo(self, example: Example) -> bool:
        self._append(example, "", LabelKind.CLEAR)
        return True

    def _iterate_windows(self, *, is_whole: bool = False) -> Iterator[Example]:
        window: _Window | None = None
        for time_s, row, is_left_out in self._iterate_rows():
            label = row.get(LABEL_COLUMN, "")
            self._labels |= {label} - {""}
            if window is not None and (is_left_out or not window.has_room(time_s, row["span"], label)):
                yield window.make_example()
                window = None
            if not is_left_out:
                window = window or _Window(time_s, row, self._state.columns, self._window_s, is_whole=is_whole)
                window.add(time_s, row)
        if window is not None and not _is_collected(self.folder):
            yield window.make_example()

    def _iterate_rows(self) -> Iterator[tuple[float, dict[str, str], bool]]:
        """Yields time and cells of each row, and whether it is not asked about, as one that a person has labelled."""
        try:
            lines = read_row_labels(self.folder).lines
        except OSError as error:
            raise StoreError(f"the labels in {self.folder} cannot be read: {error.strerror}") from None
        by_person = RowLabels(
            [replace(line, label="person") for line in lines if line.kind in {LabelKind.PERSON, LabelKind.CLEAR}]
        )
        rows = iterate_rows(self.folder, require_state(self.folder))
        while chunk := list(islice(rows, NUM_ROWS)):
            times = [time_s for time_s, _ in chunk]
            asked = [ASKED] * len(times) if self._asked is None else self._asked.find(times)
            for (time_s, row), text, word in zip(chunk, by_person.find(times), asked, strict=True):
                yield time_s, row, bool(text) or not word

    def _append(self, example: Example, label: str, kind: LabelKind) -> None:
        line = LabelLine(since_s=example.since_s, until_s=example.until_s, label=label, kind=kind)
        try:
            append_row_labels(self.folder, [line])
        except OSError as error:
            raise make_store_error(self.folder, error) from None


class _Window:
    """Rows as they come: all with `is_whole`, else up to twice `MAX_POINTS` at equal distances.

    A missing number is NaN. Without `is_whole` only columns that have a number among the points are curves.
    """

    def __init__(
        self, since_s: float, row: Mapping[str, str], columns: Sequence[str], window_s: float, *, is_whole: bool
    ) -> None:
        self.span, self.label = row["span"], row.get(LABEL_COLUMN, "")
        self._since_s = self._until_s = since_s
        self._end_s, self._num_rows, self._step = since_s + window_s, 0, 1
        self._is_whole, self._columns, self._times = is_whole, columns, array("d")
        self._curves = {name: array("d") for name in (columns if is_whole else ())}
        self._texts = dict[str, list[str]]()

    def has_room(self, time_s: float, span: str, label: str) -> bool:
        return time_s < self._end_s and (span, label) == (self.span, self.label)

    def add(self, time_s: float, row: Mapping[str, str]) -> None:
        self._until_s = time_s
        if self._num_rows % self._step == 0:
            if self._is_whole:
                self._add_texts(row)
            has_room = not self._is_whole and len(self._curves) < MAX_CURVES
            for name in self._columns if has_room else tuple(self._curves):
                number = _parse_number(row[name])
                if name in self._curves:
                    self._curves[name].append(math.nan if number is None else number)
                elif number is not None and len(self._curves) < MAX_CURVES:
                    self._curves[name] = array("d", [*([math.nan] * len(self._times)), number])
            self._times.append(time_s)
        self._num_rows += 1
        if self._num_rows == 2 * MAX_POINTS * self._step and not self._is_whole:
            self._step *= 2
            for points in (self._times, *self._curves.values()):
                del points[1::2]

    def _add_texts(self, row: Mapping[str, str]) -> None:
        for name in self._columns:
            if name in self._texts:
                self._texts[name].append(row[name])
            elif row[name] and _parse_number(row[name]) is None:
                self._texts[name] = ["" if math.isnan(one) else f"{one:.9g}" for one in self._curves[name]]
                self._texts[name].append(row[name])

    def make_example(self) -> Example:
        return Example(
            since_s=self._since_s,
            until_s=self._until_s,
            label=self.label,
            curves=tuple((name, self._curves[name]) for name in self._columns if self._has_points(name)),
            times=self._times,
            texts=tuple(self._texts.items()),
        )

    def _has_points(self, name: str) -> bool:
        return name in self._curves and (self._is_whole or not all(map(math.isnan, self._curves[name])))


def open_target(
    folder: Path,
    window_s: float,
    times: Sequence[UncertainTime] | None = None,
    *,
    max_examples: int = MAX_EXAMPLES,
) -> FileTarget | RowTarget:
    """Returns what is labelled in a collector's folder: all, or what is of some times, in so many windows at most.

    Raises:
        NotFoundError: no collector has written into it.
        StoreError: its state cannot be read.
        ConfigError: its rows have a column of their own that is called `label`, or there are no times.
    """
    state = require_state(folder)
    if LABEL_COLUMN in state.columns:
        raise ConfigError(
            f"{folder} has a column {LABEL_COLUMN!r} of its own, which counts in place of what a person says; "
            "give it another name in the collect file, and collect into another folder"
        )
    if times is not None and not times:
        raise ConfigError(
            f"{folder} has no times of which a model was uncertain: [answer] of the collect file notes them, with "
            "uncertain_below above 0, ten minutes later"
        )
    if not state.columns:
        return FileTarget(folder, times)
    return RowTarget(folder, state, window_s, times, max_examples=max_examples)


@dataclass(frozen=True, slots=True)
class RandomCheck:
    """How a model did on examples sampled at random: `num_right` of `num` guesses were what the person said."""

    num: int = 0
    num_right: int = 0


class LabelQueue:
    """Examples in the order in which they are asked about, with what was done to undo it.

    Args:
        target: of what is labelled.
        labels: that are offered first.
        guesser: of labels, by which the least certain come first; None for the target's order.

    Attributes:
        num_done: labels that were given, without those that were taken back.
        check: of the model's guesses.

    Raises:
        EdgeflError: the target or the model cannot be used.
    """

    def __init__(
        self, target: LabelTarget, labels: Sequence[str], guesser: Guesser | NotedGuesser | None = None
    ) -> None:
        self._target, self._first_labels, self._guesser = target, tuple(labels), guesser
        self._queue = list[Example]()
        self._version: Version | None = None
        self._done: list[tuple[Example, RandomCheck]] = []
        self._guesses, self._sampled = dict[str, Guess](), set[str]()
        self._share_left = 0.0
        self.num_done, self.check = 0, RandomCheck()
        self._fill()

    @property
    def current(self) -> Example | None:
        """Returns the next example; None where all have a label."""
        if not self._queue:
            self._fill()
        return self._queue[0] if self._queue else None

    @property
    def guess(self) -> Guess | None:
        """Returns what the model says of the current example; None of those sampled at random, to sway nobody."""
        example = self.current
        return None if example is None or example.key in self._sampled else self._guesses.get(example.key)

    @property
    def num_left(self) -> int:
        return len(self._queue)

    @property
    def can_undo(self) -> bool:
        return bool(self._done)

    @property
    def labels(self) -> list[str]:
        """Returns the labels of the command line, then others that there are, then those of the model's guesses."""
        guessed = sorted({guess.label for guess in self._guesses.values() if is_label(guess.label)})
        return list(dict.fromkeys([*self._first_labels, *self._target.list_labels(), *guessed]))

    def label(self, key: str, label: str) -> None:
        """Gives the current example a label; nothing where the page showed another one, as after two taps.

        Raises:
            DataError: it is no label.
            NotFoundError: the example is gone; the next one is asked about.
            StoreError: it cannot be written.
        """
        if not is_label(label):
            raise DataError("a label is up to 80 visible characters, without a slash and no dot in front")
        example = self.current
        if example is None or example.key != key:
            return
        is_there = self._target.label(example, label)
        del self._queue[0]
        if not is_there:
            raise NotFoundError("this example is gone, as it was forgotten or too old; go on with the next one")
        self._done.append((example, self.check))
        del self._done[:-MAX_EXAMPLES]
        self.num_done += 1
        if key in self._sampled and (guess := self._guesses.get(key)) is not None:
            self.check = RandomCheck(self.check.num + 1, self.check.num_right + (guess.label == label))

    def skip(self, key: str) -> None:
        """Asks about the current example later."""
        if self._queue and self._queue[0].key == key:
            self._queue.append(self._queue.pop(0))

    def undo(self) -> None:
        """Takes the last label back, and asks about its example again.

        Raises:
            NotFoundError: the example is gone.
            StoreError: it cannot be written.
        """
        if not self._done:
            return
        example, check = self._done[-1]
        is_there = self._target.undo(example)
        del self._done[-1]
        self.num_done, self.check = self.num_done - 1, check
        if not is_there:
            raise NotFoundError("that example is gone, as it was forgotten or too old")
        self._queue.insert(0, example)

    def _fill(self) -> None:
        """Lists examples anew, where anything has changed since they were listed."""
        version, is_first = self._target.read_version(), self._version is None
        if version == self._version:
            return
        draw = None if self._guesser is None else self._guesser.draw
        self._queue, self._version = self._target.list_examples(draw), version
        if self._guesser is None:
            return
        model = self._guesser.model
        try:
            self._guesses = self._guesser.guess(self._target.folder, {one.key: one.source for one in self._queue})
        except EdgeflError as error:
            if is_first:
                raise
            log.warning("examples come in order of time, as the model cannot guess: %s", error)
            self._guesses = {}
        if self._guesser.model != model:
            self.check = RandomCheck()
            self._done = [(example, self.check) for example, _ in self._done]
        margins = [self._guesses[one.key].margin if one.key in self._guesses else None for one in self._queue]
        # A list may be as short as one: what is left of the share counts in the next.
        self._share_left += self._guesser.share * len(margins)
        num_sampled = min(int(self._share_left), len(margins))
        self._share_left -= num_sampled
        order, sampled = order_examples(margins, num_sampled, self._guesser.draw)
        self._sampled = {self._queue[place].key for place in sampled}
        self._queue = [self._queue[place] for place in order]


def _make_asked(time: UncertainTime) -> LabelLine:
    return LabelLine(since_s=time.since_s, until_s=time.until_s, label=ASKED, kind=LabelKind.EVENT)


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_version(path: Path) -> Version:
    try:
        info = path.stat()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    return (info.st_mtime_ns, info.st_size)


def _is_collected(folder: Path) -> bool:
    """Returns whether a collector runs, whose lock this holds for a moment otherwise."""
    try:
        with lock_folder(folder):
            return False
    except StoreBusyError:
        return True
