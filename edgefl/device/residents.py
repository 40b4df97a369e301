"""Tensors that stay on the board (`shared=False`): kept per run, so that a reboot does not forget them."""

from __future__ import annotations

from pathlib import Path

from edgefl.device.run_files import load_arrays, save_arrays
from edgefl.tasks.local_training import is_finite
from edgefl.types import Array, Learner, Shapes

FOLDER = "runs"


def load_resident(state_dir: Path, run: str, shapes: Shapes) -> dict[str, Array] | None:
    """Returns the run's resident tensors, or None when there are none yet or they fit no longer."""
    stored = load_arrays(state_dir / FOLDER, run)
    resident = [spec for spec in shapes if not spec.shared]
    if stored is None or any(spec.name not in stored or stored[spec.name].shape != spec.shape for spec in resident):
        return None
    return {spec.name: stored[spec.name] for spec in resident}


def save_resident(state_dir: Path, run: str, shapes: Shapes, learner: Learner) -> None:
    """Writes the tensors that are not shared, whole or not at all; does nothing when all are.

    Those of a training that diverged are not kept: the board goes on with what it had before.
    """
    names = [spec.name for spec in shapes if not spec.shared]
    if names:
        values = learner.read()
        resident = {name: values[name] for name in names}
        if is_finite(resident):
            save_arrays(state_dir / FOLDER, run, resident)
