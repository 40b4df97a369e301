"""Background task queue: one task at a time beside training; a newer one may cancel the running one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from numpy.random import Generator

from edgefl.core.errors import DataError, NetworkError, StoreError
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_DAMAGED_ATTEMPTS = 2
"""A file that arrives damaged is downloaded once more from its beginning."""

T = TypeVar("T")
ItemT = TypeVar("ItemT")


class TaskCancelledError(Exception):
    """Cancellation by a newer task, or by the stop of the agent."""


class BackgroundTaskQueue(Generic[ItemT]):
    """Task queue with one worker thread; tasks are added from any thread.

    Args:
        name: of the thread.
        run_item: executes one task; `TaskCancelledError` abandons it.
        on_failure: called with unexpected exceptions of a task; the next one may succeed.
        rng: randomises the retries of a fleet.
        pending: tasks left unfinished by an earlier run of the agent.
        should_cancel_running: whether a newer task cancels the running one; else it waits for its turn, and
            duplicates are dropped.
    """

    def __init__(
        self,
        name: str,
        run_item: Callable[[ItemT], None],
        *,
        on_failure: Callable[[ItemT, Exception], None],
        rng: Generator,
        pending: Sequence[ItemT] = (),
        should_cancel_running: bool = True,
    ) -> None:
        self._run_item, self._on_failure, self._rng = run_item, on_failure, rng
        self._pending, self._should_cancel_running = list(pending), should_cancel_running
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Abandons the running task; the next run of the agent resumes it."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def add(self, item: ItemT) -> None:
        """Adds a task, unless it is the newest one already or is waiting."""
        with self._lock:
            if item not in (self._pending[-1:] if self._should_cancel_running else self._pending):
                self._pending.append(item)
        self._wake.set()

    def is_cancelled(self) -> bool:
        """Returns whether the running task should be abandoned."""
        with self._lock:
            return self._stopping.is_set() or (self._should_cancel_running and len(self._pending) > 1)

    def num_waiting(self) -> int:
        """Returns the number of waiting tasks."""
        with self._lock:
            return max(0, len(self._pending) - 1)

    def check_cancelled(self) -> None:
        """Raises `TaskCancelledError` when the running task should be abandoned."""
        if self.is_cancelled():
            raise TaskCancelledError

    def sleep(self, seconds: float) -> None:
        """Sleeps; a stop ends that at once with `TaskCancelledError`."""
        if self._stopping.wait(seconds):
            raise TaskCancelledError

    def retry(self, attempt: Callable[[], T], *, label: str, on_disconnect: Callable[[], None]) -> T:
        """Returns the result of `attempt`, retried while the connection breaks; final errors are raised.

        Args:
            attempt: fetches something, as `download.download_file` does.
            label: of the fetched file in the log.
            on_disconnect: called whenever the connection is broken.
        """
        backoff, damaged = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S, rng=self._rng), 0
        while True:
            try:
                return attempt()
            except NetworkError as error:
                log.info("%s: %s; trying again", label, error)
                on_disconnect()
            except DataError as error:
                damaged += 1
                if damaged == MAX_DAMAGED_ATTEMPTS:
                    raise
                log.warning("%s: %s; fetching it once more", label, error)
            self.check_cancelled()
            self._wake.wait(backoff.next_s())
            self._wake.clear()
            self.check_cancelled()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                order = self._pending[0] if self._pending else None
            if order is None:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._run_item(order)
            except TaskCancelledError:
                pass
            except StoreError as error:  # a file could not be written; the failure is reported all the same
                log.warning("%s: %s: %s", self._thread.name, order, error)
            except Exception as error:  # the boundary of the thread: the next task may succeed
                log.exception("%s: %s failed", self._thread.name, order)
                self._on_failure(order, error)
            with self._lock:
                if not self._stopping.is_set():
                    self._pending.remove(order)
