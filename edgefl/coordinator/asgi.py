"""The few pieces of ASGI that the Fleet API needs: capped bodies, plain responses, traffic counted per node."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.protocol import MAX_BODY_BYTES
from edgefl.untrusted import parse_message

KEPT_INSTRUCTIONS = 16
SLICE_BYTES = 64 * 1024
"""An answer leaves in slices, the next one after the one before: else all of it would be encrypted at once."""
HANG_UP = (b"connection", b"close")
"""With an answer to a body that nobody wants: the server would read it to its end, and throw it away."""


class Traffic:
    """Bytes received from and sent to each node since they were last taken: HTTP bodies as they were.

    What a node fetches is counted for the instruction that it fetches, since it may do so while it still sends the
    answer to the one before.
    """

    def __init__(self) -> None:
        self._up: dict[int, int] = defaultdict(int)
        self._down: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._fetching: dict[int, str] = {}
        self._lock = threading.Lock()

    def sent(self, node_id: int, num_bytes: int) -> None:
        """Counts what came from a node."""
        with self._lock:
            self._up[node_id] += num_bytes

    def fetched(self, node_id: int, num_bytes: int, instruction_id: str | None = None) -> None:
        """Counts what a node fetched: a new instruction, or more of the newest."""
        with self._lock:
            key = self._fetching.setdefault(node_id, "") if instruction_id is None else instruction_id
            self._fetching[node_id] = key
            self._down[node_id][key] += num_bytes
            while len(self._down[node_id]) > KEPT_INSTRUCTIONS:  # those that nobody will answer any more
                del self._down[node_id][next(iter(self._down[node_id]))]

    def answered(self, node_id: int, num_bytes: int) -> None:
        """Counts what a node was told besides."""
        with self._lock:
            self._down[node_id][""] += num_bytes

    def take(self, node_id: int, instruction_id: str) -> tuple[int, int]:
        """Returns the bytes up and down that go with a reply: all that came, what it fetched, and the small talk."""
        with self._lock:
            down = self._down[node_id]
            return self._up.pop(node_id, 0), down.pop(instruction_id, 0) + down.pop("", 0)


def error_json(detail: str) -> bytes:
    return json.dumps({"detail": detail}).encode()


async def read_capped(request: Request, receive: Receive, limit_bytes: int = MAX_BODY_BYTES) -> bytes | None:
    """Returns the whole body, or None when it is over the limit or the client went away."""
    pieces: list[bytes] = []
    return b"".join(pieces) if await read_pieces(request, receive, limit_bytes, pieces.append) else None


async def read_pieces(request: Request, receive: Receive, limit_bytes: int, add: Callable[[bytes], object]) -> bool:
    """Hands on the body piece by piece; returns whether it came to its end, within the limit."""
    declared, size = request.headers.get("content-length", "0"), 0
    if not declared.isdigit() or int(declared) > limit_bytes:
        return False
    while True:
        event = await receive()
        piece = event.get("body", b"")
        size += len(piece)
        if size > limit_bytes or event["type"] == "http.disconnect":
            return False
        add(piece)
        if not event.get("more_body"):
            return True


def capped(app: ASGIApp, limit_bytes: int, on_over: Callable[[Request], None] = lambda _: None) -> ASGIApp:
    """Returns the app with bodies cut off at the limit, before anything of them is parsed or anybody is known.

    `on_over` is told of requests that were cut off.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        declared = Request(scope).headers.get("content-length", "0") if scope["type"] == "http" else "0"
        if not declared.isdigit() or int(declared) > limit_bytes:
            on_over(Request(scope))
            await respond(send, 413, error_json(f"body over {limit_bytes} bytes"))
            return
        size = 0

        async def hanging_up(message: Message) -> None:
            if size > limit_bytes and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), HANG_UP]}
            await send(message)

        async def counted() -> Message:
            nonlocal size
            event = await receive()
            size += len(event.get("body", b""))
            if size <= limit_bytes:
                return event
            on_over(Request(scope))
            return {"type": "http.disconnect"}

        await app(scope, counted, hanging_up)

    return guard


def sound_json(app: ASGIApp, refuse: Callable[[Send, str], Awaitable[None]]) -> ASGIApp:
    """Returns the app with bodies of POST requests that hold JSON of which everything can be stored and said again.

    The app's own parser lets numbers through that are none, and halves of characters; whatever says one of these
    again, be it the message that something is wrong with it, would end as an internal error. `refuse` answers a
    request whose body is no such JSON. An empty body stays as it is.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body = await read_capped(Request(scope), receive)
        if body is None:
            await app(scope, _gone, send)
            return
        try:
            value = parse_message(body, keeps_nul=True) if body else None
        except ValueError as error:
            await refuse(send, f"the body of the request is no JSON that can be used: {error}")
            return
        # Only an escape brings half characters in, and most bodies have none.
        whole = json.dumps(value).encode() if b"\\u" in body else body
        events = iter([{"type": "http.request", "body": whole, "more_body": False}])

        async def again() -> Message:
            return next(events, None) or await receive()

        await app(scope, again, send)

    return guard


async def _gone() -> Message:
    return {"type": "http.disconnect"}


async def respond(send: Send, status: int, content: bytes, *more: tuple[bytes, bytes]) -> None:
    """Sends one protobuf answer, or for another status than 200 one JSON error; `more` are further headers."""
    media = b"application/protobuf" if status == 200 else b"application/json"
    headers = [(b"content-type", media), (b"content-length", str(len(content)).encode()), *more]
    if status in {401, 409, 413}:
        headers.append(HANG_UP)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    view = memoryview(content)
    for end in range(SLICE_BYTES, len(view) + SLICE_BYTES, SLICE_BYTES) or (0,):
        piece, has_more = bytes(view[max(0, end - SLICE_BYTES) : end]), end < len(view)
        await send({"type": "http.response.body", "body": piece, "more_body": has_more})
