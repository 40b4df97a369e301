"""Request/response calls to devices over MQTT, answered also during training."""

from __future__ import annotations

import json
import queue
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from edgefl.coordinator.execution.in_flight import DeviceNotifier
from edgefl.coordinator.fleet.presence import DevicePresence
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.errors import NetworkError, NotFoundError
from edgefl.core.protocol import Command, CommandKind, CommandReply
from edgefl.core.types import Json

REPLY_TIMEOUT_S = 10.0
_REACHABLE_STATES = frozenset({DevicePresence.ONLINE, DevicePresence.LATE})


class DeviceRpc:
    """Thread-safe: `call` blocks the calling thread, `on_reply` is called by the MQTT client."""

    def __init__(
        self, notifier: DeviceNotifier, roster: DeviceRegistry, *, timeout_s: float = REPLY_TIMEOUT_S
    ) -> None:
        self._notifier, self._roster, self._timeout_s = notifier, roster, timeout_s
        self._pending_calls: dict[str, tuple[str, queue.SimpleQueue[CommandReply]]] = {}
        self._lock = threading.Lock()

    def call(self, device_id: str, kind: CommandKind, argument: Mapping[str, Any]) -> Json:
        """Returns the content of a device's reply.

        Raises:
            NotFoundError: there is no such device.
            NetworkError: the device is away, did not answer in time, or reported an error.
        """
        if self._roster.get_device(device_id) is None:
            raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")
        state = self._roster.get_state(device_id)
        if state not in {*_REACHABLE_STATES, DevicePresence.DRAINING}:
            raise NetworkError(f"{device_id} is {state or 'away'}: it can be asked when it is back")
        command = Command(id=uuid.uuid4().hex, kind=kind, argument=json.dumps(argument))
        replies: queue.SimpleQueue[CommandReply] = queue.SimpleQueue()
        with self._lock:
            self._pending_calls[command.id] = device_id, replies
        try:
            self._notifier.send_command(device_id, command)
            reply = replies.get(timeout=self._timeout_s)
        except queue.Empty:
            raise NetworkError(
                f"{device_id} did not answer within {self._timeout_s:g} s; it may be of an older edgefl, or your "
                "broker may not let it write its topic answer"
            ) from None
        finally:
            with self._lock:
                del self._pending_calls[command.id]
        if reply.error is not None:
            raise NetworkError(f"{device_id}: {reply.error}")
        return dict(reply.content)

    def on_reply(self, device_id: str, payload: bytes) -> None:
        """Passes a reply to the pending call; drops one without a call.

        Raises:
            NetworkError: it is malformed.
        """
        reply = CommandReply.load(payload)
        with self._lock:
            called_id, replies = self._pending_calls.get(reply.id, ("", None))
        if replies is not None and called_id == device_id:
            replies.put(reply)
