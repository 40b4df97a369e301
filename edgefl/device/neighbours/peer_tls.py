"""TLS from board to board: both ends show the client certificate of their join, and only the fleet's CA counts.

A device certificate is good for clients alone, and stays so: were it good for servers too, any board could take the
place of the coordinator under a name of its choice. OpenSSL refuses such certificates at the end that was dialled;
who dials checks them itself: it lets the handshake pass, in which the other end proves that it has the certificate's
key, and checks the certificate as one of a client before it says or believes anything. Who listens has OpenSSL check,
and then does the same. Every certificate that a device of the fleet ever got will do.

As everywhere on a board, dates are not checked.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from edgefl.device.trust import X509_V_FLAG_NO_CHECK_TIME
from edgefl.errors import NetworkError, NotJoinedError
from edgefl.protocol import only_certificate


class TlsFiles(Protocol):
    """Paths of PEM files: the fleet's CA, this device's certificate and its key; `DeviceState` has them."""

    @property
    def ca(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def key(self) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """The fleet's CA, and a context for each side of a connection."""

    authority: x509.Certificate
    dialling: ssl.SSLContext
    listening: ssl.SSLContext

    @classmethod
    def load(cls, files: TlsFiles, device_id: str) -> PeerTls:
        """Returns what the device `device_id` talks to other boards with.

        Raises:
            NotJoinedError: the files of the join are missing, damaged, or of another device.
        """
        try:
            ca_pem = only_certificate(files.ca.read_bytes())
            authority = x509.load_pem_x509_certificate(ca_pem)
            own = verified_name(ssl.PEM_cert_to_DER_cert(files.cert.read_text("ascii")), authority)
            dialling, listening = _dialling_context(), _listening_context(ca_pem.decode("ascii"))
            for context in (dialling, listening):
                context.load_cert_chain(files.cert, files.key)
        except (OSError, ValueError, KeyError, x509.InvalidVersion, NetworkError) as error:
            raise NotJoinedError(
                f"the device's certificates in {files.ca.parent} cannot be used ({error}); join again"
            ) from None
        if own != device_id:
            raise NotJoinedError(f"{files.cert} is the certificate of {own!r}, not of this device, {device_id!r}")
        return cls(authority=authority, dialling=dialling, listening=listening)

    def peer(self, connection: ssl.SSLSocket) -> str:
        """Returns the device id of the other end, after the handshake.

        Raises:
            NetworkError: it has not shown a device certificate of this fleet.
        """
        shown = connection.getpeercert(binary_form=True)
        if shown is None:
            raise NetworkError("it shows no certificate")
        return verified_name(shown, self.authority)


def verified_name(der: bytes, authority: x509.Certificate) -> str:
    """Returns the common name of a client certificate that this CA has signed, at whatever date.

    Raises:
        NetworkError: it is none, or has not one name.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        both_valid = max(certificate.not_valid_before_utc, authority.not_valid_before_utc)
        verifier = PolicyBuilder().store(Store([authority])).time(both_valid).build_client_verifier()
        verifier.verify(certificate, [])
        names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except Exception as error:
        # Foreign bytes, from which some versions of the parser make a KeyError: whatever it is, it is none of ours.
        raise NetworkError(f"it shows no device certificate of this fleet: {error}") from error
    if len(names) != 1 or not isinstance(names[0], str):
        raise NetworkError(f"its certificate must have one common name, got {names!r}")
    return names[0]


def wrap(plain: socket.socket, context: ssl.SSLContext, *, is_listener: bool) -> ssl.SSLSocket:
    """Returns the connection under TLS, its handshake still to come; `plain` is closed or taken over."""
    # Closing what was taken over does nothing.
    with plain:
        # A message of a few bytes is answered before the next one leaves: waiting to fill a packet would cost 40 ms.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(plain, server_side=is_listener, do_handshake_on_connect=False)


def shut(connection: socket.socket) -> None:
    """Ends a connection from outside: the thread that reads or writes there gets an error and closes it."""
    # Not SSLSocket.shutdown, which takes the encryption away under the hands of that thread.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _dialling_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `PeerTls.peer` checks: see the module
    return _hardened(context)


def _listening_context(ca_pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(cadata=ca_pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VerifyFlags(X509_V_FLAG_NO_CHECK_TIME)
    context.num_tickets = 0
    return _hardened(context)


def _hardened(context: ssl.SSLContext) -> ssl.SSLContext:
    """Returns the context without old versions, and without ways to change the certificate later."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    return context
