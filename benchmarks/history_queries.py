"""How long a question to the history takes in a large store, and what keeping the sums costs.

    python benchmarks/history_queries.py [--rounds 100000] [--updates 1000000] [--heartbeats 10000000]
        [--dir DIR] [--repeat 40] [--json]

Makes a store (two minutes and 2 GB for the usual size; one that lies in DIR already is used again), then asks every
kind with its usual filters, each time for another run, device or time, and reports the median and the 95th percentile
of the time that `history` takes: all that a coordinator does for a request but the HTTP. The time of the processor
stands beside it: on a machine that others use it is what a quiet one would take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import options
from harness.history_store import BEGIN, DAY_S, Size, make

from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.core.types import UpdateStatus
from edgefl.history.diagnosis import diagnose_round
from edgefl.storage.queries.columns import AGGREGATE_KINDS, COLUMNS
from edgefl.storage.queries.history import get_round_details, read_history, read_history_page
from edgefl.storage.repositories import runs
from edgefl.storage.repositories.records import AssignmentRow, UpdateRow
from edgefl.storage.store import Store

LIMIT = 101
TARGET_MS = 50.0
WRITTEN_ROUNDS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--heartbeats", type=int, default=10_000_000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    asked = options.parse(parser, rounds=200, updates=2_000, heartbeats=2_000, repeat=2)
    size = Size(num_rounds=asked.rounds, num_updates=asked.updates, num_heartbeats=asked.heartbeats)
    directory = asked.dir or Path(tempfile.mkdtemp(prefix="edgefl-history-"))
    try:
        path = directory / "edgefl.db"
        if not path.exists():
            _say(f"makes {path}")
            began = time.monotonic()
            make(path, size)
            _say(f"made in {time.monotonic() - began:.0f} s, {path.stat().st_size / 1e9:.2f} GB")
        figures = measure(path, size, asked.repeat)
        written = {word: writing(directory, with_sums=word == "with sums") for word in ("with sums", "without sums")}
    finally:
        if asked.dir is None:
            shutil.rmtree(directory)
    print(
        json.dumps({"size": asdict(size), "ms": figures, "updates_per_s": written}) if asked.json else _table(figures)
    )
    if not asked.json:
        print(*(f"{word}: {rate:.0f} updates/s into the ledger's tables" for word, rate in written.items()), sep="\n")
    return 0 if asked.quick or all(row["p95"] < TARGET_MS for row in figures) else 1


def questions(size: Size, number: int) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields what is asked: a label, a kind, and filters that differ from one number to the next."""
    some_run = f"run-{number * 37 % size.num_runs:04d}"
    recent_run = f"run-{size.num_runs - 1 - number % 3:04d}"
    device = f"pi-{number * 13 % size.num_devices:03d}"
    since = BEGIN + number * 11 % size.num_runs * DAY_S
    week = {"since": since, "until": since + 7 * DAY_S}
    yield from ((f"{kind}", kind, {}) for kind in COLUMNS)
    yield from (
        (f"{kind} --run", kind, {"run": recent_run if kind == "heartbeats" else some_run}) for kind in COLUMNS
    )
    yield from ((f"{kind} --device", kind, {"device": device}) for kind in COLUMNS if kind != "accuracy")
    yield from ((f"{kind} --since --until", kind, week) for kind in COLUMNS)
    yield from ((f"{kind} --run --device", kind, {"run": recent_run, "device": device}) for kind in (
        "rounds", "updates", "heartbeats", "slow", "events", *sorted(AGGREGATE_KINDS),
    ))  # fmt: skip
    for by in ("day", "run"):
        yield from ((f"{kind} --by {by}", kind, {"by": by}) for kind in sorted(AGGREGATE_KINDS))
        yield f"traffic --by {by} --device", "traffic", {"by": by, "device": device}
    yield "traffic --by day --run", "traffic", {"by": "day", "run": some_run}
    yield from (
        ("updates --where outcome=lost", "updates", {"where": ["outcome=lost"]}),
        ("updates --where staleness>0", "updates", {"where": ["staleness>0"]}),
        ("updates --run --where staleness>3", "updates", {"run": some_run, "where": ["staleness>3"]}),
        ("updates --device --where throttled!=ok", "updates", {"device": device, "where": ["throttled!=ok"]}),
        ("rounds --run --where accuracy<0.5", "rounds", {"run": some_run, "where": ["accuracy<0.5"]}),
        ("dropouts --where num_lost>0", "dropouts", {"where": ["num_lost>0"]}),
        ("slow --where throttled=throttled", "slow", {"where": ["throttled=throttled"]}),
        ("events --where kind=device-late", "events", {"where": ["kind=device-late"]}),
        ("heartbeats --device --where", "heartbeats", {"device": device, "where": ["temperature_c>60"]}),
        ("rounds of a device that is not there", "rounds", {"device": "ghost"}),
    )


