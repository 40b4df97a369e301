"""Two and more boards as they stand on a shelf: real sockets, real TLS, certificates of the fleet's own authority."""

import os
import socket
import threading
import time

import pytest
from peer_boards import LOOPBACK, PATIENCE_S, direct_threads, eventually, introduce

from edgefl.coordinator import pki
from edgefl.core.errors import NetworkError, NotJoinedError, PortInUseError, UsageError
from edgefl.core.protocol import MAX_PEER_BYTES
from edgefl.core.types import GossipConfig, PeerLinkConfig
from edgefl.device.mqtt.peer_publisher import PeerPublisher
from edgefl.device.peers.sender import MAX_QUEUED_REPLIES
from edgefl.device.peers.transports import MqttPeerTransport, PeerTransportFactory, TlsPeerTransport
from edgefl.simulation.local_fleet import find_free_port


def refused(board):
    return board.carrier.counters.refused


def test_neighbours_bring_each_other_messages_of_any_size_in_order_with_the_name_of_the_sender(peers):
    a, b = peers.pair()
    assert a.carrier.send("b", b"from a")
    assert b.carrier.send("a", b"from b")
    b.wait_for(b"from a")
    a.wait_for(b"from b")
    assert (a.received, b.received) == ([("b", b"from b")], [("a", b"from a")])
    eventually(lambda: a.carrier.counters.delivered == 1)
    assert a.carrier.counters.received == 1
    payloads = [*(b"%d" % number for number in range(300)), b"", os.urandom(MAX_PEER_BYTES)]
    for payload in payloads:
        eventually(lambda: a.carrier.send("b", payload, is_reply=True))  # noqa: B023 called at once
    eventually(lambda: len(b.received) > len(payloads))
    assert b.payloads()[1:] == payloads
    with pytest.raises(UsageError, match=f"at most {MAX_PEER_BYTES} bytes, got {MAX_PEER_BYTES + 1}"):
        a.carrier.send("b", payloads[-1] + b"!")
    assert not a.carrier.send("c", b"to a stranger")


def test_a_slow_receiver_gets_the_newest_state_alone_and_every_answer_up_to_a_limit(peers):
    a, b = peers.pair()
    b.gate.clear()
    a.carrier.send("b", b"1")
    b.wait_for(b"1")
    answers = [b"answer %d" % number for number in range(MAX_QUEUED_REPLIES)]
    assert all(a.carrier.send("b", answer, is_reply=True) for answer in answers)
    assert not a.carrier.send("b", b"one too many", is_reply=True)
    for number in range(2, 51):
        assert a.carrier.send("b", b"%d" % number)
    b.gate.set()
    b.wait_for(b"50")
    assert b.payloads() == [b"1", *answers, b"50"]
    assert a.carrier.counters.superseded == 48


def test_a_slow_neighbour_holds_up_neither_the_caller_nor_other_neighbours(peers):
    a, b, c = peers.board("a", ["b", "c"]), peers.board("b", ["a"]), peers.board("c", ["a"])
    introduce([a, b, c])
    b.gate.clear()
    a.carrier.send("b", b"1")
    b.wait_for(b"1")
    started_s = time.monotonic()
    a.carrier.send("b", b"2")
    assert time.monotonic() - started_s < 1.0
    a.carrier.send("c", b"for c")
    c.wait_for(b"for c")


def test_a_neighbour_that_is_gone_is_missed_and_gets_the_newest_state_when_it_is_back(peers):
    port, started_s = find_free_port(), time.monotonic()
    a = peers.board("a", ["b"], hosts={"b": (LOOPBACK, port)})
    for life in (1, 2):
        for number in range(3):
            assert a.carrier.send("b", b"for life %d, %d" % (life, number))
        b = peers.board("b", ["a"], hosts={"a": a.address}, listen=(LOOPBACK, port))
        b.carrier.send("a", b"life %d" % life)
        b.wait_for(b"for life %d, 2" % life)
        a.wait_for(b"life %d" % life)
        assert a.carrier.list_connected_peers() == {"b"}
        assert not a.carrier.get_refusal_times()
        b.carrier.stop()
        eventually(lambda: not a.carrier.list_connected_peers(), "noticing that a neighbour is gone")
        eventually(lambda: a.carrier.get_refusal_times().keys() == {"b"}, "being refused")
        assert started_s < a.carrier.get_refusal_times()["b"] < time.monotonic()
        assert b.payloads() == [b"for life %d, 2" % life]


