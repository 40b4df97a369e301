"""Checkpoints of a run: the strategy's state, a snapshot of all else for an exact resume, and the final model."""

from __future__ import annotations

import copy
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from edgefl.compression.codec_selection import LinkEstimates
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.headers import FIRST_INCARNATION, RunIncarnations
from edgefl.coordinator.execution.recording_fleet import FleetSnapshot
from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.core.errors import JournalError
from edgefl.core.types import Tensors
from edgefl.engine.progress import RoundCounter
from edgefl.engine.round_loop import LoopState
from edgefl.storage.checkpoints import prune_checkpoints, save_state
from edgefl.storage.journal.file_format import list_journal_files
from edgefl.storage.journal.record_encoding import CheckpointMark
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.participation import RunParticipationPolicy
from edgefl.strategies.private_mean import KEY_BYTES, PrivacySpend, SpendRecorder
from edgefl.strategies.update_guard import GuardState
from edgefl.system.atomic_files import make_private_directory, write_atomic

log = logging.getLogger(__name__)

NEW_INCARNATION_FILE = "new-incarnation"
"""Marker file beside the journal of a run restored from a backup, or truncated at damage.

Its devices may have done other work since, under the same ids, so it goes on from a checkpoint under new ids. The
next checkpoint removes the file.
"""


INCARNATIONS_FILE = "incarnations.json"
"""File beside the journal of a run that ended in a later incarnation than its first: the assignments of each.

Its last checkpoint has no snapshot, and the run may be resumed from there.
"""

GUARD_FILE = "guard.safetensors"
"""File beside the journal of a run whose newest checkpoint has no snapshot: the state of its guard."""

PRIVACY_FILE = "privacy.safetensors"
"""File beside the journal of a private run: what it has released, and the key of its noise."""


@dataclass(slots=True, kw_only=True)
class RunSnapshot:
    """State of a run between two turns, without the strategy's; `opened_s` has the start of open rounds."""

    loop_state: LoopState = field(default_factory=LoopState)
    fleet: FleetSnapshot = field(default_factory=FleetSnapshot)
    guard: GuardState = field(default_factory=GuardState)
    codecs: LinkEstimates | None = None
    opened_s: dict[int, float] = field(default_factory=dict)

    def restore_loop_state(self, rounds: RoundCounter) -> LoopState:
        """Returns a copy of the loop state, with the run's own round counter, restored."""
        loop_state = copy.deepcopy(self.loop_state)
        rounds.versions_per_round = loop_state.progress.rounds.versions_per_round
        loop_state.progress.rounds = rounds
        return loop_state

    def restore(self, policy: RunParticipationPolicy) -> None:
        """Restores guard and codec selection of a policy."""
        policy.guard.restore(copy.deepcopy(self.guard), keeps_held=True)
        if policy.codec_policy is not None and self.codecs is not None:
            policy.codec_policy.link_estimates = copy.deepcopy(self.codecs)


def load_guard_state(folder: Path) -> GuardState:
    """Returns the content of `GUARD_FILE`; empty, with a warning, if it cannot be read."""
    try:
        return decode_state((folder / GUARD_FILE).read_bytes(), GuardState)
    except FileNotFoundError:
        return GuardState()
    except (OSError, JournalError) as error:
        log.warning("%s cannot be read, all devices of the run are asked again: %s", folder / GUARD_FILE, error)
        return GuardState()


def open_spend_recorder(folder: Path, recorder: SpendRecorder) -> None:
    """Continues a run's record of its releases, which is durable from here on; a new run begins one.

    Args:
        folder: of the run.
        recorder: of the run's components.

    Raises:
        JournalError: the record of a run that has begun is missing or damaged: nobody knows what was spent.
    """
    path = folder / PRIVACY_FILE
    try:
        recorder.spend = decode_state(path.read_bytes(), PrivacySpend)
    except FileNotFoundError:
        if list_journal_files(folder / "journal") or any((folder / "checkpoints").glob("*")):
            raise JournalError(
                f"{path} is missing, so it is not known how much privacy the run has spent; put it back from a "
                "backup, or submit the run anew"
            ) from None
    except (OSError, JournalError) as error:
        raise JournalError(
            f"{path} cannot be read, so it is not known how much privacy the run has spent: {error}; put it back "
            "from a backup, or submit the run anew"
        ) from error
    if not recorder.spend.key:  # the run was over: no sum of it can be repeated
        recorder.spend.key = secrets.token_bytes(KEY_BYTES)
        recorder.spend.restart_noise(recorder.spend.newest)
    make_private_directory(folder)
    recorder.save = lambda spend: write_atomic(path, encode_state(spend))
    recorder.save(recorder.spend)


def close_spend_recorder(recorder: SpendRecorder) -> None:
    """Forgets the key of a run that is over, by which its noise could be taken off."""
    recorder.spend.key = b""
    recorder.save(recorder.spend)


def delete_noise_key(folder: Path) -> None:
    """Deletes the key of a run that has failed; what it has spent stays, and another run changes nothing.

    Without its key nothing can be repeated: should the coordinator die before the failure is recorded, the run goes
    on in another incarnation.
    """
    path = folder / PRIVACY_FILE
    try:
        spend = decode_state(path.read_bytes(), PrivacySpend)
        spend.key = b""
        write_atomic(folder / NEW_INCARNATION_FILE, b"")
        write_atomic(path, encode_state(spend))
    except FileNotFoundError:
        return
    except (OSError, JournalError) as error:
        log.warning("%s keeps the key of the run's noise; delete the file: %s", path, error)


