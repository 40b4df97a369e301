"""Audit trail: every request that changes something, by whom, from where, and what came of it.

A module of its own, since it lies around the whole HTTPS API and writes to the store; `auth` only decides.
Requests without a token that counts are no part of it: any host can send them, so they are aggregated as events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from anyio import to_thread
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.coordinator.auth import MAX_PATH_CHARS, get_request_source
from edgefl.core.errors import StoreError
from edgefl.core.safe_text import escape_text
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

_READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
API_PREFIX = "/edgefl/v1/"


def record_actions(
    app: ASGIApp, store: Store, *, find_actor: Callable[[Request], str | None], clock: Callable[[], float] = time.time
) -> ASGIApp:
    """Returns the application, which records actions in the store before the caller has their answer.

    `find_actor` returns the name behind a request's token, None for a token that does not count.
    """

    async def record(scope: Scope, receive: Receive, send: Send) -> None:
        is_action = (
            scope["type"] == "http"
            and scope["method"] not in _READ_METHODS
            and str(scope["path"]).startswith(API_PREFIX)
        )
        actor = await to_thread.run_sync(find_actor, Request(scope)) if is_action else None
        if actor is None:
            await app(scope, receive, send)
            return

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await to_thread.run_sync(write, int(message["status"]))
            await send(message)

        def write(status: int) -> None:
            path = escape_text(str(scope["path"]).removeprefix(API_PREFIX))[:MAX_PATH_CHARS]
            action, source = f"{scope['method']} {path}", get_request_source(Request(scope))
            outcome = "done" if status < 400 else f"refused ({status})" if status < 500 else f"failed ({status})"
            try:
                store.record_audit(actor=actor, source=source, action=action, outcome=outcome, at=clock())
            except StoreError as error:
                # The log keeps what a full disk does not.
                log.warning("%s from %s: %s, %s; not in the store: %s", actor, source, action, outcome, error)

        await app(scope, receive, send_recorded)

    return record
