"""The packet codec of the embedded broker, by tables: what is valid, what is malformed, and valid packets damaged."""

from __future__ import annotations

import pytest

from edgefl.coordinator.brokers.broker import MAX_MESSAGE_BYTES
from edgefl.coordinator.brokers.packets import (
    MAX_CONNECT_BYTES,
    MAX_SUBSCRIBE_BYTES,
    ConnectPacket,
    DisconnectPacket,
    PacketReader,
    PingPacket,
    PubackPacket,
    PublishPacket,
    SubscribePacket,
    UnsubscribePacket,
    encode_connack,
    encode_puback,
    encode_publish,
    encode_suback,
    encode_unsuback,
)
from edgefl.core.errors import NetworkError


def text(content):
    raw = content if isinstance(content, bytes) else content.encode()
    return len(raw).to_bytes(2) + raw


def packet(first, body=b""):
    assert len(body) < 128
    return bytes((first, len(body))) + body


def connect(*, name=b"MQTT", level=4, flags=0x02, rest=b"\x00\x04pi-1"):
    return packet(0x10, text(name) + bytes((level, flags)) + b"\x00\x3c" + rest)


def read(content):
    return list(PacketReader().feed(content))


VALID = {
    "connect": (connect(), ConnectPacket(4, "pi-1", True, 60)),
    "connect, no clean session": (connect(flags=0, rest=text("")), ConnectPacket(4, "", False, 60)),
    "connect, will": (
        connect(flags=0x2E, rest=text("pi-1") + text("a/b") + text(b"\x00gone")),
        ConnectPacket(4, "pi-1", True, 60, PublishPacket("a/b", b"\x00gone", 1, True)),
    ),
    "connect, will at QoS 2, name and password": (
        connect(flags=0xD6, rest=b"".join(map(text, ("pi-1", "a", "", "name", b"\xff\x00")))),
        ConnectPacket(4, "pi-1", True, 60, PublishPacket("a", b"", 2, False)),
    ),
    "connect of MQTT 5": (connect(level=5, rest=b"\x05whatever"), ConnectPacket(5)),
    "publish": (packet(0x30, text("a/b") + b"hello"), PublishPacket("a/b", b"hello")),
    "publish, retained": (packet(0x31, text("a")), PublishPacket("a", b"", 0, True)),
    "publish at QoS 1": (packet(0x32, text("a") + b"\x01\x02x"), PublishPacket("a", b"x", 1, False, 258)),
    "publish, again": (packet(0x3B, text("ä") + b"\xff\xff"), PublishPacket("ä", b"", 1, True, 65535)),
    "puback": (packet(0x40, b"\x00\x01"), PubackPacket(1)),
    "subscribe": (
        packet(0x82, b"\x00\x01" + text("a/+/b") + b"\x00" + text("a/#") + b"\x02"),
        SubscribePacket(1, (("a/+/b", 0), ("a/#", 2))),
    ),
    "subscribe to all": (packet(0x82, b"\x00\x01" + text("#") + b"\x01"), SubscribePacket(1, (("#", 1),))),
    "unsubscribe": (packet(0xA2, b"\x00\x01" + text("a") + text("+/")), UnsubscribePacket(1, ("a", "+/"))),
    "ping": (packet(0xC0), PingPacket()),
    "disconnect": (packet(0xE0), DisconnectPacket()),
    "a length in more bytes than it needs": (b"\xc0\x80\x80\x00", PingPacket()),
}


def after_connect(name, content):
    return content if name.startswith("connect") else connect() + content


@pytest.mark.parametrize("name", VALID)
def test_a_valid_packet_is_read_whole_and_in_pieces(name):
    content, expected = VALID[name]
    assert read(after_connect(name, content))[-1] == expected
    reader, found = PacketReader(), []
    for byte in after_connect(name, content):
        found += reader.feed(bytes((byte,)))
    assert found[-1] == expected
    assert not reader._buffer


def test_packets_that_come_together_are_all_read_and_the_beginning_of_the_next_is_kept():
    contents = [content for name, (content, _) in VALID.items() if not name.startswith("connect")]
    reader = PacketReader()
    assert len(list(reader.feed(connect() + b"".join(contents) + contents[0][:-1]))) == 1 + len(contents)
    assert list(reader.feed(contents[0][-1:])) == [PublishPacket("a/b", b"hello")]


