"""The faulty fleet as the live one of a coordinator, whose journal keeps what the loop sees of it."""

from __future__ import annotations

from collections.abc import Sequence

from faulty_fleet import FaultyFleet

from edgefl.coordinator.dispatch.fleet_book import FleetBook, SeenVitals
from edgefl.coordinator.dispatch.journaled_fleet import Given
from edgefl.types import Assignment, DeviceInfo, Event, Lost, Order, Progress, Update, Vitals


class LiveBook(FleetBook):
    """A live view of the faulty fleet; boards get warmer with time."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self.fleet = fleet
        self.seen = SeenVitals(self)  # type: ignore[arg-type] # only `get` and iteration are used
        super().__init__(self.seen)
        self._changed: dict[str, DeviceInfo | None] = {}
        self._reports: list[Progress] = []

    def get(self, device_id: str) -> Vitals:
        return Vitals(temperature_c=50.0 + 10 * (int(self.fleet.now_s / 2) % 5))

    def refresh(self) -> LiveBook:
        for name, info in self.fleet.info.items():
            now = info if name in self.fleet.present else None
            if self.devices.get(name) != now:
                self._changed[name] = now
                self.put(name, now)
        self.begin(self.fleet.now_s)
        self.seen.begin()
        return self

    def take_changes(self) -> tuple[dict[str, DeviceInfo | None], tuple[Progress, ...]]:
        changed, self._changed = self._changed, {}
        reports, self._reports = tuple(self._reports), []
        return changed, reports

    def note_progress(self, progress: Progress) -> None:
        self._reports.append(progress)
        super().note_progress(progress)


class LiveFaultyFleet:
    """The faulty fleet as the live one."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self.fleet, self.book = fleet, LiveBook(fleet)
        self.orders: dict[str, Assignment] = {}

    def view(self) -> LiveBook:
        return self.book.refresh()

    def adopt(self, out: Sequence[Given], source: object) -> None:
        """Nothing: the boards are the same, and still at it."""

    def dispatch(self, orders: Sequence[Order], source: object) -> None:
        for order in orders:
            if isinstance(order, Assignment):
                self.orders[order.assignment_id] = order
                self.book.give(order)
        self.fleet.dispatch(orders, source)

    def wait(self, until_s: float) -> Sequence[Event]:
        events: Sequence[Event] = self.fleet.wait(until_s)
        for event in events:
            if isinstance(event, Progress):
                self.book.note_progress(event)
            elif isinstance(event, Update | Lost) and event.assignment_id in self.orders:
                self.book.settle(self.orders.pop(event.assignment_id))
                if isinstance(event, Update):
                    self.book.note_speed(event.device_id, event.metrics)
        return events
