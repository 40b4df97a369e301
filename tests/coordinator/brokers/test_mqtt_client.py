from __future__ import annotations

import contextlib
import logging
import threading

import pytest

from edgefl.coordinator.brokers.broker import BrokerAddress
from edgefl.coordinator.brokers.mqtt_client import MqttClient
from edgefl.core.errors import BrokerError, NetworkError
from edgefl.core.protocol import Command, CommandKind, StatusMessage, Topic

pytestmark = pytest.mark.timeout(60)

ROOT = "edgefl/v1/lab"


STATUS = StatusMessage(state="online", boot_id="b", session_no=1).dump()

both_extended = pytest.mark.parametrize(
    "running", [pytest.param("mosquitto", marks=pytest.mark.extended), "embedded"], indirect=True
)


class Coordinator:
    """Keeps what the bus tells."""

    def __init__(self):
        self.messages = []
        self.connections = []

    def message(self, device_id, kind, payload):
        if kind is Topic.STATUS:
            StatusMessage.load(payload)
        if payload == b"a bug":
            raise RuntimeError("a bug")
        if payload == b"unknown":
            raise NetworkError("unknown device")
        self.messages.append((device_id, kind, payload))

    def connection(self, connected):
        self.connections.append(connected)


@pytest.fixture
def coordinator():
    return Coordinator()


@contextlib.contextmanager
def connected(running, certificates, coordinator):
    bus = MqttClient(
        running.address, certificates.of("coordinator"), "lab", coordinator.message, coordinator.connection
    )
    bus._client.reconnect_delay_set(0.05, 0.1)
    bus.connect()
    try:
        yield bus
    finally:
        bus.close()


@pytest.fixture
def bus(running, certificates, coordinator):
    with connected(running, certificates, coordinator) as bus:
        assert bus.wait_connected(60)
        yield bus


def test_it_hears_the_five_topics_of_every_device_and_not_what_they_say_to_each_other(
    bus, running, coordinator, mqtt_tools
):
    heard, received = [], bus._client.on_message
    bus._client.on_message = lambda *args: (heard.append(args[2].topic), received(*args))
    other = running.client("pi-2")
    other.subscribe(f"{ROOT}/+/peer/pi-2")
    for name in ("pi-1", "pi-2"):
        device = running.client(name) if name == "pi-1" else other
        device.publish(f"{ROOT}/{name}/peer/pi-2", b"between us", retain=True)
        device.publish(f"{ROOT}/{name}/status", STATUS)
        for kind in ("heartbeat", "capabilities", "progress", "answer"):
            device.publish(f"{ROOT}/{name}/{kind}", kind.encode())
    mqtt_tools.eventually(lambda: len(coordinator.messages) == 10 and len(other.received) == 2)
    told = {(device_id, kind) for device_id, kind, _ in coordinator.messages}
    assert told == {(name, kind) for name in ("pi-1", "pi-2") for kind in Topic if kind not in ("wakeup", "command")}
    assert (len(heard), bus.malformed_counts()) == (10, {})


@pytest.mark.extended
def test_a_coordinator_that_comes_late_hears_what_a_thousand_devices_have_left_for_it(
    running, certificates, coordinator, mqtt_tools
):
    devices = running.client("coordinator")
    for number in range(1000):
        devices._paho.publish(f"{ROOT}/pi-{number}/status", STATUS, qos=1, retain=True)
        last = devices._paho.publish(f"{ROOT}/pi-{number}/capabilities", b"{}", qos=1, retain=True)
    last.wait_for_publish(60)
    with connected(running, certificates, coordinator):
        mqtt_tools.eventually(lambda: len(coordinator.messages) == 2 * 1000, 40)
    assert len({(device_id, kind) for device_id, kind, _ in coordinator.messages}) == 2 * 1000


