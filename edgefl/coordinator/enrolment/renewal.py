"""Renewal of device certificates without a new token: `renew`, and `re-enroll` after a restore.

`POST /edgefl/v1/renew` is signed with the device's present key. A device sends a certificate request, usually for a
new key; from the answer on that key is the device's, for MQTT and for signing alike, and its membership stays. A
repeated request, since the answer was lost, gets the same answer; it is then signed with the new key, for the old one
is no longer valid.

`POST /edgefl/v1/re-enroll` re-enrols a device with a certificate not in the store. The store has every certificate
that it has issued. One with the fleet's signature that is not among them was issued after the backup that the
coordinator was restored from. Its device is admitted with its present key; of two such certificates of one
device, one a renewal of the other, the one that ends last is valid.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from edgefl.coordinator import pki
from edgefl.coordinator.auth import AccessCheck, RateLimiter, RecordRejection, ignore_rejection
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.enrolment_service import (
    REISSUE_WINDOW_S,
    IssuedCertificate,
    add_unauthenticated_route,
    encode_public_key,
    parse_pem,
    read_limited_body,
)
from edgefl.core.errors import EdgeflError, JoinError, NetworkError, NotAllowedError, TooManyTriesError
from edgefl.core.protocol import PROTOCOL_VERSION, load_json
from edgefl.core.types import Json
from edgefl.storage.repositories.certificates import CERTIFICATE_REENROLLED, is_known_certificate, renew_certificate
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

MAX_RENEWALS = 5
"""Maximum number within `REISSUE_WINDOW_S`: every certificate is stored until it expires."""


@dataclass(slots=True, kw_only=True)
class RenewalService:
    """Signs new certificates for devices of the fleet, and records those issued after a backup. Thread-safe.

    `on_renewed(device_id, public_key)` and `on_reenrolled`, likewise, are called when the store has the new key, and
    before the device is answered.
    """

    directory: CoordinatorDirectory
    store: Store
    on_renewed: Callable[[str, bytes], None]
    on_reenrolled: Callable[[str, bytes], None]
    clock: Callable[[], float]
    _recent: dict[str, list[IssuedCertificate]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, device_id: str, body: bytes) -> Json:
        """Renews the certificate of an authenticated device and returns the answer for it.

        Raises:
            JoinError: the request is damaged or does not prove its key.
            NameTakenError: another device has this key.
            TooManyTriesError: it had `MAX_RENEWALS` within `REISSUE_WINDOW_S`.
            NetworkError: the request is malformed.
        """
        csr = parse_pem(load_json(body), "csr")
        key = encode_public_key(pki.verify_request(csr))
        with self._lock:
            since = self.clock() - REISSUE_WINDOW_S
            self._recent = {name: kept for name, kept in self._recent.items() if kept[-1][2] > since}
            recent = self._recent.get(device_id)
            certificate = recent[-1][1] if recent and recent[-1][0] == key else self._renew(device_id, csr, key)
        return {"v": PROTOCOL_VERSION, "device_id": device_id, "certificate": certificate.decode()}

    def _renew(self, device_id: str, csr: bytes, key: bytes) -> bytes:
        now = self.clock()
        recent = [one for one in self._recent.get(device_id, ()) if one[2] > now - REISSUE_WINDOW_S]
        if len(recent) >= MAX_RENEWALS:
            raise TooManyTriesError(
                f"{device_id} has renewed its certificate {len(recent)} times "
                f"in {REISSUE_WINDOW_S / 60:g} minutes; try again later"
            )
        days = self.directory.certificates.client_days
        certificate = pki.sign_request(self.directory.load_authority(), csr, device_id, days=days)
        renew_certificate(
            self.store, device_id, public_key=key, serial=pki.get_serial(certificate),
            expires_at=pki.get_expiry(certificate), at=now,
        )  # fmt: skip
        self.on_renewed(device_id, key)
        log.info("%s has a new certificate, for %g days", device_id, days)
        self._recent[device_id] = [*recent, (key, certificate, now)]
        return certificate

    def reenroll(self, body: bytes) -> Json:
        """Re-enrols a device and returns the answer for it.

        Raises:
            NetworkError: the request is malformed.
            JoinError: its certificate is none of this fleet, or not its own.
            NotAllowedError: the certificate was known before, or has ended.
            NotFoundError: no such device is in the fleet.
            NameTakenError: another device has its key.
        """
        device_id, key, certificate = _parse_certificate(load_json(body), self.directory.load_authority().cert_pem)
        serial, ends_at = f"{certificate.serial_number:x}", certificate.not_valid_after_utc.timestamp()
        if ends_at <= self.clock():
            raise NotAllowedError(f"the certificate of {device_id} has ended; join again with a new token")
        with self._lock:
            if is_known_certificate(self.store, device_id, serial=serial, expires_at=ends_at):
                raise NotAllowedError(f"this certificate of {device_id} counts no more, or its key is known")
            renew_certificate(
                self.store, device_id, public_key=key, serial=serial, expires_at=ends_at, at=self.clock(),
                kind=CERTIFICATE_REENROLLED,
            )  # fmt: skip
            self.on_reenrolled(device_id, key)
        log.info("%s is re-enrolled: its certificate was issued after the backup", device_id)
        return {"v": PROTOCOL_VERSION, "device_id": device_id}


def renewal_router(
    service: RenewalService,
    *,
    device_check: AccessCheck,
    rate_limiter: RateLimiter | None = None,
    record_rejection: RecordRejection = ignore_rejection,
) -> APIRouter:
    """Returns the routes of a renewal, which needs a known signature, and of a re-enrolment, which needs none.

    `device_check` admits requests signed by a device of the fleet. Failed re-enrolments are counted by address, and
    `record_rejection` is called with them.
    """
    router = APIRouter(prefix="/edgefl/v1")

    @router.post("/renew", dependencies=[Depends(device_check)])
    async def renew(request: Request) -> Json:
        body = await read_limited_body(request)
        return await run_in_threadpool(service.renew, request.state.device_id, body)

    add_unauthenticated_route(
        router,
        "/re-enroll",
        lambda body: service.reenroll(body),  # noqa: PLW0108 as there
        "certificate",
        _is_bad_attempt,
        rate_limiter,
        record_rejection,
    )
    return router


def _is_bad_attempt(error: EdgeflError) -> bool:
    return isinstance(error, JoinError | NetworkError | NotAllowedError)


def _parse_certificate(value: Json, ca_pem: bytes) -> tuple[str, bytes, x509.Certificate]:
    """Returns device id, public key and the presented certificate, whose key the certificate request proves."""
    csr, certificate_pem = parse_pem(value, "csr"), parse_pem(value, "certificate")
    authority = x509.load_pem_x509_certificate(ca_pem)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        certificate.verify_directly_issued_by(authority)
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except (*pki.PARSE_ERRORS, InvalidSignature, x509.ExtensionNotFound) as error:
        raise JoinError(f"the certificate is none of this fleet: {error!r}") from None
    request_key = encode_public_key(pki.verify_request(csr))
    if request_key != key or ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        raise JoinError("the certificate is not that of the device which shows it")
    return str(name.value), key, certificate
