"""Flower's Fleet API under `/v1/fleet/`: authentication, size limits and traffic counters.

Only the ASGI layer is here; `superlink.FlowerFleetServicer` handles the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edgefl.coordinator.connections import find_pending_slot
from edgefl.coordinator.flower.asgi import (
    FLEET_PREFIX,
    ByteCounters,
    SpooledRequestBody,
    encode_error,
    read_chunks,
    send_response,
)
from edgefl.core.protocol import (
    CHUNK_BYTES,
    CLONED_STATUS,
    INSTANCE_HEADER,
    MAX_REQUEST_BYTES,
    REPLY_SALT_BYTES,
    STAMP_HEADER,
)

PULL_MESSAGES, PULL_OBJECT = "pull-messages", "pull-object"
PUSH_MESSAGES, PUSH_OBJECT = "push-messages", "push-object"
MAX_OBJECT_BYTES = CHUNK_BYTES + REPLY_SALT_BYTES + 1024
"""Maximum size of a reply's chunk: salted, with Flower's header."""
MAX_PUSH_OBJECT_BYTES = MAX_OBJECT_BYTES + 4096
"""Maximum size of a request with such a chunk: ids and lengths come on top."""

MAX_CONCURRENT_REQUESTS = 4
"""Maximum number of requests processed at a time: more would only compete for the interpreter, which heartbeats and
operators need as well, with their bodies in memory."""

INLINE_METHODS = frozenset({PULL_MESSAGES, PUSH_MESSAGES})
MAX_INLINE_BYTES = 64 * 1024
"""`INLINE_METHODS` up to this size are handled in the event loop: passing them to another thread and back costs more
than they do, and both threads share one interpreter. Handlers of their content must not block."""

OnRejected = Callable[[str, Request, int | None, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResponse:
    """Response to a request; `instruction_id` names the instruction in it, if there is one."""

    status: int
    content: bytes
    instruction_id: str | None = None


class FleetServicer(Protocol):
    """Handler of the requests; `methods` are their names after the prefix."""

    @property
    def methods(self) -> Collection[str]: ...

    def authenticate(self, request: Request) -> int | None:
        """Returns the node that signed a request's headers, before the body is read."""

    def handle(self, request: Request, method: str, body: bytes) -> FleetResponse:
        """Returns the response to one request, for any error too; may block unless in `INLINE_METHODS`.

        `authenticate` has checked the headers before.
        """

    def is_from_other_device(self, method: str, body: bytes, node_id: int) -> bool:
        """Returns whether a rejected request names another device, or answers its work."""


class RequestObserver(Protocol):
    """Observer of every authenticated request (the device registry)."""

    def record_contact(self, node_id: int) -> None:
        """Records a sign of life."""

    def record_request(self, node_id: int, instance_id: str, *, stamp: str, address: str) -> str | None:
        """Records the requesting process of a device; returns why it is rejected, None if it is not."""

    def get_stamp(self, node_id: int) -> str:
        """Returns the stamp for the response, which the process repeats in its next request."""


class FleetApi:
    """The ASGI application under the prefix, without FastAPI's injection and middlewares.

    An unknown key or an invalid signature gets 401 before its body is read, and is no sign of life; a body over its
    limit gets 413, the clone of a live device 409. Registration by devices is not offered: nodes come from our own
    enrolment only.

    Args:
        servicer: handles the requests.
        observer: called for every authenticated request; it may reject the process.
        on_rejected: called with the kind of request, the request, its node if known, and the reason.
        folder: where large bodies are spooled; None for the system's temporary files.
    """

    def __init__(
        self,
        servicer: FleetServicer,
        observer: RequestObserver,
        on_rejected: OnRejected,
        folder: Path | None = None,
    ) -> None:
        self._servicer, self._observer, self._on_rejected, self._folder = servicer, observer, on_rejected, folder
        self._limiter = CapacityLimiter(MAX_CONCURRENT_REQUESTS)
        self.byte_counters = ByteCounters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        name = scope["path"].removeprefix(FLEET_PREFIX)
        node_id = self._servicer.authenticate(request)
        if node_id is None:
            self._on_rejected("signature", request, None, f"{name[:40]}: its key or its signature does not count")
            await send_response(send, 401, encode_error("Invalid SuperNode authentication"))
        elif (rejection := self._check_process(request, node_id)) is not None:
            await send_response(send, CLONED_STATUS, encode_error(rejection))
        elif request.method != "POST" or name not in self._servicer.methods:
            await send_response(send, 404, encode_error("Not Found"))
        else:
            limit_bytes = MAX_PUSH_OBJECT_BYTES if name == PUSH_OBJECT else MAX_REQUEST_BYTES
            with SpooledRequestBody(self._folder) as body:
                if not await read_chunks(request, receive, limit_bytes, body.append):
                    self._on_rejected(
                        "size", request, node_id, f"{name}: a body over {limit_bytes} bytes, or cut off"
                    )
                    await send_response(send, 413, encode_error(f"body over {limit_bytes} bytes"))
                    return
                response = await self._handle(request, name, body, node_id)
            stamp = self._observer.get_stamp(node_id).encode()
            await send_response(send, response.status, response.content, (STAMP_HEADER.encode(), stamp))

    def authenticate(self, request: Request) -> int | None:
        """Returns the node that signed a request to another part of the application, or None.

        Also None for a rejected process: a clone must not renew the certificate of a live device.
        """
        node_id = self._servicer.authenticate(request)
        if node_id is None or self._check_process(request, node_id) is not None:
            return None
        self._observer.record_contact(node_id)
        return node_id

    def _check_process(self, request: Request, node_id: int) -> str | None:
        """Returns why the requesting process is rejected, None if it is not; older agents send no instance id."""
        headers, address = request.headers, request.client.host if request.client else ""
        instance = headers.get(INSTANCE_HEADER, "")
        rejection = self._observer.record_request(
            node_id, instance, stamp=headers.get(STAMP_HEADER, ""), address=address
        )
        if rejection is None and (slot := find_pending_slot(request.scope)) is not None:
            slot.authenticate(f"node {node_id}")
        return rejection

    async def _handle(self, request: Request, method: str, body: SpooledRequestBody, node_id: int) -> FleetResponse:
        """Returns the response to a known device, and counts the bytes of both."""
        self._observer.record_contact(node_id)
        self.byte_counters.add_uplink(node_id, body.num_bytes)
        if method in INLINE_METHODS and body.num_bytes <= MAX_INLINE_BYTES:
            response = self._servicer.handle(request, method, body.read())
        else:
            response = await to_thread.run_sync(
                lambda: self._servicer.handle(request, method, body.read()), limiter=self._limiter
            )
        if response.status in {401, 403} and self._servicer.is_from_other_device(method, body.read(), node_id):
            self._on_rejected("reply", request, node_id, "it speaks for another device")
        if response.instruction_id is not None or method == PULL_OBJECT:
            self.byte_counters.add_instruction_downlink(node_id, len(response.content), response.instruction_id)
        else:
            self.byte_counters.add_other_downlink(node_id, len(response.content))
        return response
