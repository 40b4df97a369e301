"""Stalled runs: back-off while storage cannot be written, and a watchdog of slow strategy calls.

A run pauses while its store or journal is full, or locked by another program. Nothing that could not be written was
acted on, so the run is where its journal ends, as after a crash of its coordinator; it is resumed from there in the
same process. The store cannot be written meanwhile, so the paused runs are kept in memory and override their rows.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from edgefl.core.errors import RETRYABLE_STORE_ERRORS, EdgeflError, StoreFullError
from edgefl.core.types import Json
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

PAUSED, WAITING, COMPILING = "paused", "waiting", "compiling"
"""Shown in place of a run's status; the store has *running*, so that the next coordinator resumes it."""
COMPILING_REASON = "its task is compiled for boards without torch, which may take minutes"
RUN_PAUSED, RUN_UNPAUSED = "run-paused", "run-unpaused"
"""Event kinds; both are written once the store is writable again, each with its own time."""
GIVE_WAY_AFTER_S, LOOK_INTERVAL_S = 60.0, 10.0
"""A run that has lacked boards for so long gives way to a queued one whose boards are there; and how often
one is looked for."""
_BUSY_WITH = {WAITING: "waits for boards", COMPILING: "compiles its task"}
MIN_FREE_BYTES = 512 * 1024
"""Minimum free space to try a run again."""
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 10.0

RUN_STALLED = "run-stalled"
REPORT_AFTER_S = 60.0
"""A strategy call that delays a stop for longer is reported as an event."""
STOP_TIMEOUT_S = 45.0
"""How long a stopping coordinator waits for its run: half of its unit's TimeoutStopSec."""


@dataclass(slots=True)
class IdleRuns:
    """Active runs without progress: paused, waiting for boards, or compiling. Thread-safe.

    `queue_reasons` say of queued runs why they have not begun, where several runs are active side by side.
    """

    queue_reasons: Mapping[str, str] = field(default_factory=dict)
    _states: dict[str, tuple[str, str]] = field(default_factory=dict)
    _needed_ids: frozenset[str] = frozenset()
    _yielding_ids: frozenset[str] = frozenset()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, run_id: str, reason: str, status: str = PAUSED, *, is_needed: bool = False, gives_way: bool = False
    ) -> None:
        """Adds a run, or changes its reason.

        Args:
            run_id: of the run.
            reason: why it is idle.
            status: shown in place of its own.
            is_needed: it finds what the next run begins with.
            gives_way: another may begin before it.
        """
        with self._lock:
            self._states = {**self._states, run_id: (status, reason)}
            if is_needed:
                self._needed_ids |= {run_id}
            self._yielding_ids = self._yielding_ids | {run_id} if gives_way else self._yielding_ids - {run_id}

    def remove(self, run_id: str) -> None:
        with self._lock:
            self._states = {name: state for name, state in self._states.items() if name != run_id}

    def apply_to(self, row: Json) -> Json:
        """Returns a run's row, with status and reason replaced while it is idle; a queued one says behind whom."""
        states = self._states
        if (state := states.get(str(row.get("run_id")))) is not None:
            return {**row, "status": state[0], "reason": state[1]}
        if row.get("status") == RunStatus.QUEUED and (reason := self.queue_reasons.get(str(row.get("run_id")))):
            return {**row, "reason": reason}
        waiting = next((run_id for run_id, (status, _) in states.items() if status in _BUSY_WITH), None)
        if waiting is None or row.get("status") != RunStatus.QUEUED:
            return row
        reason = f"it comes after run {waiting}, which {_BUSY_WITH[states[waiting][0]]}"
        if waiting in self._needed_ids:
            return {**row, "reason": f"{reason} and finds means and scales of their data"}
        if waiting in self._yielding_ids:
            reason = f"{reason}, and before it after {GIVE_WAY_AFTER_S:.0f} s of that if its own boards are there"
        return {**row, "reason": f"{reason}; to begin now: edgefl run stop {waiting}"}


