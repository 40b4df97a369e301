"""HTTPS server: Flower's Fleet API under `/v1/fleet/`, our own API under `/edgefl/v1/`."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable

import uvicorn
from anyio import to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl import __version__
from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.dashboard import dashboard_router, page_router
from edgefl.coordinator.api.devices import bundle_router, devices_router, rollout_router, users_router
from edgefl.coordinator.api.http_connection import HttpConnection
from edgefl.coordinator.api.runs import history_router, runs_router
from edgefl.coordinator.api.sign_in import sign_in_router
from edgefl.coordinator.api.split import split_router
from edgefl.coordinator.auth import (
    MAX_PATH_CHARS,
    RecordRejection,
    error_response,
    get_request_source,
    ignore_rejection,
    register_error_handler,
)
from edgefl.coordinator.connections import ConnectionLimiter, ConnectionSlot, find_pending_slot, make_limiters
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.enrolment_service import enrolment_router, renewal_router
from edgefl.coordinator.flower.fleet_api import (
    encode_error,
    read_chunks,
    send_response,
)
from edgefl.coordinator.tls_server import TlsListener, bind_listener, make_server_context
from edgefl.core.errors import NetworkError, PortInUseError, UsageError
from edgefl.core.fleet_messages import FLEET_PREFIX
from edgefl.core.protocol import BUNDLES_PATH, MAX_BODY_BYTES, MAX_SPLIT_BYTES, PROTOCOL_VERSION, SPLIT_PATH
from edgefl.core.safe_parsing import parse_message
from edgefl.core.types import Json
from edgefl.system.bundles.archive import MAX_BUNDLE_FILE_BYTES

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024 * 1024
"""Maximum body of a request to our own API: a run file is a few kilobytes."""
RECEIVE_BUFFER_BYTES = 64 * 1024
"""Receive buffer of a connection; Linux doubles it. With a round trip of a quarter of a second, an upload still gets
at least a quarter of a megabyte a second."""
BACKLOG = 256
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0


def make_app(
    fleet_api: ASGIApp,
    routers: list[APIRouter],
    *,
    record_rejection: RecordRejection = ignore_rejection,
    is_operator: Callable[[Request], bool] = lambda _: False,
) -> ASGIApp:
    """Returns the whole application; Flower's requests bypass FastAPI.

    `record_rejection` is called for requests that are too large. Connections with a request for which `is_operator`
    holds are no longer pending.
    """
    app = FastAPI(title="edgefl", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    register_error_handler(app)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    for router in routers:
        app.include_router(router)

    def on_too_large(request: Request) -> None:
        path = request.url.path[:MAX_PATH_CHARS]
        record_rejection("size", get_request_source(request), f"{path}: a body that is too large")

    own_api = _limit_body_size(_require_valid_json(app), MAX_REQUEST_BYTES, on_too_large)
    bundles = _limit_body_size(app, MAX_BUNDLE_FILE_BYTES, on_too_large)
    batches = _limit_body_size(app, MAX_SPLIT_BYTES, on_too_large)
    apps_by_path = {BUNDLES_PATH: bundles, SPLIT_PATH: batches}

    async def switch(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        # Bundles are written to disk as they arrive, after authentication.
        # And batches of a split network, whose assignment bounds them.
        app_for_path = fleet_api if path.startswith(FLEET_PREFIX) else apps_by_path.get(path, own_api)
        if scope["type"] == "http" and not scope["query_string"].isascii():
            await _send_rejection(
                send, "the address of the request must be ASCII; other characters are written as %XX"
            )
            return
        slot = None if app_for_path is fleet_api else find_pending_slot(scope)
        if slot is not None and await to_thread.run_sync(is_operator, Request(scope)):
            slot.authenticate(f"operator at {slot.address}")
        await app_for_path(scope, receive, send)

    return switch


def make_routers(context: ApiContext) -> list[APIRouter]:
    """Returns the routers of our own API."""
    viewer, operator, device = context.viewer, context.operator, context.device
    return [
        status_router(context),
        enrolment_router(context.enrolment, record_rejection=context.record_rejection),
        renewal_router(context.renewal, device_check=device, record_rejection=context.record_rejection),
        devices_router(context),
        users_router(context),
        runs_router(context),
        history_router(context),
        rollout_router(context.clients.deployments, viewer=viewer, operator=operator, device=device),
        rollout_router(context.clients.installations, viewer=viewer, operator=operator, device=device),
        split_router(context.split_runs, signer=context.signer),
        bundle_router(context.clients.bundle_store, viewer=viewer, operator=operator),
        dashboard_router(context),
        sign_in_router(context),
        page_router(),
    ]


def status_router(context: ApiContext) -> APIRouter:
    """Returns the routes for other programs: `/healthz` for all, `/metrics` for viewers."""
    router = APIRouter()

    @router.get("/healthz")
    def get_health() -> Json:
        return {"v": PROTOCOL_VERSION, "status": "ok", "version": __version__}

    @router.get("/metrics", dependencies=[Depends(context.viewer)])
    def get_metrics() -> Response:
        return Response(context.render_metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        PortInUseError: the port is in use.
        NetworkError: the address cannot be listened on.
    """
    try:
        return bind_listener(host, port, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} is in use; stop what has it, or choose another --port") from None
        raise NetworkError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class _HttpsServer(uvicorn.Server):
    """Accepts connections within limits; at its end it answers pending requests, and waits for no idle client."""

    listener: TlsListener | None = None
    num_ticks = 0

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext, limiter: ConnectionLimiter) -> None:
        super().__init__(config)
        self._context, self._limiter = context, limiter

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listener in sockets or []:
            self.listener = TlsListener(listener, self._context, self._limiter, self._make_protocol)

    async def on_tick(self, counter: int) -> bool:
        self.num_ticks += 1
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.listener is not None:
            await self.listener.close()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=STOP_TIMEOUT_S)
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
        await super().shutdown(sockets)

    def _make_protocol(self, slot: ConnectionSlot) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self.lifespan.state, slot=slot)


