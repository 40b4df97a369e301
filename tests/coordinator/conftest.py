"""A fleet's certificates, both brokers, and MQTT clients to try them with."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from requirements import require

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import Broker, BrokerAddress, make_client_context
from edgefl.coordinator.brokers.mqtt_service import make_broker
from edgefl.simulation import local_fleet
from edgefl.system.atomic_files import TlsFiles

FLEET = "lab"


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits until the condition holds; fails when it never does."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s"
        time.sleep(0.01)


@dataclass
class Certificates:
    directory: Path
    authority: pki.KeyPair
    made: dict[str, TlsFiles] = field(default_factory=dict)

    def of(self, name: str, authority: pki.KeyPair | None = None) -> TlsFiles:
        """The files of a client; trusting our CA, whoever signed its own certificate."""
        if name not in self.made:
            self.made[name] = self._write(name, pki.issue_client_certificate(authority or self.authority, name))
        return self.made[name]

    def server(self) -> TlsFiles:
        if "" not in self.made:
            self.made[""] = self._write(
                "server", pki.issue_server_certificate(self.authority, ["127.0.0.1", "localhost"])
            )
        return self.made[""]

    def _write(self, name: str, pair: pki.KeyPair) -> TlsFiles:
        paths = TlsFiles(**{kind: self.directory / f"{name}.{kind}" for kind in ("ca", "cert", "key")})
        paths.ca.write_bytes(self.authority.cert_pem)
        paths.cert.write_bytes(pair.cert_pem)
        paths.key.write_bytes(pair.key_pem)
        return paths


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("pki"), pki.create_authority(FLEET))


@pytest.fixture
def free_port() -> int:
    return local_fleet.find_free_port()


@dataclass
class RunningBroker:
    broker: Broker
    address: BrokerAddress
    certificates: Certificates
    clients: contextlib.ExitStack

    def client(self, name: str, **options: Any) -> MqttClient:
        return self.clients.enter_context(MqttClient(self.address, self.certificates.of(name), name, **options))

    def raw(self, name: str) -> ssl.SSLSocket:
        context = make_client_context(self.certificates.of(name))
        plain = socket.create_connection((self.address.host, self.address.port), timeout=10)
        return self.clients.enter_context(context.wrap_socket(plain, server_hostname=self.address.host))


@pytest.fixture(params=["mosquitto", "embedded"])
def kind(request: pytest.FixtureRequest) -> str:
    """The brokers that there are, one by one."""
    if request.param == "mosquitto":
        require("mosquitto")
    return str(request.param)


@pytest.fixture(params=["mosquitto", "embedded"])
def running(
    request: pytest.FixtureRequest, certificates: Certificates, tmp_path: Path, free_port: int
) -> Iterator[RunningBroker]:
    if request.param == "mosquitto":
        require("mosquitto")
    broker = make_broker(
        request.param,
        directory=tmp_path / "broker",
        fleet=FLEET,
        tls=certificates.server(),
        host="127.0.0.1",
        port=free_port,
    )
    address = broker.start()
    try:
        with contextlib.ExitStack() as clients:
            yield RunningBroker(broker, address, certificates, clients)
    finally:
        broker.stop()


class MqttClient:
    """A plain MQTT client that keeps what it receives."""

    def __init__(
        self,
        address: BrokerAddress,
        tls: TlsFiles,
        name: str,
        *,
        client_id: str | None = None,
        keep_alive_s: int = 60,
    ) -> None:
        self.received: list[tuple[str, bytes, bool]] = []
        self.granted: list[int] = []
        self.connected = False
        self.drops = 0
        self._paho = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=client_id or name, reconnect_on_failure=False)
        self._paho.tls_set_context(make_client_context(tls))
        self._paho.on_connect = self._on_connect
        self._paho.on_disconnect = self._on_disconnect
        self._paho.on_subscribe = lambda _c, _d, _m, codes, _p: self.granted.extend(code.value for code in codes)
        self._paho.on_message = lambda _c, _d, m: self.received.append((m.topic, bytes(m.payload), m.retain))
        self._paho.connect(address.host, address.port, keepalive=keep_alive_s)
        self._paho.loop_start()
        eventually(lambda: self.connected or self.drops)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._paho.disconnect()
        self._paho.loop_stop()

    def _on_connect(self, _c: Any, _d: Any, _f: Any, reason: Any, _p: Any) -> None:
        self.connected = not reason.is_failure

    def _on_disconnect(self, *_: object) -> None:
        self.connected = False
        self.drops += 1

    def subscribe(self, *filters: str) -> list[int]:
        """Returns the codes that the broker answers with; 128 and above refuse."""
        self.granted.clear()
        self._paho.subscribe([(name, 1) for name in filters])
        eventually(lambda: len(self.granted) == len(filters))
        return list(self.granted)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False, wait_s: float = 5) -> None:
        self._paho.publish(topic, payload, qos=qos, retain=retain).wait_for_publish(wait_s)

    def payloads(self, topic: str) -> list[bytes]:
        return [payload for name, payload, _ in self.received if name == topic]


def connect_packet(
    client_id: str, *, keep_alive_s: int, will: tuple[str, bytes] | None = None, clean: bool = True
) -> bytes:
    """An MQTT 3.1.1 CONNECT, for clients that paho is too polite to play."""

    def text(value: bytes) -> bytes:
        return struct.pack("!H", len(value)) + value

    flags = (0x02 if clean else 0) | (0x2C if will else 0)  # will: flag, QoS 1, retain
    body = text(b"MQTT") + bytes([4, flags]) + struct.pack("!H", keep_alive_s) + text(client_id.encode())
    if will:
        body += text(will[0].encode()) + text(will[1])
    assert len(body) < 128
    return bytes([0x10, len(body)]) + body


CONNACK_ACCEPTED = b"\x20\x02\x00\x00"


@pytest.fixture
def mqtt_tools() -> Any:
    """What tests take from here: pytest's importlib mode lets them import nothing from their neighbours."""

    class Tools:
        pass

    tools = Tools()
    tools.eventually = eventually  # type: ignore[attr-defined] # a bag
    tools.connect_packet = connect_packet  # type: ignore[attr-defined] # a bag
    tools.client = MqttClient  # type: ignore[attr-defined] # a bag
    tools.device_process = Path(__file__).with_name("device_process.py")  # type: ignore[attr-defined] # a bag
    tools.environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # type: ignore[attr-defined] # a bag
    return tools
