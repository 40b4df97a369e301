"""Disconnects a client by session takeover: a connection under its name ends its own.

For brokers without a command for it. Only the CA can issue a certificate with that name, valid for a short time.
"""

from __future__ import annotations

import logging
import socket
import struct
import tempfile
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import BrokerTls, make_client_context
from edgefl.core.errors import BrokerError

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
CERTIFICATE_DAYS = 1 / 24
DISCONNECT = b"\xe0\x00"


def disconnect_client(host: str, port: int, name: str, *, authority: pki.KeyPair, ca: Path) -> bool:
    """Disconnects the client `name`; returns whether that succeeded. It may reconnect unless revoked."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            context = make_client_context(_issue_identity(Path(folder), name, authority, ca))
        context.check_hostname = False  # this machine's own broker; the CA vouches for it
        with (
            socket.create_connection((host, port), timeout=TIMEOUT_S) as raw_socket,
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


def _issue_identity(folder: Path, name: str, authority: pki.KeyPair, ca: Path) -> BrokerTls:
    pair = pki.issue_client_certificate(authority, name, days=CERTIFICATE_DAYS)
    tls = BrokerTls(ca=ca, cert=folder / "cert.pem", key=folder / "key.pem")
    tls.key.touch(mode=0o600)
    tls.key.write_bytes(pair.key_pem)
    tls.cert.write_bytes(pair.cert_pem)
    return tls
