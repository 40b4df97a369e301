"""The fleet as a run sees it, as a book: whatever is written into it, whoever writes.

The live view writes what it hears, and a run that is taken up again what its journal says; both give the same view.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from edgefl.coordinator.fleet.roster import smoothed
from edgefl.types import Assignment, DeviceInfo, Progress, Role, Speed, UpdateMetrics, Vitals


class FleetBook:
    """Implements `FleetView`. `busy` holds training only, evaluations never keep a device from work.

    Speeds are those of this run: another model or batch would say nothing.
    """

    def __init__(self, vitals: Mapping[str, Vitals] | None = None) -> None:
        self._now_s = 0.0
        self._devices: dict[str, DeviceInfo] = {}
        self._idle: list[str] = []
        self._busy: dict[str, list[str]] = {}
        self._speeds: dict[str, Speed] = {}
        self._progress: dict[str, Progress] = {}
        self._vitals: Mapping[str, Vitals] = {} if vitals is None else vitals

    @property
    def now_s(self) -> float:
        return self._now_s

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
        return self._vitals

    def begin(self, now_s: float) -> None:
        """Says what time it is, for as long as this turn lasts."""
        self._now_s = now_s

    def put(self, device_id: str, info: DeviceInfo | None) -> None:
        """Writes down a device as it is now; None for one that may not work any more."""
        if info is not None:
            self._devices[device_id] = info
        else:
            self._devices.pop(device_id, None)
        self._place(device_id)

    def give(self, order: Assignment) -> None:
        """Notes that a device has got work."""
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

    def restore(self, speeds: Mapping[str, Speed], progress: Mapping[str, Progress]) -> None:
        """Writes down what was measured before."""
        self._speeds, self._progress = dict(speeds), dict(progress)

    def take_over(self, other: FleetBook) -> None:
        """Goes on with what another book says of work, speeds and progress; the devices are this book's own."""
        self._busy = {device_id: list(names) for device_id, names in other.busy.items()}
        self._speeds, self._progress = dict(other.speeds), dict(other.progress)
        for device_id in [*self._devices]:
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


class SeenVitals(Mapping[str, Vitals]):
    """How boards are, remembered as it was seen: the same all through a turn, and told once when it is new.

    Args:
        source: how they are now.
    """

    def __init__(self, source: Mapping[str, Vitals]) -> None:
        self._source = source
        self._known: dict[str, Vitals | None] = {}
        self._looked: set[str] = set()
        self._news: dict[str, Vitals | None] = {}

    def begin(self, known: Mapping[str, Vitals | None] | None = None) -> None:
        """Begins another turn; with `known` that was told before."""
        self._looked.clear()
        if known is not None:
            self._known = dict(known)

    def take_news(self) -> dict[str, Vitals | None]:
        """Returns what was seen since the last time and had not been told."""
        news, self._news = self._news, {}
        return news

    @property
    def known(self) -> Mapping[str, Vitals | None]:
        return self._known

    def __getitem__(self, device_id: str) -> Vitals:
        if device_id not in self._looked:
            self._looked.add(device_id)
            found = self._source.get(device_id)
            if device_id not in self._known or self._known[device_id] != found:
                self._known[device_id] = self._news[device_id] = found
        vitals = self._known[device_id]
        if vitals is None:
            raise KeyError(device_id)
        return vitals

    def __iter__(self) -> Iterator[str]:
        return (device_id for device_id in list(self._source) if device_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
