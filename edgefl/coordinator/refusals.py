"""Removed devices stay out of the broker: their certificates are still good, so it has to be told their names."""

from __future__ import annotations

from edgefl.coordinator.broker import Broker
from edgefl.storage.store import Store


class Refusals:
    """Tells a broker whom to refuse, as the store has it."""

    def __init__(self, broker: Broker, store: Store) -> None:
        self._broker, self._store = broker, store
        self._told: frozenset[str] = frozenset()

    def update(self) -> None:
        """Tells the broker when a device was removed, or joined again, since the last time.

        Raises:
            StoreError: the store cannot be read; the broker goes on as it was told last.
        """
        removed = self._store.removed_devices()
        if removed != self._told:
            self._broker.refuse(removed)
            self._told = removed
