"""The proxy passes on what it is given, all of it and in order, as late and as slowly as it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from chaos.wire import EVERYBODY, Proxy, Weather

from edgefl.simulation.local_fleet import find_free_port

HOST = "127.0.0.1"
CONTENT = bytes(range(256)) * 400


class Echo:
    """Sends back what it gets, a connection at a time."""

    def __init__(self) -> None:
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # A blocked accept is woken by nothing but a connection.
        self._server.close()
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=0.2):
            pass

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = self._server.accept()
                with wire:
                    while piece := wire.recv(65536):
                        wire.sendall(piece)


@pytest.fixture
def weather() -> dict[str, Weather]:
    return {EVERYBODY: Weather(), HOST: Weather()}


@pytest.fixture
def port(weather: dict[str, Weather]) -> Iterator[int]:
    echo, port = Echo(), find_free_port()
    with Proxy((HOST, port), (HOST, echo.port), weather):
        yield port
    echo.close()


def _there_and_back(port: int, content: bytes) -> tuple[bytes, float]:
    started_s = time.monotonic()
    with socket.create_connection((HOST, port), timeout=20) as wire:
        sender = threading.Thread(target=lambda: (wire.sendall(content), wire.shutdown(socket.SHUT_WR)))
        sender.start()
        got = b"".join(iter(lambda: wire.recv(65536), b""))
        sender.join()
    return got, time.monotonic() - started_s


def test_everything_arrives_in_order(port: int) -> None:
    assert _there_and_back(port, CONTENT)[0] == CONTENT


def test_both_ways_are_delayed(port: int, weather: dict[str, Weather]) -> None:
    weather[HOST].delay_s = 0.3
    got, took_s = _there_and_back(port, b"ping")
    assert got == b"ping"
    assert 0.6 <= took_s < 5.0


def test_no_more_than_the_rate_passes(port: int, weather: dict[str, Weather]) -> None:
    weather[EVERYBODY].bytes_per_s = len(CONTENT)
    got, took_s = _there_and_back(port, CONTENT)
    assert got == CONTENT
    assert 1.0 <= took_s < 10.0


def test_the_last_byte_arrives_when_rate_and_delay_say(port: int, weather: dict[str, Weather]) -> None:
    weather[HOST].delay_s, weather[HOST].bytes_per_s = 0.1, 5e6 / 8
    # A round trip to connect, then there and back; the echo sends on what has come.
    computed_s = 2 * 0.1 + 2 * 0.1 + len(CONTENT) / weather[HOST].bytes_per_s
    times = []
    while len(times) < 5 and min(times, default=9.0) > computed_s + 0.15:  # a busy machine is late, never early
        got, took_s = _there_and_back(port, CONTENT)
        assert got == CONTENT
        times.append(took_s)
    assert computed_s <= min(times) <= computed_s + 0.15, times


def test_a_connection_is_there_after_a_round_trip(port: int, weather: dict[str, Weather]) -> None:
    weather[HOST].delay_s = 0.1
    # The proxy counts from its own accept, which may come before this side knows that it is connected.
    started_s = time.monotonic()
    with socket.create_connection((HOST, port), timeout=20) as wire:
        times = []
        for _ in range(2):
            wire.sendall(b"x")
            wire.recv(1)
            times.append(time.monotonic() - started_s)
            started_s = time.monotonic()
    assert times[0] >= 0.4
    assert times[1] >= 0.2


def test_connections_over_one_wire_share_its_rate(port: int, weather: dict[str, Weather]) -> None:
    with contextlib.ExitStack() as stack:
        # Another proxy to the same echo, as a device has one for each server.
        other = find_free_port()
        stack.enter_context(Proxy((HOST, other), (HOST, port), {HOST: weather[HOST]}))
        weather[HOST].bytes_per_s = len(CONTENT)
        started_s = time.monotonic()
        # All of it passes the wire twice: at the other proxy, and at that of `port`.
        assert _there_and_back(other, CONTENT)[0] == CONTENT
        assert time.monotonic() - started_s >= 2.0


def test_nothing_passes_a_cut_wire_and_nothing_is_lost_when_it_is_mended(
    port: int, weather: dict[str, Weather]
) -> None:
    with socket.create_connection((HOST, port), timeout=20) as wire:
        wire.sendall(b"one")
        assert wire.recv(3) == b"one"
        weather[HOST].is_cut = True
        wire.sendall(b"two")
        wire.settimeout(0.5)
        with pytest.raises(TimeoutError):
            wire.recv(3)
        weather[HOST].is_cut = False
        wire.settimeout(20)
        assert wire.recv(3) == b"two"


def test_who_asks_a_server_that_is_gone_hears_it_at_once(weather: dict[str, Weather]) -> None:
    port, gone = find_free_port(), find_free_port()
    with (
        Proxy((HOST, port), (HOST, gone), weather),
        pytest.raises(ConnectionResetError),  # while it connects, or later
        socket.create_connection((HOST, port), timeout=20) as wire,
    ):
        wire.recv(1)
