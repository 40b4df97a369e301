"""Makes a store as a fleet leaves it that has trained for months; by SQL alone, which takes minutes."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl.storage.repositories.totals import rebuild_totals
from edgefl.storage.store import Store

DAY_S = 86_400
BEGIN = 1_700_006_400.0
BEAT_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much the store holds; the runs follow each other, every one of them takes most of a day."""

    num_rounds: int
    num_updates: int
    num_heartbeats: int
    num_devices: int = 100
    num_runs: int = 200

    @property
    def rounds_per_run(self) -> int:
        return max(1, self.num_rounds // self.num_runs)

    @property
    def updates_per_round(self) -> int:
        return max(1, self.num_updates // self.num_rounds)

    @property
    def round_s(self) -> float:
        return DAY_S * 0.9 / self.rounds_per_run

    @property
    def end(self) -> float:
        return BEGIN + self.num_runs * DAY_S

    @property
    def first_beat(self) -> float:
        return self.end - self.num_heartbeats // self.num_devices * BEAT_S


def make(path: Path, size: Size) -> None:
    """Makes the store, and leaves its sums to the program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Store.open(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
        for pragma in ("synchronous = OFF", "journal_mode = MEMORY", "cache_size = -1000000"):
            raw.execute(f"PRAGMA {pragma}")
        indexes = raw.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall()
        raw.execute("BEGIN")
        for name, _ in indexes:
            raw.execute(f"DROP INDEX {name}")
        for statement in (*_fleet(size), *_runs(size), *_heartbeats(size)):
            raw.execute(statement)
        for _, sql in indexes:
            raw.execute(sql)
        raw.execute("COMMIT")
    with Store.open(path) as store, store.database.write() as connection:
        rebuild_totals(connection)


def _numbers(count: int) -> str:
    return f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {max(1, count) - 1}) "


def _device(number: str) -> str:
    return f"printf('pi-%03d', {number})"


def _run(number: str) -> str:
    return f"printf('run-%04d', {number})"


def _fleet(size: Size) -> Iterator[str]:
    yield (
        _numbers(size.num_devices)
        + f"""
        INSERT INTO devices (device_id, public_key, role, groups, joined_at, last_seen_at, presence, examples)
        SELECT {_device("i")}, x'00', 'trainer', '[]', {BEGIN}, {size.end}, 'online', '{{"digits": 9}}' FROM n
        """
    )
    yield (
        _numbers(size.num_runs * 500)
        + f"""
        INSERT INTO events (at, kind, message, run_id, device_id, data)
        SELECT {BEGIN} + i * {DAY_S / 500}, 'device-late', 'a heartbeat is missing',
            CASE i % 3 WHEN 0 THEN {_run("i / 500")} END, {_device(f"i % {size.num_devices}")}, '{{}}' FROM n
        """
    )


def _runs(size: Size) -> Iterator[str]:
    rounds, each, devices, round_s = size.rounds_per_run, size.updates_per_round, size.num_devices, size.round_s
    yield (
        _numbers(size.num_runs)
        + f"""
        INSERT INTO runs (run_id, name, task, strategy, config, status, submitted_at, started_at, finished_at, rounds,
            version, accuracy, seed, sequence)
        SELECT {_run("i")}, 'digits-fedavg', 'digits', 'fedavg', '{{}}', 'finished', at, at, at + {DAY_S * 0.9},
            {rounds}, {rounds}, 0.9, 7, i + 1
        FROM (SELECT i, {BEGIN} + i * {DAY_S} AS at FROM n)
        """
    )
    # Rounds take between half and all of their turn, and each waited for one of its devices.
    yield (
        _numbers(size.num_runs * rounds)
        + f"""
        INSERT INTO rounds (run_id, round, version, started_at, closed_at, num_devices, num_updates, loss, bytes_up,
            bytes_down, seconds, waited_for, waited_s, waited_update_id)
        SELECT run_id, round, round, at, at + took, {each}, {each}, 0.5, {each}000, {each}000, took,
            {_device(f"(i * {each}) % {devices}")}, took / 2, i * {each} + 1
        FROM (
            SELECT i, {_run(f"i / {rounds}")} AS run_id, i % {rounds} + 1 AS round,
                {BEGIN} + (i / {rounds}) * {DAY_S} + (i % {rounds}) * {round_s} AS at,
                {round_s} * (0.5 + (i * 7919 % 1000) / 2000.0) AS took
            FROM n
        )
        """
    )
    yield (
        _numbers(size.num_runs * rounds * each)
        + f"""
        INSERT INTO updates (id, run_id, round, assignment_id, device_id, base_version, applied_version, staleness,
            iterations, num_examples, bytes_up, bytes_down, codec, compute_s, send_s, wait_s, loss, outcome,
            dispatched_at, received_at, ended_at, max_temperature_c, throttled, signal_dbm, link_bits_per_s, energy_j,
            metrics)
        SELECT i + 1, {_run(f"r / {rounds}")}, r % {rounds} + 1, printf('a-%d-%d', r % {rounds} + 1, i % {each}),
            {_device(f"i % {devices}")}, r % {rounds}, r % {rounds}, i * 31 % 97 = 0, 20, 100, 1000, 1000, 'dense',
            1.5 + i % 7, 0.5, 0.25, 0.5,
            CASE i * 17 % 211 WHEN 0 THEN 'lost' WHEN 1 THEN 'late' ELSE 'used' END, at, at + 9, at + 9,
            50 + i * 13 % 40, CASE (i / 10) * 11 % 53 WHEN 0 THEN 'throttled' ELSE 'ok' END, -60, 72e6, 5.5, '{{}}'
        FROM (
            SELECT i, i / {each} AS r,
                {BEGIN} + (i / {each * rounds}) * {DAY_S} + (i / {each} % {rounds}) * {round_s} AS at
            FROM n
        )
        """
    )
    yield (
        _numbers(size.num_runs * rounds)
        + f"""
        INSERT INTO evaluations (run_id, assignment_id, round, version, device_id, source, loss, accuracy,
            num_examples, bytes_up, bytes_down, at, metrics)
        SELECT {_run(f"i / {rounds}")}, printf('e-%d', i % {rounds} + 1), i % {rounds} + 1, i % {rounds} + 1,
            'coordinator-evaluator', 'coordinator', 0.5, 0.9, 1000, 10, 1000,
            {BEGIN} + (i / {rounds}) * {DAY_S} + (i % {rounds}) * {round_s} + 20, '{{}}' FROM n
        """
    )


def _heartbeats(size: Size) -> Iterator[str]:
    devices, first = size.num_devices, size.first_beat
    at = f"{first} + (i / {devices}) * {BEAT_S}"
    yield (
        _numbers(size.num_heartbeats)
        + f"""
        INSERT INTO heartbeats (device_id, at, seq, session_no, uptime_s, temperature_c, throttled, cpu_fraction,
            memory_fraction, memory_bytes, disk_free_bytes, run, iteration)
        SELECT {_device(f"i % {devices}")}, {at} + (i % {devices}) * 0.01, i / {devices}, 1, i, 50 + i % 30, 'ok',
            0.5, 0.5, 90000000, 9000000000,
            CASE WHEN i % 7 < 3 THEN {_run(f"CAST(({at} - {BEGIN}) / {DAY_S} AS INTEGER)")} END, 7 FROM n
        """
    )
    yield (
        _numbers(size.num_heartbeats // 20)
        + f"""
        INSERT INTO heartbeats_5min (device_id, at, num_heartbeats, uptime_s, temperature_c, throttled,
            cpu_fraction)
        SELECT {_device(f"i % {devices}")}, {math.floor(first / 300) * 300} - (i / {devices} + 1) * 300, 60, i, 60,
            'ok', 0.5 FROM n
        """
    )
