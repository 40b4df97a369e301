"""Both brokers keep the same promises; every test here runs over each of them."""

from __future__ import annotations

import contextlib
import socket
import ssl

import pytest

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import (
    MAX_MESSAGE_BYTES,
    can_publish,
    can_subscribe,
    make_client_context,
    render_acl_file,
)
from edgefl.coordinator.brokers.mosquitto import Mosquitto
from edgefl.coordinator.brokers.mqtt_service import make_broker
from edgefl.core.errors import BrokerError, ConfigError, PortInUseError
from edgefl.core.protocol import MAX_PEER_BYTES, peer_topic
from edgefl.system.atomic_files import TlsFiles

pytestmark = pytest.mark.timeout(60)

ROOT = "edgefl/v1/lab"
CLOSED = b""


@pytest.fixture
def connect(running, mqtt_tools):
    """Connects under a name without paho, and returns the socket."""

    def connect(name, *, will=None, keep_alive_s=60):
        raw = running.raw(name)
        will = (f"{ROOT}/{will}/status", b"will") if will else None
        raw.sendall(mqtt_tools.connect_packet(name, keep_alive_s=keep_alive_s, will=will))
        raw.settimeout(20)
        return raw

    return connect


def accepted(raw):
    assert raw.recv(4)[0] == 0x20
    return raw


def heard(client):
    return [(name.removeprefix(f"{ROOT}/"), payload) for name, payload, _ in client.received]


def test_a_device_writes_only_its_own_topics_and_edges(running, mqtt_tools):
    coordinator, device = running.client("coordinator"), running.client("pi-1")
    coordinator.subscribe(f"{ROOT}/#")
    for forged in ("pi-2/status", "pi-1/wakeup", "pi-2/command", "pi-2/peer/pi-1", "pi-2/peer/pi-3", "pi-1/peer",
                   "pi-1/peer/pi-2/more", "pi-1/other/pi-2"):  # fmt: skip
        device.publish(f"{ROOT}/{forged}", b"forged", retain=True)
    device.publish("elsewhere", b"forged")
    for own in ("pi-1/peer/pi-2", "pi-1/heartbeat"):
        device.publish(f"{ROOT}/{own}", b"true")
    mqtt_tools.eventually(lambda: len(coordinator.received) >= 2)
    assert heard(coordinator) == [("pi-1/peer/pi-2", b"true"), ("pi-1/heartbeat", b"true")]


def test_a_device_reads_only_its_own_topics_and_of_them_those_that_it_asked_for(running, mqtt_tools):
    coordinator, device, greedy = (running.client(name) for name in ("coordinator", "pi-1", "pi-3"))
    for name in ("pi-1", "pi-2"):
        coordinator.publish(f"{ROOT}/{name}/status", b"retained", retain=True)
    device.subscribe(f"{ROOT}/pi-1/wakeup")
    greedy.subscribe(f"{ROOT}/pi-2/status", f"{ROOT}/pi-2/wakeup", f"{ROOT}/+/wakeup", "#", f"{ROOT}/pi-3/wakeup")
    for topic in ("pi-2/wakeup", "pi-2/status", "pi-1/status", "pi-3/wakeup", "pi-1/wakeup"):
        coordinator.publish(f"{ROOT}/{topic}", b"now")
    mqtt_tools.eventually(lambda: device.received and greedy.received)
    assert (set(heard(device)), set(heard(greedy))) == ({("pi-1/wakeup", b"now")}, {("pi-3/wakeup", b"now")})


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
    running.client("coordinator").publish(f"{ROOT}/pi-3/peer/pi-1", b"last")
    mqtt_tools.eventually(lambda: ("pi-3/peer/pi-1", b"last") in heard(eavesdropper))
    assert set(heard(eavesdropper)) == {("pi-3/peer/pi-1", b"ours"), ("pi-3/peer/pi-1", b"last")}


def test_the_newest_value_of_an_edge_waits_for_its_receiver_until_it_is_cleared(running, mqtt_tools):
    sender, receiver = running.client("pi-1"), running.client("pi-2")
    for payload in (b"old", b"new"):
        sender.publish(f"{ROOT}/pi-1/peer/pi-2", payload, retain=True)
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


