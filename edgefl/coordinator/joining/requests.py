"""What the routes have in common by which boards come in: bodies, keys, and answers that count wrong tries."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from edgefl.coordinator.access import error_response
from edgefl.coordinator.attempts import Note, network_of
from edgefl.coordinator.throttle import Throttle
from edgefl.errors import EdgeflError, NetworkError, TooManyTriesError
from edgefl.protocol import MAX_JSON_BYTES, error_code
from edgefl.types import Json

log = logging.getLogger(__name__)

MAX_PEM_CHARS = 8192


async def answer_stranger(
    request: Request,
    answer: Callable[[bytes], Json],
    *,
    what: str,
    is_guess: Callable[[EdgeflError], bool],
    throttle: Throttle,
    note: Note,
) -> JSONResponse:
    """Returns the answer to somebody who has shown nothing yet.

    Args:
        request: its body is read here.
        answer: takes the body, in another thread; may raise an EdgeflError.
        what: they ask for, in a word.
        is_guess: says of an error that it was a wrong try, which counts.
        throttle: lets an address try, or not.
        note: told of what was refused.
    """
    address = network_of(request.client.host if request.client else None)
    try:
        throttle.check(address)
        return JSONResponse(await run_in_threadpool(answer, await read_capped(request)))
    except EdgeflError as error:
        if is_guess(error):
            throttle.failed(address)
        level = logging.DEBUG if isinstance(error, TooManyTriesError) else logging.WARNING
        log.log(level, "refused a %s from %s: %s", what, address, error)
        note(f"{what} ({error_code(error)})", address, str(error))
        return error_response(error)


async def read_capped(request: Request, limit: int = MAX_JSON_BYTES) -> bytes:
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


def pem_in(value: Json, name: str) -> bytes:
    """Returns the PEM text of a request under a name; what stands in it is not looked at.

    Raises:
        NetworkError: it is no short text.
    """
    text = value.get(name)
    if not isinstance(text, str) or len(text) > MAX_PEM_CHARS or not text.isascii():
        raise NetworkError(f"malformed request: {name} must be a text of at most {MAX_PEM_CHARS} characters")
    return text.encode()


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Returns a public key as the store has it: PEM, SubjectPublicKeyInfo."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
