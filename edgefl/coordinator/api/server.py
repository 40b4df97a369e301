"""HTTPS server: Flower's Fleet API under `/v1/fleet/`, our own API under `/edgefl/v1/`."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edgefl import __version__
from edgefl.bundles.archive import MAX_BUNDLE_FILE_BYTES
from edgefl.coordinator.asgi import limit_body_size, require_valid_json
from edgefl.coordinator.auth import MAX_PATH_CHARS, error_response, register_error_handler
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.rejected_requests import RecordRejection, get_client_network, ignore_rejection
from edgefl.core.errors import NetworkError, PortInUseError, UsageError
from edgefl.core.protocol import BUNDLES_PATH

FLEET_PREFIX = "/v1/fleet/"
KEEP_ALIVE_S = 3600
MAX_REQUEST_BYTES = 1024 * 1024
"""Maximum body of a request to our own API: a run file is a few kilobytes."""
RECEIVE_BUFFER_BYTES = 64 * 1024
"""Receive buffer of a connection; Linux doubles it. With a round trip of a quarter of a second, an upload still gets
at least a quarter of a megabyte a second."""
WRITE_BUFFER_BYTES = 64 * 1024
"""High-water mark of a connection's output; beyond it, writers wait."""
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0


def make_app(
    fleet_api: ASGIApp, routers: list[APIRouter], *, record_rejection: RecordRejection = ignore_rejection
) -> ASGIApp:
    """Returns the whole application; Flower's requests bypass FastAPI.

    `record_rejection` is called for requests that are too large.
    """
    app = FastAPI(title="edgefl", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    register_error_handler(app)
    for router in routers:
        app.include_router(router)

    def on_too_large(request: Request) -> None:
        address = get_client_network(request.client.host if request.client else None)
        record_rejection("size", address, f"{request.url.path[:MAX_PATH_CHARS]}: a body that is too large")

    own_api = limit_body_size(require_valid_json(app, _send_rejection), MAX_REQUEST_BYTES, on_too_large)
    bundles = limit_body_size(app, MAX_BUNDLE_FILE_BYTES, on_too_large)

    async def switch(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        # Bundles are written to disk as they arrive, after authentication.
        app_for_path = fleet_api if path.startswith(FLEET_PREFIX) else bundles if path == BUNDLES_PATH else own_api
        if scope["type"] == "http" and not scope["query_string"].isascii():
            await _send_rejection(
                send, "the address of the request must be ASCII; other characters are written as %XX"
            )
            return
        await app_for_path(scope, receive, send)

    return switch


async def _send_rejection(send: Send, reason: str) -> None:
    response = error_response(UsageError(reason))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body)})


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        PortInUseError: the port is in use.
        NetworkError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. The data of one read stays allocated while a connection is open, three times: raw, in
    # OpenSSL, and decrypted.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} is in use; stop what has it, or choose another --port") from None
        raise NetworkError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


class _BoundedWriteProtocol(HttpToolsProtocol):
    """Bounds the buffered output of each connection, by default half a megabyte, for devices on slow links."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)


class _HttpsServer(uvicorn.Server):
    """Shuts down once pending requests are answered, without waiting for devices' idle connections."""

    loop: asyncio.AbstractEventLoop | None = None
    num_ticks = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        self.num_ticks += 1
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=STOP_TIMEOUT_S)
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
        await super().shutdown(sockets)


class WebServer:
    """uvicorn in a thread of its own, without signal handlers."""

    def __init__(self, app: ASGIApp, directory: CoordinatorDirectory, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_BoundedWriteProtocol,
            ssl_certfile=directory.server_cert,
            ssl_keyfile=str(directory.server_key),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
            access_log=False,
            log_level="warning",
            lifespan="off",
            ws="none",
        )
        self._server, self._listener, self._directory = _HttpsServer(config), listener, directory
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
        """Loads the server's certificate from its files again, for new connections."""
        context, loop = self._server.config.ssl, self._server.loop
        if context is not None and loop is not None:
            # In the loop's own thread no handshake runs meanwhile.
            files = str(self._directory.server_cert), str(self._directory.server_key)
            loop.call_soon_threadsafe(lambda: context.load_cert_chain(*files))

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
