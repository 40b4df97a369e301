"""Connections to the coordinator that stay open, for Flower's client: httpx above, the standard library below.

httpx's own transport hands every 16 KB of an answer through eight layers of generators. With a model of a megabyte
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

KEPT = 2
"""The agent asks for work in one thread and sends its answers in another."""


class KeptConnections(httpx.BaseTransport):
    """Used by any thread; the client that has it closes it.

    Args:
        trust: verifies the server.
        timeout_s: how long a connect, a read or a write may stand still.
    """

    def __init__(self, trust: ssl.SSLContext, *, timeout_s: float) -> None:
        self._trust, self._timeout_s = trust, timeout_s
        self._idle: list[http.client.HTTPSConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the whole answer.

        Raises:
            httpx.TransportError: as httpx's own transport does.
        """
        connection = self._taken() or self._connected(request)
        try:
            with _in_terms_of_httpx(httpx.WriteTimeout, httpx.WriteError):
                _send(connection, request)
            with _in_terms_of_httpx(httpx.ReadTimeout, httpx.ReadError):
                response = connection.getresponse()
                content = response.read()
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return httpx.Response(response.status, headers=response.getheaders(), content=content)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _taken(self) -> http.client.HTTPSConnection | None:
        """Returns a connection that is open and idle; those that the server has closed meanwhile are let go."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.sock is not None and not _is_readable(connection.sock):
                return connection
            connection.close()

    def _connected(self, request: httpx.Request) -> http.client.HTTPSConnection:
        host, port = request.url.host, request.url.port or http.client.HTTPS_PORT
        connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._trust)
        try:
            with _in_terms_of_httpx(httpx.ConnectTimeout, httpx.ConnectError):
                connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: http.client.HTTPSConnection) -> None:
        """Keeps a connection; one that the server wanted to close has no socket any more, and `_taken` skips it."""
        with self._lock:
            if not self._is_closed and len(self._idle) < KEPT:
                self._idle.append(connection)
                return
        connection.close()


def _send(connection: http.client.HTTPSConnection, request: httpx.Request) -> None:
    """Sends a request; where that breaks off since the answer has come before its end, the answer is what counts."""
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
def _in_terms_of_httpx(late: type[httpx.TransportError], broken: type[httpx.TransportError]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise broken(str(error) or type(error).__name__) from error


def _is_readable(sock: socket.socket) -> bool:
    """Returns whether there is something to read; on an idle connection that is its end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
