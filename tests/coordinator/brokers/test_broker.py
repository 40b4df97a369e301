"""Both brokers keep the same promises; every test here runs over each of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import (
    MAX_MESSAGE_BYTES,
    BrokerTls,
    acl_file,
    client_context,
    may_read,
    may_write,
)
from edgefl.coordinator.brokers.choice import make_broker, mosquitto_path
from edgefl.coordinator.brokers.mosquitto import Mosquitto
from edgefl.errors import BrokerError, ConfigError, PortInUseError
from edgefl.protocol import MAX_PEER_BYTES, peer_topic

pytestmark = pytest.mark.timeout(60)

ROOT = "edgefl/v1/lab"


def test_a_device_writes_only_its_own_topics(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/#")
    device = running.client("pi-1")
    device.publish(f"{ROOT}/pi-2/status", b"forged", retain=True)
    device.publish(f"{ROOT}/pi-1/bell", b"forged")
    device.publish(f"{ROOT}/pi-2/command", b"forged")
    device.publish("elsewhere", b"forged")
    device.publish(f"{ROOT}/pi-1/heartbeat", b"true")
    mqtt_tools.eventually(lambda: coordinator.received)
    assert [(name, payload) for name, payload, _ in coordinator.received] == [(f"{ROOT}/pi-1/heartbeat", b"true")]


def test_a_device_reads_only_its_own_topics(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.publish(f"{ROOT}/pi-2/status", b"retained", retain=True)
    device = running.client("pi-1")
    device.subscribe(f"{ROOT}/pi-2/status", f"{ROOT}/pi-2/bell", f"{ROOT}/+/bell", "#", f"{ROOT}/pi-1/bell")
    coordinator.publish(f"{ROOT}/pi-2/bell", b"theirs")
    coordinator.publish(f"{ROOT}/pi-2/status", b"theirs")
    coordinator.publish(f"{ROOT}/pi-1/bell", b"ours")
    mqtt_tools.eventually(lambda: device.received)
    assert {(name, payload) for name, payload, _ in device.received} == {(f"{ROOT}/pi-1/bell", b"ours")}


def test_a_device_writes_only_its_own_edges(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/#")
    device = running.client("pi-1")
    for forged in ("pi-2/peer/pi-1", "pi-2/peer/pi-3", "pi-1/peer", "pi-1/peer/pi-2/more", "pi-1/other/pi-2"):
        device.publish(f"{ROOT}/{forged}", b"forged", retain=True)
    device.publish(f"{ROOT}/pi-1/peer/pi-2", b"true", retain=True)
    mqtt_tools.eventually(lambda: coordinator.received)
    assert [(name, payload) for name, payload, _ in coordinator.received] == [(f"{ROOT}/pi-1/peer/pi-2", b"true")]


def test_a_device_hears_only_edges_that_lead_to_it(running, mqtt_tools):
    sender, eavesdropper = running.client("pi-3"), running.client("pi-1")
    sender.publish(f"{ROOT}/pi-3/peer/pi-2", b"retained", retain=True)
    others = ("+/peer/pi-2", "pi-3/peer/pi-2", "+/peer/+", "pi-3/peer/#", "pi-1/peer/+", "+/+/pi-1", "#")
    codes = eavesdropper.subscribe(*(f"{ROOT}/{name}" for name in others))
    # Mosquitto grants a subscription that can never match, and asks before every delivery.
    assert isinstance(running.broker, Mosquitto) or set(codes) == {128}
    assert eavesdropper.subscribe(f"{ROOT}/+/peer/pi-1", f"{ROOT}/pi-3/peer/pi-1") == [1, 1]
    sender.publish(f"{ROOT}/pi-3/peer/pi-2", b"theirs")
    sender.publish(f"{ROOT}/pi-3/peer/pi-1", b"ours")
    mqtt_tools.eventually(lambda: eavesdropper.received)
    running.client("coordinator").publish(f"{ROOT}/pi-3/peer/pi-1", b"last")
    mqtt_tools.eventually(lambda: b"last" in eavesdropper.payloads(f"{ROOT}/pi-3/peer/pi-1"))
    assert {(name, payload) for name, payload, _ in eavesdropper.received} == {
        (f"{ROOT}/pi-3/peer/pi-1", b"ours"),
        (f"{ROOT}/pi-3/peer/pi-1", b"last"),
    }


def test_the_newest_value_of_an_edge_waits_for_its_receiver_until_it_is_cleared(running, mqtt_tools):
    sender = running.client("pi-1")
    for payload in (b"old", b"new"):
        sender.publish(f"{ROOT}/pi-1/peer/pi-2", payload, retain=True)
    receiver = running.client("pi-2")
    receiver.subscribe(f"{ROOT}/+/peer/pi-2")
    mqtt_tools.eventually(lambda: receiver.received == [(f"{ROOT}/pi-1/peer/pi-2", b"new", True)])
    sender.publish(f"{ROOT}/pi-1/peer/pi-2", b"", retain=True)
    mqtt_tools.eventually(lambda: len(receiver.received) == 2)
    later = running.client("pi-2")
    later.subscribe(f"{ROOT}/+/peer/pi-2")
    sender.publish(f"{ROOT}/pi-1/peer/pi-2", b"live")
    mqtt_tools.eventually(lambda: later.received)
    assert later.received == [(f"{ROOT}/pi-1/peer/pi-2", b"live", False)]


def test_the_largest_message_from_device_to_device_passes(running, mqtt_tools):
    names = ["a" * 63, "b" * 63]
    topic = peer_topic("lab", *names)
    assert MAX_PEER_BYTES + len(peer_topic("f" * 63, *names)) + 9 < MAX_MESSAGE_BYTES
    receiver = running.client(names[1])
    receiver.subscribe(topic)
    running.client(names[0]).publish(topic, bytes(MAX_PEER_BYTES), retain=True)
    mqtt_tools.eventually(lambda: receiver.payloads(topic) == [bytes(MAX_PEER_BYTES)])


def test_who_is_in_the_middle_of_a_large_packet_is_not_silent(running, mqtt_tools):
    topic, size = f"{ROOT}/pi-1/peer/pi-2", 1_000_000
    receiver = running.client("pi-2")
    receiver.subscribe(topic)
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=1))
    assert raw.recv(4)[0] == 0x20
    remaining = 2 + len(topic) + size
    length = bytes([remaining & 0x7F | 0x80, remaining >> 7 & 0x7F | 0x80, remaining >> 14])
    packet = b"\x30" + length + len(topic).to_bytes(2, "big") + topic.encode() + bytes(size)
    piece = len(packet) // 16 + 1
    for start in range(0, len(packet), piece):
        raw.sendall(packet[start : start + piece])
        until_s = time.monotonic() + 0.2
        mqtt_tools.eventually(lambda until_s=until_s: time.monotonic() > until_s)
    mqtt_tools.eventually(lambda: receiver.payloads(topic) == [bytes(size)])


def test_a_connecting_device_is_not_sent_what_only_others_subscribed_to(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    # One that it may not read, and one that it may but has not asked for.
    for name in ("pi-2", "pi-1"):
        coordinator.publish(f"{ROOT}/{name}/status", b"retained", retain=True)
    mqtt_tools.eventually(lambda: len(coordinator.received) == 2)
    device = running.client("pi-1")
    device.subscribe(f"{ROOT}/pi-1/bell")
    coordinator.publish(f"{ROOT}/pi-1/bell", b"now")
    mqtt_tools.eventually(lambda: device.payloads(f"{ROOT}/pi-1/bell"))
    assert {name for name, _, _ in device.received} == {f"{ROOT}/pi-1/bell"}


def test_what_is_retained_reaches_who_subscribes_later(running, mqtt_tools):
    running.client("pi-1").publish(f"{ROOT}/pi-1/capabilities", b"four cores", retain=True)
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/capabilities")
    mqtt_tools.eventually(lambda: coordinator.received)
    assert coordinator.received == [(f"{ROOT}/pi-1/capabilities", b"four cores", True)]


def _connected(running, mqtt_tools, name, **options):
    """A client that speaks MQTT by hand, after its CONNACK."""
    raw = running.raw(name)
    raw.sendall(mqtt_tools.connect_packet(name, keep_alive_s=60, **options))
    assert _read_packet(raw) == (0x20, b"\x00\x00")
    return raw


def _read_packet(raw):
    """The first byte of the next packet and what follows its length, of one byte."""
    raw.settimeout(10)
    head = raw.recv(1) + raw.recv(1)
    body = b""
    while len(body) < head[1]:
        body += raw.recv(head[1] - len(body))
    return head[0], body


def _text(content):
    return len(content).to_bytes(2) + content.encode()


def _packet(first, body):
    return bytes((first, len(body))) + body


def test_a_client_gets_the_answers_that_the_standard_says(running, mqtt_tools):
    raw = _connected(running, mqtt_tools, "pi-1")
    bell, status = f"{ROOT}/pi-1/bell", f"{ROOT}/pi-1/status"
    raw.sendall(b"\xc0\x00")
    assert _read_packet(raw) == (0xD0, b"")
    raw.sendall(_packet(0x82, b"\x00\x07" + _text(bell) + b"\x00" + _text(status) + b"\x01"))
    assert _read_packet(raw) == (0x90, b"\x00\x07\x00\x01")
    # At QoS 1, again because its acknowledgement was lost, and the subscriber's own acknowledgement.
    raw.sendall(_packet(0x3A, _text(status) + b"\x00\x09" + b"x"))
    found = sorted(_read_packet(raw) for _ in range(2))
    assert found[1] == (0x40, b"\x00\x09")
    first, body = found[0]
    assert (first, body[:-3], body[-1:]) == (0x32, _text(status), b"x")
    raw.sendall(_packet(0x40, body[-3:-1]))
    running.client("coordinator").publish(bell, b"ring", qos=1)
    assert _read_packet(raw) == (0x30, _text(bell) + b"ring")
    raw.sendall(_packet(0xA2, b"\x00\x08" + _text(bell) + _text(status)))
    assert _read_packet(raw) == (0xB0, b"\x00\x08")
    raw.sendall(_packet(0x30, _text(status) + b"unheard") + b"\xc0\x00")
    assert _read_packet(raw) == (0xD0, b"")


def test_subscriptions_that_overlap_give_one_message_at_the_highest_qos(running, mqtt_tools):
    raw = _connected(running, mqtt_tools, "coordinator")
    status = f"{ROOT}/pi-1/status"
    filters = b"".join((_text(f"{ROOT}/+/status"), b"\x00", _text(f"{ROOT}/pi-1/#"), b"\x01"))
    raw.sendall(_packet(0x82, b"\x00\x07" + filters))
    assert _read_packet(raw) == (0x90, b"\x00\x07\x00\x01")
    running.client("pi-1").publish(status, b"x")
    first, body = _read_packet(raw)
    assert (first, body[-1:]) == (0x32, b"x")
    raw.sendall(_packet(0x40, body[-3:-1]) + b"\xc0\x00")
    assert _read_packet(raw) == (0xD0, b"")


@pytest.mark.parametrize(("kept", "wanted", "got"), [(0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_what_is_retained_comes_with_its_flag_at_the_lower_qos(running, mqtt_tools, kept, wanted, got):
    status = f"{ROOT}/pi-1/status"
    sender = running.client("pi-1")
    sender.publish(status, b"kept", qos=kept, retain=True)
    sender.publish(f"{ROOT}/pi-1/capabilities", b"behind it")
    raw = _connected(running, mqtt_tools, "coordinator")
    raw.sendall(_packet(0x82, b"\x00\x07" + _text(status) + bytes((wanted,))))
    assert _read_packet(raw) == (0x90, bytes((0, 7, wanted)))
    first, body = _read_packet(raw)
    assert (first, body[-4:]) == (0x31 | got << 1, b"kept")


@pytest.mark.parametrize(
    "malformed",
    [
        b"\x30\x05\x00\x03a/+",
        b"\x30\x05\x00\x03a\x00b",
        b"\x30\x04\x00\x02\xff\xfe",
        b"\x36\x05\x00\x01a\x00\x01",  # QoS 3
        b"\x32\x05\x00\x01a\x00\x00",  # packet identifier 0
        b"\x82\x02\x00\x01",  # to nothing
        b"\x82\x07\x00\x01\x00\x02a#\x00",
        b"\x20\x02\x00\x00",  # CONNACK
        b"\x30\xff\xff\xff\xff\x01",
    ],
)
def test_a_malformed_packet_ends_the_connection_with_its_will(running, mqtt_tools, malformed):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    raw = _connected(running, mqtt_tools, "pi-1", will=(f"{ROOT}/pi-1/status", b"gone"))
    raw.sendall(malformed)
    with contextlib.suppress(ConnectionError):
        assert raw.recv(1) == b""
    mqtt_tools.eventually(lambda: coordinator.payloads(f"{ROOT}/pi-1/status") == [b"gone"])


def test_a_hundred_devices_and_their_coordinator(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status", f"{ROOT}/+/heartbeat")
    devices = {f"pi-{number}": running.client(f"pi-{number}") for number in range(100)}
    for name, device in devices.items():
        device.subscribe(f"{ROOT}/{name}/bell", f"{ROOT}/+/peer/{name}")
        device.publish(f"{ROOT}/{name}/status", b"online", retain=True)
        for number in range(5):
            device.publish(f"{ROOT}/{name}/heartbeat", str(number).encode(), qos=0)
    mqtt_tools.eventually(lambda: len(coordinator.received) == 600)
    for name in devices:
        assert coordinator.payloads(f"{ROOT}/{name}/heartbeat") == [b"0", b"1", b"2", b"3", b"4"]
        coordinator.publish(f"{ROOT}/{name}/bell", name.encode(), qos=0)
    mqtt_tools.eventually(lambda: all(device.received for device in devices.values()))
    assert all(device.received == [(f"{ROOT}/{name}/bell", name.encode(), False)] for name, device in devices.items())


def _answer_to(running, context, connect):
    """What the broker says to a CONNECT over this TLS context; nothing when it refuses."""
    with socket.create_connection((running.address.host, running.address.port), timeout=10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=running.address.host) as secured:
                secured.sendall(connect)
                return secured.recv(4)
        except (ssl.SSLError, ConnectionError):
            return b""


def test_a_client_without_certificate_is_refused(running, certificates, mqtt_tools):
    context = ssl.create_default_context(cafile=str(certificates.server().ca))
    assert _answer_to(running, context, mqtt_tools.connect_packet("pi-1", keep_alive_s=60)) == b""


def test_a_certificate_of_another_ca_is_refused(running, certificates, mqtt_tools):
    connect = mqtt_tools.connect_packet("pi-1", keep_alive_s=60)
    stranger = certificates.of("stranger", pki.create_authority("elsewhere"))
    assert _answer_to(running, client_context(stranger), connect) == b""
    assert _answer_to(running, client_context(certificates.of("pi-1")), connect)[:1] == b"\x20"


def test_the_will_is_published_when_a_connection_breaks(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60, will=(f"{ROOT}/pi-1/status", b"gone")))
    assert raw.recv(4)[0] == 0x20
    raw.close()
    mqtt_tools.eventually(lambda: coordinator.payloads(f"{ROOT}/pi-1/status") == [b"gone"])
    later = running.client("coordinator")
    later.subscribe(f"{ROOT}/pi-1/status")
    mqtt_tools.eventually(lambda: later.received == [(f"{ROOT}/pi-1/status", b"gone", True)])


def test_the_will_of_one_who_disconnects_is_not_published(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/#")
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60, will=(f"{ROOT}/pi-1/status", b"gone")))
    assert raw.recv(4)[0] == 0x20
    raw.sendall(b"\xe0\x00")  # DISCONNECT
    assert raw.recv(1) == b""
    running.client("pi-1").publish(f"{ROOT}/pi-1/heartbeat", b"again")
    mqtt_tools.eventually(lambda: coordinator.received)
    assert [name for name, _, _ in coordinator.received] == [f"{ROOT}/pi-1/heartbeat"]


def test_a_will_that_the_client_could_not_publish_is_not_published(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/#")
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60, will=(f"{ROOT}/pi-2/status", b"forged")))
    raw.settimeout(5)
    raw.recv(4)
    raw.close()
    device = running.client("pi-1")
    if not device.connected:  # the broken connection of the same name may still be ending
        device = running.client("pi-1")
    device.publish(f"{ROOT}/pi-1/heartbeat", b"true")
    mqtt_tools.eventually(lambda: coordinator.payloads(f"{ROOT}/pi-1/heartbeat"))
    assert not coordinator.payloads(f"{ROOT}/pi-2/status")


def test_who_is_silent_for_longer_than_the_keep_alive_is_dropped_with_its_will(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    raw = running.raw("pi-1")
    raw.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=1, will=(f"{ROOT}/pi-1/status", b"gone")))
    assert raw.recv(4)[0] == 0x20
    started_s = time.monotonic()
    raw.settimeout(10)
    assert raw.recv(1) == b""
    mqtt_tools.eventually(lambda: coordinator.payloads(f"{ROOT}/pi-1/status") == [b"gone"])
    assert 1.2 < time.monotonic() - started_s < 8


def test_who_pings_within_the_keep_alive_stays(running, mqtt_tools):
    device = running.client("pi-1", keep_alive_s=1)
    device.subscribe(f"{ROOT}/pi-1/bell")
    until_s = time.monotonic() + 2.5
    mqtt_tools.eventually(lambda: time.monotonic() > until_s or device.drops)
    assert device.drops == 0


def test_a_new_session_of_a_device_ends_the_old_one(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    old = running.raw("pi-1")
    old.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60, will=(f"{ROOT}/pi-1/status", b"old will")))
    assert old.recv(4)[0] == 0x20
    new = running.client("pi-1")
    old.settimeout(5)
    assert old.recv(1) == b""
    new.publish(f"{ROOT}/pi-1/status", b"online", retain=True)
    mqtt_tools.eventually(lambda: b"online" in coordinator.payloads(f"{ROOT}/pi-1/status"))
    assert coordinator.payloads(f"{ROOT}/pi-1/status") == [b"old will", b"online"]
    assert new.connected


def test_a_borrowed_client_id_pushes_nobody_off_and_hears_nothing(running, mqtt_tools):
    device = running.client("pi-1")
    device.subscribe(f"{ROOT}/pi-1/bell")
    thief = running.client("pi-2", client_id="pi-1")
    thief.publish(f"{ROOT}/pi-2/heartbeat", b"true")
    running.client("coordinator").publish(f"{ROOT}/pi-1/bell", b"for pi-1")
    mqtt_tools.eventually(lambda: device.payloads(f"{ROOT}/pi-1/bell") == [b"for pi-1"])
    assert device.drops == 0
    assert thief.received == []


def test_a_refused_device_can_say_and_hear_nothing(running, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/#")
    running.broker.refuse({"pi-1"})
    # A broker may take a moment to read its rules again; from then on nothing more comes through.
    deadline_s = time.monotonic() + 60
    while True:
        coordinator.received.clear()
        device = running.client("pi-1")
        if device.connected:
            device.publish(f"{ROOT}/pi-1/heartbeat", b"refused", qos=0)
        running.client("pi-2").publish(f"{ROOT}/pi-2/heartbeat", b"after")
        mqtt_tools.eventually(lambda: coordinator.payloads(f"{ROOT}/pi-2/heartbeat"))
        if not coordinator.payloads(f"{ROOT}/pi-1/heartbeat"):
            break
        assert time.monotonic() < deadline_s, "a refused device is still heard"


def test_what_a_refused_device_left_behind_is_handed_out_no_more(running, mqtt_tools):
    for name in ("pi-1", "pi-3"):
        running.client(name).publish(f"{ROOT}/{name}/peer/pi-2", name.encode(), retain=True)

    def left_behind():
        receiver = running.client("pi-2")
        receiver.subscribe(f"{ROOT}/+/peer/pi-2")
        mqtt_tools.eventually(lambda: receiver.payloads(f"{ROOT}/pi-3/peer/pi-2"))
        running.client("coordinator").publish(f"{ROOT}/pi-4/peer/pi-2", b"the end")
        mqtt_tools.eventually(lambda: receiver.payloads(f"{ROOT}/pi-4/peer/pi-2"))
        return {payload for _, payload, _ in receiver.received} - {b"the end"}

    assert left_behind() == {b"pi-1", b"pi-3"}
    running.broker.refuse({"pi-1"})
    mqtt_tools.eventually(lambda: left_behind() == {b"pi-3"})


def test_a_stopped_broker_frees_its_port_and_can_start_again(running, mqtt_tools):
    assert running.broker.alive()
    running.broker.stop()
    assert not running.broker.alive()
    assert running.broker.start() == running.address
    device = running.client("pi-1")
    assert device.connected


@pytest.mark.parametrize("spec", ["mosquitto", "embedded"])
def test_a_port_in_use_is_named(spec, certificates, tmp_path):
    if spec == "mosquitto" and mosquitto_path() is None:
        pytest.skip("mosquitto is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = make_broker(
            spec, directory=tmp_path, fleet="lab", tls=certificates.server(), host="127.0.0.1", port=port
        )
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is already in use"):
            broker.start()
        assert not broker.alive()


@pytest.mark.parametrize("spec", ["mosquitto", "embedded"])
def test_a_broker_that_does_not_come_up_says_why(spec, certificates, tmp_path, free_port):
    if spec == "mosquitto" and mosquitto_path() is None:
        pytest.skip("mosquitto is not installed")
    files = certificates.server()
    broken = BrokerTls(ca=files.ca, cert=files.cert, key=tmp_path / "missing.key")
    broker = make_broker(spec, directory=tmp_path, fleet="lab", tls=broken, host="127.0.0.1", port=free_port)
    with pytest.raises(BrokerError, match=r"missing\.key"):
        broker.start()


def test_an_unknown_broker_is_refused_with_what_would_be_right(certificates, tmp_path):
    with pytest.raises(ConfigError, match=r"auto, mosquitto, embedded or mqtts://HOST:PORT, got 'hivemq'"):
        make_broker("hivemq", directory=tmp_path, fleet="lab", tls=certificates.server(), host="127.0.0.1", port=1)


def test_names_with_wildcards_match_nothing():
    assert not may_write("lab", "+", "edgefl/v1/lab/pi-1/status")
    assert not may_read("lab", "pi-1", "edgefl/v1/lab/pi-1/#")
    assert not may_read("lab", "", "edgefl/v1/lab//bell")
    assert not may_read("lab", "pi-1", "edgefl/v1/other/pi-1/bell")
    assert not may_read("lab", "+", "edgefl/v1/lab/pi-1/peer/pi-2")
    assert not may_read("lab", "pi-2", "edgefl/v1/lab/#/peer/pi-2")
    assert not may_write("lab", "pi-1", "edgefl/v1/lab/pi-1/peer/+")


def test_edges_are_written_by_the_one_end_and_read_by_the_other():
    edge = "edgefl/v1/lab/pi-1/peer/pi-2"
    assert [may_write("lab", name, edge) for name in ("pi-1", "pi-2", "pi-3", "coordinator")] == [1, 0, 0, 1]
    assert [may_read("lab", name, edge) for name in ("pi-1", "pi-2", "pi-3", "coordinator")] == [0, 1, 0, 1]
    every = "edgefl/v1/lab/+/peer/pi-2"
    assert [may_read("lab", name, every) for name in ("pi-1", "pi-2", "pi-3", "coordinator")] == [0, 1, 0, 1]
    assert not may_write("other", "pi-1", edge)


def test_the_acl_file_says_the_same_as_the_functions():
    text = acl_file("lab", refused=["pi-9"])
    assert "pattern write edgefl/v1/lab/%u/heartbeat" in text
    assert "pattern read edgefl/v1/lab/%u/bell" in text
    assert "pattern write edgefl/v1/lab/%u/bell" not in text
    assert "pattern write edgefl/v1/lab/%u/peer/+" in text
    assert "pattern read edgefl/v1/lab/+/peer/%u" in text
    assert text.count("peer") == 2
    assert "user pi-9\ntopic deny #" in text
