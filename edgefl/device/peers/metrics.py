"""Counters of peer traffic, and rate-limited warnings."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCounters:
    """Counters since the start: messages `delivered` to and `received` from neighbours.

    `superseded` messages were replaced by a newer one before delivery; `repeated` ones came again after a lost ACK,
    and were dropped. `refused` connections were of a peer with a wrong identity, in either direction; `malformed`
    ones broke off because of an invalid frame.
    """

    delivered: int = 0
    superseded: int = 0
    received: int = 0
    repeated: int = 0
    refused: int = 0
    malformed: int = 0


class PeerMetrics:
    """Thread-safe counters and rate-limited log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = PeerCounters()
        self._last_logged_s: dict[tuple[str, str], float] = {}

    @property
    def counters(self) -> PeerCounters:
        return self._counters

    def increment(self, name: str) -> None:
        """Increments a field of `PeerCounters`."""
        with self._lock:
            self._counters = replace(self._counters, **{name: getattr(self._counters, name) + 1})

    def log_warning(self, peer: str, text: str, *values: object) -> None:
        """Logs a warning, one a minute for each peer and text; `peer` has to come from a small set of names."""
        now_s = time.monotonic()
        with self._lock:
            last_s = self._last_logged_s.get((peer, text))
            if last_s is not None and now_s - last_s < LOG_INTERVAL_S:
                return
            self._last_logged_s[peer, text] = now_s
        log.warning(text, *values)
