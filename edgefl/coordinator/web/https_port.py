"""The one HTTPS port: Flower's Fleet API under `/v1/fleet/`, everything of ours under `/edgefl/v1/`."""

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
from edgefl.bundles.archive import MAX_FILE_BYTES
from edgefl.coordinator.access import MAX_PATH_CHARS, error_response, show_errors
from edgefl.coordinator.asgi import capped, sound_json
from edgefl.coordinator.attempts import Note, network_of, nobody_notes
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.errors import NetworkError, PortInUseError, UsageError
from edgefl.protocol import BUNDLES_PATH

FLEET_PREFIX = "/v1/fleet/"
KEEP_ALIVE_S = 3600
MAX_REQUEST_BYTES = 1024 * 1024
"""The largest body of a request to our own API: a run file is a few kilobytes."""
READ_BYTES = 64 * 1024
"""What the system takes in of a connection before it is read; Linux doubles it. Where an answer takes a quarter of a
second, an upload still has a quarter of a megabyte a second at least."""
WAITING_BYTES = 64 * 1024
"""So much of what was said to a client may wait until it takes it; then whoever says more waits."""
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0


def make_app(fleet_api: ASGIApp, routers: list[APIRouter], *, note: Note = nobody_notes) -> ASGIApp:
    """Returns the whole application; Flower's requests take the short way past FastAPI.

    `note` is told of requests that were too large.
    """
    app = FastAPI(title="edgefl", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    show_errors(app)
    for router in routers:
        app.include_router(router)

    def on_over(request: Request) -> None:
        address = network_of(request.client.host if request.client else None)
        note("size", address, f"{request.url.path[:MAX_PATH_CHARS]}: a body that is too large")

    ours = capped(sound_json(app, _refuse), MAX_REQUEST_BYTES, on_over)
    bundles = capped(app, MAX_FILE_BYTES, on_over)

    async def switch(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        # Bundles are written to disk as they come, after who brings them has shown a token.
        chosen = fleet_api if path.startswith(FLEET_PREFIX) else bundles if path == BUNDLES_PATH else ours
        if scope["type"] == "http" and not scope["query_string"].isascii():
            await _refuse(send, "the address of the request must be ASCII; other characters are written as %XX")
            return
        await chosen(scope, receive, send)

    return switch


async def _refuse(send: Send, reason: str) -> None:
    answer = error_response(UsageError(reason))
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": bytes(answer.body)})


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        PortInUseError: somebody has the port.
        NetworkError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. What was read at a time stays allocated for as long as a connection is open, three times
    # over: as it came, in OpenSSL, and decrypted.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} is in use; stop what has it, or choose another --port") from None
        raise NetworkError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


class _Protocol(HttpToolsProtocol):
    """Lets little of an answer wait for a device with a slow link: by default half a megabyte for each."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WAITING_BYTES)


class _Server(uvicorn.Server):
    """Ends when the requests under way are answered: boards keep idle connections open, and would hold up the end."""

    loop: asyncio.AbstractEventLoop | None = None
    turns = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        self.turns += 1
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
    """uvicorn in a thread of its own; it installs no signal handlers there."""

    def __init__(self, app: ASGIApp, directory: CoordinatorDirectory, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ssl_certfile=directory.server_cert,
            ssl_keyfile=str(directory.server_key),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
            access_log=False,
            log_level="warning",
            lifespan="off",
            ws="none",
        )
        self._server, self._listener, self._directory = _Server(config), listener, directory
        self._thread = threading.Thread(target=self._run, name="https", daemon=True)

    def start(self) -> None:
        """Returns when the server answers."""
        self._thread.start()
        waited = threading.Event()
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            waited.wait(0.02)
        raise NetworkError("the HTTPS server did not start; see the log above")

    def reload(self) -> None:
        """Shows the server's certificate that is in the files now to whoever connects from now on."""
        context, loop = self._server.config.ssl, self._server.loop
        if context is not None and loop is not None:
            # In the loop's own thread no handshake is in the middle of it.
            files = str(self._directory.server_cert), str(self._directory.server_key)
            loop.call_soon_threadsafe(lambda: context.load_cert_chain(*files))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(2 * STOP_TIMEOUT_S)
        self._listener.close()

    @property
    def turns(self) -> int:
        """How often its event loop has come round: it grows as long as requests can be answered."""
        return self._server.turns

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])
