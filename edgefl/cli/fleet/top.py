"""`edgefl top`: the fleet, its run, its events and what needs attention, in a terminal of 80 by 24 and more.

Reads the JSON API every other second, like `devices list` and `run watch`. This module reads and formats without
Textual; `top_app` draws.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from edgefl.cli.output import format_value
from edgefl.cli.sources import make_path
from edgefl.client.fleet import TERMINAL_STATUSES
from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import EVALUATOR_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgefl.core.types import Json

INTERVAL_S = 1.5
NUM_RUNS, NUM_EVENTS, NUM_POINTS = 20, 200, 160
PACE_ROUNDS = 20
"""Rounds of which the time that is left is estimated."""
PRESENCE_ORDER = ("gone", "late", "offline", "draining", "online", "never seen")
_BLOCKS = " ▁▂▃▄▅▆▇█"


class ApiClient(Protocol):
    """The part of the coordinator's client that is used."""

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Json: ...
    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """What the API said at one moment.

    Attributes:
        access: fleet, role, and whether this user `acts`.
        devices: rows of boards, without the coordinator's evaluator and without unknown values, worst first.
        runs: the newest first; those that are not over with what they wait for.
        run: the row of the run that is shown, with its settings; None before the first.
        rounds: at most about `NUM_POINTS` of its closed rounds.
        spans: its devices' newest assignments.
        events: oldest first.
        attention: what an owner should look at, the worst first.
    """

    access: Json
    devices: list[Json]
    runs: list[Json]
    run: Json | None
    rounds: list[Json]
    spans: list[Json]
    events: list[Json]
    attention: list[Json]


@dataclass(slots=True)
class FleetReader:
    """Reads snapshots; the work of one is bounded by devices and `NUM_*`, not by the history's length."""

    client: ApiClient
    selected_run: str | None = None
    clock: Callable[[], float] = time.time
    _rounds_key: tuple[Any, ...] = ()
    _rounds: tuple[list[Json], list[Json]] = ([], [])

    def read(self) -> FleetSnapshot:
        """Returns a snapshot; raises what the client raises."""
        from edgefl.coordinator.api.feed_state import list_attention  # noqa: PLC0415 fast start

        access = self.client.get("/edgefl/v1/access")
        devices = sorted(map(_clean_device, self.client.get("/edgefl/v1/devices")["rows"]), key=_rank_device)
        devices = [row for row in devices if row["device_id"] != EVALUATOR_NAME]
        runs = self._read_runs()
        run = self._select_run(runs)
        rounds, spans = self._read_rounds(run)
        events = self.client.get("/edgefl/v1/history/events", {"limit": NUM_EVENTS})["rows"]
        attention = list_attention(devices, [{"reason": None, **row} for row in runs], self.clock())
        return FleetSnapshot(
            access=access, devices=devices, runs=runs, run=run, rounds=rounds, spans=spans, events=events,
            attention=attention,
        )  # fmt: skip

    def _read_runs(self) -> list[Json]:
        rows = self.client.get("/edgefl/v1/history/runs", {"limit": NUM_RUNS})["rows"]
        rows.sort(key=lambda row: row["submitted_at"], reverse=True)
        return [self._read_run(row) if row["status"] not in TERMINAL_STATUSES else row for row in rows]

    def _read_run(self, row: Json) -> Json:
        return {**row, **self.client.get(make_path("runs", row["run_id"]))}

    def _select_run(self, runs: Sequence[Json]) -> Json | None:
        """Returns the selected run, else the oldest one that goes on, else the newest, with its settings."""
        chosen = next((row for row in runs if row["run_id"] == self.selected_run), None)
        live = [row for row in runs if row["status"] not in {*TERMINAL_STATUSES, "queued"}]
        if chosen is None and runs:
            chosen = live[-1] if live else runs[0]
        return chosen if chosen is None or "config" in chosen else self._read_run(chosen)

    def _read_rounds(self, run: Json | None) -> tuple[list[Json], list[Json]]:
        if run is None:
            return [], []
        key = (run["run_id"], run["rounds"], run["status"], run.get("accuracy"))
        if key != self._rounds_key:
            path = make_path("runs", run["run_id"])
            curve = self.client.get(f"{path}/curve", {"points": NUM_POINTS})["rows"]
            self._rounds = curve, self.client.get(f"{path}/spans", {"rounds": 3})["rows"]
            self._rounds_key = key
        return self._rounds


