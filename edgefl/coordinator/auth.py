"""Access to the HTTPS API: tokens of operators and viewers, a rate limit of failures, and the audit trail.

Operators may do everything, viewers may read. Both send a bearer token; only hashes are stored. Errors are
`{"v": 1, "error": CODE, "message": LINE}` with a 4xx or 5xx status, so that the client raises the same error.

- Rate limit: an address may fail ten times at once and regains one try every six seconds. All addresses together may
  fail two hundred times; beyond that each address has one try, so that a device with a valid token and its own
  address is accepted whatever others do. Successful tries are not counted.
- Rejections: events of the kind `request-rejected`, aggregated to bound their number. The first rejection is written
  at once. Further ones of the same kind from the same address or device are counted, and written as one row a minute.
  At most `MAX_SOURCES` are distinguished at a time; the others share a row.
- Actions: every request with a valid token that changes something, by whom, from where, and what came of it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.coordinator.directory import CoordinatorDirectory, hash_token
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
from edgefl.core.protocol import BODY_HASH_HEADER, PROTOCOL_VERSION, error_code
from edgefl.core.safe_parsing import sanitise_line, sanitise_text
from edgefl.core.safe_text import escape_text
from edgefl.storage.store import REJECTED_EVENT_KIND, Store

log = logging.getLogger(__name__)

ROW_INTERVAL_S = 60.0
MAX_SOURCES = 32
MAX_DETAIL_CHARS = 200
OTHER_SOURCES = "others"

RecordRejection = Callable[[str, str, str], None]
"""(kind of request, address or device, error message)"""
MAX_FAILURES = 10
MAX_FAILURES_UNDER_LOAD = 1
FAILURE_DECAY_S = 6.0
MAX_TOTAL_FAILURES = 200
TOTAL_FAILURE_DECAY_S = 0.3
MAX_ADDRESSES = 4096
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
ACTOR_HASH_CHARS = 8


_READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
API_PREFIX = "/edgefl/v1/"


def ignore_rejection(_kind: str, _source: str, _detail: str) -> None:
    """Ignores a rejection."""


@dataclass(slots=True, kw_only=True)
class _RejectionBucket:
    """Rejections since `since_s`; `count` of them have no row yet, `detail` is the newest message."""

    since_s: float
    detail: str
    device_id: str | None
    count: int = 1
    is_first: bool = True


@dataclass(slots=True, kw_only=True)
class RejectedRequestLog:
    """Aggregates rejections of any thread; `flush` writes them, in one thread.

    Attributes:
        store: where the events go.
        clock: Unix seconds, for the rows.
        monotonic: seconds, for the intervals.
        is_device: returns whether a source is a device of the fleet.
    """

    store: Store
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    is_device: Callable[[str], bool] = lambda _: False
    _buckets: dict[tuple[str, str], _RejectionBucket] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, kind: str, source: str, detail: str) -> None:
        """Counts a rejected request."""
        line = sanitise_line(detail, MAX_DETAIL_CHARS)
        with self._lock:
            key = (kind, source or "?")
            if key not in self._buckets and len(self._buckets) >= MAX_SOURCES:
                key = (kind, OTHER_SOURCES)
            bucket = self._buckets.get(key)
            if bucket is None:
                device_id = key[1] if self.is_device(key[1]) else None
                self._buckets[key] = _RejectionBucket(since_s=self.monotonic(), detail=line, device_id=device_id)
            else:
                bucket.count += 1
                if not bucket.is_first:
                    bucket.detail = line

    def flush(self, *, is_last: bool = False) -> None:
        """Writes new rejections, and the counts of intervals that are over; with `is_last`, all counts."""
        if not self._buckets:
            return
        now_s, rows = self.monotonic(), []
        with self._lock:
            for key, bucket in list(self._buckets.items()):
                is_over = is_last or now_s - bucket.since_s >= ROW_INTERVAL_S
                if bucket.count and (bucket.is_first or is_over):
                    rows.append((key, bucket.detail, bucket.device_id, bucket.count))
                    bucket.count, bucket.is_first, bucket.since_s = 0, False, now_s
                elif is_over:
                    del self._buckets[key]
        if not rows:
            return
        try:
            with self.store.batch():
                for (kind, source), detail, device_id, count in rows:
                    self._write(kind, source, detail, device_id, count)
        except BaseException:
            self._restore(rows)
            raise

    def _restore(self, rows: list[tuple[tuple[str, str], str, str | None, int]]) -> None:
        """Adds the counts of unwritten rows back to the buckets."""
        with self._lock:
            for key, detail, device_id, count in rows:
                bucket = self._buckets.setdefault(
                    key, _RejectionBucket(since_s=self.monotonic(), detail=detail, device_id=device_id, count=0)
                )
                bucket.count, bucket.is_first = bucket.count + count, True

    def _write(self, kind: str, source: str, detail: str, device_id: str | None, count: int) -> None:
        repetitions = f", {count} times" if count > 1 else ""
        self.store.record_event(
            REJECTED_EVENT_KIND,
            f"{kind} from {source}{repetitions}: {detail}",
            at=self.clock(),
            device_id=device_id,
            data={"what": kind, "from": source, "count": count},
        )


def get_request_source(request: Request) -> str:
    """Returns where a request comes from, for the rate limit and the audit log; see `get_client_network`."""
    return get_client_network(request.client.host if request.client else None)


def get_client_network(host: str | None) -> str:
    """Returns an IPv4 address, or the /64 network of an IPv6 one, in which a client has 2^64 addresses."""
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_loopback:
        return str(address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


@dataclass(slots=True)
class _FailureCount:
    """Failures that still count, as of `at_s`; they decay one by one."""

    number: float = 0.0
    at_s: float = 0.0

    def compute_remaining(self, now_s: float, decay_s: float) -> float:
        return max(0.0, self.number - (now_s - self.at_s) / decay_s)


@dataclass(slots=True, kw_only=True)
class RateLimiter:
    """Counts failures in bounded memory. Thread-safe. `monotonic` gives seconds."""

    monotonic: Callable[[], float]
    _by_address: OrderedDict[str, _FailureCount] = field(default_factory=OrderedDict)
    _total: _FailureCount = field(default_factory=_FailureCount)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, address: str) -> None:
        """Checks that an address may try.

        Raises:
            TooManyTriesError: it failed too often; its credentials are not checked.
        """
        now_s = self.monotonic()
        with self._lock:
            is_under_load = self._total.compute_remaining(now_s, TOTAL_FAILURE_DECAY_S) >= MAX_TOTAL_FAILURES
            allowed = MAX_FAILURES_UNDER_LOAD if is_under_load else MAX_FAILURES
            failures = self._by_address.get(address)
            number = failures.compute_remaining(now_s, FAILURE_DECAY_S) if failures else 0.0
        if number > allowed - 1:
            wait_s = (number - allowed + 1) * FAILURE_DECAY_S
            raise TooManyTriesError(
                f"too many wrong tries from {address}; nothing from there is looked at for {max(1, round(wait_s))} s"
            )

    def record_failure(self, address: str) -> None:
        """Counts a failed try."""
        now_s = self.monotonic()
        with self._lock:
            failures = self._by_address.pop(address, None) or _FailureCount()
            self._by_address[address] = _FailureCount(failures.compute_remaining(now_s, FAILURE_DECAY_S) + 1, now_s)
            while len(self._by_address) > MAX_ADDRESSES:
                self._by_address.popitem(last=False)
            # No more than the limit: a flood must not cost an hour of waiting afterwards.
            self._total = _FailureCount(
                min(self._total.compute_remaining(now_s, TOTAL_FAILURE_DECAY_S) + 1, MAX_TOTAL_FAILURES + 1), now_s
            )

    def count_addresses(self) -> int:
        return len(self._by_address)


AccessCheck = Callable[[Request], object]


class TokenAuth:
    """Access by bearer token; the methods `require_viewer` and `require_operator` are FastAPI dependencies.

    Args:
        directory: has the hashes of the tokens.
        listen_host: if it is loopback, every client may read.
        record_rejection: called for wrong and missing tokens.
    """

    def __init__(
        self,
        directory: CoordinatorDirectory,
        *,
        listen_host: str,
        record_rejection: RecordRejection = ignore_rejection,
    ) -> None:
        self._operators = directory.operator_sha256
        self._viewers = (*directory.operator_sha256, *directory.viewer_sha256)
        self._is_open, self._record_rejection = is_loopback(listen_host), record_rejection
        self._rate_limiter = RateLimiter(monotonic=time.monotonic)

    def require_operator(self, request: Request) -> None:
        """Admits only operators.

        Raises:
            NotAllowedError: the token is missing or wrong, or a viewer's.
            TooManyTriesError: too many wrong ones came from this address.
        """
        self._check(request, self._operators, "an operator token")

    def require_viewer(self, request: Request) -> None:
        """Admits operators and viewers; the errors are those of `require_operator`."""
        if not self._is_open:
            self._check(request, self._viewers, "a viewer or operator token")

    def get_permissions(self, request: Request) -> tuple[bool, bool]:
        """Returns whether a request may read, and whether it may act; rejects none."""
        digest = _token_digest(request)
        return self._is_open or _is_any_of(digest, self._viewers), _is_any_of(digest, self._operators)

    def find_actor(self, request: Request) -> str | None:
        """Returns who acts: the role, and the beginning of its token's hash; None for a token that does not count."""
        digest = _token_digest(request)
        if not _is_any_of(digest, self._viewers):
            return None
        role = "operator" if _is_any_of(digest, self._operators) else "viewer"
        return f"{role} {str(digest)[:ACTOR_HASH_CHARS]}"

    def _check(self, request: Request, accepted: Sequence[str], required_token: str) -> None:
        digest = _token_digest(request)
        if _is_any_of(digest, accepted):
            return
        address, path = get_request_source(request), request.url.path[:MAX_PATH_CHARS]
        if digest is None:
            if request.method != "GET":  # a page before its log-in requests much that it may not read
                self._record_rejection("action without access token", address, path)
            raise NotAllowedError(
                f"this needs {required_token}; on the coordinator's machine: edgefl coordinator init"
            )
        self._record_rejection("access token", address, f"{path}: a wrong one; this needs {required_token}")
        if _is_any_of(digest, self._viewers):  # no guess
            raise NotAllowedError(f"a viewer may not do that; this needs {required_token}")
        self._rate_limiter.check(address)
        self._rate_limiter.record_failure(address)
        log.warning("refused a wrong access token for %s", path)
        raise NotAllowedError(f"the access token is wrong; this needs {required_token}")


