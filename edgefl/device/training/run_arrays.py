"""Array files per run; those of older runs are deleted to save space."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgefl.core.types import Array
from edgefl.system.atomic_files import open_atomic
from edgefl.tasks.datasets.npz import read_npz

MAX_RUNS = 4


def load_arrays(folder: Path, run: str) -> dict[str, Array] | None:
    """Returns the saved arrays of a run, None when missing or unreadable."""
    try:
        with _path(folder, run).open("rb") as file:
            return read_npz(file)
    except (OSError, ValueError):
        return None


def save_arrays(folder: Path, run: str, arrays: Mapping[str, Array]) -> None:
    """Writes a run's arrays atomically; `OSError` propagates."""
    path = _path(folder, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    _delete_older(path)


def _delete_older(newest: Path) -> None:
    # The newest by name, not by time: a board's clock may have gone back since the others were written.
    with contextlib.suppress(OSError):
        others = sorted((path for path in newest.parent.glob("*.npz") if path != newest), key=_get_mtime_ns)
        for path in others[: max(0, len(others) + 1 - MAX_RUNS)]:
            path.unlink(missing_ok=True)


def _get_mtime_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _path(folder: Path, run: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run)}.npz"
