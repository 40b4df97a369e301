"""State of the page as plain rows: devices, runs, rounds of the live run, events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgefl import DISTRIBUTION
from edgefl.coordinator.fleet.membership import get_signed_state, list_old_signatures
from edgefl.coordinator.fleet.presence import PRESENT_STATES
from edgefl.coordinator.fleet.registry import DeviceRegistry, find_problem
from edgefl.coordinator.runs.stalls import COMPILING, PAUSED, WAITING, IdleRuns
from edgefl.core.claims import format_drift, parse_drift, parse_label_page
from edgefl.core.conditions import format_blocker
from edgefl.core.protocol import EVALUATOR_NAME, Heartbeat
from edgefl.core.types import Json
from edgefl.storage.queries.dashboard import (
    find_newest_rounds,
    get_device_timeline,
    list_closed_rounds,
    list_events_after,
    list_run_summaries,
)
from edgefl.storage.store import Store

NUM_RUNS = 200
NUM_EVENTS = 30
NUM_LATE_ROUNDS = 8
"""Number of closed rounds that are read again: their evaluations arrive later."""
MAX_ROUNDS = 200
"""After a longer gap the page reloads the course of the run."""
MAX_SPAN_ROUNDS = 12
MAX_ATTENTION = 30
HOT_C = 80.0
MAX_VERSION_LENGTH = 40
_PROBLEM_PRESENCES = {"gone": "bad", "late": "warn", "offline": "warn"}
_LIVE_STATUSES = frozenset({"running", "stopping", PAUSED, WAITING, COMPILING})
# Rounded, so that a healthy idle device causes no changes.
_HEALTH_STEPS = {
    "temperature_c": 0.5,
    "cpu_fraction": 0.05,
    "memory_fraction": 0.02,
    "battery_fraction": 0.01,
    "power_w": 0.1,
}


@dataclass(slots=True)
class FeedState:
    """State shown by the page; `pop_changes` returns its changes as rows of one message."""

    store: Store
    registry: DeviceRegistry
    idle_runs: IdleRuns = field(default_factory=IdleRuns)
    devices: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    attention: list[Json] = field(default_factory=list)
    last_event: int = 0
    live_run: str | None = None
    rounds: dict[int, Json] = field(default_factory=dict)
    last_round: int = -1
    clock: Callable[[], float] = time.time

    def snapshot(self) -> Json:
        """Returns the whole state, for a new page, which loads the course of a run by itself."""
        return {
            "devices": list(self.devices.values()),
            "runs": list(self.runs.values()),
            "events": self.events,
            "attention": self.attention,
            "live_run": self.live_run,
        }

    def reset(self, last_seen: dict[str, float | None]) -> None:
        """Reads the whole state again; `last_seen` is when devices were last seen, in Unix seconds."""
        self.devices = {}
        for info in self.registry.list_devices():
            if (row := make_device_row(self.registry, info.device_id)) is not None:
                self.devices[info.device_id] = _add_since(row, last_seen.get(info.device_id))
        self.runs = self._list_run_summaries()
        self.events = list_events_after(self.store, 0, limit=NUM_EVENTS)
        self.last_event = self.events[-1]["id"] if self.events else 0
        self.attention = list_attention(self.devices.values(), self.runs.values(), self.clock())
        self._follow_run(_find_live_run(self.runs.values()))

    def pop_changes(self, changed: dict[str, float]) -> Json:
        """Returns the changes since the last call, and updates the state; empty if there are none.

        Args:
            changed: devices with events, and when, in Unix seconds.
        """
        changes: Json = {**self._pop_device_changes(changed), **self._pop_run_changes(), **self._pop_events()}
        attention = list_attention(self.devices.values(), self.runs.values(), self.clock())
        if attention != self.attention:
            self.attention = changes["attention"] = attention
        live_run = _find_live_run(self.runs.values())
        courses = self._pop_round_changes()
        if live_run != self.live_run:
            # Its earlier rounds are changes to pages that know it already.
            self.live_run, self.rounds, self.last_round = live_run, {}, -1
            courses += self._pop_round_changes()
            changes["live_run"] = live_run
        return {**changes, "courses": courses} if courses else changes

    def _pop_device_changes(self, changed: dict[str, float]) -> Json:
        rows, removed = [], []
        for device_id, at in changed.items():
            row = make_device_row(self.registry, device_id)
            previous = self.devices.get(device_id)
            if row is None:
                if previous is not None:
                    del self.devices[device_id]
                    removed.append(device_id)
                continue
            has_same_presence = previous is not None and previous["presence"] == row["presence"]
            _add_since(row, previous.get("since", at) if previous is not None and has_same_presence else at)
            if row != previous:
                self.devices[device_id] = row
                rows.append(row)
        return {name: value for name, value in (("devices", rows), ("removed", removed)) if value}

    def _pop_run_changes(self) -> Json:
        summaries = self._list_run_summaries()
        changed = [row for run_id, row in summaries.items() if self.runs.get(run_id) != row]
        self.runs = summaries
        return {"runs": changed} if changed else {}

    def _list_run_summaries(self) -> dict[str, Json]:
        return {row["run_id"]: self.idle_runs.apply_to(row) for row in list_run_summaries(self.store, limit=NUM_RUNS)}

    def _pop_events(self) -> Json:
        rows = list_events_after(self.store, self.last_event, limit=NUM_EVENTS)
        if not rows:
            return {}
        self.last_event = rows[-1]["id"]
        self.events = [*self.events, *rows][-NUM_EVENTS:]
        return {"events": rows}

    def _pop_round_changes(self) -> list[Json]:
        if self.live_run is None:
            return []
        rows = list_closed_rounds(self.store, self.live_run, after=max(-1, self.last_round - NUM_LATE_ROUNDS))
        changed = [row for row in rows if self.rounds.get(row["round"]) != row]
        if not changed:
            return []
        self.rounds = {row["round"]: row for row in rows[-NUM_LATE_ROUNDS:]}
        previous_round, self.last_round = self.last_round, rows[-1]["round"]
        course: Json = {"run": self.live_run}
        if len(changed) > MAX_ROUNDS:
            return [{**course, "reload": True}]
        course["rows"] = changed
        if self.last_round > previous_round:
            first = max(previous_round + 1, self.last_round - MAX_SPAN_ROUNDS + 1)
            course["spans"] = get_device_timeline(self.store, self.live_run, first, self.last_round)
        return [course]

    def _follow_run(self, live_run: str | None) -> None:
        self.live_run, self.rounds, self.last_round = live_run, {}, -1
        if live_run is not None and (newest := find_newest_rounds(self.store, live_run, NUM_LATE_ROUNDS)) is not None:
            rows = list_closed_rounds(self.store, live_run, after=newest[0] - 1)
            self.rounds = {row["round"]: row for row in rows}
            self.last_round = rows[-1]["round"]


def make_device_row(registry: DeviceRegistry, device_id: str) -> Json | None:
    """Returns a device's row without unknown values; None if it is not in the fleet."""
    info = registry.get_device(device_id)
    if info is None:
        return None
    state, heartbeat = registry.get_state(device_id), registry.get_heartbeat(device_id)
    drift = parse_drift(info.capabilities)
    row: Json = {
        "device_id": device_id,
        "presence": registry.format_presence(device_id),
        "problem": find_problem(info),
        "drift": format_drift(drift),
        "drifted": any(claim.is_large for claim in drift.values()),
        "label_page": parse_label_page(info.capabilities) if state in PRESENT_STATES else None,
        "role": str(info.role),
        "groups": list(info.groups),
        "tasks": list(info.tasks),
        "drained": registry.is_drained(device_id),
        "blocked": format_blocker(blocker) if (blocker := registry.get_reported_blocker(device_id)) else None,
        "cloned": registry.get_clone_warning(device_id),
        "seconds_per_iteration": _round_significant(registry.get_seconds_per_iteration(device_id)),
        "model": info.capabilities.get("model") or info.capabilities.get("family"),
        "version": _get_version(info.capabilities),
        "signed": get_signed_state(info.capabilities),
        "examples": sum(info.examples.values()),
        "built_in": device_id == EVALUATOR_NAME,
    }
    if heartbeat is not None and state in PRESENT_STATES:
        row |= _make_health_row(heartbeat)
    return {name: value for name, value in row.items() if value not in (None, False, [], ())}


