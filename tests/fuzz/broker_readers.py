"""What clients send to the embedded broker: packets by themselves, and through a connection with its session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz.reader import Reader, Seed

from edgefl.coordinator.brokers.embedded_broker import ClientConnection
from edgefl.coordinator.brokers.packets import PacketReader, PublishPacket, _encode_length
from edgefl.coordinator.brokers.topic_router import TopicRouter
from edgefl.coordinator.connections import ConnectionLimiter
from edgefl.core.config import ConnectionSettings
from edgefl.core.errors import NetworkError

ROOT = b"edgefl/v1/lab/pi-1/"
WORDS = (b"edgefl/v1/lab/", b"/peer/", b"status", b"+", b"#", b"$SYS", b"MQTT", b"\x00\x04MQTT\x04", b"\x00\x00")


def text(content: bytes) -> bytes:
    """A length of two bytes before its content."""
    return len(content).to_bytes(2) + content


CONNECT = text(b"MQTT") + b"\x04\xee\x00\x3c" + b"".join(
    map(text, (b"pi-1", ROOT + b"status", b'{"v": 1}', b"name", b"secret"))
)  # fmt: skip
PLAIN_CONNECT = text(b"MQTT") + b"\x04\x02\x00\x3c" + text(b"pi-1")
BODIES: tuple[tuple[int, bytes], ...] = (
    (0x30, text(ROOT + b"heartbeat") + b'{"v": 1}'),
    (0x33, text(ROOT + b"peer/pi-2") + b"\x00\x07" + bytes(30)),
    (0x3B, text(ROOT + b"status") + b"\x00\x07"),
    (0x40, b"\x00\x01"),
    (0x82, b"\x00\x08" + text(ROOT + b"status") + b"\x01" + text(b"edgefl/v1/lab/+/peer/pi-1") + b"\x02"),
    (0xA2, b"\x00\x09" + text(ROOT + b"status") + text(b"edgefl/v1/lab/+/peer/pi-1")),
    (0xC0, b""),
    (0xE0, b""),
)
"""Packets without their lengths, as the first byte and the rest."""


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + _encode_length(len(body)) + body


ALL = packet(0x10, CONNECT) + b"".join(packet(first, body) for first, body in BODIES)
SEEDS = (
    Seed(content=ALL),
    Seed(content=CONNECT, close=lambda body: packet(0x10, body) + packet(0xC0, b"")),
    *(
        Seed(content=body, close=lambda body, first=first: packet(0x10, PLAIN_CONNECT) + packet(first, body))  # type: ignore[misc]
        for first, body in BODIES
        if body
    ),
)


def packets(_folder: Path) -> Reader:
    """The codec. However the bytes are cut, the same packets come out of them."""

    def feed(data: bytes) -> None:
        size = max(7, len(data) // 50)
        whole = _read([data])
        assert whole == _read([data[start : start + size] for start in range(0, len(data), size)])
        if error := whole[1]:
            raise NetworkError(error)

    return Reader(feed=feed, seeds=SEEDS, words=WORDS)


def _read(pieces: list[bytes]) -> tuple[list[object], str | None]:
    reader, found = PacketReader(), list[object]()
    try:
        for piece in pieces:
            found.extend(reader.feed(piece))
    except NetworkError as error:
        return found, str(error)
    return found, None


def connections(_folder: Path) -> Reader:
    """A connection of `pi-1`, to its end. Whatever it sends, the coordinator's session gets what is pi-1's alone."""
    router = TopicRouter("lab")
    coordinator, limiter = _Coordinator(), ConnectionLimiter("mqtt", ConnectionSettings(new_per_s=1e9), 10)
    router.connect(coordinator)
    router.subscribe(coordinator, "edgefl/v1/lab/#", 1)

    async def converse(data: bytes) -> None:
        opened, transport = set[ClientConnection](), _Transport()
        slot = limiter.admit("192.0.2.1")
        assert slot is not None
        connection = ClientConnection(router, opened, slot)
        connection.connection_made(transport)  # type: ignore[arg-type] # it has what is used
        middle = len(data) // 2
        for piece in (data[:middle], data[middle:]):
            connection.data_received(piece)
            await asyncio.sleep(0)
        connection.abort()
        connection.connection_lost(None)
        assert not opened
        assert limiter.num_pending == limiter.num_owned == 0
        assert all(topic.startswith(ROOT.decode()) for topic in coordinator.topics), coordinator.topics
        coordinator.topics.clear()
        router.revoke({"pi-1"}, ())
        router.revoke((), ())
        assert router._retained.children.keys() | router._sessions.keys() == {"coordinator"}

    runner = asyncio.Runner()
    return Reader(
        feed=lambda data: runner.run(converse(data)), seeds=SEEDS, words=WORDS, refuses=(), close=runner.close
    )


class _Coordinator:
    """A subscriber that keeps the topics of what it gets."""

    def __init__(self) -> None:
        self.identity, self.topics = "coordinator", list[str]()

    def deliver(self, message: PublishPacket, _qos: int, *, is_retained: bool) -> None:
        self.topics.append(message.topic)

    def abort(self) -> None: ...


class _Transport:
    """TLS with the certificate of `pi-1`, which takes what is written and keeps nothing."""

    def __init__(self) -> None:
        self._is_closing = False

    def get_extra_info(self, name: str) -> Any:
        certificate = {"subject": ((("commonName", "pi-1"),),), "serialNumber": "0A"}
        return SimpleNamespace(getpeercert=lambda: certificate) if name == "ssl_object" else None

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close
