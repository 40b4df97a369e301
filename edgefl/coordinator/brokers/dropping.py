"""Drops a client of a broker that has no command for it: whoever connects under its name takes its place.

Only the CA can make a certificate with that name, and it is good for the moment in which the old connection ends.
"""

from __future__ import annotations

import logging
import socket
import struct
import tempfile
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import BrokerTls, client_context
from edgefl.errors import BrokerError

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
LIFE_DAYS = 1 / 24
DISCONNECT = b"\xe0\x00"


def drop_client(host: str, port: int, name: str, *, authority: pki.KeyPair, ca: Path) -> bool:
    """Returns whether nobody is connected as `name` any more; whoever was has to connect anew, if it is let in."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            context = client_context(_identity(Path(folder), name, authority, ca))
        context.check_hostname = False  # this machine's own broker; the CA vouches for it
        with (
            socket.create_connection((host, port), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain) as secured,
        ):
            secured.sendall(_connect(name))
            is_in = bool(secured.recv(4))
            secured.sendall(DISCONNECT)
    except (OSError, BrokerError) as error:
        log.warning("%s may still be connected to the broker, where it is not heard: %s", name, error)
        return False
    if not is_in:
        log.warning("%s may still be connected to the broker, which hung up on who spoke under that name", name)
    return is_in


def _connect(name: str) -> bytes:
    """Returns the first packet of MQTT 3.1.1, with a clean session and without a will."""
    text = name.encode()
    body = struct.pack("!H4sBBHH", 4, b"MQTT", 4, 0x02, 10, len(text)) + text
    return bytes([0x10, len(body)]) + body


def _identity(folder: Path, name: str, authority: pki.KeyPair, ca: Path) -> BrokerTls:
    pair = pki.issue_client(authority, name, days=LIFE_DAYS)
    tls = BrokerTls(ca=ca, cert=folder / "cert.pem", key=folder / "key.pem")
    tls.key.touch(mode=0o600)
    tls.key.write_bytes(pair.key_pem)
    tls.cert.write_bytes(pair.cert_pem)
    return tls
