"""ASGI helpers: limited and spooled request bodies, plain responses, traffic counters per node."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from starlette.requests import Request
from starlette.types import Receive, Send

log = logging.getLogger(__name__)

FLEET_PREFIX = "/v1/fleet/"
MAX_COUNTED_INSTRUCTIONS = 16
SEND_CHUNK_BYTES = 64 * 1024
"""A response is sent in chunks of this size: else all of it would be encrypted at once."""
CLOSE_CONNECTION_HEADER = (b"connection", b"close")
"""Sent with the response to a rejected body, which the server would otherwise read to its end."""
MAX_MEMORY_BYTES = 256 * 1024
"""Larger bodies go to disk; above the size of an inline body (`protocol.INLINE_BODY_BYTES`)."""


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


class SpooledRequestBody:
    """A request body; a context manager. Not thread-safe.

    `folder` is for its file, None for the system's temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._chunks: list[bytes] = []
        self._num_buffered = 0
        self._file: IO[bytes] | None = None
        self._can_spill = True
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks = []
        if self._file is not None:
            self._file.close()

    def append(self, chunk: bytes) -> None:
        """Adds the next chunk."""
        self._chunks.append(chunk)
        self._num_buffered += len(chunk)
        self.num_bytes += len(chunk)
        if self._can_spill and (self._file is not None or self._num_buffered > MAX_MEMORY_BYTES):
            self._spill()

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
