"""Run log: the journal that the round loop sees, written first to the write-ahead log, then to its subscribers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgefl.core.types import ClippedUpdate, Decision, Event
from edgefl.engine.progress import DeviceAccuracy, VersionAccuracy


class JournalWriter(Protocol):
    """The write-ahead log of one run."""

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def record_decision(self, decision: Decision) -> None: ...
    def record_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def commit(self) -> None: ...


class RunSubscriber:
    """Derives something from a run's log; each method is called once its entry is written, durable or not yet."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Events, before they take effect."""

    def on_decision(self, decision: Decision) -> None:
        """Instructions, before they are dispatched."""

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        """A new version, from these updates; `state` is the strategy's, and changes in place later."""

    def on_score(self, score: VersionAccuracy | DeviceAccuracy) -> None:
        """The accuracy of a version, or of the devices' own models after a round."""

    def on_clipped(self, clipped: ClippedUpdate) -> None:
        """An update is used with a smaller norm."""

    def on_finish(self) -> None:
        """The run is over; a last commit follows."""

    def on_commit(self) -> None:
        """Everything before is durable."""


class RunLog:
    """Implements `Journal`; without a write-ahead log, nothing is recovered, and updates stay in memory."""

    def __init__(self, wal: JournalWriter | None, subscribers: Sequence[RunSubscriber]) -> None:
        self._wal, self._subscribers = wal, subscribers

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        journaled = events if self._wal is None else self._wal.record_events(events)
        for subscriber in self._subscribers:
            subscriber.on_events(events)
        return journaled

    def record_decision(self, decision: Decision) -> None:
        if self._wal is not None:
            self._wal.record_decision(decision)
        for subscriber in self._subscribers:
            subscriber.on_decision(decision)

    def record_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        if self._wal is not None:
            self._wal.record_aggregation(version, assignment_ids)
        for subscriber in self._subscribers:
            subscriber.on_aggregation(version, assignment_ids, state)

    def record_score(self, score: VersionAccuracy | DeviceAccuracy) -> None:
        """Passes on an accuracy, which follows from the events recorded before."""
        for subscriber in self._subscribers:
            subscriber.on_score(score)

    def record_clipped(self, clipped: ClippedUpdate) -> None:
        """Passes on that an update was clipped, which follows from the events recorded before."""
        for subscriber in self._subscribers:
            subscriber.on_clipped(clipped)

    def commit(self) -> None:
        """Makes the write-ahead log durable, then tells the subscribers."""
        if self._wal is not None:
            self._wal.commit()
        for subscriber in self._subscribers:
            subscriber.on_commit()

    def finish(self) -> None:
        """Commits what is left of a run that is over."""
        for subscriber in self._subscribers:
            subscriber.on_finish()
        self.commit()
