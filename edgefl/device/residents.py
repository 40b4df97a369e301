"""Tensors that stay on the board (`shared=False`): kept per run, so that a reboot does not forget them."""

from __future__ import annotations

import logging
from pathlib import Path

from edgefl.device.run_files import load_arrays, save_arrays
from edgefl.errors import StoreError
from edgefl.tasks.local_training import is_finite
from edgefl.types import Array, Learner, Shapes

log = logging.getLogger(__name__)

FOLDER = "runs"


class Residents:
    """What one device keeps of its runs' models; those that find no room on its card are held in memory.

    Args:
        state_dir: the device's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._run = ""
        self._unsaved: dict[str, Array] = {}

    def load(self, run: str, shapes: Shapes) -> dict[str, Array] | None:
        """Returns the run's resident tensors, or None when there are none yet or they fit no longer."""
        kept = self._unsaved if self._unsaved and self._run == run else load_arrays(self._folder, run)
        resident = [spec for spec in shapes if not spec.shared]
        if kept is None or any(spec.name not in kept or kept[spec.name].shape != spec.shape for spec in resident):
            return None
        return {spec.name: kept[spec.name] for spec in resident}

    def keep(self, run: str, shapes: Shapes, learner: Learner) -> None:
        """Keeps the tensors that are not shared, on disk whole or not at all; does nothing when all are.

        Those of a training that diverged are not kept: the board goes on with what it had before.
        """
        names = [spec.name for spec in shapes if not spec.shared]
        if not names:
            return
        values = learner.read()
        resident = {name: values[name] for name in names}
        if not is_finite(resident):
            return
        if run != self._run:
            self.save()  # those of the run before are held no longer
        self._run, self._unsaved = run, resident
        self.save()

    def save(self) -> None:
        """Writes what has found no room so far; a card without room does not stop the work."""
        if not self._unsaved:
            return
        try:
            save_arrays(self._folder, self._run, self._unsaved)
        except (OSError, StoreError) as error:
            log.warning("cannot keep the tensors of run %s that stay on this board: %s", self._run, error)
            return
        self._unsaved = {}
