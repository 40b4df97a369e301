"""ASGI helpers of the Fleet API: limited bodies, plain responses, traffic counters per node."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.core.protocol import MAX_BODY_BYTES
from edgefl.core.safe_parsing import parse_message

MAX_COUNTED_INSTRUCTIONS = 16
SEND_CHUNK_BYTES = 64 * 1024
"""A response is sent in chunks of this size: else all of it would be encrypted at once."""
CLOSE_CONNECTION_HEADER = (b"connection", b"close")
"""Sent with the response to a rejected body, which the server would otherwise read to its end."""


class ByteCounters:
    """Bytes received from and sent to each node since the last `pop_reply_bytes`: HTTP bodies as they were.

    Downlink is counted by instruction, since a node may fetch one while it still sends its answer to another.
    """

    def __init__(self) -> None:
        self._uplink: dict[int, int] = defaultdict(int)
        self._downlink: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._current_instruction: dict[int, str] = {}
        self._lock = threading.Lock()

    def add_uplink(self, node_id: int, num_bytes: int) -> None:
        """Counts bytes received from a node."""
        with self._lock:
            self._uplink[node_id] += num_bytes

    def add_instruction_downlink(self, node_id: int, num_bytes: int, instruction_id: str | None = None) -> None:
        """Counts bytes of a new instruction, or more of the newest."""
        with self._lock:
            key = self._current_instruction.setdefault(node_id, "") if instruction_id is None else instruction_id
            self._current_instruction[node_id] = key
            self._downlink[node_id][key] += num_bytes
            while len(self._downlink[node_id]) > MAX_COUNTED_INSTRUCTIONS:  # those that will not be answered any more
                del self._downlink[node_id][next(iter(self._downlink[node_id]))]

    def add_other_downlink(self, node_id: int, num_bytes: int) -> None:
        """Counts bytes of other responses to a node."""
        with self._lock:
            self._downlink[node_id][""] += num_bytes

    def pop_reply_bytes(self, node_id: int, instruction_id: str) -> tuple[int, int]:
        """Returns and clears the bytes of a reply: all uplink, its instruction's downlink, and other downlink."""
        with self._lock:
            downlink = self._downlink[node_id]
            return self._uplink.pop(node_id, 0), downlink.pop(instruction_id, 0) + downlink.pop("", 0)


def encode_error(detail: str) -> bytes:
    return json.dumps({"detail": detail}).encode()


async def read_limited(request: Request, receive: Receive, limit_bytes: int = MAX_BODY_BYTES) -> bytes | None:
    """Returns the whole body, or None when it is over the limit or the client disconnected."""
    chunks: list[bytes] = []
    return b"".join(chunks) if await read_chunks(request, receive, limit_bytes, chunks.append) else None


async def read_chunks(
    request: Request, receive: Receive, limit_bytes: int, on_chunk: Callable[[bytes], object]
) -> bool:
    """Passes on the body by chunks; returns whether it was complete, within the limit."""
    declared_size, size = request.headers.get("content-length", "0"), 0
    if not declared_size.isdigit() or int(declared_size) > limit_bytes:
        return False
    while True:
        event = await receive()
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit_bytes or event["type"] == "http.disconnect":
            return False
        on_chunk(chunk)
        if not event.get("more_body"):
            return True


def limit_body_size(
    app: ASGIApp, limit_bytes: int, on_too_large: Callable[[Request], None] = lambda _: None
) -> ASGIApp:
    """Returns the app with bodies cut off at the limit, before parsing and authentication.

    `on_too_large` is called with requests that were cut off.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        declared_size = Request(scope).headers.get("content-length", "0") if scope["type"] == "http" else "0"
        if not declared_size.isdigit() or int(declared_size) > limit_bytes:
            on_too_large(Request(scope))
            await send_response(send, 413, encode_error(f"body over {limit_bytes} bytes"))
            return
        size = 0

        async def send_with_close(message: Message) -> None:
            if size > limit_bytes and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), CLOSE_CONNECTION_HEADER]}
            await send(message)

        async def receive_counted() -> Message:
            nonlocal size
            event = await receive()
            size += len(event.get("body", b""))
            if size <= limit_bytes:
                return event
            on_too_large(Request(scope))
            return {"type": "http.disconnect"}

        await app(scope, receive_counted, send_with_close)

    return guard


def require_valid_json(app: ASGIApp, reject: Callable[[Send, str], Awaitable[None]]) -> ASGIApp:
    """Returns the app with POST bodies restricted to JSON that can be stored and encoded again.

    The app's own parser accepts NaN, infinities and lone surrogates; encoding one of these again, even in an error
    message, would end as an internal error. `reject` answers a request whose body is no such JSON. An empty body
    stays as it is.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body = await read_limited(Request(scope), receive)
        if body is None:
            await app(scope, _receive_disconnect, send)
            return
        try:
            value = parse_message(body, should_keep_nul=True) if body else None
        except ValueError as error:
            await reject(send, f"the body of the request is no JSON that can be used: {error}")
            return
        # Only an escape can hold a lone surrogate, and most bodies have none.
        content = json.dumps(value).encode() if b"\\u" in body else body
        events = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def replay_body() -> Message:
            return next(events, None) or await receive()

        await app(scope, replay_body, send)

    return guard


async def _receive_disconnect() -> Message:
    return {"type": "http.disconnect"}


async def send_response(send: Send, status: int, content: bytes, *extra_headers: tuple[bytes, bytes]) -> None:
    """Sends a protobuf response, or a JSON error for a status other than 200, with `extra_headers`."""
    media = b"application/protobuf" if status == 200 else b"application/json"
    headers = [(b"content-type", media), (b"content-length", str(len(content)).encode()), *extra_headers]
    if status in {401, 409, 413}:
        headers.append(CLOSE_CONNECTION_HEADER)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    view = memoryview(content)
    for end in range(SEND_CHUNK_BYTES, len(view) + SEND_CHUNK_BYTES, SEND_CHUNK_BYTES) or (0,):
        chunk, has_more = bytes(view[max(0, end - SEND_CHUNK_BYTES) : end]), end < len(view)
        await send({"type": "http.response.body", "body": chunk, "more_body": has_more})