def _get_version(capabilities: Mapping[str, Any]) -> str | None:
    """Returns a device's version of edgefl, as it reports it."""
    libraries = capabilities.get("libraries")
    version = libraries.get(DISTRIBUTION) if isinstance(libraries, Mapping) else None
    return version[:MAX_VERSION_LENGTH] if isinstance(version, str) else None


def list_attention(devices: Collection[Json], runs: Iterable[Json], now: float) -> list[Json]:
    """Returns what an owner should look at, the worst first: `level` (bad or warn), `text`, a device or run, a time.

    At most `MAX_ATTENTION` rows; the last then says how many more there are.
    """
    rows = [
        {"run_id": run["run_id"], "level": "bad" if run["status"] == PAUSED else "warn", "text": run["reason"]}
        for run in runs
        if run["status"] in _LIVE_STATUSES - {COMPILING} and run["reason"]
    ]
    signed = {row["device_id"]: row["signed"] for row in devices if row.get("signed")}
    rows += [
        {"device_id": device_id, "level": "warn", "text": text}
        for device_id, text in list_old_signatures(signed, now).items()
    ]
    for device in devices:
        rows += [
            {"device_id": device["device_id"], "level": level, "text": text, "at": device.get("since")}
            for level, text in _list_problems(device)
        ]
    rows.sort(key=lambda row: row["level"])
    if len(rows) > MAX_ATTENTION:
        more = {"level": "warn", "text": f"{len(rows) - MAX_ATTENTION + 1} more"}
        rows = [*rows[: MAX_ATTENTION - 1], more]
    return rows


