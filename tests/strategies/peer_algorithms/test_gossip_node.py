"""A node at work: exchanges, edges that come and go, what survives a reboot, and messages in one body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from edgefl.core.errors import CodecError, NetworkError
from edgefl.core.types import Array, PeerMessage
from edgefl.strategies.peer_algorithms.gossip_node import (
    ALGORITHMS,
    GossipNode,
    decode_messages,
    encode_messages,
    make_algorithm,
)
from edgefl.strategies.peer_algorithms.topology import Topology, make_topology

NAMES = ("a", "b", "c", "d")
RING = make_topology("ring", NAMES)


class Plain:
    """A coder whose bodies are the numbers themselves."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def encode(self, receiver: str, parts: Mapping[str, Mapping[str, Array]], rng: Generator) -> bytes:
        return b"".join(name.encode() + arrays["w"].tobytes() for name, arrays in parts.items())

    def decode(self, sender: str, body: bytes) -> dict[str, dict[str, Array]]:
        if len(body) % 17:
            raise CodecError("damaged")
        return {
            chr(body[at]): {"w": np.frombuffer(body[at + 1 : at + 17], np.float64).copy()}
            for at in range(0, len(body), 17)
        }

    def remove_peer(self, neighbour: str) -> None:
        self.forgotten.append(neighbour)


def engine(method: str, name: str, graph: Topology = RING, *, start: float = 0.0, life: int = 1) -> GossipNode:
    period = 1 if method in {"d2", "gradient-tracking"} else 4
    node = make_algorithm(
        method, name, graph.make_link_configs(name, period), learning_rate=0.1, period=period, incarnation=life
    )
    node.start({"w": np.full(2, start)})
    return GossipNode(node, Plain(), np.random.default_rng(0))


def trained(one: GossipNode, target: float, iterations: int = 4) -> None:
    """Local steps on (w - target)²/2."""
    correction, weights = one.algorithm.correction(), one.algorithm.weights["w"].copy()
    for _ in range(iterations):
        gradient = weights - target - correction.correction.get("w", 0.0)
        weights = (weights - 0.1 * gradient) / (1 + 0.1 * correction.shrinkage)
    one.algorithm.apply_local_steps({"w": weights}, iterations, 0.1)


def exchange(engines: Mapping[str, GossipNode], messages: list[PeerMessage]) -> None:
    while messages:
        messages = [answer for message in messages for answer in engines[message.edge[1]].receive([message])]


def play(engines: Mapping[str, GossipNode], rounds: int) -> None:
    for _ in range(rounds):
        posted: list[PeerMessage] = []
        for place, one in enumerate(engines.values()):
            if one.should_train_next():
                trained(one, float(place), one.algorithm.period)
            posted += one.start_exchange(one.algorithm.neighbours)
        exchange(engines, posted)
        for one in engines.values():
            assert one.can_finish_exchange()
            one.finish_exchange()


@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_nodes_come_to_the_mean_of_their_targets(method: str) -> None:
    engines = {name: engine(method, name) for name in NAMES}
    play(engines, 250)
    found = np.array([one.algorithm.weights["w"][0] for one in engines.values()])
    assert found.mean() == pytest.approx(1.5, abs=1e-9 if "isvr" in method or "t" in method[-2:] else 0.2)
    assert np.ptp(found) < (1e-6 if method in {"pdmm-isvr", "admm-isvr", "k-gt", "gradient-tracking"} else 1.5)


@pytest.mark.parametrize("method", ["dsgd", "d2", "k-gt", "gradient-tracking"])
def test_a_neighbour_that_is_an_exchange_ahead_does_not_spoil_the_one_under_way(method: str) -> None:
    apart, together = ({name: engine(method, name) for name in NAMES} for _ in range(2))
    play(together, 6)
    waiting: dict[str, list[PeerMessage]] = {name: [] for name in NAMES}
    done = dict.fromkeys(NAMES, 0)
    while min(done.values()) < 6:
        for place, (name, one) in enumerate(apart.items()):
            while done[name] < 6 and one.can_finish_exchange():
                one.finish_exchange()
                if one.should_train_next():
                    trained(one, float(place), one.algorithm.period)
                for message in one.start_exchange(one.algorithm.neighbours):
                    waiting[message.edge[1]].append(message)
                done[name] += 1
                # "a" is told at once, the others when it is their turn: some are ahead of others by then
                for receiver in ("a", "b") if name == "c" else NAMES:
                    apart[receiver].receive(waiting[receiver])
                    waiting[receiver].clear()
        for name, one in apart.items():
            one.receive(waiting[name])
            waiting[name].clear()
    for name, one in apart.items():
        one.finish_exchange()
        assert one.algorithm.weights["w"].tobytes() == together[name].algorithm.weights["w"].tobytes()


