"""Runs that are paused: their store or journal has no room, or is in use by another program.

Nothing that could not be written was acted on, so the run is where its journal ends, as after a crash of its
coordinator; it is taken up from there in the same process. The store cannot be told meanwhile, so what is true now
lies here, over what the store says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl.types import Json

PAUSED = "paused"
"""Stands in place of a run's status; the store has *running*, so that a coordinator that dies goes on with it."""
RUN_PAUSED, RUN_UNPAUSED = "run-paused", "run-unpaused"
"""The events; both are written when that is possible again, each with its own time."""
ROOM_BYTES = 512 * 1024
"""With less room a run is not tried again: it would only stop anew."""
FIRST_LOOK_S = 0.5
MAX_LOOK_S = 10.0


@dataclass(slots=True)
class Pauses:
    """Which runs are paused and why. One thread begins and ends pauses, any may look."""

    _reasons: dict[str, str] = field(default_factory=dict)

    def begin(self, run_id: str, reason: str) -> None:
        self._reasons = {**self._reasons, run_id: reason}

    def end(self, run_id: str) -> None:
        self._reasons = {name: reason for name, reason in self._reasons.items() if name != run_id}

    def over(self, row: Json) -> Json:
        """Returns a row of a run as it is now."""
        reason = self._reasons.get(str(row.get("run_id")))
        return row if reason is None else {**row, "status": PAUSED, "reason": reason}


def has_room(directory: Path) -> bool:
    """Returns whether a run that was stopped by a full disk is worth another try; the directory may be missing."""
    try:
        disk: Any = os.statvfs(directory if directory.exists() else directory.parent)
    except OSError:
        return False
    return int(disk.f_bavail) * int(disk.f_frsize) >= ROOM_BYTES
