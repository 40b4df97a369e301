"""What devices say to each other: the order of it alone, then links over both brokers and real TLS."""

import itertools
import threading
import time

import paho.mqtt.client as mqtt
import pytest
from broker_site import BROKERS, BrokerSite
from peer_boards import eventually

from edgefl.core.errors import NetworkError, UsageError
from edgefl.core.protocol import MAX_PEER_BYTES, MAX_RETAINED_PEER_BYTES, Heartbeat
from edgefl.device.mqtt.peer_publisher import MAX_IN_FLIGHT_BYTES, PeerPublisher

pytestmark = pytest.mark.timeout(60)

BUSY_S = 0.5
LARGE = bytes(MAX_IN_FLIGHT_BYTES * 2 // 3)


class Sent:
    """A packet that leaves, or does not, and is acknowledged when the test says so."""

    def __init__(self, rc):
        self.rc = rc
        self.is_acknowledged = False

    def is_published(self):
        if self.rc != mqtt.MQTT_ERR_SUCCESS:
            raise RuntimeError("paho has no answer for what never left")
        return self.is_acknowledged


class FakeSession:
    """Keeps what would leave."""

    def __init__(self):
        self.packets = []
        self.said = []
        self.rc = mqtt.MQTT_ERR_SUCCESS

    def publish_to_peer(self, receiver, payload, *, retain):
        sent = Sent(self.rc)
        if sent.rc == mqtt.MQTT_ERR_SUCCESS:
            self.packets.append(sent)
            self.said.append((receiver, payload, retain))
        return sent

    def subscribe_to_peers(self):
        self.said.append("subscribe")

    def unsubscribe_from_peers(self):
        self.said.append("unsubscribe")

    def acknowledge(self, peers):
        """Acknowledges all that has left, and lets the loop turn."""
        for packet in self.packets:
            packet.is_acknowledged = True
        peers.send_due()

    def take(self):
        said, self.said = self.said, []
        return said


@pytest.fixture
def session():
    return FakeSession()


@pytest.fixture
def peers(session):
    peers = PeerPublisher()
    peers.attach(session)
    return peers


def test_of_values_that_come_while_one_is_under_way_only_the_newest_is_sent(peers, session):
    for payload in (b"1", b"2", b"3"):
        assert peers.publish("b", payload, retain=True)
    assert session.take() == [("b", b"1", True)]
    peers.send_due()
    assert session.take() == []
    session.acknowledge(peers)
    assert session.take() == [("b", b"3", True)]
    session.acknowledge(peers)
    assert session.take() == []


def test_an_answer_and_a_retained_value_take_each_other_s_place_never(peers, session):
    peers.attach(session)
    for number in (b"1", b"2"):
        peers.publish("b", b"state " + number, retain=True)
        peers.publish("b", b"answer " + number, retain=False)
    session.acknowledge(peers)
    session.acknowledge(peers)
    assert sorted(session.take()) == [
        ("b", b"answer 1", False), ("b", b"answer 2", False), ("b", b"state 1", True), ("b", b"state 2", True),
    ]  # fmt: skip
    again = FakeSession()
    peers.detach(session)
    peers.attach(again)
    assert again.take() == [("b", b"state 2", True)]


def test_large_values_leave_one_after_the_other_and_none_is_passed_over_for_ever(peers, session):
    for receiver in ("b", "c"):
        peers.publish(receiver, LARGE, retain=True)
    peers.publish("b", LARGE + b"newer", retain=True)
    left = [session.take()]
    for _ in range(3):
        session.acknowledge(peers)
        left.append(session.take())
    assert [[(name, len(payload)) for name, payload, _ in said] for said in left] == [
        [("b", len(LARGE))],
        [("c", len(LARGE))],
        [("b", len(LARGE) + 5)],
        [],
    ]


def test_a_value_that_waits_for_its_predecessor_holds_nobody_up(peers, session):
    for receiver, payload in (("b", LARGE), ("b", LARGE), ("c", b"small"), ("d", b"small")):
        peers.publish(receiver, payload, retain=True)
    assert [receiver for receiver, *_ in session.take()] == ["b", "c", "d"]


def test_a_new_session_says_what_is_retained_again_and_nothing_else(peers, session):
    peers.publish("b", b"acknowledged", retain=True)
    session.acknowledge(peers)
    peers.publish("c", b"old", retain=True)
    peers.publish("c", b"waits", retain=True)
    peers.publish("d", b"under way", retain=False)
    peers.detach(session)
    peers.attach(later := FakeSession())
    assert later.take() == [("b", b"acknowledged", True), ("c", b"waits", True)]


def test_without_a_session_or_for_one_that_has_just_ended_the_newest_retained_value_goes_to_the_next_one(session):
    peers = PeerPublisher()
    assert not peers.publish("b", b"old", retain=True)
    assert not peers.publish("b", b"new", retain=True)
    assert not peers.publish("c", b"lost", retain=False)
    peers.attach(session)
    assert session.take() == [("b", b"new", True)]
    session.acknowledge(peers)
    session.rc = mqtt.MQTT_ERR_NO_CONN
    for payload in (b"w", b"x"):
        peers.publish("b", payload, retain=True)
    assert session.take() == []
    peers.attach(later := FakeSession())
    assert later.take() == [("b", b"x", True)]
    peers.detach(session)  # the end of the old one comes late
    assert peers.publish("b", b"y", retain=True)


def test_values_are_too_large_alone_or_together(peers, session):
    for payload in (b"", bytes(MAX_PEER_BYTES + 1)):
        with pytest.raises(NetworkError, match=f"1 to {MAX_PEER_BYTES} bytes, got {len(payload)}"):
            peers.publish("b", payload, retain=True)
    assert session.take() == []
    num_fitting = MAX_RETAINED_PEER_BYTES // MAX_PEER_BYTES
    largest = bytes(MAX_PEER_BYTES)
    for number in range(num_fitting):
        peers.publish(f"b-{number}", largest, retain=True)
    total = (num_fitting + 1) * MAX_PEER_BYTES
    with pytest.raises(NetworkError, match=rf"would keep {total} of this device, at most {MAX_RETAINED_PEER_BYTES}"):
        peers.publish("c", largest, retain=True)
    assert peers.publish("c", largest, retain=False)
    assert peers.publish("b-0", largest, retain=True), "in the place of one that is counted already"
    peers.remove(["b-0"])
    assert peers.publish("c", largest, retain=True)


def test_forgetting_clears_at_once_also_behind_what_is_under_way(peers, session):
    for receiver in ("b", "c"):
        peers.publish(receiver, LARGE, retain=True)
    session.take()
    peers.remove(["b", "c", "never-written-to"])
    assert sorted(session.take()) == [("b", b"", True), ("c", b"", True), ("never-written-to", b"", True)]
    session.acknowledge(peers)
    peers.attach(later := FakeSession())
    assert later.take() == []
    peers.publish("b", b"x", retain=True)
    peers.detach(later)
    peers.remove(["b"])
    for _ in range(2):  # the first breaks before the broker has acknowledged
        peers.attach(last := FakeSession())
        assert last.take() == [("b", b"", True)]
    for name in ("+", "pi-2/status", "", "PI"):
        with pytest.raises(UsageError, match="receiver"):
            peers.publish(name, b"x", retain=True)
        with pytest.raises(UsageError, match="receiver"):
            peers.remove([name])


def test_it_listens_from_when_it_is_told_until_it_forgets(peers, session):
    assert not peers.is_subscribed
    peers.subscribe()
    peers.subscribe()
    assert session.take() == ["subscribe"]
    peers.attach(later := FakeSession())
    assert later.take() == ["subscribe"]
    peers.remove([])
    assert later.take() == ["unsubscribe"]
    peers.attach(last := FakeSession())
    assert (last.take(), peers.is_subscribed) == ([], False)


class Site(BrokerSite):
    def device(self, name, on_peer=None):
        return Device(self, name, on_peer)


class Device:
    """A link that is up, and what others had for it."""

    def __init__(self, site, name, on_peer):
        self.heard = []
        self.link = site.link(name, on_peer_message=on_peer or (lambda *said: self.heard.append(said)))

    @property
    def news(self):
        return without_repeats(self.heard)


@pytest.fixture
def site(request, tmp_path):
    site = Site(tmp_path, getattr(request, "param", "auto")).start()
    yield site
    site.close()


each_broker = pytest.mark.parametrize("site", BROKERS, indirect=True)


def without_repeats(said):
    """What was heard, in order: every value comes at least once (QoS 1), and so sometimes twice."""
    return [value for value, _ in itertools.groupby(said)]


@each_broker
def test_two_devices_hear_each_other_and_only_what_is_for_them(site):
    one, two, three = (site.device(name) for name in ("pi-1", "pi-2", "pi-3"))
    for device in (one, two, three):
        device.link.peers.subscribe()
    assert one.link.peers.publish("pi-2", b"from one")
    assert two.link.peers.publish("pi-1", b"from two")
    eventually(lambda: one.heard and two.heard)
    assert three.link.peers.publish("pi-1", bytes(range(256)), retain=False)
    eventually(lambda: len(one.news) == 2)
    assert one.news == [("pi-2", b"from two"), ("pi-3", bytes(range(256)))]
    assert two.news == [("pi-1", b"from one")]
    assert three.heard == []


def test_a_device_hears_nothing_before_it_listens_and_then_what_was_retained(site):
    one, two = site.device("pi-1"), site.device("pi-2")
    one.link.peers.publish("pi-2", b"early")
    one.link.peers.publish("pi-2", b"newest")
    one.link.peers.publish("pi-3", b"not yours")
    three = site.device("pi-3")
    three.link.peers.subscribe()
    eventually(lambda: three.heard)  # so the broker has what was said before
    assert two.heard == []
    two.link.peers.subscribe()
    eventually(lambda: two.news == [("pi-1", b"newest")])


@each_broker
def test_a_broker_that_lost_everything_is_told_again_and_listening_goes_on(site):
    one, two = site.device("pi-1"), site.device("pi-2")
    two.link.peers.subscribe()
    one.link.peers.publish("pi-2", b"old")
    one.link.peers.publish("pi-2", b"new")
    one.link.peers.publish("pi-4", b"for one who is away")
    eventually(lambda: two.heard and two.heard[-1] == ("pi-1", b"new"))
    site.broker.stop()
    eventually(lambda: not one.link.is_connected() and not two.link.is_connected())
    assert not one.link.peers.publish("pi-2", b"newest")
    assert not one.link.peers.publish("pi-2", b"lost", retain=False) or one.link.is_connected()
    two.heard.clear()
    site.broker.start()
    eventually(lambda: two.heard)
    late = site.device("pi-4")
    late.link.peers.subscribe()
    eventually(lambda: late.news == [("pi-1", b"for one who is away")])
    assert set(two.heard) == {("pi-1", b"newest")}


def test_what_a_device_forgets_nobody_finds_and_it_hears_nobody(site):
    one, two = site.device("pi-1"), site.device("pi-2")
    one.link.peers.subscribe()
    two.link.peers.subscribe()
    one.link.peers.publish("pi-2", b"x")
    two.link.peers.publish("pi-1", b"x")
    eventually(lambda: one.heard and two.heard)
    one.link.peers.publish("pi-2", b"y")
    one.link.peers.remove(["pi-2"])
    one.link.stop()  # leaves at once, and takes nothing unsent with it
    two.link.peers.publish("pi-1", b"z")
    again = site.device("pi-2")
    again.link.peers.subscribe()
    three = site.device("pi-3")
    three.link.peers.publish("pi-2", b"last")
    eventually(lambda: again.heard)
    assert again.news == [("pi-3", b"last")]
    assert one.news == [("pi-2", b"x")]
    assert two.heard[-1][1], "an empty payload is not handed on"


def test_of_a_flood_the_last_value_arrives_and_the_connection_holds(site):
    one, two = site.device("pi-1"), site.device("pi-2")
    two.link.peers.subscribe()
    started_s = time.monotonic()
    values = [number.to_bytes(4, "big") * 25_000 for number in range(1000)]
    for value in values:
        assert one.link.peers.publish("pi-2", value)
    assert time.monotonic() - started_s < 5, "publishing does not wait for the network"
    eventually(lambda: two.heard and two.heard[-1] == ("pi-1", values[-1]))
    numbers = [int.from_bytes(payload[:4], "big") for _, payload in two.news]
    assert numbers == sorted(set(numbers))
    assert set(site.num_sessions.values()) == {1}


def test_devices_that_answer_from_the_callback_while_other_threads_publish_stay_connected(site):
    devices = {}
    counts = dict.fromkeys(("pi-1", "pi-2"), 0)

    def answering(own):
        def answer(sender, payload):
            counts[own] += 1
            if sender != "pi-3":
                devices[own].link.peers.publish(sender, payload + b"x" if len(payload) < 2000 else b"x")

        return answer

    for name in counts:
        devices[name] = site.device(name, on_peer=answering(name))
        devices[name].link.peers.subscribe()
    third = site.device("pi-3")
    devices["pi-1"].link.peers.publish("pi-2", b"x")
    until_s = time.monotonic() + BUSY_S

    def busy():
        while time.monotonic() < until_s:
            for name in counts:
                third.link.peers.publish(name, b"y" * 1000)
                third.link.publish_heartbeat(Heartbeat(seq=1, session_no=0, uptime_s=1.0))
            time.sleep(0.001)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = dict(counts)
    eventually(lambda: all(counts[name] > before[name] for name in counts))
    assert set(site.num_sessions.values()) == {1}
