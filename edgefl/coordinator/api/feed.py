"""Live feed of the page: server-sent events, built once per change and shared by all clients.

A client gets a snapshot first and then changes. Each message has an id, `EPOCH-NUMBER`; a client that reconnects with
a recent id gets the missed messages, any other a new snapshot. A client that reads too slowly loses its queue and
gets a snapshot in its place, so memory stays bounded and no other client waits. Without clients nothing is built.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgefl.coordinator.api.feed_state import FeedState
from edgefl.coordinator.fleet.registry import RegistryEvent
from edgefl.core.errors import EdgeflError, NetworkError, StoreError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json

log = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 1.0
"""Changes are batched this long; rounds may be far shorter."""
KEEP_ALIVE_S = 15.0
EPOCH_IDLE_S = 10.0
"""After this long without an update the next client starts a new epoch."""
MAX_CLIENTS = 200
MAX_QUEUED_MESSAGES = 32
MAX_RECENT_MESSAGES = 64
MAX_DIGITS = 20
"""Maximum digits of the message number that a client sends."""
KEEP_ALIVE_COMMENT = b": still here\n\n"
ACCESS_CHECK_S = 2.0
SEND_TIMEOUT_S = 60.0
"""A client that has read nothing for this long is disconnected."""
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedMessage:
    number: int
    body: bytes


@dataclass(eq=False, slots=True)
class FeedClient:
    """One open page. Used in the event loop's thread, but for its creation."""

    queue: deque[_FeedMessage] = field(default_factory=deque)
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    is_started: bool = False
    is_behind: bool = False
    is_closed: bool = False

    def enqueue(self, message: _FeedMessage) -> None:
        if self.is_behind:
            return
        if len(self.queue) >= MAX_QUEUED_MESSAGES:
            self.queue.clear()
            self.is_behind = True
        else:
            self.queue.append(message)
        self.wakeup.set()

    def close(self) -> None:
        self.is_closed = True
        self.wakeup.set()


