"""Flower's Fleet API under `/v1/fleet/`: authentication, limited and spooled bodies, traffic counters.

Only the ASGI layer is here; `superlink.FlowerFleetServicer` handles the requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, Self

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edgefl.coordinator.connections import find_pending_slot
from edgefl.core.errors import NotAllowedError
from edgefl.core.fleet_messages import FLEET_PREFIX, PULL_MESSAGES, PULL_OBJECT, PUSH_MESSAGES, PUSH_OBJECT
from edgefl.core.protocol import (
    BODY_HASH_HEADER,
    CHUNK_BYTES,
    CLONED_STATUS,
    INSTANCE_HEADER,
    MAX_REQUEST_BYTES,
    REPLY_SALT_BYTES,
    STAMP_HEADER,
)

log = logging.getLogger(__name__)

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

MAX_COUNTED_INSTRUCTIONS = 16
SEND_CHUNK_BYTES = 64 * 1024
"""A response is sent in chunks of this size: else all of it would be encrypted at once."""
CLOSE_CONNECTION_HEADER = (b"connection", b"close")
"""Sent with the response to a rejected body, which the server would otherwise read to its end."""
MAX_MEMORY_BYTES = 256 * 1024
"""Larger bodies go to disk; above the size of an inline body (`protocol.INLINE_BODY_BYTES`)."""


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

    def authenticate(self, request: Request) -> int:
        """Returns the node that signed a request's headers, before the body is read.

        Raises:
            NotAllowedError: nobody whom we know, or not now.
        """

    def signs_bodies(self, node_id: int) -> bool:
        """Returns whether a node's signatures cover its bodies; those of a stock SuperNode do not."""

    def handle(self, request: Request, method: str, body: bytes) -> FleetResponse:
        """Returns the response to one request, for any error too; may block unless in `INLINE_METHODS`.

        `authenticate` has checked the headers before, and the caller the body's hash, but that of a pushed object.

        Raises:
            NotAllowedError: a pushed object is not the one that was signed.
        """

    def is_from_other_device(self, method: str, body: bytes, node_id: int) -> bool:
        """Returns whether a rejected request names another device, or answers its work."""

    def refuse_body(self, method: str, node_id: int, limit_bytes: int) -> None:
        """Handles a body over the limit, unread: a stock SuperNode sends its reply once."""


class RequestObserver(Protocol):
    """Observer of every authenticated request (the device registry)."""

    def record_contact(self, node_id: int) -> None:
        """Records a sign of life."""

    def record_request(self, node_id: int, instance_id: str, *, stamp: str, address: str) -> str | None:
        """Records the requesting process of a device; returns why it is rejected, None if it is not."""

    def get_stamp(self, node_id: int) -> str:
        """Returns the stamp for the response, which the process repeats in its next request."""


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


def is_declared_over(request: Request, limit_bytes: int) -> bool:
    """Returns whether a request says that its body has more bytes, or does not say it as it should."""
    declared_size = request.headers.get("content-length", "0")
    return not declared_size.isdigit() or int(declared_size) > limit_bytes


async def read_chunks(
    request: Request, receive: Receive, limit_bytes: int, on_chunk: Callable[[bytes], object]
) -> bool:
    """Passes on the body by chunks; returns whether it was complete, within the limit."""
    if is_declared_over(request, limit_bytes):
        return False
    size = 0
    while True:
        event = await receive()
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit_bytes or event["type"] == "http.disconnect":
            return False
        on_chunk(chunk)
        if not event.get("more_body"):
            return True


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