def has_room(directory: Path) -> bool:
    """Returns whether the disk has `MIN_FREE_BYTES` free; the directory may be missing."""
    try:
        disk: Any = os.statvfs(directory if directory.exists() else directory.parent)
    except OSError:
        return False
    return int(disk.f_bavail) * int(disk.f_frsize) >= MIN_FREE_BYTES


def check_room(directory: Path) -> None:
    """Checks that a coordinator can start on this disk.

    Raises:
        StoreFullError: less than `MIN_FREE_BYTES` are free.
    """
    if not has_room(directory):
        raise StoreFullError(
            f"no room to start in {directory}: less than {MIN_FREE_BYTES // 1024} KiB are free; free some space and "
            "try again"
        )


@dataclass(slots=True, kw_only=True)
class StorageBackoff:
    """Waits for writable storage, with exponential back-off, and records the pause.

    Attributes:
        directory: on the disk that must have room.
        store: gets the events of a pause once it is writable.
        flush: writes the rows buffered for the store.
        stop_event: ends all waiting.
        idle_runs: lists the run while it is paused.
    """

    directory: Path
    store: Store
    flush: Callable[[], None]
    stop_event: threading.Event
    idle_runs: IdleRuns
    _backoff: Backoff = field(default_factory=lambda: Backoff(initial_s=FIRST_RETRY_S, max_s=MAX_RETRY_S))
    _resumed_s: float = 0.0

    def wait_until_writable(self, run_id: str, error: EdgeflError) -> bool:
        """Waits until storage is writable; returns False when `stop_event` is set before.

        Args:
            run_id: of the run to pause; empty for none.
            error: the reason.
        """
        paused_at, paused_s, label = time.time(), time.monotonic(), f"run {run_id}" if run_id else "the queue of runs"
        log.warning("%s is paused: %s", label, error)
        if paused_s - self._resumed_s > MAX_RETRY_S:
            self._backoff.reset()
        if run_id:
            self.idle_runs.add(run_id, str(error))
        try:
            while not self.stop_event.wait(self._backoff.next_s()):
                if has_room(self.directory) and self._has_recorded_pause(run_id, str(error), paused_at):
                    log.info("%s goes on after a pause of %.0f s", label, time.monotonic() - paused_s)
                    return True
            return False
        finally:
            self._resumed_s = time.monotonic()
            self.idle_runs.remove(run_id)

    def _has_recorded_pause(self, run_id: str, reason: str, paused_at: float) -> bool:
        """Flushes and records the pause; returns whether that was possible."""
        now = time.time()
        try:
            self.flush()
            with self.store.batch(durable=True):
                self.store.record_event(RUN_PAUSED, reason, at=paused_at, run_id=run_id or None)
                self.store.record_event(RUN_UNPAUSED, f"after {now - paused_at:.0f} s", at=now, run_id=run_id or None)
        except RETRYABLE_STORE_ERRORS:
            return False
        return True


class SlowCallWatchdog:
    """Measures how long one call of a user strategy's method has been running."""

    __slots__ = ("_number", "_since_s")

    def __init__(self) -> None:
        self._number, self._since_s = -1, 0.0

    def compute_call_s(self, strategy: object, now_s: float) -> float:
        """Returns the seconds since the running call was first seen; 0 if none runs."""
        number: int = getattr(strategy, "num_calls", 0)
        if number != self._number or not format_running_call(strategy):
            self._number, self._since_s = number, now_s
        return now_s - self._since_s


def format_running_call(strategy: object) -> str:
    """Returns a description of the running method; empty if none runs, or the strategy is built in."""
    method = getattr(strategy, "calling", "")
    return f"{method} of strategy {getattr(strategy, 'name', '')} has not returned" if method else ""


def format_current_frame(thread: Thread) -> str:
    """Returns file, line and function that a thread is in; empty if it has just ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 the only way to look at another thread
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f"{innermost.filename}, line {innermost.lineno}, in {innermost.name}"
