"""Limits of a listener's connections, so that those without a key leave room for the fleet's own.

A connection is pending until it has shown a key or an access token, and then belongs to that device or operator.
Only addresses can be told apart before the TLS hand-shake, so pending connections are limited by address and in all,
and in how fast an address opens them; one that shows a key gives its place back. Where the pending ones are at their
limit, a newcomer takes the place of one that has had its time: devices behind the address of a flood still get in,
and what they have open stays open. Addresses of which a key was shown lately have a share that others cannot take.
"""

from __future__ import annotations

import logging
import resource
import secrets
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.coordinator.auth import get_client_network
from edgefl.core.config import ConnectionSettings

log = logging.getLogger(__name__)

CONNECTION_EXTENSION = "edgefl.connection"
"""Key of a connection's slot in the ASGI scope's extensions."""
MIN_RESERVED_FILES = 128
RESERVED_FRACTION = 0.1
"""Open files, of the limit, that connections never use: the store, journals and models need them."""
MAX_PENDING = 512
"""Maximum pending connections of a listener: each has buffers of up to 200 KB."""
PENDING_FRACTION = 1 / 3
UNKNOWN_FRACTION = 3 / 4
"""Share of the pending connections for addresses of which no key was shown in the last `KNOWN_S`."""
KNOWN_S = 24 * 3600.0
EVICTION_AGE_S = 2.0
"""Younger connections are not closed for a newcomer: a device needs this long to show its key."""
BURST_S = 10.0
"""An address may open the connections of so many seconds at once."""
UNKNOWN_RATE_FACTOR = 2.0
"""All unknown addresses together may open so many times the connections of one: each costs a hand-shake."""
MAX_ADDRESSES = 4096
LOG_INTERVAL_S = 60.0
MIN_LOGGED_DEADLINES = 20
"""Fewer connections that missed a deadline are no news: boards restart, browsers open connections in advance."""
REFUSAL_REASONS = ("rate", "address", "total", "files", "handshake", "header", "body", "write")
"""Of `ConnectionLimiter.refused`: limits of an address's rate, an address and all; no file; then the deadlines."""
_LIMIT_REASONS = frozenset(REFUSAL_REASONS[:4])


@dataclass(slots=True)
class _TokenBucket:
    tokens: float
    at_s: float

    def refill(self, now_s: float, per_s: float) -> None:
        self.tokens = min(per_s * BURST_S, self.tokens + (now_s - self.at_s) * per_s)
        self.at_s = now_s


def _ignore_close(_reason: str) -> None:
    """Closes nothing: the connection has no transport yet."""


@dataclass(eq=False, slots=True, kw_only=True)
class ConnectionSlot:
    """Place of one connection in its limiter.

    Attributes:
        address: IPv4 address or IPv6 network of the peer.
        accepted_s: on the limiter's clock.
        owner: the device or operator that has shown its key; None while the connection is pending.
        close: closes the connection for a newcomer, with a reason of `ConnectionLimiter.refused`.
        is_busy: whether a complete request is being answered; such a connection is not closed for a newcomer.
    """

    limiter: ConnectionLimiter
    address: str
    accepted_s: float
    owner: str | None = None
    is_open: bool = True
    close: Callable[[str], None] = _ignore_close
    is_busy: Callable[[], bool] = bool

    def authenticate(self, owner: str) -> None:
        """Records that this connection belongs to a device or operator."""
        self.limiter.authenticate(self, owner)

    def release(self) -> None:
        """Gives the place back; harmless if it is already free."""
        self.limiter.release(self)


