"""MQTT 3.1.1 packets of clients as values, and a server's packets as bytes. No input or output happens here.

Numbers in brackets are normative statements of the OASIS standard of 29 October 2014. QoS 2 is not offered, so that
a PUBLISH at QoS 2 and the packets of its handshake are rejected like malformed ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from edgefl.coordinator.brokers.broker import MAX_MESSAGE_BYTES
from edgefl.core.errors import NetworkError

PROTOCOL_NAME, PROTOCOL_LEVEL = b"MQTT", 4
MAX_QOS = 1
MAX_FIELD_BYTES = 0xFFFF
MAX_CONNECT_BYTES = 10 + 5 * (2 + MAX_FIELD_BYTES)
"""Protocol, level, flags and keep-alive; client id, will topic, will message, user name and password."""
MAX_SUBSCRIBE_BYTES = 2 + 2 + MAX_FIELD_BYTES + 1
"""Room for one topic filter of the largest size, or for many short ones."""

ACCEPTED, BAD_PROTOCOL_LEVEL, BAD_CLIENT_ID, NOT_AUTHORISED = 0, 1, 2, 5
"""Return codes of CONNACK."""
SUBSCRIPTION_FAILED = 0x80
PINGRESP = b"\xd0\x00"

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_CONNECT = 0x10


@dataclass(frozen=True, slots=True)
class PublishPacket:
    """A message. `packet_id` is 0 at QoS 0, and for a will."""

    topic: str
    payload: bytes = field(repr=False)
    qos: int = 0
    is_retained: bool = False
    packet_id: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of topic and payload, which counts towards the limits of clients."""
        return len(self.topic) + len(self.payload)


@dataclass(frozen=True, slots=True)
class ConnectPacket:
    """The first packet. Of another protocol level, `level` alone is known."""

    level: int
    client_id: str = ""
    is_clean: bool = True
    keep_alive_s: int = 0
    will: PublishPacket | None = None


@dataclass(frozen=True, slots=True)
class PubackPacket:
    packet_id: int


@dataclass(frozen=True, slots=True)
class SubscribePacket:
    """`filters` are topic filters, each with the largest QoS that the client requests."""

    packet_id: int
    filters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class UnsubscribePacket:
    packet_id: int
    filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PingPacket:
    pass


@dataclass(frozen=True, slots=True)
class DisconnectPacket:
    pass


Packet = (
    ConnectPacket | PublishPacket | PubackPacket | SubscribePacket | UnsubscribePacket | PingPacket | DisconnectPacket
)


class PacketReader:
    """Splits the bytes of one connection into packets. Buffers less than one packet of the largest size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._has_connect = False

    def feed(self, data: bytes) -> Iterator[Packet]:
        """Yields the packets that are complete with this data.

        Raises:
            NetworkError: a packet is malformed, too large, or none that a client may send now. Those before it have
                been yielded; what follows it has no meaning.
        """
        self._buffer += data
        start = 0
        try:
            while (packet_and_end := self._packet_at(start)) is not None:
                packet, start = packet_and_end
                yield packet
        finally:
            del self._buffer[:start]

    def _packet_at(self, start: int) -> tuple[Packet, int] | None:
        """Returns the packet at an offset and where it ends, or None while it is incomplete."""
        if start == len(self._buffer):
            return None
        first_byte = self._buffer[start]
        if (first_byte == _CONNECT) == self._has_connect:
            raise NetworkError("CONNECT must be the first packet, and no other one")  # [MQTT-3.1.0-1, -2]
        if first_byte not in _DECODERS:
            raise NetworkError(
                f"no client may send a packet that begins with 0x{first_byte:02x} (QoS 2 is not offered)"
            )
        limit, decode = _DECODERS[first_byte]
        length = self._remaining_length(start + 1)
        if length is None:
            return None
        num_bytes, size = length
        if size > limit:
            raise NetworkError(f"packet 0x{first_byte:02x} of {size} bytes, at most {limit} are read")
        body_start, end = start + 1 + num_bytes, start + 1 + num_bytes + size
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view, view[body_start:end] as body:
            packet = decode(first_byte, _FieldReader(body))
        self._has_connect = True
        return packet, end

    def _remaining_length(self, start: int) -> tuple[int, int] | None:
        """Returns the encoded size of the length, and the length; None while it is incomplete."""
        length = 0
        for index, byte in enumerate(self._buffer[start : start + 4]):
            length |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return index + 1, length
        if len(self._buffer) - start >= 4:
            raise NetworkError("a packet's length is written in more than four bytes")
        return None


class _FieldReader:
    """A cursor over the body of one packet."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    def read(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._body):
            raise NetworkError(f"a field of {count} bytes in a packet that has {len(self._body) - start} left")
        return bytes(self._body[start : self._at])

    def read_rest(self) -> bytes:
        return self.read(len(self._body) - self._at)

    def is_at_end(self) -> bool:
        return self._at == len(self._body)

    def check_end(self) -> None:
        if not self.is_at_end():
            raise NetworkError(f"{len(self._body) - self._at} bytes too many in a packet")

    def read_byte(self) -> int:
        return self.read(1)[0]

    def read_number(self) -> int:
        return int.from_bytes(self.read(2))

    def read_binary(self) -> bytes:
        return self.read(self.read_number())

    def read_packet_id(self) -> int:
        number = self.read_number()
        if not number:
            raise NetworkError("packet identifier 0")  # [MQTT-2.3.1-1]
        return number

    def read_text(self) -> str:
        """Returns a string without control characters: the standard forbids NUL and lets us reject the others."""
        content = self.read_binary()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise NetworkError(f"a string that is no UTF-8: {content[:40]!r}") from None  # [MQTT-1.5.3-1]
        if _CONTROL.search(text):
            raise NetworkError(f"control characters in {text[:40]!r}")  # [MQTT-1.5.3-2]
        return text

    def read_topic(self) -> str:
        name = self.read_text()
        if not name or "+" in name or "#" in name:
            raise NetworkError(f"{name[:40]!r} is no topic name")  # [MQTT-3.3.2-2, 4.7.3-1]
        return name

    def read_topic_filter(self) -> str:
        name = self.read_text()
        levels = name.split("/")
        is_invalid = any(len(level) > 1 and ("+" in level or "#" in level) for level in levels)
        if not name or is_invalid or "#" in levels[:-1]:
            raise NetworkError(f"{name[:40]!r} is no topic filter")  # [MQTT-4.7.1-2, -3, 4.7.3-1]
        return name


