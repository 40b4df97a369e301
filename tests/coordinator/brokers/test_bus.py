from __future__ import annotations

import logging
import threading

import pytest

from edgefl.coordinator.brokers.broker import BrokerAddress, client_context
from edgefl.coordinator.brokers.bus import Bus
from edgefl.errors import BrokerError, NetworkError
from edgefl.protocol import Command, CommandKind, Status, Topic

pytestmark = pytest.mark.timeout(60)

ROOT = "edgefl/v1/lab"


class Coordinator:
    """Keeps what the bus tells."""

    def __init__(self):
        self.messages = []
        self.connections = []

    def message(self, device_id, kind, payload):
        if kind is Topic.STATUS:
            Status.load(payload)
        self.messages.append((device_id, kind, payload))

    def connection(self, connected):
        self.connections.append(connected)


@pytest.fixture
def coordinator():
    return Coordinator()


@pytest.fixture
def bus(running, certificates, coordinator):
    bus = Bus(running.address, certificates.of("coordinator"), "lab", coordinator.message, coordinator.connection)
    bus.connect()
    assert bus.wait_connected(60)
    yield bus
    bus.close()


def test_it_hears_the_five_topics_of_every_device(bus, running, coordinator, mqtt_tools):
    for name in ("pi-1", "pi-2"):
        device = running.client(name)
        device.publish(f"{ROOT}/{name}/status", Status(state="online", boot_id="b", session_no=1).dump())
        for kind in ("heartbeat", "capabilities", "progress", "answer"):
            device.publish(f"{ROOT}/{name}/{kind}", kind.encode())
    mqtt_tools.eventually(lambda: len(coordinator.messages) == 10)
    heard = {(device_id, kind) for device_id, kind, _ in coordinator.messages}
    assert heard == {(name, kind) for name in ("pi-1", "pi-2") for kind in Topic if kind not in ("bell", "command")}


def test_a_coordinator_that_comes_late_hears_what_a_thousand_devices_have_left_for_it(
    running, certificates, coordinator, mqtt_tools
):
    devices, status = running.client("coordinator"), Status(state="online", boot_id="b", session_no=1).dump()
    for number in range(1000):
        devices._paho.publish(f"{ROOT}/pi-{number}/status", status, qos=1, retain=True)
        last = devices._paho.publish(f"{ROOT}/pi-{number}/capabilities", b"{}", qos=1, retain=True)
    last.wait_for_publish(60)
    bus = Bus(running.address, certificates.of("coordinator"), "lab", coordinator.message, coordinator.connection)
    bus.connect()
    try:
        mqtt_tools.eventually(lambda: len(coordinator.messages) == 2 * 1000, 40)
    finally:
        bus.close()
    assert len({(device_id, kind) for device_id, kind, _ in coordinator.messages}) == 2 * 1000


def test_it_is_not_sent_what_devices_say_to_each_other(bus, running, coordinator, mqtt_tools):
    device, other = running.client("pi-1"), running.client("pi-2")
    other.subscribe(f"{ROOT}/+/peer/pi-2")
    heard, bus._client.on_message = [], lambda _client, _data, message: heard.append(message.topic)
    device.publish(f"{ROOT}/pi-1/peer/pi-2", b"between us", retain=True)
    mqtt_tools.eventually(lambda: other.payloads(f"{ROOT}/pi-1/peer/pi-2"))
    device.publish(f"{ROOT}/pi-1/heartbeat", b"for all")
    mqtt_tools.eventually(lambda: heard)
    assert heard == [f"{ROOT}/pi-1/heartbeat"]
    assert bus.malformed_counts() == {}


def test_it_rings_and_commands(bus, running, mqtt_tools):
    device = running.client("pi-1")
    device.subscribe(f"{ROOT}/pi-1/bell", f"{ROOT}/pi-1/command")
    command = Command(id="7", kind=CommandKind.DRAIN)
    bus.ring("pi-1")
    bus.command("pi-1", command)
    mqtt_tools.eventually(lambda: len(device.received) == 2)
    assert device.payloads(f"{ROOT}/pi-1/bell") == [b""]
    assert Command.load(device.payloads(f"{ROOT}/pi-1/command")[0]) == command


