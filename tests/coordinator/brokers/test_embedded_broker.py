"""What only the embedded broker must be asked: its limits, its answers to who may not connect, and its end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.brokers import embedded_broker
from edgefl.coordinator.brokers.broker import make_client_context
from edgefl.coordinator.brokers.embedded_broker import EmbeddedBroker
from edgefl.coordinator.brokers.packets import PublishPacket
from edgefl.coordinator.connections import ConnectionLimiter
from edgefl.core.config import ConnectionSettings

pytestmark = pytest.mark.timeout(60)

STATUS = "edgefl/v1/lab/pi-1/status"


embedded = pytest.mark.parametrize("running", ["embedded"], indirect=True)


def test_it_listens_on_loopback_unless_told_otherwise(certificates, free_port):
    broker = EmbeddedBroker(fleet="lab", tls=certificates.server(), port=free_port)
    try:
        assert broker.start().host == "127.0.0.1"
        assert broker._host == "127.0.0.1"
    finally:
        broker.stop()


@embedded
def test_what_was_sent_right_before_disconnect_arrives(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(STATUS)
    raw = running.raw("pi-1")
    publish = b"\x30" + bytes([2 + len(STATUS) + 1]) + len(STATUS).to_bytes(2, "big") + STATUS.encode()
    packets = b"".join(publish + str(number).encode() for number in range(8))
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60) + packets + b"\xe0\x00")
    mqtt_tools.eventually(lambda: len(coordinator.received) == 8)
    assert [payload for _, payload, _ in coordinator.received] == [str(number).encode() for number in range(8)]


def test_a_client_that_never_says_connect_is_dropped(certificates, free_port):
    tls = certificates.server()
    limiter = ConnectionLimiter("mqtt", ConnectionSettings(header_s=1.0), 100)
    broker = EmbeddedBroker(fleet="lab", tls=tls, port=free_port, limiter=limiter)
    broker.start()
    try:
        context = make_client_context(certificates.of("pi-1"))
        with (
            socket.create_connection(("127.0.0.1", free_port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            assert secured.recv(1) == b""
        assert limiter.refused == {"header": 1}
    finally:
        broker.stop()


@embedded
def test_a_packet_beyond_the_limit_ends_the_connection_and_not_the_broker(running, mqtt_tools):
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60))
    assert raw.recv(4)[0] == 0x20
    raw.sendall(b"\x30\xff\xff\xff\x7f" + len(STATUS).to_bytes(2, "big") + STATUS.encode())  # 256 MB to come
    raw.settimeout(10)
    assert raw.recv(1) == b""
    assert running.client("pi-2").connected


@embedded
@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\x10\x02\x00", b"\xff" * 200])
def test_noise_ends_the_connection_and_not_the_broker(running, noise):
    raw = running.raw("pi-1")
    raw.sendall(noise)
    raw.close()
    assert running.client("pi-2").connected


@embedded
def test_two_connections_at_once_under_one_name_leave_one(running, mqtt_tools):
    raws = [running.raw("pi-1") for _ in range(4)]
    for raw in raws:
        raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60))
    ended = [False] * 4

    def watch(index):
        raws[index].settimeout(20)
        while raws[index].recv(16):
            pass
        ended[index] = True

    threads = [threading.Thread(target=watch, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    mqtt_tools.eventually(lambda: sum(ended) == 3)
    running.broker.stop()
    mqtt_tools.eventually(lambda: sum(ended) == 4)
    for thread in threads:
        thread.join()


def test_it_stops_quietly_with_clients_connected_and_leaves_no_thread(certificates, free_port, mqtt_tools, caplog):
    before = set(threading.enumerate())
    broker = EmbeddedBroker(fleet="lab", tls=certificates.server(), host="127.0.0.1", port=free_port)
    with caplog.at_level(logging.INFO):
        address = broker.start()
        with mqtt_tools.client(address, certificates.of("pi-1"), "pi-1") as device:
            broker.stop()
            broker.stop()
            mqtt_tools.eventually(lambda: device.drops)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    mqtt_tools.eventually(lambda: set(threading.enumerate()) <= before)


@embedded
def test_stopping_sends_no_wills(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(STATUS)
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60, will=(STATUS, b"gone")))
    assert raw.recv(4)[0] == 0x20
    running.broker.stop()
    mqtt_tools.eventually(lambda: coordinator.drops)
    assert coordinator.received == []


@embedded
@pytest.mark.parametrize(
    ("connect", "code"),
    [
        (b"\x10\x10\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x04pi-1", 1),  # MQTT 5
        (b"\x10\x0c\x00\x04MQTT\x04\x00\x00\x3c\x00\x00", 2),  # no client id, and no clean session
    ],
)
def test_who_connects_with_what_is_not_offered_learns_it(running, connect, code):
    raw = running.raw("pi-1")
    raw.sendall(connect)
    assert raw.recv(4) == bytes((0x20, 2, 0, code))
    assert raw.recv(1) == b""


def test_who_was_removed_or_renewed_its_certificate_is_not_authorised(certificates, free_port, mqtt_tools):
    denied = []
    broker = EmbeddedBroker(
        fleet="lab", tls=certificates.server(), port=free_port, on_denied=lambda *one: denied.append(one)
    )
    broker.revoke({"pi-1"}, {pki.get_serial(certificates.of("pi-2").cert.read_bytes())})
    address = broker.start()
    try:
        for name, code in (("pi-1", 5), ("pi-2", 5), ("pi-3", 0)):
            context = make_client_context(certificates.of(name))
            with (
                socket.create_connection((address.host, address.port), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=address.host) as raw,
            ):
                raw.sendall(mqtt_tools.connect_packet(name, keep_alive_s=60))
                assert raw.recv(4) == bytes((0x20, 2, 0, code))
        assert [who for who, _ in denied] == ["pi-1", "pi-2"]
        assert all("from 127.0.0.1: it was removed, or renewed" in what for _, what in denied)
    finally:
        broker.stop()


@embedded
def test_a_client_that_is_removed_is_cut_off_and_its_will_is_not_published(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe("edgefl/v1/lab/#")
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60, will=(STATUS, b"gone")))
    assert raw.recv(4)[0] == 0x20
    running.broker.revoke({"pi-1"})
    with contextlib.suppress(ConnectionError):
        assert raw.recv(1) == b""
    running.client("pi-2").publish("edgefl/v1/lab/pi-2/heartbeat", b"after")
    mqtt_tools.eventually(lambda: coordinator.received)
    assert [name for name, _, _ in coordinator.received] == ["edgefl/v1/lab/pi-2/heartbeat"]


@embedded
def test_who_does_not_read_is_cut_off_and_the_others_get_everything(running, mqtt_tools, monkeypatch, caplog):
    monkeypatch.setattr(embedded_broker, "MAX_QUEUED_BYTES", 20_000_000)
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=600, will=(STATUS, b"gone")))
    assert raw.recv(4)[0] == 0x20
    edge = "edgefl/v1/lab/+/peer/pi-1"
    raw.sendall(b"\x82" + bytes((5 + len(edge),)) + b"\x00\x01" + len(edge).to_bytes(2) + edge.encode() + b"\x01")
    assert raw.recv(5)[0] == 0x90
    coordinator, sender = running.client("coordinator"), running.client("pi-2")
    coordinator.subscribe(edge, STATUS)
    # More than is allowed to wait, and what lies in the buffers of the system.
    for number in range(50):
        sender.publish("edgefl/v1/lab/pi-2/peer/pi-1", bytes((number,)) * 1_000_000)
        mqtt_tools.eventually(lambda number=number: len(coordinator.received) > number)
    mqtt_tools.eventually(lambda: len(coordinator.received) == 51)
    assert coordinator.payloads(STATUS) == [b"gone"]
    assert [payload[0] for _, payload, _ in coordinator.received if len(payload) > 4] == list(range(50))
    assert [record.message[:60] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "cut the connection of pi-1, which reads too slowly: 20 packe"
    ]


@embedded
def test_messages_wait_for_who_does_not_acknowledge_and_none_is_lost(running, mqtt_tools, monkeypatch):
    monkeypatch.setattr(embedded_broker, "MAX_IN_FLIGHT", 3)
    coordinator = running.client("coordinator")
    coordinator.subscribe("edgefl/v1/lab/+/progress")
    for number in range(100):
        running.broker._call_in_loop(
            running.broker._router.publish,
            "pi-1",
            PublishPacket("edgefl/v1/lab/pi-1/progress", str(number).encode(), 1),
        )
    mqtt_tools.eventually(lambda: len(coordinator.received) == 100)
    assert [payload for _, payload, _ in coordinator.received] == [str(number).encode() for number in range(100)]


@embedded
def test_a_fault_of_the_broker_costs_one_connection_and_is_logged(running, mqtt_tools, caplog):
    running.broker._router.publish = lambda *_: 1 / 0
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60) + b"\x30\x03\x00\x01a")
    with contextlib.suppress(ConnectionError):
        while raw.recv(16):
            pass
    assert "ZeroDivisionError" in caplog.text
    assert running.client("pi-2").connected


@embedded
def test_a_client_that_breaks_off_its_handshake_is_no_fault(running, caplog):
    with socket.create_connection((running.address.host, running.address.port), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while plain.recv(100):
                pass
    assert running.client("pi-2").connected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
