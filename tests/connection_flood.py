"""A flood of connections without a key, as a process of its own: PORT CA KIND NUMBER SECONDS ADDRESS.

Prints as JSON how many connections it opened, and how long the longest-lived of them was open, in seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import ssl
import sys
import time

PAUSE_S = 0.1
HEAD = b"GET /edgefl/v1/hello HTTP/1.1\r\nhost: x\r\n"
BODY_HEAD = b"POST /edgefl/v1/enroll HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
HANDSHAKES_PER_S = 300


class Flood:
    """Keeps `number` connections open for `seconds`: a closed one is opened again."""

    def __init__(self, port: int, ca: str, kind: str, number: int, source: str) -> None:
        self._port, self._kind, self._number, self._source = port, kind, number, source
        self._context = ssl.create_default_context(cafile=ca)
        self._context.check_hostname = False
        self._selector = selectors.DefaultSelector()
        self._opened_s: dict[socket.socket, float] = {}
        self.num_opened, self.longest_s = 0, 0.0

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for _ in range(min(50, self._number - len(self._opened_s))):
                self._open()
            self._read()
            self._drip()
        now_s = time.monotonic()
        self.longest_s = max([self.longest_s, *(now_s - opened_s for opened_s in self._opened_s.values())])

    def shake_hands(self, seconds: float) -> None:
        """Makes one hand-shake after the other, with a pause so that the attacker does not use up the machine."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), self._connect() as plain:
                plain.settimeout(1)
                with self._context.wrap_socket(plain, server_hostname="127.0.0.1"):
                    self.num_opened += 1
            time.sleep(1 / HANDSHAKES_PER_S)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=0.5, source_address=(self._source, 0))

    def _open(self) -> None:
        try:
            connection = self._connect()
            if self._kind != "idle":
                connection = self._context.wrap_socket(connection, server_hostname="127.0.0.1")
                connection.sendall(HEAD if self._kind == "slow-header" else BODY_HEAD)
            connection.setblocking(False)
        except OSError:
            return
        self.num_opened += 1
        self._opened_s[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self) -> None:
        """Drops the connections that the other side has closed."""
        for key, _ in self._selector.select(PAUSE_S):
            connection = key.fileobj
            with contextlib.suppress(ssl.SSLWantReadError, BlockingIOError):
                try:
                    if connection.recv(4096):
                        continue
                except (ssl.SSLWantReadError, BlockingIOError):
                    raise
                except OSError:
                    pass
                self._selector.unregister(connection)
                self.longest_s = max(self.longest_s, time.monotonic() - self._opened_s.pop(connection))
                connection.close()

    def _drip(self) -> None:
        if self._kind == "idle":
            return
        for connection in self._opened_s:
            with contextlib.suppress(OSError):
                connection.send(b"x")


def main() -> None:
    port, ca, kind, number, seconds, source = sys.argv[1:]
    os.nice(19)
    flood = Flood(int(port), ca, kind, int(number), source)
    if kind == "handshakes":
        flood.shake_hands(float(seconds))
    else:
        flood.run(float(seconds))
    json.dump({"opened": flood.num_opened, "longest_s": round(flood.longest_s, 1)}, sys.stdout)


if __name__ == "__main__":
    main()
