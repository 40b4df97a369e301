"""The faulty fleet as the live one of a coordinator, whose journal keeps what the loop sees of it."""

from __future__ import annotations

from collections.abc import Sequence

from faulty_fleet import FaultyFleet

from edgefl.coordinator.execution.fleet_view import HealthSnapshot
from edgefl.core.types import (
    DeviceInfo,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    HealthMetrics,
    Instruction,
    InstructionFailed,
    Progress,
    Update,
)
from edgefl.engine.fleet_state import DispatchedInstruction, FleetState


class LiveBook(FleetState):
    """A live view of the faulty fleet; boards get warmer with time."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self.fleet = fleet
        self.health_snapshot = HealthSnapshot(self)  # type: ignore[arg-type] # only `get` and iteration are used
        super().__init__(self.health_snapshot)
        self._changed: dict[str, DeviceInfo | None] = {}
        self._reports: list[Progress] = []

    def get(self, device_id: str) -> HealthMetrics:
        return HealthMetrics(temperature_c=50.0 + 10 * (int(self.fleet.now_s / 2) % 5))

    def refresh(self) -> LiveBook:
        for name, info in self.fleet.info.items():
            now = info if name in self.fleet.present else None
            if self.devices.get(name) != now:
                self._changed[name] = now
                self.update_device(name, now)
        self.start_turn(self.fleet.now_s)
        self.health_snapshot.start_turn()
        return self

    def pop_changes(self) -> tuple[dict[str, DeviceInfo | None], tuple[Progress, ...]]:
        changed, self._changed = self._changed, {}
        reports, self._reports = tuple(self._reports), []
        return changed, reports

    def record_progress(self, progress: Progress) -> None:
        self._reports.append(progress)
        super().record_progress(progress)


class LiveFaultyFleet:
    """The faulty fleet as the live one."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self.fleet, self.book = fleet, LiveBook(fleet)

    def view(self) -> LiveBook:
        return self.book.refresh()

    def resume_in_flight(self, out: Sequence[DispatchedInstruction], source: object) -> None:
        """Nothing: the boards are the same, and still at it."""

    def dispatch(self, orders: Sequence[Instruction], source: object) -> None:
        for order in orders:
            if isinstance(order, FinishEarlyInstruction):
                self.book.finish_early(order.assignment_id)
            else:
                self.book.assign(order)
        self.fleet.dispatch(orders, source)

    def wait(self, until_s: float) -> Sequence[Event]:
        events: Sequence[Event] = self.fleet.wait(until_s)
        for event in events:
            if isinstance(event, Progress):
                self.book.record_progress(event)
            elif isinstance(event, Update | EvaluateResult | InstructionFailed):
                if (given := self.book.in_flight.get(event.assignment_id)) is not None:
                    self.book.complete(given.instruction)
                if isinstance(event, Update):
                    self.book.record_speed(event.device_id, event.metrics)
        return events
