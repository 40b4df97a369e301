"""Mutual TLS between boards with the client certificates of the fleet's CA.

A device certificate is valid for clients only: were it valid for servers too, any board could impersonate the
coordinator. OpenSSL rejects such certificates at the dialled end, so the dialling side verifies them itself: it
accepts the handshake, in which the other end proves possession of the key, and verifies the certificate as a client's
before any data is sent or trusted. The listening side lets OpenSSL verify, and then does the same. Every certificate
that a device of the fleet ever got is accepted.

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

from edgefl.core.errors import NetworkError, NotJoinedError
from edgefl.core.protocol import single_certificate
from edgefl.system.https_client import X509_V_FLAG_NO_CHECK_TIME


class PeerTlsFiles(Protocol):
    """Paths of PEM files: the fleet's CA, this device's certificate and its key, as in `DeviceStateDir`."""

    @property
    def ca(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def key(self) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """TLS contexts for each side of a peer connection, and the fleet's CA."""

    authority: x509.Certificate
    client_context: ssl.SSLContext
    server_context: ssl.SSLContext

    @classmethod
    def load(cls, files: PeerTlsFiles, device_id: str) -> PeerTls:
        """Returns the peer TLS configuration of device `device_id`.

        Raises:
            NotJoinedError: the enrolment files are missing, damaged, or of another device.
        """
        try:
            ca_pem = single_certificate(files.ca.read_bytes())
            authority = x509.load_pem_x509_certificate(ca_pem)
            certificate_name = verify_certificate(ssl.PEM_cert_to_DER_cert(files.cert.read_text("ascii")), authority)
            client_context, server_context = _make_client_context(), _make_server_context(ca_pem.decode("ascii"))
            for context in (client_context, server_context):
                context.load_cert_chain(files.cert, files.key)
        except (OSError, ValueError, KeyError, x509.InvalidVersion, NetworkError) as error:
            raise NotJoinedError(
                f"the device's certificates in {files.ca.parent} cannot be used ({error}); join again"
            ) from None
        if certificate_name != device_id:
            raise NotJoinedError(
                f"{files.cert} is the certificate of {certificate_name!r}, not of this device, {device_id!r}"
            )
        return cls(authority=authority, client_context=client_context, server_context=server_context)

    def verify_peer(self, connection: ssl.SSLSocket) -> str:
        """Returns the device id of the other end, after the handshake.

        Raises:
            NetworkError: it has no device certificate of this fleet.
        """
        certificate = connection.getpeercert(binary_form=True)
        if certificate is None:
            raise NetworkError("it shows no certificate")
        return verify_certificate(certificate, self.authority)


def verify_certificate(der: bytes, authority: x509.Certificate) -> str:
    """Returns the common name of a client certificate signed by this CA, ignoring dates.

    Raises:
        NetworkError: it is invalid, or has not exactly one name.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        both_valid = max(certificate.not_valid_before_utc, authority.not_valid_before_utc)
        verifier = PolicyBuilder().store(Store([authority])).time(both_valid).build_client_verifier()
        verifier.verify(certificate, [])
        names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except Exception as error:
        # Untrusted bytes, for which some versions of the parser raise KeyError: reject whatever it is.
        raise NetworkError(f"it shows no device certificate of this fleet: {error}") from error
    if len(names) != 1 or not isinstance(names[0], str):
        raise NetworkError(f"its certificate must have one common name, got {names!r}")
    return names[0]


def wrap_tls(plain_socket: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> ssl.SSLSocket:
    """Returns the TLS connection before its handshake; `plain_socket` is closed or taken over."""
    # Closing a socket that was taken over does nothing.
    with plain_socket:
        # Small messages are acknowledged one by one: Nagle's algorithm would cost 40 ms each.
        plain_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(plain_socket, server_side=is_server, do_handshake_on_connect=False)


def shutdown_socket(connection: socket.socket) -> None:
    """Shuts a connection down from another thread; its I/O fails and its thread closes it."""
    # Not SSLSocket.shutdown, which would remove the encryption while that thread uses it.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _make_client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `PeerTls.verify_peer` checks: see the module
    return _harden(context)


def _make_server_context(ca_pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(cadata=ca_pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VerifyFlags(X509_V_FLAG_NO_CHECK_TIME)
    context.num_tickets = 0
    return _harden(context)


def _harden(context: ssl.SSLContext) -> ssl.SSLContext:
    """Returns the context without old protocol versions and renegotiation."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    return context
