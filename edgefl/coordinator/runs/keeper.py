"""Keeps a run's state on disk while it goes on, and its model when it is over."""

from __future__ import annotations

import time

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.coordinator.runs.ledger import Ledger
from edgefl.storage.checkpoints import prune_checkpoints, save_state
from edgefl.storage.journal import WalJournal
from edgefl.storage.journal_records import CheckpointMark
from edgefl.types import Tensors

CHECKPOINT_EVERY = 10
CHECKPOINT_EVERY_S = 10.0
"""A run's state is checkpointed after so many versions, but no more often than that; the last one always is."""


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
    ) -> None:
        self._every_version = every_version
        self._folder = directory.runs / run_id / "checkpoints"
        self._wal, self._ledger = wal, ledger
        self._checkpointed_s = time.monotonic()

    def after(self, version: int, state: object) -> None:
        """Checkpoints every tenth version, unless rounds are so short that this would be all that is done."""
        if self._every_version or (
            version % CHECKPOINT_EVERY == 0 and time.monotonic() - self._checkpointed_s >= CHECKPOINT_EVERY_S
        ):
            self.checkpoint(state)

    def checkpoint(self, state: object) -> None:
        """Writes the state; rows that follow from journal files that go are in the store before."""
        self._wal.commit()
        saved = save_state(self._folder, state, self._wal.last_record)
        self._wal.checkpointed(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
        self._ledger.publish()
        self._ledger.flush()
        kept = prune_checkpoints(self._folder)
        self._wal.prune(kept[-1].last_record)
        self._checkpointed_s = time.monotonic()

    def finish(self, version: int, number: int, state: object, model: Tensors, models: ModelKeeper) -> None:
        """Writes the last state, of a version in the round `number`, and its model as a file that the store names."""
        self.checkpoint(state)
        models.finish(version, number, self._wal.last_record, model)
        self._wal.prune(self._wal.last_record)
