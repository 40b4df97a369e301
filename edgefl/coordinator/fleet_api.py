"""Flower's Fleet API under `/v1/fleet/`: who may ask, how large a request may be, and what was sent and fetched.

Only the outside is here, over plain ASGI; what a request means is Flower's business (`superlink.FlowerCalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edgefl.coordinator.arriving import ArrivingBody
from edgefl.coordinator.asgi import Traffic, error_json, read_pieces, respond
from edgefl.protocol import (
    CHUNK_BYTES,
    CLONED_STATUS,
    INSTANCE_HEADER,
    MAX_REQUEST_BYTES,
    REPLY_SALT_BYTES,
    STAMP_HEADER,
)

PREFIX = "/v1/fleet/"
PULL_MESSAGES, PULL_OBJECT = "pull-messages", "pull-object"
PUSH_MESSAGES, PUSH_OBJECT = "push-messages", "push-object"
MAX_OBJECT_BYTES = CHUNK_BYTES + REPLY_SALT_BYTES + 1024
"""The largest piece of a reply: one salted chunk with Flower's header before it."""
PUSH_OBJECT_BYTES = MAX_OBJECT_BYTES + 4096
"""The largest request that carries such a piece: ids and lengths come on top."""

AT_A_TIME = 4
"""So many requests are looked at side by side: more of them would only share the interpreter, which whoever listens
to heartbeats and operators needs as well, and have their bodies in memory."""

QUICK = frozenset({PULL_MESSAGES, PUSH_MESSAGES})
QUICK_BYTES = 64 * 1024
"""Such requests, up to this size, are answered where they come in: to pass them to another thread, and their answers
back, costs more than they do, and both threads share one interpreter. Whoever takes what is in them must not wait."""

OnRefused = Callable[[str, Request, int | None, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request is answered with; `instruction_id` names the instruction in it, if there is one."""

    status: int
    content: bytes
    instruction_id: str | None = None


class Calls(Protocol):
    """What answers; `names` are the requests that it knows, as they stand behind the prefix."""

    @property
    def names(self) -> Collection[str]: ...

    def node_of(self, request: Request) -> int | None:
        """Returns the node that has signed a request's headers: what can be known before the body is read."""

    def answer(self, request: Request, name: str, body: bytes) -> Answer:
        """Returns the answer to one request, whatever goes wrong; unless `QUICK`, called in a thread that may wait.

        `node_of` has named its node when the headers came.
        """

    def is_foreign(self, name: str, body: bytes, node_id: int) -> bool:
        """Returns whether a request was refused since it says that it is another device's, or answers its work."""


class Watcher(Protocol):
    """What is told of every authenticated request (the fleet's roster)."""

    def note_contact(self, node_id: int) -> None:
        """Takes a sign of life."""

    def note_call(self, node_id: int, instance: str, *, stamp: str, address: str) -> str | None:
        """Takes which process of a device asks; returns why that one is refused, None if it is not."""

    def stamp(self, node_id: int) -> str:
        """Returns what the answer carries, and the next request of that process repeats."""


class FleetApi:
    """The ASGI application under the prefix, without FastAPI's injection and middlewares.

    An unknown key or a signature that does not hold gets 401 before its body is read, and is no sign of life; a
    body over its limit gets 413, the copy of a device at work 409. Registration by devices is not offered: nodes
    come from our own enrolment only.

    Args:
        calls: what answers.
        watcher: told of every authenticated request; it may refuse the process that asks.
        on_refused: called with what was tried, the request, its node if it is known, and why it was refused.
        folder: where large bodies lie while they wait for their turn; None for the system's temporary files.
    """

    def __init__(self, calls: Calls, watcher: Watcher, on_refused: OnRefused, folder: Path | None = None) -> None:
        self._calls, self._watcher, self._on_refused, self._folder = calls, watcher, on_refused, folder
        self._turns = CapacityLimiter(AT_A_TIME)
        self.traffic = Traffic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        name = scope["path"].removeprefix(PREFIX)
        node_id = self._calls.node_of(request)
        if node_id is None:
            self._on_refused("signature", request, None, f"{name[:40]}: its key or its signature does not count")
            await respond(send, 401, error_json("Invalid SuperNode authentication"))
        elif (cloned := self._met(request, node_id)) is not None:
            await respond(send, CLONED_STATUS, error_json(cloned))
        elif request.method != "POST" or name not in self._calls.names:
            await respond(send, 404, error_json("Not Found"))
        else:
            limit_bytes = PUSH_OBJECT_BYTES if name == PUSH_OBJECT else MAX_REQUEST_BYTES
            with ArrivingBody(self._folder) as body:
                if not await read_pieces(request, receive, limit_bytes, body.add):
                    self._on_refused("size", request, node_id, f"{name}: a body over {limit_bytes} bytes, or cut off")
                    await respond(send, 413, error_json(f"body over {limit_bytes} bytes"))
                    return
                answer = await self._answered(request, name, body, node_id)
            stamp = self._watcher.stamp(node_id).encode()
            await respond(send, answer.status, answer.content, (STAMP_HEADER.encode(), stamp))

    def node_of(self, request: Request) -> int | None:
        """Returns the node that has signed a request to another part of the application, or None.

        None for a process that is refused, too: a copy must not renew the certificate of a device at work.
        """
        node_id = self._calls.node_of(request)
        if node_id is None or self._met(request, node_id) is not None:
            return None
        self._watcher.note_contact(node_id)
        return node_id

    def _met(self, request: Request, node_id: int) -> str | None:
        """Returns why the process that asks is refused, None if it is not; agents of older versions do not say."""
        headers, address = request.headers, request.client.host if request.client else ""
        instance = headers.get(INSTANCE_HEADER, "")
        return self._watcher.note_call(node_id, instance, stamp=headers.get(STAMP_HEADER, ""), address=address)

    async def _answered(self, request: Request, name: str, body: ArrivingBody, node_id: int) -> Answer:
        """Returns the answer to a device that is known, and counts what both have cost."""
        self._watcher.note_contact(node_id)
        self.traffic.sent(node_id, body.num_bytes)
        if name in QUICK and body.num_bytes <= QUICK_BYTES:
            answer = self._calls.answer(request, name, body.whole())
        else:
            answer = await to_thread.run_sync(
                lambda: self._calls.answer(request, name, body.whole()), limiter=self._turns
            )
        if answer.status in {401, 403} and self._calls.is_foreign(name, body.whole(), node_id):
            self._on_refused("reply", request, node_id, "it speaks for another device")
        if answer.instruction_id is not None or name == PULL_OBJECT:
            self.traffic.fetched(node_id, len(answer.content), answer.instruction_id)
        else:
            self.traffic.answered(node_id, len(answer.content))
        return answer
