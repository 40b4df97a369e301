"""What a run needs beside its strategy's state to go on exactly where it was, as it is saved with a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from edgefl.compression.auto import Learnt
from edgefl.coordinator.dispatch.journaled_fleet import FleetStanding
from edgefl.errors import JournalError
from edgefl.loop import Course
from edgefl.storage.state_files import unpack_state
from edgefl.strategies.gate import Guard, StrategyGate
from edgefl.tally import RoundCount

log = logging.getLogger(__name__)

ANOTHER_LIFE = "another-life"
"""A file beside the journal of a run that came out of a backup, or lacks what was damaged: its boards may have done
other work since, under the same ids, so it goes on from a checkpoint and gives others. The next checkpoint takes the
file away."""


LIVES = "lives.json"
"""A file beside the journal of a run that ended in a later life than its first: which life gave what. Its last
checkpoint has no standing, and it may be taken up again from there."""

GUARD = "guard.safetensors"
"""A file beside the journal of a run whose newest checkpoint has no standing: what its guard knew by then."""


@dataclass(slots=True, kw_only=True)
class GuardStanding:
    """Whose updates were refused, and the norms of those that were let in last."""

    strikes: dict[str, int] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    flagged: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, guard: Guard) -> GuardStanding:
        # The norms of whole models say nothing, and would make every standing another one.
        norms = [] if guard.takes_models else list(guard.norms)
        return cls(strikes=dict(guard.strikes), norms=norms, flagged=set(guard.flagged))

    def restore(self, guard: Guard) -> None:
        """Tells a guard what it knew."""
        guard.strikes, guard.flagged = dict(self.strikes), set(self.flagged)
        guard.norms = deque(self.norms, maxlen=guard.norms.maxlen)


@dataclass(slots=True, kw_only=True)
class Standing:
    """Everything between two turns that is not the strategy's; `opened_s` says when the open rounds began."""

    course: Course = field(default_factory=Course)
    fleet: FleetStanding = field(default_factory=FleetStanding)
    guard: GuardStanding = field(default_factory=GuardStanding)
    codecs: Learnt | None = None
    opened_s: dict[int, float] = field(default_factory=dict)

    def course_of(self, rounds: RoundCount) -> Course:
        """Returns the course for the loop to change, with the run's own count of rounds, which learns what it was."""
        course = copy.deepcopy(self.course)
        rounds.versions_per_round = course.tally.rounds.versions_per_round
        course.tally.rounds = rounds
        return course

    def restore(self, gate: StrategyGate) -> None:
        """Tells a gate what it knew."""
        self.guard.restore(gate.guard)
        if gate.codecs is not None and self.codecs is not None:
            gate.codecs.learnt = copy.deepcopy(self.codecs)


def load_guard(folder: Path) -> GuardStanding:
    """Returns what stands in `GUARD`; nothing, with a warning, where that cannot be read."""
    try:
        return unpack_state((folder / GUARD).read_bytes(), GuardStanding)
    except FileNotFoundError:
        return GuardStanding()
    except (OSError, JournalError) as error:
        log.warning("%s cannot be read, all devices of the run are asked again: %s", folder / GUARD, error)
        return GuardStanding()


def standing_of(
    course: Course, fleet: FleetStanding, gate: StrategyGate, opened_s: Mapping[int, float] = MappingProxyType({})
) -> Standing:
    codecs = gate.codecs
    return Standing(
        course=course,
        fleet=fleet,
        guard=GuardStanding.of(gate.guard),
        codecs=None if codecs is None else codecs.learnt,
        opened_s=dict(opened_s),
    )
