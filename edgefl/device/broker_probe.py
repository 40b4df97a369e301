"""Tries a broker and its rules with one's own certificate, and harms nobody.

A device may write below its own name only, and reads what others have for it. So a probe that publishes under another
name *to itself* must not get it back, while one under its own name must: that is seen on any broker, and no device is
called `edgefl-doctor`.
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

from edgefl.device.mqtt_session import LinkTls, link_context
from edgefl.device.state import DeviceState
from edgefl.errors import BrokerError, NotJoinedError
from edgefl.protocol import Topic, parse_peer_topic, peer_topic, topic

TIMEOUT_S = 5.0
NOBODY = "edgefl-doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRules:
    """What a broker let a device do that it should not: write as another device, read another's status."""

    writes_as_others: bool
    reads_others: bool


def shake_hands(host: str, port: int, tls: LinkTls, *, timeout_s: float = TIMEOUT_S) -> None:
    """Returns when a server there has shown a certificate of the fleet's CA; says nothing to it.

    Raises:
        BrokerError: nobody answers, or somebody else.
    """
    context = link_context(tls)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message or error.reason
        raise BrokerError(f"{host}:{port} shows a certificate that does not verify: {reason}") from None
    except OSError as error:
        raise BrokerError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None


def reachable_broker(state: DeviceState, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Returns at which HOST:PORT the broker of a device that has joined answers it, None for nowhere."""
    device, tls = state.device, LinkTls(ca=state.ca, cert=state.cert, key=state.key)
    for host in device.broker_hosts:
        with contextlib.suppress(BrokerError, NotJoinedError):
            shake_hands(host, device.broker_port, tls, timeout_s=timeout_s)
            return f"{host}:{device.broker_port}"
    return None


def probe_rules(
    host: str, port: int, tls: LinkTls, *, fleet: str, identity: str, timeout_s: float = TIMEOUT_S
) -> BrokerRules:
    """Returns what the broker lets `identity` do, the name in the certificate.

    Who connects under a name pushes the one off that is connected under it: only for a name that nobody uses now.

    Raises:
        BrokerError: it cannot be reached, refuses the certificate, or forgets what the device may say.
    """
    shake_hands(host, port, tls, timeout_s=timeout_s)
    probe = _Probe(fleet, identity)
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=identity, reconnect_on_failure=False)
    client.tls_set_context(link_context(tls))
    client.connect_timeout = timeout_s
    client.on_connect, client.on_subscribe, client.on_message = probe.connected, probe.subscribed, probe.received
    try:
        client.connect(host, port)
        client.loop_start()
        answered = probe.done.wait(timeout_s)
    except OSError as error:
        raise BrokerError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None
    finally:
        client.disconnect()
        client.loop_stop()
    if not answered:
        raise BrokerError(f"{host}:{port} {probe.state}")
    return BrokerRules(writes_as_others=probe.writes_as_others, reads_others=probe.reads_others)


class _Probe:
    """One conversation; `done` when the message under its own name has come back, which was sent last."""

    def __init__(self, fleet: str, identity: str) -> None:
        self._fleet, self._identity = fleet, identity
        self._nonce = secrets.token_bytes(16)
        self.done = threading.Event()
        self.state = "does not let this certificate in"
        self.writes_as_others = self.reads_others = False

    def connected(self, client: mqtt.Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self.state = f"does not let this certificate in: {reason}"
            return
        self.state = "lets this certificate in, but does not answer"
        client.subscribe(
            [(peer_topic(self._fleet, "+", self._identity), 1), (topic(self._fleet, "+", Topic.STATUS), 1)]
        )

    def subscribed(self, client: mqtt.Client, *_: object) -> None:
        self.state = "does not carry what this device may say: its rules are not those of the fleet"
        for sender in (NOBODY, self._identity):
            client.publish(peer_topic(self._fleet, sender, self._identity), self._nonce, qos=1)

    def received(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        if message.topic.endswith(f"/{Topic.STATUS}"):
            self.reads_others |= message.topic != topic(self._fleet, self._identity, Topic.STATUS)
        elif bytes(message.payload) == self._nonce:
            _, sender, _ = parse_peer_topic(message.topic)
            self.writes_as_others |= sender == NOBODY
            if sender == self._identity:
                self.done.set()
