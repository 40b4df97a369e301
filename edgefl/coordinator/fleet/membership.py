"""Fleet membership: adds, drains and removes devices, in store, Flower and registry.

A drained device finishes its work and gets no more until it is resumed. The coordinator's decision applies at once,
also to an unreachable device; the device gets the command at its next contact, and then reports itself as `draining`.
Requests are in the history (`drain-requested`, `resume-requested`), and hold over restarts of either side.
"""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from edgefl.coordinator.fleet.presence import PRESENT_STATES, DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import DeviceRegistry, RegistryEvent
from edgefl.coordinator.fleet.supernode_keys import parse_supernode_key
from edgefl.coordinator.fleet.supernode_presence import SuperNodePresence
from edgefl.coordinator.flower.superlink import SuperLink
from edgefl.core.claims import bound_reported_examples
from edgefl.core.errors import NameTakenError, NetworkError, NotAllowedError, NotFoundError, UsageError
from edgefl.core.protocol import (
    APP_CODING_KEY,
    EVALUATOR_NAME,
    RESERVED_NAMES,
    Command,
    CommandKind,
    check_facts,
    validate_slug,
)
from edgefl.core.types import APP_JOB_PREFIX, SUPERNODE, Json, Role
from edgefl.storage.queries.dashboard import DRAIN_REQUESTED, RESUME_REQUESTED, list_draining_devices
from edgefl.storage.queries.history import MAX_TIME
from edgefl.storage.repositories.certificates import DEVICE_REMOVED
from edgefl.storage.repositories.records import CapabilitiesRecord
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

MAX_LIST_VERSION = 2**31
EXPIRY_NOTICE_S = 14 * 86_400.0
MAX_JOBS = 50
"""Of apps that a stock SuperNode takes part in."""
SUPERNODE_FACTS = {
    "installs": {"able": False, "reason": "it is a SuperNode of Flower, which edgefl does not update"},
    APP_CODING_KEY: True,  # it gets arrays as they are
}
"""What a board would tell of itself."""
_APP_JOB = re.compile(rf"{APP_JOB_PREFIX}[a-z0-9._-]{{1,80}}\Z")


class Membership:
    """Devices that have joined, kept equal in store, Flower and registry; stock SuperNodes, too."""

    def __init__(
        self, store: Store, superlink: SuperLink, registry: DeviceRegistry, supernodes: SuperNodePresence
    ) -> None:
        self._store, self._superlink, self._registry, self._supernodes = store, superlink, registry, supernodes

    def restore(self) -> None:
        """Restores the devices of the store when a coordinator starts."""
        capabilities = self._store.get_all_capabilities()
        for record in self._store.list_devices():
            if record.node_id is None:
                self.add(record.device_id, record.public_key)
            else:
                is_supernode = record.role == SUPERNODE
                self._superlink.restore(record.node_id, record.public_key, is_supernode=is_supernode)
                self._registry.add(
                    record.device_id,
                    node_id=record.node_id,
                    role=Role.TRAINER if is_supernode else record.role,
                    groups=record.groups,
                    examples=record.examples,
                    facts=_get_valid_facts(capabilities.get(record.device_id)),
                    was_seen=record.presence is not None,
                )
                if is_supernode:
                    is_present = record.presence in PRESENT_STATES
                    self._supernodes.add(record.node_id, record.device_id, is_present=is_present)

    def add(self, device_id: str, public_key: bytes) -> None:
        """Adds a device that has just joined; it may do so twice."""
        record, capabilities = self._store.get_device(device_id), self._store.get_capabilities(device_id)
        is_supernode, examples = record.role == SUPERNODE, dict(record.examples)
        if capabilities is not None and not is_supernode:
            examples = bound_reported_examples({}, capabilities.shards)
        node_id = self._superlink.register(public_key, is_supernode=is_supernode)
        if record.node_id is None:
            self._remove_previous(device_id, node_id)
            with self._store.batch(durable=True):
                self._store.set_node_id(device_id, node_id)
                self._store.update_device(device_id, examples=examples)
                self._store.record_event("device-joined", f"as {record.role}", at=time.time(), device_id=device_id)
        self._registry.add(
            device_id,
            node_id=node_id,
            role=Role.TRAINER if is_supernode else record.role,
            groups=record.groups,
            examples=examples,
            facts=_get_valid_facts(capabilities),
        )
        if is_supernode:
            self._supernodes.add(node_id, device_id)

    def add_supernode(self, name: str, key: str, *, jobs: Sequence[str], groups: Sequence[str]) -> None:
        """Adds a stock SuperNode of Flower, which takes part in runs of these apps.

        Args:
            name: of the device.
            key: its public key, in OpenSSH's form or PEM.
            jobs: names of the apps' jobs.
            groups: of the device.

        Raises:
            NameTakenError: a device has this name, or this key.
            UsageError: the name, the key, a job or a group makes no sense.
        """
        if validate_slug(name) in {*RESERVED_NAMES, EVALUATOR_NAME}:
            raise NameTakenError(f"the name {name!r} is reserved; choose another")
        if not 1 <= len(jobs) <= MAX_JOBS:
            raise UsageError(f"a SuperNode takes part in 1 to {MAX_JOBS} apps, got {len(jobs)}")
        for job in jobs:
            if not _APP_JOB.match(job):
                raise UsageError(
                    f"the job of an app must be {APP_JOB_PREFIX} and 1 to 80 of a-z, 0-9, '.', '_' and '-', "
                    f"got {job!a:.100}"
                )
        groups = [validate_slug(group, "group") for group in groups]
        public_key, now = parse_supernode_key(key), time.time()
        with self._store.batch(durable=True):
            self._store.add_supernode(name, public_key, groups=groups, examples=dict.fromkeys(jobs, 0), at=now)
            # A board that had this name told of other things.
            self._store.record_capabilities(name, SUPERNODE_FACTS, {}, now)
        self.add(name, public_key)

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
        node_id = self._registry.remove(device_id)
        self._superlink.remove(node_id)
        self._supernodes.remove(node_id)

    def get_signer(self, request: Request) -> str:
        """Returns the board that signed a request.

        Raises:
            NotAllowedError: no board of the fleet; a stock SuperNode's signature covers neither path nor body.
        """
        node_id = self._superlink.api.authenticate(request)
        if node_id in self._superlink.state.supernodes:
            raise NotAllowedError("a SuperNode's signature counts for Flower's messages alone")
        device_id = self._registry.get_device_id(node_id)
        if device_id is None:
            raise NotAllowedError("its device was removed")
        return device_id

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