def require_device(
    get_signer: Callable[[Request], str], *, record_rejection: RecordRejection = ignore_rejection
) -> AccessCheck:
    """Returns a FastAPI dependency that stores the signing device in the request's state; others get 401.

    `get_signer` raises `NotAllowedError` for those others, and `record_rejection` is called for them.
    """

    async def get_device(request: Request) -> str:
        device_id = await to_thread.run_sync(get_signer, request)
        as_sent = getattr(request.state, "body_sha256", None) or hashlib.sha256(await request.body()).hexdigest()
        if request.headers.get(BODY_HASH_HEADER) != as_sent:
            raise NotAllowedError("its body is not the one that was signed")
        return device_id

    async def check(request: Request) -> None:
        try:
            request.state.device_id = await get_device(request)
        except NotAllowedError as error:
            path = request.url.path[:MAX_PATH_CHARS]
            record_rejection("signature", get_request_source(request), f"{path}: {error}")
            raise NotAllowedError(
                "only a device that has joined this fleet may ask for this, with its signature"
            ) from None

    return check


def is_loopback(host: str) -> bool:
    """Returns whether a listener on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def record_actions(
    app: ASGIApp, store: Store, *, find_actor: Callable[[Request], str | None], clock: Callable[[], float] = time.time
) -> ASGIApp:
    """Returns the application, which records actions in the store before the caller has their answer.

    `find_actor` returns the name behind a request's token, None for a token that does not count.
    """

    async def record(scope: Scope, receive: Receive, send: Send) -> None:
        is_action = (
            scope["type"] == "http"
            and scope["method"] not in _READ_METHODS
            and str(scope["path"]).startswith(API_PREFIX)
        )
        actor = await to_thread.run_sync(find_actor, Request(scope)) if is_action else None
        if actor is None:
            await app(scope, receive, send)
            return

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await to_thread.run_sync(write, int(message["status"]))
            await send(message)

        def write(status: int) -> None:
            path = escape_text(str(scope["path"]).removeprefix(API_PREFIX))[:MAX_PATH_CHARS]
            action, source = f"{scope['method']} {path}", get_request_source(Request(scope))
            outcome = "done" if status < 400 else f"refused ({status})" if status < 500 else f"failed ({status})"
            try:
                store.record_audit(actor=actor, source=source, action=action, outcome=outcome, at=clock())
            except StoreError as error:
                # The log keeps what a full disk does not.
                log.warning("%s from %s: %s, %s; not in the store: %s", actor, source, action, outcome, error)

        await app(scope, receive, send_recorded)

    return record


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


def _token_digest(request: Request) -> str | None:
    """Returns the hash of the request's bearer token, if it has one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return hash_token(token[:MAX_TOKEN_CHARS]) if scheme.lower() == "bearer" and token else None


def _is_any_of(digest: str | None, accepted: Sequence[str]) -> bool:
    # All are compared, whichever matches, so that the time reveals nothing.
    return digest is not None and bool(sum(hmac.compare_digest(digest, known) for known in accepted))