class Times:
    """Seconds on the clock and of the processor, by question."""

    def __init__(self) -> None:
        self._took: dict[str, list[tuple[float, float]]] = {}

    @contextlib.contextmanager
    def of(self, label: str) -> Iterator[None]:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        yield
        took = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        self._took.setdefault(label, []).append(took)

    def rows(self) -> list[dict[str, Any]]:
        """Returns medians and 95th percentiles in milliseconds."""
        found = []
        for label, took in self._took.items():
            (p50, cpu_p50), (p95, cpu_p95) = np.percentile(np.array(took) * 1e3, (50, 95), axis=0)
            figures = {"p50": p50, "p95": p95, "cpu_p50": cpu_p50, "cpu_p95": cpu_p95}
            found.append({"question": label, **{name: round(float(value), 2) for name, value in figures.items()}})
        return found


def measure(path: Path, size: Size, repeat: int) -> list[dict[str, Any]]:
    """Returns what every question took."""
    times = Times()
    with Store.open(path, read_only=True) as store:
        for _, kind, filters in questions(size, 0):  # each statement is built once in the life of a coordinator
            read_history(store, kind, limit=LIMIT, **filters)
        for number in range(repeat):
            for label, kind, filters in questions(size, number):
                with times.of(label):
                    read_history(store, kind, limit=LIMIT, **filters)
            with times.of("why RUN ROUND"):
                run = f"run-{number * 37 % size.num_runs:04d}"
                diagnose_round(get_round_details(store, run, 1 + number % size.rounds_per_run))
        after: str | None = ""
        for _ in range(repeat):
            with times.of("updates, a page of 1000"):
                _, after = read_history_page(store, "updates", after or "", limit=1000)
    return times.rows()


def writing(directory: Path, *, with_sums: bool) -> float:
    """Returns how many updates a second a ledger writes into a new store, ten rounds of ten devices at once."""
    path = directory / f"written-{with_sums}.db"
    for old in directory.glob(f"{path.name}*"):
        old.unlink()
    with contextlib.nullcontext() if with_sums else _no_sums(), Store.open(path) as store:
        store.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=7, submitted_at=BEGIN)
        ledger = HistoryWriter(store, "r")
        began = time.perf_counter()
        for number in range(WRITTEN_ROUNDS):
            _take_round(ledger, number + 1)
            ledger.publish()
            if number % 10 == 9:
                ledger.flush()
        return WRITTEN_ROUNDS * 10 / (time.perf_counter() - began)


def _take_round(ledger: HistoryWriter, number: int) -> None:
    at = BEGIN + number
    ids = {f"a-{number}-{place}": f"pi-{place:02d}" for place in range(10)}
    ledger.add_dispatches(
        [AssignmentRow(assignment_id=i, device_id=d, round=number, base_version=number, dispatched_at=at)
         for i, d in ids.items()],
    )  # fmt: skip
    ledger.add_updates(
        [UpdateRow(assignment_id=i, device_id=d, round=number, base_version=number, outcome=UpdateStatus.USED,
                   applied_version=number, staleness=0, iterations=9, num_examples=9, bytes_up=9, bytes_down=9,
                   compute_s=1.0, send_s=1.0, wait_s=1.0, loss=1.0, received_at=at, ended_at=at)
         for i, d in ids.items()],
    )  # fmt: skip
    ledger.close_round(number, version=number, at=at + 1)


@contextlib.contextmanager
def _no_sums() -> Iterator[None]:
    """Takes the keeping of sums out of the store while it lasts."""

    @contextlib.contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    kept = runs.update_totals
    runs.update_totals = nothing
    try:
        yield
    finally:
        runs.update_totals = kept


def _table(figures: list[dict[str, Any]]) -> str:
    width = max(len(row["question"]) for row in figures)
    lines = [f"{'question':<{width}}  p50 ms  p95 ms  cpu p50  cpu p95"]
    for row in figures:
        mark = "" if row["p95"] < TARGET_MS else "  over the target"
        figures_text = f"{row['p50']:6.1f}  {row['p95']:6.1f}  {row['cpu_p50']:7.1f}  {row['cpu_p95']:7.1f}"
        lines.append(f"{row['question']:<{width}}  {figures_text}{mark}")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
