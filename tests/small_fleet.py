"""A store with members in it, and a registry with boards that are there: most parts of a coordinator need them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.protocol import Heartbeat, StatusMessage
from edgefl.storage.store import Store

_keys = itertools.count()


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Waits until the condition holds, and returns what it gave; fails when it never does."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s"
        time.sleep(0.01)
    return value


def settled(rollouts: Any) -> None:
    """Waits until the thread of deployments or installations has looked at everything twice from now on."""
    thread, seen = rollouts, list[int]()
    look = thread._reconcile
    thread._reconcile = lambda: (seen.append(1), look())[1]
    eventually(lambda: len(seen) > 2)
    thread._reconcile = look


def enroll(store: Store, *names: str, key: bytes | None = None, **more: Any) -> None:
    """Lets members in, each with a key of its own that is none, or with this one."""
    if not store.list_tokens():
        store.add_token(
            token_id="t", secret_sha256="0" * 64, expires_at=9e12, uses=99, groups=(), role=None, created_at=1.0
        )
    for name in names:
        store.enroll_device(
            token_id="t", secret_sha256="0" * 64, now=2.0, device_id=name,
            public_key=key or f"{name} {next(_keys)}".encode(), **{"role": "trainer", **more},
        )  # fmt: skip


def add_run(store: Store, run_id: str = "r", **more: Any) -> None:
    usual = {"name": "n", "task": "digits", "strategy": "fedavg", "config": {}, "seed": 7, "submitted_at": 1.0}
    store.add_run(run_id=run_id, **{**usual, **more})


def status(state: str = "online", *, boot: str = "boot-1", session: int = 1, **more: Any) -> StatusMessage:
    return StatusMessage(state=state, boot_id=boot, session_no=session, **more)


def beat(seq: int = 1, *, session: int = 1, **told: Any) -> Heartbeat:
    return Heartbeat(**{"seq": seq, "session_no": session, "uptime_s": 1.0, **told})


class SmallFleet:
    """A registry with a clock that is set by hand, which hears the broker."""

    def __init__(self, *names: str, task: str = "digits", clock: Callable[[], float] | None = None) -> None:
        self.now_s, self._nodes = 0.0, itertools.count(1)
        self.registry = DeviceRegistry(PresenceTracker(), clock or (lambda: self.now_s))
        self.registry.record_broker_link(connected=True)
        for name in names:
            self.add(name, task=task)

    def add(
        self, name: str, *, node_id: int | None = None, role: str = "trainer", groups: tuple[str, ...] = (),
        task: str = "digits", examples: dict[str, int] | None = None, facts: dict[str, Any] | None = None,
        state: str | None = "online",
    ) -> int:  # fmt: skip
        """Adds a device, which says that it is there, unless `state` is None, and returns its node."""
        node_id = next(self._nodes) if node_id is None else node_id
        shards = {task: 5} if examples is None else examples
        self.registry.add(name, node_id=node_id, role=role, groups=groups, examples=shards, facts=facts)
        if state is not None:
            self.say(name, state)
        return node_id

    def say(self, name: str, state: str = "online", **more: Any) -> None:
        self.registry.record_status(name, status(state, **more))

    def beat(self, name: str, seq: int = 1, **told: Any) -> None:
        self.registry.record_heartbeat(name, beat(seq, **told))
