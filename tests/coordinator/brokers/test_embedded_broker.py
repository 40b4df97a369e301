"""What only the embedded broker must be asked: the faults of amqtt, and that it goes quietly."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from edgefl.coordinator.brokers.broker import client_context
from edgefl.coordinator.brokers.embedded_broker import EmbeddedBroker
from edgefl.coordinator.brokers.mqtt import router

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
    broker = EmbeddedBroker(fleet="lab", tls=tls, port=free_port, connect_timeout_s=0.3)
    broker.start()
    try:
        context = client_context(certificates.of("pi-1"))
        plain = socket.create_connection(("127.0.0.1", free_port), timeout=60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
            assert secured.recv(1) == b""
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
        broker.start()
        broker.stop()
        broker.stop()
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
def test_a_device_retains_so_much_and_no_more_and_nothing_once_it_was_removed(running, mqtt_tools, monkeypatch):
    monkeypatch.setattr(router, "MAX_RETAINED_BYTES", 2500)
    device = running.client("pi-1")
    for number in (1, 2, 2, 3, 4):  # the second one twice: in its own place it counts once
        device.publish(f"edgefl/v1/lab/pi-1/peer/pi-{number}", bytes(1000), retain=True)
    device.publish("edgefl/v1/lab/pi-1/status", b"online", retain=True)

    def retained(num_expected):
        with running.client("coordinator") as reader:
            reader.subscribe("edgefl/v1/lab/pi-1/#")
            mqtt_tools.eventually(lambda: len(reader.received) == num_expected)
            reader.publish("edgefl/v1/lab/pi-1/command", b"the end")
            mqtt_tools.eventually(lambda: reader.payloads("edgefl/v1/lab/pi-1/command"))
            return sorted(
                topic.rpartition("lab/pi-1/")[2] for topic, _, is_retained in reader.received if is_retained
            )

    assert retained(3) == ["peer/pi-1", "peer/pi-2", "status"]
    running.broker.refuse({"pi-1"})
    running.broker.refuse(set())
    assert retained(0) == []
