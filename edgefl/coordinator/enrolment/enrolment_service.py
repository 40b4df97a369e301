"""Enrolment of devices: `/edgefl/v1/ca`, `hello`, `setup`, `enroll`, and new certificates without a token.

A device fetches the CA, compares it with its token, connects again with verification, and sends the token's secret
with a certificate request. A repeated request with the same key (its answer was lost) is answered again and uses up
nothing; for ten minutes with the same certificate, since each is stored until it expires.

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

import binascii
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from edgefl import __version__
from edgefl.coordinator import pki
from edgefl.coordinator.auth import (
    AccessCheck,
    RateLimiter,
    RecordRejection,
    error_response,
    get_request_source,
    ignore_rejection,
)
from edgefl.coordinator.directory import CoordinatorDirectory, hash_token
from edgefl.coordinator.enrolment.certificates import DAY_S, compute_renewal_window
from edgefl.coordinator.enrolment.tokens import ROLES
from edgefl.coordinator.fleet.telemetry_writer import record_capabilities
from edgefl.core.errors import (
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    TokenInvalidError,
    TooManyTriesError,
    UsageError,
)
from edgefl.core.protocol import (
    EVALUATOR_NAME,
    MAX_JSON_BYTES,
    PROTOCOL_VERSION,
    RESERVED_NAMES,
    JoinToken,
    check_facts,
    check_version,
    error_code,
    load_json,
    validate_slug,
)
from edgefl.core.types import Json
from edgefl.storage.repositories.certificates import (
    CERTIFICATE_REENROLLED,
    is_known_certificate,
    record_issued_certificate,
    renew_certificate,
)
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

REISSUE_WINDOW_S = 600.0
"""How long a repeated request gets the same certificate."""
MAX_PEM_CHARS = 8192


IssuedCertificate = tuple[bytes, bytes, float]
"""Public key of a device, its certificate, and when it was issued, in Unix seconds."""

MAX_RENEWALS = 5
"""Maximum number within `REISSUE_WINDOW_S`: every certificate is stored until it expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentRequest:
    """A checked enrolment request; the signature of its certificate request proves the key."""

    token_id: str
    secret_sha256: str
    name: str
    role: str
    csr_pem: bytes
    public_key: bytes
    facts: Json
    shards: Json
    version: str


