"""Certificates over time: renewal windows, the coordinator's own, and the rotation of all certificates of a fleet."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.directory import CoordinatorDirectory, issue_own_certificates
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import DeviceRegistry, RegistryEvent
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import Command, CommandKind
from edgefl.storage.repositories.certificates import (
    ROTATION_REQUESTED,
    list_devices_due_for_rotation,
    record_issued_certificate,
)
from edgefl.storage.store import Store
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

DAY_S = 86_400.0
CA_RENEWAL_MARGIN_S = 5 * 365 * DAY_S
"""With less of its lifetime left the CA's certificate is renewed, at the next start of the coordinator."""
POLL_INTERVAL_S = 60.0

SendCommand = Callable[[str, Command], None]


def compute_renewal_window(lifetime_s: float, now: float, *, ca_ends_at: float) -> tuple[float, float]:
    """Returns (earliest, latest) expiry in Unix seconds; a certificate that ends outside is due for renewal.

    The first is a third of the lifetime ahead, but not after the CA's end, since no certificate can end later; one
    that ends after the second was issued with a longer lifetime.
    """
    now = pki.clamp_issue_time(now)
    return min(now + lifetime_s / 3, ca_ends_at), now + lifetime_s + DAY_S


def renew_ca(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Renews the CA's certificate if it ends soon, and returns whether it did; its key stays.

    Devices and operators trust the key, so they need no update. Call it before the certificate is loaded.
    """
    authority = directory.load_authority()
    if pki.get_expiry(authority.cert_pem) - pki.clamp_issue_time(now) >= CA_RENEWAL_MARGIN_S:
        return False
    write_atomic(directory.ca_cert, pki.renew_authority(authority).cert_pem)
    return True


def renew_own_certificates(directory: CoordinatorDirectory, *, now: float) -> bool:
    """Renews the server's and the coordinator's client certificate if due, and returns whether it did.

    They are due at two thirds of their lifetime, when it is longer than the present setting, or when one does not
    match its key, after a power cut between writing the two.
    """
    pairs = ((directory.server_cert, directory.server_key), (directory.client_cert, directory.client_key))
    lifetime_s = directory.certificates.server_days * DAY_S
    window = compute_renewal_window(lifetime_s, now, ca_ends_at=pki.get_expiry(directory.ca_cert.read_bytes()))
    if all(_is_current(cert, key, *window) for cert, key in pairs):
        return False
    issue_own_certificates(directory)
    return True


def list_own_expiries(directory: CoordinatorDirectory) -> dict[str, float]:
    """Returns the expiry of each of the coordinator's certificates, in Unix seconds."""
    files = {"ca": directory.ca_cert, "server": directory.server_cert, "coordinator": directory.client_cert}
    return {name: pki.get_expiry(path.read_bytes()) for name, path in files.items()}


def _is_current(cert: Path, key: Path, earliest: float, latest: float) -> bool:
    try:
        cert_pem, key_pem = cert.read_bytes(), key.read_bytes()
        return pki.is_key_pair(cert_pem, key_pem) and earliest <= pki.get_expiry(cert_pem) <= latest
    except (OSError, ConfigError):
        return False


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
        self._lock, self._replacement_lock, self._monotonic = threading.Lock(), threading.Lock(), monotonic
        self._next_poll_s = monotonic() + POLL_INTERVAL_S

    def subscribe(self) -> Callable[[], None]:
        """Asks devices when they arrive; returns a function that ends that."""
        return self._registry.subscribe(self._on_registry_event)

    def rotate(self) -> list[str]:
        """Renews the coordinator's own certificates and returns the devices asked to renew theirs."""
        now = self._clock()
        self._replace_own(now, only_if_due=False)
        with self._store.batch(durable=True):
            self._store.record_event(ROTATION_REQUESTED, "all certificates are renewed", at=now)
        with self._lock:
            self._due = set(list_devices_due_for_rotation(self._store))
            device_ids = sorted(self._due)
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
        if self._replace_own(self._clock(), only_if_due=True):
            log.info("the coordinator's certificates are renewed")
        with self._lock:
            due = [name for name in self._due if self._registry.get_device(name) is not None]
        for device_id in due:
            if self._registry.is_reachable(device_id):
                self._request_renewal(device_id)

    def _replace_own(self, now: float, *, only_if_due: bool) -> bool:
        """Renews the coordinator's own certificates, one caller at a time: certificate and key are two files."""
        with self._replacement_lock:
            is_replaced = replace_own_certificates(self._directory, self._store, now=now, only_if_due=only_if_due)
            if is_replaced:
                self._on_own_renewed()
        return is_replaced

    def _on_registry_event(self, event: RegistryEvent) -> None:
        if (
            isinstance(event, PresenceChanged)
            and event.device_id in self._due
            and self._registry.is_reachable(event.device_id)
        ):
            self._request_renewal(event.device_id)

    def _request_renewal(self, device_id: str) -> None:
        self._send_command(device_id, Command(id=f"renew-{uuid.uuid4().hex}", kind=CommandKind.RENEW))


def replace_own_certificates(
    directory: CoordinatorDirectory, store: Store, *, now: float, only_if_due: bool = False
) -> bool:
    """Replaces the coordinator's own certificates, and returns whether it did; the former client's is revoked."""
    previous_serial = get_own_serial(directory)
    if not only_if_due:
        issue_own_certificates(directory)
    elif not renew_own_certificates(directory, now=now):
        return False
    cert_pem = directory.client_cert.read_bytes()
    record_issued_certificate(
        store,
        serial=pki.get_serial(cert_pem),
        expires_at=pki.get_expiry(cert_pem),
        at=now,
        previous_serial=previous_serial,
    )
    return True


def get_own_serial(directory: CoordinatorDirectory) -> str | None:
    """Returns the serial of the coordinator's client certificate, None if there is none."""
    path: Path = directory.client_cert
    return pki.get_serial(path.read_bytes()) if path.exists() else None
