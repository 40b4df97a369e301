"""The broker as a process of its own, and the coordinator beside it."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from requirements import needs
from small_fleet import enroll

from edgefl.coordinator import pki
from edgefl.coordinator.brokers import mqtt_service
from edgefl.coordinator.brokers import mqtt_service as standalone_broker
from edgefl.coordinator.brokers.broker import BrokerAddress
from edgefl.coordinator.brokers.mqtt_service import MqttClient, parse_external_broker, run_broker
from edgefl.coordinator.directory import StartOptions, init_directory
from edgefl.coordinator.service import Coordinator
from edgefl.core.errors import BrokerError, ConfigError, NetworkError, StoreError
from edgefl.core.protocol import Command, CommandKind, StatusMessage, Topic
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.store import Store
from edgefl.system.atomic_files import TlsFiles

pytestmark = pytest.mark.timeout(90)

ROOT = "edgefl/v1/lab"


@pytest.fixture
def directory(tmp_path):
    return init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())


class Unit:
    """`edgefl coordinator broker` as a user would type it."""

    def __init__(self, directory, environment, *options):
        self.directory = directory
        self.port = find_free_port()
        command = ["coordinator", "broker", "--dir", directory.root, "--host", "127.0.0.1", "--port", self.port]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgefl.cli.main", *map(str, [*command, *options])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_up(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(60)

    def tls(self, name):
        """The files of a client of the fleet."""
        made = TlsFiles(**{kind: self.directory.root.parent / f"{name}.{kind}" for kind in ("ca", "cert", "key")})
        pair = pki.issue_client_certificate(self.directory.load_authority(), name)
        made.ca.write_bytes(self.directory.ca_cert.read_bytes())
        made.cert.write_bytes(pair.cert_pem)
        made.key.write_bytes(pair.key_pem)
        return made


@pytest.fixture
def start(directory, mqtt_tools):
    units = []

    def start(*options):
        units.append(Unit(directory, mqtt_tools.environment, *options))
        return units[-1]

    yield start
    for unit in units:
        unit.process.kill()
        unit.process.communicate()


@pytest.fixture
def client(mqtt_tools):
    """Makes MQTT clients of a unit, by name."""
    made = []

    def client(unit, name):
        made.append(mqtt_tools.client(BrokerAddress(host="127.0.0.1", port=unit.port), unit.tls(name), name))
        return made[-1]

    yield client
    for one in made:
        one.__exit__()


def test_it_keeps_to_the_rules_until_sigterm_and_leaves_neither_process_nor_port(start, kind, client, mqtt_tools):
    unit = start("--kind", kind)
    assert f"--broker mqtts://127.0.0.1:{unit.port} --dir {unit.directory.root}" in unit.wait_until_up()
    receiver, sender = client(unit, "pi-1"), client(unit, "pi-2")
    receiver.subscribe(f"{ROOT}/+/peer/pi-1")
    sender.publish(f"{ROOT}/pi-3/peer/pi-1", b"forged")
    sender.publish(f"{ROOT}/pi-2/peer/pi-1", b"true")
    mqtt_tools.eventually(lambda: receiver.received)
    assert [payload for _, payload, _ in receiver.received] == [b"true"]
    children = psutil.Process(unit.process.pid).children()
    assert len(children) == (kind == "mosquitto")
    assert unit.end() == 0
    assert not any(child.is_running() for child in children)
    socket.create_server(("127.0.0.1", unit.port)).close()


def test_there_is_one_on_a_directory_and_after_a_kill_another_one_at_once_which_ctrl_c_ends(start):
    unit = start("--kind", "embedded")
    unit.wait_until_up()
    second = start("--kind", "embedded")
    out, err = second.process.communicate(timeout=60)
    assert (second.process.returncode, out, err.count("\n")) == (14, "", 1)
    assert "a broker runs on" in err
    unit.end(signal.SIGKILL)
    again = start("--kind", "embedded", "--port", unit.port)
    again.wait_until_up()
    assert again.end(signal.SIGINT) == 0


@pytest.mark.extended
def test_removed_devices_are_shut_out_at_the_start_and_while_it_runs(start, kind, client, directory, mqtt_tools):
    with Store.open(directory.database) as store:
        enroll(store, "pi-1", "pi-2", "pi-3")
        store.remove_device("pi-1", at=3.0)
        unit = start("--kind", kind)
        unit.wait_until_up()
        ear = client(unit, "coordinator")
        ear.subscribe(f"{ROOT}/+/heartbeat")

        def heard():
            ear.received.clear()
            for name in ("pi-1", "pi-2", "pi-3"):
                device = client(unit, name)
                if device.connected:
                    with contextlib.suppress(RuntimeError):  # it may be shut out just now
                        device.publish(f"{ROOT}/{name}/heartbeat", b"x", qos=0)
                device.__exit__()
            mqtt_tools.eventually(lambda: ear.payloads(f"{ROOT}/pi-3/heartbeat"))
            return {name.split("/")[3] for name, _, _ in ear.received}

        assert heard() == {"pi-2", "pi-3"}
        store.remove_device("pi-2", at=4.0)
        enroll(store, "pi-1")
        mqtt_tools.eventually(lambda: heard() == {"pi-1", "pi-3"})


@pytest.mark.extended
@needs("mosquitto")
def test_a_device_stays_shut_out_when_mosquitto_was_killed(start, client, directory, mqtt_tools):
    with Store.open(directory.database) as store:
        enroll(store, "pi-1")
        unit = start("--kind", "mosquitto")
        unit.wait_until_up()
        store.remove_device("pi-1", at=3.0)
        acl = directory.broker / "acl"
        mqtt_tools.eventually(lambda: "user pi-1\ntopic deny #" in acl.read_text())
        (child,) = psutil.Process(unit.process.pid).children()
        child.kill()
        mqtt_tools.eventually(lambda: psutil.Process(unit.process.pid).children() not in ([], [child]))
        mqtt_tools.eventually(lambda: _answers(unit.port))
        ear = client(unit, "coordinator")
        ear.subscribe(f"{ROOT}/#")
        for name in ("pi-1", "pi-2"):
            client(unit, name).publish(f"{ROOT}/{name}/heartbeat", b"x")
        mqtt_tools.eventually(lambda: ear.received)
        assert [name for name, _, _ in ear.received] == [f"{ROOT}/pi-2/heartbeat"]


def _answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_store_that_cannot_be_read_for_a_while_does_not_end_it(directory, monkeypatch, caplog):
    asked = []

    def removed_devices(_store):
        asked.append(1)
        if 2 <= len(asked) < 5:
            raise StoreError("the disk is away")
        return frozenset()

    monkeypatch.setattr(standalone_broker, "REVOCATION_INTERVAL_S", 0.05)
    monkeypatch.setattr(Store, "list_removed_device_ids", removed_devices)

    def stop_later(_address):
        def stop():
            until_s = time.monotonic() + 60
            while len(asked) < 7 and time.monotonic() < until_s:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop).start()

    run_broker(directory, host="127.0.0.1", port=find_free_port(), kind="embedded", on_ready=stop_later)
    assert len(asked) >= 7
    assert caplog.text.count("not yet shut out (the disk is away)") == 1, "once, not every time"


def _options(directory, **options):
    usual = {"host": "127.0.0.1", "port": directory.port, "broker_port": find_free_port(), "broker": "embedded"}
    return StartOptions(**{**usual, **options})


def _hello(directory):
    context = ssl.create_default_context(cafile=directory.ca_cert)
    connection = http.client.HTTPSConnection("127.0.0.1", directory.port, context=context, timeout=10)
    try:
        connection.request("GET", "/edgefl/v1/hello")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@pytest.mark.extended
def test_a_coordinator_beside_it_needs_no_files_and_none_of_its_own_and_sends_boards_to_its_own_host(
    start, directory, monkeypatch
):
    unit = start("--kind", "embedded")
    spec = re.search(r"--broker (\S+)", unit.wait_until_up())[1]
    with Coordinator(directory, _options(directory, broker=spec), build_run) as coordinator:
        assert coordinator._mqtt.client.wait_connected(60)
        # A board elsewhere would look for 127.0.0.1 on itself.
        assert _hello(directory)["broker"] == {"port": unit.port, "host": None}
    with pytest.raises(StoreError, match="a broker runs on"), Coordinator(directory, _options(directory), build_run):
        pass
    assert unit.process.poll() is None
    unit.end()
    with Coordinator(directory, _options(directory), build_run):
        second = start("--kind", "embedded")
        assert second.process.wait(60) == 14
    monkeypatch.setattr(mqtt_service, "CLIENT_TIMEOUT_S", 0.1)
    elsewhere = "mqtts://no-such-host.invalid:1883"
    with Coordinator(directory, _options(directory, broker=elsewhere), build_run):
        assert _hello(directory)["broker"] == {"port": 1883, "host": "no-such-host.invalid"}


def test_an_external_address_carries_its_own_files():
    address = parse_external_broker("mqtts://mq.example:1234?ca=/a/ca.pem&cert=/a/c.pem&key=/a/k.pem").address
    assert (address.host, address.port) == ("mq.example", 1234)
    assert address.tls == TlsFiles(ca=Path("/a/ca.pem"), cert=Path("/a/c.pem"), key=Path("/a/k.pem"))


def test_an_external_address_has_the_usual_port():
    assert parse_external_broker("mqtts://mq.example").address.port == 8883


@pytest.mark.parametrize(
    "spec",
    [
        "mqtts://",
        "mqtts://host:no",
        "mqtts://host/path",
        "mqtts://me:secret@host",
        "mqtts://host?ca=x",
        "mqtts://h?a=b",
    ],
)
def test_an_external_address_that_makes_no_sense_is_refused(spec):
    with pytest.raises(ConfigError, match="broker address"):
        parse_external_broker(spec)


def test_an_external_broker_that_is_down_does_not_stop_the_start(free_port, caplog):
    broker = parse_external_broker(f"mqtts://127.0.0.1:{free_port}")
    assert broker.start().port == free_port
    assert "cannot be reached" in caplog.text
    assert not broker.is_alive()


STATUS = StatusMessage(state="online", boot_id="b", session_no=1).dump()

both_extended = pytest.mark.parametrize(
    "running", [pytest.param("mosquitto", marks=pytest.mark.extended), "embedded"], indirect=True
)


class ClientListener:
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
    return ClientListener()


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
    with caplog.at_level(logging.WARNING, logger="edgefl.coordinator.brokers.mqtt_service"):
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
