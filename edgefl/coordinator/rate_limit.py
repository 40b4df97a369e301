"""Rate limit of failed authentication, by address; successful tries are not counted.

An address may fail ten times at once and regains one try every six seconds. All addresses together may fail two
hundred times; beyond that each address has one try, so that a device with a valid token and its own address is
accepted whatever others do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.core.errors import TooManyTriesError

MAX_FAILURES = 10
MAX_FAILURES_UNDER_LOAD = 1
FAILURE_DECAY_S = 6.0
MAX_TOTAL_FAILURES = 200
TOTAL_FAILURE_DECAY_S = 0.3
MAX_ADDRESSES = 4096


@dataclass(slots=True)
class _FailureCount:
    """Failures that still count, as of `at_s`; they decay one by one."""

    number: float = 0.0
    at_s: float = 0.0

    def compute_remaining(self, now_s: float, decay_s: float) -> float:
        return max(0.0, self.number - (now_s - self.at_s) / decay_s)


@dataclass(slots=True, kw_only=True)
class RateLimiter:
    """Counts failures in bounded memory. Thread-safe. `monotonic` gives seconds."""

    monotonic: Callable[[], float]
    _by_address: OrderedDict[str, _FailureCount] = field(default_factory=OrderedDict)
    _total: _FailureCount = field(default_factory=_FailureCount)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, address: str) -> None:
        """Checks that an address may try.

        Raises:
            TooManyTriesError: it failed too often; its credentials are not checked.
        """
        now_s = self.monotonic()
        with self._lock:
            is_under_load = self._total.compute_remaining(now_s, TOTAL_FAILURE_DECAY_S) >= MAX_TOTAL_FAILURES
            allowed = MAX_FAILURES_UNDER_LOAD if is_under_load else MAX_FAILURES
            failures = self._by_address.get(address)
            number = failures.compute_remaining(now_s, FAILURE_DECAY_S) if failures else 0.0
        if number > allowed - 1:
            wait_s = (number - allowed + 1) * FAILURE_DECAY_S
            raise TooManyTriesError(
                f"too many wrong tries from {address}; nothing from there is looked at for {max(1, round(wait_s))} s"
            )

    def record_failure(self, address: str) -> None:
        """Counts a failed try."""
        now_s = self.monotonic()
        with self._lock:
            failures = self._by_address.pop(address, None) or _FailureCount()
            self._by_address[address] = _FailureCount(failures.compute_remaining(now_s, FAILURE_DECAY_S) + 1, now_s)
            while len(self._by_address) > MAX_ADDRESSES:
                self._by_address.popitem(last=False)
            # No more than the limit: a flood must not cost an hour of waiting afterwards.
            self._total = _FailureCount(
                min(self._total.compute_remaining(now_s, TOTAL_FAILURE_DECAY_S) + 1, MAX_TOTAL_FAILURES + 1), now_s
            )

    def count_addresses(self) -> int:
        return len(self._by_address)
