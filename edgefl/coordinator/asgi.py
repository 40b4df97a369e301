"""The few pieces of ASGI that the Fleet API needs: capped bodies, plain responses, traffic counted per node."""

from __future__ import annotations

import json
import threading
from collections import defaultdict

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.protocol import MAX_BODY_BYTES


class Traffic:
    """Bytes received from and sent to each node since they were last taken: HTTP bodies as they were."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._lock = threading.Lock()

    def count(self, node_id: int, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            counts = self._counts[node_id]
            counts[0] += up
            counts[1] += down

    def take(self, node_id: int) -> tuple[int, int]:
        with self._lock:
            up, down = self._counts.pop(node_id, (0, 0))
        return up, down


def error_json(detail: str) -> bytes:
    return json.dumps({"detail": detail}).encode()


async def read_capped(request: Request, receive: Receive, limit_bytes: int = MAX_BODY_BYTES) -> bytes | None:
    """Returns the whole body, or None when it is over the limit or the client went away."""
    pieces, size = [], 0
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limit_bytes:
        return None
    while True:
        event = await receive()
        pieces.append(event.get("body", b""))
        size += len(pieces[-1])
        if size > limit_bytes or event["type"] == "http.disconnect":
            return None
        if not event.get("more_body"):
            return b"".join(pieces)


def capped(app: ASGIApp, limit_bytes: int) -> ASGIApp:
    """Returns the app with bodies cut off at the limit, before anything of them is parsed or anybody is known."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        declared = Request(scope).headers.get("content-length", "0") if scope["type"] == "http" else "0"
        if not declared.isdigit() or int(declared) > limit_bytes:
            await respond(send, 413, error_json(f"body over {limit_bytes} bytes"))
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            event = await receive()
            size += len(event.get("body", b""))
            return event if size <= limit_bytes else {"type": "http.disconnect"}

        await app(scope, counted, send)

    return guard


async def respond(send: Send, status: int, content: bytes) -> None:
    """Sends one protobuf answer, or for another status than 200 one JSON error."""
    media = b"application/protobuf" if status == 200 else b"application/json"
    headers = ((b"content-type", media), (b"content-length", str(len(content)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
