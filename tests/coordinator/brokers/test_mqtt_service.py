"""The broker as a process of its own, and the coordinator beside it."""

from __future__ import annotations

import http.client
import json
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
from edgefl.coordinator.brokers.broker import BrokerAddress, BrokerTls
from edgefl.coordinator.brokers.mqtt_service import parse_external_broker, run_broker
from edgefl.coordinator.directory import StartOptions, init_directory
from edgefl.coordinator.service import Coordinator
from edgefl.core.errors import ConfigError, StoreError
from edgefl.engine.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.store import Store

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
        made = BrokerTls(**{kind: self.directory.root.parent / f"{name}.{kind}" for kind in ("ca", "cert", "key")})
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
    assert address.tls == BrokerTls(ca=Path("/a/ca.pem"), cert=Path("/a/c.pem"), key=Path("/a/k.pem"))


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