MALFORMED = {
    "another protocol": (connect(name=b"MQIsdp", level=3), "protocol b'MQIsdp'"),
    "reserved connect flag": (connect(flags=0x03), "connect flags 0x03"),
    "will at QoS 3": (connect(flags=0x1E, rest=text("pi-1") + text("a") + text("")), "connect flags 0x1e"),
    "will QoS without will": (connect(flags=0x0A), "connect flags 0x0a"),
    "will retained without will": (connect(flags=0x22), "connect flags 0x22"),
    "password without name": (connect(flags=0x42, rest=text("pi-1") + text("x")), "connect flags 0x42"),
    "will to a filter": (connect(flags=0x06, rest=text("pi-1") + text("a/#") + text("")), "'a/#' is no topic name"),
    "will missing": (connect(flags=0x06), "a field of 2 bytes in a packet that has 0 left"),
    "connect with more": (connect(rest=text("pi-1") + b"x"), "1 bytes too many"),
    "client id of no UTF-8": (connect(rest=text(b"\xff")), "no UTF-8"),
    "connect too large": (b"\x10" + b"\xff\xff\x7f", f"at most {MAX_CONNECT_BYTES}"),
    "ping first": (packet(0xC0), "CONNECT must be the first"),
    "publish first": (packet(0x30, text("a")), "CONNECT must be the first"),
}
MALFORMED_LATER = {
    "second connect": (connect(), "CONNECT must be the first packet, and no other"),
    "type 0": (packet(0x00), "begins with 0x00"),
    "type 15": (packet(0xF0), "begins with 0xf0"),
    "connack": (packet(0x20, b"\x00\x00"), "begins with 0x20"),
    "suback": (packet(0x90, b"\x00\x01\x00"), "begins with 0x90"),
    "ping with flags": (packet(0xC1), "begins with 0xc1"),
    "ping with content": (packet(0xC0, b"x"), "of 1 bytes, at most 0"),
    "disconnect with content": (packet(0xE0, b"\x00"), "of 1 bytes, at most 0"),
    "subscribe without its flag": (packet(0x80, b"\x00\x01" + text("a") + b"\x00"), "begins with 0x80"),
    "publish at QoS 2": (packet(0x34, text("a") + b"\x00\x01"), "QoS 2 is not offered"),
    "publish at QoS 3": (packet(0x36, text("a") + b"\x00\x01"), "begins with 0x36"),
    "publish again at QoS 0": (packet(0x38, text("a")), "begins with 0x38"),
    "publish to nothing": (packet(0x30, text("")), "'' is no topic name"),
    "publish to +": (packet(0x30, text("a/+")), "'a/+' is no topic name"),
    "publish to #": (packet(0x30, text("#")), "'#' is no topic name"),
    "publish without identifier": (packet(0x32, text("a") + b"\x00\x00"), "packet identifier 0"),
    "publish that ends in its topic": (packet(0x30, b"\x00\x05abc"), "a field of 5 bytes in a packet that has 3"),
    "publish that ends in its identifier": (packet(0x32, text("a") + b"\x00"), "a field of 2 bytes"),
    "topic with NUL": (packet(0x30, text("a\x00b")), "control characters in 'a\\x00b'"),
    "topic with an escape": (packet(0x30, text("a\x1b[2J")), "control characters"),
    "topic with a half character": (packet(0x30, text(b"\xed\xa0\x80")), "no UTF-8"),
    "topic in overlong UTF-8": (packet(0x30, text(b"\xc0\x80")), "no UTF-8"),
    "puback of nothing": (packet(0x40, b"\x00\x00"), "packet identifier 0"),
    "puback too long": (packet(0x40, b"\x00\x01\x00"), "of 3 bytes, at most 2"),
    "puback too short": (packet(0x40, b"\x00"), "a field of 2 bytes in a packet that has 1"),
    "subscribe to nothing": (packet(0x82, b"\x00\x01"), "a field of 2 bytes in a packet that has 0 left"),
    "subscribe without QoS": (packet(0x82, b"\x00\x01" + text("a")), "a field of 1 bytes"),
    "subscribe at QoS 3": (packet(0x82, b"\x00\x01" + text("a") + b"\x03"), "subscription at QoS 3"),
    "subscribe without identifier": (packet(0x82, b"\x00\x00" + text("a") + b"\x00"), "packet identifier 0"),
    "filter a#": (packet(0x82, b"\x00\x01" + text("a#") + b"\x00"), "'a#' is no topic filter"),
    "filter #/a": (packet(0x82, b"\x00\x01" + text("#/a") + b"\x00"), "'#/a' is no topic filter"),
    "filter a+/b": (packet(0xA2, b"\x00\x01" + text("a+/b")), "'a+/b' is no topic filter"),
    "empty filter": (packet(0xA2, b"\x00\x01" + text("")), "'' is no topic filter"),
    "unsubscribe from nothing": (packet(0xA2, b"\x00\x01"), "a field of 2 bytes in a packet that has 0 left"),
    "length in five bytes": (b"\x30\x80\x80\x80\x80", "more than four bytes"),
    "publish too large": (b"\x30\x81\x80\x80\x08", f"of {MAX_MESSAGE_BYTES + 1} bytes, at most {MAX_MESSAGE_BYTES}"),
    "subscribe too large": (b"\x82\x85\x80\x04", f"of {MAX_SUBSCRIBE_BYTES + 1} bytes, at most"),
}


