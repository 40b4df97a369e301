"""Counts what happens between two boards, and tells the log of it seldom."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCounts:
    """Since the start: what neighbours have `delivered` to them, and what was `received` from them.

    `superseded` messages were never delivered, since a newer one came first; `repeated` ones came again, since their
    receipt was lost, and were dropped. `refused` connections were of a peer that is not who it should be, in either
    direction; `malformed` ones broke off because a neighbour sent what is no frame.
    """

    delivered: int = 0
    superseded: int = 0
    received: int = 0
    repeated: int = 0
    refused: int = 0
    malformed: int = 0


class PeerWatch:
    """Safe to use from every thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = PeerCounts()
        self._logged_s: dict[tuple[str, str], float] = {}

    @property
    def counts(self) -> PeerCounts:
        return self._counts

    def add(self, name: str) -> None:
        """Counts one more of a field of `PeerCounts`."""
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + 1})

    def warn(self, peer: str, text: str, *values: object) -> None:
        """Logs a warning, one a minute for each peer and text; `peer` has to come from a small set of names."""
        now_s = time.monotonic()
        with self._lock:
            last_s = self._logged_s.get((peer, text))
            if last_s is not None and now_s - last_s < LOG_EVERY_S:
                return
            self._logged_s[peer, text] = now_s
        log.warning(text, *values)
