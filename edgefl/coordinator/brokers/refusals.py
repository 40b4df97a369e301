"""Removed devices stay out of the broker, and so do certificates in whose place there are newer ones.

Both are still good by themselves, so the broker has to be told.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from edgefl.coordinator.brokers.broker import Broker
from edgefl.storage.certificate_rows import revoked_serials
from edgefl.storage.store import Store

RENEWED_EVERY_S = 120.0
"""Removed devices are shut out at once; certificates that were merely renewed together, so often at the most."""


class Refusals:
    """Tells a broker whom to refuse, as the store has it; `own` returns the serial of the coordinator's own."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        *,
        own: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker, self._store, self._own, self._clock = broker, store, own, clock
        self._told: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._looked_at: float | None = None

    def update(self) -> None:
        """Tells the broker when a device was removed, or joined again, since the last time; later what was renewed.

        Raises:
            StoreError: the store cannot be read; the broker goes on as it was told last.
        """
        removed, now = self._store.removed_devices(), self._clock()
        is_time = self._looked_at is None or abs(now - self._looked_at) >= RENEWED_EVERY_S
        if removed == self._told[0] and not is_time:
            return
        wanted = removed, revoked_serials(self._store, now=now, own=self._own())
        if wanted != self._told:
            self._broker.refuse(*wanted)
            self._told = wanted
        self._looked_at = now