class Feed:
    """Collects changes and sends them to all clients.

    `update` is called periodically by one thread of the coordinator, `stream` runs in the web server's event loop.

    Args:
        state: of the page.
        last_seen: returns when each device was last seen, for a new epoch.
        clock: Unix seconds.
    """

    def __init__(
        self,
        state: FeedState,
        *,
        last_seen: Callable[[], dict[str, float | None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._last_seen, self._clock = state, last_seen, clock
        self._build_lock, self._lock = threading.Lock(), threading.Lock()
        self._changed: dict[str, float] = {}
        self._clients: set[FeedClient] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recent: deque[_FeedMessage] = deque(maxlen=MAX_RECENT_MESSAGES)
        self._epoch, self._number, self._updated_s = "", 0, 0.0
        self._snapshot: _FeedMessage | None = None
        self._is_closed = False

    def on_registry_event(self, event: RegistryEvent) -> None:
        """Handles an event of the device registry, in any thread."""
        with self._lock:
            self._changed[event.device_id] = self._clock()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def update(self) -> None:
        """Sends changes to all clients; does nothing without clients, or before `UPDATE_INTERVAL_S`."""
        if not self._clients or time.monotonic() - self._updated_s < 0.8 * UPDATE_INTERVAL_S:
            return
        try:
            self._publish_changes()
        except EdgeflError as error:  # the fleet goes on without the page
            log.warning("the page's feed has a gap: %s", error)
            with self._build_lock:
                self._epoch = ""  # popped changes are lost: all clients get a snapshot next

    def close(self) -> None:
        """Ends all streams; new ones are rejected."""
        self._is_closed = True
        self._call_in_loop(self._close_clients)

    def add_client(self) -> FeedClient:
        """Returns a new client, which needs a call of `stream`. Call it in the event loop's thread.

        Raises:
            NetworkError: there are too many clients, or the coordinator is stopping.
        """
        if self._is_closed or len(self._clients) >= MAX_CLIENTS:
            reason = "the coordinator is stopping" if self._is_closed else f"{MAX_CLIENTS} pages are open already"
            raise NetworkError(f"no live feed: {reason}")
        self._loop = asyncio.get_running_loop()
        client = FeedClient()
        self._clients.add(client)
        return client

    async def stream(self, client: FeedClient, last_id: str | None) -> AsyncIterator[bytes]:
        """Yields server-sent events until the client or the feed is closed.

        Args:
            client: from `add_client`; it is removed at the end.
            last_id: of the last message that the client has, if it reconnects.
        """
        try:
            initial_messages = await run_in_threadpool(self._get_initial_messages, last_id)
            client.is_started = True
            sent_number = (
                initial_messages[-1].number if initial_messages else int((last_id or "-0").rpartition("-")[2])
            )
            for message in initial_messages:
                yield message.body
            while not client.is_closed:
                if not await _wait_wakeup(client.wakeup):
                    yield KEEP_ALIVE_COMMENT
                    continue
                client.wakeup.clear()
                if client.is_behind:
                    client.is_behind = False
                    snapshot = await run_in_threadpool(self._get_snapshot)
                    sent_number = snapshot.number
                    yield snapshot.body
                while client.queue and not client.is_behind:
                    message = client.queue.popleft()
                    if message.number > sent_number:
                        sent_number = message.number
                        yield message.body
        finally:
            self._clients.discard(client)

    def _get_initial_messages(self, last_id: str | None) -> list[_FeedMessage]:
        """Returns the first messages for a client: those it missed, else a snapshot."""
        self._publish_changes()
        with self._build_lock:
            epoch, _, number = (last_id or "").rpartition("-")
            if epoch == self._epoch and number.isascii() and number.isdecimal() and len(number) < MAX_DIGITS:
                missed = [message for message in self._recent if message.number > int(number)]
                if len(missed) == self._number - int(number):
                    return missed
        return [self._get_snapshot()]

    def _publish_changes(self) -> None:
        with self._build_lock:
            with self._lock:
                changed, self._changed = self._changed, {}
            now_s = time.monotonic()
            is_stale = not self._epoch or now_s - self._updated_s > EPOCH_IDLE_S
            self._updated_s = now_s
            if is_stale:
                self._start_epoch()
            elif changes := self._state.pop_changes(changed):
                self._publish(changes)

    def _start_epoch(self) -> None:
        """Starts a new epoch; clients of an earlier one get a snapshot."""
        self._state.reset(self._last_seen())
        self._epoch, self._number = secrets.token_hex(4), 0
        self._recent.clear()
        self._snapshot = None
        self._call_in_loop(self._mark_behind)

    def _publish(self, changes: Json) -> None:
        self._number += 1
        message = _FeedMessage(number=self._number, body=self._encode_event("changes", changes))
        self._recent.append(message)
        self._snapshot = None
        self._call_in_loop(self._deliver, message)

    def _get_snapshot(self) -> _FeedMessage:
        with self._build_lock:
            if self._snapshot is None:
                self._snapshot = _FeedMessage(
                    number=self._number, body=self._encode_event("snapshot", self._state.snapshot())
                )
            return self._snapshot

    def _encode_event(self, name: str, content: Json) -> bytes:
        value = {"v": PROTOCOL_VERSION, "now": round(self._clock(), 3), **content}
        # JSON escapes line breaks, so that the data is one line whatever the name of a device.
        data = json.dumps(value, separators=(",", ":"))
        return f"id: {self._epoch}-{self._number}\nevent: {name}\ndata: {data}\n\n".encode()

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, message: _FeedMessage) -> None:
        for client in self._clients:
            client.enqueue(message)

    def _mark_behind(self) -> None:
        for client in self._clients:
            if client.is_started:
                client.queue.clear()
                client.is_behind = True
                client.wakeup.set()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()


async def _wait_wakeup(event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), KEEP_ALIVE_S)
    except TimeoutError:
        return False
    return True


class FeedResponse(Response):
    """Streams a feed to somebody who may read it, until that is over.

    `last_id` is the id of the last message that the client has, if it reconnects. `can_read` is asked again before a
    message, at most every `ACCESS_CHECK_S`, in another thread.
    """

    def __init__(
        self, feed: Feed, client: FeedClient, last_id: str | None, *, can_read: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._feed, self._client, self._last_id, self._can_read = feed, client, last_id, can_read
        self._checked_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        del scope  # Starlette's interface
        disconnected: asyncio.Future[None] = asyncio.ensure_future(_wait_disconnect(receive))
        disconnected.add_done_callback(lambda _: self._client.close())
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        stream = self._feed.stream(self._client, self._last_id)
        try:
            async for body in stream:
                if not await self._is_allowed():
                    break
                message = {"type": "http.response.body", "body": body, "more_body": True}
                # Waits while the client's connection is full; see `SEND_TIMEOUT_S`.
                await asyncio.wait_for(send(message), SEND_TIMEOUT_S)
        except TimeoutError:
            log.info("let a page go that has read nothing for %.0f s", SEND_TIMEOUT_S)
            return
        finally:
            await stream.aclose()  # type: ignore[attr-defined] # an async generator, seen as its interface
            disconnected.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await disconnected
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _is_allowed(self) -> bool:
        if time.monotonic() - self._checked_s < ACCESS_CHECK_S:
            return True
        self._checked_s = time.monotonic()
        try:
            return await run_in_threadpool(self._can_read)
        except StoreError:  # known at the next message
            return True


async def _wait_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