def _decode_connect(_first: int, fields: _FieldReader) -> ConnectPacket:
    name = fields.read_binary()
    if name != PROTOCOL_NAME:
        raise NetworkError(f"protocol {name[:16]!r}, only {PROTOCOL_NAME!r} is spoken")
    level = fields.read_byte()
    if level != PROTOCOL_LEVEL:
        return ConnectPacket(level)
    flags, keep_alive_s, client_id = fields.read_byte(), fields.read_number(), fields.read_text()
    has_will, will_qos, has_name, has_password = flags & 0x04, flags >> 3 & 3, flags & 0x80, flags & 0x40
    is_invalid = flags & 0x01 or will_qos == 3 or (has_password and not has_name) or (flags & 0x38 and not has_will)
    if is_invalid:
        raise NetworkError(f"connect flags 0x{flags:02x}")  # [MQTT-3.1.2-3, -11, -13 to -15, -22]
    will = None
    if has_will:
        topic, payload = fields.read_topic(), fields.read_binary()
        will = PublishPacket(topic, payload, will_qos, bool(flags & 0x20))
    # The certificate is the identity: user name and password are skipped.
    if has_name:
        fields.read_text()
    if has_password:
        fields.read_binary()
    fields.check_end()
    return ConnectPacket(level, client_id, bool(flags & 0x02), keep_alive_s, will)


def _decode_publish(first: int, fields: _FieldReader) -> PublishPacket:
    topic, qos = fields.read_topic(), first >> 1 & 3
    packet_id = fields.read_packet_id() if qos else 0
    return PublishPacket(topic, fields.read_rest(), qos, bool(first & 1), packet_id)


def _decode_puback(_first: int, fields: _FieldReader) -> PubackPacket:
    packet = PubackPacket(fields.read_packet_id())
    fields.check_end()
    return packet


def _decode_subscribe(_first: int, fields: _FieldReader) -> SubscribePacket:
    packet_id, filters = fields.read_packet_id(), list[tuple[str, int]]()
    while not (filters and fields.is_at_end()):  # [MQTT-3.8.3-3]: one at least
        name, qos = fields.read_topic_filter(), fields.read_byte()
        if qos > 2:
            raise NetworkError(f"subscription at QoS {qos}")  # [MQTT-3-8.3-4]
        filters.append((name, qos))
    return SubscribePacket(packet_id, tuple(filters))


def _decode_unsubscribe(_first: int, fields: _FieldReader) -> UnsubscribePacket:
    packet_id, filters = fields.read_packet_id(), list[str]()
    while not (filters and fields.is_at_end()):  # [MQTT-3.10.3-2]: one at least
        filters.append(fields.read_topic_filter())
    return UnsubscribePacket(packet_id, tuple(filters))


_DECODERS: Mapping[int, tuple[int, Callable[[int, _FieldReader], Packet]]] = MappingProxyType(
    {
        _CONNECT: (MAX_CONNECT_BYTES, _decode_connect),
        # DUP counts at QoS 1 only [MQTT-3.3.1-2].
        **dict.fromkeys((0x30, 0x31, 0x32, 0x33, 0x3A, 0x3B), (MAX_MESSAGE_BYTES, _decode_publish)),
        0x40: (2, _decode_puback),
        0x82: (MAX_SUBSCRIBE_BYTES, _decode_subscribe),
        0xA2: (MAX_SUBSCRIBE_BYTES, _decode_unsubscribe),
        0xC0: (0, lambda _first, _fields: PingPacket()),
        0xE0: (0, lambda _first, _fields: DisconnectPacket()),
    }
)
"""By the first byte, flags included [MQTT-2.2.2-2]: how many bytes may follow its length, and what decodes them."""


def encode_connack(code: int) -> bytes:
    """Returns a CONNACK; no session is ever present."""
    return bytes((0x20, 2, 0, code))


def encode_publish(message: PublishPacket, *, qos: int, is_retained: bool, packet_id: int) -> bytes:
    """Returns a PUBLISH with a message under its own QoS, flag and packet identifier (0 at QoS 0)."""
    name = message.topic.encode()
    head = len(name).to_bytes(2) + name + (packet_id.to_bytes(2) if qos else b"")
    first = bytes((0x30 | qos << 1 | is_retained,))
    return b"".join((first, _encode_length(len(head) + len(message.payload)), head, message.payload))


def encode_puback(packet_id: int) -> bytes:
    return b"\x40\x02" + packet_id.to_bytes(2)


def encode_suback(packet_id: int, codes: Sequence[int]) -> bytes:
    """Returns a SUBACK; a code is the QoS that was granted, or SUBSCRIPTION_FAILED."""
    return b"\x90" + _encode_length(2 + len(codes)) + packet_id.to_bytes(2) + bytes(codes)


def encode_unsuback(packet_id: int) -> bytes:
    return b"\xb0\x02" + packet_id.to_bytes(2)


def _encode_length(length: int) -> bytes:
    """Returns the remaining length of a packet: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)