@pytest.mark.parametrize("method", ["pdmm-isvr", "dsgd"])
def test_an_edge_that_begins_anew_forgets_what_was_and_one_that_ended_takes_no_mail(method: str) -> None:
    one, other = engine(method, "a", start=1.0), engine(method, "b", start=2.0)
    one.receive(other.start_exchange(("a",)))
    sides = {side.neighbour: side for side in RING.make_link_configs("a", 4)}
    one.update_links([replace(sides["b"], epoch=1), sides["d"]])
    assert isinstance(one._codec, Plain)
    assert one._codec.forgotten == ["b"]
    one.update_links([sides["d"]])
    assert one.algorithm.neighbours == ("d",)
    before = one.state()
    assert one.receive(other.start_exchange(("a",))) == ()
    assert all(np.array_equal(before[name], array) for name, array in one.state().items())


def test_mail_for_somebody_else_and_mail_that_cannot_be_read_change_nothing() -> None:
    one = engine("dsgd", "a")
    before = one.state()
    one.receive([PeerMessage(edge=("b", "c"), step=9, body=b"w" + bytes(16))])
    one.receive([PeerMessage(edge=("b", "a"), step=9, body=b"w")])
    one.receive([PeerMessage(edge=("b", "a"), step=9, body=b"w" + np.array([1.0, np.nan]).tobytes())])
    assert one.num_dropped == 2
    assert all(np.array_equal(before[name], array) for name, array in one.state().items())


@pytest.mark.parametrize("method", ["pdmm-isvr", "admm-isvr", "dsgd", "k-gt", "gradient-tracking", "d2"])
def test_after_a_reboot_to_an_older_state_neighbours_hear_the_node_and_it_catches_up(method: str) -> None:
    engines = {name: engine(method, name) for name in NAMES}
    play(engines, 4)
    kept = engines["b"].state()
    play(engines, 6)
    again = engine(method, "b", life=2)
    again.restore(kept)
    engines["b"] = again
    for _ in range(3):  # the others do not wait for it for ever
        posted: list[PeerMessage] = []
        for place, one in enumerate(engines.values()):
            if one.should_train_next():
                trained(one, float(place), one.algorithm.period)
            posted += one.start_exchange(one.algorithm.neighbours)
        exchange(engines, posted)
        for one in engines.values():
            one.finish_exchange()
    seen = {name: one.algorithm.state().get("seen/b") for name, one in engines.items() if name in {"a", "c"}}
    assert all(int(step) >> 30 == 2 for step in seen.values() if step is not None)
    assert all(step is not None for step in seen.values())
    if ALGORITHMS[method].is_synchronous:
        assert len({one.algorithm.exchanges for one in engines.values()}) == 1


@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_an_edge_that_began_anew_while_a_node_was_off_begins_anew_at_both_its_ends(method: str) -> None:
    engines = {name: engine(method, name) for name in NAMES}
    play(engines, 4)
    one = engines["b"]
    kept, period = one.state(), one.algorithm.period
    sides = tuple(replace(side, epoch=int(side.neighbour == "a")) for side in RING.make_link_configs("b", period))
    node = make_algorithm(method, "b", sides, learning_rate=0.1, period=period, incarnation=2)
    node.start({"w": np.zeros(2)})
    again = GossipNode(node, Plain(), np.random.default_rng(0))
    again.restore(kept)
    one.update_links(sides)  # as it is without a reboot
    found, wanted = again.state(), one.state()
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())


def test_buffers_stay_with_the_node_and_over_a_reboot() -> None:
    one = engine("dsgd", "a", start=1.0)
    one.buffers = {"mean": np.array([3.0])}
    again = engine("dsgd", "a")
    again.restore(one.state())
    assert {name: array.tolist() for name, array in again.model().items()} == {"w": [1.0, 1.0], "mean": [3.0]}


MAIL = (
    PeerMessage(edge=("a", "b"), step=3, body=b"one"),
    PeerMessage(edge=("a", "c"), step=2**40, body=b"", is_reply=True),
)


@pytest.mark.parametrize("mail", [(), MAIL])
@pytest.mark.parametrize("rest", [b"", b"a model"])
def test_what_is_packed_comes_out(mail: tuple[PeerMessage, ...], rest: bytes) -> None:
    told, body = encode_messages(mail, rest)
    assert decode_messages(told, body) == (mail, rest)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"a": 1},
        [["a", "b", 1, 0]],
        [["a", "b", 1, 0, 99]],
        [["a", "b", -1, 0, 1]],
        [["a", "b", 1.5, 0, 1]],
        [["a", 7, 1, 0, 1]],
        ["a"],
        [["a", "b", 1, 0, 0]] * 5000,
    ],
)
def test_a_list_that_does_not_fit_the_body_is_refused(told: Any) -> None:
    with pytest.raises(NetworkError, match="message"):
        decode_messages(told, b"body")
