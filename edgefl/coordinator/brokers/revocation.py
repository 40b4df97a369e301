"""Revocation of removed devices and replaced certificates at the broker.

Their certificates are still valid by themselves, so the broker needs the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from edgefl.coordinator.brokers.broker import Broker
from edgefl.storage.repositories.certificates import list_revoked_serials
from edgefl.storage.store import Store

RENEWED_INTERVAL_S = 120.0
"""Removed devices are revoked at once; replaced certificates together, at most this often."""


class RevocationSync:
    """Keeps the revocations of a broker equal to those of the store.

    `get_own_serial` returns the serial of the coordinator's own.
    """

    def __init__(
        self,
        broker: Broker,
        store: Store,
        *,
        get_own_serial: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker, self._store, self._get_own_serial, self._clock = broker, store, get_own_serial, clock
        self._applied: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._checked_at: float | None = None

    def update(self) -> None:
        """Updates the broker's revocations if devices were removed or joined again, or certificates are due.

        Raises:
            StoreError: the store cannot be read; the broker keeps its last revocations.
        """
        removed, now = self._store.list_removed_device_ids(), self._clock()
        is_due = self._checked_at is None or abs(now - self._checked_at) >= RENEWED_INTERVAL_S
        if removed == self._applied[0] and not is_due:
            return
        revocations = removed, list_revoked_serials(self._store, now=now, own_serial=self._get_own_serial())
        if revocations != self._applied:
            self._broker.revoke(*revocations)
            self._applied = revocations
        self._checked_at = now