def test_a_board_of_another_fleet_is_refused_and_is_sent_nothing(peers):
    foreign = pki.create_authority("lab")
    a = peers.board("a", ["b"])
    b = peers.board("b", ["a"], tls=peers.tls("b", authority=foreign))
    introduce([a, b])
    a.carrier.send("b", b"secret")
    b.carrier.send("a", b"forged")
    eventually(lambda: refused(a) >= 2 and refused(b) >= 2, "refusals on both sides")
    assert (a.received, b.received) == ([], [])
    assert not a.carrier.list_connected_peers() | b.carrier.list_connected_peers()


def test_a_board_at_the_address_of_another_is_sent_nothing(peers, caplog):
    a, c = peers.board("a", ["b"]), peers.board("c", ["a"])
    a.carrier.set_addresses({"b": c.address})
    a.carrier.send("b", b"for b alone")
    eventually(lambda: refused(a) >= 2, "refusals")
    assert c.received == []
    assert not a.carrier.list_connected_peers()
    assert caplog.text.count(f"will not talk to b at {LOOPBACK}:{c.address[1]} (this is 'c'") == 1


def test_a_certificate_that_makes_no_neighbour_or_another_one_is_named(peers):
    server, damaged = peers.tls("b", certificate=pki.issue_server_certificate(peers.authority, ["b"])), peers.tls("b")
    damaged.ca.write_bytes(b"nonsense")
    for name, tls, told in (
        ("b", server, "no device certificate of this fleet"),
        ("a", peers.tls("b"), "is the certificate of 'b', not of this device, 'a'"),
        ("b", damaged, "cannot be used"),
    ):
        with pytest.raises(NotJoinedError, match=told):
            peers.board(name, ["a"], tls=tls)


def test_the_graph_may_change_while_messages_travel(peers):
    a, b = peers.pair()
    a.carrier.send("b", b"1")
    b.wait_for(b"1")
    b.carrier.send("a", b"2")
    a.wait_for(b"2")
    a.carrier.set_peers([])
    assert not a.carrier.send("b", b"nobody takes this")
    b.carrier.send("a", b"nor this")
    eventually(lambda: refused(a) > 0 and not b.carrier.list_connected_peers(), "the end of the edge")
    assert a.payloads() == [b"2"]
    a.carrier.set_peers(["b"])
    a.wait_for(b"nor this")
    a.carrier.send("b", b"back")
    b.wait_for(b"back")
    assert b.payloads() == [b"1", b"back"]


def test_a_neighbour_may_move_and_one_without_an_address_can_still_send(peers):
    a, b = peers.board("a", ["b"]), peers.board("b", ["a"])
    b.carrier.set_addresses({"a": a.address})
    assert a.carrier.send("b", b"kept until somebody says where b is")
    b.carrier.send("a", b"here")
    a.wait_for(b"here")
    a.carrier.set_addresses({"b": b.address})
    b.wait_for(b"kept until somebody says where b is")
    moved = peers.board("b", ["a"], tls=peers.tls("b"))
    a.carrier.set_addresses({"b": moved.address})
    a.carrier.send("b", b"2")
    moved.wait_for(b"2")
    assert len(b.received) == 1


def test_a_message_that_cannot_be_used_stops_nothing(peers, caplog):
    a, b = peers.pair()
    used, take = [], b._take

    def choke(sender, payload):
        take(sender, payload)
        if payload == b"bad":
            raise ValueError("cannot be used")
        used.append(payload)

    b.carrier._listener._on_message = choke
    a.carrier.send("b", b"bad", is_reply=True)
    a.carrier.send("b", b"good", is_reply=True)
    b.wait_for(b"good")
    assert (b.payloads(), used) == ([b"bad", b"good"], [b"good"])
    assert "a message of a could not be used" in caplog.text


