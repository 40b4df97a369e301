"""Renewal of certificates without enrolling again: `POST /edgefl/v1/renew`, signed with the device's present key.

A device sends a certificate request, usually for a new key; from the answer on that key is the device's, for MQTT and
for signing alike, and its membership stays. A repeated request, since the answer was lost, gets the same answer; it
is then signed with the new key, for the old one is no longer valid.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from edgefl.coordinator import pki
from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.enrolment_service import REISSUE_WINDOW_S
from edgefl.coordinator.enrolment.request_handling import encode_public_key, parse_pem, read_limited_body
from edgefl.core.errors import TooManyTriesError
from edgefl.core.protocol import PROTOCOL_VERSION, load_json
from edgefl.core.types import Json
from edgefl.storage.repositories.certificates import renew_certificate
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

MAX_RENEWALS = 5
"""Maximum number within `REISSUE_WINDOW_S`: every certificate is stored until it expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenewedCertificate:
    public_key: bytes
    certificate: bytes
    renewed_at: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class RenewalService:
    """Signs new certificates for devices of the fleet. Thread-safe.

    `on_renewed(device_id, public_key)` is called when the store has the new key, and before the device is answered.
    """

    directory: CoordinatorDirectory
    store: Store
    on_renewed: Callable[[str, bytes], None]
    clock: Callable[[], float]
    _renewed: dict[str, _RenewedCertificate] = field(default_factory=dict)
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
            self._renewed = {
                name: certificate for name, certificate in self._renewed.items() if certificate.renewed_at[-1] > since
            }
            renewed = self._renewed.get(device_id)
            if renewed is None or renewed.public_key != key:
                renewed = self._renew(device_id, csr, key, renewed)
        return {"v": PROTOCOL_VERSION, "device_id": device_id, "certificate": renewed.certificate.decode()}

    def _renew(
        self, device_id: str, csr: bytes, key: bytes, previous: _RenewedCertificate | None
    ) -> _RenewedCertificate:
        now = self.clock()
        recent_renewals = tuple(at for at in (previous.renewed_at if previous else ()) if at > now - REISSUE_WINDOW_S)
        if len(recent_renewals) >= MAX_RENEWALS:
            raise TooManyTriesError(
                f"{device_id} has renewed its certificate {len(recent_renewals)} times "
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
        self._renewed[device_id] = _RenewedCertificate(
            public_key=key, certificate=certificate, renewed_at=(*recent_renewals, now)
        )
        return self._renewed[device_id]


def renewal_router(service: RenewalService, *, device_check: AccessCheck) -> APIRouter:
    """Returns the route; `device_check` admits requests signed by a device of the fleet."""
    router = APIRouter(prefix="/edgefl/v1")

    @router.post("/renew", dependencies=[Depends(device_check)])
    async def renew(request: Request) -> Json:
        body = await read_limited_body(request)
        return await run_in_threadpool(service.renew, request.state.device_id, body)

    return router
