"""Dispatch of MQTT messages: wake-ups, commands, peer values, and this device's own status."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt

from edgefl.core.errors import NetworkError
from edgefl.core.protocol import (
    MAX_PEER_BYTES,
    Command,
    PresenceState,
    StatusMessage,
    Topic,
    parse_peer_topic,
    parse_topic,
)
from edgefl.device.mqtt.session import MqttSession
from edgefl.system.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

MAX_RECENT_COMMANDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttCallbacks:
    """Callbacks of the MQTT connection; run in its thread and should return soon.

    `on_wake_up` is also called after every connect, since a wake-up may have been missed. `on_peer_message` gets the
    name of a device and its value for this one, after `MqttConnection.subscribe_to_peers`; the same value may come
    twice.
    """

    on_wake_up: Callable[[], None]
    on_command: Callable[[Command], None]
    on_connection: Callable[[bool], None] = lambda _: None
    on_peer_message: Callable[[str, bytes], None] = lambda _sender, _payload: None


class MessageDispatcher:
    """Dispatcher of messages to the agent, in the MQTT thread; malformed ones do not end the connection.

    Args:
        callbacks: see `MqttCallbacks`.
        rate_limited_log: for malformed messages.
        is_subscribed_to_peers: returns whether peer values are wanted now.
        on_offline: called when this device's status is `offline`.
    """

    def __init__(
        self,
        callbacks: MqttCallbacks,
        rate_limited_log: RateLimitedLog,
        *,
        is_subscribed_to_peers: Callable[[], bool],
        on_offline: Callable[[MqttSession, StatusMessage], None],
    ) -> None:
        self._callbacks, self._rate_limited_log = callbacks, rate_limited_log
        self._is_subscribed_to_peers, self._on_offline = is_subscribed_to_peers, on_offline
        self._recent_command_ids: deque[str] = deque(maxlen=MAX_RECENT_COMMANDS)

    def attach(self, session: MqttSession) -> None:
        """Dispatches the messages of a session from now on."""
        session.client.on_message = self._on_message
        session.client.message_callback_add(session.peer_filter, self._on_peer_message)

    def notify_connection(self, *, is_connected: bool) -> None:
        """Notifies the agent of a connect, with a wake-up for missed ones, or of a disconnect."""
        self._guard(lambda: self._callbacks.on_connection(is_connected))
        if is_connected:
            self._guard(self._callbacks.on_wake_up)

    def _on_message(self, _client: Any, session: MqttSession, message: mqtt.MQTTMessage) -> None:
        try:
            _, _, kind = parse_topic(message.topic)
            if kind is Topic.WAKEUP:
                self._guard(self._callbacks.on_wake_up)
            elif kind is Topic.COMMAND:
                self._dispatch_command(Command.load(bytes(message.payload)))
            elif kind is Topic.STATUS and message.payload:
                status = StatusMessage.load(bytes(message.payload))
                if status.state == PresenceState.OFFLINE:
                    self._on_offline(session, status)
        except NetworkError as error:
            self._rate_limited_log.warning("malformed", "dropped a message: %s", error)

    def _on_peer_message(self, _client: Any, _session: MqttSession, message: mqtt.MQTTMessage) -> None:
        payload = bytes(message.payload)
        try:
            _, sender, _ = parse_peer_topic(message.topic)
        except NetworkError as error:
            self._rate_limited_log.warning("malformed", "dropped a message: %s", error)
            return
        if len(payload) > MAX_PEER_BYTES:
            text = "dropped %d bytes from %s, at most %d are taken"
            self._rate_limited_log.warning("malformed", text, len(payload), sender, MAX_PEER_BYTES)
        elif payload and self._is_subscribed_to_peers():  # an empty one only clears the retained value
            self._guard(lambda: self._callbacks.on_peer_message(sender, payload))

    def _dispatch_command(self, command: Command) -> None:
        if command.id in self._recent_command_ids:
            return
        self._recent_command_ids.append(command.id)
        self._guard(lambda: self._callbacks.on_command(command))

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # The boundary of paho's thread: presence must survive failures of the agent.
            log.exception("the agent failed to act on a message")