def test_a_certificate_of_the_fleet_is_needed(running, certificates, mqtt_tools):
    stranger = certificates.of("stranger", pki.create_authority("elsewhere"))
    nameless = ssl.create_default_context(cafile=str(certificates.server().ca))

    def answer(context):
        with (
            contextlib.suppress(ssl.SSLError, ConnectionError),
            socket.create_connection((running.address.host, running.address.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=running.address.host) as secured,
        ):
            secured.sendall(mqtt_tools.connect_packet("pi-1", keep_alive_s=60))
            return secured.recv(4)
        return b""

    assert (answer(nameless), answer(make_client_context(stranger))) == (b"", b"")
    assert answer(make_client_context(certificates.of("pi-1")))[:1] == b"\x20"


def test_the_will_is_published_and_kept_when_a_connection_breaks(running, connect, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    accepted(connect("pi-1", will="pi-1")).close()
    mqtt_tools.eventually(lambda: heard(coordinator) == [("pi-1/status", b"will")])
    later = running.client("coordinator")
    later.subscribe(f"{ROOT}/pi-1/status")
    mqtt_tools.eventually(lambda: later.received == [(f"{ROOT}/pi-1/status", b"will", True)])


def test_the_will_of_one_who_disconnects_or_might_not_publish_it_is_not_published(running, connect, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/#")
    raw = accepted(connect("pi-1", will="pi-1"))
    raw.sendall(b"\xe0\x00")  # DISCONNECT
    assert raw.recv(1) == CLOSED
    forger = connect("pi-3", will="pi-2")
    forger.recv(4)
    forger.close()
    device = running.client("pi-3")
    if not device.connected:  # the broken connection of the same name may still be ending
        device = running.client("pi-3")
    device.publish(f"{ROOT}/pi-3/heartbeat", b"again")
    mqtt_tools.eventually(lambda: coordinator.received)
    assert heard(coordinator) == [("pi-3/heartbeat", b"again")]


@pytest.mark.parametrize(
    "running", [pytest.param("mosquitto", marks=pytest.mark.extended), "embedded"], indirect=True
)
def test_who_is_silent_is_dropped_with_its_will_and_who_pings_or_is_in_a_large_packet_is_not(
    running, connect, mqtt_tools
):
    topic, size = f"{ROOT}/pi-3/peer/pi-4", 1_000_000
    coordinator, receiver, pinging = (
        running.client(name, keep_alive_s=1) for name in ("coordinator", "pi-4", "pi-1")
    )
    coordinator.subscribe(f"{ROOT}/+/status")
    receiver.subscribe(topic)
    sending = accepted(connect("pi-3", keep_alive_s=1, will="pi-3"))
    remaining = 2 + len(topic) + size
    length = bytes([remaining & 0x7F | 0x80, remaining >> 7 & 0x7F | 0x80, remaining >> 14])
    packet = b"\x30" + length + len(topic).to_bytes(2, "big") + topic.encode() + bytes(size)
    silent = accepted(connect("pi-2", keep_alive_s=1, will="pi-2"))
    silent.settimeout(0.1)
    num_sent = 0
    with contextlib.suppress(TimeoutError):
        silent.recv(1)
        pytest.fail("it was dropped at once")
    while True:  # a thousand bytes each tenth of a second
        sending.sendall(packet[num_sent : num_sent + 1000])
        num_sent += 1000
        with contextlib.suppress(TimeoutError):
            assert silent.recv(1) == CLOSED
            break
        assert num_sent < 300_000, "who is silent is not dropped within half a minute"
    assert num_sent > 10_000
    mqtt_tools.eventually(lambda: heard(coordinator) == [("pi-2/status", b"will")])
    sending.sendall(packet[num_sent:])
    mqtt_tools.eventually(lambda: receiver.payloads(topic) == [bytes(size)])
    assert (pinging.drops, heard(coordinator)) == (0, [("pi-2/status", b"will")])


def test_a_new_session_of_a_device_ends_the_old_one(running, connect, mqtt_tools):
    coordinator = running.client("coordinator")
    coordinator.subscribe(f"{ROOT}/+/status")
    old, new = accepted(connect("pi-1", will="pi-1")), running.client("pi-1")
    assert old.recv(1) == CLOSED
    new.publish(f"{ROOT}/pi-1/status", b"online", retain=True)
    mqtt_tools.eventually(lambda: b"online" in coordinator.payloads(f"{ROOT}/pi-1/status"))
    assert heard(coordinator) == [("pi-1/status", b"will"), ("pi-1/status", b"online")]
    assert new.connected


def test_a_borrowed_client_id_pushes_nobody_off_and_hears_nothing(running, mqtt_tools):
    device = running.client("pi-1")
    device.subscribe(f"{ROOT}/pi-1/wakeup")
    thief = running.client("pi-2", client_id="pi-1")
    thief.publish(f"{ROOT}/pi-2/heartbeat", b"true")
    running.client("coordinator").publish(f"{ROOT}/pi-1/wakeup", b"for pi-1")
    mqtt_tools.eventually(lambda: device.payloads(f"{ROOT}/pi-1/wakeup") == [b"for pi-1"])
    assert (device.drops, thief.received) == (0, [])


def test_a_refused_device_says_and_hears_nothing_and_what_it_left_is_handed_out_no_more(running, mqtt_tools):
    coordinator = running.client("coordinator")
    for name in ("pi-1", "pi-3"):
        running.client(name).publish(f"{ROOT}/{name}/peer/pi-2", name.encode(), retain=True)
    coordinator.subscribe(f"{ROOT}/+/heartbeat")

    def heard_and_left():
        coordinator.received.clear()
        for name in ("pi-1", "pi-2"):
            device = running.client(name)
            if device.connected:
                device.publish(f"{ROOT}/{name}/heartbeat", b"x", qos=0)
        device.subscribe(f"{ROOT}/+/peer/pi-2")
        coordinator.publish(f"{ROOT}/pi-4/peer/pi-2", b"the end")
        mqtt_tools.eventually(lambda: b"the end" in device.payloads(f"{ROOT}/pi-4/peer/pi-2"))
        mqtt_tools.eventually(lambda: ("pi-2/heartbeat", b"x") in heard(coordinator))
        return {name for name, _ in heard(coordinator)}, {payload for _, payload in heard(device)} - {b"the end"}

    assert heard_and_left() == ({"pi-1/heartbeat", "pi-2/heartbeat"}, {b"pi-1", b"pi-3"})
    running.broker.revoke({"pi-1"})  # a broker may take a moment to read its rules again
    mqtt_tools.eventually(lambda: heard_and_left() == ({"pi-2/heartbeat"}, {b"pi-3"}))


def test_a_stopped_broker_frees_its_port_and_can_start_again(running):
    assert running.broker.is_alive()
    running.broker.stop()
    assert not running.broker.is_alive()
    assert running.broker.start() == running.address
    assert running.client("pi-1").connected


@pytest.mark.parametrize("fault", ["port", "key"])
def test_a_broker_that_does_not_come_up_says_why(kind, certificates, tmp_path, free_port, fault):
    files = certificates.server()
    if fault == "key":
        files = TlsFiles(ca=files.ca, cert=files.cert, key=tmp_path / "missing.key")
    broker = make_broker(kind, directory=tmp_path, fleet="lab", tls=files, host="127.0.0.1", port=free_port)
    error, told = (BrokerError, r"missing\.key") if fault == "key" else (PortInUseError, f"port {free_port}")
    with contextlib.ExitStack() as taken:
        if fault == "port":
            taken.enter_context(socket.create_server(("127.0.0.1", free_port)))
        with pytest.raises(error, match=told):
            broker.start()
    assert not broker.is_alive()


def test_an_unknown_broker_is_refused(certificates, tmp_path):
    with pytest.raises(ConfigError, match="got 'hivemq'"):
        make_broker("hivemq", directory=tmp_path, fleet="lab", tls=certificates.server(), host="127.0.0.1", port=1)


@pytest.mark.parametrize(
    ("may", "fleet", "name", "writers"),
    [
        (can_publish, "lab", "pi-1/status", "pi-1"),
        (can_publish, "lab", "pi-1/peer/pi-2", "pi-1"),
        (can_subscribe, "lab", "pi-1/peer/pi-2", "pi-2"),
        (can_subscribe, "lab", "+/peer/pi-2", "pi-2"),
        (can_subscribe, "lab", "pi-1/wakeup", "pi-1"),
        (can_subscribe, "lab", "pi-1/#", ""),
        (can_subscribe, "lab", "/wakeup", ""),
        (can_subscribe, "lab", "#/peer/pi-2", ""),
        (can_publish, "lab", "pi-1/peer/+", None),
        (can_publish, "other", "pi-1/status", None),
    ],
)
def test_an_edge_is_written_by_one_end_and_read_by_the_other_and_wildcards_open_nothing(may, fleet, name, writers):
    allowed = [who for who in ("pi-1", "pi-2", "pi-3", "+", "", "#") if may(fleet, who, f"{ROOT}/{name}")]
    assert allowed == ([writers] if writers else [])
    assert may(fleet, "coordinator", f"{ROOT}/{name}") is (writers is not None)


def test_the_acl_file_says_the_same_as_the_functions():
    text = render_acl_file("lab", revoked=["pi-9"])
    for pattern in (
        "write edgefl/v1/lab/%u/heartbeat",
        "read edgefl/v1/lab/%u/wakeup",
        "write edgefl/v1/lab/%u/peer/+",
    ):
        assert f"pattern {pattern}\n" in text
    assert "pattern read edgefl/v1/lab/+/peer/%u\n" in text
    assert "write edgefl/v1/lab/%u/wakeup" not in text
    assert text.count("peer") == 2
    assert "user pi-9\ntopic deny #" in text


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
    wakeup, status = f"{ROOT}/pi-1/wakeup", f"{ROOT}/pi-1/status"
    raw.sendall(b"\xc0\x00")
    assert _read_packet(raw) == (0xD0, b"")
    raw.sendall(_packet(0x82, b"\x00\x07" + _text(wakeup) + b"\x00" + _text(status) + b"\x01"))
    assert _read_packet(raw) == (0x90, b"\x00\x07\x00\x01")
    # At QoS 1, again because its acknowledgement was lost, and the subscriber's own acknowledgement.
    raw.sendall(_packet(0x3A, _text(status) + b"\x00\x09" + b"x"))
    found = sorted(_read_packet(raw) for _ in range(2))
    assert found[1] == (0x40, b"\x00\x09")
    first, body = found[0]
    assert (first, body[:-3], body[-1:]) == (0x32, _text(status), b"x")
    raw.sendall(_packet(0x40, body[-3:-1]))
    running.client("coordinator").publish(wakeup, b"ring", qos=1)
    assert _read_packet(raw) == (0x30, _text(wakeup) + b"ring")
    raw.sendall(_packet(0xA2, b"\x00\x08" + _text(wakeup) + _text(status)))
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
        device.subscribe(f"{ROOT}/{name}/wakeup", f"{ROOT}/+/peer/{name}")
        device.publish(f"{ROOT}/{name}/status", b"online", retain=True)
        for number in range(5):
            device.publish(f"{ROOT}/{name}/heartbeat", str(number).encode(), qos=0)
    mqtt_tools.eventually(lambda: len(coordinator.received) == 600)
    for name in devices:
        assert coordinator.payloads(f"{ROOT}/{name}/heartbeat") == [b"0", b"1", b"2", b"3", b"4"]
        coordinator.publish(f"{ROOT}/{name}/wakeup", name.encode(), qos=0)
    mqtt_tools.eventually(lambda: all(device.received for device in devices.values()))
    for name, device in devices.items():
        assert device.received == [(f"{ROOT}/{name}/wakeup", name.encode(), False)]
