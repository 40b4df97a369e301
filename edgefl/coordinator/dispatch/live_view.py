"""The fleet as a run sees it, kept up to date device by device: reading it never looks at all of them."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence

from edgefl.coordinator.dispatch.participants import FleetRun, Participants
from edgefl.coordinator.fleet.presence import Transition
from edgefl.coordinator.fleet.roster import Added, Changed, Removed, Roster, RosterEvent, smoothed
from edgefl.types import Assignment, DeviceInfo, Progress, Role, Speed, UpdateMetrics, Vitals


class LiveView:
    """Implements `FleetView`: what it gives stays as it is until `refresh`, but for what the run itself gives out.

    `busy` holds training only, evaluations never keep a device from work. Everything but the listening is done by the
    thread of the run. Speeds are those of this run: another model or batch would say nothing.
    """

    def __init__(
        self,
        run: FleetRun,
        roster: Roster,
        clock: Callable[[], float],
        *,
        admits: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._roster, self._clock, self._admits = roster, clock, admits
        self._participants = Participants(run)
        self._devices: dict[str, DeviceInfo] = {}
        self._idle: list[str] = []
        self._busy: dict[str, list[str]] = {}
        self._speeds: dict[str, Speed] = {}
        self._progress: dict[str, Progress] = {}
        self._stale: set[str] = set()
        self._lock = threading.Lock()
        self.close = roster.listen(self._heard)
        for info in roster.workers():
            self._look_at(info.device_id)

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        return self._devices

    @property
    def idle(self) -> Sequence[str]:
        return self._idle

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._busy

    @property
    def speeds(self) -> Mapping[str, Speed]:
        return self._speeds

    @property
    def progress(self) -> Mapping[str, Progress]:
        return self._progress

    @property
    def vitals(self) -> Mapping[str, Vitals]:
        return self._roster.vitals

    def refresh(self) -> LiveView:
        """Takes in what became of devices since the last time, and returns itself."""
        with self._lock:
            stale, self._stale = self._stale, set()
        for device_id in stale:
            self._look_at(device_id)
        return self

    def accepts(self, device_id: str) -> bool:
        """Returns whether a trainer is there and meant by the run."""
        info = self._roster.worker(device_id)
        return info is not None and info.role == Role.TRAINER and self._participants.accepts(info)

    def let_in(self, device_id: str) -> None:
        """Looks again at a device that may work now."""
        with self._lock:
            self._stale.add(device_id)

    def give(self, order: Assignment) -> None:
        """Notes that a device has got work."""
        self._participants.begin(self._devices)
        self._busy.setdefault(order.device_id, []).append(order.assignment_id)
        self._place(order.device_id)

    def settle(self, order: Assignment) -> None:
        """Notes that nobody waits for this work any more."""
        outstanding = self._busy[order.device_id]
        outstanding.remove(order.assignment_id)
        if not outstanding:
            del self._busy[order.device_id]
        report = self._progress.get(order.device_id)
        if report is not None and report.assignment_id == order.assignment_id:
            del self._progress[order.device_id]
        self._place(order.device_id)

    def note_progress(self, progress: Progress) -> None:
        self._progress[progress.device_id] = progress

    def note_speed(self, device_id: str, metrics: UpdateMetrics) -> None:
        """Takes what an update says of the speed of its device."""
        if metrics.iterations:
            before = self._speeds.get(device_id, Speed()).seconds_per_iteration
            seconds = smoothed(before, metrics.compute_s / metrics.iterations)
            self._speeds[device_id] = Speed(seconds_per_iteration=seconds)

    def _heard(self, event: RosterEvent) -> None:
        if isinstance(event, Transition | Added | Changed | Removed):
            with self._lock:
                self._stale.add(event.device_id)

    def _look_at(self, device_id: str) -> None:
        info = self._roster.worker(device_id)
        is_in = info is not None and (info.role == Role.EVALUATOR or self._admits(device_id))
        if info is not None and is_in and self._participants.accepts(info):
            self._devices[device_id] = info
        else:
            self._devices.pop(device_id, None)
        self._place(device_id)

    def _place(self, device_id: str) -> None:
        """Puts a device among the idle ones or takes it out, as it should be."""
        info = self._devices.get(device_id)
        belongs = info is not None and info.role == Role.TRAINER and device_id not in self._busy
        place = bisect_left(self._idle, device_id)
        is_there = place < len(self._idle) and self._idle[place] == device_id
        if is_there and not belongs:
            del self._idle[place]
        elif belongs and not is_there:
            insort(self._idle, device_id)
