"""Audit log of rejected requests, as events of the kind `refused`, aggregated to bound their number.

The first rejection is written at once. Further ones of the same kind from the same address or device are counted, and
written as one row a minute. At most `MAX_SOURCES` are distinguished at a time; the others share a row.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.storage.retention import REJECTED_EVENT_KIND
from edgefl.storage.store import Store

ROW_INTERVAL_S = 60.0
MAX_SOURCES = 32
MAX_DETAIL_CHARS = 200
OTHER_SOURCES = "others"

RecordRejection = Callable[[str, str, str], None]
"""(kind of request, address or device, error message)"""


def ignore_rejection(_kind: str, _source: str, _detail: str) -> None:
    """Ignores a rejection."""


@dataclass(slots=True, kw_only=True)
class _RejectionBucket:
    """Rejections since `since_s`; `count` of them have no row yet, `detail` is the newest message."""

    since_s: float
    detail: str
    device_id: str | None
    count: int = 1
    is_first: bool = True


@dataclass(slots=True, kw_only=True)
class RejectedRequestLog:
    """Aggregates rejections of any thread; `flush` writes them, in one thread.

    Attributes:
        store: where the events go.
        clock: Unix seconds, for the rows.
        monotonic: seconds, for the intervals.
        is_device: returns whether a source is a device of the fleet.
    """

    store: Store
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    is_device: Callable[[str], bool] = lambda _: False
    _buckets: dict[tuple[str, str], _RejectionBucket] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, kind: str, source: str, detail: str) -> None:
        """Counts a rejected request."""
        line = "".join(c if c.isprintable() else "?" for c in " ".join(detail.split()))[:MAX_DETAIL_CHARS]
        with self._lock:
            key = (kind, source or "?")
            if key not in self._buckets and len(self._buckets) >= MAX_SOURCES:
                key = (kind, OTHER_SOURCES)
            bucket = self._buckets.get(key)
            if bucket is None:
                device_id = key[1] if self.is_device(key[1]) else None
                self._buckets[key] = _RejectionBucket(since_s=self.monotonic(), detail=line, device_id=device_id)
            else:
                bucket.count += 1
                if not bucket.is_first:
                    bucket.detail = line

    def flush(self, *, is_last: bool = False) -> None:
        """Writes new rejections, and the counts of intervals that are over; with `is_last`, all counts."""
        if not self._buckets:
            return
        now_s, rows = self.monotonic(), []
        with self._lock:
            for key, bucket in list(self._buckets.items()):
                is_over = is_last or now_s - bucket.since_s >= ROW_INTERVAL_S
                if bucket.count and (bucket.is_first or is_over):
                    rows.append((key, bucket.detail, bucket.device_id, bucket.count))
                    bucket.count, bucket.is_first, bucket.since_s = 0, False, now_s
                elif is_over:
                    del self._buckets[key]
        if not rows:
            return
        try:
            with self.store.batch():
                for (kind, source), detail, device_id, count in rows:
                    self._write(kind, source, detail, device_id, count)
        except BaseException:
            self._restore(rows)
            raise

    def _restore(self, rows: list[tuple[tuple[str, str], str, str | None, int]]) -> None:
        """Adds the counts of unwritten rows back to the buckets."""
        with self._lock:
            for key, detail, device_id, count in rows:
                bucket = self._buckets.setdefault(
                    key, _RejectionBucket(since_s=self.monotonic(), detail=detail, device_id=device_id, count=0)
                )
                bucket.count, bucket.is_first = bucket.count + count, True

    def _write(self, kind: str, source: str, detail: str, device_id: str | None, count: int) -> None:
        repetitions = f", {count} times" if count > 1 else ""
        self.store.record_event(
            REJECTED_EVENT_KIND,
            f"{kind} from {source}{repetitions}: {detail}",
            at=self.clock(),
            device_id=device_id,
            data={"what": kind, "from": source, "count": count},
        )


def get_client_network(host: str | None) -> str:
    """Returns an IPv4 address, or the /64 network of an IPv6 one, in which a client has 2^64 addresses."""
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
