"""Rotation of all certificates of a fleet; devices are asked until they have renewed, over restarts too."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, issue_own_certificates
from edgefl.coordinator.enrolment.server_certificates import renew_own_certificates
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import DeviceRegistry, RegistryEvent
from edgefl.core.protocol import Command, CommandKind
from edgefl.storage.repositories.certificates import (
    ROTATION_REQUESTED,
    list_devices_due_for_rotation,
    record_issued_certificate,
)
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 60.0
SendCommand = Callable[[str, Command], None]


class CertificateRotation:
    """Tracks devices that have yet to renew their certificate, and renews the coordinator's own. Thread-safe.

    Args:
        directory: has the coordinator's own certificates.
        store: records rotations as events.
        registry: of the present devices.
        send_command: sends a command to a device; it may get lost.
        on_own_renewed: called after the coordinator's own certificates are renewed, to reload them.
        clock: Unix seconds.
        monotonic: seconds, for the poll interval.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        store: Store,
        registry: DeviceRegistry,
        send_command: SendCommand,
        on_own_renewed: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._store, self._registry = directory, store, registry
        self._send_command, self._on_own_renewed, self._clock = send_command, on_own_renewed, clock
        self._due = set(list_devices_due_for_rotation(store))
        self._lock, self._monotonic = threading.Lock(), monotonic
        self._next_poll_s = monotonic() + POLL_INTERVAL_S

    def subscribe(self) -> Callable[[], None]:
        """Asks devices when they arrive; returns a function that ends that."""
        return self._registry.subscribe(self._on_registry_event)

    def rotate(self) -> list[str]:
        """Renews the coordinator's own certificates and returns the devices asked to renew theirs."""
        now = self._clock()
        former = get_own_serial(self._directory)
        issue_own_certificates(self._directory)
        record_own_certificate(self._directory, self._store, previous_serial=former, now=self._clock())
        with self._store.batch(durable=True):
            self._store.record_event(ROTATION_REQUESTED, "all certificates are renewed", at=now)
        with self._lock:
            self._due = {info.device_id for info in self._registry.list_devices()}
            device_ids = sorted(self._due)
        self._on_own_renewed()
        for device_id in device_ids:
            self._request_renewal(device_id)
        return device_ids

    def mark_renewed(self, device_id: str) -> None:
        """Records that a device has a new certificate."""
        with self._lock:
            self._due.discard(device_id)

    def poll(self) -> None:
        """Renews the coordinator's own certificates when due, and asks due devices again; call it often."""
        if self._monotonic() < self._next_poll_s:
            return
        self._next_poll_s = self._monotonic() + POLL_INTERVAL_S
        former = get_own_serial(self._directory)
        if renew_own_certificates(self._directory, now=self._clock()):
            log.info("the coordinator's certificates are renewed")
            record_own_certificate(self._directory, self._store, previous_serial=former, now=self._clock())
            self._on_own_renewed()
        with self._lock:
            due = [name for name in self._due if self._registry.get_device(name) is not None]
        for device_id in due:
            if self._registry.get_schedulable(device_id) is not None:
                self._request_renewal(device_id)

    def _on_registry_event(self, event: RegistryEvent) -> None:
        if (
            isinstance(event, PresenceChanged)
            and event.device_id in self._due
            and self._registry.get_schedulable(event.device_id)
        ):
            self._request_renewal(event.device_id)

    def _request_renewal(self, device_id: str) -> None:
        self._send_command(device_id, Command(id=f"renew-{uuid.uuid4().hex}", kind=CommandKind.RENEW))


def record_own_certificate(
    directory: CoordinatorDirectory, store: Store, *, previous_serial: str | None, now: float
) -> None:
    """Records the coordinator's present client certificate; the former one is no longer valid."""
    cert_pem = directory.client_cert.read_bytes()
    record_issued_certificate(
        store,
        serial=pki.get_serial(cert_pem),
        expires_at=pki.get_expiry(cert_pem),
        at=now,
        previous_serial=previous_serial,
    )


def get_own_serial(directory: CoordinatorDirectory) -> str | None:
    """Returns the serial of the coordinator's client certificate, None if there is none."""
    path: Path = directory.client_cert
    return pki.get_serial(path.read_bytes()) if path.exists() else None
