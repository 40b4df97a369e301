"""MQTT client of the coordinator: receives device messages, sends wake-ups and commands."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.coordinator.brokers.broker import BrokerAddress, BrokerTls, make_client_context
from edgefl.core.errors import EdgeflError, NetworkError
from edgefl.core.protocol import COORDINATOR_NAME, FROM_DEVICE, MAX_JSON_BYTES, Command, Topic, parse_topic, topic
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

# Short, so that a silently lost broker is noticed (within two of these) before silence makes the devices look gone:
# presence stops its clock while the client is disconnected.
KEEP_ALIVE_S = 4
MAX_RECONNECT_DELAY_S = 2

QOS = {Topic.STATUS: 1, Topic.CAPABILITIES: 1, Topic.HEARTBEAT: 0, Topic.PROGRESS: 0, Topic.ANSWER: 1}

OnMessage = Callable[[str, Topic, bytes], None]
OnConnection = Callable[[bool], None]


class MqttClient:
    """A connection to the broker that reconnects for ever.

    Both callbacks run in the client's own thread and should return soon. A message for which `on_message` raises an
    `EdgeflError` counts as malformed.
    """

    def __init__(
        self,
        address: BrokerAddress,
        tls: BrokerTls,
        fleet: str,
        on_message: OnMessage,
        on_connection: OnConnection,
    ) -> None:
        self._address = address
        self._fleet = fleet
        self._on_message = on_message
        self._on_connection = on_connection
        self._rate_limited_log, self._malformed_counts = RateLimitedLog(log), Counter[str]()
        self._is_connected = threading.Event()
        self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id=COORDINATOR_NAME, clean_session=True, protocol=mqtt.MQTTv311
        )
        self._tls, self._context = address.tls or tls, make_client_context(address.tls or tls)
        self._client.tls_set_context(self._context)
        self._client.reconnect_delay_set(1, MAX_RECONNECT_DELAY_S)
        self._client.on_connect = self._handle_connect
        self._client.on_disconnect = self._handle_disconnect
        self._client.on_connect_fail = self._handle_connect_failure
        self._client.on_message = self._handle_message

    def connect(self) -> None:
        """Starts the thread that connects and reconnects until `close`; returns at once."""
        self._client.connect_async(self._address.host, self._address.port, keepalive=KEEP_ALIVE_S)
        self._client.loop_start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the connection; returns whether it is connected."""
        return self._is_connected.wait(timeout_s)

    def is_connected(self) -> bool:
        return self._is_connected.is_set()

    def reload(self) -> None:
        """Loads the certificate from its files again, for the next connection."""
        self._context.load_cert_chain(self._tls.cert, self._tls.key)

    def notify(self, device_id: str) -> None:
        """Sends a device a wake-up for pending work; lost while disconnected, when devices poll anyway."""
        if self.is_connected():
            self._client.publish(topic(self._fleet, device_id, Topic.WAKEUP), b"", qos=0)

    def send_command(self, device_id: str, command: Command) -> None:
        """Sends a command; while disconnected it is queued until the reconnect."""
        self._client.publish(topic(self._fleet, device_id, Topic.COMMAND), command.dump(), qos=1)

    def clear_retained(self, device_id: str) -> None:
        """Clears the retained messages of a removed device."""
        for kind in (Topic.STATUS, Topic.CAPABILITIES):
            self._client.publish(topic(self._fleet, device_id, kind), b"", qos=1, retain=True)

    def close(self) -> None:
        """Disconnects and ends the thread."""
        self._client.disconnect()
        self._client.loop_stop()
        self._is_connected.clear()

    def malformed_counts(self) -> dict[str, int]:
        """Returns the number of dropped messages by device."""
        return dict(self._malformed_counts)

    def _handle_connect(self, client: mqtt.Client, _data: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if reason.is_failure:
            log.warning("the broker at %s:%d refuses us: %s", self._address.host, self._address.port, reason)
            return
        # Presence first: the retained messages of the subscription count from now on.
        self._is_connected.set()
        self._notify_connection(connected=True)
        client.subscribe([(topic(self._fleet, "+", kind), QOS[kind]) for kind in FROM_DEVICE])
        log.info("connected to the broker at %s:%d", self._address.host, self._address.port)

    def _handle_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if not self._is_connected.is_set():
            return
        self._is_connected.clear()
        self._notify_connection(connected=False)
        if reason.is_failure:
            log.warning("lost the broker at %s:%d (%s)", self._address.host, self._address.port, reason)

    def _handle_connect_failure(self, _client: Any, _data: Any) -> None:
        text = "cannot reach the broker at %s:%d; trying again"
        self._rate_limited_log.warning("", text, self._address.host, self._address.port)

    def _notify_connection(self, *, connected: bool) -> None:
        try:
            self._on_connection(connected)
        except Exception:
            # The boundary of paho's thread: an exception would end it, and the fleet with it.
            log.exception("the coordinator failed to handle a change of its broker connection")

    def _handle_message(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        sender = "?"
        try:
            fleet, sender, kind = parse_topic(message.topic)
            if message.payload:  # an empty one only clears a retained message
                self._on_message(sender, kind, self._validate_payload(fleet, kind, message))
        except EdgeflError as error:
            self._malformed_counts[sender] += 1
            self._rate_limited_log.warning(sender, "dropped a message of %s: %s", sender, error)
        except Exception:
            # One message must not stop the others; see `_notify_connection`.
            log.exception("the coordinator failed to handle a message of %s", sender)

    def _validate_payload(self, fleet: str, kind: Topic, message: mqtt.MQTTMessage) -> bytes:
        if fleet != self._fleet or kind not in FROM_DEVICE:
            raise NetworkError(f"not for the coordinator: {message.topic!r}")
        if len(message.payload) > MAX_JSON_BYTES:
            raise NetworkError(f"{kind} of {len(message.payload)} bytes, at most {MAX_JSON_BYTES} are read")
        return bytes(message.payload)
