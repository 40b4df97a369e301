"""A job as a strategy: its assignments are the parts, its only version is the combined result.

The round loop, the journal, the replay and the fleets are those of trainings, so a coordinator that dies goes on
where it was, and a part counts once, whoever did it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from edgefl.core.errors import RunFailedError
from edgefl.core.types import (
    Array,
    Decision,
    FleetView,
    Instruction,
    Strategy,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
)
from edgefl.strategies.aggregation import unload_tensors
from edgefl.strategies.participation import is_blocked

RESULT = "result"
"""Name of the only tensor, of bytes, of a part's update and of the job's model."""
DELIVERY_S = 60.0
"""What the coordinator allows beside the deadline of a part, for its input and its result."""
WAKE_S = 60.0


@dataclass(slots=True, kw_only=True)
class CompletePart:
    """A part that is done; its result is read from the journal when it is needed."""

    assignment_id: str
    device_id: str
    tensors: Tensors


@dataclass(slots=True, kw_only=True)
class JobState:
    """State of a job.

    Attributes:
        model: the result, empty until all parts are combined.
        version: 1 once they are.
        used: assignments of the parts in the result.
        num_parts: known so far.
        owners: of each part, its board where boards have parts of their own.
        pending: parts to be given out, sorted.
        in_flight: assignment -> its part and board.
        complete: parts that are done.
        tries: of each part, the boards that it was given to, in order.
        missing_since_s: of a part whose board is away or gets no more of them.
        skipped: parts that the result is without.
        is_over: the run is stopping.
    """

    model: dict[str, Array] = field(default_factory=lambda: {RESULT: np.zeros(0, np.uint8)})
    version: int = 0
    used: tuple[str, ...] = ()
    num_parts: int = 0
    owners: dict[int, str] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    in_flight: dict[str, tuple[int, str]] = field(default_factory=dict)
    complete: dict[int, CompletePart] = field(default_factory=dict)
    tries: dict[int, list[str]] = field(default_factory=dict)
    missing_since_s: dict[int, float] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    is_over: bool = False


class PartResults(Sequence[bytes]):
    """Results of parts, each read when it is asked for, so that one is in memory at a time."""

    def __init__(self, parts: Sequence[CompletePart]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> PartResults: ...
    def __getitem__(self, index: int | slice) -> bytes | PartResults:
        if isinstance(index, slice):
            return PartResults(self._parts[index])
        tensors = self._parts[index].tensors
        result = np.asarray(tensors[RESULT]).tobytes()
        unload_tensors(tensors)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStrategy(Strategy[JobState]):
    """Gives out the parts of a job until all are done, then combines them.

    Attributes:
        combine: results of the parts -> the job's.
        num_parts: None where every board does one.
        names: boards that must do theirs, in that case.
        min_devices: idle boards that the first part waits for.
        deadline_s: of a part's work.
        max_tries: of a part, whatever the reasons.
        skip_missing_s: after which a part is left out whose own board is away; None waits.
        max_part_bytes: most bytes of a result.
    """

    combine: Callable[[Sequence[bytes]], bytes]
    num_parts: int | None
    names: tuple[str, ...] = ()
    min_devices: int = 1
    deadline_s: float = 600.0
    max_tries: int = 10
    skip_missing_s: float | None = None
    max_part_bytes: int = 0

    def init(self, model: Tensors) -> JobState:  # noqa: ARG002 a job has none
        return JobState()

    def assign(self, state: JobState, view: FleetView) -> tuple[JobState, Decision]:
        """Gives every idle board a part, those first that it has not tried."""
        self._return_lost_parts(state, view)
        if state.is_over or not self._start(state, view):
            return state, Decision(next_wake_s=WAKE_S)
        instructions: list[Instruction] = []
        for device_id in view.idle:
            part = self._pop_part(state, device_id)
            if part is not None:
                instructions.append(self._make_instruction(state, part, device_id))
        return state, Decision(instructions=tuple(instructions), next_wake_s=self._skip_missing(state, view))

    def receive(self, state: JobState, update: Update) -> JobState:
        """Takes over a part's result; one that is not waited for changes nothing."""
        part, device_id = state.in_flight.pop(update.assignment_id, (-1, ""))
        if part >= 0 and device_id == update.device_id:
            unload_tensors(update.tensors)
            state.complete[part] = CompletePart(
                assignment_id=update.assignment_id, device_id=device_id, tensors=update.tensors
            )
        return state

    def ready(self, state: JobState, view: FleetView) -> bool:  # noqa: ARG002 all is in the state
        is_open = state.version == 0 and bool(state.complete)
        return is_open and len(state.complete) + len(state.skipped) == state.num_parts

    def aggregate(self, state: JobState) -> JobState:
        parts = [state.complete[part] for part in sorted(state.complete, key=lambda part: self._rank(state, part))]
        result = self.combine(PartResults(parts))
        state.model = {RESULT: np.frombuffer(result, np.uint8).copy()}
        state.version, state.used = 1, tuple(part.assignment_id for part in parts)
        state.complete = {}
        return state

    def finish(self, state: JobState) -> JobState:
        """Marks the run as over: nothing more is given out, and no result is made of some parts."""
        state.is_over = True
        return state

    def resumed(self, state: JobState) -> JobState:
        """Returns the state of a run that goes on in another incarnation: parts in flight are given out again."""
        for part, _ in state.in_flight.values():
            bisect.insort(state.pending, part)
        state.in_flight, state.missing_since_s, state.is_over = {}, {}, False
        return state

    def bytes_per_device(self, model_bytes: int) -> int:  # noqa: ARG002 a job has no model
        return self.max_part_bytes if self.num_parts is None else 0

    def facts(self, state: JobState) -> Mapping[str, float]:
        """Returns how many parts are in the result, and how many it is without."""
        return {"parts": float(len(state.used)), "skipped": float(len(state.skipped))}

    def _start(self, state: JobState, view: FleetView) -> bool:
        """Adds the parts that are not there yet; returns whether the run has begun."""
        if not state.num_parts:
            if len(view.idle) < self.min_devices:
                return False
            if self.num_parts is not None:
                state.pending = list(range(self.num_parts))
                state.num_parts = self.num_parts
            for device_id in sorted(self.names) if self.num_parts is None else ():
                self._add_own_part(state, device_id)
        if self.num_parts is None and state.version == 0:
            owners = set(state.owners.values())
            for device_id in view.idle:
                if device_id not in owners:
                    self._add_own_part(state, device_id)
        return True

    def _add_own_part(self, state: JobState, device_id: str) -> None:
        state.owners[state.num_parts] = device_id
        state.pending.append(state.num_parts)
        state.num_parts += 1

    def _return_lost_parts(self, state: JobState, view: FleetView) -> None:
        """Makes parts pending again whose boards failed them or are gone."""
        busy = view.busy
        for assignment_id, (part, device_id) in list(state.in_flight.items()):
            if assignment_id not in busy.get(device_id, ()):
                del state.in_flight[assignment_id]
                bisect.insort(state.pending, part)

    def _pop_part(self, state: JobState, device_id: str) -> int | None:
        """Removes and returns the part that a board is given next; None for none."""
        if self.num_parts is None:
            part = next((part for part in state.pending if state.owners[part] == device_id), None)
        else:
            untried = (part for part in state.pending if device_id not in state.tries.get(part, ()))
            part = next(untried, state.pending[0] if state.pending else None)
        if part is not None:
            state.pending.remove(part)
            state.missing_since_s.pop(part, None)
        return part

    def _make_instruction(self, state: JobState, part: int, device_id: str) -> TrainInstruction:
        tries = state.tries.setdefault(part, [])
        if len(tries) >= self.max_tries:
            raise RunFailedError(
                f"part {part} was tried {len(tries)} times, at last by {tries[-1]}: raise job.max_tries, or see "
                "why with edgefl history events"
            )
        tries.append(device_id)
        assignment_id = f"p{part}-t{len(tries)}-{device_id}"
        state.in_flight[assignment_id] = part, device_id
        return TrainInstruction(
            assignment_id=assignment_id,
            device_id=device_id,
            base_version=state.version,
            plan=TrainConfig(iterations=1),
            deadline_s=self.deadline_s + DELIVERY_S,
            block=part,
        )

    def _skip_missing(self, state: JobState, view: FleetView) -> float:
        """Leaves out parts whose boards are missing for too long; returns when to look again, in seconds."""
        next_s = WAKE_S
        if self.num_parts is not None:
            return next_s
        for part in list(state.pending):
            device_id = state.owners[part]
            is_excluded = is_blocked(device_id, view)
            if device_id in view.devices and not is_excluded:
                state.missing_since_s.pop(part, None)
                continue
            since_s = state.missing_since_s.setdefault(part, view.now_s)
            if self.skip_missing_s is None and is_excluded:
                raise RunFailedError(
                    f"{device_id} failed its own part too often, and no other board has its files; with "
                    "job.skip_missing_s the job ends without it"
                )
            if self.skip_missing_s is None:
                continue
            left_s = since_s + self.skip_missing_s - view.now_s
            if left_s <= 0:
                state.pending.remove(part)
                state.skipped.append(part)
            next_s = min(next_s, max(0.0, left_s))
        if state.num_parts and len(state.skipped) == state.num_parts:
            raise RunFailedError("no board has done its part, and job.skip_missing_s is over for all of them")
        return next_s

    def _rank(self, state: JobState, part: int) -> tuple[str, int]:
        return state.owners.get(part, ""), part