def _list_problems(device: Json) -> Iterator[tuple[str, str]]:
    """Yields the problems of a device, each with its level."""
    if device.get("cloned"):
        yield "bad", device["cloned"]
    if device.get("problem"):
        yield "bad", device["problem"]
    if device.get("drifted"):
        yield "warn", f"data has drifted: {device['drift']}"
    if device["presence"] in _PROBLEM_PRESENCES:
        yield _PROBLEM_PRESENCES[device["presence"]], device["presence"]
    if device.get("throttled"):
        yield "warn", f"throttled: {device['throttled'].replace(',', ', ')}"
    if device.get("temperature_c", 0.0) >= HOT_C:
        yield "warn", f"hot: {device['temperature_c']:.0f} °C"


def _make_health_row(heartbeat: Heartbeat) -> Json:
    rounded: dict[str, Any] = {}
    for name, step in _HEALTH_STEPS.items():
        value = getattr(heartbeat, name)
        is_valid = value is not None and math.isfinite(value / step)  # a device may report 1e308
        rounded[name] = round(round(value / step) * step, 2) if is_valid else None
    throttled = heartbeat.throttled if heartbeat.throttled not in (None, "ok") else None
    run = heartbeat.run if heartbeat.assignment or heartbeat.iteration is not None else None
    work = {"run": run, "iteration": heartbeat.iteration}
    return {**rounded, **work, "throttled": throttled, "deployed": heartbeat.model}


def _add_since(row: Json, at: float | None) -> Json:
    """Adds since when a device is absent; for a present one it would change all the time."""
    if row["presence"] not in set(map(str, PRESENT_STATES)) and at is not None:
        row["since"] = round(at, 1)
    return row


def _round_significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")


def _find_live_run(runs: Iterable[Json]) -> str | None:
    return next((row["run_id"] for row in runs if row["status"] in _LIVE_STATUSES), None)
