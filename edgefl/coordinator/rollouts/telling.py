"""How devices are told of a rollout, and what they say of it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from edgefl.coordinator.fleet.presence import PRESENT
from edgefl.coordinator.fleet.roster import Roster
from edgefl.protocol import Command, CommandKind, Heartbeat
from edgefl.types import DeviceInfo, Json

TELL_AGAIN_S = 15.0
"""A device that was told and says nothing of it is told again after so long."""
MAX_REASON_CHARS = 500


class Commander(Protocol):
    """Who carries a command to a device."""

    def command(self, device_id: str, command: Command) -> None: ...


class Teller:
    """Sends commands to devices that are there and not at it yet; the others get theirs when it is called again."""

    def __init__(self, roster: Roster, commander: Commander) -> None:
        self._roster, self._commander = roster, commander
        self._told_s: dict[tuple[str, str, str], float] = {}

    def tell(self, device_id: str, kind: CommandKind, rollout: str, *, is_at_it: Callable[[Heartbeat], bool]) -> None:
        """Sends a command about a rollout, unless the device was told a moment ago.

        Args:
            device_id: whom.
            kind: what to do.
            rollout: id of the deployment or installation.
            is_at_it: whether a heartbeat says that the device acts on it already.
        """
        heartbeat = self._roster.heartbeat(device_id)
        # The first heartbeat of a session comes when its subscriptions stand: before it, a command would be lost.
        if heartbeat is None or is_at_it(heartbeat) or self._roster.state(device_id) not in PRESENT:
            return
        key, now_s = (device_id, kind, rollout), time.monotonic()
        if now_s - self._told_s.get(key, -TELL_AGAIN_S) >= TELL_AGAIN_S:
            self._told_s[key] = now_s
            # A new id each time: an agent that forgot, or was not ready, must not take it for one that is done.
            command_id = f"{kind}-{rollout}-{uuid.uuid4().hex[:8]}"
            self._commander.command(device_id, Command(id=command_id, kind=kind, argument=rollout))


class News:
    """What each device said last of its rollouts, once for every change.

    Any thread may note; one alone hands on.
    """

    def __init__(self) -> None:
        self._known: dict[str, Json | None] = {}
        self._fresh: dict[str, Json] = {}
        self._lock = threading.Lock()

    def note(self, device_id: str, said: Json | None) -> bool:
        """Keeps what a heartbeat says; returns whether that is new."""
        with self._lock:
            if device_id in self._known and self._known[device_id] == said:
                return False
            self._known[device_id], self._fresh[device_id] = said, said or {}
        return True

    def waiting(self) -> list[str]:
        """Returns the devices of which something is news."""
        with self._lock:
            return list(self._fresh)

    def hand_on(self, device_id: str, take: Callable[[str, Json], None]) -> None:
        """Hands the news of a device to `take`; it stays news where that raises: it is said just once."""
        with self._lock:
            said = self._fresh[device_id]
        take(device_id, said)
        with self._lock:
            if self._fresh[device_id] is said:  # and nothing newer has come meanwhile
                del self._fresh[device_id]


def present(roster: Roster) -> list[DeviceInfo]:
    """Returns the devices that are there."""
    return [info for info in roster.known() if roster.state(info.device_id) in PRESENT]


def new_id() -> str:
    """Returns the id of a new rollout; it begins with the UTC time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def reason_of(said: Any) -> str | None:
    """Returns why a device says that it is so; no longer than it is worth keeping."""
    reason = said.get("reason")
    return str(reason)[:MAX_REASON_CHARS] if reason else None
