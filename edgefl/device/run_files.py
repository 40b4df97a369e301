"""Arrays that a device keeps per run, one file each; those of older runs go, since a board's card is small."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgefl.files import open_whole
from edgefl.tasks.npz import read_npz
from edgefl.types import Array

KEPT_RUNS = 4


def load_arrays(folder: Path, run: str) -> dict[str, Array] | None:
    """Returns what was saved for a run, None when there is nothing or it cannot be read."""
    try:
        with _path(folder, run).open("rb") as file:
            return read_npz(file)
    except (OSError, ValueError):
        return None


def save_arrays(folder: Path, run: str, arrays: Mapping[str, Array]) -> None:
    """Writes a run's arrays, whole or not at all; errors of the operating system pass."""
    path = _path(folder, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    _forget_older(path)


def _forget_older(newest: Path) -> None:
    # The newest by name, not by its time: a board's clock may have gone back since the others were written.
    with contextlib.suppress(OSError):
        others = sorted((path for path in newest.parent.glob("*.npz") if path != newest), key=_written_ns)
        for path in others[: max(0, len(others) + 1 - KEPT_RUNS)]:
            path.unlink(missing_ok=True)


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _path(folder: Path, run: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run)}.npz"
