"""Who may call the JSON API, and how its errors look.

Operators may do everything, viewers read. Both show a bearer token; only hashes are kept. Errors are
`{"v": 1, "error": CODE, "message": LINE}` with a 4xx or 5xx status, so that the other side raises the same error.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from edgefl.coordinator.attempts import Note, network_of, nobody_notes
from edgefl.coordinator.directory import CoordinatorDirectory, token_hash
from edgefl.coordinator.throttle import Throttle
from edgefl.errors import (
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    StoreError,
    TooManyTriesError,
    VersionError,
)
from edgefl.protocol import PROTOCOL_VERSION, error_code
from edgefl.untrusted import sound_text

log = logging.getLogger(__name__)

# The first class that fits decides; what stands in no line is the caller's mistake: 400.
STATUS: Mapping[type[EdgeflError], int] = {
    NotAllowedError: 401,
    NotFoundError: 404,
    NameTakenError: 409,
    VersionError: 426,
    JoinError: 403,
    StoreError: 503,
    TooManyTriesError: 429,
    NetworkError: 400,
}
MAX_TOKEN_CHARS = 200
MAX_PATH_CHARS = 100

Guard = Callable[[Request], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is done about wrong access tokens: they are slowed down, and told of."""

    throttle: Throttle = field(default_factory=lambda: Throttle(monotonic=time.monotonic))
    note: Note = nobody_notes


def require_operator(directory: CoordinatorDirectory, *, watch: Watch | None = None) -> Guard:
    """Returns a FastAPI dependency that lets only operators through; others get `NotAllowedError`."""
    return _guard(
        directory.operator_sha256,
        "an operator token",
        open_to_all=False,
        watch=watch or Watch(),
        others=directory.viewer_sha256,
    )


def require_viewer(directory: CoordinatorDirectory, *, listen_host: str, watch: Watch | None = None) -> Guard:
    """Returns a FastAPI dependency that lets operators and viewers through.

    When the coordinator listens on loopback only, everyone who can connect may read.
    """
    accepted = (*directory.operator_sha256, *directory.viewer_sha256)
    is_open = is_loopback(listen_host)
    return _guard(accepted, "a viewer or operator token", open_to_all=is_open, watch=watch or Watch())


def is_loopback(host: str) -> bool:
    """Returns whether a listener on `host` can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def show_errors(app: FastAPI) -> None:
    """Makes the app answer every `EdgeflError` as JSON."""

    @app.exception_handler(EdgeflError)
    async def answer(_request: Request, error: EdgeflError) -> JSONResponse:
        return error_response(error)


def error_response(error: EdgeflError) -> JSONResponse:
    """Returns an error's answer: its status, its code and its line."""
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 400)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content = {"v": PROTOCOL_VERSION, "error": error_code(error), "message": sound_text(str(error))}
    return JSONResponse(content, status_code=status, headers=headers)


def rights(directory: CoordinatorDirectory, *, listen_host: str) -> Callable[[Request], tuple[bool, bool]]:
    """Returns what tells whether who asks may read, and whether they may act; it refuses nobody."""
    acts, reads = directory.operator_sha256, (*directory.operator_sha256, *directory.viewer_sha256)
    open_to_all = is_loopback(listen_host)

    def judge(request: Request) -> tuple[bool, bool]:
        digest = _shown(request)
        return open_to_all or _is_among(digest, reads), _is_among(digest, acts)

    return judge


def _guard(
    accepted: Sequence[str], wanted: str, *, open_to_all: bool, watch: Watch, others: Sequence[str] = ()
) -> Guard:
    """Returns what refuses tokens that are not accepted; `others` are good for less, and no guesses."""

    def check(request: Request) -> None:
        if open_to_all:
            return
        digest = _shown(request)
        if _is_among(digest, accepted):
            return
        address = network_of(request.client.host if request.client else None)
        path = request.url.path[:MAX_PATH_CHARS]
        if digest is None:
            if request.method != "GET":  # a page before its log-in asks for much that it may not read
                watch.note("action without access token", address, path)
            raise NotAllowedError(f"this needs {wanted}; on the coordinator's machine: edgefl coordinator init")
        watch.note("access token", address, f"{path}: a wrong one; this needs {wanted}")
        if _is_among(digest, others):
            raise NotAllowedError(f"a viewer may not do that; this needs {wanted}")
        watch.throttle.check(address)
        watch.throttle.failed(address)
        log.warning("refused a wrong access token for %s", path)
        raise NotAllowedError(f"the access token is wrong; this needs {wanted}")

    return check


def _shown(request: Request) -> str | None:
    """Returns the hash of the bearer token that the request shows, if it shows one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token_hash(token[:MAX_TOKEN_CHARS]) if scheme.lower() == "bearer" and token else None


def _is_among(digest: str | None, accepted: Sequence[str]) -> bool:
    # All are compared, whichever fits, so that the time says nothing.
    return digest is not None and bool(sum(hmac.compare_digest(digest, known) for known in accepted))
