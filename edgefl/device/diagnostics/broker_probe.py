"""Harmless probe of a broker and its access rules with the device's own certificate.

A device may publish below its own name only, and reads topics addressed to it. A probe published under another name
*to itself* must not come back, while one under its own name must: this works with any broker, and no device is called
`edgefl-doctor`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.core.errors import BrokerError, NotJoinedError
from edgefl.core.protocol import Topic, parse_peer_topic, peer_topic, topic
from edgefl.device.mqtt.session import MqttTlsFiles, create_tls_context
from edgefl.device.state_dir import DeviceStateDir

TIMEOUT_S = 5.0
PROBE_SENDER = "edgefl-doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAccessRules:
    """Access violations that a broker allowed: write as another device, read another's status."""

    can_write_as_others: bool
    can_read_others: bool


def check_broker_tls(host: str, port: int, tls_files: MqttTlsFiles, *, timeout_s: float = TIMEOUT_S) -> None:
    """Raises unless the server shows a certificate of the fleet's CA; sends no MQTT.

    Raises:
        BrokerError: no answer, or another server's.
    """
    context = create_tls_context(tls_files)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as plain_socket:
            context.wrap_socket(plain_socket, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message or error.reason
        raise BrokerError(f"{host}:{port} shows a certificate that does not verify: {reason}") from None
    except OSError as error:
        raise BrokerError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None


def find_reachable_broker(state: DeviceStateDir, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Returns the HOST:PORT at which the broker answers an enrolled device, or None."""
    device, tls = state.settings, MqttTlsFiles(ca=state.ca, cert=state.cert, key=state.key)
    for host in device.broker_hosts:
        with contextlib.suppress(BrokerError, NotJoinedError):
            check_broker_tls(host, device.broker_port, tls, timeout_s=timeout_s)
            return f"{host}:{device.broker_port}"
    return None


def probe_access_rules(
    host: str, port: int, tls_files: MqttTlsFiles, *, fleet: str, identity: str, timeout_s: float = TIMEOUT_S
) -> BrokerAccessRules:
    """Returns the access of `identity`, the name in the certificate.

    A connection replaces an earlier one of the same name: only for a name not in use.

    Raises:
        BrokerError: it cannot be reached, rejects the certificate, or drops allowed messages.
    """
    check_broker_tls(host, port, tls_files, timeout_s=timeout_s)
    probe = _AccessProbe(fleet, identity)
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=identity, reconnect_on_failure=False)
    client.tls_set_context(create_tls_context(tls_files))
    client.connect_timeout = timeout_s
    client.on_connect, client.on_subscribe, client.on_message = probe.on_connect, probe.on_subscribe, probe.on_message
    try:
        client.connect(host, port)
        client.loop_start()
        is_done = probe.done.wait(timeout_s)
    except OSError as error:
        raise BrokerError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None
    finally:
        client.disconnect()
        client.loop_stop()
    if not is_done:
        raise BrokerError(f"{host}:{port} {probe.status}")
    return BrokerAccessRules(can_write_as_others=probe.can_write_as_others, can_read_others=probe.can_read_others)


class _AccessProbe:
    """State of one probe; `done` is set when the message under its own name, sent last, came back."""

    def __init__(self, fleet: str, identity: str) -> None:
        self._fleet, self._identity = fleet, identity
        self._nonce = secrets.token_bytes(16)
        self.done = threading.Event()
        self.status = "does not let this certificate in"
        self.can_write_as_others = self.can_read_others = False

    def on_connect(self, client: mqtt.Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self.status = f"does not let this certificate in: {reason}"
            return
        self.status = "lets this certificate in, but does not answer"
        client.subscribe(
            [(peer_topic(self._fleet, "+", self._identity), 1), (topic(self._fleet, "+", Topic.STATUS), 1)]
        )

    def on_subscribe(self, client: mqtt.Client, *_: object) -> None:
        self.status = "does not carry what this device may say: its rules are not those of the fleet"
        for sender in (PROBE_SENDER, self._identity):
            client.publish(peer_topic(self._fleet, sender, self._identity), self._nonce, qos=1)

    def on_message(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        if message.topic.endswith(f"/{Topic.STATUS}"):
            self.can_read_others |= message.topic != topic(self._fleet, self._identity, Topic.STATUS)
        elif bytes(message.payload) == self._nonce:
            _, sender, _ = parse_peer_topic(message.topic)
            self.can_write_as_others |= sender == PROBE_SENDER
            if sender == self._identity:
                self.done.set()
