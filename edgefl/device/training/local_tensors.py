"""Local tensors (`shared=False`), which stay on the board; stored per run across reboots."""

from __future__ import annotations

import logging
from pathlib import Path

from edgefl.core.errors import StoreError
from edgefl.core.types import Array, Learner, ModelSpec
from edgefl.device.training.run_arrays import load_arrays, save_arrays
from edgefl.tasks.local_algorithms.local_training import is_finite

log = logging.getLogger(__name__)

FOLDER = "runs"


class LocalTensors:
    """Store of local tensors; kept in memory while the card is full.

    Args:
        state_dir: the device's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._run = ""
        self._unsaved: dict[str, Array] = {}

    def load(self, run: str, model_spec: ModelSpec) -> dict[str, Array] | None:
        """Returns the run's local tensors, or None when missing or of other shapes."""
        tensors = self._unsaved if self._unsaved and self._run == run else load_arrays(self._folder, run)
        local_specs = [spec for spec in model_spec if not spec.shared]
        if tensors is None or any(
            spec.name not in tensors or tensors[spec.name].shape != spec.shape for spec in local_specs
        ):
            return None
        return {spec.name: tensors[spec.name] for spec in local_specs}

    def update(self, run: str, model_spec: ModelSpec, learner: Learner) -> None:
        """Stores the tensors that are not shared, atomically; a no-op when all are shared.

        Those of a diverged training are not stored: the board continues with the former ones.
        """
        names = [spec.name for spec in model_spec if not spec.shared]
        if not names:
            return
        values = learner.read()
        local_tensors = {name: values[name] for name in names}
        if not is_finite(local_tensors):
            return
        if run != self._run:
            self.save()  # those of the former run are dropped from memory
        self._run, self._unsaved = run, local_tensors
        self.save()

    def save(self) -> None:
        """Writes tensors not yet on disk; a full card does not stop the work."""
        if not self._unsaved:
            return
        try:
            save_arrays(self._folder, self._run, self._unsaved)
        except (OSError, StoreError) as error:
            log.warning("cannot keep the tensors of run %s that stay on this board: %s", self._run, error)
            return
        self._unsaved = {}
