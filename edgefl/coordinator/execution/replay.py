"""Journal replay, turn by turn, and the run's own clock, for a run resumed exactly where it was.

The loop is a function of the fleet it sees and the events that arrive. The journal has both, so a replayed loop
reaches the very state in which the coordinator ended, and goes on with live devices from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from edgefl.core.errors import JournalError
from edgefl.core.types import (
    Decision,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    Instruction,
    InstructionFailed,
    StopRequested,
    TrainInstruction,
    Update,
)
from edgefl.storage.journal.record_encoding import (
    Aggregation,
    CheckpointMark,
    HealthObserved,
    JournalEntry,
    TurnStarted,
)

E = TypeVar("E")
_EVENT_TYPES = (Update, EvaluateResult, InstructionFailed, StopRequested)


class ReplayError(JournalError):
    """Raised when a replay deviates from its journal: the strategy depends on something not recorded."""


class JournalReplay:
    """The journal entries after a checkpoint, by turns. Not thread-safe: used by the run's thread alone.

    Args:
        entries: in order; an entry before the first turn belongs to none and makes them unusable.
    """

    def __init__(self, entries: Iterable[JournalEntry] = ()) -> None:
        self._entries = deque(entry for entry in entries if not isinstance(entry, CheckpointMark))
        self._next_entry: JournalEntry | None = None
        self._turn_entries: deque[JournalEntry] = deque()
        self._advance()
        if not isinstance(self._next_entry, TurnStarted | None):
            raise ReplayError("the journal does not say what the loop saw")

    @property
    def is_exhausted(self) -> bool:
        """Whether every entry has been replayed."""
        return not self._turn_entries and self._next_entry is None

    @property
    def is_at_last_turn(self) -> bool:
        """Whether only the start of the last turn is left."""
        return self.next_turn is not None and not self._turn_entries and not self._entries

    @property
    def next_turn(self) -> TurnStarted | None:
        return self._next_entry if isinstance(self._next_entry, TurnStarted) else None

    def start_turn(self) -> tuple[TurnStarted, list[HealthObserved]]:
        """Returns the next turn, and the health observed in it."""
        if self._turn_entries:
            raise ReplayError(f"the loop has left out {type(self._turn_entries[0]).__name__.lower()} of its turn")
        turn = self.next_turn
        assert turn is not None
        observations: list[HealthObserved] = []
        self._advance()
        while self._next_entry is not None and not isinstance(self._next_entry, TurnStarted):
            if isinstance(self._next_entry, HealthObserved):
                observations.append(self._next_entry)
            else:
                self._turn_entries.append(self._next_entry)
            self._advance()
        return turn, observations

    def check_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None:
        """Checks a replayed aggregation against the journal."""
        self._check_entry(Aggregation(version=version, assignment_ids=tuple(assignment_ids)))

    def check_decision(self, instructions: Sequence[Instruction]) -> None:
        """Checks a replayed decision against the journal."""
        recorded = self._turn_entries.popleft() if self._turn_entries else None
        if not isinstance(recorded, Decision) or [_get_comparable_fields(o) for o in recorded.instructions] != [
            _get_comparable_fields(o) for o in instructions
        ]:
            raise ReplayError(
                f"the loop orders {[_get_comparable_fields(o) for o in instructions]}, "
                f"the journal has {_format_entry(recorded)}"
            )

    def read_events(self) -> list[Event]:
        """Returns the events of this turn, and ends it."""
        events: list[Event] = []
        while self._turn_entries:
            entry = self._turn_entries.popleft()
            if not isinstance(entry, _EVENT_TYPES):
                raise ReplayError(f"the loop waits, the journal has {_format_entry(entry)}")
            events.append(entry)
        return events

    def _check_entry(self, actual: JournalEntry) -> None:
        recorded = self._turn_entries.popleft() if self._turn_entries else None
        if recorded != actual:
            raise ReplayError(f"the loop comes to {_format_entry(actual)}, the journal has {_format_entry(recorded)}")

    def _advance(self) -> None:
        self._next_entry = self._entries.popleft() if self._entries else None


class RunClock:
    """A run's own clock, in seconds: continues over restarts of the coordinator, paused in between."""

    def __init__(self) -> None:
        self._offset_s = self._paused_s = 0.0
        self._replayed: tuple[float, float] | None = None

    @property
    def offset_s(self) -> float:
        """Seconds that it is ahead of the coordinator's monotonic clock."""
        return self._offset_s

    @property
    def paused_s(self) -> float:
        """Seconds that it stood still before it started, by the wall clock."""
        return self._paused_s

    def set_time(self, now_s: float, unix_s: float) -> None:
        """Sets it to the times of a turn of the journal; `unix_s` are Unix seconds."""
        self._replayed = now_s, unix_s

    def start(self) -> None:
        """Starts it from the time set last."""
        if self._replayed is not None:
            self._paused_s = max(0.0, time.time() - self._replayed[1])
            self._offset_s, self._replayed = self._replayed[0] - time.monotonic(), None

    def now_s(self) -> float:
        return self._replayed[0] if self._replayed is not None else time.monotonic() + self._offset_s

    def unix_s(self) -> float:
        """Returns Unix seconds."""
        return self._replayed[1] if self._replayed is not None else time.time()


def select_complete_turns(entries: Sequence[JournalEntry]) -> Sequence[JournalEntry]:
    """Returns the entries up to the start of the last turn, which may be incomplete."""
    last = max((index for index, entry in enumerate(entries) if isinstance(entry, TurnStarted)), default=-1)
    return entries[: last + 1]


def can_replay(entries: Iterator[JournalEntry]) -> bool:
    """Returns whether entries after a checkpoint can be replayed by turns; True if there are none."""
    first = next((entry for entry in entries if not isinstance(entry, CheckpointMark)), None)
    return first is None or isinstance(first, TurnStarted)


def _get_comparable_fields(instruction: Instruction) -> tuple[object, ...]:
    """Returns the fields that a replay must repeat; not the codec, which bodies name themselves."""
    if isinstance(instruction, TrainInstruction):
        return (
            "assignment",
            instruction.assignment_id,
            instruction.device_id,
            instruction.base_version,
            instruction.plan,
            instruction.block,
        )
    if isinstance(instruction, FinishEarlyInstruction):
        return "finish-early", instruction.assignment_id, instruction.device_id
    return (
        "evaluation",
        instruction.assignment_id,
        instruction.device_id,
        instruction.version,
        instruction.round,
        instruction.subject,
    )


def _format_entry(entry: JournalEntry | None) -> str:
    if entry is None:
        return "nothing"
    text = (
        str([_get_comparable_fields(instruction) for instruction in entry.instructions])
        if isinstance(entry, Decision)
        else str(entry)
    )
    return f"{type(entry).__name__.lower()} {text:.300}"
