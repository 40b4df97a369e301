"""Recording fleet: replays the journal of a resumed run, then records the live fleet into it.

Every turn that the loop sees of the live fleet goes into the journal. A resumed run replays it first; instructions
still in flight at its end go over to the live fleet, whose devices may have finished them by now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgefl.coordinator.execution.fleet_view import LiveFleetView
from edgefl.coordinator.execution.headers import FIRST_INCARNATION, RunIncarnations
from edgefl.coordinator.execution.replay import JournalReplay, ReplayError, RunClock
from edgefl.core.claims import ClaimLimits
from edgefl.core.types import (
    Decision,
    DeviceInfo,
    DeviceThroughput,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    FleetView,
    HealthMetrics,
    Instruction,
    InstructionFailed,
    ModelProvider,
    Progress,
    Role,
    Update,
)
from edgefl.engine.fleet_state import DispatchedInstruction, FleetState
from edgefl.storage.journal.record_encoding import HealthObserved, TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal


class UnderlyingFleet(Protocol):
    """The live fleet."""

    def view(self) -> LiveFleetView: ...
    def resume_in_flight(self, in_flight: Sequence[DispatchedInstruction], source: ModelProvider) -> None: ...
    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None: ...
    def wait(self, until_s: float) -> Sequence[Event]: ...


@dataclass(slots=True, kw_only=True)
class FleetSnapshot:
    """State of a run's fleet between two turns.

    Attributes:
        now_s, at: the run's own time, and Unix seconds.
        in_flight: instructions by assignment id, in the order of dispatch.
        finishing_early: ids of those asked to finish early.
        devices, speeds, progress, health: as in the view; None for a device that had not reported its health.
        examples, first_examples: of the devices that were given work; see `ClaimLimits`.
        incarnation: of the run.
        past_incarnations: the newest assignments of each incarnation but the first, oldest first.
    """

    now_s: float = 0.0
    at: float = 0.0
    in_flight: dict[str, DispatchedInstruction] = field(default_factory=dict)
    finishing_early: set[str] = field(default_factory=set)
    devices: dict[str, DeviceInfo] = field(default_factory=dict)
    speeds: dict[str, DeviceThroughput] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    health: dict[str, HealthMetrics | None] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    first_examples: dict[str, int] = field(default_factory=dict)
    incarnation: int = FIRST_INCARNATION
    past_incarnations: dict[int, list[str]] = field(default_factory=dict)


class ReplayOnlyFleet:
    """Stand-in for the live fleet where a journal is only replayed: no device is contacted."""

    def view(self) -> LiveFleetView:
        raise ReplayError("the loop goes on behind the end of its journal")

    def resume_in_flight(self, in_flight: Sequence[DispatchedInstruction], source: ModelProvider) -> None:  # noqa: ARG002
        self.view()

    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None:  # noqa: ARG002
        self.view()

    def wait(self, until_s: float) -> Sequence[Event]:  # noqa: ARG002
        raise ReplayError("the loop waits behind the end of its journal")


class RecordingFleet:
    """Implements `Fleet` over the live one, and the write-ahead log that the run's recorder writes to.

    Args:
        fleet: the live fleet, which receives device events already.
        wal: the write-ahead log for everything new.
        replay: the journal to replay; exhausted for a new run.
        clock: the run's own.
        snapshot: the fleet where the replay starts.
        incarnations: of the run; the first one if None.
        task: of the run.
    """

    def __init__(  # noqa: PLR0913 what a run is resumed from
        self,
        fleet: UnderlyingFleet,
        wal: WalJournal,
        replay: JournalReplay,
        clock: RunClock,
        snapshot: FleetSnapshot | None = None,
        *,
        incarnations: RunIncarnations | None = None,
        task: str = "",
    ) -> None:
        self._fleet, self._wal, self._replay, self._clock = fleet, wal, replay, clock
        self._incarnations = incarnations or RunIncarnations("")
        snapshot = snapshot or FleetSnapshot()
        self._health: dict[str, HealthMetrics] = {}
        self._known_health: dict[str, HealthMetrics | None] = {}
        self._update_health(snapshot.health)
        self._replayed_state = _restore_fleet_state(snapshot, self._health, task)
        self._live_view: LiveFleetView | None = None
        self._source: ModelProvider | None = None
        self._is_live = False
        self._to_resume: list[DispatchedInstruction] = []
        if snapshot.at:
            clock.set_time(snapshot.now_s, snapshot.at)
        if replay.is_exhausted:
            self._start_live()

    # The fleet.

    def view(self) -> FleetView:
        if not self._is_live and self._replay.next_turn is not None:
            return self._replay_turn()
        self._start_live()
        self._live_view = view = self._fleet.view()
        devices, progress = view.pop_changes()
        turn = TurnStarted(
            now_s=view.now_s,
            at=self._clock.unix_s(),
            devices=devices,
            progress=progress,
            incarnation=self._incarnations.current,
        )
        self._wal.record_turn(turn)
        return view

    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None:
        """Dispatches new instructions; replayed ones are only recorded as in flight."""
        self._source = source
        if self._is_live:
            for instruction in instructions:
                if not isinstance(instruction, FinishEarlyInstruction):
                    self._incarnations.assign_wire_id(instruction.assignment_id)
            self._resume_in_flight(source)
            self._fleet.dispatch(instructions, source)
            return
        for instruction in instructions:
            if isinstance(instruction, FinishEarlyInstruction):
                self._replayed_state.finish_early(instruction.assignment_id)
            else:
                self._replayed_state.assign(instruction)

    def wait(self, until_s: float) -> Sequence[Event]:
        if self._is_live or self._replay.is_exhausted:
            self._start_live()
            if self._source is not None:
                self._resume_in_flight(self._source)
            return [self._to_run_time(event) for event in self._fleet.wait(until_s - self._clock.offset_s)]
        events = self._replay.read_events()
        if (next_turn := self._replay.next_turn) is not None:
            self._clock.set_time(next_turn.now_s, next_turn.at)  # its events came right before it
        for event in events:
            self._complete_replayed(event)
        return events

    # The write-ahead log.

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        return self._wal.record_events(events) if self._is_live else events

    def record_decision(self, decision: Decision) -> None:
        if not decision.instructions:
            return
        if not self._is_live and not self._replay.is_exhausted:
            self._replay.check_decision(decision.instructions)
            return
        self._start_live()
        self._record_health()
        self._wal.record_decision(decision)

    def record_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None:
        if not self._is_live and not self._replay.is_exhausted:
            self._replay.check_aggregation(version, assignment_ids)
            return
        self._start_live()
        self._wal.record_aggregation(version, assignment_ids)

    def commit(self) -> None:
        if self._is_live:
            self._wal.commit()

    # Between the two.

    @property
    def is_live(self) -> bool:
        """Whether the journal has been replayed to its end."""
        return self._is_live

    def create_snapshot(self) -> FleetSnapshot:
        """Returns the fleet for a checkpoint; valid only between two turns of a live run."""
        view = self._live_view or self._replayed_state
        health = self._live_view.health_snapshot.by_device if self._live_view is not None else self._known_health
        return FleetSnapshot(
            now_s=view.now_s,
            at=self._clock.unix_s(),
            in_flight=dict(view.in_flight),
            finishing_early=set(view.finishing_early),
            devices=dict(view.devices),
            speeds=dict(view.speeds),
            progress=dict(view.progress),
            health=dict(health),
            examples=dict(view.claim_limits.examples),
            first_examples=dict(view.claim_limits.first_examples),
            incarnation=self._incarnations.current,
            past_incarnations=self._incarnations.to_dict(),
        )

    def _replay_turn(self) -> FleetState:
        """Returns the fleet state of the next turn of the journal."""
        turn, observations = self._replay.start_turn()
        self._clock.set_time(turn.now_s, turn.at)
        self._replayed_state.start_turn(turn.now_s)
        for device_id, info in turn.devices.items():
            self._replayed_state.update_device(device_id, info)
        for report in turn.progress:
            if report.assignment_id in self._replayed_state.busy.get(report.device_id, ()):
                self._replayed_state.record_progress(report)
        for observation in observations:
            self._update_health(observation.health)
        return self._replayed_state

    def _update_health(self, health: Mapping[str, HealthMetrics | None]) -> None:
        for device_id, metrics in health.items():
            self._known_health[device_id] = metrics
            if metrics is None:
                self._health.pop(device_id, None)
            else:
                self._health[device_id] = metrics

    def _complete_replayed(self, event: Event) -> None:
        if not isinstance(event, Update | EvaluateResult | InstructionFailed):
            return
        dispatched = self._replayed_state.in_flight.get(event.assignment_id)
        if dispatched is None:
            return
        self._replayed_state.complete(dispatched.instruction)
        if isinstance(event, Update):
            self._replayed_state.record_speed(event.device_id, event.metrics)

    def _start_live(self) -> None:
        """Ends the replay and goes over to the live fleet."""
        if self._is_live:
            return
        self._is_live, self._to_resume = True, list(self._replayed_state.in_flight.values())
        self._clock.start()
        view = self._fleet.view()
        view.restore_from(self._replayed_state)
        view.health_snapshot.start_turn(self._known_health)
        self._live_view = view

    def _resume_in_flight(self, source: ModelProvider) -> None:
        """Passes the instructions in flight at the end of the replay to the live fleet, once."""
        remaining, self._to_resume = self._to_resume, []
        if remaining:
            offset_s, paused_s = self._clock.offset_s, self._clock.paused_s
            self._fleet.resume_in_flight(
                [
                    replace(
                        dispatched,
                        dispatched_s=dispatched.dispatched_s - offset_s,
                        paused_s=dispatched.paused_s + paused_s,
                    )
                    for dispatched in remaining
                ],
                source,
            )
            # The request to finish early may be lost with the coordinator, and a device that was switched off does
            # not keep it.
            finishing_early = [
                dispatched.instruction
                for dispatched in remaining
                if dispatched.instruction.assignment_id in self._replayed_state.finishing_early
            ]
            cancellations = [
                FinishEarlyInstruction(assignment_id=instruction.assignment_id, device_id=instruction.device_id)
                for instruction in finishing_early
            ]
            if cancellations:
                self._fleet.dispatch(cancellations, source)

    def _record_health(self) -> None:
        if self._live_view is not None and (changes := self._live_view.health_snapshot.pop_changes()):
            self._wal.record_turn(HealthObserved(health=changes))

    def _to_run_time(self, event: Event) -> Event:
        """Returns an event with its times on the run's own clock."""
        offset_s = self._clock.offset_s
        if offset_s and isinstance(event, Update):
            return replace(event, received_s=event.received_s + offset_s)
        return event


def _restore_fleet_state(snapshot: FleetSnapshot, health: dict[str, HealthMetrics], task: str) -> FleetState:
    state = FleetState(health, limits=ClaimLimits(task=task))
    state.start_turn(snapshot.now_s)
    for device_id, info in snapshot.devices.items():
        state.update_device(device_id, replace(info, role=Role(info.role)))
    state.restore(snapshot.in_flight, snapshot.finishing_early, snapshot.speeds, snapshot.progress)
    state.claim_limits.restore(snapshot.examples, snapshot.first_examples)
    return state