SendCommand = Callable[[str, Command], None]


class DrainController:
    """Records which devices are drained, and sends them the commands. Thread-safe.

    Args:
        store: has the requests as events.
        registry: gives drained devices no work.
        send_command: sends a command to a device; it may get lost.
        clock: Unix seconds.
    """

    def __init__(
        self, store: Store, registry: DeviceRegistry, send_command: SendCommand, clock: Callable[[], float]
    ) -> None:
        self._store, self._registry, self._send_command, self._clock = store, registry, send_command, clock

    def restore(self) -> None:
        """Restores the drained devices from the store; call it before any device message is handled."""
        for device_id in list_draining_devices(self._store):
            self._registry.set_drained(device_id, drained=True)

    def subscribe(self) -> Callable[[], None]:
        """Sends commands to devices that report the other state; returns a function that ends that."""
        end = self._registry.subscribe(self._on_registry_event)
        for info in self._registry.list_devices():
            self._sync_device(info.device_id, self._registry.get_state(info.device_id))
        return end

    def drain(self, device_id: str) -> None:
        """Gives a device no more work.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        self._request(device_id, drained=True)

    def resume(self, device_id: str) -> None:
        """Gives a device work again.

        Raises:
            NotFoundError: the fleet has no such device.
        """
        self._request(device_id, drained=False)

    def _request(self, device_id: str, *, drained: bool) -> None:
        if self._registry.get_device(device_id) is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet; `edgefl devices list` shows them")
        if self._registry.is_drained(device_id) != drained:
            kind, message = (DRAIN_REQUESTED, "no more work") if drained else (RESUME_REQUESTED, "work again")
            with self._store.batch(durable=True):
                self._store.record_event(kind, message, at=self._clock(), device_id=device_id)
            self._registry.set_drained(device_id, drained=drained)
        self._notify_device(
            device_id, drained=drained
        )  # repeated for a drained device: an earlier command may be lost

    def _on_registry_event(self, event: RegistryEvent) -> None:
        if isinstance(event, PresenceChanged):
            self._sync_device(event.device_id, event.after)

    def _sync_device(self, device_id: str, state: DevicePresence | None) -> None:
        drained = self._registry.is_drained(device_id)
        if (drained and state is DevicePresence.ONLINE) or (not drained and state is DevicePresence.DRAINING):
            self._notify_device(device_id, drained=drained)

    def _notify_device(self, device_id: str, *, drained: bool) -> None:
        kind = CommandKind.DRAIN if drained else CommandKind.RESUME
        log.info("telling %s to %s", device_id, kind)
        self._send_command(device_id, Command(id=f"{kind}-{uuid.uuid4().hex}", kind=kind))


def get_signed_state(capabilities: Mapping[str, Any]) -> Json | None:
    """Returns the `list` of signers that a device reports, and `until` when all is valid; None for neither."""
    installs = capabilities.get("installs")
    installs = installs if isinstance(installs, Mapping) else {}
    signers, ends = (installs.get(name) for name in ("list", "valid_until"))
    signers, ends = (value if isinstance(value, Mapping) else {} for value in (signers, ends))
    version = signers.get("version")
    times = [end for end in (signers.get("expires"), *ends.values()) if _is_number_up_to(end, MAX_TIME)]
    state = {
        "list": version if _is_number_up_to(version, MAX_LIST_VERSION) else None,
        "until": min(times, default=None),
    }
    return {name: value for name, value in state.items() if value is not None} or None


def _is_number_up_to(value: object, limit: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit


def list_old_signatures(signed: Mapping[str, Json], now: float) -> dict[str, str]:
    """Returns the devices whose signatures have expired or expire soon, or whose list is old, each with the reason.

    A list is old where at least two other devices have a newer one: a single one may claim what it likes.

    Args:
        signed: device -> `get_signed_state`.
        now: Unix seconds.
    """
    versions = sorted(state.get("list", 0) for state in signed.values())
    known = versions[-2] if len(versions) > 1 else 0
    reasons = {}
    for device_id, state in signed.items():
        until, version = state.get("until", math.inf), state.get("list", known)
        day = time.strftime("%Y-%m-%d", time.gmtime(until)) if until < math.inf else ""
        if until <= now:
            reasons[device_id] = (
                f"its signatures expired on {day}: sign and send newer ones, or see who holds them back"
            )
        elif version < known:
            reasons[device_id] = f"it has list {version} of signers, others have list {known}: is it held back?"
        elif until <= now + EXPIRY_NOTICE_S:
            reasons[device_id] = f"its signatures expire on {day}: sign and send newer ones"
    return reasons
