"""What was tried in vain, kept as events of the kind `refused`: never so many that they could fill the database.

The first time is written at once. What follows of the same kind from the same address, or by the same device, is
counted and becomes one row a minute. Only so many of them are told apart at a time; the others share a row.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.storage.retention import REFUSED
from edgefl.storage.store import Store

ROW_EVERY_S = 60.0
MAX_TOLD_APART = 32
MAX_DETAIL_CHARS = 200
OTHERS = "others"

Note = Callable[[str, str, str], None]
"""(what was tried, from where or by whom, the line that it was answered with)"""


def nobody_notes(_what: str, _who: str, _detail: str) -> None:
    """Takes what was tried and forgets it."""


@dataclass(slots=True, kw_only=True)
class _Minute:
    """What was tried since `since_s`; `count` is what no row says yet, `detail` its newest line."""

    since_s: float
    detail: str
    device_id: str | None
    count: int = 1
    is_first: bool = True


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Takes what was tried from any thread; `flush` writes it, in one.

    Attributes:
        store: where it goes.
        clock: Unix seconds, for the rows.
        monotonic: seconds, for the minutes.
        is_device: tells a device of the fleet from an address.
    """

    store: Store
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    is_device: Callable[[str], bool] = lambda _: False
    _open: dict[tuple[str, str], _Minute] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, who: str, detail: str) -> None:
        """Remembers that something was tried in vain."""
        line = "".join(c if c.isprintable() else "?" for c in " ".join(detail.split()))[:MAX_DETAIL_CHARS]
        with self._lock:
            key = (what, who or "?")
            if key not in self._open and len(self._open) >= MAX_TOLD_APART:
                key = (what, OTHERS)
            minute = self._open.get(key)
            if minute is None:
                device_id = key[1] if self.is_device(key[1]) else None
                self._open[key] = _Minute(since_s=self.monotonic(), detail=line, device_id=device_id)
            else:
                minute.count += 1
                if not minute.is_first:
                    minute.detail = line

    def flush(self, *, is_last: bool = False) -> None:
        """Writes what is new, and of each minute that is over how often it was; at the end, all of it."""
        if not self._open:
            return
        now_s, rows = self.monotonic(), []
        with self._lock:
            for key, minute in list(self._open.items()):
                is_over = is_last or now_s - minute.since_s >= ROW_EVERY_S
                if minute.count and (minute.is_first or is_over):
                    rows.append((key, minute.detail, minute.device_id, minute.count))
                    minute.count, minute.is_first, minute.since_s = 0, False, now_s
                elif is_over:
                    del self._open[key]
        if not rows:
            return
        try:
            with self.store.batch():
                for (what, who), detail, device_id, count in rows:
                    self._write(what, who, detail, device_id, count)
        except BaseException:
            self._take_back(rows)
            raise

    def _take_back(self, rows: list[tuple[tuple[str, str], str, str | None, int]]) -> None:
        """Counts what could not be written with what is tried from now on."""
        with self._lock:
            for key, detail, device_id, count in rows:
                minute = self._open.setdefault(
                    key, _Minute(since_s=self.monotonic(), detail=detail, device_id=device_id, count=0)
                )
                minute.count, minute.is_first = minute.count + count, True

    def _write(self, what: str, who: str, detail: str, device_id: str | None, count: int) -> None:
        often = f", {count} times" if count > 1 else ""
        self.store.record_event(
            REFUSED,
            f"{what} from {who}{often}: {detail}",
            at=self.clock(),
            device_id=device_id,
            data={"what": what, "from": who, "count": count},
        )


def network_of(host: str | None) -> str:
    """Returns an address as attackers are told apart: of IPv6 the network, in which everybody has 2^64 addresses."""
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_loopback:
        return str(address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
