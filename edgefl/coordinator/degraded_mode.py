"""Degraded mode: the coordinator goes on while its store cannot be written.

A full disk, or a store that another program locks, ends nothing: devices are served, the page is served, and writes
are buffered within a limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.core.errors import RETRYABLE_STORE_ERRORS, EdgeflError

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


@dataclass(slots=True, kw_only=True)
class StoreOutageGuard:
    """Runs writes, and reports outages of the store. Not thread-safe.

    Attributes:
        record: (kind, message, Unix seconds) -> None; writes an event to the store.
        clock, monotonic: Unix seconds, and seconds.
    """

    record: Callable[[str, str, float], None]
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _outage_since_s: float | None = None
    _outage_since: float = 0.0
    _logged_s: float = 0.0
    _reason: str = ""

    def run(self, write: Callable[[], None]) -> None:
        """Calls `write`; a full or locked store is logged once a minute instead of raised.

        Once it works again, the outage and its duration are recorded as an event.
        """
        try:
            write()
            if self._outage_since_s is not None:
                lasted_s = self.monotonic() - self._outage_since_s
                self.record("store-hindered", f"{self._reason}; for {lasted_s:.0f} s", self._outage_since)
                log.info("the store can be written again, after %.0f s", lasted_s)
                self._outage_since_s = None
        except RETRYABLE_STORE_ERRORS as error:
            self._on_outage(error)

    def _on_outage(self, error: EdgeflError) -> None:
        now_s = self.monotonic()
        if self._outage_since_s is None:
            self._outage_since_s, self._outage_since, self._reason = now_s, self.clock(), str(error)
        elif now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        log.warning("%s; devices are heard meanwhile, and what there is to write waits", error)
