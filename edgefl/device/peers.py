"""What a device has to say to other devices, and whether it listens to them, over whatever session its link has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import paho.mqtt.client as mqtt

from edgefl.device.mqtt_session import Session
from edgefl.errors import NetworkError
from edgefl.protocol import MAX_PEER_BYTES, MAX_RETAINED_PEER_BYTES, checked_slug

WINDOW_BYTES = 1024 * 1024
"""So much is under way at once, or one message: a heartbeat waits behind that and not behind all receivers'."""


@dataclass(slots=True, eq=False)
class _Mail:
    """The newest value for one receiver; an empty one clears what the broker retains."""

    payload: bytes = b""
    is_retained: bool = True
    is_due: bool = False
    sent: mqtt.MQTTMessageInfo | None = None
    sent_bytes: int = 0

    @property
    def is_under_way(self) -> bool:
        return self.sent is not None and not self.sent.is_published()

    @property
    def is_kept(self) -> bool:
        """Whether it is still needed: to be sent, acknowledged, or said again after a reconnect."""
        return self.is_due or self.is_under_way or (self.is_retained and bool(self.payload))


class Peers:
    """Sends the newest value for each receiver, and forgets nothing of that when a session breaks.

    What is not retained, such as an answer, waits beside what is, and takes nobody's place but its own kind's.

    Of the values for one receiver one is under way at a time; of those that come meanwhile the last one waits. So a
    slow link carries newer values instead of a queue of old ones, and memory is bounded by the caps.

    The lock is held while paho queues a packet, which takes locks of paho's own: no callback that paho calls under
    those may come here. The callbacks of a link (connect, message, disconnect) may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._mails: dict[tuple[str, bool], _Mail] = {}
        self._is_listening = False

    @property
    def is_listening(self) -> bool:
        return self._is_listening

    def publish(self, receiver: str, payload: bytes, *, retain: bool) -> bool:
        """Returns whether there is a session to send it on; see `Link.publish_peer`."""
        checked_slug(receiver, "receiver")
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
                self._put(receiver, payload, is_retained=retain)
            self._send_due()
            return self._session is not None

    def is_clear(self) -> bool:
        """Says whether nothing waits or is under way on the present session; true when there is none."""
        with self._lock:
            if self._session is None:
                return True
            return not any(mail.is_due or mail.is_under_way for mail in self._mails.values())

    def listen(self) -> None:
        """Subscribes, now and in every later session."""
        with self._lock:
            if not self._is_listening and self._session is not None:
                self._session.subscribe_to_peers()
            self._is_listening = True

    def forget(self, receivers: Iterable[str]) -> None:
        """Clears what the broker retains for these receivers, now or at the next connect, and hears nobody more."""
        names = [checked_slug(receiver, "receiver") for receiver in receivers]
        with self._lock:
            if self._is_listening and self._session is not None:
                self._session.unsubscribe_from_peers()
            self._is_listening = False
            for receiver in names:
                self._mails.pop((receiver, False), None)
                self._put(receiver, b"", is_retained=True)
            self._send_due()

    def attach(self, session: Session) -> None:
        """Goes on with a new session: what is retained is said again, since a broker may have lost it."""
        with self._lock:
            self._session = session
            if self._is_listening:
                session.subscribe_to_peers()
            self._mails = {
                key: _Mail(payload=mail.payload, is_due=True) for key, mail in self._mails.items() if mail.is_retained
            }
            self._send_due()

    def detach(self, session: Session) -> None:
        """Leaves a session that has ended."""
        with self._lock:
            if self._session is session:
                self._session = None

    def send_due(self) -> None:
        """Sends what waited for an acknowledgement that has come."""
        with self._lock:
            self._send_due()

    def _retained_bytes(self, besides: str) -> int:
        return sum(
            len(mail.payload) for (name, _), mail in self._mails.items() if mail.is_retained and name != besides
        )

    def _put(self, receiver: str, payload: bytes, *, is_retained: bool) -> None:
        key = receiver, is_retained
        mail = self._mails.get(key) or _Mail()
        if not mail.is_due:  # to the end of the queue; a newer value takes the place of the one that waits
            self._mails.pop(key, None)
            self._mails[key] = mail
        mail.payload, mail.is_retained, mail.is_due = payload, is_retained, True

    def _send_due(self) -> None:
        if self._session is None or not self._mails:
            return
        used = sum(mail.sent_bytes for mail in self._mails.values() if mail.is_under_way)
        for (receiver, _), mail in self._mails.items():
            # What clears is sent at once, behind what it clears: a device that forgets may be about to leave.
            if not mail.is_due or (mail.payload and mail.is_under_way):
                continue
            if mail.payload and used and used + len(mail.payload) > WINDOW_BYTES:
                break
            sent = self._session.publish_to_peer(receiver, mail.payload, retain=mail.is_retained)
            if sent.rc != mqtt.MQTT_ERR_SUCCESS:  # the session has just ended; the next one begins anew
                return
            mail.sent, mail.sent_bytes, mail.is_due = sent, len(mail.payload), False
            used += len(mail.payload)
        self._mails = {key: mail for key, mail in self._mails.items() if mail.is_kept}
