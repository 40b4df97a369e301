"""HTTP keep-alive pool for Flower's client: an httpx transport over the standard library.

httpx's own transport passes every 16 KB of a response through eight layers of generators. With a model of a megabyte
that was a good part of what a round costs a device besides its training; here a body is read and sent in one call.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

MAX_IDLE_CONNECTIONS = 2
"""The agent pulls work in one thread and sends its replies in another."""


class PooledHttpTransport(httpx.BaseTransport):
    """Thread-safe httpx transport with pooled connections; closed by its client.

    Args:
        tls_context: verifies the server.
        timeout_s: idle limit of a connect, a read or a write.
    """

    def __init__(self, tls_context: ssl.SSLContext, *, timeout_s: float) -> None:
        self._tls_context, self._timeout_s = tls_context, timeout_s
        self._idle: list[http.client.HTTPSConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the complete response.

        Raises:
            httpx.TransportError: as httpx's own transport does.
        """
        connection = self._pop_idle() or self._open_connection(request)
        try:
            with _translate_errors(httpx.WriteTimeout, httpx.WriteError):
                _send(connection, request)
            with _translate_errors(httpx.ReadTimeout, httpx.ReadError):
                response = connection.getresponse()
                content = response.read()
        except BaseException:  # an interrupt too: half an answer must not stay in it
            connection.close()
            raise
        self._add_idle(connection)
        return httpx.Response(response.status, headers=response.getheaders(), content=content)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            connections, self._idle = self._idle, []
        for connection in connections:
            connection.close()

    def _pop_idle(self) -> http.client.HTTPSConnection | None:
        """Returns an idle open connection, or None; drops those that the server has closed."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.sock is not None and not _is_readable(connection.sock):
                return connection
            connection.close()

    def _open_connection(self, request: httpx.Request) -> http.client.HTTPSConnection:
        host, port = request.url.host, request.url.port or http.client.HTTPS_PORT
        connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls_context)
        try:
            with _translate_errors(httpx.ConnectTimeout, httpx.ConnectError):
                connection.connect()
        except BaseException:  # an interrupt too: half an answer must not stay in it
            connection.close()
            raise
        return connection

    def _add_idle(self, connection: http.client.HTTPSConnection) -> None:
        """Returns a connection to the pool; closed ones have no socket, and `_pop_idle` skips them."""
        with self._lock:
            if not self._is_closed and len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()


def _send(connection: http.client.HTTPSConnection, request: httpx.Request) -> None:
    """Sends a request; ignores a broken write when an early response has arrived."""
    path = request.url.raw_path.decode("ascii")
    connection.putrequest(request.method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers.raw:
        connection.putheader(name, value)
    try:
        connection.endheaders(request.read())
    except (ConnectionError, ssl.SSLEOFError):
        if not _is_readable(connection.sock):
            raise


@contextmanager
def _translate_errors(
    timeout_error: type[httpx.TransportError], network_error: type[httpx.TransportError]
) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise timeout_error(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise network_error(str(error) or type(error).__name__) from error


def _is_readable(sock: socket.socket) -> bool:
    """Returns whether a socket is readable; on an idle connection that means closed."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
