"""Where the link goes, and that a new one takes over when the broker moves."""

import threading

import pytest

from edgefl.core.errors import StoreFullError
from edgefl.device.mqtt.connection import MqttCallbacks
from edgefl.device.mqtt.relocatable_connection import RelocatableConnection


@pytest.fixture
def link(state):
    return RelocatableConnection(state, "boot", MqttCallbacks(on_wake_up=lambda: None, on_command=lambda _: None))


def test_without_a_host_of_its_own_the_broker_is_where_the_coordinator_is(state, link):
    state.update(addresses=("10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.7:9000"), broker_port=1999, broker_host=None)
    assert link.list_brokers() == [("10.0.0.7", 1999), ("10.0.0.8", 1999)]


def test_a_broker_that_moved_is_followed_also_when_the_card_is_full(state, link, full_card):
    with full_card(), pytest.raises(StoreFullError):
        state.update(broker_port=1999, broker_host="10.0.0.9")
    assert link.list_brokers() == [("10.0.0.9", 1999)]


def test_following_stops_the_link_before_and_starts_another(link):
    def threads():
        return sum(thread.name == "mqtt-link" for thread in threading.enumerate())

    link.start()
    before = link.current
    link.reconnect()
    assert link.current is not before
    assert threads() == 1
    link.stop()
    assert threads() == 0
