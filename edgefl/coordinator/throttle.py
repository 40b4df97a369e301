"""Slows down who guesses secrets, and nobody else: tries are counted by address, and only those that were wrong.

An address has ten wrong tries at once and gets one back every six seconds. All addresses together have two hundred;
when these are used up each address has one, so that a board which comes with a right token from an address of its own
is let in whatever others do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.errors import TooManyTriesError

TRIES = 10
TRIES_WHILE_CROWDED = 1
BACK_AFTER_S = 6.0
ALL_TRIES = 200
ALL_BACK_AFTER_S = 0.3
MAX_ADDRESSES = 4096


@dataclass(slots=True)
class _Wrong:
    """Wrong tries that still count, as of `at_s`; they fade one by one."""

    number: float = 0.0
    at_s: float = 0.0

    def left(self, now_s: float, back_after_s: float) -> float:
        return max(0.0, self.number - (now_s - self.at_s) / back_after_s)


@dataclass(slots=True, kw_only=True)
class Throttle:
    """Counts wrong tries in bounded memory; safe from any thread. `monotonic` gives seconds."""

    monotonic: Callable[[], float]
    _by_address: OrderedDict[str, _Wrong] = field(default_factory=OrderedDict)
    _all: _Wrong = field(default_factory=_Wrong)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, address: str) -> None:
        """Lets an address try.

        Raises:
            TooManyTriesError: it was wrong too often; what it shows is not even looked at.
        """
        now_s = self.monotonic()
        with self._lock:
            is_crowded = self._all.left(now_s, ALL_BACK_AFTER_S) >= ALL_TRIES
            allowed = TRIES_WHILE_CROWDED if is_crowded else TRIES
            wrong = self._by_address.get(address)
            number = wrong.left(now_s, BACK_AFTER_S) if wrong else 0.0
        if number > allowed - 1:
            wait_s = (number - allowed + 1) * BACK_AFTER_S
            raise TooManyTriesError(
                f"too many wrong tries from {address}; nothing from there is looked at for {max(1, round(wait_s))} s"
            )

    def failed(self, address: str) -> None:
        """Counts a try that was wrong."""
        now_s = self.monotonic()
        with self._lock:
            wrong = self._by_address.pop(address, None) or _Wrong()
            self._by_address[address] = _Wrong(wrong.left(now_s, BACK_AFTER_S) + 1, now_s)
            while len(self._by_address) > MAX_ADDRESSES:
                self._by_address.popitem(last=False)
            # No more than the limit: a flood must not cost an hour of waiting afterwards.
            self._all = _Wrong(min(self._all.left(now_s, ALL_BACK_AFTER_S) + 1, ALL_TRIES + 1), now_s)

    def num_addresses(self) -> int:
        return len(self._by_address)
