"""Revocation of removed devices and replaced certificates at the broker, and disconnection of their clients.

Their certificates are still valid by themselves, so the broker needs the list. A broker without a command to
disconnect a client is connected to under its name, which ends the client's own session; only the CA can issue a
certificate with that name, valid for a short time.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import Broker, issue_temporary_identity, make_client_context
from edgefl.core.errors import BrokerError
from edgefl.storage.repositories.certificates import list_revoked_serials
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

RENEWED_INTERVAL_S = 120.0
"""Removed devices are revoked at once; replaced certificates together, at most this often."""
TAKEOVER_TIMEOUT_S = 2.0
DISCONNECT = b"\xe0\x00"


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


def disconnect_client(host: str, port: int, name: str, *, authority: pki.KeyPair, ca: Path) -> bool:
    """Disconnects the client `name`; returns whether that succeeded. It may reconnect unless revoked."""
    try:
        with issue_temporary_identity(authority, name, ca=ca) as tls:
            context = make_client_context(tls)
        context.check_hostname = False  # this machine's own broker; the CA vouches for it
        with (
            socket.create_connection((host, port), timeout=TAKEOVER_TIMEOUT_S) as raw_socket,
            context.wrap_socket(raw_socket) as tls_socket,
        ):
            tls_socket.sendall(_encode_connect(name))
            is_accepted = bool(tls_socket.recv(4))
            tls_socket.sendall(DISCONNECT)
    except (OSError, BrokerError) as error:
        log.warning("%s may still be connected to the broker, where it is not heard: %s", name, error)
        return False
    if not is_accepted:
        log.warning("%s may still be connected to the broker, which hung up on who spoke under that name", name)
    return is_accepted


def _encode_connect(name: str) -> bytes:
    """Returns the first packet of MQTT 3.1.1, with a clean session and without a will."""
    text = name.encode()
    body = struct.pack("!H4sBBHH", 4, b"MQTT", 4, 0x02, 10, len(text)) + text
    return bytes([0x10, len(body)]) + body
