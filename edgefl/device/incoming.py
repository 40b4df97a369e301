"""What comes over the link: bells, commands, other devices' values, and what somebody says of this device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt

from edgefl.device.complaints import Complaints
from edgefl.device.mqtt_session import Session
from edgefl.errors import NetworkError
from edgefl.protocol import MAX_PEER_BYTES, Command, PresenceState, Status, Topic, parse_peer_topic, parse_topic

log = logging.getLogger(__name__)

REMEMBERED_COMMANDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCallbacks:
    """What the agent does on MQTT's word; all run in the link's thread and should return soon.

    `on_bell` also comes after every connect, since a bell may have rung while the link was down. `on_peer` gets the
    name of a device and what it has for this one, after `Link.listen_to_peers`; the same value may come twice.
    """

    on_bell: Callable[[], None]
    on_command: Callable[[Command], None]
    on_connection: Callable[[bool], None] = lambda _: None
    on_peer: Callable[[str, bytes], None] = lambda _sender, _payload: None


class Incoming:
    """Hands messages to the agent, in the link's thread; nothing that is wrong with one ends the link.

    Args:
        callbacks: see `LinkCallbacks`.
        complaints: told of messages that make no sense.
        listens_to_peers: says whether this device wants to hear others now.
        on_offline: called when somebody says that this device is offline.
    """

    def __init__(
        self,
        callbacks: LinkCallbacks,
        complaints: Complaints,
        *,
        listens_to_peers: Callable[[], bool],
        on_offline: Callable[[Session, Status], None],
    ) -> None:
        self._callbacks, self._complaints = callbacks, complaints
        self._listens_to_peers, self._on_offline = listens_to_peers, on_offline
        self._done_commands: deque[str] = deque(maxlen=REMEMBERED_COMMANDS)

    def attach(self, session: Session) -> None:
        """Takes what comes over a session from now on."""
        session.client.on_message = self._received
        session.client.message_callback_add(session.peer_filter, self._received_from_peer)

    def connection(self, *, is_up: bool) -> None:
        """Says that the link is up now, and that a bell may have rung before; or that it is down."""
        self._guard(lambda: self._callbacks.on_connection(is_up))
        if is_up:
            self._guard(self._callbacks.on_bell)

    def _received(self, _client: Any, session: Session, message: mqtt.MQTTMessage) -> None:
        try:
            _, _, kind = parse_topic(message.topic)
            if kind is Topic.BELL:
                self._guard(self._callbacks.on_bell)
            elif kind is Topic.COMMAND:
                self._run_command(Command.load(bytes(message.payload)))
            elif kind is Topic.STATUS and message.payload:
                status = Status.load(bytes(message.payload))
                if status.state == PresenceState.OFFLINE:
                    self._on_offline(session, status)
        except NetworkError as error:
            self._complaints.add("malformed", "dropped a message: %s", error)

    def _received_from_peer(self, _client: Any, _session: Session, message: mqtt.MQTTMessage) -> None:
        payload = bytes(message.payload)
        try:
            _, sender, _ = parse_peer_topic(message.topic)
        except NetworkError as error:
            self._complaints.add("malformed", "dropped a message: %s", error)
            return
        if len(payload) > MAX_PEER_BYTES:
            text = "dropped %d bytes from %s, at most %d are taken"
            self._complaints.add("malformed", text, len(payload), sender, MAX_PEER_BYTES)
        elif payload and self._listens_to_peers():  # an empty one only clears what was retained
            self._guard(lambda: self._callbacks.on_peer(sender, payload))

    def _run_command(self, command: Command) -> None:
        if command.id in self._done_commands:
            return
        self._done_commands.append(command.id)
        self._guard(lambda: self._callbacks.on_command(command))

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # The boundary of paho's thread: presence must outlive whatever goes wrong in the agent.
            log.exception("the agent failed to act on a message")
