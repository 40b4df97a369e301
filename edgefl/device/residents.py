"""Tensors that stay on the board (`shared=False`): kept per run, so that a reboot does not forget them."""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np

from edgefl.files import open_whole
from edgefl.types import Array, Learner, Shapes

# RuntimeError and its NotImplementedError: what a damaged header makes zipfile take for encryption or a new method.
UNREADABLE = (OSError, KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

KEPT_RUNS = 4


def load_resident(state_dir: Path, run: str, shapes: Shapes) -> dict[str, Array] | None:
    """Returns the run's resident tensors, or None when there are none yet or they fit no longer."""
    try:
        # Opened here, since np.load leaves a file that is no zip open.
        with _path(state_dir, run).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            kept = {spec.name: stored[spec.name] for spec in shapes if not spec.shared}
    except UNREADABLE:
        return None
    fits = all(kept[spec.name].shape == spec.shape for spec in shapes if not spec.shared)
    return kept if fits else None


def save_resident(state_dir: Path, run: str, shapes: Shapes, learner: Learner) -> None:
    """Writes the tensors that are not shared, whole or not at all; does nothing when all are.

    Those of older runs go, but for a few: a board's card is small, and its runs are many.
    """
    names = [spec.name for spec in shapes if not spec.shared]
    if not names:
        return
    values, path = learner.read(), _path(state_dir, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path) as file:
        np.savez(file, allow_pickle=False, **{name: values[name] for name in names})
    _forget_older(path)


def _forget_older(newest: Path) -> None:
    # The newest by name, not by its time: a board's clock may have gone back since the others were written.
    with contextlib.suppress(OSError):
        others = sorted((path for path in newest.parent.glob("*.npz") if path != newest), key=_written_ns)
        for path in others[: max(0, len(others) + 1 - KEPT_RUNS)]:
            path.unlink(missing_ok=True)


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _path(state_dir: Path, run: str) -> Path:
    return state_dir / "runs" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run)}.npz"
