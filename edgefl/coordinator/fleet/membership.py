"""Fleet membership: adds and removes devices in store, Flower and registry."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request

from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.flower.superlink import SuperLink
from edgefl.core.errors import NetworkError, NotFoundError
from edgefl.core.protocol import check_facts
from edgefl.core.types import Json
from edgefl.storage.repositories.certificates import DEVICE_REMOVED
from edgefl.storage.repositories.records import CapabilitiesRecord
from edgefl.storage.store import Store

log = logging.getLogger(__name__)


class Membership:
    """Devices that have joined, kept equal in store, Flower and registry."""

    def __init__(self, store: Store, superlink: SuperLink, registry: DeviceRegistry) -> None:
        self._store, self._superlink, self._registry = store, superlink, registry

    def restore(self) -> None:
        """Restores the devices of the store when a coordinator starts."""
        capabilities = self._store.get_all_capabilities()
        for record in self._store.list_devices():
            if record.node_id is None:
                self.add(record.device_id, record.public_key)
            else:
                self._superlink.state.restore_node(record.node_id, record.public_key)
                self._registry.add(
                    record.device_id,
                    node_id=record.node_id,
                    role=record.role,
                    groups=record.groups,
                    examples=record.examples,
                    facts=_get_valid_facts(capabilities.get(record.device_id)),
                )

    def add(self, device_id: str, public_key: bytes) -> None:
        """Adds a device that has just joined; it may do so twice."""
        record, capabilities = self._store.get_device(device_id), self._store.get_capabilities(device_id)
        examples = dict(capabilities.shards) if capabilities else dict(record.examples)
        node_id = self._superlink.register(public_key, device_id)
        if record.node_id is None:
            self._remove_previous(device_id, node_id)
            with self._store.batch(durable=True):
                self._store.set_node_id(device_id, node_id)
                self._store.update_device(device_id, examples=examples)
                self._store.record_event("device-joined", f"as {record.role}", at=time.time(), device_id=device_id)
        self._registry.add(
            device_id,
            node_id=node_id,
            role=record.role,
            groups=record.groups,
            examples=examples,
            facts=_get_valid_facts(capabilities),
        )

    def update_key(self, device_id: str, public_key: bytes) -> None:
        """Replaces the signing key of a device; the former one is no longer valid."""
        node_id = self._registry.get_node_id(device_id)
        if node_id is not None:
            self._superlink.state.update_node_key(node_id, public_key)

    def remove(self, device_id: str) -> None:
        """Removes a device; its name is free again.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        if self._registry.get_device(device_id) is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet; `edgefl devices list` shows them")
        now = time.time()
        with self._store.batch(durable=True):
            self._store.remove_device(device_id, at=now)
            self._store.record_event(
                DEVICE_REMOVED, "its certificate and its key count no more", at=now, device_id=device_id
            )
        self._superlink.remove(self._registry.remove(device_id))

    def find_signer(self, request: Request) -> str | None:
        """Returns the device that signed a request; None for a removed one."""
        node_id = self._superlink.api.authenticate(request)
        return None if node_id is None else self._registry.get_device_id(node_id)

    def _remove_previous(self, device_id: str, node_id: int) -> None:
        """Removes an earlier device of this name; the new one counts its sessions anew."""
        previous_node_id = self._registry.remove(device_id)
        if previous_node_id is not None and previous_node_id != node_id:
            self._superlink.state.remove_node(previous_node_id)


def _get_valid_facts(record: CapabilitiesRecord | None) -> Json | None:
    """Returns a device's stored facts; empty if they are invalid by the present rules."""
    if record is None:
        return None
    try:
        check_facts(dict(record.facts), dict(record.shards))
    except NetworkError as error:
        log.warning("what %s told of itself is left out: %s", record.device_id, error)
        return {}
    return dict(record.facts)
