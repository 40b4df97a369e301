"""Runs that are paused: their store or journal has no room, or is in use by another program.

Nothing that could not be written was acted on, so the run is where its journal ends, as after a crash of its
coordinator; it is taken up from there in the same process. The store cannot be told meanwhile, so what is true now
lies here, over what the store says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl.errors import HINDRANCES, EdgeflError
from edgefl.storage.store import Store
from edgefl.types import Json

log = logging.getLogger(__name__)

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


@dataclass(slots=True, kw_only=True)
class Patience:
    """How one thread waits for room, and tells what it waited for.

    Attributes:
        directory: where there has to be room.
        store: is told of a pause when it can be written.
        flush: writes what waits for the store.
        stopping: ends all waiting.
        pauses: says meanwhile what is paused.
    """

    directory: Path
    store: Store
    flush: Callable[[], None]
    stopping: threading.Event
    pauses: Pauses
    _look_s: float = FIRST_LOOK_S
    _unpaused_s: float = 0.0

    def await_room(self, run_id: str, error: EdgeflError) -> bool:
        """Waits until there is room and the store can be written; returns False when `stopping` is set before.

        Args:
            run_id: of the run that is paused; empty for none.
            error: why.
        """
        began, began_s, name = time.time(), time.monotonic(), f"run {run_id}" if run_id else "the queue of runs"
        log.warning("%s is paused: %s", name, error)
        if began_s - self._unpaused_s > MAX_LOOK_S:
            self._look_s = FIRST_LOOK_S
        if run_id:
            self.pauses.begin(run_id, str(error))
        try:
            while not self.stopping.wait(self._look_s):
                self._look_s = min(2 * self._look_s, MAX_LOOK_S)
                if has_room(self.directory) and self._has_told(run_id, str(error), began):
                    log.info("%s goes on after a pause of %.0f s", name, time.monotonic() - began_s)
                    return True
            return False
        finally:
            self._unpaused_s = time.monotonic()
            self.pauses.end(run_id)

    def _has_told(self, run_id: str, reason: str, began: float) -> bool:
        """Writes what waits, and that there was a pause; returns whether that was possible."""
        now = time.time()
        try:
            self.flush()
            with self.store.batch(durable=True):
                self.store.record_event(RUN_PAUSED, reason, at=began, run_id=run_id or None)
                self.store.record_event(RUN_UNPAUSED, f"after {now - began:.0f} s", at=now, run_id=run_id or None)
        except HINDRANCES:
            return False
        return True