class EnrolmentService:
    """Checks requests, records devices in the store and signs certificates. Thread-safe.

    `on_enrolled(device_id, public_key)` is called after the store has the device and before it is answered, again for
    a repeated request; public keys are PEM SubjectPublicKeyInfo bytes. `broker_host` is None for the host of the
    coordinator. `evaluator_token` returns the id of the only token that may enrol under the name of the coordinator's
    own evaluator, None while there is none.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        store: Store,
        on_enrolled: Callable[[str, bytes], None],
        broker_port: int,
        broker_host: str | None = None,
        evaluator_token: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
        version: str = __version__,
    ) -> None:
        self._authority = directory.load_authority()
        self._ca_ends_at = pki.get_expiry(self._authority.cert_pem)
        self._directory = directory
        self._store = store
        self._on_enrolled = on_enrolled
        self._broker = {"port": broker_port, "host": broker_host}
        self._evaluator_token = evaluator_token
        self._clock = clock
        self._version = version
        self._issued: OrderedDict[str, IssuedCertificate] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def ca_pem(self) -> bytes:
        return self._authority.cert_pem

    def hello(self) -> Json:
        """Returns the answer for connecting devices: time, version, endpoints, and certificates to renew."""
        now = self._clock()
        lifetime_s = self._directory.certificates.client_days * DAY_S
        earliest, latest = compute_renewal_window(lifetime_s, now, ca_ends_at=self._ca_ends_at)
        status = {"time": now, "version": self._version, "certificates": {"earliest": earliest, "latest": latest}}
        return {"v": PROTOCOL_VERSION, **status, **self._endpoints()}

    def get_setup_script(self) -> Path:
        """Returns the script that sets a board up.

        Raises:
            NotFoundError: `edgefl provision setup` has not been run here.
        """
        return _find_setup_file(self._directory.setup_script)

    def get_setup_payload(self, authorization: str) -> Path:
        """Returns the files that a board installs, for whom has a join token that is not over.

        Raises:
            TokenInvalidError, TokenExpiredError: the header `Bearer TOKEN` has no such token.
            NotFoundError: as `get_setup_script`.
        """
        token = JoinToken.parse(authorization.removeprefix("Bearer "))
        self._store.check_token(token.token_id, hash_token(token.secret), now=self._clock())
        return _find_setup_file(self._directory.setup_payload)

    def enroll(self, body: bytes) -> Json:
        """Enrols a device and returns the answer for it.

        Raises:
            JoinError: or a subclass: it may not join.
            VersionError: its version is incompatible.
            NetworkError: the request is malformed.
        """
        request = parse_request(load_json(body))
        check_version(request.version, self._version)
        is_foreign = request.name == EVALUATOR_NAME and request.token_id != self._evaluator_token()
        if request.name in RESERVED_NAMES or is_foreign:
            raise NameTakenError(f"the name {request.name!r} is reserved; choose another: --name NAME")
        now = self._clock()
        days = self._directory.certificates.client_days
        issued = self._find_issued(request, now)
        cert_pem = issued or pki.sign_request(self._authority, request.csr_pem, request.name, days=days)
        device = self._store.enroll_device(
            token_id=request.token_id,
            secret_sha256=request.secret_sha256,
            now=now,
            device_id=request.name,
            public_key=request.public_key,
            issue_certificate=lambda: pki.get_serial(cert_pem),
            version=request.version,
        )
        if issued is None:
            record_issued_certificate(
                self._store,
                serial=pki.get_serial(cert_pem),
                expires_at=pki.get_expiry(cert_pem),
                at=now,
                device_id=request.name,
            )
            with self._lock:
                self._issued.pop(request.name, None)  # the newest are last
                self._issued[request.name] = request.public_key, cert_pem, now
        record_capabilities(self._store, request.name, request.facts, request.shards, at=now)
        self._on_enrolled(request.name, request.public_key)
        log.info("%s joined as %s", device.device_id, device.role)
        answer = {"device_id": device.device_id, "role": device.role, "certificate": cert_pem.decode()}
        return {"v": PROTOCOL_VERSION, **answer, **self._endpoints()}

    def _find_issued(self, request: EnrolmentRequest, now: float) -> bytes | None:
        """Returns the certificate recently issued for this key and device, if it is still valid."""
        with self._lock:
            while self._issued and next(iter(self._issued.values()))[2] <= now - REISSUE_WINDOW_S:
                self._issued.popitem(last=False)
            public_key, certificate, _ = self._issued.get(request.name, (b"", b"", 0.0))
        if public_key != request.public_key:
            return None
        device = self._store.get_device(request.name)
        is_valid = device.removed_at is None and device.certificate_serial == pki.get_serial(certificate)
        return certificate if is_valid else None

    def _endpoints(self) -> Json:
        return {
            "fleet": self._directory.fleet,
            "addresses": list(self._directory.addresses),
            "broker": self._broker,
        }


def enrolment_router(
    service: EnrolmentService,
    *,
    rate_limiter: RateLimiter | None = None,
    record_rejection: RecordRejection = ignore_rejection,
) -> APIRouter:
    """Returns the routes without access token. `record_rejection` is called for rejected joins and downloads."""
    router = APIRouter(prefix="/edgefl/v1")
    limiter = rate_limiter or RateLimiter(monotonic=time.monotonic)

    @router.get("/ca")
    async def ca() -> Response:
        return Response(service.ca_pem, media_type="application/x-pem-file")

    @router.get("/hello")
    async def hello() -> JSONResponse:
        return JSONResponse(service.hello())

    add_unauthenticated_route(
        router,
        "/enroll",
        lambda body: service.enroll(body),  # noqa: PLW0108 the reference lists the routes of no service
        "join",
        _is_bad_attempt,
        limiter,
        record_rejection,
    )
    _add_setup_routes(router, service, limiter, record_rejection)
    return router


def _add_setup_routes(
    router: APIRouter, service: EnrolmentService, limiter: RateLimiter, record_rejection: RecordRejection
) -> None:
    @router.get("/setup/setup.sh")
    def fetch_setup_script() -> FileResponse:
        return FileResponse(service.get_setup_script(), media_type="text/x-shellscript")

    @router.get("/setup/payload.tar")
    def fetch_setup_payload(request: Request) -> Response:
        address = get_request_source(request)
        try:
            limiter.check(address)
            path = service.get_setup_payload(request.headers.get("authorization", ""))
        except EdgeflError as error:
            if _is_bad_attempt(error):
                limiter.record_failure(address)
            record_rejection(f"setup ({error_code(error)})", address, str(error))
            return error_response(error)
        return FileResponse(path, media_type="application/x-tar")


def _find_setup_file(path: Path) -> Path:
    if not path.is_file():
        raise NotFoundError(
            "boards cannot download edgefl here; on the coordinator's machine: edgefl provision setup"
        )
    return path


def _is_bad_attempt(error: EdgeflError) -> bool:
    """Returns whether a join was rejected for lack of a valid token."""
    if isinstance(error, TooManyTriesError):
        return False
    return isinstance(error, TokenInvalidError | NetworkError | UsageError) or type(error) is JoinError


def parse_request(value: Json) -> EnrolmentRequest:
    """Returns the checked request; raises `NetworkError` for a malformed one, `JoinError` for an unproven key."""
    role = _parse_text(value, "role")
    if role not in ROLES:
        raise JoinError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    csr_pem = _parse_text(value, "csr").encode()
    public_key = _parse_text(value, "public_key").encode()
    if encode_public_key(pki.verify_request(csr_pem)) != encode_public_key(_load_public_key(public_key)):
        raise JoinError("the public key is not the one of the certificate request")
    facts, shards = _parse_capabilities(value.get("capabilities", {}))
    return EnrolmentRequest(
        token_id=_parse_text(value, "token_id"),
        secret_sha256=hash_token(_parse_text(value, "secret")),
        name=validate_slug(_parse_text(value, "name")),
        role=role,
        csr_pem=csr_pem,
        public_key=encode_public_key(_load_public_key(public_key)),
        facts=facts,
        shards=shards,
        version=_parse_text(value, "version"),
    )


def _parse_capabilities(value: object) -> tuple[Json, Json]:
    facts = value.get("facts", {}) if isinstance(value, dict) else None
    shards = value.get("shards", {}) if isinstance(value, dict) else None
    if not isinstance(facts, dict) or not isinstance(shards, dict):
        raise NetworkError("malformed join request: capabilities must be an object with facts and shards")
    check_facts(facts, shards)
    return facts, shards


def _parse_text(value: Json, key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text or len(text) > 8192 or not text.isascii():
        raise NetworkError(f"malformed join request: {key} must be a short text, got {type(text).__name__}")
    return text


def _load_public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = load_pem_public_key(pem)
    except (ValueError, binascii.Error, UnsupportedAlgorithm) as error:
        raise JoinError(f"the public key cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise JoinError("the public key must be an EC key")
    return key


def add_unauthenticated_route(  # noqa: PLR0913, PLR0917 as its callers say them
    router: APIRouter,
    path: str,
    handler: Callable[[bytes], Json],
    kind: str,
    is_bad_attempt: Callable[[EdgeflError], bool],
    rate_limiter: RateLimiter | None,
    record_rejection: RecordRejection,
) -> None:
    """Adds a POST route whose requests nobody has signed.

    Args:
        router: of the route.
        path: of the route.
        handler: body -> answer, in another thread; may raise an EdgeflError.
        kind: of the request, in a word.
        is_bad_attempt: returns whether an error counts as a failed try.
        rate_limiter: limits failed tries by address; None for one of its own.
        record_rejection: called for rejected requests.
    """
    limiter = rate_limiter or RateLimiter(monotonic=time.monotonic)

    @router.post(path)
    async def handle(request: Request) -> JSONResponse:
        address = get_request_source(request)
        try:
            limiter.check(address)
            return JSONResponse(await run_in_threadpool(handler, await read_limited_body(request)))
        except EdgeflError as error:
            if is_bad_attempt(error):
                limiter.record_failure(address)
            level = logging.DEBUG if isinstance(error, TooManyTriesError) else logging.WARNING
            log.log(level, "refused a %s from %s: %s", kind, address, error)
            record_rejection(f"{kind} ({error_code(error)})", address, str(error))
            return error_response(error)


async def read_limited_body(request: Request, limit: int = MAX_JSON_BYTES) -> bytes:
    """Returns the request's body.

    Raises:
        NetworkError: it is larger than `limit`; the rest is not read.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise NetworkError(f"the request is larger than {limit} bytes")
    return bytes(body)


def parse_pem(value: Json, name: str) -> bytes:
    """Returns a PEM field of a request; its content is not checked.

    Raises:
        NetworkError: it is no short text.
    """
    text = value.get(name)
    if not isinstance(text, str) or len(text) > MAX_PEM_CHARS or not text.isascii():
        raise NetworkError(f"malformed request: {name} must be a text of at most {MAX_PEM_CHARS} characters")
    return text.encode()


def encode_public_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Returns a public key in the format of the store: PEM, SubjectPublicKeyInfo."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


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
        _is_bad_reenrolment,
        rate_limiter,
        record_rejection,
    )
    return router


def _is_bad_reenrolment(error: EdgeflError) -> bool:
    """Returns whether a re-enrolment was rejected for lack of a valid certificate."""
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
