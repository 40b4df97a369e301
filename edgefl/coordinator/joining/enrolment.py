"""Letting boards in: `/edgefl/v1/ca`, `hello` and `enroll`.

A board fetches the CA, compares it with its token, asks again over a verified connection, and sends the token's
secret with a certificate request. The same board asking again with the same key (its answer was lost) is answered
again and uses nothing up; for ten minutes with the same certificate, since each is remembered until it has ended.
"""

from __future__ import annotations

import binascii
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from edgefl import __version__
from edgefl.coordinator import pki
from edgefl.coordinator.attempts import Note, nobody_notes
from edgefl.coordinator.directory import CoordinatorDirectory, token_hash
from edgefl.coordinator.fleet.shard_faults import record_capabilities
from edgefl.coordinator.joining.own_certificates import DAY_S, renewal_window
from edgefl.coordinator.joining.requests import answer_stranger, public_pem
from edgefl.coordinator.joining.tokens import ROLES
from edgefl.coordinator.throttle import Throttle
from edgefl.errors import (
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    TokenInvalidError,
    TooManyTriesError,
    UsageError,
)
from edgefl.protocol import (
    EVALUATOR_NAME,
    PROTOCOL_VERSION,
    RESERVED_NAMES,
    check_facts,
    check_version,
    checked_slug,
    load_json,
)
from edgefl.storage.certificate_rows import note_issued
from edgefl.storage.store import Store
from edgefl.types import Json

log = logging.getLogger(__name__)

REMEMBER_S = 600.0
"""For so long who asks again gets the same certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSite:
    """Where devices find the MQTT broker; `host` None means: the coordinator's own host."""

    port: int = 8883
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The certificate of a board that has joined, and when it got it."""

    public_key: bytes
    certificate: bytes
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentRequest:
    """What a board sends, checked: its key is proven by the signature of its certificate request."""

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
    """Checks requests, books them in the store and signs certificates; safe to call from several threads.

    `on_enrolled(device_id, public_key)` is called after the store has the device and before it is answered, again
    when a board asks again; public keys are PEM SubjectPublicKeyInfo bytes. `evaluator_token` gives the id of the
    only token that lets in under the name of the coordinator's own evaluator, None while there is none.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        store: Store,
        on_enrolled: Callable[[str, bytes], None],
        broker: BrokerSite,
        evaluator_token: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
        version: str = __version__,
    ) -> None:
        self._authority = directory.authority()
        self._ca_ends_at = pki.expires_at(self._authority.cert_pem)
        self._directory = directory
        self._store = store
        self._on_enrolled = on_enrolled
        self._broker = broker
        self._evaluator_token = evaluator_token
        self._clock = clock
        self._version = version
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def ca_pem(self) -> bytes:
        return self._authority.cert_pem

    def hello(self) -> Json:
        """Returns what every board asks at connect: the time, the version, where everything is, what to renew."""
        now = self._clock()
        life_s = self._directory.certificates.client_days * DAY_S
        earliest, latest = renewal_window(life_s, now, ca_ends_at=self._ca_ends_at)
        told = {"time": now, "version": self._version, "certificates": {"earliest": earliest, "latest": latest}}
        return {"v": PROTOCOL_VERSION, **told, **self._site()}

    def enroll(self, body: bytes) -> Json:
        """Returns the answer to a board that may join.

        Raises:
            JoinError: or one of its kinds: it may not.
            VersionError: it speaks another version.
            NetworkError: the request is malformed.
        """
        request = parse_request(load_json(body))
        check_version(request.version, self._version)
        is_foreign = request.name == EVALUATOR_NAME and request.token_id != self._evaluator_token()
        if request.name in RESERVED_NAMES or is_foreign:
            raise NameTakenError(f"the name {request.name!r} is reserved; choose another: --name NAME")
        now = self._clock()
        days = self._directory.certificates.client_days
        given = self._given_before(request, now)
        cert_pem = given or pki.sign_request(self._authority, request.csr_pem, request.name, days=days)
        device = self._store.enroll_device(
            token_id=request.token_id,
            secret_sha256=request.secret_sha256,
            now=now,
            device_id=request.name,
            public_key=request.public_key,
            role=request.role,
            certificate=lambda: pki.serial(cert_pem),
            version=request.version,
        )
        if given is None:
            note_issued(
                self._store,
                serial=pki.serial(cert_pem),
                ends_at=pki.expires_at(cert_pem),
                at=now,
                device_id=request.name,
            )
            with self._lock:
                self._given.pop(request.name, None)  # the newest come last
                self._given[request.name] = _Given(public_key=request.public_key, certificate=cert_pem, at=now)
        record_capabilities(self._store, request.name, request.facts, request.shards, at=now)
        self._on_enrolled(request.name, request.public_key)
        log.info("%s joined as %s", device.device_id, device.role)
        answer = {"device_id": device.device_id, "role": device.role, "certificate": cert_pem.decode()}
        return {"v": PROTOCOL_VERSION, **answer, **self._site()}

    def _given_before(self, request: EnrolmentRequest, now: float) -> bytes | None:
        """Returns the certificate that this board was given for this key a moment ago, if it still counts."""
        with self._lock:
            while self._given and next(iter(self._given.values())).at <= now - REMEMBER_S:
                self._given.popitem(last=False)
            given = self._given.get(request.name)
        if given is None or given.public_key != request.public_key:
            return None
        device = self._store.device(request.name)
        counts = device.removed_at is None and device.certificate_serial == pki.serial(given.certificate)
        return given.certificate if counts else None

    def _site(self) -> Json:
        return {
            "fleet": self._directory.fleet,
            "addresses": list(self._directory.addresses),
            "broker": {"port": self._broker.port, "host": self._broker.host},
        }


