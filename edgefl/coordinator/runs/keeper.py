"""Keeps a run's state on disk while it goes on, and its model when it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.lives import FIRST, Lives
from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.coordinator.runs.ledger import Ledger
from edgefl.coordinator.runs.standing import ANOTHER_LIFE, GUARD, LIVES, GuardStanding, Standing
from edgefl.files import write_whole
from edgefl.storage.checkpoints import prune_checkpoints, save_state
from edgefl.storage.journal import WalJournal
from edgefl.storage.journal_records import CheckpointMark
from edgefl.storage.state_files import pack_state
from edgefl.types import Tensors

CHECKPOINT_EVERY = 10
CHECKPOINT_EVERY_S = 10.0
"""A run's state is checkpointed after so many versions, but no more often than that; the last one always is."""
CHECKPOINT_AFTER_S = 60.0
"""With long rounds after each of them: what lies behind a checkpoint is done again before a run goes on.

A run that goes on where its coordinator ended has one after its first new version: deaths are counted between
checkpoints, and whoever comes that far has not died of it.
"""


class Keeper:
    """Checkpoints one run's state now and then; the journal before the older of two checkpoints is let go."""

    def __init__(
        self,
        directory: CoordinatorDirectory,
        run_id: str,
        *,
        wal: WalJournal,
        ledger: Ledger,
        every_version: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_version, self._clock = every_version, clock
        self._folder = directory.runs / run_id / "checkpoints"
        self._wal, self._ledger = wal, ledger
        self._checkpointed_s, self._version, self._at_once, self._is_soon = clock(), 0, False, False
        self._seen: int | None = 0
        self._guard = b""

    def begin(self, version: int, *, at_once: bool = False, soon: bool = False) -> None:
        """Says with which version the run begins.

        Args:
            version: of the state.
            at_once: it is to be kept as it is.
            soon: the first new version is to be kept; the first that is asked about is none.
        """
        self._version, self._at_once, self._is_soon = version, at_once, soon
        self._seen = None if soon else version

    def is_due(self, version: int) -> bool:
        """Returns whether a checkpoint is to be written: rounds may be so short that nothing else would be done.

        Only where there is a new version: in the middle of a round the state has all the updates that wait for their
        turn, a model's worth of memory and of disk for each device.
        """
        has_changed, self._seen = self._seen not in {version, None}, version
        if not (has_changed or self._at_once):
            return False
        num_versions, since_s = version - self._version, self._clock() - self._checkpointed_s
        is_tenth = num_versions >= CHECKPOINT_EVERY and since_s >= CHECKPOINT_EVERY_S
        is_new = self._every_version or self._is_soon or is_tenth or since_s >= CHECKPOINT_AFTER_S
        if self._at_once or (num_versions and is_new):
            self._version, self._at_once, self._is_soon = version, False, False
            return True
        return False

    def checkpoint(self, state: object, standing: Standing | None = None, *, is_of_former_life: bool = False) -> None:
        """Writes the state; rows that follow from journal files that go are in the store before.

        With `standing`, between two turns, the run can go on exactly there; not so where it `is_of_former_life`, and
        the run is still to begin another.
        """
        self._wal.sync()
        # Before there is a checkpoint: a run that goes on from one derives no row from what lies before it.
        self._ledger.publish()
        self._ledger.sync()
        saved = save_state(self._folder, state, self._wal.last_record, standing)
        self._wal.checkpointed(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
        if not is_of_former_life:
            (self._folder.parent / ANOTHER_LIFE).unlink(missing_ok=True)
        kept = prune_checkpoints(self._folder)
        self._wal.prune(kept[-1].last_record)
        self._ledger.on_checkpoint()
        self._checkpointed_s = self._clock()

    def keep_guard(self, known: GuardStanding) -> None:
        """Keeps what the run's guard knows beside the next checkpoint, which has no standing that says it."""
        content = pack_state(known)
        if content != self._guard:
            write_whole(self._folder.parent / GUARD, content)
            self._guard = content

    def finish(
        self, version: int, number: int, state: object, model: Tensors, models: ModelKeeper, lives: Lives
    ) -> None:
        """Writes the last state, of a version in the round `number`, and its model as a file that the store names."""
        if lives.number != FIRST:
            write_whole(self._folder.parent / LIVES, json.dumps(lives.told()).encode())
        self.checkpoint(state)
        models.finish(version, number, self._wal.last_record, model)
        self._wal.prune(self._wal.last_record)
