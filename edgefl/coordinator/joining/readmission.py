"""Readmitting devices to a restored coordinator: `POST /edgefl/v1/readmit`, with a certificate that it does not know.

The store has every certificate that it has issued. One that bears the fleet's signature and is not among them was
issued after the backup from which the coordinator was restored. Its device is let in with the key that it has now; of
two such certificates of one device, one a renewal of the other, the one that ends last counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from edgefl.coordinator import pki
from edgefl.coordinator.attempts import Note, nobody_notes
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.joining.requests import answer_stranger, pem_in, public_pem
from edgefl.coordinator.throttle import Throttle
from edgefl.errors import EdgeflError, JoinError, NetworkError, NotAllowedError
from edgefl.protocol import PROTOCOL_VERSION, load_json
from edgefl.storage.certificate_rows import READMITTED, is_heard_of, renew_certificate
from edgefl.storage.store import Store
from edgefl.types import Json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    device_id: str
    public_key: bytes
    serial: str
    ends_at: float


@dataclass(slots=True, kw_only=True)
class ReadmissionService:
    """Takes note of certificates; safe from several threads.

    `on_readmitted(device_id, public_key)` is called when the store has the key, and before the device is answered.
    """

    directory: CoordinatorDirectory
    store: Store
    on_readmitted: Callable[[str, bytes], None]
    clock: Callable[[], float]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def readmit(self, body: bytes) -> Json:
        """Returns the answer to a device that was readmitted.

        Raises:
            NetworkError: the request is malformed.
            JoinError: what it shows is no certificate of this fleet, or not its own.
            NotAllowedError: the certificate was known before, or has ended.
            NotFoundError: no such device is in the fleet.
            NameTakenError: another device has its key.
        """
        shown = _shown(load_json(body), self.directory.authority().cert_pem)
        if shown.ends_at <= self.clock():
            raise NotAllowedError(f"the certificate of {shown.device_id} has ended; join again with a new token")
        with self._lock:
            if is_heard_of(self.store, shown.device_id, serial=shown.serial, ends_at=shown.ends_at):
                raise NotAllowedError(f"this certificate of {shown.device_id} counts no more, or its key is known")
            renew_certificate(
                self.store, shown.device_id, public_key=shown.public_key, serial=shown.serial, ends_at=shown.ends_at,
                at=self.clock(), kind=READMITTED,
            )  # fmt: skip
            self.on_readmitted(shown.device_id, shown.public_key)
        log.info("%s is readmitted: its certificate was issued after the backup", shown.device_id)
        return {"v": PROTOCOL_VERSION, "device_id": shown.device_id}


def readmission_router(
    service: ReadmissionService, *, throttle: Throttle | None = None, note: Note = nobody_notes
) -> APIRouter:
    """Returns the route, which needs no known signature; wrong tries of an address count; `note` is told."""
    router, guard = APIRouter(prefix="/edgefl/v1"), throttle or Throttle(monotonic=time.monotonic)

    @router.post("/readmit")
    async def readmit(request: Request) -> JSONResponse:
        return await answer_stranger(
            request, service.readmit, what="certificate", is_guess=_is_guess, throttle=guard, note=note
        )

    return router


def _is_guess(error: EdgeflError) -> bool:
    return isinstance(error, JoinError | NetworkError | NotAllowedError)


def _shown(value: Json, ca_pem: bytes) -> _Shown:
    """Returns what a device has shown; its certificate request proves that it has the certificate's key."""
    csr, text = pem_in(value, "csr"), pem_in(value, "certificate")
    authority = x509.load_pem_x509_certificate(ca_pem)
    try:
        certificate = x509.load_pem_x509_certificate(text)
        certificate.verify_directly_issued_by(authority)
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except (*pki.DAMAGED, InvalidSignature, x509.ExtensionNotFound) as error:
        raise JoinError(f"the certificate is none of this fleet: {error!r}") from None
    proven = public_pem(pki.request_key(csr))
    if proven != key or ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        raise JoinError("the certificate is not that of the device which shows it")
    return _Shown(
        device_id=str(name.value),
        public_key=key,
        serial=f"{certificate.serial_number:x}",
        ends_at=certificate.not_valid_after_utc.timestamp(),
    )
