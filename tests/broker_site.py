"""A real broker over real TLS, with certificates of one fleet's authority, and what tests connect to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from peer_boards import eventually

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.coordinator.brokers.mqtt_service import make_broker
from edgefl.device.mqtt.connection import MqttConnection
from edgefl.device.mqtt.session import MqttCallbacks, MqttIdentity, create_tls_context
from edgefl.simulation.local_fleet import find_free_port
from edgefl.system.atomic_files import TlsFiles

HOST = "127.0.0.1"
BROKERS = ["embedded", *(["mosquitto"] if find_mosquitto() else [])]


class BrokerSite:
    """The certificates at once; the broker from `start` on.

    Attributes:
        num_sessions: of each link, by the name of its device.
    """

    def __init__(self, folder: Path, spec: str = "auto", authority: pki.KeyPair | None = None) -> None:
        self.folder, self.port = folder, find_free_port()
        self.authority = authority or pki.create_authority("lab")
        tls = TlsFiles(**self.files("server", pki.issue_server_certificate(self.authority, [HOST])))
        self.broker = make_broker(spec, directory=folder / "broker", fleet="lab", tls=tls, host=HOST, port=self.port)
        self.num_sessions: Counter[str] = Counter()
        self.links: list[MqttConnection] = []
        self._clients: list[mqtt.Client] = []

    def start(self) -> BrokerSite:
        self.broker.start()
        return self

    def close(self) -> None:
        for link in self.links:
            link.stop()
        for client in self._clients:
            client.disconnect()
            client.loop_stop()
        self.broker.stop()

    def files(self, name: str, pair: pki.KeyPair) -> dict[str, Path]:
        content = {"ca": self.authority.cert_pem, "cert": pair.cert_pem, "key": pair.key_pem}
        for kind, pem in content.items():
            (self.folder / f"{name}.{kind}").write_bytes(pem)
        return {kind: self.folder / f"{name}.{kind}" for kind in content}

    def tls(self, name: str, authority: pki.KeyPair | None = None) -> TlsFiles:
        """The files of a device of this fleet, or with a certificate of another authority."""
        return TlsFiles(**self.files(name, pki.issue_client_certificate(authority or self.authority, name)))

    def link(
        self,
        name: str = "pi-1",
        *,
        addresses: Sequence[tuple[str, int]] = (),
        tls: TlsFiles | None = None,
        keep_alive_s: int = 10,
        is_up: bool = True,
        **callbacks: Any,
    ) -> MqttConnection:
        """A link, connected unless `is_up` is False: then it has not been started."""

        def next_session_no() -> int:
            self.num_sessions[name] += 1
            return self.num_sessions[name]

        link = MqttConnection(
            addresses or [(HOST, self.port)],
            tls or self.tls(name),
            MqttIdentity(fleet="lab", device_id=name, boot_id="boot", version="1.2.3"),
            MqttCallbacks(**{"on_wake_up": lambda: None, "on_command": lambda _: None, **callbacks}),
            next_session_no=next_session_no,
            keep_alive_s=keep_alive_s,
            max_backoff_s=0.2,
        )
        self.links.append(link)
        if is_up:
            link.start()
            assert link.wait_connected(60)
        return link

    def client(self, name: str, *filters: str) -> tuple[mqtt.Client, list[tuple[str, bytes]]]:
        """A client that comes back whenever it can, and the topics and payloads that it hears."""
        heard: list[tuple[str, bytes]] = []
        client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=name)
        client.tls_set_context(create_tls_context(self.tls(name)))
        client.reconnect_delay_set(1, 1)
        client.on_connect = lambda *_: filters and client.subscribe([(each, 1) for each in filters])
        client.on_message = lambda _c, _d, message: heard.append((message.topic, bytes(message.payload)))
        client.connect(HOST, self.port)
        client.loop_start()
        self._clients.append(client)
        eventually(client.is_connected)
        return client, heard
