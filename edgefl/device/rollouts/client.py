"""Client of rollouts: fetches what the coordinator offers, has it applied, and reports what became of it.

One thread executes one rollout at a time, beside training. The report is on disk before each step, so an agent that
was killed resumes at its next start. A newer rollout may cancel the running one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from numpy.random import Generator

from edgefl.core.errors import BundleError, ConfigError, DataError, NetworkError, NotFoundError, StoreError
from edgefl.core.types import Json
from edgefl.device.rollouts.download import PART_SUFFIX, Artefact, DownloadSource, download_file, fetch_offer
from edgefl.system.atomic_files import sync_directory
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_DAMAGED_ATTEMPTS = 2
"""A file that arrives damaged is downloaded once more from its beginning."""

T = TypeVar("T")
ItemT = TypeVar("ItemT")

_FINAL_STATES = frozenset({"running", "rejected", "failed", "reverted", "rolled-back"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """Report of the last rollout; `state` is fetching, checking, requested or a final one. Scores are of models."""

    id: str
    state: str
    reason: str | None = None
    accuracy: float | None = None
    former_accuracy: float | None = None
    num_examples: int | None = None

    @property
    def is_final(self) -> bool:
        return self.state in _FINAL_STATES

    def to_json(self) -> Json:
        return {name: value for name, value in asdict(self).items() if value is not None}


class RolloutHandler(Protocol):
    """What one kind of rollout brings, and how it is applied.

    Attributes:
        artefact: how it is offered and downloaded.
        folder: of the downloads.
        cancels_running: whether a newer rollout cancels the one under way.
        report: of the last rollout, as it was saved.
    """

    artefact: Artefact
    folder: Path
    cancels_running: bool

    @property
    def report(self) -> RolloutReport | None: ...

    def encode_report(self) -> Json | None:
        """Returns the report as heartbeats tell it."""

    def set_report(self, report: RolloutReport) -> None: ...

    def save(self) -> None:
        """Saves the report, durably; raises StoreError."""

    def list_used(self) -> Collection[str]:
        """Returns the SHA-256 of the files that are still needed."""

    def find_result(self, rollout_id: str) -> RolloutReport | None:
        """Returns the final report of a rollout that is done already."""

    def apply(self, rollout_id: str, client: RolloutClient[Any]) -> RolloutReport:
        """Fetches and applies a rollout; returns its final report.

        Raises:
            BundleError: it is refused.
            EdgeflError: it has failed.
        """

    def roll_back(self, rollout_id: str) -> RolloutReport:
        """Takes a rollout back."""


HandlerT = TypeVar("HandlerT", bound=RolloutHandler)


class RolloutClient(Generic[HandlerT]):
    """Client of one kind of rollout; commands come from any thread.

    Args:
        handler: of the rollouts.
        get_source: returns the present download source; raises NetworkError while there is no connection.
        on_change: called when the report in heartbeats has changed, and when the coordinator does not answer.
        rng: randomises the retries of a fleet.
    """

    def __init__(
        self,
        handler: HandlerT,
        *,
        get_source: Callable[[], DownloadSource],
        on_change: Callable[[], None],
        rng: Generator,
    ) -> None:
        self.handler, self._get_source, self._on_change = handler, get_source, on_change
        self._name = handler.artefact.rollout
        report = handler.report
        self.queue: BackgroundTaskQueue[tuple[str, str]] = BackgroundTaskQueue(
            f"{self._name}s",
            self._run,
            on_failure=self._on_failure,
            rng=rng,
            pending=[] if report is None or report.is_final else [("apply", report.id)],
            should_cancel_running=handler.cancels_running,
        )

    def start(self) -> None:
        """Starts, and resumes a rollout of an earlier run of the agent."""
        self.queue.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Abandons the running rollout; the next start resumes it."""
        self.queue.stop(timeout_s)

    @property
    def report(self) -> Json | None:
        """Returns the heartbeat's report of the last rollout; None before the first."""
        return self.handler.encode_report()

    def apply(self, rollout_id: str) -> None:
        """Starts a rollout; a finished one is only reported again."""
        self.queue.add(("apply", rollout_id))

    def roll_back(self, rollout_id: str) -> None:
        """Rolls a rollout back: cancels it, or reactivates what was there before."""
        self.queue.add(("roll back", rollout_id))

    def save(self, report: RolloutReport) -> None:
        # Set first: with a full card the coordinator must still receive the report.
        self.handler.set_report(report)
        self._on_change()
        self.handler.save()

    def fetch(self, rollout_id: str, parse_offer: Callable[[Json], T]) -> tuple[T, Path]:
        """Returns the offer of a rollout and its verified file; retries while the connection breaks.

        Raises:
            TaskCancelledError: a newer rollout has taken its place.
            EdgeflError: as `fetch_offer`, `parse_offer` and `download_file`, but for broken connections.
        """

        def attempt() -> tuple[T, Path]:
            num_waiting = self.queue.num_waiting()

            # A newer rollout may have replaced this one; only the coordinator knows, so its offer is fetched again.
            def should_continue() -> bool:
                return self.queue.num_waiting() == num_waiting and not self.queue.is_cancelled()

            try:
                value, remote = fetch_offer(self._get_source(), self.handler.artefact, rollout_id)
                offer = parse_offer(value)
                self._prune(remote.sha256)
                return offer, download_file(self._get_source(), remote, self.handler.folder, should_continue)
            except NotFoundError:
                if self.queue.num_waiting():
                    raise TaskCancelledError from None
                raise

        return self.queue.retry(attempt, label=f"{self._name} {rollout_id}", on_disconnect=self._on_change)

    def _run(self, command: tuple[str, str]) -> None:
        action, rollout_id = command
        if action == "roll back":
            self._complete(self.handler.roll_back(rollout_id))
        elif (result := self.handler.find_result(rollout_id)) is not None:
            self._complete(result)
        else:
            self._complete(self._apply(rollout_id))

    def _apply(self, rollout_id: str) -> RolloutReport:
        try:
            return self.handler.apply(rollout_id, self)
        except BundleError as error:
            return RolloutReport(id=rollout_id, state="rejected", reason=str(error))
        except (DataError, StoreError, NotFoundError, ConfigError) as error:
            return RolloutReport(id=rollout_id, state="failed", reason=str(error))

    def _on_failure(self, command: tuple[str, str], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.handler.set_report(RolloutReport(id=command[1], state="failed", reason=reason))
        self._on_change()

    def _complete(self, report: RolloutReport) -> None:
        """Saves a final report unless it is told again, and removes files that nobody needs."""
        if report == self.handler.report:
            self._on_change()
        else:
            level = logging.WARNING if report.reason else logging.INFO
            log.log(level, "%s %s is %s: %s", self._name, report.id, report.state, report.reason or "done")
            try:
                self.save(report)
            except StoreError as error:  # it is reported, and must not turn a finished rollout into a failure
                log.warning("what became of %s %s cannot be kept: %s", self._name, report.id, error)
        self._prune()

    def _prune(self, *kept: str) -> None:
        """Removes the files of the folder that nobody needs, except that of `kept`, which is being downloaded."""
        folder, artefact = self.handler.folder, self.handler.artefact
        if not folder.is_dir():
            return
        needed = {*kept, *self.handler.list_used()}
        try:
            for path in folder.iterdir():
                if path.suffix in {artefact.suffix, PART_SUFFIX} and path.stem not in needed:
                    path.unlink(missing_ok=True)
            sync_directory(folder)
        except OSError as error:
            log.warning("files that nobody needs stay in %s: %s", folder, error)
