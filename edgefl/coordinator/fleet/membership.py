"""Who belongs to the fleet: gives devices their place in Flower and in the roster, and takes it away."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request

from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.superlink import SuperLink
from edgefl.errors import NetworkError, NotFoundError
from edgefl.protocol import check_facts
from edgefl.storage.certificate_rows import REMOVED
from edgefl.storage.records import CapabilitiesRecord
from edgefl.storage.store import Store
from edgefl.types import Json

log = logging.getLogger(__name__)


class Membership:
    """The devices that have joined, in store, Flower and roster alike."""

    def __init__(self, store: Store, superlink: SuperLink, roster: Roster) -> None:
        self._store, self._superlink, self._roster = store, superlink, roster

    def restore(self) -> None:
        """Brings back the devices that the store knows, when a coordinator starts."""
        told = self._store.capabilities()
        for record in self._store.devices():
            if record.node_id is None:
                self.enrolled(record.device_id, record.public_key)
            else:
                self._superlink.state.restore_node(record.node_id, record.public_key)
                self._roster.add(
                    record.device_id,
                    node_id=record.node_id,
                    role=record.role,
                    groups=record.groups,
                    examples=record.examples,
                    facts=_facts(told.get(record.device_id)),
                )

    def enrolled(self, device_id: str, public_key: bytes) -> None:
        """Gives a device that has just joined its place; it may ask for that twice."""
        record, told = self._store.device(device_id), self._store.capabilities_of(device_id)
        examples = dict(told.shards) if told else dict(record.examples)
        node_id = self._superlink.register(public_key, device_id)
        if record.node_id is None:
            self._forget_former(device_id, node_id)
            with self._store.batch(durable=True):
                self._store.set_node_id(device_id, node_id)
                self._store.update_device(device_id, examples=examples)
                self._store.record_event("device-joined", f"as {record.role}", at=time.time(), device_id=device_id)
        self._roster.add(
            device_id,
            node_id=node_id,
            role=record.role,
            groups=record.groups,
            examples=examples,
            facts=_facts(told),
        )

    def rekeyed(self, device_id: str, public_key: bytes) -> None:
        """Lets a device sign with another key from now on, and with the one before no more."""
        node_id = self._roster.node_of(device_id)
        if node_id is not None:
            self._superlink.state.change_key(node_id, public_key)

    def remove(self, device_id: str) -> None:
        """Takes a device out; its name is free again.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        if self._roster.info(device_id) is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet; `edgefl devices list` shows them")
        now = time.time()
        with self._store.batch(durable=True):
            self._store.remove_device(device_id, at=now)
            self._store.record_event(
                REMOVED, "its certificate and its key count no more", at=now, device_id=device_id
            )
        self._superlink.remove(self._roster.remove(device_id))

    def signed_by(self, request: Request) -> str | None:
        """Returns the device that has signed a request; a device that was removed signs for nobody."""
        node_id = self._superlink.api.node_of(request)
        return None if node_id is None else self._roster.device_of(node_id)

    def _forget_former(self, device_id: str, node_id: int) -> None:
        """Takes out an earlier device of this name: it was removed, and the new one counts its sessions anew."""
        former = self._roster.remove(device_id)
        if former is not None and former != node_id:
            self._superlink.state.forget_node(former)


def _facts(told: CapabilitiesRecord | None) -> Json | None:
    """Returns what a device told, none of it where an earlier version took what would not be taken now."""
    if told is None:
        return None
    try:
        check_facts(dict(told.facts), dict(told.shards))
    except NetworkError as error:
        log.warning("what %s told of itself is left out: %s", told.device_id, error)
        return {}
    return dict(told.facts)
