import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from edgefl.simulation.local_fleet import find_free_port

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def links(harness):
    return harness("links")


@pytest.fixture(scope="module")
def shares(harness):
    return harness("round_shares")


class Sink:
    """Says when it had read all that a connection brought; answers with one byte."""

    def __init__(self):
        self._server = socket.create_server((HOST, 0))
        self.port = self._server.getsockname()[1]
        self.had_all_s = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            wire, _ = self._server.accept()
            with wire:
                while wire.recv(65536):
                    pass
                self.had_all_s.append(time.monotonic())
                wire.sendall(b"x")


def sent(port, num_bytes):
    """Sends zeros over a connection that is there; returns when the first of them was given to it."""
    with socket.create_connection((HOST, port), timeout=20) as wire:
        time.sleep(0.3)  # the greeting of a connection takes a round trip, which is not what is looked at
        started_s = time.monotonic()
        wire.sendall(bytes(num_bytes))
        wire.shutdown(socket.SHUT_WR)
        assert wire.recv(1) == b"x"
    return started_s


@pytest.mark.extended
def test_a_payload_arrives_no_sooner_than_rate_and_delay_say_and_each_device_has_the_rate_for_itself(links):
    link, nears, sinks = (
        links.Link(delay_s=0.1, bits_per_s=4e6),
        [find_free_port(), find_free_port()],
        [Sink(), Sink()],
    )
    first, second = ([((HOST, near), (HOST, sink.port))] for near, sink in zip(nears, sinks, strict=True))
    computed_s = 0.1 + 250_000 * 8 / 4e6
    with links.linked(link, first), links.linked(link, second), ThreadPoolExecutor() as pool:
        for _ in range(5):  # a busy machine is late, never early
            started_s = pool.map(sent, nears, [250_000] * 2)
            took_s = [sink.had_all_s[-1] - at_s for sink, at_s in zip(sinks, list(started_s), strict=True)]
            assert min(took_s) >= computed_s
            if max(took_s) < computed_s + 0.3:
                break
    assert max(took_s) < computed_s + 0.3, "together they would have taken half a second more"


def test_what_no_protocol_can_be_under_is_two_delays_and_both_ways_at_the_rate(links):
    link = links.Link(delay_s=0.1, bits_per_s=5e6)
    assert link.least_round_s(1_000_000, 500_000) == pytest.approx(0.2 + 1.6 + 0.8)
    assert link.title == "100 ms, 5 Mbit/s"


def test_the_tables_tell_what_a_round_takes_beyond_the_least(links, shares):
    turns = {"edgefl": SimpleNamespace(median_round_s=4.1), "stock Flower": SimpleNamespace(median_round_s=8.2)}
    floor = shares.over_link(links.Link(delay_s=0.1, bits_per_s=5e6), 1_000_000, turns)
    last = shares.links_table([floor], 2).splitlines()[-1].split()
    assert last == ["100", "ms,", "5", "Mbit/s", "3.40", "4.10", "(+", "0.70)", "8.20", "(+", "4.80)", "2"]
    turns = {"edgefl": SimpleNamespace(median_round_s=60.3), "stock Flower": SimpleNamespace(median_round_s=75.0)}
    floor = shares.Floor(title="60 s of training", least_s=60.0, turns=turns)
    assert floor.share("stock Flower") == pytest.approx(0.2)
    assert "edgefl 60.30 s, of which 0.5 % is overhead" in shares.training_table(floor, 2)
