"""Streaming HTTP response of a feed, until its client disconnects, stops reading, or the feed ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgefl.coordinator.web.feed import Feed, FeedClient

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0
"""A client that has read nothing for this long is disconnected."""
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-accel-buffering": "no",
}


class FeedResponse(Response):
    """Streams a feed; `last_id` is the id of the last message that the client has, if it reconnects."""

    def __init__(self, feed: Feed, client: FeedClient, last_id: str | None) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._feed, self._client, self._last_id = feed, client, last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        del scope  # Starlette's interface
        disconnected: asyncio.Future[None] = asyncio.ensure_future(_wait_disconnect(receive))
        disconnected.add_done_callback(lambda _: self._client.close())
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        stream = self._feed.stream(self._client, self._last_id)
        try:
            async for body in stream:
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


async def _wait_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
