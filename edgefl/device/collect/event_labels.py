"""Labels of rows and files from events that come later, such as "the window was opened" or "the motor failed".

An event labels what is near it in time. What no event has labelled gets the default, once none can come any more, and
only for a time in which the collector has received all of the source: not before its first line, not where a message
was lost or refused, nor over a jump of the clock. Labels are appended, as `row_labels` says: before the sources'
positions are stored, so that a crash loses none, and says one twice at most, which is the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from edgefl.core.errors import StoreError
from edgefl.device.collect.readings import Counts, Reading, ReadingSource, ResumableSource
from edgefl.device.collect.settings import LabelsSection, is_label
from edgefl.system.atomic_files import make_store_error
from edgefl.system.row_labels import (
    MAX_BYTES,
    MAX_LINE_BYTES,
    LabelKind,
    LabelLine,
    append_row_labels,
    cut_row_labels,
    get_labels_size,
    read_row_labels,
)

log = logging.getLogger(__name__)

MAX_EVENTS = 1000
"""That wait to be written; more are left out."""
MAX_FILE_BYTES = MAX_BYTES // 2
LOSSES = ("too_large", "too_long", "too_fast", "unread", "refused", "errors", "missing", "gone")
"""Counts of a source that may stand for an event; those of labels themselves are `LABEL_LOSSES`."""
LABEL_LOSSES = ("labels.refused", "labels.too_fast", "labels.too_many")
NUM_DEFAULTS = 4
"""Lines of the default label in the time that a label may take: more would only write more."""


class EventLabeller:
    """Maker of labels for one folder.

    Args:
        section: of the collect file.
        folder: of the shard.
        name: of the source, for its counts.
        source: whose column the events are.
        counts: of what was left out.
        flush_s: how often labels are written at most.
        now_s: seconds since 1970.

    Raises:
        OSError: the labels cannot be read or written.
    """

    def __init__(  # noqa: PLR0913 one parameter for each collaborator
        self,
        section: LabelsSection,
        folder: Path,
        name: str,
        source: ReadingSource,
        counts: Counts,
        *,
        flush_s: float,
        now_s: float,
    ) -> None:
        self._section, self._folder, self._source, self._counts = section, folder, source, counts
        self._delay_s = section.before_s + section.late_s
        self._interval_s = max(flush_s, self._delay_s / NUM_DEFAULTS)
        self._losses = (*(f"{name}.{loss}" for loss in LOSSES), *LABEL_LOSSES)
        self._num_lost = self._count_lost()
        self._pending: list[LabelLine] = []
        append_row_labels(folder, [])  # tasks find the column before the first event
        self._taken_s, self._has_start = now_s, True
        self._received_s = self._find_start(now_s)

    def restart(self, now_s: float) -> None:
        """Says no default of what was before, after a jump of the clock or a lost event."""
        start_s = now_s + self._section.after_s
        self._received_s, self._taken_s = start_s, now_s
        if isinstance(self._source, ResumableSource) and self._section.default:
            # A default of nothing, from whose end the next process goes on.
            mark = LabelLine(since_s=start_s, until_s=start_s, label="", kind=LabelKind.DEFAULT)
            if self._pending and self._pending[-1].kind is LabelKind.DEFAULT:
                self._pending.pop()
            self._pending.append(mark)

    def take_events(self, readings: Iterable[Reading], now_s: float) -> list[Reading]:
        """Returns readings without the column of events, which become labels; a time after now counts as now.

        The readings are all that the source had at `now_s`, seconds since 1970, which is checked for jumps.
        """
        rest = list[Reading]()
        for reading in readings:
            time_s = min(reading.time_s, now_s)
            if not self._has_start and not reading.values.keys().isdisjoint(self._source.columns):
                self._received_s, self._has_start = min(self._received_s, time_s + self._section.after_s), True
            if self._section.column not in reading.values:
                rest.append(reading)
                continue
            values = dict(reading.values)
            label = values.pop(self._section.column)
            if values:
                rest.append(replace(reading, values=values))
            if label is None:
                continue
            if not isinstance(label, str) or not is_label(label):
                self._counts["labels.refused"] += 1
                continue
            # Outwards to milliseconds, as rows have them: the one of the event's message is among them.
            since_s = math.floor(round((time_s - self._section.before_s) * 1000, 2)) / 1000
            self._add(label, since_s, math.ceil(round((time_s + self._section.after_s) * 1000, 2)) / 1000)
        self._taken_s = now_s
        self._check_losses(now_s)
        return rest

    def _check_losses(self, now_s: float) -> None:
        if (num_lost := self._count_lost()) != self._num_lost:
            self._num_lost = num_lost
            self.restart(min(now_s, self._source.end_s) if isinstance(self._source, ResumableSource) else now_s)

    def _count_lost(self) -> int:
        return sum(self._counts[name] for name in self._losses)

    def _add(self, label: str, since_s: float, until_s: float) -> None:
        """Adds the label of an event; that of one which says the same again only lasts longer."""
        last = self._pending[-1] if self._pending else None
        if last is not None and last.label == label and last.since_s <= since_s <= last.until_s <= until_s:
            self._pending[-1] = replace(last, until_s=until_s)
        elif len(self._pending) >= MAX_EVENTS:
            self._counts["labels.too_fast"] += 1
        else:
            self._pending.append(LabelLine(since_s=since_s, until_s=until_s, label=label, kind=LabelKind.EVENT))

    def trim(self, oldest_s: float) -> None:
        """Removes labels of files from before a time, where there are many."""
        try:
            if get_labels_size(self._folder) > MAX_FILE_BYTES:
                cut_row_labels(self._folder, -math.inf, oldest_s - 0.001)
        except (OSError, StoreError) as error:
            log.warning("labels of %s cannot be removed: %s", self._folder, error)

    def flush(self) -> None:
        """Writes labels, and the default for times that are over and were received.

        Raises:
            StoreError: they cannot be written; they wait.
        """
        self._check_losses(self._taken_s)
        lines = [*self._pending, *self._make_default()]
        if lines:
            try:
                if get_labels_size(self._folder) < MAX_BYTES - MAX_EVENTS * MAX_LINE_BYTES // 4:
                    append_row_labels(self._folder, lines)
                else:
                    self._counts["labels.too_many"] += sum(bool(line.label) for line in lines)
            except OSError as error:
                raise make_store_error(self._folder, error) from None
        self._pending = []
        if lines and lines[-1].kind is LabelKind.DEFAULT:
            self._received_s = lines[-1].until_s

    def _make_default(self) -> list[LabelLine]:
        if not self._section.default:
            return []
        end_s = self._source.end_s if isinstance(self._source, ResumableSource) else math.inf
        self._received_s = min(self._received_s, self._taken_s + self._section.after_s)
        since_s = max(self._received_s, getattr(self._source, "received_since_s", 0.0) + self._section.after_s)
        end_s = min(end_s, getattr(self._source, "received_until_s", math.inf))
        until_s = min(self._taken_s, end_s) - self._delay_s
        if until_s <= since_s or until_s - since_s < self._interval_s:
            return []
        return [LabelLine(since_s=since_s, until_s=until_s, label=self._section.default, kind=LabelKind.DEFAULT)]

    def _find_start(self, now_s: float) -> float:
        """Returns from when on all events are received: of a source that goes on, the end of the last default.

        Where there is none, its first reading may lie before now.
        """
        if isinstance(self._source, ResumableSource) and self._section.default:
            lines = read_row_labels(self._folder).lines
            last = next((line for line in reversed(lines) if line.kind is LabelKind.DEFAULT), None)
            if last is not None and last.until_s <= now_s + self._section.after_s:  # else the clock was set back
                return last.until_s
            self._has_start = last is not None
        return now_s + self._section.after_s
