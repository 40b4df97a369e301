"""TLS listener for an event loop: limits before the hand-shake, a deadline for it, and a certificate that can change.

asyncio's own server accepts whatever comes, and its protocols learn of a connection only after the hand-shake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.coordinator.connections import ConnectionLimiter, ConnectionSlot

log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 16
"""Connections accepted in one turn of the event loop, which serves the others too."""
REFUSAL_PAUSE_S = 0.02
"""Pause after a turn in which all were refused: a flood must not use up the processor with that alone."""
FILES_PAUSE_S = 0.5
SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds for TLS's goodbye, and for what was written before it."""
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LOAD_TRIES = 20
LOAD_PAUSE_S = 0.05


def bind_listener(host: str, port: int, *, backlog: int) -> socket.socket:
    """Returns a listening socket; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def make_server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Returns the context of a server with this certificate.

    Two files cannot be replaced at one instant: where they do not belong together, they are read again for a second.

    Raises:
        OSError: they cannot be read, or do not belong together.
    """
    for remaining in reversed(range(LOAD_TRIES)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(cert, key)
        except ssl.SSLError:
            if not remaining:
                raise
            time.sleep(LOAD_PAUSE_S)
        else:
            break
    return context


class TlsListener:
    """Accepts connections of a listening socket within limits; runs in one event loop.

    Args:
        listener: bound and listening.
        context: for the hand-shakes to come.
        limiter: admits connections, and has the hand-shake's deadline.
        make_protocol: returns the protocol of a connection after its hand-shake; the protocol releases the slot.

    Attributes:
        context: may be replaced in any thread.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        limiter: ConnectionLimiter,
        make_protocol: Callable[[ConnectionSlot], asyncio.BaseProtocol],
    ) -> None:
        listener.setblocking(False)
        self._listener, self.context, self._limiter, self._make_protocol = listener, context, limiter, make_protocol
        self._loop = asyncio.get_running_loop()
        self._handshakes = set[asyncio.Task[None]]()
        self._accepting = self._loop.create_task(self._accept())

    async def close(self) -> None:
        """Accepts no more, and ends the hand-shakes under way; connections stay open."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            pause_s = 0.0 if await self._accept_some() else REFUSAL_PAUSE_S
            await asyncio.sleep(pause_s)

    async def _accept_some(self) -> bool:
        """Accepts the connections of a turn; returns whether one was admitted."""
        has_admitted = False
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _NO_FILES:
                    self._limiter.count_refusal("files")
                    await asyncio.sleep(FILES_PAUSE_S)
                continue  # the peer has gone before it was accepted
            slot = self._limiter.admit(str(peer[0]))
            if slot is None:
                _reset(connection)
                continue
            has_admitted = True
            task = self._loop.create_task(self._shake_hands(connection, slot))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
        return has_admitted

    async def _shake_hands(self, connection: socket.socket, slot: ConnectionSlot) -> None:
        """Makes the connection's protocol, or closes it."""

        def close(_reason: str) -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its transport, which owns it, sees the end

        slot.close = close
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(slot),
                connection,
                ssl=self.context,
                ssl_handshake_timeout=self._limiter.settings.handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:  # ssl.SSLError and ConnectionError are
            if slot.is_open:
                self._limiter.count_refusal("handshake")
            log.debug("no hand-shake with %s: %s", slot.address, error)
            slot.release()
            connection.close()
        except BaseException:  # the end of the loop; a mistake of ours must not use up the slots either
            slot.release()
            connection.close()
            raise


def _reset(connection: socket.socket) -> None:
    """Closes a connection at once: without a goodbye it leaves nothing behind here."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
    connection.close()