def enrolment_router(
    service: EnrolmentService, *, throttle: Throttle | None = None, note: Note = nobody_notes
) -> APIRouter:
    """Returns the three routes; they need no access token. `note` is told of joins that were refused."""
    router, guard = APIRouter(prefix="/edgefl/v1"), throttle or Throttle(monotonic=time.monotonic)

    @router.get("/ca")
    async def ca() -> Response:
        return Response(service.ca_pem, media_type="application/x-pem-file")

    @router.get("/hello")
    async def hello() -> JSONResponse:
        return JSONResponse(service.hello())

    @router.post("/enroll")
    async def enroll(request: Request) -> JSONResponse:
        return await answer_stranger(
            request, service.enroll, what="join", is_guess=_is_guess, throttle=guard, note=note
        )

    return router


def _is_guess(error: EdgeflError) -> bool:
    """Returns whether a join was refused to somebody who has shown no token of ours."""
    if isinstance(error, TooManyTriesError):
        return False
    return isinstance(error, TokenInvalidError | NetworkError | UsageError) or type(error) is JoinError


def parse_request(value: Json) -> EnrolmentRequest:
    """Returns the checked request; raises `NetworkError` for a malformed one, `JoinError` for an unproven key."""
    role = _text(value, "role")
    if role not in ROLES:
        raise JoinError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    csr_pem = _text(value, "csr").encode()
    public_key = _text(value, "public_key").encode()
    if public_pem(pki.request_key(csr_pem)) != public_pem(_load_public(public_key)):
        raise JoinError("the public key is not the one of the certificate request")
    facts, shards = _capabilities(value.get("capabilities", {}))
    return EnrolmentRequest(
        token_id=_text(value, "token_id"),
        secret_sha256=token_hash(_text(value, "secret")),
        name=checked_slug(_text(value, "name")),
        role=role,
        csr_pem=csr_pem,
        public_key=public_pem(_load_public(public_key)),
        facts=facts,
        shards=shards,
        version=_text(value, "version"),
    )


def _capabilities(value: object) -> tuple[Json, Json]:
    facts = value.get("facts", {}) if isinstance(value, dict) else None
    shards = value.get("shards", {}) if isinstance(value, dict) else None
    if not isinstance(facts, dict) or not isinstance(shards, dict):
        raise NetworkError("malformed join request: capabilities must be an object with facts and shards")
    check_facts(facts, shards)
    return facts, shards


def _text(value: Json, key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text or len(text) > 8192 or not text.isascii():
        raise NetworkError(f"malformed join request: {key} must be a short text, got {type(text).__name__}")
    return text


def _load_public(pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = load_pem_public_key(pem)
    except (ValueError, binascii.Error, UnsupportedAlgorithm) as error:
        raise JoinError(f"the public key cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise JoinError("the public key must be an EC key")
    return key
