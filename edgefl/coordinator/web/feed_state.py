"""What the page shows at a glance, as plain rows: devices, runs, the rounds of the run that goes on, events."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edgefl.coordinator.fleet.presence import PRESENT
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.runs.pauses import PAUSED, Pauses
from edgefl.protocol import Heartbeat
from edgefl.storage.curves import course
from edgefl.storage.news import events_after, run_heads
from edgefl.storage.spans import newest_rounds, spans
from edgefl.storage.store import Store
from edgefl.types import Json

NUM_RUNS = 200
NUM_EVENTS = 30
LATE_ROUNDS = 8
"""So many rounds are looked at again after they have closed: their evaluations come later."""
MAX_ROUNDS = 200
"""After a longer gap the page is told to load the course of the run again."""
SPAN_ROUNDS = 12
_LIVE = frozenset({"running", "stopping", PAUSED})
# Rounded, so that a healthy device that does nothing new is not news.
_VITALS = {
    "temperature_c": 0.5,
    "cpu_fraction": 0.05,
    "memory_fraction": 0.02,
    "battery_fraction": 0.01,
    "power_w": 0.1,
}


@dataclass(slots=True)
class FeedState:
    """All that is shown now; `take` turns what has changed since into the rows of one message."""

    store: Store
    roster: Roster
    pauses: Pauses = field(default_factory=Pauses)
    devices: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    last_event: int = 0
    live_run: str | None = None
    rounds: dict[int, Json] = field(default_factory=dict)
    last_round: int = -1

    def whole(self) -> Json:
        """Returns everything, for a page that was just opened; it loads the course of a run by itself."""
        return {
            "devices": list(self.devices.values()),
            "runs": list(self.runs.values()),
            "events": self.events,
            "live_run": self.live_run,
        }

    def begin(self, last_seen: dict[str, float | None]) -> None:
        """Reads everything anew; `last_seen` says when devices were last heard, in unix seconds."""
        self.devices = {}
        for info in self.roster.known():
            if (row := device_row(self.roster, info.device_id)) is not None:
                self.devices[info.device_id] = _seen(row, last_seen.get(info.device_id))
        self.runs = self._heads()
        self.events = events_after(self.store, 0, limit=NUM_EVENTS)
        self.last_event = self.events[-1]["id"] if self.events else 0
        self._follow(_live_run(self.runs.values()))

    def take(self, changed: dict[str, float]) -> Json:
        """Returns what is new, and remembers it; empty when nothing is.

        Args:
            changed: devices that something was heard of, and when.
        """
        news: Json = {**self._take_devices(changed), **self._take_runs(), **self._take_events()}
        live_run = _live_run(self.runs.values())
        courses = self._take_rounds()
        if live_run != self.live_run:
            # Whatever it has done before it was seen here is news to pages that know it already.
            self.live_run, self.rounds, self.last_round = live_run, {}, -1
            courses += self._take_rounds()
            news["live_run"] = live_run
        return {**news, "courses": courses} if courses else news

    def _take_devices(self, changed: dict[str, float]) -> Json:
        rows, gone = [], []
        for device_id, at in changed.items():
            row = device_row(self.roster, device_id)
            before = self.devices.get(device_id)
            if row is None:
                if before is not None:
                    del self.devices[device_id]
                    gone.append(device_id)
                continue
            same = before is not None and before["presence"] == row["presence"]
            _seen(row, before.get("since", at) if before is not None and same else at)
            if row != before:
                self.devices[device_id] = row
                rows.append(row)
        return {name: value for name, value in (("devices", rows), ("removed", gone)) if value}

    def _take_runs(self) -> Json:
        now = self._heads()
        changed = [row for run_id, row in now.items() if self.runs.get(run_id) != row]
        self.runs = now
        return {"runs": changed} if changed else {}

    def _heads(self) -> dict[str, Json]:
        return {row["run_id"]: self.pauses.over(row) for row in run_heads(self.store, limit=NUM_RUNS)}

    def _take_events(self) -> Json:
        rows = events_after(self.store, self.last_event, limit=NUM_EVENTS)
        if not rows:
            return {}
        self.last_event = rows[-1]["id"]
        self.events = [*self.events, *rows][-NUM_EVENTS:]
        return {"events": rows}

    def _take_rounds(self) -> list[Json]:
        if self.live_run is None:
            return []
        rows = course(self.store, self.live_run, after=max(-1, self.last_round - LATE_ROUNDS))
        changed = [row for row in rows if self.rounds.get(row["round"]) != row]
        if not changed:
            return []
        self.rounds = {row["round"]: row for row in rows[-LATE_ROUNDS:]}
        before, self.last_round = self.last_round, rows[-1]["round"]
        news: Json = {"run": self.live_run}
        if len(changed) > MAX_ROUNDS:
            return [{**news, "reload": True}]
        news["rows"] = changed
        if self.last_round > before:
            first = max(before + 1, self.last_round - SPAN_ROUNDS + 1)
            news["spans"] = spans(self.store, self.live_run, first, self.last_round)
        return [news]

    def _follow(self, live_run: str | None) -> None:
        self.live_run, self.rounds, self.last_round = live_run, {}, -1
        if live_run is not None and (newest := newest_rounds(self.store, live_run, LATE_ROUNDS)) is not None:
            rows = course(self.store, live_run, after=newest[0] - 1)
            self.rounds = {row["round"]: row for row in rows}
            self.last_round = rows[-1]["round"]


def device_row(roster: Roster, device_id: str) -> Json | None:
    """Returns what the page shows of one device, without what is not known; None when it is not in the fleet."""
    info = roster.info(device_id)
    if info is None:
        return None
    state, heartbeat = roster.state(device_id), roster.heartbeat(device_id)
    row: Json = {
        "device_id": device_id,
        "presence": str(state) if state is not None else "never seen",
        "role": str(info.role),
        "groups": list(info.groups),
        "tasks": list(info.tasks),
        "drained": roster.is_drained(device_id),
        "cloned": roster.cloned(device_id),
        "seconds_per_iteration": _significant(roster.speed_of(device_id)),
        "model": info.capabilities.get("model"),
    }
    if heartbeat is not None and state in PRESENT:
        row |= _vitals(heartbeat)
    return {name: value for name, value in row.items() if value not in (None, False, [], ())}


def _vitals(heartbeat: Heartbeat) -> Json:
    rounded: dict[str, Any] = {}
    for name, step in _VITALS.items():
        value = getattr(heartbeat, name)
        is_told = value is not None and math.isfinite(value / step)  # a board may say 1e308
        rounded[name] = round(round(value / step) * step, 2) if is_told else None
    throttled = heartbeat.throttled if heartbeat.throttled not in (None, "ok") else None
    run = heartbeat.run if heartbeat.assignment or heartbeat.iteration is not None else None
    work = {"run": run, "iteration": heartbeat.iteration}
    return {**rounded, **work, "throttled": throttled, "deployed": heartbeat.model}


def _seen(row: Json, at: float | None) -> Json:
    """Adds since when a device is not there; when one that is there was heard would be news all the time."""
    if row["presence"] not in set(map(str, PRESENT)) and at is not None:
        row["since"] = round(at, 1)
    return row


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")


def _live_run(runs: Iterable[Json]) -> str | None:
    return next((row["run_id"] for row in runs if row["status"] in _LIVE), None)