@pytest.mark.parametrize("name", [*MALFORMED, *MALFORMED_LATER])
def test_a_malformed_packet_is_refused_with_what_is_wrong(name):
    content, what = MALFORMED.get(name) or MALFORMED_LATER[name]
    with pytest.raises(NetworkError) as caught:
        read(content if name in MALFORMED else connect() + content)
    assert what in str(caught.value)


def test_what_came_before_a_malformed_packet_counts():
    feed = PacketReader().feed(connect() + packet(0xC0) + packet(0xF0))
    assert [next(feed), next(feed)] == [VALID["connect"][1], PingPacket()]
    with pytest.raises(NetworkError, match="0xf0"):
        next(feed)


def test_a_length_is_refused_before_anything_of_that_length_is_kept():
    reader = PacketReader()
    list(reader.feed(connect()))
    with pytest.raises(NetworkError, match="at most"):
        list(reader.feed(b"\x30\xff\xff\xff\x7f"))


@pytest.mark.parametrize("name", VALID)
def test_a_valid_packet_with_any_byte_damaged_or_cut_off_is_read_or_refused(name):
    content, _ = VALID[name]
    damaged = [content[:at] for at in range(len(content))]
    for at in range(len(content)):
        damaged += [
            content[:at] + bytes((value,)) + content[at + 1 :]
            for value in {0, 1, 0x7F, 0x80, 0xFF, *(content[at] ^ 1 << bit for bit in range(8))}
        ]
    num_refused = 0
    for one in damaged:
        try:
            read(after_connect(name, one))
        except NetworkError:
            num_refused += 1
    assert num_refused


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (encode_connack(5), b"\x20\x02\x00\x05"),
        (encode_puback(258), b"\x40\x02\x01\x02"),
        (encode_suback(1, [0, 1, 0x80]), b"\x90\x05\x00\x01\x00\x01\x80"),
        (encode_unsuback(65535), b"\xb0\x02\xff\xff"),
    ],
)
def test_answers_are_what_the_standard_says(encoded, expected):
    assert encoded == expected


@pytest.mark.parametrize("size", [0, 1, 124, 125, 16380, 16381, 2_097_148, 2_097_149])
@pytest.mark.parametrize(("qos", "is_retained"), [(0, False), (0, True), (1, False), (1, True)])
def test_a_message_is_read_as_it_was_encoded_over_every_width_of_its_length(size, qos, is_retained):
    message = PublishPacket("a", bytes(size), 1, True, 9)
    encoded = encode_publish(message, qos=qos, is_retained=is_retained, packet_id=7 * qos)
    assert read(connect() + encoded)[1] == PublishPacket("a", bytes(size), qos, is_retained, 7 * qos)
