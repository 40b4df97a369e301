"""Presence of stock SuperNodes: they know no MQTT, so their requests stand for a board's status and heartbeats.

An idle SuperNode asks for messages every three seconds. One whose ClientApp works says nothing but Flower's own
heartbeat, every 30 seconds, and asks again when it has answered. So one that asks before is another process with the
same key.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.protocol import HEARTBEAT_S, Heartbeat, PresenceState, StatusMessage

log = logging.getLogger(__name__)

IDLE_S, BUSY_S = 6.0, 35.0
"""How long a SuperNode is present after a request: while it asks for messages, and while its ClientApp works."""
CONFIRM = "confirm-message-received"


@dataclass(slots=True, kw_only=True)
class _SuperNode:
    device_id: str
    alive_until_s: float
    started_s: float
    next_s: float = 0.0
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    session_no: int = 1
    seq: int = 0
    held_ids: tuple[str, ...] = ()
    has_asked: bool = False
    """For messages; until then it may be at work on one of an earlier coordinator."""
    is_at_work: bool = False
    """It has the whole message, and has not answered."""
    was_warned: bool = False


class SuperNodePresence:
    """Tells the registry of SuperNodes what a board's agent says of itself. Thread-safe.

    Args:
        registry: of the fleet's devices.
        clock: seconds, monotonic.
    """

    def __init__(self, registry: DeviceRegistry, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self._nodes: dict[int, _SuperNode] = {}
        self._lock = threading.Lock()

    def add(self, node_id: int, device_id: str, *, is_present: bool = False) -> None:
        """Adds a SuperNode; one that an earlier coordinator saw last may be at work, and silent."""
        now_s = self._clock()
        alive_until_s = now_s + BUSY_S if is_present else now_s
        with self._lock:
            self._nodes[node_id] = _SuperNode(device_id=device_id, alive_until_s=alive_until_s, started_s=now_s)

    def remove(self, node_id: int | None) -> None:
        with self._lock:
            self._nodes.pop(node_id or 0, None)

    def on_request(self, node_id: int, method: str, held_ids: tuple[str, ...] | None) -> None:
        """Records a request that was handled; a reply also before that.

        Args:
            node_id: that signed it.
            method: of Flower's Fleet API.
            held_ids: assignments that it was given; None where it did not ask for messages.
        """
        now_s = self._clock()
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None:
                return
            if held_ids is not None:
                self._record_pull(node, held_ids, now_s)
            if method == "activate-node":
                node.boot_id, node.session_no, node.held_ids = uuid.uuid4().hex, node.session_no + 1, ()
                node.seq, node.started_s, node.next_s, node.has_asked = 0, now_s, now_s, True
            if method in {"activate-node", CONFIRM, "push-messages"}:
                node.is_at_work = method == CONFIRM
            node.alive_until_s = now_s + (BUSY_S if node.held_ids or not node.has_asked else IDLE_S)
            if method == "deactivate-node":
                node.alive_until_s = now_s
            device_id, boot_id, session_no = node.device_id, node.boot_id, node.session_no
        if method in {"activate-node", "deactivate-node"}:
            state = PresenceState.ONLINE if method == "activate-node" else PresenceState.OFFLINE
            log.info("the SuperNode of %s is %s", device_id, state)
            self._registry.record_status(
                device_id, StatusMessage(state=state, boot_id=boot_id, session_no=session_no)
            )

    @staticmethod
    def _record_pull(node: _SuperNode, held_ids: tuple[str, ...], now_s: float) -> None:
        """Records what a SuperNode holds from now on: one that asks again has answered, or lost, what it had."""
        node.has_asked = True
        if node.is_at_work and not held_ids:
            if not node.was_warned:
                node.was_warned = True
                log.warning(
                    "the SuperNode of %s asks for messages while it works on one: another process has its key; stop "
                    "it, and add it with a key of its own",
                    node.device_id,
                )
            return
        node.held_ids, node.next_s, node.is_at_work = held_ids, now_s, False

    def tick(self) -> None:
        """Sends the heartbeats that are due; called about twice a second."""
        now_s, due = self._clock(), []
        with self._lock:
            for node in self._nodes.values():
                if node.next_s <= now_s < node.alive_until_s:
                    node.next_s, node.seq = now_s + HEARTBEAT_S, node.seq + 1
                    heartbeat = Heartbeat(
                        seq=node.seq,
                        session_no=node.session_no,
                        uptime_s=now_s - node.started_s,
                        boot_id=node.boot_id,
                        holding=list(node.held_ids),
                    )
                    due.append((node.device_id, heartbeat))
        for device_id, heartbeat in due:
            self._registry.record_heartbeat(device_id, heartbeat)
