"""Run snapshot: the part of a checkpoint beside the strategy's state, for an exact resume."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from edgefl.compression.codec_selection import LinkEstimates
from edgefl.coordinator.execution.recording_fleet import FleetSnapshot
from edgefl.core.errors import JournalError
from edgefl.engine.round_loop import LoopState
from edgefl.engine.stopping import RoundCounter
from edgefl.storage.state_serialisation import decode_state
from edgefl.strategies.participation import RunParticipationPolicy, UpdateGuard

log = logging.getLogger(__name__)

NEW_INCARNATION_FILE = "another-life"
"""Marker file beside the journal of a run restored from a backup, or truncated at damage.

Its devices may have done other work since, under the same ids, so it goes on from a checkpoint under new ids. The
next checkpoint removes the file.
"""


INCARNATIONS_FILE = "lives.json"
"""File beside the journal of a run that ended in a later incarnation than its first: the assignments of each.

Its last checkpoint has no snapshot, and the run may be resumed from there.
"""

GUARD_FILE = "guard.safetensors"
"""File beside the journal of a run whose newest checkpoint has no snapshot: the state of its guard."""


@dataclass(slots=True, kw_only=True)
class GuardSnapshot:
    """Update guard: rejections by device, norms of the updates accepted last, and blocked devices."""

    strikes: dict[str, int] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    flagged: set[str] = field(default_factory=set)

    @classmethod
    def from_guard(cls, guard: UpdateGuard) -> GuardSnapshot:
        # The norms of full models are of no use, and would make every snapshot differ.
        norms = [] if guard.has_full_models else list(guard.norms)
        return cls(strikes=dict(guard.rejection_counts), norms=norms, flagged=set(guard.blocked_devices))

    def restore(self, guard: UpdateGuard) -> None:
        """Restores a guard."""
        guard.rejection_counts, guard.blocked_devices = dict(self.strikes), set(self.flagged)
        guard.norms = deque(self.norms, maxlen=guard.norms.maxlen)


@dataclass(slots=True, kw_only=True)
class RunSnapshot:
    """State of a run between two turns, without the strategy's; `opened_s` has the start of open rounds."""

    course: LoopState = field(default_factory=LoopState)
    fleet: FleetSnapshot = field(default_factory=FleetSnapshot)
    guard: GuardSnapshot = field(default_factory=GuardSnapshot)
    codecs: LinkEstimates | None = None
    opened_s: dict[int, float] = field(default_factory=dict)

    def restore_loop_state(self, rounds: RoundCounter) -> LoopState:
        """Returns a copy of the loop state, with the run's own round counter, restored."""
        loop_state = copy.deepcopy(self.course)
        rounds.versions_per_round = loop_state.tally.rounds.versions_per_round
        loop_state.tally.rounds = rounds
        return loop_state

    def restore(self, policy: RunParticipationPolicy) -> None:
        """Restores guard and codec selection of a policy."""
        self.guard.restore(policy.guard)
        if policy.codec_policy is not None and self.codecs is not None:
            policy.codec_policy.link_estimates = copy.deepcopy(self.codecs)


def load_guard_snapshot(folder: Path) -> GuardSnapshot:
    """Returns the content of `GUARD_FILE`; empty, with a warning, if it cannot be read."""
    try:
        return decode_state((folder / GUARD_FILE).read_bytes(), GuardSnapshot)
    except FileNotFoundError:
        return GuardSnapshot()
    except (OSError, JournalError) as error:
        log.warning("%s cannot be read, all devices of the run are asked again: %s", folder / GUARD_FILE, error)
        return GuardSnapshot()


def create_run_snapshot(
    loop_state: LoopState,
    fleet: FleetSnapshot,
    policy: RunParticipationPolicy,
    opened_s: Mapping[int, float] = MappingProxyType({}),
) -> RunSnapshot:
    codecs = policy.codec_policy
    return RunSnapshot(
        course=loop_state,
        fleet=fleet,
        guard=GuardSnapshot.from_guard(policy.guard),
        codecs=None if codecs is None else codecs.link_estimates,
        opened_s=dict(opened_s),
    )
