"""The embedded broker's router, without connections: subscriptions, retained messages, sessions, and its limits."""

from __future__ import annotations

import pytest

from edgefl.coordinator.brokers import topic_router as router_module
from edgefl.coordinator.brokers.packets import SUBSCRIPTION_FAILED, PublishPacket
from edgefl.coordinator.brokers.topic_router import TopicRouter

ROOT = "edgefl/v1/lab"
REFUSED = SUBSCRIPTION_FAILED


class Client:
    """A connected client that keeps what it gets, as (topic below the fleet, payload, QoS, retained)."""

    def __init__(self, router, identity, will=None):
        self.router, self.identity, self.will = router, identity, will
        self.got, self.is_connected = [], True
        router.connect(self)

    def deliver(self, message, qos, *, is_retained):
        self.got.append((message.topic.removeprefix(f"{ROOT}/"), message.payload, qos, is_retained))

    def abort(self):
        self.is_connected = False
        self.router.disconnect(self, self.will)

    def subscribe(self, *names, qos=1):
        codes = [self.router.subscribe(self, f"{ROOT}/{name}", qos) for name in names]
        for name, code in zip(names, codes, strict=True):
            if code != REFUSED:
                self.router.replay_retained(self, f"{ROOT}/{name}", code)
        return codes

    def publish(self, name, payload=b"x", *, qos=1, is_retained=False):
        self.router.publish(self.identity, PublishPacket(f"{ROOT}/{name}", payload, qos, is_retained))


@pytest.fixture
def denied():
    return []


@pytest.fixture
def router(denied):
    return TopicRouter("lab", lambda who, what: denied.append((who, what.replace(f"{ROOT}/", ""))))


@pytest.mark.parametrize(
    ("name", "topics"),
    [
        ("pi-1/status", {"pi-1/status"}),
        ("+/status", {"pi-1/status", "pi-2/status"}),
        ("pi-1/+", {"pi-1/status", "pi-1/peer"}),
        ("#", {"pi-1/status", "pi-2/status", "pi-1/peer", "pi-1/peer/pi-2", "pi-1/peer/pi-3", "pi-1"}),
        ("pi-1/#", {"pi-1", "pi-1/status", "pi-1/peer", "pi-1/peer/pi-2", "pi-1/peer/pi-3"}),
        ("pi-1/peer/#", {"pi-1/peer", "pi-1/peer/pi-2", "pi-1/peer/pi-3"}),
        ("+/peer/pi-2", {"pi-1/peer/pi-2"}),
        ("+/+/+", {"pi-1/peer/pi-2", "pi-1/peer/pi-3"}),
        ("+/status/#", {"pi-1/status", "pi-2/status"}),
        ("pi-3/#", set()),
        ("+/+/+/+", set()),
        ("", set()),
    ],
)
def test_a_filter_gets_its_topics_live_and_retained(router, name, topics):
    sender = Client(router, "coordinator")
    everything = ("pi-1/status", "pi-2/status", "pi-1/peer", "pi-1/peer/pi-2", "pi-1/peer/pi-3", "pi-1")
    for topic in everything:
        sender.publish(topic, is_retained=True)
    sender.subscribe(name)
    assert {topic for topic, *_ in sender.got} == topics
    assert all(is_retained for *_, is_retained in sender.got)
    sender.got.clear()
    for topic in everything:
        sender.publish(topic)
    assert sorted(topic for topic, *_ in sender.got) == sorted(topics)
    assert not any(is_retained for *_, is_retained in sender.got)
    router.unsubscribe(sender, f"{ROOT}/{name}")
    sender.got.clear()
    for topic in everything:
        sender.publish(topic)
    assert sender.got == []
    assert not router._subscriptions.children


def test_subscriptions_that_overlap_give_one_message_at_the_highest_qos(router):
    coordinator = Client(router, "coordinator")
    coordinator.subscribe("+/status", qos=0)
    coordinator.subscribe("pi-1/#", qos=2)
    coordinator.subscribe("pi-1/status", qos=0)
    Client(router, "pi-1").publish("pi-1/status", qos=1)
    assert coordinator.got == [("pi-1/status", b"x", 1, False)]
    router.unsubscribe(coordinator, f"{ROOT}/pi-1/#")
    coordinator.got.clear()
    router.publish("pi-1", PublishPacket(f"{ROOT}/pi-1/status", b"y", 1))
    assert coordinator.got == [("pi-1/status", b"y", 0, False)]


