"""The coordinator's own account of its fleet, while the store cannot be written for a while.

A disk that is full, or a store that another program holds, ends nothing: devices are heard and answered, the page is
served, and what there is to write waits within a bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.errors import HINDRANCES, EdgeflError

log = logging.getLogger(__name__)

SAY_EVERY_S = 60.0


@dataclass(slots=True, kw_only=True)
class Hindrance:
    """Used by one thread.

    Attributes:
        record: writes an event to the store: its kind, a message, and when.
        clock, monotonic: Unix seconds, and seconds.
    """

    record: Callable[[str, str, float], None]
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _since_s: float | None = None
    _since: float = 0.0
    _said_s: float = 0.0
    _reason: str = ""

    def attempt(self, write: Callable[[], None]) -> None:
        """Calls `write`; where the store has no room or is in use that is said once a minute, and no error.

        When it works again, the store is told that and for how long it did not.
        """
        try:
            write()
            if self._since_s is not None:
                lasted_s = self.monotonic() - self._since_s
                self.record("store-hindered", f"{self._reason}; for {lasted_s:.0f} s", self._since)
                log.info("the store can be written again, after %.0f s", lasted_s)
                self._since_s = None
        except HINDRANCES as error:
            self._met(error)

    def _met(self, error: EdgeflError) -> None:
        now_s = self.monotonic()
        if self._since_s is None:
            self._since_s, self._since, self._reason = now_s, self.clock(), str(error)
        elif now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        log.warning("%s; devices are heard meanwhile, and what there is to write waits", error)
