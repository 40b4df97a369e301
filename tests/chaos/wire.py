"""A proxy for TCP between the devices and the servers: it delays, it holds to a rate, and it can be cut.

Kernels without netem delay no packets; here every piece that was read is passed on so much later, each way. What
TCP adds on a real wire beyond its greeting (slow start, lost packets) is not here.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Self

PIECE_BYTES = 16 * 1024
SLOW_PIECE_BYTES = 1024
"""What is passed on as a whole where a piece of the usual size would take longer than a second."""
HELD_BYTES = 256 * 1024
"""What lies in the proxy for one direction of one connection, before nothing more is read of it."""
TICK_S = 0.02
EVERYBODY = "*"


@dataclass(slots=True)
class Weather:
    """How the wire of a device, or of all, is; shared by the proxies, changed by the test's thread.

    `delay_s` is one way. All connections over the wire share its rate, which it has in either direction.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    is_cut: bool = False
    _free_s: dict[bool, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entered_s(self, num_bytes: int, *, at_s: float, is_up: bool) -> float:
        """Returns when bytes that are there at `at_s` have all gone into the wire, behind those of before."""
        if self.bytes_per_s is None:
            return at_s
        with self._lock:
            self._free_s[is_up] = max(at_s, self._free_s.get(is_up, at_s)) + num_bytes / self.bytes_per_s
            return self._free_s[is_up]

    @property
    def flying_bytes(self) -> float:
        """What a full wire holds in one direction, beside what waits before it."""
        return self.delay_s * (self.bytes_per_s or 0.0)


@dataclass(slots=True)
class _Way:
    """One direction of a connection; nothing passes before it `opens_s`."""

    source: socket.socket
    target: socket.socket
    device: str
    opens_s: float
    is_up: bool
    held: deque[tuple[float, bytes]] = field(default_factory=deque)
    num_held: int = 0
    is_ended: bool = False
    is_shut: bool = False


class Proxy:
    """Passes on what comes to `listen` to `target`; a context manager with a thread of its own.

    Args:
        listen: host and port for the devices.
        target: host and port of the server.
        weather: by the address that a device comes from; `EVERYBODY` is for all.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], weather: dict[str, Weather]) -> None:
        self._target, self._weather = target, weather
        self._server = socket.create_server(listen, backlog=64)
        self._ways: list[_Way] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{listen[1]}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._server.close()
        for way in self._ways:
            way.source.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            now_s = time.monotonic()
            readers = [way for way in self._ways if self._may_read(way)]
            # What is due already could not be passed on: it is tried again a tick later.
            due_s = min(
                (way.held[0][0] for way in self._ways if way.held and way.held[0][0] > now_s), default=math.inf
            )
            sources = [self._server, *(way.source for way in readers)]
            ready, _, _ = select.select(sources, [], [], min(TICK_S, due_s - now_s))
            if self._server in ready:
                self._accept()
            for way in readers:
                if way.source in ready:
                    self._read(way)
            for way in list(self._ways):
                self._pass_on(way)

    def _weathers(self, device: str) -> list[Weather]:
        return [self._weather[name] for name in (EVERYBODY, device) if name in self._weather]

    def _delay_s(self, device: str) -> float:
        return sum(weather.delay_s for weather in self._weathers(device))

    def _may_read(self, way: _Way) -> bool:
        flying = max((weather.flying_bytes for weather in self._weathers(way.device)), default=0.0)
        return not way.is_ended and way.num_held < HELD_BYTES + flying

    def _accept(self) -> None:
        source, (device, _) = self._server.accept()
        try:
            target = socket.create_connection(self._target, timeout=2.0)
        except OSError:
            # As if nobody listened: with RST, and at once.
            source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            source.close()
            return
        for wire in (source, target):
            wire.setblocking(False)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # TCP's own greeting was over at once here; on such a wire it takes a round trip.
        opens_s = time.monotonic() + 2 * self._delay_s(device)
        self._ways += [
            _Way(source, target, device, opens_s, is_up=True),
            _Way(target, source, device, opens_s, is_up=False),
        ]

    def _read(self, way: _Way) -> None:
        rates = [weather.bytes_per_s for weather in self._weathers(way.device)]
        is_slow = any(rate is not None and rate < PIECE_BYTES for rate in rates)
        try:
            piece = way.source.recv(SLOW_PIECE_BYTES if is_slow else PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(way)
            return
        entered_s = max(time.monotonic(), way.opens_s)
        if not piece:
            way.is_ended = True
        for weather in self._weathers(way.device):
            entered_s = weather.entered_s(len(piece), at_s=entered_s, is_up=way.is_up)
        way.held.append((entered_s + self._delay_s(way.device), piece))
        way.num_held += len(piece)

    def _pass_on(self, way: _Way) -> None:
        if any(weather.is_cut for weather in self._weathers(way.device)):
            return
        now_s = time.monotonic()
        while way.held and way.held[0][0] <= now_s:
            due_s, piece = way.held.popleft()
            if not piece:
                self._shut(way)
                return
            try:
                sent = way.target.send(piece)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(way)
                return
            way.num_held -= sent
            if sent < len(piece):
                way.held.appendleft((due_s, piece[sent:]))
                return

    def _shut(self, way: _Way) -> None:
        way.is_shut = True
        with contextlib.suppress(OSError):
            way.target.shutdown(socket.SHUT_WR)
        if all(other.is_shut for other in self._ways if other.source in {way.source, way.target}):
            self._drop(way)

    def _drop(self, way: _Way) -> None:
        """Ends a connection for both, as it does when one of the processes is killed."""
        ends = {way.source, way.target}
        self._ways = [other for other in self._ways if other.source not in ends]
        for end in ends:
            end.close()