@pytest.mark.parametrize(
    ("sent", "wanted", "granted", "got"), [(0, 1, 1, 0), (1, 0, 0, 0), (1, 1, 1, 1), (1, 2, 1, 1)]
)
def test_a_message_comes_at_the_lower_qos_of_both_ends(router, sent, wanted, granted, got):
    coordinator, device = Client(router, "coordinator"), Client(router, "pi-1")
    device.publish("pi-1/status", qos=sent, is_retained=True)
    assert coordinator.subscribe("pi-1/status", qos=wanted) == [granted]
    device.publish("pi-1/status", qos=sent)
    assert [(qos, is_retained) for _, _, qos, is_retained in coordinator.got] == [(got, True), (got, False)]


def test_who_subscribes_again_gets_what_is_retained_again_and_messages_once(router):
    device = Client(router, "pi-1")
    device.publish("pi-1/status", b"kept", is_retained=True)
    device.subscribe("pi-1/status")
    device.subscribe("pi-1/status", qos=0)
    device.publish("pi-1/status", b"live")
    assert [(payload, qos) for _, payload, qos, _ in device.got] == [(b"kept", 1), (b"kept", 0), (b"live", 0)]


@pytest.mark.parametrize("name", ["$SYS/#", "#", "+/v1/lab/pi-1/wakeup", f"{ROOT}/$x/status", f"{ROOT}x/pi-1/wakeup"])
def test_nobody_reads_or_writes_beside_its_fleet(router, denied, name):
    device, coordinator = Client(router, "pi-1"), Client(router, "coordinator")
    assert router.subscribe(device, name, 1) == REFUSED
    topic = name.replace("#", "x").replace("+", "x")
    router.publish("pi-1", PublishPacket(topic, b"x"))
    assert len(denied) == 2
    if not name.startswith(f"{ROOT}/"):
        assert router.subscribe(coordinator, name, 1) == REFUSED
        router.publish("coordinator", PublishPacket(topic, b"x"))
        assert len(denied) == 4


def test_an_empty_message_clears_what_is_retained_and_passes(router):
    device = Client(router, "pi-1")
    device.subscribe("pi-1/status")
    device.publish("pi-1/status", b"kept", is_retained=True)
    device.publish("pi-1/status", b"", is_retained=True)
    device.publish("pi-1/status", b"", is_retained=True)
    assert [payload for _, payload, _, _ in device.got] == [b"kept", b"", b""]
    assert not router._retained.children
    assert Client(router, "coordinator").subscribe("#") == [1]


def test_a_topic_goes_without_those_above_and_below_it(router):
    coordinator = Client(router, "coordinator")
    for name in ("pi-1", "pi-1/status", "pi-1/status/more", "pi-1/wakeup"):
        coordinator.publish(name, name.encode(), is_retained=True)
    coordinator.publish("pi-1/status", b"", is_retained=True)
    coordinator.publish("pi-1/status/more", b"", is_retained=True)
    coordinator.publish("pi-1/wakeup", b"", is_retained=True)
    coordinator.subscribe("#")
    assert [payload for _, payload, _, _ in coordinator.got] == [b"pi-1"]


def test_a_topic_belongs_to_whoever_retained_there_last(router):
    device, coordinator = Client(router, "pi-1"), Client(router, "coordinator")
    device.publish("pi-1/status", b"ours", is_retained=True)
    coordinator.publish("pi-1/status", b"theirs", is_retained=True)
    router.revoke({"pi-1"}, ())
    coordinator.subscribe("pi-1/status")
    assert [payload for _, payload, _, _ in coordinator.got] == [b"theirs"]
    assert (router._retained_bytes["pi-1"], router._retained_topics["pi-1"]) == (0, set())


