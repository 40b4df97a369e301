"""All-reduces between members over a carrier that tests hold: whole, broken, restarted, senseless messages."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgefl.core.errors import NetworkError
from edgefl.core.types import CollectiveConfig, GossipConfig
from edgefl.device.peers.collective_link import FIRST_S, LOST_S, CollectiveBrokenError, CollectiveLink
from edgefl.device.peers.collective_messages import HEADER, ChunkMessage, decode_message, encode_message
from edgefl.strategies.peer_algorithms.collectives import AllReduce, make_schedule

NAMES = ("a", "b", "c")


class Network:
    """Carriers of all members; who is in `away` is reached by nobody."""

    def __init__(self) -> None:
        self.receivers: dict[str, Callable[[str, bytes], None]] = {}
        self.away: set[str] = set()
        self.refused_s: dict[str, float] = {}
        self.refused = itertools.cycle([False, True])

    def make(self, name: str) -> Callable[[GossipConfig, Callable[[str, bytes], None]], Any]:
        network = self

        class Carrier:
            def __init__(self, plan: GossipConfig, on_message: Callable[[str, bytes], None]) -> None:
                self.peers = [edge.neighbour for edge in plan.edges]
                network.receivers[name] = on_message
                self.get_refusal_times = lambda: network.refused_s

            def start(self) -> None: ...

            def stop(self) -> None: ...

            def set_addresses(self, _: object) -> None: ...

            def set_peers(self, peers: list[str]) -> None:
                self.peers = list(peers)

            def list_connected_peers(self) -> frozenset[str]:
                return frozenset(peer for peer in self.peers if peer in network.receivers) - network.away

            def send(self, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
                """Has room for every other message."""
                if is_reply and (next(network.refused) or receiver not in network.receivers):
                    return False
                if receiver in network.receivers and receiver not in network.away:
                    network.receivers[receiver](name, payload)
                return True

        return Carrier


def config(group: str = "g", members: tuple[str, ...] = NAMES) -> CollectiveConfig:
    return CollectiveConfig(
        collective="ring", members=members, group=group, addresses=tuple(f"{name}:1" for name in members)
    )


def run(link: CollectiveLink, name: str, vector: Any, *, group: str = "g", reduction: int = 0) -> int:
    schedule = make_schedule("ring", 3, len(vector))
    link.open("run", config(group), schedule, vector_bytes=vector.nbytes)
    member = AllReduce(schedule, NAMES.index(name), vector, chunk_size=3)
    return link.run(member, reduction, lambda: False, vector.dtype)


def in_threads(work: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def note(name: str, act: Callable[[], Any]) -> None:
        try:
            results[name] = act()
        except CollectiveBrokenError as error:
            results[name] = error

    threads = [threading.Thread(target=note, args=item) for item in work.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "they wait for ever"
    return results


def run_all(links: dict[str, CollectiveLink], group: str) -> tuple[set[bytes], dict[str, int]]:
    vectors = {name: np.full(20, index + 1.0, np.float32) for index, name in enumerate(NAMES)}
    sent = in_threads({name: lambda n=name: run(links[n], n, vectors[n], group=group) for name in NAMES})
    return {vector.tobytes() for vector in vectors.values()}, sent


def test_members_end_with_the_same_sum_round_after_round_over_a_carrier_that_is_often_full() -> None:
    network = Network()
    links = {name: CollectiveLink(name, network.make(name)) for name in NAMES}
    for group in ("g", "h"):
        sums, sent = run_all(links, group)
        assert sums == {np.full(20, 6.0, np.float32).tobytes()}
        assert all(count >= 4 * 4 * 6 for count in sent.values())
    for link in links.values():
        link.close()


def test_a_member_that_gives_up_leaves_nobody_waiting_even_who_begins_later() -> None:
    network = Network()
    links = {name: CollectiveLink(name, network.make(name)) for name in NAMES}
    for name in NAMES:
        links[name].open("run", config("before"), make_schedule("ring", 3, 9), vector_bytes=36)
    links["c"].open("run", config(), make_schedule("ring", 3, 9), vector_bytes=36)
    links["c"].abort()
    vector = np.ones(9, np.float32)
    results = in_threads({name: lambda n=name: run(links[n], n, vector.copy()) for name in "ab"})
    assert {str(error) for error in results.values()} == {"c has given up"}


def test_members_begin_though_the_first_could_not_connect_to_those_that_began_after_it() -> None:
    network = Network()
    links = {name: CollectiveLink(name, network.make(name)) for name in NAMES}
    network.refused_s = dict.fromkeys(NAMES, time.monotonic())
    for group in ("g", "h"):
        assert run_all(links, group)[0] == {np.full(20, 6.0, np.float32).tobytes()}


def test_a_member_whose_machine_refuses_connections_is_gone_at_once_but_not_before_it_has_greeted() -> None:
    network = Network()
    seconds = itertools.count(0, 0.25)
    first = CollectiveLink("a", network.make("a"), lambda: float(next(seconds)))
    network.refused_s = {"b": 1e9, "c": 1e9}
    vector = np.ones(9, np.float32)
    for group, name in (("before", "b"), ("g", "c")):
        first.open("run", config(group), make_schedule("ring", 3, 9), vector_bytes=36)
        greeting = ChunkMessage(group=first._group, session=b"1" * 8, is_greeting=True)
        first.receive(name, encode_message(greeting))
    with pytest.raises(CollectiveBrokenError, match="c has ended"):
        first.run(AllReduce(make_schedule("ring", 3, 9), 0, vector, chunk_size=3), 0, lambda: False, vector.dtype)
    assert next(seconds) < LOST_S


def test_a_member_that_is_not_reached_or_that_restarts_breaks_the_group() -> None:
    network = Network()
    clock = itertools.count(0, 5)
    first = CollectiveLink("a", network.make("a"), lambda: float(next(clock)))
    second = CollectiveLink("b", network.make("b"))
    second.open("run", config(), make_schedule("ring", 3, 9), vector_bytes=36)
    with pytest.raises(CollectiveBrokenError, match=r"[bc] is not reached"):
        run(first, "a", np.ones(9, np.float32))
    group = first._group
    for session in (b"1" * 8, b"2" * 8):
        first.receive("c", encode_message(ChunkMessage(group=group, session=session, reduction=9)))
    with pytest.raises(CollectiveBrokenError, match="c has restarted"):
        first.run(
            AllReduce(make_schedule("ring", 3, 9), 0, np.ones(9, np.float32), chunk_size=3),
            0,
            lambda: False,
            np.dtype("f4"),
        )


def test_a_member_that_restarts_after_it_took_a_chunk_and_before_it_sent_one_leaves_nobody_waiting() -> None:
    network = Network()
    links = {name: CollectiveLink(name, network.make(name)) for name in NAMES}
    links["a"].open("run", config(), make_schedule("ring", 3, 9), vector_bytes=36)

    def reduce(name: str) -> int:
        try:
            return run(links[name], name, np.ones(9, np.float32))
        except CollectiveBrokenError:
            links[name].abort()
            raise

    def restart() -> int:
        until_s = time.monotonic() + 20
        while not links["a"]._received:
            assert time.monotonic() < until_s, "c has sent nothing"
            links["a"]._greet()  # its process would, as soon as the others are reached
            time.sleep(0.01)
        links["a"] = CollectiveLink("a", network.make("a"))
        return reduce("a")

    results = in_threads({"a": restart, "b": lambda: reduce("b"), "c": lambda: reduce("c")})
    assert {type(result) for result in results.values()} == {CollectiveBrokenError}
    assert "a has restarted" in map(str, results.values())


@pytest.mark.parametrize(("num_entries", "limit_s"), [(9, FIRST_S), (2_500_000, 2 * FIRST_S)])
def test_a_member_that_is_reached_and_never_begins_breaks_the_group(num_entries: int, limit_s: float) -> None:
    network = Network()
    for name in "bc":
        CollectiveLink(name, network.make(name)).open(
            "run", config("h"), make_schedule("ring", 3, 9), vector_bytes=36
        )
    clock = itertools.count(0, 5)
    link = CollectiveLink("a", network.make("a"), lambda: float(next(clock)))
    with pytest.raises(CollectiveBrokenError, match=r"[bc] has not begun"):
        run(link, "a", np.ones(num_entries, np.float32))
    assert limit_s < next(clock) < limit_s + 60, "a member may still fetch its model, after all others"


def test_no_chunk_is_sent_to_a_member_that_has_not_begun() -> None:
    network = Network()
    sent: list[ChunkMessage] = []
    network.receivers["b"] = lambda _sender, payload: sent.append(decode_message(payload))
    clock = itertools.count(0, 5)
    link = CollectiveLink("a", network.make("a"), lambda: float(next(clock)))
    with pytest.raises(CollectiveBrokenError, match="c is not reached"):
        run(link, "a", np.ones(9, np.float32))
    assert [message.is_greeting for message in sent] == [True]


@pytest.mark.parametrize("values", [b"123", bytes(400)])
def test_a_chunk_that_makes_no_sense_breaks_the_group(values: bytes) -> None:
    network = Network()
    link = CollectiveLink("a", network.make("a"))
    schedule = make_schedule("ring", 3, 9)
    link.open("run", config(), schedule, vector_bytes=36)
    link.receive("c", encode_message(ChunkMessage(group=link._group, session=bytes(8), start=6, values=values)))
    with pytest.raises(CollectiveBrokenError, match="c"):
        link.run(AllReduce(schedule, 0, np.ones(9, np.float32), chunk_size=3), 0, lambda: False, np.dtype("f4"))


def test_a_message_survives_the_wire_and_a_malformed_one_is_refused() -> None:
    message = ChunkMessage(group=b"g" * 16, session=b"s" * 8, reduction=3, step=2, start=10**10, values=b"1234")
    assert decode_message(encode_message(message)) == message
    greeting = ChunkMessage(group=b"g" * 16, session=b"s" * 8, is_greeting=True)
    assert decode_message(encode_message(greeting)) == greeting
    for wrong in (
        b"",
        encode_message(message)[: HEADER.size - 1],
        encode_message(message).replace(b"s\x01", b"s\x09"),
    ):
        with pytest.raises(NetworkError):
            decode_message(wrong)


def test_no_address_is_said_in_one_line() -> None:
    link = CollectiveLink("a", Network().make("a"))
    nowhere = CollectiveConfig(collective="ring", members=NAMES, group="g", addresses=("", "b:1", "c:1"))
    with pytest.raises(NetworkError, match="nobody says where a listens"):
        link.open("run", nowhere, make_schedule("ring", 3, 9), vector_bytes=36)


def test_no_member_fills_another_s_memory_with_what_is_not_due() -> None:
    link = CollectiveLink("a", Network().make("a"))
    schedule = make_schedule("ring", 3, 9)
    link.open("run", config(), schedule, vector_bytes=36)
    for _ in range(20):
        link.receive("c", encode_message(ChunkMessage(group=b"?" * 16, session=bytes(8), values=bytes(256 * 1024))))
    assert link._queued_bytes < 1024 * 1024 + 200
    with pytest.raises(CollectiveBrokenError, match="c sends more than"):
        link.run(AllReduce(schedule, 0, np.ones(9, np.float32), chunk_size=3), 0, lambda: False, np.dtype("f4"))
