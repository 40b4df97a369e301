"""Key and certificate of a device: signing requests, renewal, and recovery of a lost renewal.

The coordinator decides when to renew: the board's own clock may be in 1970. The request is signed like every other
one, and that signature has no dates: a board switched off for longer than its certificate's validity recovers by
itself. The new key is on disk before it is sent. So when the reply is lost after the coordinator registered the new
key, the device finds its old key rejected and repeats the request with the new one.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgefl.core.errors import ClonedError, EdgeflError, JoinError, NetworkError, NotAllowedError, NotJoinedError
from edgefl.core.protocol import certificate_fingerprint
from edgefl.core.types import Json
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.atomic_files import write_atomic
from edgefl.system.https_client import CoordinatorInfo, SignRequest, fetch_coordinator_info, post_json

log = logging.getLogger(__name__)

RENEW_ROUTE, REENROLL_ROUTE = "/edgefl/v1/renew", "/edgefl/v1/re-enroll"
POLL_INTERVAL_S = 3600.0
"""Poll interval of the coordinator's renewal window."""
OFFLINE_POLL_INTERVAL_S = 60.0
"""The same while the broker rejects this device, possibly because of its certificate."""
RETRY_INTERVAL_S = 300.0


def parse_certificate(response: Json, key_pem: bytes) -> bytes:
    """Returns the certificate (PEM) of a coordinator's reply; raises `NetworkError` when it is for another key."""
    cert_pem = str(response.get("certificate", "")).encode()
    public_key = (
        _load_key(key_pem)
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public_key)
    if certificate_fingerprint(cert_pem) != digest.finalize().hex():
        raise NetworkError("the coordinator answered with a certificate for another key")
    return cert_pem


def create_key() -> bytes:
    """Returns a new private key, EC P-256, as PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:  # it is encrypted, or of an unknown kind
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise JoinError("the key in the state directory is no EC key; remove the directory and join anew")
    return key


def export_public_key(key_pem: bytes) -> bytes:
    """Returns the public half of a private key, as PEM."""
    return (
        _load_key(key_pem)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def create_signing_request(key_pem: bytes, name: str) -> bytes:
    """Returns a certificate request (PEM) for a key, signed with it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_load_key(key_pem), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