def _clean_device(row: Json) -> Json:
    known = {name: value for name, value in row.items() if value not in (None, "", "ok")}
    if known.get("last_seen_at") and known["presence"] in {"gone", "offline"}:
        known["since"] = known["last_seen_at"]
    return known


def _rank_device(row: Json) -> tuple[bool, int, str]:
    presence = row["presence"]
    order = PRESENCE_ORDER.index(presence) if presence in PRESENCE_ORDER else len(PRESENCE_ORDER)
    return not (row.get("problem") or row.get("cloned")), order, row["device_id"]


@dataclass(slots=True)
class FleetPoller:
    """Thread that reads a snapshot every `INTERVAL_S`; a program that ends does not wait for it.

    Attributes:
        on_snapshot: called in the thread, with each snapshot.
        on_failure: called in the thread, with the error and since when (unix seconds) it lasts.
    """

    reader: FleetReader
    on_snapshot: Callable[[FleetSnapshot], None]
    on_failure: Callable[[Exception, float], None]
    interval_s: float = INTERVAL_S
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._poll, name="top", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def refresh(self) -> None:
        """Lets the next snapshot be read now."""
        self._wake.set()

    def _poll(self) -> None:
        failed_at: float | None = None
        while not self._stop.is_set():
            self._wake.clear()
            try:
                snapshot = self.reader.read()
            except (EdgeflError, KeyError, TypeError, ValueError) as error:  # what answers may be no coordinator
                failed_at = failed_at or self.reader.clock()
                self.on_failure(error, failed_at)
            else:
                failed_at = None
                self.on_snapshot(snapshot)
            self._wake.wait(self.interval_s)


def get_goal(run: Json) -> int | None:
    """Returns a run's goal in rounds."""
    goal = (run.get("config") or {}).get("run", {}).get("rounds")
    return goal if isinstance(goal, int) else None


def compute_seconds_left(run: Json, rounds: Sequence[Json]) -> float | None:
    """Returns the seconds until a run's last round, by the pace of its newest ones; None where it is not known."""
    goal, newest = get_goal(run), list(rounds)[-PACE_ROUNDS:]
    if goal is None or run["status"] != "running" or len(newest) < 2:
        return None
    passed_s, passed = newest[-1]["closed_at"] - newest[0]["closed_at"], newest[-1]["round"] - newest[0]["round"]
    return max(0, goal - run["rounds"]) * passed_s / passed if passed > 0 else None


def format_duration(seconds: float) -> str:
    """Returns a duration in its one or two largest units."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for size, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name}" + (f" {rest} {below_name}" if rest else "")
    return f"{whole} s"


def draw_bar(fraction: float, width: int) -> tuple[str, str]:
    """Returns the full and the empty part of a bar."""
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return "━" * full, "─" * (width - full)


def draw_curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Returns the lines of a curve, drawn with blocks of eighths.

    Args:
        values: finite; more of them than `width` are averaged, fewer are stretched.
        width: characters in a line.
        height: lines.
    """
    if not values:
        return [" " * width] * height
    columns = []
    for column in range(width):
        begin = column * len(values) // width
        end = max(begin + 1, (column + 1) * len(values) // width)
        columns.append(sum(values[begin:end]) / (end - begin))
    low, high = min(columns), max(columns)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    eighths = [1 + round((value - low) * scale) for value in columns]
    return ["".join(_BLOCKS[min(max(count - 8 * row, 0), 8)] for count in eighths) for row in reversed(range(height))]


def matches(words: Iterable[object], text: str) -> bool:
    """Returns whether one of the words has the text that is filtered for, in any case."""
    return not text or any(text.casefold() in str(word).casefold() for word in words)


def list_facts(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns names and values of a row, with those of its tables."""
    facts = []
    for name, value in row.items():
        if isinstance(value, dict) and value:
            facts += list_facts(value, f"{prefix}{name}.")
        elif value not in (None, "", [], {}):
            facts.append((f"{prefix}{name}", format_value(name, value)))
    return facts
