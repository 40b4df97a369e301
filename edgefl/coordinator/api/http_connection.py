"""HTTP connection of the coordinator: uvicorn's, with deadlines for headers, bodies, idleness and slow readers.

While a complete request is being answered nothing ends the connection but a reader that does not read: a long poll
and a page's feed go on for as long as they like.
"""

from __future__ import annotations

import asyncio
import enum
import json
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from edgefl.coordinator.connections import CONNECTION_EXTENSION, ConnectionSlot
from edgefl.core.protocol import PROTOCOL_VERSION

KEEP_ALIVE_S = 3600
"""How long a connection that has shown a key may be idle."""
OWNER_FACTOR = 6.0
"""Bodies and readers of connections that have shown a key may stall so many times longer: boards have bad radio."""
WRITE_BUFFER_BYTES = 64 * 1024
"""High-water mark of a connection's output; beyond it, writers wait."""
MAX_HEADER_BYTES = 64 * 1024
ABORT_DELAY_S = 0.25
"""From the answer on a closed connection to its end: the descriptor is needed at once."""
_STATUS_BY_REASON = {"address": HTTPStatus.TOO_MANY_REQUESTS, "total": HTTPStatus.SERVICE_UNAVAILABLE}
_MESSAGES = {
    HTTPStatus.BAD_REQUEST: "this is no HTTP request",
    HTTPStatus.REQUEST_TIMEOUT: "the request took too long to arrive",
    HTTPStatus.TOO_MANY_REQUESTS: "too many connections without a key from this address; try again later",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"the header of a request has at most {MAX_HEADER_BYTES} bytes",
    HTTPStatus.SERVICE_UNAVAILABLE: "too many connections without a key; try again later",
}


class _Phase(enum.Enum):
    """What of a request is expected next."""

    START = enum.auto()
    HEADER = enum.auto()
    BODY = enum.auto()


class HttpConnection(HttpToolsProtocol):
    """One connection; `slot` is its place in the limiter, which it gives back at its end."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        slot: ConnectionSlot,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._slot, self._limits = slot, slot.limiter.settings
        self._phase = _Phase.START
        self._is_rejected = False
        self._header_bytes = self._body_bytes = 0
        self._window_start_s = 0.0
        self._read_timer: asyncio.TimerHandle | None = None
        self._timer_phase = _Phase.START
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._slot.close, self._slot.is_busy = self._close_for_newcomer, self._is_answering
        self._start_read_timer(_Phase.HEADER, self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._slot.release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_rejected or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._phase is not _Phase.BODY:
            self._phase = _Phase.HEADER
            self._header_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # answered as the plain request that it also is
        except httptools.HttpParserError:
            self._fail(HTTPStatus.BAD_REQUEST, "malformed")
            return
        if self._phase is _Phase.HEADER and self._header_bytes > MAX_HEADER_BYTES:
            self._fail(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "header")
        else:
            self._update_read_timer()
            if self._phase is _Phase.START and self.cycle.response_complete:
                self._start_idle_timer()  # the answer was complete before the request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEADER
        self.scope["extensions"] = {CONNECTION_EXTENSION: self._slot}  # type: ignore[dict-item] # ours, beside ASGI's

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:
            return  # a trailer, which nothing reads
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._phase = _Phase.BODY
        self._header_bytes = self._body_bytes = 0
        self._window_start_s = self.loop.time()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = _Phase.START

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        # The rest of a request has a deadline of its own.
        if self._phase is _Phase.START and not self.pipeline and not self.transport.is_closing():
            self._start_idle_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            write_s = self._limits.write_s * self._patience
            self._write_timer = self.loop.call_later(write_s, self._on_write_deadline)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _patience(self) -> float:
        return OWNER_FACTOR if self._slot.owner is not None else 1.0

    def _is_answering(self) -> bool:
        """Returns whether a complete request is being answered to a client that reads."""
        return (
            self._phase is _Phase.START
            and self.cycle is not None
            and not self.cycle.response_complete
            and self._write_timer is None
        )

    def _start_idle_timer(self) -> None:
        idle_s = KEEP_ALIVE_S if self._slot.owner is not None else self._limits.idle_s
        self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    def _update_read_timer(self) -> None:
        """Makes the deadline that of the present phase; data alone does not put it off."""
        if self._timer_phase is self._phase and self._phase is not _Phase.START:
            return
        if self._phase is _Phase.HEADER:
            self._start_read_timer(_Phase.HEADER, self._limits.header_s)
        elif self._phase is _Phase.BODY:
            self._start_read_timer(_Phase.BODY, self._limits.stall_s)
        else:
            self._start_read_timer(_Phase.START, None)

    def _start_read_timer(self, phase: _Phase, after_s: float | None) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._timer_phase = phase
        self._read_timer = None if after_s is None else self.loop.call_later(after_s, self._on_read_deadline)

    def _on_read_deadline(self) -> None:
        self._read_timer = None
        if self._timer_phase is _Phase.HEADER:
            self._fail(HTTPStatus.REQUEST_TIMEOUT, "header")
            return
        window_s, now_s = self._limits.stall_s * self._patience, self.loop.time()
        elapsed_s = now_s - self._window_start_s
        # With reading paused, it is the application that lets the body wait.
        is_fast = self.flow.read_paused or self._body_bytes >= self._limits.min_bytes_per_s * elapsed_s
        if not is_fast and elapsed_s >= window_s - 0.01:
            self._fail(HTTPStatus.REQUEST_TIMEOUT, "body")
            return
        if is_fast:
            self._window_start_s, self._body_bytes = now_s, 0
        self._start_read_timer(_Phase.BODY, max(0.01, self._window_start_s + window_s - now_s))

    def _on_write_deadline(self) -> None:
        self._write_timer = None
        self._slot.limiter.count_refusal("write")
        self.transport.abort()

    def _close_for_newcomer(self, reason: str) -> None:
        self._answer(_STATUS_BY_REASON[reason])
        self.loop.call_later(ABORT_DELAY_S, self.transport.abort)

    def _fail(self, status: HTTPStatus, reason: str) -> None:
        """Answers with an error where no answer has begun, and closes the connection."""
        if reason != "malformed":
            self._slot.limiter.count_refusal(reason)
        if self._answer(status):
            self.transport.close()
        else:
            self.transport.abort()

    def _answer(self, status: HTTPStatus) -> bool:
        """Writes an answer of ours; returns whether that was possible. The application's comes too late then."""
        self._stop_timers()
        self._is_rejected = True
        cycle = self.cycle
        is_pending = cycle is not None and not cycle.response_complete
        if is_pending:
            cycle.disconnected = True
            cycle.message_event.set()
        if (is_pending and cycle.response_started) or self.transport.is_closing():
            return False
        code = "too-many-tries" if status is HTTPStatus.TOO_MANY_REQUESTS else "network"
        content = json.dumps({"v": PROTOCOL_VERSION, "error": code, "message": _MESSAGES[status]}).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        return True

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._read_timer = self._write_timer = None
