"""Rollout notifications to devices, and their status reports."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from edgefl.coordinator.fleet.presence import PRESENT_STATES
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.protocol import Command, CommandKind, Heartbeat
from edgefl.core.types import DeviceInfo, Json

RESEND_AFTER_S = 15.0
"""A device that does not report a command is sent it again after this."""
MAX_REASON_CHARS = 500


class CommandSender(Protocol):
    """Sends commands to devices."""

    def send_command(self, device_id: str, command: Command) -> None: ...


class RolloutNotifier:
    """Sends commands to present devices that have not started on them; others get theirs in a later call."""

    def __init__(self, registry: DeviceRegistry, command_sender: CommandSender) -> None:
        self._registry, self._command_sender = registry, command_sender
        self._sent_s: dict[tuple[str, str, str], float] = {}

    def notify(
        self, device_id: str, kind: CommandKind, rollout: str, *, is_in_progress: Callable[[Heartbeat], bool]
    ) -> None:
        """Sends a command about a rollout, at most every `RESEND_AFTER_S`.

        Args:
            device_id: of the recipient.
            kind: of the command.
            rollout: id of the deployment or installation.
            is_in_progress: returns whether a heartbeat shows that the device acts on it already.
        """
        heartbeat = self._registry.get_heartbeat(device_id)
        # A session sends its first heartbeat once it has subscribed: an earlier command would be lost.
        if (
            heartbeat is None
            or is_in_progress(heartbeat)
            or self._registry.get_state(device_id) not in PRESENT_STATES
        ):
            return
        key, now_s = (device_id, kind, rollout), time.monotonic()
        if now_s - self._sent_s.get(key, -RESEND_AFTER_S) >= RESEND_AFTER_S:
            self._sent_s[key] = now_s
            # A new id each time: an agent that restarted, or was not ready, must not take it for a completed one.
            command_id = f"{kind}-{rollout}-{uuid.uuid4().hex[:8]}"
            self._command_sender.send_command(device_id, Command(id=command_id, kind=kind, argument=rollout))


class StatusUpdates:
    """The last rollout status of each device, dispatched once per change.

    Any thread may record; only one may dispatch.
    """

    def __init__(self) -> None:
        self._last_status: dict[str, Json | None] = {}
        self._pending: dict[str, Json] = {}
        self._lock = threading.Lock()

    def record(self, device_id: str, status: Json | None) -> bool:
        """Records the status in a heartbeat; returns whether it is new."""
        with self._lock:
            if device_id in self._last_status and self._last_status[device_id] == status:
                return False
            self._last_status[device_id], self._pending[device_id] = status, status or {}
        return True

    def list_pending(self) -> list[str]:
        """Returns the devices with an undispatched status."""
        with self._lock:
            return list(self._pending)

    def dispatch(self, device_id: str, handler: Callable[[str, Json], None]) -> None:
        """Passes a device's new status to `handler`; keeps it if that raises, since it is reported only once."""
        with self._lock:
            status = self._pending[device_id]
        handler(device_id, status)
        with self._lock:
            if self._pending[device_id] is status:  # no newer status meanwhile
                del self._pending[device_id]


def list_present(registry: DeviceRegistry) -> list[DeviceInfo]:
    """Returns the present devices."""
    return [info for info in registry.list_devices() if registry.get_state(info.device_id) in PRESENT_STATES]


def make_rollout_id() -> str:
    """Returns the id of a new rollout, which starts with the UTC time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def parse_reason(status: Any) -> str | None:
    """Returns the reason in a device's status, shortened."""
    reason = status.get("reason")
    return str(reason)[:MAX_REASON_CHARS] if reason else None
