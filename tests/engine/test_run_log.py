"""The write-ahead log comes before everybody who derives something from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgefl.core.types import Decision, Event, StopRequested
from edgefl.engine.progress import VersionAccuracy
from edgefl.engine.round_loop import RunLog, RunSubscriber

STOP = StopRequested(reason="enough")


class Wal:
    """Notes what it writes; fails at the kinds of entries in `refuses`."""

    def __init__(self, told: list[Any], refuses: Sequence[str] = ()) -> None:
        self.told, self.refuses = told, refuses

    def note(self, kind: str) -> None:
        if kind in self.refuses:
            raise OSError(kind)
        self.told.append(("wal", kind))

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        self.note("events")
        return [*events, STOP]

    def record_decision(self, decision: Decision) -> None:
        self.note("decision")

    def record_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None:
        self.note("aggregation")

    def commit(self) -> None:
        self.note("commit")


class Listener(RunSubscriber):
    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def on_events(self, events: Sequence[Event]) -> None:
        self.told.append(("listener", "events"))

    def on_decision(self, decision: Decision) -> None:
        self.told.append(("listener", "decision"))

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self.told.append(("listener", "aggregation"))

    def on_commit(self) -> None:
        self.told.append(("listener", "commit"))


def drive(log: RunLog) -> Sequence[Event]:
    events = log.record_events([STOP])
    log.record_decision(Decision(instructions=()))
    log.record_aggregation(1, ["a"], None)
    log.record_score(VersionAccuracy(version=1, accuracy=0.5, is_newest=True))  # which it need not care about
    log.finish()
    return events


def test_every_entry_is_in_the_write_ahead_log_first() -> None:
    told: list[Any] = []
    assert drive(RunLog(Wal(told), [Listener(told), RunSubscriber()])) == [STOP, STOP]
    kinds = ("events", "decision", "aggregation", "commit")
    assert told == [(who, kind) for kind in kinds for who in ("wal", "listener")]


@pytest.mark.parametrize("kind", ["events", "decision", "aggregation", "commit"])
def test_nothing_is_derived_from_what_could_not_be_written(kind: str) -> None:
    told: list[Any] = []
    with pytest.raises(OSError, match=kind):
        drive(RunLog(Wal(told, [kind]), [Listener(told)]))
    assert ("listener", kind) not in told


def test_without_a_write_ahead_log_events_stay_as_they_are() -> None:
    told: list[Any] = []
    assert drive(RunLog(None, [Listener(told)])) == [STOP]
    assert len(told) == 4
