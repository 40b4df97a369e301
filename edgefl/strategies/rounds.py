"""The synchronous template: ask those who are idle, fold what they send, close the round, ask again.

A round closes when nobody who was asked is still busy, or when `min_updates` have arrived. A device that dies leaves
`view.busy`, so that a round never waits for it. Nothing here looks at all devices for one event, only when a round
opens, when a barrier passes, and when nobody is waited for any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np

from edgefl.strategies import barrier
from edgefl.strategies import fold as folding
from edgefl.strategies.gate import may_get_more
from edgefl.strategies.open_round import TICK_S, Job, OpenRound, RoundState
from edgefl.strategies.round_rules import Rescue, RoundRules
from edgefl.strategies.schedules import Schedule
from edgefl.strategies.seats import NAMED
from edgefl.strategies.settings import check_plan
from edgefl.types import (
    Array,
    Assignment,
    Decision,
    FleetView,
    Indices,
    LocalPlan,
    Order,
    Recall,
    Tensors,
    Update,
    derived_rng,
)

__all__ = ["WAIT_S", "Job", "Rescue", "RoundRules", "RoundState", "Synchronous", "recalls"]

WAIT_S = 60.0
"""An upper bound on the sleep between two questions; every event wakes the loop anyway."""


R = TypeVar("R", bound=RoundState)


def unscaled(update: Update) -> float:  # noqa: ARG001 every update as it is
    return 1.0


def steady(closed: int) -> float:  # noqa: ARG001 the same learning rate in every round
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous(Generic[R]):
    """A strategy in rounds; subclasses change how devices are chosen, asked, watched and averaged.

    Attributes:
        plan: what a device does in the first round.
        weigh: update -> its share in the mean.
        rules: what the run file says.
        norm: update -> what its displacement is divided by; see `Fold.displacement`.
        rate: closed rounds -> factor of the learning rate.
        double_buffering: two rounds are open at a time, so that devices compute while the round before is sent and
            closed: w_{t+1} = w_t + Δ(w_{t-1}). The first two rounds both begin at w_0 (and draw the same batches).
    """

    plan: LocalPlan
    weigh: Callable[[Update], float]
    rules: RoundRules
    norm: Callable[[Update], float] = unscaled
    rate: Schedule = steady
    double_buffering: bool = False

    collects: ClassVar[bool] = False
    """Updates are kept until the round closes, instead of being added one by one."""

    def __post_init__(self) -> None:
        check_plan(self.plan)

    # What a subclass may change.

    def begin(self, model: dict[str, Array]) -> R:
        """Returns the first state, which owns `model`."""
        return RoundState(model=model)  # type: ignore[return-value] # a subclass with another state says so here

    def willing(self, view: FleetView) -> Sequence[str]:
        """Returns who has nothing to do and may be asked."""
        return view.idle

    def candidates(self, state: R, view: FleetView) -> Sequence[str]:
        """Returns who may be asked to take part in a new round."""
        return self._with_room(state, view) if state.open else self.willing(view)

    def plans(
        self,
        state: R,  # noqa: ARG002 for subclasses
        plan: LocalPlan,
        devices: Sequence[str],
        view: FleetView,  # noqa: ARG002 likewise
    ) -> Mapping[str, LocalPlan]:
        """Returns the plan of each device; `plan` has the learning rate of this round."""
        return dict.fromkeys(devices, plan)

    def deadline_s(self, state: R) -> float | None:  # noqa: ARG002 for subclasses
        return self.rules.deadline_s

    def open_round(self, state: R, chosen: Sequence[str], view: FleetView) -> tuple[Order, ...]:
        """Asks the chosen devices to take part in the newest of the open rounds."""
        return self.give(state, state.open[-1], [Job(device_id=device_id) for device_id in chosen], view)

    def note(self, state: R, opened: OpenRound, update: Update) -> None:
        """Called with every update that fills a slot, before it is counted."""

    def watch(self, state: R, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:  # noqa: ARG002 for subclasses
        """Returns what else is to be ordered while a round is open; `opened.alarm_s` may be set."""
        return ()

    def is_pending(self, opened: OpenRound, view: FleetView) -> bool:
        """Returns whether the round waits for somebody who may still answer."""
        return opened.is_pending(view)

    def is_complete(self, opened: OpenRound, view: FleetView) -> bool:
        """Returns whether a round in which something has arrived needs no more."""
        if self.rules.min_updates is not None:
            return opened.num_received >= self.rules.min_updates
        return not self.is_pending(opened, view)

    def replacements(self, state: R, opened: OpenRound, view: FleetView) -> Sequence[Job]:
        """Returns whom else to ask when nobody is waited for and too few have answered."""
        delivered = opened.delivered()
        willing = [device_id for device_id in self.willing(view) if device_id not in delivered]
        return [Job(device_id=device_id) for device_id in self._choose(willing, state)]

    def displacement(self, state: R, opened: OpenRound) -> Mapping[str, Array]:
        """Returns what the round moves the model by, before the server optimiser."""
        return opened.fold.displacement(state.model, self.rules.server.buffers)

    # The Strategy.

    def init(self, model: Tensors) -> R:
        return self.begin({name: np.array(tensor) for name, tensor in model.items()})

    def assign(self, state: R, view: FleetView) -> tuple[R, Decision]:
        """Looks after the oldest round, and opens another while there is room for one."""
        orders = self._tend(state, state.open[0], view) if state.open else ()
        while len(state.open) < 1 + self.double_buffering:
            has_begun = state.open or state.version > 0
            if not has_begun and len(view.idle) < self.rules.min_devices:
                break
            chosen = self._choose(self.candidates(state, view), state)
            if not chosen:
                break
            state.open.append(OpenRound(since_s=None if state.open else view.now_s))
            orders += self.open_round(state, chosen, view)
        return state, Decision(orders=orders, next_wake_s=self._next_wake_s(state, view))

    def receive(self, state: R, update: Update) -> R:
        """Takes an update that is waited for; one that is unknown, late or a repeat changes nothing."""
        told = state.settled.get(update.device_id, {})
        for assignment_id in [name for name in list(told)[:-NAMED] if told[name] <= update.base_version]:
            del told[assignment_id]  # this very assignment said so
        for opened in state.open:
            _, slot = opened.asked.get(update.assignment_id, (None, None))
            if slot is not None and not opened.fold.has(slot):
                self.note(state, opened, update)
                opened.fold.keep(slot, update, weight=self.weigh(update), norm=self.norm(update))
                if not self.collects:
                    opened.fold.add_next(state.model, self.rules.server.buffers)
                    opened.fold.let_wait(slot)
        return state

    def ready(self, state: R, view: FleetView) -> bool:
        if not state.open or state.open[0].num_received == 0:
            return False
        opened = state.open[0]
        if self.double_buffering and len(state.open) == 1 and not state.is_over:
            return False  # the next round begins with the model as it is now
        if state.is_over and not opened.is_pending(view):
            return True
        return opened.is_given_up or self.is_complete(opened, view)

    def aggregate(self, state: R) -> R:
        opened = state.open.pop(0)
        folding.move(state.model, self.rules.server.step(state.moments, self.displacement(state, opened)))
        state.version, state.attempt = state.version + 1, 0
        state.used = tuple(opened.fold.used.values())
        state.silent = {device_id for device_id, slot in opened.asked.values() if slot not in opened.fold.used}
        for assignment_id in state.used:
            device_id, _ = opened.asked[assignment_id]
            state.settled.setdefault(device_id, {})[assignment_id] = state.version
        return state

    def finish(self, state: R) -> R:
        """Says that nothing more will be assigned: what is in flight is closed as it comes."""
        state.is_over = True
        return state

    def resumed(self, state: R) -> R:
        """Returns the state after the coordinator was away: the rounds that were open are asked for again."""
        state.open.clear()
        state.attempt, state.is_over = 0, False
        return state

    def model(self, state: R) -> Tensors:
        return state.model

    def version(self, state: R) -> int:
        return state.version

    def used(self, state: R) -> tuple[str, ...]:
        return state.used

    def changed(self, state: R, since: int) -> Indices | None:  # noqa: ARG002 everything moves
        return None

    # How devices are asked.

    def give(self, state: R, opened: OpenRound, jobs: Sequence[Job], view: FleetView) -> tuple[Order, ...]:
        """Returns the assignments for some jobs, noted in the round."""
        plans = self.plans(state, self._scheduled(state), list(dict.fromkeys(job.device_id for job in jobs)), view)
        return tuple(self._order(state, opened, job, plans[job.device_id]) for job in jobs)

    def _order(self, state: R, opened: OpenRound, job: Job, plan: LocalPlan) -> Assignment:
        block = "" if job.block is None else f"-b{job.block}"
        assignment_id = f"v{state.version}-a{state.attempt}-{job.device_id}{block}"
        opened.ask(assignment_id, job.device_id, job.slot)
        return Assignment(
            assignment_id=assignment_id,
            device_id=job.device_id,
            base_version=state.version,
            plan=plan,
            codec=self.rules.codec,
            deadline_s=self.deadline_s(state),
            block=job.block,
            settled=tuple(state.settled.get(job.device_id, ())),
        )

    def _scheduled(self, state: R) -> LocalPlan:
        factor = self.rate(state.version)
        return self.plan if factor == 1.0 else replace(self.plan, learning_rate=self.plan.learning_rate * factor)

    def _choose(self, willing: Sequence[str], state: R) -> Sequence[str]:
        """Returns some of the willing in their order; drawn anew each time, or the rest were never heard."""
        limit = len(willing) if self.rules.max_devices is None else self.rules.max_devices
        if self.rules.fraction is not None:
            # 0.1 x 30 is more than 3 in floating point, and not meant as 4.
            limit = min(limit, math.ceil(self.rules.fraction * len(willing) - TICK_S))
        state.attempt += bool(willing)
        if limit >= len(willing):
            return list(willing)
        rng = derived_rng(self.rules.seed, "chosen", state.version, state.attempt)
        return [willing[place] for place in np.sort(rng.permutation(len(willing))[: max(1, limit)])]

    def _with_room(self, state: R, view: FleetView) -> list[str]:
        """Returns the idle, and those that work on the open round alone; not those that failed in the one before."""
        busy, ahead = view.busy, set(self.willing(view))
        for device_id, _ in state.open[-1].asked.values():
            has_room = len(busy.get(device_id, ())) == 1
            if has_room and device_id not in state.silent and may_get_more(device_id, view):
                ahead.add(device_id)
        return sorted(ahead)

    # How a round is looked after.

    def _tend(self, state: R, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:
        orders = self.watch(state, opened, view)
        if orders or self.is_pending(opened, view):
            return orders + self._keep_waiting(state, opened, view)
        opened.since_s = opened.alarm_s = None
        if opened.is_given_up or (opened.num_received and self.is_complete(opened, view)):
            return orders
        jobs = self.replacements(state, opened, view)
        if jobs:
            opened.since_s = view.now_s
            return orders + self.give(state, opened, jobs, view)
        # Nobody is left to ask, by the fleet as the selection lets us see it: fewer close the round, or nobody would.
        opened.is_given_up = opened.num_received > 0
        return orders

    def _keep_waiting(self, state: R, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:
        match barrier.step(opened, self.rules, view.now_s):
            case barrier.Step.RESCUE:
                return self.rescue(state, opened, view)
            case barrier.Step.CLOSE:
                opened.is_given_up = True
            case barrier.Step.FAIL:
                number, missing = state.version + 1, self.missing(opened, view)
                raise barrier.failure(opened, self.rules, number=number, now_s=view.now_s, missing=missing)
        return ()

    def rescue(self, state: R, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:
        """Does what the rules say about a barrier that has passed."""
        if self.rules.rescue == "go-on":
            opened.is_given_up = opened.num_received > 0
            return recalls(opened, opened.pending(view))
        if self.rules.rescue == "ask-again":
            jobs = self.second_copies(opened, view)
            state.attempt += bool(jobs)
            return self.give(state, opened, jobs, view)
        return ()

    def second_copies(self, opened: OpenRound, view: FleetView) -> Sequence[Job]:
        """Returns whom to ask for what is missing, besides those that were asked."""
        late = [opened.asked[assignment_id] for assignment_id in opened.pending(view)]
        return [
            Job(device_id=device, slot=slot)
            for device, slot in late
            if len(view.busy.get(device, ())) == 1 and may_get_more(device, view)
        ]

    def missing(self, opened: OpenRound, view: FleetView) -> Iterable[str]:
        """Returns the names of those that are waited for."""
        return (opened.asked[assignment_id][0] for assignment_id in opened.pending(view))

    def _next_wake_s(self, state: R, view: FleetView) -> float:
        if not state.open:
            return WAIT_S
        opened, now_s = state.open[0], view.now_s
        has_all = opened.num_received == len(opened.fold.expected)
        # With double buffering it waits for the next one, and that for somebody who can be asked.
        may_close = not self.double_buffering or len(state.open) > 1
        if may_close and (opened.is_given_up or (self.double_buffering and has_all)):
            return 0.0  # it can be closed at once
        alarms = (opened.alarm_s, barrier.alarm_s(opened, self.rules))
        wake_s = min([WAIT_S, *(alarm_s - now_s for alarm_s in alarms if alarm_s is not None)])
        return max(TICK_S, wake_s)


def recalls(opened: OpenRound, assignment_ids: Iterable[str]) -> tuple[Order, ...]:
    """Returns recalls for those of some assignments that were not recalled before."""
    fresh = [name for name in assignment_ids if name not in opened.recalled]
    opened.recalled.update(fresh)
    return tuple(Recall(assignment_id=name, device_id=opened.asked[name][0]) for name in fresh)
