"""One thread that has the MQTT connections of many devices, and does what is due at a time.

paho would have a thread for each. Here its clients are driven from outside, by one selector for all of them.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

import paho.mqtt.client as mqtt

MISC_S = 1.0
"""A client looks so often whether it is to ping its broker, as in `device.mqtt.session.MqttSession.run`."""


class Ears:
    """`start`, `stop` and `call` are for any thread, all else for this one."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._arrived: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = socket.socketpair()
        for end in (self._wake_r, self._wake_w):
            end.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, lambda _: self._wake_r.recv(65536))
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ears", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.call(self._end)
        self._thread.join()

    def call(self, action: Callable[[], None]) -> None:
        """Has the thread do it soon."""
        self._arrived.put(action)
        with contextlib.suppress(BlockingIOError):
            self._wake_w.send(b"!")

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Has it done after so long."""
        self._number += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._number, action))

    def take(self, client: mqtt.Client, on_lost: Callable[[], None]) -> None:
        """Reads and writes what a client's connection brings from now on, until it ends."""
        wire = client.socket()
        if isinstance(wire, ssl.SSLSocket):
            _Wire(self, self._selector, client, wire, on_lost)
        else:  # it has ended already
            on_lost()

    def _run(self) -> None:
        while not self._is_over:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            for key, events in self._selector.select(wait_s):
                key.data(events)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._arrived.get_nowait()()
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()

    def _end(self) -> None:
        self._is_over = True


class _Wire:
    """One connection, as long as it lasts."""

    def __init__(
        self,
        ears: Ears,
        selector: selectors.BaseSelector,
        client: mqtt.Client,
        wire: ssl.SSLSocket,
        on_lost: Callable[[], None],
    ) -> None:
        self._ears, self._selector, self._client, self._wire, self._on_lost = ears, selector, client, wire, on_lost
        selector.register(wire, selectors.EVENT_READ | selectors.EVENT_WRITE, self._ready)
        client.on_socket_register_write = lambda *_: self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
        client.on_socket_unregister_write = lambda *_: self._watch(selectors.EVENT_READ)
        ears.later(MISC_S, self._look_after)

    @property
    def _is_open(self) -> bool:
        return self._client.socket() is self._wire

    def _watch(self, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is closed already
            self._selector.modify(self._wire, events, self._ready)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._client.loop_write()
        if events & selectors.EVENT_READ and self._is_open:
            self._client.loop_read()
        while self._is_open and self._wire.pending():  # decrypted already, the selector knows nothing of it
            self._client.loop_read()
        self._check()

    def _look_after(self) -> None:
        if self._is_open:
            self._client.loop_misc()
            self._check()
            self._ears.later(MISC_S, self._look_after)

    def _check(self) -> None:
        if not self._is_open:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._wire)
            self._on_lost()