class CertificateRenewal:
    """Certificate renewal; used by the agent's main thread, only `request` from others.

    Args:
        state: holds key and certificate.
        tls_context: verifies the coordinator.
        make_signer: returns what signs requests with a private key (PEM).
        monotonic: seconds, for waiting.
    """

    def __init__(
        self,
        state: DeviceStateDir,
        tls_context: ssl.SSLContext,
        *,
        make_signer: Callable[[bytes], SignRequest],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._tls_context, self._make_signer, self._monotonic = (
            state,
            tls_context,
            make_signer,
            monotonic,
        )
        self._is_requested = threading.Event()
        self._window: tuple[float, float] | None = None
        self._polled_s = self._next_try_s = -POLL_INTERVAL_S
        self._expires_at: float | None = None

    def request(self) -> None:
        """Makes a renewal due."""
        self._next_try_s = self._monotonic()
        self._is_requested.set()

    def on_coordinator_info(self, info: CoordinatorInfo) -> None:
        """Stores the coordinator's renewal window."""
        self._window, self._polled_s = info.renewal_window, self._monotonic()

    def is_due(self) -> bool:
        """Returns whether the certificate is due for renewal."""
        if self._monotonic() < self._next_try_s:
            return False
        if self._is_requested.is_set():
            return True
        if self._window is None:
            return False
        elapsed_s = self._monotonic() - self._polled_s
        earliest, latest = (limit_s + elapsed_s for limit_s in self._window)
        return not earliest <= self._get_expiry() <= latest

    def poll(self, address: str, *, is_connected: bool) -> None:
        """Polls the renewal window of the coordinator, more often while the broker rejects this device.

        Raises:
            NetworkError: no answer, or another server's.
            ClonedError: it rejects this device as a clone.
        """
        every_s = POLL_INTERVAL_S if is_connected else OFFLINE_POLL_INTERVAL_S
        if self._window is not None and self._monotonic() - self._polled_s >= every_s:
            try:
                self.on_coordinator_info(fetch_coordinator_info(address, self._tls_context))
            except (NetworkError, ClonedError):
                raise
            except EdgeflError as error:
                raise NetworkError(str(error)) from error

    def renew(self, address: str) -> bool:
        """Returns whether the key and certificate were replaced; if not, a later call retries."""
        self._next_try_s = self._monotonic() + RETRY_INTERVAL_S
        try:
            current_key = self._state.key.read_bytes()
            key_pem = self._load_pending_key(current_key) or create_key()
            write_atomic(self._state.pending_key, key_pem)
            self._request_certificate(address, key_pem, signed_by=current_key)
        except (EdgeflError, OSError, ValueError) as error:
            log.warning("cannot renew the certificate: %s; trying again", error)
            return False
        return True

    def recover(self, address: str) -> bool:
        """Returns whether the device is registered again.

        Tries the key of a renewal whose reply was lost, then re-enrolment with the present key, for a coordinator
        restored from an older backup.

        Raises:
            NetworkError: no answer.
            StoreError: the state cannot be written.
        """
        return self._resume_renewal(address) or self._reenroll(address)

    def _reenroll(self, address: str) -> bool:
        """Presents a certificate that the coordinator may not know."""
        try:
            key_pem = self._state.key.read_bytes()
            body = {
                "csr": create_signing_request(key_pem, self._state.device_id).decode(),
                "certificate": export_certificate(self._state.cert.read_bytes()),
            }
            post_json(address, self._tls_context, REENROLL_ROUTE, body)
        except (EdgeflError, OSError, ValueError) as error:
            log.debug("not re-enrolled: %s", error)
            return False
        log.info("the coordinator did not know this device's newest certificate, and has taken note of it")
        return True

    def _resume_renewal(self, address: str) -> bool:
        if not self._state.pending_key.exists():
            return False
        key_pem = self._state.pending_key.read_bytes()
        try:
            self._request_certificate(address, key_pem, signed_by=key_pem)
        except NotAllowedError:
            return False  # both keys are rejected: the device was removed, or the clock is off
        except ValueError as error:
            log.warning("the key of a renewal is damaged and given up: %s", error)
            self._state.pending_key.unlink()
            return False
        return True

    def _load_pending_key(self, current_key_pem: bytes) -> bytes | None:
        """Returns the key of an interrupted renewal, unless it is the current key."""
        path = self._state.pending_key
        key_pem = path.read_bytes() if path.exists() else None
        return (
            None if key_pem is None or export_public_key(key_pem) == export_public_key(current_key_pem) else key_pem
        )

    def _request_certificate(self, address: str, key_pem: bytes, *, signed_by: bytes) -> None:
        body = {"csr": create_signing_request(key_pem, self._state.device_id).decode()}
        reply = post_json(address, self._tls_context, RENEW_ROUTE, body, sign=self._make_signer(signed_by))
        self._state.save_certificate(key_pem=key_pem, cert_pem=parse_certificate(reply, key_pem))
        self._is_requested.clear()
        self._expires_at = None
        log.info("the certificate is renewed")

    def _get_expiry(self) -> float:
        """Returns the expiry of the certificate; an unreadable one counts as expired."""
        if self._expires_at is None:
            try:
                self._expires_at = parse_expiry(self._state.cert.read_bytes())
            except (OSError, NotJoinedError):
                return 0.0
        return self._expires_at


def parse_expiry(cert_pem: bytes) -> float:
    """Returns the expiry of a certificate, in unix seconds.

    Raises:
        NotJoinedError: it is malformed.
    """
    return _load_certificate(cert_pem).not_valid_after_utc.timestamp()


def export_certificate(pem: bytes) -> str:
    """Returns the certificate (PEM) of a file that may hold its key as well.

    Raises:
        NotJoinedError: there is none.
    """
    return _load_certificate(pem).public_bytes(serialization.Encoding.PEM).decode()


def _load_certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, KeyError, x509.InvalidVersion) as error:
        raise NotJoinedError(f"the device's certificate cannot be read: {error}; join again") from None
