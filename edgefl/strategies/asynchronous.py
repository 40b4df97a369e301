"""The asynchronous template: whoever is idle gets work at once, and every update is a version of its own.

Updates are applied in the order of arrival. A strategy says in `apply` how one moves the model; what it needs to know
of the version that a device began with, it keeps in `keep` and drops in `release`. `seats` has the book of who was
asked. Nothing here looks at all devices for one event: 10,000 of them cost as much as ten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np

from edgefl.strategies.arrivals import Arrival, add, checked, is_float, owned
from edgefl.strategies.open_round import TICK_S
from edgefl.strategies.rounds import WAIT_S, RoundRules
from edgefl.strategies.schedules import Schedule
from edgefl.strategies.seats import Seats, draws
from edgefl.strategies.server_optimizers import Moments
from edgefl.types import (
    Array,
    Assignment,
    Decision,
    FleetView,
    Indices,
    LazyTensors,
    LocalPlan,
    Tensor,
    Tensors,
    Update,
)

A = TypeVar("A", bound="AsyncState")


@dataclass(slots=True)
class AsyncState:
    """`model` is owned by the state and updated in place.

    `holders` counts by version the assignments that are out; `buffers` are the model's float buffers at those
    versions. `round_size` is the number of versions that count as a round, `num_left` how many were not asked last.
    """

    model: dict[str, Array]
    version: int = 0
    num_given: int = 0
    num_left: int = 0
    round_size: int = 0
    seats: Seats = field(default_factory=Seats)
    queue: deque[Arrival] = field(default_factory=deque)
    used: tuple[str, ...] = ()
    holders: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, dict[str, Array]] = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous(Generic[A]):
    """A strategy without rounds; subclasses give `begin` and `apply`.

    `rules.max_devices` and `rules.fraction` bound how many devices work at a time; a k of n, a barrier and a rescue
    mean nothing here.
    """

    plan: LocalPlan
    rate: Schedule
    rules: RoundRules

    versions_per_round: ClassVar[int | None] = None
    models_per_device: ClassVar[float] = 0.0

    def begin(self, model: dict[str, Array]) -> A:
        """Returns the first state, which owns `model`."""
        raise NotImplementedError

    def apply(self, state: A, arrival: Arrival) -> None:
        """Moves `state.model` by one update; `state.version` is still that before it."""
        raise NotImplementedError

    def keep(self, state: A) -> None:
        """Called when the first assignment of the present version leaves."""

    def release(self, state: A, version: int) -> None:
        """Called when nobody works on `version` any more."""

    def candidates(self, state: A, view: FleetView) -> Sequence[str]:  # noqa: ARG002 `bounded` looks into its state
        """Returns the idle devices that may be worth asking."""
        return view.idle

    def may_start(self, state: A, device_id: str) -> bool:  # noqa: ARG002 `bounded` says no
        return True

    def began(self, state: A, device_id: str) -> None:
        """Called when a device is given work."""

    def answered(self, state: A, device_id: str) -> None:
        """Called when the update of a device is in."""

    def forget(self, state: A, device_id: str) -> None:
        """Called now and then for a device that is not there any more."""

    def bytes_per_device(self, model_bytes: int) -> int:
        """Returns what the state keeps for each device that works."""
        return math.ceil(self.models_per_device * model_bytes)

    def init(self, model: Tensors) -> A:
        # In C order, so that a flat view of a tensor is the tensor itself.
        return self.begin({name: np.array(tensor, order="C") for name, tensor in model.items()})

    def assign(self, state: A, view: FleetView) -> tuple[A, Decision]:
        """Gives work to every idle device, up to the number that may work at a time."""
        if not state.num_given and len(view.idle) < self.rules.min_devices:
            return state, Decision(next_wake_s=WAIT_S)
        self._look_around(state, view)
        plan = self._plan(state)
        orders = tuple(self._order(state, device_id, plan) for device_id in self._chosen(state, view))
        state.round_size = state.round_size or self.rules.updates_per_round or len(orders)
        state.num_left = len(view.idle) - len(orders)
        return state, Decision(orders=orders, next_wake_s=state.seats.next_wake_s(view.now_s, WAIT_S))

    def _plan(self, state: A) -> LocalPlan:
        factor = self.rate(state.version // ((self.versions_per_round or state.round_size) or 1))
        return self.plan if factor == 1.0 else replace(self.plan, learning_rate=self.plan.learning_rate * factor)

    def _look_around(self, state: A, view: FleetView) -> None:
        state.seats.wake(view.now_s)
        for device_id in state.seats.next_in_turn():
            if state.seats.is_out(device_id) and not state.seats.is_at_work(device_id, view):
                self._lose(state, device_id, view.now_s)
            if device_id not in view.devices:
                self.forget(state, device_id)

    def _lose(self, state: A, device_id: str, now_s: float) -> None:
        self._let_go(state, state.seats.lose(device_id, now_s))

    def _chosen(self, state: A, view: FleetView) -> list[str]:
        free = self._num_at_work(view) - len(view.busy)
        idle = self.candidates(state, view)

        def is_willing(device_id: str) -> bool:
            if state.seats.is_out(device_id):  # and yet it is idle
                self._lose(state, device_id, view.now_s)
            return not state.seats.rests(device_id) and self.may_start(state, device_id)

        if free >= len(idle):
            return [device_id for device_id in idle if is_willing(device_id)]
        if free <= 0:
            return []
        drawn = self._drawn(state, idle, free, is_willing)
        if drawn or view.busy:
            return drawn
        # Nobody is at work who would wake us, so that all are looked at.
        return [device_id for device_id in idle if is_willing(device_id)][:free]

    def _num_at_work(self, view: FleetView) -> int:
        """Returns how many may work at a time."""
        present = len(view.idle) + len(view.busy)
        if self.rules.fraction is not None:
            return min(present, max(1, math.ceil(self.rules.fraction * present - TICK_S)))
        return present if self.rules.max_devices is None else min(present, self.rules.max_devices)

    def _drawn(self, state: A, idle: Sequence[str], free: int, is_willing: Callable[[str], bool]) -> list[str]:
        """Returns up to `free` willing devices at random, in their order, without a look at all of them for a few."""
        places: set[int] = set()
        for place in draws(len(idle), free, self.rules.seed, "chosen", state.num_given):
            if len(places) == free:
                break
            if place not in places and is_willing(idle[place]):
                places.add(place)
        return [idle[place] for place in sorted(places)]

    def _order(self, state: A, device_id: str, plan: LocalPlan) -> Assignment:
        state.num_given += 1
        assignment_id = f"n{state.num_given}-{device_id}"
        settled = state.seats.give(
            device_id, assignment_id, base_version=state.version, learning_rate=plan.learning_rate
        )
        self._hold(state)
        self.began(state, device_id)
        return Assignment(
            assignment_id=assignment_id,
            device_id=device_id,
            base_version=state.version,
            plan=plan,
            codec=self.rules.codec,
            deadline_s=self.rules.deadline_s,
            settled=settled,
        )

    def _hold(self, state: A) -> None:
        count = state.holders.get(state.version, 0)
        state.holders[state.version] = count + 1
        if count:
            return
        if self.rules.server.buffers:
            state.buffers[state.version] = {
                name: tensor.copy() for name, tensor in state.model.items() if self.is_averaged(name, tensor)
            }
        self.keep(state)

    def _let_go(self, state: A, version: int) -> None:
        state.holders[version] -= 1
        if not state.holders[version]:
            del state.holders[version]
            state.buffers.pop(version, None)
            self.release(state, version)

    def receive(self, state: A, update: Update) -> A:
        """Queues an update that is waited for; one that is unknown, late or a repeat changes nothing."""
        arrival = self.arrival(state, update)
        if arrival is not None:
            state.queue.append(arrival)
        return state

    def arrival(self, state: A, update: Update) -> Arrival | None:
        seat = state.seats.answer(update.device_id, update.assignment_id)
        if seat is None:
            return None
        self.answered(state, update.device_id)
        return Arrival(
            assignment_id=update.assignment_id,
            device_id=update.device_id,
            base_version=seat.base_version,
            learning_rate=seat.learning_rate,
            num_examples=update.metrics.num_examples,
            tensors=update.tensors,
        )

    def ready(self, state: A, view: FleetView) -> bool:  # noqa: ARG002 no device is waited for
        return bool(state.queue)

    def aggregate(self, state: A) -> A:
        arrival = state.queue.popleft()
        # A model that diverges is refused where its updates come in; here it only must not end the run.
        with np.errstate(over="ignore", invalid="ignore"):
            self.apply(state, arrival)
        self.done(state, arrival)
        state.version += 1
        state.used = (arrival.assignment_id,)
        return state

    def done(self, state: A, arrival: Arrival) -> None:
        """Forgets an update that has moved the model, and what was kept for it alone."""
        if isinstance(arrival.tensors, LazyTensors):
            arrival.tensors.release()
        self._let_go(state, arrival.base_version)

    def move(self, state: A, arrival: Arrival, displacement: Mapping[str, Tensor]) -> None:
        """Adds the server optimiser's step for `displacement`, and what is not trained: buffers and counters."""
        server = self.rules.server
        if server.kind != "none" or server.learning_rate != 1.0:
            displacement = server.step(state.moments, {name: owned(tensor) for name, tensor in displacement.items()})
        for name, tensor in displacement.items():
            add(state.model[name], tensor)
        self.track(state, arrival)

    def trained(self, state: A, arrival: Arrival) -> dict[str, Tensor]:
        """Returns the displacement of the tensors that training moves."""
        return {
            name: checked(arrival, name, tensor)
            for name, tensor in state.model.items()
            if is_float(tensor) and name not in self.rules.server.buffers
        }

    def is_averaged(self, name: str, tensor: Array) -> bool:
        return name in self.rules.server.buffers and is_float(tensor)

    def track(self, state: A, arrival: Arrival) -> None:
        """Moves what is not trained: counters by their displacement, running means towards the device's own.

        The sum of many displacements from one version would carry a running mean far beyond what anybody measured,
        and a running variance below zero; a mixture never does. n devices in turn weigh 1/n each.
        """
        delay = state.version - arrival.base_version
        for name, tensor in state.model.items():
            if self.is_averaged(name, tensor) and delay:
                own = state.buffers[arrival.base_version][name] + owned(checked(arrival, name, tensor))
                add(tensor, (own - tensor) / np.asarray(1 + delay, tensor.dtype))
            elif self.is_averaged(name, tensor) or not is_float(tensor):
                add(tensor, checked(arrival, name, tensor))

    def resumed(self, state: A) -> A:
        """Returns the state after the coordinator was away: nothing is out, and nobody has been lost over it."""
        for seat in state.seats.by_device.values():
            if seat.assignment_id:
                self._let_go(state, seat.base_version)
            seat.assignment_id, seat.losses = "", 0
        state.seats.resting.clear()
        return state

    def model(self, state: A) -> Tensors:
        return state.model

    def version(self, state: A) -> int:
        return state.version

    def used(self, state: A) -> tuple[str, ...]:
        return state.used

    def changed(self, state: A, since: int) -> Indices | None:  # noqa: ARG002 everything moves
        return None
