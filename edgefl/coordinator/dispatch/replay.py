"""What a journal says of a run, turn by turn, and the run's own time: both for a run that is taken up where it was.

The loop is a function of what it sees of its fleet and of what arrives. The journal has both, so a loop that is
driven by it comes to the very state in which the coordinator ended, and goes on with real boards from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from edgefl.errors import JournalError
from edgefl.storage.journal_records import Aggregated, CheckpointMark, Entry, Seen, Turn
from edgefl.types import Assignment, Decision, Evaluated, Event, Lost, Order, Recall, Stop, Update

E = TypeVar("E")
_EVENTS = (Update, Evaluated, Lost, Stop)


class ReplayError(JournalError):
    """The loop does not do what the journal says it did: its strategy depends on something that nobody wrote down."""


class Script:
    """The entries behind a checkpoint, by turns. Used by the thread of the run alone.

    Args:
        entries: in order; whatever stands before the first turn is not part of one and makes them unusable.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = deque(entry for entry in entries if not isinstance(entry, CheckpointMark))
        self._next: Entry | None = None
        self._turn: deque[Entry] = deque()
        self._advance()
        if not isinstance(self._next, Turn | None):
            raise ReplayError("the journal does not say what the loop saw")

    @property
    def is_over(self) -> bool:
        """Whether all has been told: what follows is new."""
        return not self._turn and self._next is None

    @property
    def ends_with_next_turn(self) -> bool:
        """Whether all has been told but that another turn began."""
        return self.next_turn is not None and not self._turn and not self._entries

    @property
    def next_turn(self) -> Turn | None:
        return self._next if isinstance(self._next, Turn) else None

    def begin_turn(self) -> tuple[Turn, list[Seen]]:
        """Returns the next turn, and how boards were in it."""
        if self._turn:
            raise ReplayError(f"the loop has left out {type(self._turn[0]).__name__.lower()} of its turn")
        turn = self.next_turn
        assert turn is not None
        seen: list[Seen] = []
        self._advance()
        while self._next is not None and not isinstance(self._next, Turn):
            if isinstance(self._next, Seen):
                seen.append(self._next)
            else:
                self._turn.append(self._next)
            self._advance()
        return turn, seen

    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None:
        """Takes a version that the loop has made again."""
        self._take(Aggregated(version=version, assignment_ids=tuple(assignment_ids)))

    def decided(self, orders: Sequence[Order]) -> None:
        """Takes orders that the loop has decided on again."""
        known = self._turn.popleft() if self._turn else None
        if not isinstance(known, Decision) or [_gist(o) for o in known.orders] != [_gist(o) for o in orders]:
            raise ReplayError(f"the loop orders {[_gist(o) for o in orders]}, the journal has {_told(known)}")

    def events(self) -> list[Event]:
        """Returns what arrived in this turn, which ends with it."""
        found: list[Event] = []
        while self._turn:
            entry = self._turn.popleft()
            if not isinstance(entry, _EVENTS):
                raise ReplayError(f"the loop waits, the journal has {_told(entry)}")
            found.append(entry)
        return found

    def _take(self, made: Entry) -> None:
        known = self._turn.popleft() if self._turn else None
        if known != made:
            raise ReplayError(f"the loop comes to {_told(made)}, the journal has {_told(known)}")

    def _advance(self) -> None:
        self._next = self._entries.popleft() if self._entries else None


class RunClock:
    """A run's own time, in seconds: it goes on over restarts of the coordinator, and stands still meanwhile."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._told: tuple[float, float] | None = None

    @property
    def offset_s(self) -> float:
        """By how much it is ahead of the coordinator's monotonic clock."""
        return self._offset_s

    def tell(self, now_s: float, at: float) -> None:
        """Makes it say what it said in a turn of the journal, `at` Unix seconds."""
        self._told = now_s, at

    def go_live(self) -> None:
        """Lets it run on from what it was told last."""
        if self._told is not None:
            self._offset_s, self._told = self._told[0] - time.monotonic(), None

    def now_s(self) -> float:
        return self._told[0] if self._told is not None else time.monotonic() + self._offset_s

    def at(self) -> float:
        """Returns Unix seconds."""
        return self._told[1] if self._told is not None else time.time()


def up_to_last_turn(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Returns the entries up to where the last turn begins: that one may lack anything."""
    last = max((place for place, entry in enumerate(entries) if isinstance(entry, Turn)), default=-1)
    return entries[: last + 1]


def has_turns(entries: Iterator[Entry]) -> bool:
    """Returns whether entries behind a checkpoint can be followed turn by turn; nothing can be, too."""
    first = next((entry for entry in entries if not isinstance(entry, CheckpointMark)), None)
    return first is None or isinstance(first, Turn)


def _gist(order: Order) -> tuple[object, ...]:
    """Returns what must be the same of an order; a codec may be chosen otherwise, bodies say which one it was."""
    if isinstance(order, Assignment):
        return "assignment", order.assignment_id, order.device_id, order.base_version, order.plan, order.block
    if isinstance(order, Recall):
        return "recall", order.assignment_id, order.device_id
    return "evaluation", order.assignment_id, order.device_id, order.version, order.round, order.subject


def _told(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    text = str([_gist(order) for order in entry.orders]) if isinstance(entry, Decision) else str(entry)
    return f"{type(entry).__name__.lower()} {text:.300}"