@pytest.mark.parametrize("host", ["::1", "::"])
def test_neighbours_meet_over_ipv6(peers, host):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here: sudo sysctl net.ipv6.conf.lo.disable_ipv6=0")
    a, b = peers.board("a", ["b"], listen=(host, 0)), peers.board("b", ["a"], listen=(host, 0))
    a.carrier.set_addresses({"b": ("::1", b.address[1])})
    a.carrier.send("b", b"hello")
    b.wait_for(b"hello")
    if host == "::":
        b.carrier.set_addresses({"a": (LOOPBACK, a.address[1])})
        b.carrier.send("a", b"over IPv4")
        a.wait_for(b"over IPv4")


def test_a_port_that_is_taken_and_an_address_that_this_machine_has_not_are_named(peers):
    a = peers.board("a")
    with pytest.raises(PortInUseError, match=f"{LOOPBACK}:{a.address[1]}"):
        peers.board("b", listen=a.address)
    with pytest.raises(NetworkError, match=r"cannot listen for neighbours at 192\.0\.2\.1:1"):
        peers.board("b", listen=("192.0.2.1", 1))


def test_stopping_ends_every_thread_at_once_whatever_it_does(peers):
    a, b = peers.pair()
    idle = [socket.create_connection(a.address) for _ in range(3)]
    a.carrier.set_peers(["b", "away", "nowhere"])
    a.carrier.set_addresses({"b": b.address, "away": (LOOPBACK, find_free_port())})
    a.carrier.send("b", b"1")
    b.carrier.send("a", b"2")
    b.wait_for(b"1")
    a.wait_for(b"2")
    assert direct_threads()
    started_s = time.monotonic()
    b.carrier.stop()
    a.carrier.stop()
    assert time.monotonic() - started_s < 3.0
    assert direct_threads() == []
    assert not a.carrier.send("b", b"too late")
    for connection in idle:
        connection.close()


def test_a_message_may_stop_the_carrier_that_brings_it(peers):
    a = peers.board("a", ["b"])
    options = {"device_id": "b", "tls": peers.tls("b"), "listen": (LOOPBACK, 0), "addresses": {}, "peers": ["a"]}
    stopped = threading.Event()

    def stop(_sender, _payload):
        b.stop()
        stopped.set()

    b = TlsPeerTransport(**options, on_message=stop)
    b.start()
    a.carrier.set_addresses({"b": b.address})
    a.carrier.send("b", b"stop")
    assert stopped.wait(PATIENCE_S)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(b.address)
    TlsPeerTransport(**options, on_message=stop).stop()  # it never started


class Site:
    def __init__(self, state):
        self.heard = []
        self.peers = PeerPublisher()
        self.carriers = PeerTransportFactory(state, self.peers)

    def make(self, carrier, **plan):
        edges = plan.pop("edges", ())
        node = GossipConfig(method="ad-psgd", edges=edges, learning_rate=0.1, period=1, carrier=carrier, **plan)
        return self.carriers.make(node, lambda sender, payload: self.heard.append((sender, payload)))


@pytest.fixture
def site(state):
    return Site(state)


def test_what_comes_over_the_link_goes_to_the_newest_carrier_over_the_broker(site):
    site.carriers.receive("pi-2", b"nobody listens yet")
    carrier = site.make("peer")
    assert isinstance(carrier, MqttPeerTransport)
    carrier.start()
    carrier.set_peers(["pi-2"])
    site.carriers.receive("pi-2", b"x")
    site.carriers.receive("pi-3", b"no neighbour")
    assert site.heard == [("pi-2", b"x")]


def test_a_node_whose_neighbours_were_all_away_hears_them_again_when_they_are_back(site):
    carrier, peers = site.make("peer"), site.peers
    carrier.set_peers(["pi-2"])
    assert not peers.is_subscribed
    carrier.start()
    for neighbours in (["pi-3"], [], ["pi-2"]):
        carrier.set_peers(neighbours)
        assert peers.is_subscribed == bool(neighbours)


def test_a_direct_carrier_listens_on_all_addresses_at_the_port_that_neighbours_are_told(site):
    side = PeerLinkConfig(neighbour="pi-2", sign=1, degree=1, weight=0.5, period=1, address="10.0.0.2:7000")
    carrier = site.make("direct", listen="10.0.0.1:7001", edges=(side,))
    assert isinstance(carrier, TlsPeerTransport)


def test_a_carrier_that_is_unknown_is_refused_with_those_that_are_known(site):
    with pytest.raises(NetworkError, match="'pigeon', only by relay, peer or direct"):
        site.make("pigeon")
