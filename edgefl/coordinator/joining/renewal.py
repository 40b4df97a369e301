"""Renewing certificates without joining again: `POST /edgefl/v1/renew`, signed with the key that the device has.

A device sends a certificate request, usually for a new key; from the answer on that key is the device's, for MQTT and
for signing alike, and its place in the fleet stays. The same request again, since the answer was lost, gets the same
answer; it is then signed with the new key, for the old one counts no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from edgefl.coordinator import pki
from edgefl.coordinator.access import Guard
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.joining.enrolment import REMEMBER_S
from edgefl.coordinator.joining.requests import pem_in, public_pem, read_capped
from edgefl.errors import TooManyTriesError
from edgefl.protocol import PROTOCOL_VERSION, load_json
from edgefl.storage.certificate_rows import renew_certificate
from edgefl.storage.store import Store
from edgefl.types import Json

log = logging.getLogger(__name__)

MAX_RENEWALS = 5
"""So many in that time: every certificate is remembered until it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    public_key: bytes
    certificate: bytes
    times: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class RenewalService:
    """Signs new certificates for devices of the fleet; safe from several threads.

    `on_renewed(device_id, public_key)` is called when the store has the new key, and before the device is answered.
    """

    directory: CoordinatorDirectory
    store: Store
    on_renewed: Callable[[str, bytes], None]
    clock: Callable[[], float]
    _given: dict[str, _Given] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, device_id: str, body: bytes) -> Json:
        """Returns the answer to a device that was known by its signature.

        Raises:
            JoinError: the request is damaged or does not prove its key.
            NameTakenError: another device has this key.
            TooManyTriesError: it had several a moment ago.
            NetworkError: the request is malformed.
        """
        csr = pem_in(load_json(body), "csr")
        key = public_pem(pki.request_key(csr))
        with self._lock:
            since = self.clock() - REMEMBER_S
            self._given = {name: one for name, one in self._given.items() if one.times[-1] > since}
            given = self._given.get(device_id)
            if given is None or given.public_key != key:
                given = self._give(device_id, csr, key, given)
        return {"v": PROTOCOL_VERSION, "device_id": device_id, "certificate": given.certificate.decode()}

    def _give(self, device_id: str, csr: bytes, key: bytes, before: _Given | None) -> _Given:
        now = self.clock()
        times = tuple(at for at in (before.times if before else ()) if at > now - REMEMBER_S)
        if len(times) >= MAX_RENEWALS:
            raise TooManyTriesError(
                f"{device_id} has renewed its certificate {len(times)} times in {REMEMBER_S / 60:g} minutes; "
                "try again later"
            )
        days = self.directory.certificates.client_days
        certificate = pki.sign_request(self.directory.authority(), csr, device_id, days=days)
        renew_certificate(
            self.store, device_id, public_key=key, serial=pki.serial(certificate),
            ends_at=pki.expires_at(certificate), at=now,
        )  # fmt: skip
        self.on_renewed(device_id, key)
        log.info("%s has a new certificate, for %g days", device_id, days)
        self._given[device_id] = _Given(public_key=key, certificate=certificate, times=(*times, now))
        return self._given[device_id]


def renewal_router(service: RenewalService, *, device: Guard) -> APIRouter:
    """Returns the route; `device` lets those through who sign with the key of a device of the fleet."""
    router = APIRouter(prefix="/edgefl/v1")

    @router.post("/renew", dependencies=[Depends(device)])
    async def renew(request: Request) -> Json:
        body = await read_capped(request)
        return await run_in_threadpool(service.renew, request.state.device_id, body)

    return router