class WebServer:
    """uvicorn in a thread of its own, without signal handlers; `limiter` admits its connections."""

    def __init__(
        self,
        app: ASGIApp,
        directory: CoordinatorDirectory,
        listener: socket.socket,
        limiter: ConnectionLimiter | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
            access_log=False,
            log_config=None,  # its own handlers would write what a stranger sends as it comes
            log_level="warning",
            lifespan="off",
            ws="none",
        )
        # Connections inherit it. The data of one read stays allocated while a connection is open, three times: raw,
        # in OpenSSL, and decrypted.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._make_context = functools.partial(make_server_context, directory.server_cert, directory.server_key)
        limiter = limiter or make_limiters(directory.connections)[0]
        self._server, self._listener = _HttpsServer(config, self._make_context(), limiter), listener
        self._thread = threading.Thread(target=self._run, name="https", daemon=True)

    def start(self) -> None:
        """Starts the server, and returns once it accepts connections."""
        self._thread.start()
        never_set = threading.Event()
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            never_set.wait(0.02)
        raise NetworkError("the HTTPS server did not start; see the log above")

    def reload(self) -> None:
        """Loads the server's certificate from its files again, for new connections; goes on with the old one else."""
        try:
            context = self._make_context()
        except OSError as error:
            log.warning("the HTTPS server goes on with its old certificate: %s", error)
            return
        if self._server.listener is not None:
            self._server.listener.context = context

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(2 * STOP_TIMEOUT_S)
        self._listener.close()

    @property
    def num_ticks(self) -> int:
        """Number of event loop ticks, which grows while requests can be answered."""
        return self._server.num_ticks

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])


def _limit_body_size(app: ASGIApp, limit_bytes: int, on_too_large: Callable[[Request], None]) -> ASGIApp:
    """Returns the app with bodies cut off at the limit, before parsing and authentication.

    `on_too_large` is called with requests that were cut off.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        declared_size = Request(scope).headers.get("content-length", "0") if scope["type"] == "http" else "0"
        if not declared_size.isdigit() or int(declared_size) > limit_bytes:
            on_too_large(Request(scope))
            await send_response(send, 413, encode_error(f"body over {limit_bytes} bytes"))
            return
        size, has_started = 0, False

        async def send_unless_too_large(message: Message) -> None:
            nonlocal has_started
            if size <= limit_bytes or has_started:
                has_started = True
                await send(message)
            elif message["type"] == "http.response.start":
                await send_response(send, 413, encode_error(f"body over {limit_bytes} bytes"))

        async def receive_counted() -> Message:
            nonlocal size
            event = await receive()
            size += len(event.get("body", b""))
            if size <= limit_bytes:
                return event
            on_too_large(Request(scope))
            return {"type": "http.disconnect"}

        await app(scope, receive_counted, send_unless_too_large)

    return guard


def _require_valid_json(app: ASGIApp) -> ASGIApp:
    """Returns the app with POST bodies restricted to JSON that can be stored and encoded again.

    The app's own parser accepts NaN, infinities and lone surrogates; encoding one of these again, even in an error
    message, would end as an internal error. An empty body stays as it is.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        chunks: list[bytes] = []
        if not await read_chunks(Request(scope), receive, MAX_BODY_BYTES, chunks.append):
            await app(scope, _receive_disconnect, send)
            return
        body = b"".join(chunks)
        try:
            value = parse_message(body, should_keep_nul=True) if body else None
        except ValueError as error:
            await _send_rejection(send, f"the body of the request is no JSON that can be used: {error}")
            return
        content = body
        if b"\\u" in body:  # only an escape can hold a lone surrogate, and most bodies have none
            content = json.dumps(value).encode()
            scope.setdefault("state", {})["body_sha256"] = hashlib.sha256(body).hexdigest()  # as it was signed
        events = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def replay_body() -> Message:
            return next(events, None) or await receive()

        await app(scope, replay_body, send)

    return guard


async def _answer_disconnect(_request: Request, _error: Exception) -> Response:
    """Returns an answer for nobody: the client hung up in the middle of its request."""
    return error_response(NetworkError("the request broke off before its end; send it again"))


async def _receive_disconnect() -> Message:
    return {"type": "http.disconnect"}


async def _send_rejection(send: Send, reason: str) -> None:
    response = error_response(UsageError(reason))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body)})