def test_malformed_messages_are_counted_logged_once_a_minute_and_survived(
    bus, running, coordinator, mqtt_tools, caplog
):
    device = running.client("pi-1")
    with caplog.at_level(logging.WARNING, logger="edgefl.coordinator.brokers.bus"):
        for payload in (b"\xff", b"[]", b'{"v":9}', b"x" * 70_000):
            device.publish(f"{ROOT}/pi-1/status", payload)
        mqtt_tools.eventually(lambda: bus.malformed_counts() == {"pi-1": 4})
    assert len([record for record in caplog.records if "dropped a message of pi-1" in record.message]) == 1
    device.publish(f"{ROOT}/pi-1/heartbeat", b"fine")
    mqtt_tools.eventually(lambda: ("pi-1", Topic.HEARTBEAT, b"fine") in coordinator.messages)


def test_a_handler_that_fails_does_not_end_the_bus(running, certificates, mqtt_tools, caplog):
    heard = []

    def fail(device_id, kind, payload):
        heard.append(payload)
        raise RuntimeError("a bug")

    bus = Bus(running.address, certificates.of("coordinator"), "lab", fail, lambda _: None)
    bus.connect()
    try:
        assert bus.wait_connected(60)
        device = running.client("pi-1")
        device.publish(f"{ROOT}/pi-1/heartbeat", b"1")
        device.publish(f"{ROOT}/pi-1/heartbeat", b"2")
        mqtt_tools.eventually(lambda: heard == [b"1", b"2"])
    finally:
        bus.close()
    assert "a bug" in caplog.text


def test_it_comes_back_after_the_broker_does_and_says_so(bus, running, coordinator, mqtt_tools):
    running.broker.stop()
    mqtt_tools.eventually(lambda: coordinator.connections == [True, False])
    bus.ring("pi-1")
    bus.command("pi-1", Command(id="1", kind=CommandKind.RESUME))
    running.broker.start()
    mqtt_tools.eventually(lambda: coordinator.connections == [True, False, True])
    running.client("pi-1").publish(f"{ROOT}/pi-1/heartbeat", b"back")
    mqtt_tools.eventually(lambda: coordinator.messages)


def test_it_waits_for_a_broker_that_is_not_there_yet(running, certificates, coordinator, mqtt_tools):
    running.broker.stop()
    bus = Bus(running.address, certificates.of("coordinator"), "lab", coordinator.message, coordinator.connection)
    bus.connect()
    try:
        assert not bus.wait_connected(0.3)
        running.broker.start()
        assert bus.wait_connected(60)
    finally:
        bus.close()


def test_forgetting_a_device_clears_what_was_retained(bus, running, coordinator, mqtt_tools):
    status = Status(state="online", boot_id="b", session_no=1).dump()
    running.client("pi-1").publish(f"{ROOT}/pi-1/status", status, retain=True)
    mqtt_tools.eventually(lambda: coordinator.messages)
    bus.forget("pi-1")
    device = running.client("pi-1")

    def retained():
        device.received.clear()
        device.subscribe(f"{ROOT}/pi-1/status", f"{ROOT}/pi-1/bell")
        bus.ring("pi-1")
        mqtt_tools.eventually(lambda: device.payloads(f"{ROOT}/pi-1/bell"))
        return device.payloads(f"{ROOT}/pi-1/status")

    mqtt_tools.eventually(lambda: not [payload for payload in retained() if payload])
    assert bus.malformed_counts() == {}


def test_closing_tells_that_the_connection_is_gone_and_leaves_no_thread(bus, coordinator):
    bus.close()
    assert coordinator.connections == [True, False]
    assert not [thread for thread in threading.enumerate() if "paho" in thread.name]


def test_missing_files_are_named(certificates, tmp_path, coordinator):
    files = certificates.of("coordinator")
    broken = type(files)(ca=files.ca, cert=files.cert, key=tmp_path / "missing.key")
    with pytest.raises(BrokerError, match=r"missing\.key"):
        Bus(BrokerAddress(host="h", port=1), broken, "lab", coordinator.message, coordinator.connection)
    with pytest.raises(BrokerError):
        client_context(broken)


def test_a_refusal_by_the_coordinator_counts_as_malformed(running, certificates, mqtt_tools):
    def refuse(device_id, kind, payload):
        raise NetworkError("unknown device")

    bus = Bus(running.address, certificates.of("coordinator"), "lab", refuse, lambda _: None)
    bus.connect()
    try:
        assert bus.wait_connected(60)
        running.client("pi-1").publish(f"{ROOT}/pi-1/heartbeat", b"x")
        mqtt_tools.eventually(lambda: bus.malformed_counts() == {"pi-1": 1})
    finally:
        bus.close()
