"""Publisher of values for other devices, and peer subscription, across MQTT sessions."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import paho.mqtt.client as mqtt

from edgefl.core.errors import NetworkError
from edgefl.core.protocol import MAX_PEER_BYTES, MAX_RETAINED_PEER_BYTES, validate_slug
from edgefl.device.mqtt.session import MqttSession

MAX_IN_FLIGHT_BYTES = 1024 * 1024
"""Maximum bytes in flight (or one message): a heartbeat waits behind these, not behind those of all receivers."""


@dataclass(slots=True, eq=False)
class _QueuedValue:
    """Newest value for one receiver; an empty one clears the broker's retained value."""

    payload: bytes = b""
    is_retained: bool = True
    is_due: bool = False
    publish_info: mqtt.MQTTMessageInfo | None = None
    in_flight_bytes: int = 0

    @property
    def is_in_flight(self) -> bool:
        return self.publish_info is not None and not self.publish_info.is_published()

    @property
    def is_needed(self) -> bool:
        """Returns whether it must still be sent, acknowledged, or repeated after a reconnect."""
        return self.is_due or self.is_in_flight or (self.is_retained and bool(self.payload))


class PeerPublisher:
    """Publisher of the newest value for each receiver, preserved across sessions.

    Values that are not retained, such as replies, are queued separately and replace only each other.

    Of the values for one receiver one is in flight at a time; of later ones only the newest is queued. So a slow link
    carries newer values instead of a backlog, and memory is bounded by the caps.

    The lock is held while paho queues a packet, which takes locks of paho's own: no callback that paho calls under
    those may call this class. The callbacks of a connection (connect, message, disconnect) may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: MqttSession | None = None
        self._queue: dict[tuple[str, bool], _QueuedValue] = {}
        self._is_subscribed = False

    @property
    def is_subscribed(self) -> bool:
        return self._is_subscribed

    def publish(self, receiver: str, payload: bytes, *, retain: bool = True) -> bool:
        """Sends the newest value for another device; does not block.

        A queued value is superseded by a newer one for the same receiver. A retained one is also kept here, and sent
        again after every connect, since a broker may lose it.

        Returns:
            False while disconnected: a retained value is sent at the next connect, others are dropped.

        Raises:
            NetworkError: the value is empty or has more than `MAX_PEER_BYTES` bytes, or all retained values together
                would have more than `MAX_RETAINED_PEER_BYTES`.
            UsageError: the receiver's name is malformed.
        """
        validate_slug(receiver, "receiver")
        num_bytes = len(payload)
        if not 0 < num_bytes <= MAX_PEER_BYTES:
            raise NetworkError(f"a message to {receiver} must have 1 to {MAX_PEER_BYTES} bytes, got {num_bytes}")
        with self._lock:
            if retain and (total := num_bytes + self._retained_bytes(receiver)) > MAX_RETAINED_PEER_BYTES:
                raise NetworkError(
                    f"with {num_bytes} bytes to {receiver} the broker would keep {total} of this device, at most "
                    f"{MAX_RETAINED_PEER_BYTES}; send less, to fewer receivers, or unretained"
                )
            if self._session is not None or retain:
                self._add(receiver, payload, is_retained=retain)
            self._send_due()
            return self._session is not None

    def is_queue_empty(self) -> bool:
        """Returns whether nothing is queued or in flight; True without a session."""
        with self._lock:
            if self._session is None:
                return True
            return not any(queued.is_due or queued.is_in_flight for queued in self._queue.values())

    def subscribe(self) -> None:
        """Subscribes to peer values, passed to `on_peer_message`, now and in every later session."""
        with self._lock:
            if not self._is_subscribed and self._session is not None:
                self._session.subscribe_to_peers()
            self._is_subscribed = True

    def remove(self, receivers: Iterable[str]) -> None:
        """Clears retained values for these receivers, now or at the next connect, and unsubscribes."""
        names = [validate_slug(receiver, "receiver") for receiver in receivers]
        with self._lock:
            if self._is_subscribed and self._session is not None:
                self._session.unsubscribe_from_peers()
            self._is_subscribed = False
            for receiver in names:
                self._queue.pop((receiver, False), None)
                self._add(receiver, b"", is_retained=True)
            self._send_due()

    def attach(self, session: MqttSession) -> None:
        """Switches to a new session and repeats retained values, which a broker may have lost."""
        with self._lock:
            self._session = session
            if self._is_subscribed:
                session.subscribe_to_peers()
            self._queue = {
                key: _QueuedValue(payload=queued.payload, is_due=True)
                for key, queued in self._queue.items()
                if queued.is_retained
            }
            self._send_due()

    def detach(self, session: MqttSession) -> None:
        """Detaches an ended session."""
        with self._lock:
            if self._session is session:
                self._session = None

    def send_due(self) -> None:
        """Sends queued values whose predecessors were acknowledged."""
        with self._lock:
            self._send_due()

    def _retained_bytes(self, excluding: str) -> int:
        return sum(
            len(queued.payload)
            for (name, _), queued in self._queue.items()
            if queued.is_retained and name != excluding
        )

    def _add(self, receiver: str, payload: bytes, *, is_retained: bool) -> None:
        key = receiver, is_retained
        queued = self._queue.get(key) or _QueuedValue()
        if not queued.is_due:  # to the end of the queue; a newer value replaces the queued one
            self._queue.pop(key, None)
            self._queue[key] = queued
        queued.payload, queued.is_retained, queued.is_due = payload, is_retained, True

    def _send_due(self) -> None:
        if self._session is None or not self._queue:
            return
        in_flight_bytes = sum(queued.in_flight_bytes for queued in self._queue.values() if queued.is_in_flight)
        for (receiver, _), queued in self._queue.items():
            # Clearing values are sent at once, behind the values that they clear: the device may be about to
            # disconnect.
            if not queued.is_due or (queued.payload and queued.is_in_flight):
                continue
            if queued.payload and in_flight_bytes and in_flight_bytes + len(queued.payload) > MAX_IN_FLIGHT_BYTES:
                break
            info = self._session.publish_to_peer(receiver, queued.payload, retain=queued.is_retained)
            if info.rc != mqtt.MQTT_ERR_SUCCESS:  # the session has just ended; the next one sends again
                return
            queued.publish_info, queued.in_flight_bytes, queued.is_due = info, len(queued.payload), False
            in_flight_bytes += len(queued.payload)
        self._queue = {key: queued for key, queued in self._queue.items() if queued.is_needed}
