"""The live feed of the page: server-sent events, built once per change and shared by all who listen.

A client gets a snapshot first and then changes. Each message has an id, `EPOCH-NUMBER`; who comes back with the id of
a recent one gets what it missed, everybody else a new snapshot. A client that reads too slowly loses its queue and
gets a snapshot in its place, so memory stays bounded and nobody else waits. While nobody listens nothing is built.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from edgefl.coordinator.fleet.roster import RosterEvent
from edgefl.coordinator.web.feed_state import FeedState
from edgefl.errors import EdgeflError, NetworkError
from edgefl.protocol import PROTOCOL_VERSION
from edgefl.types import Json

log = logging.getLogger(__name__)

UPDATE_EVERY_S = 1.0
"""Changes are gathered for so long; rounds may be far shorter."""
HEARTBEAT_S = 15.0
IDLE_S = 10.0
"""After so long without an update the next client begins a new epoch."""
MAX_CLIENTS = 200
MAX_WAITING = 32
KEPT_MESSAGES = 64
MAX_DIGITS = 20
"""Of the number of a message that a client says it has."""
HEARTBEAT = b": still here\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    number: int
    body: bytes


@dataclass(eq=False, slots=True)
class Client:
    """One open page; all but its making happens in the event loop's thread."""

    waiting: deque[_Message] = field(default_factory=deque)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    is_behind: bool = False
    is_closed: bool = False

    def put(self, message: _Message) -> None:
        if self.is_behind:
            return
        if len(self.waiting) >= MAX_WAITING:
            self.waiting.clear()
            self.is_behind = True
        else:
            self.waiting.append(message)
        self.woken.set()

    def close(self) -> None:
        self.is_closed = True
        self.woken.set()


class Feed:
    """Gathers what happens and hands it to everybody who listens.

    `update` is called now and then by one thread of the coordinator, `stream` runs in the web server's event loop.

    Args:
        state: what is shown.
        last_seen: when each device was last heard, for a new epoch.
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
        self._building, self._lock = threading.Lock(), threading.Lock()
        self._changed: dict[str, float] = {}
        self._clients: set[Client] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recent: deque[_Message] = deque(maxlen=KEPT_MESSAGES)
        self._epoch, self._number, self._updated_s = "", 0, 0.0
        self._snapshot: _Message | None = None
        self._is_closed = False

    def heard(self, event: RosterEvent) -> None:
        """Takes an event of the roster, from any thread."""
        with self._lock:
            self._changed[event.device_id] = self._clock()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def update(self) -> None:
        """Sends what has changed to all clients; does nothing while there are none, or sooner than need be."""
        if not self._clients or time.monotonic() - self._updated_s < 0.8 * UPDATE_EVERY_S:
            return
        try:
            self._build()
        except EdgeflError as error:  # the fleet goes on without those who look at it
            log.warning("the page's feed has a gap: %s", error)
            with self._building:
                self._epoch = ""  # what was taken and never told: all get a snapshot next

    def close(self) -> None:
        """Ends all streams; new ones are refused."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_clients)

    def admit(self) -> Client:
        """Returns a new client, which `stream` must be called for; for the event loop's thread.

        Raises:
            NetworkError: too many listen, or the coordinator is stopping.
        """
        if self._is_closed or len(self._clients) >= MAX_CLIENTS:
            why = "the coordinator is stopping" if self._is_closed else f"{MAX_CLIENTS} pages are open already"
            raise NetworkError(f"no live feed: {why}")
        self._loop = asyncio.get_running_loop()
        client = Client()
        self._clients.add(client)
        return client

    async def stream(self, client: Client, last_id: str | None) -> AsyncIterator[bytes]:
        """Yields server-sent events until the client or the feed is closed.

        Args:
            client: from `admit`; it is forgotten at the end.
            last_id: of the last message that the client has, if it comes back.
        """
        try:
            first = await run_in_threadpool(self._first, last_id)
            client.has_begun = True
            sent = first[-1].number if first else int((last_id or "-0").rpartition("-")[2])
            for message in first:
                yield message.body
            while not client.is_closed:
                if not await _woken(client.woken):
                    yield HEARTBEAT
                    continue
                client.woken.clear()
                if client.is_behind:
                    client.is_behind = False
                    snapshot = await run_in_threadpool(self._whole)
                    sent = snapshot.number
                    yield snapshot.body
                while client.waiting and not client.is_behind:
                    message = client.waiting.popleft()
                    if message.number > sent:
                        sent = message.number
                        yield message.body
        finally:
            self._clients.discard(client)

    def _first(self, last_id: str | None) -> list[_Message]:
        """Returns what a client begins with: what it missed, else everything."""
        self._build()
        with self._building:
            epoch, _, number = (last_id or "").rpartition("-")
            if epoch == self._epoch and number.isascii() and number.isdecimal() and len(number) < MAX_DIGITS:
                missed = [message for message in self._recent if message.number > int(number)]
                if len(missed) == self._number - int(number):
                    return missed
        return [self._whole()]

    def _build(self) -> None:
        with self._building:
            with self._lock:
                changed, self._changed = self._changed, {}
            now_s = time.monotonic()
            is_stale = not self._epoch or now_s - self._updated_s > IDLE_S
            self._updated_s = now_s
            if is_stale:
                self._begin()
            elif news := self._state.take(changed):
                self._publish(news)

    def _begin(self) -> None:
        """Begins a new epoch; clients of an earlier one, which nothing was built for, get a snapshot."""
        self._state.begin(self._last_seen())
        self._epoch, self._number = secrets.token_hex(4), 0
        self._recent.clear()
        self._snapshot = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._mark_behind)

    def _publish(self, news: Json) -> None:
        self._number += 1
        message = _Message(number=self._number, body=self._event("changes", news))
        self._recent.append(message)
        self._snapshot = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, message)

    def _whole(self) -> _Message:
        with self._building:
            if self._snapshot is None:
                self._snapshot = _Message(number=self._number, body=self._event("snapshot", self._state.whole()))
            return self._snapshot

    def _event(self, name: str, content: Json) -> bytes:
        value = {"v": PROTOCOL_VERSION, "now": round(self._clock(), 3), **content}
        # JSON escapes line breaks, so that the data is one line whatever a device is called.
        data = json.dumps(value, separators=(",", ":"))
        return f"id: {self._epoch}-{self._number}\nevent: {name}\ndata: {data}\n\n".encode()

    def _deliver(self, message: _Message) -> None:
        for client in self._clients:
            client.put(message)

    def _mark_behind(self) -> None:
        for client in self._clients:
            if client.has_begun:
                client.waiting.clear()
                client.is_behind = True
                client.woken.set()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()


async def _woken(event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), HEARTBEAT_S)
    except TimeoutError:
        return False
    return True