def create_run_snapshot(
    loop_state: LoopState,
    fleet: FleetSnapshot,
    policy: RunParticipationPolicy,
    opened_s: Mapping[int, float] = MappingProxyType({}),
) -> RunSnapshot:
    codecs = policy.codec_policy
    return RunSnapshot(
        loop_state=loop_state,
        fleet=fleet,
        guard=policy.guard.state,
        codecs=None if codecs is None else codecs.link_estimates,
        opened_s=dict(opened_s),
    )


CHECKPOINT_EVERY_VERSIONS = 10
MIN_CHECKPOINT_INTERVAL_S = 10.0
"""A run is checkpointed every `CHECKPOINT_EVERY_VERSIONS`, at most this often; the last state always is."""
MAX_CHECKPOINT_INTERVAL_S = 60.0
"""With rounds longer than this, every version is checkpointed: what follows a checkpoint is replayed on a resume.

A run resumed exactly is checkpointed after its first new version: crashes are counted since the newest checkpoint,
and a run that gets that far does not cause them.
"""


class Checkpointer:
    """Checkpoints one run's state; the journal before the older of two checkpoints is pruned."""

    def __init__(
        self,
        directory: CoordinatorDirectory,
        run_id: str,
        *,
        wal: WalJournal,
        history: HistoryWriter,
        is_every_version_due: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_every_version_due, self._clock = is_every_version_due, clock
        self._folder = directory.runs / run_id / "checkpoints"
        self._wal, self._history = wal, history
        self._saved_s, self._saved_version, self._is_due_now, self._is_due_soon = clock(), 0, False, False
        self._last_version: int | None = 0
        self._saved_guard = b""

    @property
    def run_folder(self) -> Path:
        return self._folder.parent

    def start(self, version: int, *, is_due_now: bool = False, is_due_soon: bool = False) -> None:
        """Sets the version that the run starts with.

        Args:
            version: of the state.
            is_due_now: checkpoint this version.
            is_due_soon: checkpoint the first new version; the first one passed to `is_due` is not new.
        """
        self._saved_version, self._is_due_now, self._is_due_soon = version, is_due_now, is_due_soon
        self._last_version = None if is_due_soon else version

    def is_due(self, version: int) -> bool:
        """Returns whether a checkpoint is due; rate-limited, since rounds may be very short.

        Only for a new version: in the middle of a round the state has all unused updates, each a model's worth of
        memory and of disk.
        """
        has_changed, self._last_version = self._last_version not in {version, None}, version
        if not (has_changed or self._is_due_now):
            return False
        num_versions, elapsed_s = version - self._saved_version, self._clock() - self._saved_s
        is_interval_due = num_versions >= CHECKPOINT_EVERY_VERSIONS and elapsed_s >= MIN_CHECKPOINT_INTERVAL_S
        is_version_due = (
            self._is_every_version_due
            or self._is_due_soon
            or is_interval_due
            or elapsed_s >= MAX_CHECKPOINT_INTERVAL_S
        )
        if self._is_due_now or (num_versions and is_version_due):
            self._saved_version, self._is_due_now, self._is_due_soon = version, False, False
            return True
        return False

    def save(
        self, state: object, snapshot: RunSnapshot | None = None, *, is_of_previous_incarnation: bool = False
    ) -> None:
        """Writes the state; rows derived from the journal files that it prunes are in the store before.

        With `snapshot`, between two turns, the run can be resumed exactly there; not so with
        `is_of_previous_incarnation`, when the run has yet to start another.
        """
        self._wal.sync()
        # Before the checkpoint exists: a run resumed from one derives no rows from the journal before it.
        self._history.publish()
        self._history.sync()
        saved = save_state(self._folder, state, self._wal.last_record, snapshot, self._history.get_newest_ids())
        self._wal.record_checkpoint(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
        if not is_of_previous_incarnation:
            (self._folder.parent / NEW_INCARNATION_FILE).unlink(missing_ok=True)
        remaining = prune_checkpoints(self._folder)
        self._wal.prune(remaining[-1].last_record)
        self._history.on_checkpoint()
        self._saved_s = self._clock()

    def save_guard(self, guard: GuardState) -> None:
        """Saves the run's guard beside the next checkpoint, which has no snapshot with it."""
        content = encode_state(replace(guard, held={}))
        if content != self._saved_guard:
            write_atomic(self._folder.parent / GUARD_FILE, content)
            self._saved_guard = content

    def finish(
        self,
        version: int,
        round_number: int,
        state: object,
        model: Tensors,
        model_retention: ModelRetention,
        incarnations: RunIncarnations,
    ) -> None:
        """Saves the last state, of a version in `round_number`, and its model, named in the store."""
        if incarnations.current != FIRST_INCARNATION:
            write_atomic(self._folder.parent / INCARNATIONS_FILE, json.dumps(incarnations.to_dict()).encode())
        self.save(state)
        model_retention.finish(version, round_number, self._wal.last_record, model)
        self._wal.prune(self._wal.last_record)