class ConnectionLimiter:
    """Limiter of one listener's connections. Thread-safe, but for `admit`, which its event loop calls.

    Args:
        name: of the listener, in the log and in metrics.
        settings: see `ConnectionSettings`.
        max_connections: of this listener, by the limit of open files.
        monotonic: seconds.

    Attributes:
        refused: number of connections refused or closed, by reason.
    """

    def __init__(
        self,
        name: str,
        settings: ConnectionSettings,
        max_connections: int,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.settings, self._monotonic = name, settings, monotonic
        self.max_connections = min(max_connections, settings.max_total or max_connections)
        self.max_pending = max(2, min(MAX_PENDING, int(self.max_connections * PENDING_FRACTION)))
        self.max_per_address = min(settings.max_pending_per_address, max(1, self.max_pending // 2))
        self.refused: Counter[str] = Counter()
        self._pending: defaultdict[str, list[ConnectionSlot]] = defaultdict(list)
        self._owned: Counter[str] = Counter()
        self.num_pending = self.num_owned = 0
        self._lock = threading.RLock()
        self._known_s: OrderedDict[str, float] = OrderedDict()
        self._buckets: OrderedDict[str, _TokenBucket] = OrderedDict()
        self._unknown_bucket = _TokenBucket(settings.new_per_s * UNKNOWN_RATE_FACTOR * BURST_S, monotonic())
        self._logged: Counter[str] = Counter()
        self._logged_s = -LOG_INTERVAL_S

    def admit(self, host: str) -> ConnectionSlot | None:
        """Returns a slot for a new connection, None to refuse it; may close another one for it."""
        with self._lock:
            address, now_s = get_client_network(host), self._monotonic()
            is_known = self._is_known(address, now_s)
            is_full_there = len(self._pending.get(address, ())) >= self.max_per_address
            if not self._take_token(address, now_s, is_known=is_known):
                reason = "rate"
            elif is_full_there and not self._evict([address], "address"):
                reason = "address"
            elif not self._make_room(now_s, is_known=is_known):
                reason = "total"
            else:
                slot = ConnectionSlot(limiter=self, address=address, accepted_s=now_s)
                self._pending[address].append(slot)
                self.num_pending += 1
                return slot
            self.count_refusal(reason)
            return None

    def authenticate(self, slot: ConnectionSlot, owner: str) -> None:
        """Records that a connection belongs to `owner`; beyond its number of connections they stay pending."""
        with self._lock:
            self._known_s[slot.address] = self._monotonic()
            self._known_s.move_to_end(slot.address)
            while len(self._known_s) > MAX_ADDRESSES:
                self._known_s.popitem(last=False)
            num_owned = self._owned.get(owner, 0)
            if slot.owner is not None or not slot.is_open or num_owned >= self.settings.max_per_device:
                return
            self._remove_pending(slot)
            slot.owner = owner
            self._owned[owner] = num_owned + 1
            self.num_owned += 1
            for bucket in (self._buckets.get(slot.address), self._unknown_bucket):
                if bucket is not None:
                    bucket.tokens += 1

    def release(self, slot: ConnectionSlot) -> None:
        """Frees the place of a connection; harmless if it is already free."""
        with self._lock:
            if not slot.is_open:
                return
            slot.is_open = False
            if slot.owner is None:
                self._remove_pending(slot)
                return
            self.num_owned -= 1
            self._owned[slot.owner] -= 1
            if not self._owned[slot.owner]:
                del self._owned[slot.owner]

    def count_refusal(self, reason: str) -> None:
        """Counts a connection that was refused, or closed for its lateness; see `log_refusals`."""
        with self._lock:
            self.refused[reason] += 1
        self.log_refusals()

    def log_refusals(self) -> None:
        """Logs what was refused since the last line, if it is worth one and a minute has passed."""
        with self._lock:
            now_s = self._monotonic()
            new = self.refused - self._logged
            is_worth_a_line = new.total() >= MIN_LOGGED_DEADLINES or _LIMIT_REASONS & set(new)
            if now_s - self._logged_s < LOG_INTERVAL_S or not is_worth_a_line:
                return
            refused = sorted(new.items())
            self._logged, self._logged_s = Counter(self.refused), now_s
        counts = ", ".join(f"{number} {reason}" for reason, number in refused)
        log.warning(
            "%s refused or closed connections without a key: %s; %d of at most %d wait for one, %d have shown one",
            self.name, counts, self.num_pending, self.max_pending, self.num_owned,
        )  # fmt: skip

    def _is_known(self, address: str, now_s: float) -> bool:
        known_s = self._known_s.get(address)
        return known_s is not None and now_s - known_s < KNOWN_S

    def _take_token(self, address: str, now_s: float, *, is_known: bool) -> bool:
        """Returns whether an address may open one more connection now."""
        per_s = self.settings.new_per_s
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = _TokenBucket(per_s * BURST_S, now_s)
        self._buckets.move_to_end(address)
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        bucket.refill(now_s, per_s)
        buckets = [bucket]
        if not is_known:
            self._unknown_bucket.refill(now_s, per_s * UNKNOWN_RATE_FACTOR)
            buckets.append(self._unknown_bucket)
        if any(one.tokens < 1 for one in buckets):
            return False
        for one in buckets:
            one.tokens -= 1
        return True

    def _make_room(self, now_s: float, *, is_known: bool) -> bool:
        """Returns whether there is room for one more pending connection, perhaps after closing one."""
        is_full = self.num_pending + self.num_owned >= self.max_connections
        if self.num_pending < self.max_pending * UNKNOWN_FRACTION and not is_full:
            return True
        unknown = [address for address in self._pending if not self._is_known(address, now_s)]
        num_unknown = sum(len(self._pending[address]) for address in unknown)
        if is_known:
            if self.num_pending < self.max_pending and not is_full:
                return True
            return self._evict(unknown, "total") or self._evict(self._pending, "total")
        has_share = num_unknown < self.max_pending * UNKNOWN_FRACTION and self.num_pending < self.max_pending
        return (has_share and not is_full) or self._evict(unknown, "total")

    def _evict(self, addresses: Iterable[str], reason: str) -> bool:
        """Closes an older connection of the address that has the most; returns whether there was one.

        It is chosen at random: a device that is about to show its key is hit seldom, whatever the others do.
        """
        address = max(addresses, key=lambda one: len(self._pending[one]), default=None)
        if address is None:
            return False
        latest_s = self._monotonic() - EVICTION_AGE_S
        candidates = [slot for slot in self._pending[address] if slot.accepted_s <= latest_s and not slot.is_busy()]
        if not candidates:
            return False
        slot = secrets.choice(candidates)
        self.release(slot)
        self.count_refusal(reason)
        slot.close(reason)
        return True

    def _remove_pending(self, slot: ConnectionSlot) -> None:
        slots = self._pending[slot.address]
        slots.remove(slot)
        self.num_pending -= 1
        if not slots:
            del self._pending[slot.address]


def find_pending_slot(scope: Mapping[str, Any]) -> ConnectionSlot | None:
    """Returns the slot of an ASGI request's connection; None unless it is pending."""
    slot: ConnectionSlot | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
    return slot if slot is not None and slot.owner is None else None


def make_limiters(settings: ConnectionSettings) -> tuple[ConnectionLimiter, ConnectionLimiter]:
    """Returns the limiters of the HTTPS server and of an embedded broker in the same process.

    A device has two connections to the former and one to the latter.
    """
    third = count_available_files() // 3
    return ConnectionLimiter("https", settings, 2 * third), ConnectionLimiter("mqtt", settings, third)


def count_available_files() -> int:
    """Returns how many more files this process may open, less the reserve."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return max(6, limit - max(MIN_RESERVED_FILES, int(limit * RESERVED_FRACTION)) - num_open)
