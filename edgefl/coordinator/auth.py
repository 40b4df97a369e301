"""Authentication of the JSON API, and the format of its errors.

Operators may do everything, viewers may read. Both send a bearer token; only hashes are stored. Errors are
`{"v": 1, "error": CODE, "message": LINE}` with a 4xx or 5xx status, so that the client raises the same error.
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

from edgefl.coordinator.directory import CoordinatorDirectory, hash_token
from edgefl.coordinator.rate_limit import RateLimiter
from edgefl.coordinator.rejected_requests import RecordRejection, get_client_network, ignore_rejection
from edgefl.core.errors import (
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
from edgefl.core.protocol import PROTOCOL_VERSION, error_code
from edgefl.core.safe_parsing import sanitise_text

log = logging.getLogger(__name__)

# The first matching class decides; any other error is the caller's mistake: 400.
STATUS_BY_ERROR: Mapping[type[EdgeflError], int] = {
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

AccessCheck = Callable[[Request], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthFailurePolicy:
    """Handling of wrong access tokens: rate limit and audit log."""

    rate_limiter: RateLimiter = field(default_factory=lambda: RateLimiter(monotonic=time.monotonic))
    record_rejection: RecordRejection = ignore_rejection


def require_operator(
    directory: CoordinatorDirectory, *, auth_failures: AuthFailurePolicy | None = None
) -> AccessCheck:
    """Returns a FastAPI dependency that admits only operators; others get `NotAllowedError`."""
    return _make_access_check(
        directory.operator_sha256,
        "an operator token",
        open_to_all=False,
        auth_failures=auth_failures or AuthFailurePolicy(),
        insufficient=directory.viewer_sha256,
    )


def require_viewer(
    directory: CoordinatorDirectory, *, listen_host: str, auth_failures: AuthFailurePolicy | None = None
) -> AccessCheck:
    """Returns a FastAPI dependency that admits operators and viewers.

    If the coordinator listens on loopback only, every client may read.
    """
    accepted = (*directory.operator_sha256, *directory.viewer_sha256)
    is_open = is_loopback(listen_host)
    return _make_access_check(
        accepted,
        "a viewer or operator token",
        open_to_all=is_open,
        auth_failures=auth_failures or AuthFailurePolicy(),
    )


def is_loopback(host: str) -> bool:
    """Returns whether a listener on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def register_error_handler(app: FastAPI) -> None:
    """Makes the app answer every `EdgeflError` as JSON."""

    @app.exception_handler(EdgeflError)
    async def answer(_request: Request, error: EdgeflError) -> JSONResponse:
        return error_response(error)


def error_response(error: EdgeflError) -> JSONResponse:
    """Returns the response of an error: its status, code and message."""
    status = next((status for kind, status in STATUS_BY_ERROR.items() if isinstance(error, kind)), 400)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content = {"v": PROTOCOL_VERSION, "error": error_code(error), "message": sanitise_text(str(error))}
    return JSONResponse(content, status_code=status, headers=headers)


def make_permission_check(
    directory: CoordinatorDirectory, *, listen_host: str
) -> Callable[[Request], tuple[bool, bool]]:
    """Returns a function request -> (may read, may act), which rejects no request."""
    operator_hashes, viewer_hashes = directory.operator_sha256, (*directory.operator_sha256, *directory.viewer_sha256)
    open_to_all = is_loopback(listen_host)

    def judge(request: Request) -> tuple[bool, bool]:
        digest = _token_digest(request)
        return open_to_all or _is_any_of(digest, viewer_hashes), _is_any_of(digest, operator_hashes)

    return judge


def _make_access_check(
    accepted: Sequence[str],
    required_token: str,
    *,
    open_to_all: bool,
    auth_failures: AuthFailurePolicy,
    insufficient: Sequence[str] = (),
) -> AccessCheck:
    """Returns a check that rejects tokens not in `accepted`; `insufficient` ones do not count as guesses."""

    def check(request: Request) -> None:
        if open_to_all:
            return
        digest = _token_digest(request)
        if _is_any_of(digest, accepted):
            return
        address = get_client_network(request.client.host if request.client else None)
        path = request.url.path[:MAX_PATH_CHARS]
        if digest is None:
            if request.method != "GET":  # a page before its log-in requests much that it may not read
                auth_failures.record_rejection("action without access token", address, path)
            raise NotAllowedError(
                f"this needs {required_token}; on the coordinator's machine: edgefl coordinator init"
            )
        auth_failures.record_rejection("access token", address, f"{path}: a wrong one; this needs {required_token}")
        if _is_any_of(digest, insufficient):
            raise NotAllowedError(f"a viewer may not do that; this needs {required_token}")
        auth_failures.rate_limiter.check(address)
        auth_failures.rate_limiter.record_failure(address)
        log.warning("refused a wrong access token for %s", path)
        raise NotAllowedError(f"the access token is wrong; this needs {required_token}")

    return check


def _token_digest(request: Request) -> str | None:
    """Returns the hash of the request's bearer token, if it has one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return hash_token(token[:MAX_TOKEN_CHARS]) if scheme.lower() == "bearer" and token else None


def _is_any_of(digest: str | None, accepted: Sequence[str]) -> bool:
    # All are compared, whichever matches, so that the time reveals nothing.
    return digest is not None and bool(sum(hmac.compare_digest(digest, known) for known in accepted))
