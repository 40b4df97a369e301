"""The parts of a coordinator that hear devices, with a clock that runs ahead, and boards that come and go.

What is real: the store, presence and registry, the diary with its flushes and its hourly look at old heartbeats, what
the page's feed takes, the figures of /metrics, the book of refused tries and the throttle. What is not: the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from edgefl.coordinator.api.feed_state import FeedState
from edgefl.coordinator.auth import RateLimiter, RejectedRequestLog
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.fleet.telemetry_writer import TelemetryWriter
from edgefl.coordinator.monitoring.metrics import Monitoring
from edgefl.core.errors import TooManyTriesError
from edgefl.core.protocol import Capabilities, Heartbeat, StatusMessage, Topic
from edgefl.storage.queries.dashboard import get_last_seen_times
from edgefl.storage.repositories.heartbeats import RAW_RETENTION_S, ROLLUP_BUCKET_S
from edgefl.storage.store import Store
from harness.crowd import add_devices, names_of

EPOCH = 946_684_800.0
BEAT_S = 5.0
MINUTE = 12
"""In beats."""
SCRAPE_EVERY = 120
BREAKS_DOWN_EVERY_S = 6 * 3600.0
DOWN_S = 1800.0
GAP_EVERY_S = 3600.0
GAP_S = 20.0
HOUR_S = 3600.0


@dataclass(slots=True, kw_only=True)
class _Board:
    name: str
    boot_no: int = 1
    session_no: int = 0
    seq: int = 0
    away_until_s: float = 0.0
    is_up: bool = False
    temperature_c: float = 55.0
    beats: dict[int, int] = field(default_factory=dict)
    """By five minutes, of the last day; those before are in `num_five_minutes`."""
    num_five_minutes: int = 0


class HurriedFleet:
    """Use it as a context manager; `go_on` lets another five seconds pass."""

    def __init__(self, folder: Path, num_boards: int) -> None:
        self.now_s = 0.0
        self._rng = np.random.default_rng(7)
        self._num_beats = 0
        names = names_of(num_boards)
        self._boards = [_Board(name=name) for name in names]
        directory = init_directory(folder, hosts=["127.0.0.1"], fleet="soak")
        self._store = store = Store.open(directory.database)
        add_devices(store, names, at=EPOCH)
        self._registry = registry = DeviceRegistry(PresenceTracker(), lambda: self.now_s)
        for number, name in enumerate(names):
            registry.add(name, node_id=10**15 + number, role="trainer", groups=(), examples={"digits": 200})
        registry.record_broker_link(connected=True)
        self._diary = TelemetryWriter(
            store=store, registry=registry, clock=self._unix, on_progress=lambda _: None, on_heartbeat=lambda *_: None
        )
        self._attempts = RejectedRequestLog(store=store, clock=self._unix, monotonic=lambda: self.now_s)
        self._throttle = RateLimiter(monotonic=lambda: self.now_s)
        self._feed, self._changed = FeedState(store=store, registry=registry), dict[str, float]()
        registry.subscribe(lambda event: self._changed.update({event.device_id: self._unix()}))
        self._feed.reset(get_last_seen_times(store))
        self._monitoring = Monitoring(
            directory=directory, store=store, registry=registry,
            is_broker_connected=lambda: True, num_dropped=lambda: 0, max_devices=1000,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def go_on(self) -> None:
        """Lets five seconds pass: everybody who is there is heard, and the coordinator does what is due."""
        self.now_s += BEAT_S
        self._num_beats += 1
        for board in self._boards:
            self._live(board)
        self._registry.tick()
        if self._num_beats % MINUTE == 0:
            self._guess()
            self._diary.flush()
            self._attempts.flush()
            self._feed.pop_changes(self._changed)
            self._changed.clear()
        if self._num_beats % SCRAPE_EVERY == 0:
            self._monitoring.metrics.render()

    def close_the_day(self) -> None:
        """Lets an hour pass in silence, after which heartbeats are looked at again."""
        self._diary.flush()
        self.now_s += HOUR_S
        self._diary.flush()

    def num_raw(self) -> int:
        """Returns how many heartbeats there ought to be, one by one, after `close_the_day`."""
        return sum(sum(board.beats.values()) for board in self._boards if self._forget(board))

    def num_five_minutes(self) -> int:
        """Returns how many rows of five minutes there ought to be after `close_the_day`."""
        return sum(board.num_five_minutes for board in self._boards if self._forget(board))

    def _unix(self) -> float:
        return EPOCH + self.now_s

    def _forget(self, board: _Board) -> bool:
        """Counts five minutes that are older than a day as one row each."""
        end = (self._unix() - RAW_RETENTION_S) // ROLLUP_BUCKET_S * ROLLUP_BUCKET_S
        for bucket in [bucket for bucket in board.beats if bucket * ROLLUP_BUCKET_S < end]:
            del board.beats[bucket]
            board.num_five_minutes += 1
        return True

    def _live(self, board: _Board) -> None:
        if self.now_s < board.away_until_s:
            return
        if not board.is_up:
            self._connect(board)
        if self._rng.random() < BEAT_S / BREAKS_DOWN_EVERY_S:
            board.boot_no += 1
            self._go(board, DOWN_S, has_will=True)
        elif self._rng.random() < BEAT_S / GAP_EVERY_S:
            self._go(board, GAP_S, has_will=False)
        else:
            self._beat(board)

    def _connect(self, board: _Board) -> None:
        board.is_up = True
        board.session_no += 1
        status = StatusMessage(
            state="online", boot_id=f"boot-{board.boot_no}", session_no=board.session_no, version="0.1.0"
        )
        self._diary.on_message(board.name, Topic.STATUS, status.dump())
        facts = {"model": "Raspberry Pi 4", "cores": 4, "memory_bytes": 4_000_000_000}
        self._diary.on_message(
            board.name, Topic.CAPABILITIES, Capabilities(facts=facts, shards={"digits": 200}).dump()
        )

    def _go(self, board: _Board, for_s: float, *, has_will: bool) -> None:
        board.is_up = False
        board.away_until_s = self.now_s + self._rng.exponential(for_s)
        if has_will:
            will = StatusMessage(
                state="offline", boot_id=f"boot-{board.boot_no - 1}", session_no=board.session_no, will=True
            )
            self._diary.on_message(board.name, Topic.STATUS, will.dump())

    def _beat(self, board: _Board) -> None:
        board.seq += 1
        board.temperature_c += float(self._rng.normal(0, 0.5)) - 0.01 * (board.temperature_c - 55)
        heartbeat = Heartbeat(
            seq=board.seq, session_no=board.session_no, uptime_s=self.now_s, clock_skew_s=0.01,
            temperature_c=round(board.temperature_c, 1), throttled="ok", cpu_fraction=round(self._rng.random(), 3),
            memory_fraction=0.4, memory_bytes=80_000_000, disk_free_bytes=20_000_000_000,
            run="20000101-000000-aaaaaa", iteration=board.seq % 1000,
        )  # fmt: skip
        self._diary.on_message(board.name, Topic.HEARTBEAT, heartbeat.dump())
        bucket = int(self._unix() // ROLLUP_BUCKET_S)
        if bucket not in board.beats:
            self._forget(board)
        board.beats[bucket] = board.beats.get(bucket, 0) + 1

    def _guess(self) -> None:
        """Somebody somewhere tries to join with a secret that is wrong."""
        address = ".".join(str(part) for part in self._rng.integers(1, 255, size=4))
        for _ in range(3):
            try:
                self._throttle.check(address)
            except TooManyTriesError:
                continue
            self._throttle.record_failure(address)
            self._attempts.record("join", address, "no such token")