def test_it_rings_and_commands(bus, running, mqtt_tools):
    device = running.client("pi-1")
    device.subscribe(f"{ROOT}/pi-1/wakeup", f"{ROOT}/pi-1/command")
    command = Command(id="7", kind=CommandKind.DRAIN)
    bus.notify("pi-1")
    bus.send_command("pi-1", command)
    mqtt_tools.eventually(lambda: len(device.received) == 2)
    assert device.payloads(f"{ROOT}/pi-1/wakeup") == [b""]
    assert Command.load(device.payloads(f"{ROOT}/pi-1/command")[0]) == command


def test_malformed_and_unwanted_messages_and_bugs_of_the_handler_are_survived_and_the_first_two_counted(
    bus, running, coordinator, mqtt_tools, caplog
):
    device = running.client("pi-1")
    with caplog.at_level(logging.WARNING, logger="edgefl.coordinator.brokers.mqtt_client"):
        for payload in (b"\xff", b"[]", b'{"v":9}', b"x" * 70_000):
            device.publish(f"{ROOT}/pi-1/status", payload)
        for payload in (b"unknown", b"a bug", b"fine"):
            device.publish(f"{ROOT}/pi-1/heartbeat", payload)
        mqtt_tools.eventually(lambda: coordinator.messages)
    assert coordinator.messages == [("pi-1", Topic.HEARTBEAT, b"fine")]
    assert bus.malformed_counts() == {"pi-1": 5}
    assert caplog.text.count("dropped a message of pi-1") == 1, "once a minute"
    assert "RuntimeError: a bug" in caplog.text


@both_extended
def test_it_waits_for_its_broker_and_comes_back_after_it_does(running, certificates, coordinator, mqtt_tools):
    running.broker.stop()
    with connected(running, certificates, coordinator) as bus:
        assert not bus.wait_connected(0.1)
        running.broker.start()
        assert bus.wait_connected(60)
        running.broker.stop()
        mqtt_tools.eventually(lambda: coordinator.connections == [True, False])
        bus.notify("pi-1")
        bus.send_command("pi-1", Command(id="1", kind=CommandKind.RESUME))
        running.broker.start()
        mqtt_tools.eventually(lambda: coordinator.connections == [True, False, True])
        running.client("pi-1").publish(f"{ROOT}/pi-1/heartbeat", b"back")
        mqtt_tools.eventually(lambda: coordinator.messages)


def test_forgetting_a_device_clears_what_was_retained(bus, running, coordinator, mqtt_tools):
    running.client("pi-1").publish(f"{ROOT}/pi-1/status", STATUS, retain=True)
    mqtt_tools.eventually(lambda: coordinator.messages)
    bus.clear_retained("pi-1")
    device = running.client("pi-1")

    def retained():
        device.received.clear()
        device.subscribe(f"{ROOT}/pi-1/status", f"{ROOT}/pi-1/wakeup")
        bus.notify("pi-1")
        mqtt_tools.eventually(lambda: device.payloads(f"{ROOT}/pi-1/wakeup"))
        return device.payloads(f"{ROOT}/pi-1/status")

    mqtt_tools.eventually(lambda: not [payload for payload in retained() if payload])
    assert bus.malformed_counts() == {}


def test_closing_tells_that_the_connection_is_gone_and_leaves_no_thread(bus, coordinator):
    def list_threads():
        return [thread for thread in threading.enumerate() if "paho" in thread.name]

    num_before = len(list_threads())  # a coordinator that other tests share may have one, too
    bus.close()
    assert coordinator.connections == [True, False]
    assert len(list_threads()) == num_before - 1


def test_missing_files_are_named(certificates, tmp_path, coordinator):
    files = certificates.of("coordinator")
    broken = type(files)(ca=files.ca, cert=files.cert, key=tmp_path / "missing.key")
    with pytest.raises(BrokerError, match=r"missing\.key"):
        MqttClient(BrokerAddress(host="h", port=1), broken, "lab", coordinator.message, coordinator.connection)
