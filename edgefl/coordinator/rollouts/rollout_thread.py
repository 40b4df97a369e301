"""The thread that carries rollouts on: what one of them stumbles over does not keep the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from edgefl.errors import HINDRANCES, EdgeflError, StoreError

log = logging.getLogger(__name__)

TICK_S = 1.0

T = TypeVar("T")


class RolloutThread:
    """Looks at all rollouts every second, and at once when it is woken.

    Args:
        name: of the thread.
        look: looks at all of them once; returns whether all went well.
        on_fatal: called when the store cannot be used any more; one that has no room is tried again.
    """

    def __init__(self, name: str, look: Callable[[], bool], on_fatal: Callable[[EdgeflError], None]) -> None:
        self._look, self._on_fatal = look, on_fatal
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        self._wake.set()

    def each(self, rollouts: Iterable[T], step: Callable[[T], None]) -> bool:
        """Goes on with each rollout until it is stopped; returns whether all went well."""
        went_well = True
        for rollout in rollouts:
            try:
                if not self._stopping.is_set():
                    step(rollout)
            except StoreError:
                raise
            except Exception:  # the boundary of one rollout: the others must still be carried out
                log.exception("%s: %s stumbled; it is tried again", self._thread.name, rollout)
                went_well = False
        return went_well

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            try:
                went_well = self._look()
            except HINDRANCES as error:  # the store has no room, or somebody else holds it: that passes
                log.warning("the %s wait: %s", self._thread.name, error)
                went_well = False
            except StoreError as error:
                self._on_fatal(error)
                return
            except Exception:  # the boundary of the thread: what comes next must still be carried out
                log.exception("the %s stumbled; they are looked at again", self._thread.name)
                went_well = False
            if not went_well:
                self._stopping.wait(TICK_S)
