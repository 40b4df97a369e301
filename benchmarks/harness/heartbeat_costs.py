"""How many heartbeats a second come from MQTT payloads into SQLite, and what is lost."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.fleet.telemetry_writer import TelemetryWriter
from edgefl.coordinator.service import FLUSH_INTERVAL_S
from edgefl.core.protocol import Heartbeat, Topic
from edgefl.storage.store import Store
from harness.cost_rows import Row
from harness.crowd import add_devices, names_of

NUM_DEVICES = 1000
TAKES_S = 10.0
NUM_SINGLE, NUM_RAW = 2000, 50_000
AIM_PER_S = 5000


def rows() -> list[Row]:
    """Returns rates by the clock and by the processor."""
    with tempfile.TemporaryDirectory() as root:
        store = Store.open(Path(root) / "edgefl.db")
        names = names_of(NUM_DEVICES)
        add_devices(store, names, at=time.time())
        registry = DeviceRegistry(PresenceTracker(), time.monotonic)
        for number, name in enumerate(names):
            registry.add(name, node_id=number + 1, role="trainer", groups=(), examples={"digits": 200})
        diary = TelemetryWriter(
            store=store, registry=registry, clock=time.time, on_progress=lambda _: None, on_heartbeat=lambda *_: None
        )
        num_sent, took_s, took_cpu_s = _sustained(diary, registry, names)
        num_kept = _num_rows(store)
        began_s = time.process_time()
        for number in range(NUM_SINGLE):
            diary.on_message(names[number % NUM_DEVICES], Topic.HEARTBEAT, _payload(10**6 + number))
            diary.flush()
        single_s = (time.process_time() - began_s) / NUM_SINGLE
        raw_s = _raw(Path(root) / "raw.db", Path(root) / "edgefl.db")
        store.close()
    return [
        Row(part="heartbeats", what=f"heartbeats of {NUM_DEVICES} devices into the store, for {TAKES_S:g} s",
            value=num_sent / took_s, unit="a second", aim=AIM_PER_S, more_is_better=True),
        Row(part="heartbeats", what="the same by the processor's time", value=num_sent / took_cpu_s, unit="a second"),
        Row(part="heartbeats", what="of which were lost", value=num_sent - num_kept, unit="heartbeats", aim=0),
        Row(part="heartbeats", what="a transaction for each heartbeat, to ours, processor's time",
            value=single_s * num_sent / took_cpu_s, unit="times"),
        Row(part="heartbeats", what="ours to `executemany` of rows that are ready, processor's time",
            value=took_cpu_s / num_sent / raw_s, unit="times"),
    ]  # fmt: skip


def _sustained(diary: TelemetryWriter, registry: DeviceRegistry, names: Sequence[str]) -> tuple[int, float, float]:
    """Returns how many were taken, in how many seconds by the clock and the processor, until all were written.

    One thread says heartbeats as fast as they are taken, as the bus does; another flushes as the coordinator does.
    """
    is_over = threading.Event()

    def flush() -> None:
        while not is_over.wait(FLUSH_INTERVAL_S):
            registry.tick()
            diary.flush()

    flusher, number = threading.Thread(target=flush), 0
    payloads = [_payload(seq) for seq in range(1, 2000)]  # made before: devices do that
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    flusher.start()
    while time.monotonic() - began_s < TAKES_S and number // len(names) < len(payloads):
        diary.on_message(names[number % len(names)], Topic.HEARTBEAT, payloads[number // len(names)])
        number += 1
    is_over.set()
    flusher.join()
    diary.flush()
    return number, time.monotonic() - began_s, time.process_time() - began_cpu_s


def _payload(seq: int) -> bytes:
    return Heartbeat(
        seq=seq, session_no=1, uptime_s=5.0 * seq, temperature_c=55.5, throttled="ok", cpu_fraction=0.5,
        memory_fraction=0.4, memory_bytes=400_000_000, disk_free_bytes=9_000_000_000, power_w=3.4,
        run="20261122-101500-abcdef", assignment="v12-a0-pi-0001", iteration=seq % 100, holding=["v12-a0-pi-0001"],
    ).dump()  # fmt: skip


def _num_rows(store: Store) -> int:
    with store.database.read() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM heartbeats").scalar_one())


def _raw(path: Path, like: Path) -> float:
    """Returns the seconds per row that SQLite alone takes for rows, indices and batches as ours."""
    with sqlite3.connect(like) as store:
        schema = store.execute(
            "SELECT sql FROM sqlite_master WHERE tbl_name = 'heartbeats' AND sql IS NOT NULL ORDER BY type DESC"
        ).fetchall()
        found = store.execute(f"SELECT * FROM heartbeats LIMIT {NUM_RAW}").fetchall()
    store.close()
    with sqlite3.connect(path, isolation_level=None) as raw:
        raw.execute("PRAGMA journal_mode = WAL")
        raw.execute("PRAGMA synchronous = NORMAL")
        for (statement,) in schema:
            raw.execute(statement)
        marks = ", ".join("?" * len(found[0]))
        began_s = time.process_time()
        for start in range(0, len(found), AIM_PER_S // 2):
            raw.execute("BEGIN IMMEDIATE")
            raw.executemany(f"INSERT INTO heartbeats VALUES ({marks})", found[start : start + AIM_PER_S // 2])
            raw.execute("COMMIT")
        took_s = time.process_time() - began_s
    raw.close()
    return took_s / len(found)