def test_a_client_retains_so_many_bytes_and_so_many_topics(router, denied, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_RETAINED_BYTES", 2500)
    monkeypatch.setattr(router_module, "MAX_RETAINED_TOPICS", 4)
    device = Client(router, "pi-1")
    for number in (1, 2, 2, 3):  # the second one twice: in its own place it counts once
        device.publish(f"pi-1/peer/pi-{number}", bytes(1000), is_retained=True)
    assert denied == [("pi-1", f"RETAIN of 1000 bytes at 'pi-1/peer/pi-3', beside {2 * 1028} others in 2 topics")]
    for name in ("pi-1/status", "pi-1/peer/pi-4", "pi-1/peer/pi-5", "pi-1/peer/pi-4"):
        device.publish(name, b"x", is_retained=True)
    assert [what.split(",")[0] for _, what in denied[1:]] == ["RETAIN of 1 bytes at 'pi-1/peer/pi-5'"]
    coordinator = Client(router, "coordinator")
    coordinator.publish("pi-9/status", bytes(2000), is_retained=True)
    assert len(denied) == 2
    device.publish("pi-1/peer/pi-1", b"", is_retained=True)
    device.publish("pi-1/peer/pi-3", bytes(1000), is_retained=True)
    coordinator.subscribe("pi-1/peer/+")
    assert router._retained_bytes["pi-1"] == 2 * 1028 + 29 + 26
    assert sorted(topic for topic, *_ in coordinator.got) == ["pi-1/peer/pi-2", "pi-1/peer/pi-3", "pi-1/peer/pi-4"]


def test_a_client_has_so_many_subscriptions(router, denied, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_SUBSCRIPTIONS", 2)
    device = Client(router, "pi-1")
    assert device.subscribe("a/peer/pi-1", "b/peer/pi-1", "c/peer/pi-1", "a/peer/pi-1") == [1, 1, REFUSED, 1]
    assert denied == [("pi-1", "SUBSCRIBE to 'c/peer/pi-1'")]
    router.unsubscribe(device, f"{ROOT}/a/peer/pi-1")
    assert device.subscribe("c/peer/pi-1") == [1]


def test_unsubscribing_from_nothing_does_nothing(router):
    device, other = Client(router, "pi-1"), Client(router, "pi-2")
    other.subscribe("+/peer/pi-2")
    for name in ("+/peer/pi-2", "pi-1/wakeup", "x/y/z"):
        router.unsubscribe(device, f"{ROOT}/{name}")
    device.publish("pi-1/peer/pi-2")
    assert len(other.got) == 1


def test_a_session_ends_with_its_subscriptions_and_will(router):
    coordinator = Client(router, "coordinator")
    coordinator.subscribe("+/status")
    device = Client(router, "pi-1", will=PublishPacket(f"{ROOT}/pi-1/status", b"gone", 2, True))
    device.subscribe("+/peer/pi-1", "pi-1/wakeup")
    newer = Client(router, "pi-1")
    assert not device.is_connected
    assert coordinator.got == [("pi-1/status", b"gone", 1, False)]
    assert router._filters.keys() == {coordinator, newer}
    coordinator.publish("pi-1/wakeup")
    assert device.got == newer.got == []


def test_a_will_that_its_sender_could_not_publish_is_denied(router, denied):
    coordinator = Client(router, "coordinator")
    coordinator.subscribe("#")
    Client(router, "pi-1", will=PublishPacket(f"{ROOT}/pi-2/status", b"forged")).abort()
    assert coordinator.got == []
    assert denied == [("pi-1", "PUBLISH to 'pi-2/status'")]


def test_a_refused_client_is_cut_off_without_its_will_and_may_come_again_when_it_is_let_in(router, denied):
    coordinator = Client(router, "coordinator")
    coordinator.subscribe("#")
    device = Client(router, "pi-1", will=PublishPacket(f"{ROOT}/pi-1/status", b"gone", 1, True))
    other = Client(router, "pi-2")
    router.revoke({"pi-1"}, {"0a"})
    assert (device.is_connected, other.is_connected, coordinator.got, denied) == (False, True, [], [])
    assert [router.is_revoked(*one) for one in (("pi-1", "1"), ("pi-2", "0a"), ("", "1"), ("pi-2", "a"))] == [
        1,
        1,
        1,
        0,
    ]
    router.revoke((), ())
    assert not router.is_revoked("pi-1", "1")
