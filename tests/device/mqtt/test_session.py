"""What the agent hears of what comes over the link; the link itself is tested against real brokers."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl.core.protocol import MAX_PEER_BYTES, Command, CommandKind, StatusMessage
from edgefl.device.mqtt.session import MAX_RECENT_COMMANDS, MessageDispatcher, MqttCallbacks
from edgefl.system.retries import RateLimitedLog

ROOT = "edgefl/v1/lab/pi-1"


class Site:
    """A session whose messages the test makes, and what the agent was told of them."""

    def __init__(self):
        self.told = []
        self.is_listening = True
        self.fails = False
        callbacks = MqttCallbacks(
            on_wake_up=lambda: self._tell("bell"),
            on_command=lambda command: self._tell(command.id),
            on_connection=self._tell,
            on_peer_message=lambda sender, payload: self._tell((sender, payload)),
        )
        self.incoming = MessageDispatcher(
            callbacks,
            RateLimitedLog(logging.getLogger("edgefl.test")),
            is_subscribed_to_peers=lambda: self.is_listening,
            on_offline=lambda _session, status: self.told.append(f"offline {status.session_no}"),
        )
        self.client = SimpleNamespace(message_callback_add=self._add)
        self.session: Any = SimpleNamespace(client=self.client, peer_filter="peers")
        self.incoming.attach(self.session)

    def _add(self, _filter, callback):
        self.on_peer = callback

    def _tell(self, what):
        if self.fails:
            raise RuntimeError("the agent is broken")
        self.told.append(what)

    def say(self, kind, payload=b""):
        self.client.on_message(None, self.session, SimpleNamespace(topic=f"{ROOT}/{kind}", payload=payload))
        return self.told

    def say_as_peer(self, topic, payload):
        self.on_peer(None, self.session, SimpleNamespace(topic=topic, payload=payload))
        return self.told


@pytest.fixture
def site():
    return Site()


def command(number):
    return Command(id=f"c-{number}", kind=CommandKind.HEARTBEAT).dump()


def test_a_command_that_comes_again_is_done_once_for_as_long_as_it_is_remembered(site):
    site.say("command", command(0))
    assert site.say("command", command(0)) == ["c-0"]
    for number in range(1, MAX_RECENT_COMMANDS + 1):
        site.say("command", command(number))
    site.told.clear()
    assert site.say("command", command(MAX_RECENT_COMMANDS)) == []
    assert site.say("command", command(0)) == ["c-0"]


def test_only_an_offline_of_this_device_is_told_and_not_what_clears_it(site):
    site.say("status", StatusMessage(state="online", boot_id="b", session_no=3).dump())
    site.say("status", b"")
    assert site.say("status", StatusMessage(state="offline", boot_id="b", session_no=4).dump()) == ["offline 4"]


def test_when_the_link_is_up_the_bell_rings_after_that_and_not_when_it_is_down(site):
    site.incoming.notify_connection(is_connected=True)
    site.incoming.notify_connection(is_connected=False)
    assert site.told == [True, "bell", False]


def test_what_a_neighbour_says_is_heard_while_somebody_listens_and_not_when_it_clears_a_value(site):
    topic = "edgefl/v1/lab/pi-2/peer/pi-1"
    site.say_as_peer(topic, b"")
    assert site.say_as_peer(topic, b"x") == [("pi-2", b"x")]
    site.is_listening = False
    assert site.say_as_peer(topic, b"y") == [("pi-2", b"x")]


@pytest.mark.parametrize(
    ("topic", "payload"),
    [("edgefl/v1/lab/pi-2/peer/pi-1", bytes(MAX_PEER_BYTES + 1)), ("edgefl/v1/lab/PI 2/peer/pi-1", b"x")],
    ids=["too large", "no name"],
)
def test_a_neighbour_s_message_that_cannot_be_is_dropped_with_a_word(site, caplog, topic, payload):
    assert site.say_as_peer(topic, payload) == []
    assert "dropped" in caplog.text


def test_neither_malformed_messages_nor_an_agent_that_fails_end_the_link(site, caplog):
    site.say("command", b"{")
    assert "dropped a message" in caplog.text
    site.fails = True
    site.say("wakeup")
    site.say("command", command(1))
    site.say_as_peer("edgefl/v1/lab/pi-2/peer/pi-1", b"x")
    site.incoming.notify_connection(is_connected=True)
    assert caplog.text.count("the agent failed to act on a message") == 5
    site.fails = False
    assert site.say("wakeup") == ["bell"]
