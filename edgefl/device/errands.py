"""Orders that an agent carries out one at a time, beside training; a newer one may call off the one under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from numpy.random import Generator

from edgefl.errors import DataError, NetworkError, StoreError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
DAMAGED_ATTEMPTS = 2
"""A file that arrives damaged is fetched once more from its beginning."""

T = TypeVar("T")
Order = TypeVar("Order")


class CalledOffError(Exception):
    """A newer order came, or the agent stops."""


class Errands(Generic[Order]):
    """One thread that carries out orders; they come from any thread.

    Args:
        name: of the thread.
        carry_out: does one order; `CalledOffError` leaves it.
        on_failure: told of what no order may raise; the next one may be the remedy.
        rng: spreads the attempts of a fleet.
        orders: what an earlier life of the agent was at.
        calls_off: whether a newer order calls off the one under way; else it waits for its turn, and counts once
            however often it comes.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[Order], None],
        *,
        on_failure: Callable[[Order, Exception], None],
        rng: Generator,
        orders: Sequence[Order] = (),
        calls_off: bool = True,
    ) -> None:
        self._carry_out, self._on_failure, self._rng = carry_out, on_failure, rng
        self._orders, self._calls_off = list(orders), calls_off
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """Leaves what is under way; it is for the next life of the agent."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def add(self, order: Order) -> None:
        """Takes an order, unless it is the newest one already, or is among those that wait for their turn."""
        with self._lock:
            if order not in (self._orders[-1:] if self._calls_off else self._orders):
                self._orders.append(order)
        self._wake.set()

    def is_called_off(self) -> bool:
        """Returns whether what is under way should be left."""
        with self._lock:
            return self._stopping.is_set() or (self._calls_off and len(self._orders) > 1)

    def num_waiting(self) -> int:
        """Returns how many orders wait for the one under way."""
        with self._lock:
            return max(0, len(self._orders) - 1)

    def check_wanted(self) -> None:
        """Raises `CalledOffError` when what is under way should be left."""
        if self.is_called_off():
            raise CalledOffError

    def sleep(self, seconds: float) -> None:
        """Waits; a stop ends that at once, with `CalledOffError`."""
        if self._stopping.wait(seconds):
            raise CalledOffError

    def until_done(self, attempt: Callable[[], T], *, what: str, on_away: Callable[[], None]) -> T:
        """Returns what `attempt` returns, however often the connection breaks; what is final is raised.

        Args:
            attempt: fetches something, as `file_fetch.fetch_file` does.
            what: is fetched, for the log.
            on_away: called whenever the connection is broken.
        """
        backoff_s, damaged = FIRST_BACKOFF_S, 0
        while True:
            try:
                return attempt()
            except NetworkError as error:
                log.info("%s: %s; trying again", what, error)
                on_away()
            except DataError as error:
                damaged += 1
                if damaged == DAMAGED_ATTEMPTS:
                    raise
                log.warning("%s: %s; fetching it once more", what, error)
            self.check_wanted()
            self._wake.wait(backoff_s * self._rng.uniform(0.5, 1.0))
            self._wake.clear()
            self.check_wanted()
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _work(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                order = self._orders[0] if self._orders else None
            if order is None:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._carry_out(order)
            except CalledOffError:
                pass
            except StoreError as error:  # a note could not be written; what is to be said is said all the same
                log.warning("%s: %s: %s", self._thread.name, order, error)
            except Exception as error:  # the boundary of the thread: the next order may be the remedy
                log.exception("%s: %s failed", self._thread.name, order)
                self._on_failure(order, error)
            with self._lock:
                if not self._stopping.is_set():
                    self._orders.remove(order)