class SpooledBody:
    """A body that arrives in parts, such as that of a request; a context manager. Not thread-safe.

    Args:
        folder: for its file; None for the system's temporary files.
        is_hashed: whether `sha256` is wanted.
    """

    def __init__(self, folder: Path | None, *, is_hashed: bool = True) -> None:
        self._folder = folder
        self._chunks: list[bytes] = []
        self._num_buffered = 0
        self._file: IO[bytes] | None = None
        self._can_spill = True
        self._digest = hashlib.sha256() if is_hashed else None
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._chunks = []
        if self._file is not None:
            self._file.close()

    def append(self, chunk: bytes) -> None:
        """Adds the next chunk."""
        self._chunks.append(chunk)
        self._num_buffered += len(chunk)
        self.num_bytes += len(chunk)
        if self._digest is not None:
            self._digest.update(chunk)
        if self._can_spill and (self._file is not None or self._num_buffered > MAX_MEMORY_BYTES):
            self._spill()

    @property
    def sha256(self) -> str:
        """SHA-256 of the body so far, in hexadecimal digits; empty if it is not computed."""
        return "" if self._digest is None else self._digest.hexdigest()

    def read(self) -> bytes:
        """Returns the whole body; may wait for the disk."""
        if self._file is None:
            return b"".join(self._chunks)
        self._file.seek(0)
        return b"".join([self._file.read(), *self._chunks])

    def _spill(self) -> None:
        """Writes the buffered chunks to the file; if there is no room, they stay in memory."""
        start = self.num_bytes - self._num_buffered
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 closed at the exit
            for chunk in self._chunks:
                view = memoryview(chunk)
                while view:
                    view = view[self._write(view) :]
        except OSError as error:
            log.warning("a body that arrives stays in memory: %s", error)
            self._can_spill = False
            if self._file is not None:
                self._file.truncate(start)
            return
        self._chunks, self._num_buffered = [], 0

    def _write(self, chunk: memoryview) -> int:
        """Appends a chunk to the file; returns the number of bytes written."""
        assert self._file is not None
        return self._file.write(chunk)


class FleetApi:
    """The ASGI application under the prefix, without FastAPI's injection and middlewares.

    An unknown key, an invalid signature or a repeated request gets 401 before its body is read, and is no sign of
    life. A body that is not the signed one gets 401, too, one over its limit 413, the clone of a live device 409.
    Registration by devices is not offered: nodes come from our own enrolment only.

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
        try:
            node_id = self._servicer.authenticate(request)
        except NotAllowedError as error:
            await self._refuse(request, None, send, f"{name[:40]}: {error}")
            return
        if (rejection := self._check_process(request, node_id)) is not None:
            await send_response(send, CLONED_STATUS, encode_error(rejection))
        elif request.method != "POST" or name not in self._servicer.methods:
            await send_response(send, 404, encode_error("Not Found"))
        else:
            limit_bytes = MAX_PUSH_OBJECT_BYTES if name == PUSH_OBJECT else MAX_REQUEST_BYTES
            # The servicer hashes the content of a pushed object, as its id.
            is_hashed = name != PUSH_OBJECT and self._servicer.signs_bodies(node_id)
            with SpooledBody(self._folder, is_hashed=is_hashed) as body:
                if not await read_chunks(request, receive, limit_bytes, body.append):
                    self._on_rejected(
                        "size", request, node_id, f"{name}: a body over {limit_bytes} bytes, or cut off"
                    )
                    if is_declared_over(request, limit_bytes):
                        self._servicer.refuse_body(name, node_id, limit_bytes)
                    await send_response(send, 413, encode_error(f"body over {limit_bytes} bytes"))
                    return
                if is_hashed and request.headers.get(BODY_HASH_HEADER) != body.sha256:
                    await self._refuse(request, node_id, send, f"{name}: its body is not the one that was signed")
                    return
                try:
                    response = await self._handle(request, name, body, node_id)
                except NotAllowedError as error:
                    await self._refuse(request, node_id, send, f"{name}: {error}")
                    return
            stamp = self._observer.get_stamp(node_id).encode()
            await send_response(send, response.status, response.content, (STAMP_HEADER.encode(), stamp))

    def authenticate(self, request: Request) -> int:
        """Returns the node that signed a request to another part of the application.

        Raises:
            NotAllowedError: as for one to this part, or the process is rejected: a clone must not renew the
                certificate of a live device.
        """
        node_id = self._servicer.authenticate(request)
        if (rejection := self._check_process(request, node_id)) is not None:
            raise NotAllowedError(rejection)
        self._observer.record_contact(node_id)
        return node_id

    async def _refuse(self, request: Request, node_id: int | None, send: Send, detail: str) -> None:
        self._on_rejected("signature", request, node_id, detail)
        await send_response(send, 401, encode_error("Invalid SuperNode authentication"))

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

    async def _handle(self, request: Request, method: str, body: SpooledBody, node_id: int) -> FleetResponse:
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
