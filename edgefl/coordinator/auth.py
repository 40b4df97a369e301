"""What all checks of callers share: signatures of devices, a rate limit of failures, rejections, error responses.

Errors are `{"v": 1, "error": CODE, "message": LINE}` with a 4xx or 5xx status, so that the client raises the same
error; those about settings have `faults` besides, a row for each setting. Who people are is decided in `api.access`.

- Rate limit: an address may fail ten times at once and regains one try every six seconds. All addresses together may
  fail two hundred times; beyond that each address has one try, so that a device with a valid token and its own
  address is accepted whatever others do. Successful tries are not counted.
- Rejections: events of the kind `request-rejected`, aggregated to bound their number. The first rejection is written
  at once. Further ones of the same kind from the same address or device are counted, and written as one row a minute.
  At most `MAX_SOURCES` are distinguished at a time; the others share a row.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from edgefl.core.config import find_setting
from edgefl.core.errors import (
    CodecError,
    ConfigError,
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    RoleError,
    StoreError,
    StrategyError,
    TaskError,
    TooManyTriesError,
    VersionError,
)
from edgefl.core.protocol import BODY_HASH_HEADER, PROTOCOL_VERSION, error_code
from edgefl.core.safe_parsing import sanitise_text
from edgefl.core.safe_text import escape_start
from edgefl.core.settings import MAX_FAULTS
from edgefl.core.types import Json
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
    RoleError: 403,  # before its base
    NotAllowedError: 401,
    NotFoundError: 404,
    NameTakenError: 409,
    VersionError: 426,
    JoinError: 403,
    StoreError: 503,
    TooManyTriesError: 429,
    NetworkError: 400,
}
SETTING_BY_ERROR: Mapping[type[EdgeflError], str] = {
    TaskError: "run.task",
    StrategyError: "strategy.name",
    CodecError: "compression.up",
}
"""Settings that errors without a setting's name are about."""
MAX_PATH_CHARS = 100

AccessCheck = Callable[[Request], object]


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
        line = escape_start(detail, MAX_DETAIL_CHARS)
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
        except BaseException:  # an interrupt too: no count may be lost
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


def require_device(
    get_signer: Callable[[Request], str],
    *,
    record_rejection: RecordRejection = ignore_rejection,
    checks_body: bool = True,
) -> AccessCheck:
    """Returns a FastAPI dependency that stores the signing device in the request's state; others get 401.

    `get_signer` raises `NotAllowedError` for those others, and `record_rejection` is called for them. Without
    `checks_body` the route reads the body itself, and compares its hash with the signed one.
    """

    async def get_device(request: Request) -> str:
        device_id = await to_thread.run_sync(get_signer, request)
        if not checks_body:
            return device_id
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


def register_error_handler(app: FastAPI) -> None:
    """Makes the app answer every `EdgeflError` as JSON."""

    @app.exception_handler(EdgeflError)
    async def answer(_request: Request, error: EdgeflError) -> JSONResponse:
        return error_response(error)


def list_faults(error: EdgeflError) -> list[Json]:
    """Returns the settings of a run file that an error is about, each with its message; a setting may be None."""
    if isinstance(error, ConfigError):
        return [{"setting": find_setting(text), "message": sanitise_text(text)} for text in error.faults[:MAX_FAULTS]]
    setting = next((name for kind, name in SETTING_BY_ERROR.items() if isinstance(error, kind)), None)
    text = str(error)
    return [] if setting is None else [{"setting": find_setting(text) or setting, "message": sanitise_text(text)}]


def error_response(error: EdgeflError) -> JSONResponse:
    """Returns the response of an error: its status, code and message."""
    status = next((status for kind, status in STATUS_BY_ERROR.items() if isinstance(error, kind)), 400)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content: Json = {"v": PROTOCOL_VERSION, "error": error_code(error), "message": sanitise_text(str(error))}
    if faults := list_faults(error):
        content["faults"] = faults
    return JSONResponse(content, status_code=status, headers=headers)
