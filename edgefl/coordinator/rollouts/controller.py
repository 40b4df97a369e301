"""Rollout thread; errors are isolated per rollout."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from edgefl.core.errors import RETRYABLE_STORE_ERRORS, EdgeflError, StoreError

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0

T = TypeVar("T")


class RolloutController:
    """Reconciles all rollouts every second, and at once when woken.

    Args:
        name: of the thread.
        reconcile: advances all rollouts once; returns whether all succeeded.
        on_fatal: called when the store is unusable; a full or locked one is retried.
    """

    def __init__(self, name: str, reconcile: Callable[[], bool], on_fatal: Callable[[EdgeflError], None]) -> None:
        self._reconcile, self._on_fatal = reconcile, on_fatal
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        self._wake.set()

    def run_each(self, rollouts: Iterable[T], step: Callable[[T], None]) -> bool:
        """Runs a step for each rollout until stopped; returns whether all succeeded."""
        succeeded = True
        for rollout in rollouts:
            try:
                if not self._stopping.is_set():
                    step(rollout)
            except StoreError:
                raise
            except Exception:  # the boundary of one rollout: the others must go on
                log.exception("%s: %s stumbled; it is tried again", self._thread.name, rollout)
                succeeded = False
        return succeeded

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(POLL_INTERVAL_S)
            self._wake.clear()
            try:
                succeeded = self._reconcile()
            except RETRYABLE_STORE_ERRORS as error:  # the store is full or locked: temporary
                log.warning("the %s wait: %s", self._thread.name, error)
                succeeded = False
            except StoreError as error:
                self._on_fatal(error)
                return
            except Exception:  # the boundary of the thread: it must go on
                log.exception("the %s stumbled; they are looked at again", self._thread.name)
                succeeded = False
            if not succeeded:
                self._stopping.wait(POLL_INTERVAL_S)
