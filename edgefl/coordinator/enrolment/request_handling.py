"""Helpers of the unauthenticated enrolment routes: bodies, keys and rate-limited answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from edgefl.coordinator.auth import error_response
from edgefl.coordinator.rate_limit import RateLimiter
from edgefl.coordinator.rejected_requests import RecordRejection, get_client_network
from edgefl.core.errors import EdgeflError, NetworkError, TooManyTriesError
from edgefl.core.protocol import MAX_JSON_BYTES, error_code
from edgefl.core.types import Json

log = logging.getLogger(__name__)

MAX_PEM_CHARS = 8192


async def handle_unauthenticated(
    request: Request,
    handler: Callable[[bytes], Json],
    *,
    kind: str,
    is_bad_attempt: Callable[[EdgeflError], bool],
    rate_limiter: RateLimiter,
    record_rejection: RecordRejection,
) -> JSONResponse:
    """Returns the response to an unauthenticated request.

    Args:
        request: its body is read here.
        handler: body -> answer, in another thread; may raise an EdgeflError.
        kind: of the request, in a word.
        is_bad_attempt: returns whether an error counts as a failed try.
        rate_limiter: limits failed tries by address.
        record_rejection: called for rejected requests.
    """
    address = get_client_network(request.client.host if request.client else None)
    try:
        rate_limiter.check(address)
        return JSONResponse(await run_in_threadpool(handler, await read_limited_body(request)))
    except EdgeflError as error:
        if is_bad_attempt(error):
            rate_limiter.record_failure(address)
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
