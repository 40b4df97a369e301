"""The asynchronous template: idle devices get work at once, and every update makes a version.

Updates are applied in the order of arrival. A strategy moves the model in `apply`; data about a base version is
stored in `on_version_dispatched` and dropped in `on_version_released`. `slots` holds the work in flight. No event
scans all devices, unless they are selected by utility: 10,000 of them cost as much as ten. An assignment that is
neither answered nor in `view.busy` is lost for good. That is detected when its device is asked again, and otherwise
by a round-robin check of a few devices at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import numpy as np

from edgefl.core.types import (
    Array,
    Decision,
    FleetView,
    Strategy,
    Tensor,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    derive_rng,
    derive_seed,
)
from edgefl.strategies.aggregation import (
    QueuedUpdate,
    ServerMoments,
    add_in_place,
    copy_tensors,
    is_float,
    require_tensor,
    scale_tensor,
    to_writable,
    unload_tensors,
)
from edgefl.strategies.strategy_config import (
    MAX_WAIT_S,
    MIN_USED_IDS,
    TICK_S,
    LearningRateSchedule,
    RoundRules,
    SingleStepConfig,
    compute_rate_factor,
)
from edgefl.strategies.utility_selection import SelectionRecord, measure_update, select_by_utility

NUM_CHECKS_PER_CALL = 3
"""Devices checked per call; a third as many calls check all of them."""
MAX_BACKOFF_S = 60.0

A = TypeVar("A", bound="AsyncState")


@dataclass(slots=True)
class WorkSlot:
    """Work slot of one device: its assignment ("" for none) since `asked_s`, and its used updates to acknowledge.

    The first `num_sent` of `used_assignments` were sent with the assignment; they are dropped when its update
    arrives, but for the newest two.
    """

    assignment_id: str = ""
    base_version: int = 0
    learning_rate: float = 0.0
    used_assignments: tuple[str, ...] = ()
    num_sent: int = 0
    losses: int = 0
    asked_s: float = 0.0


@dataclass(slots=True)
class WorkSlots:
    """Work slots of all devices ever asked; `resting` holds the ends of back-offs."""

    by_device: dict[str, WorkSlot] = field(default_factory=dict)
    turn: deque[str] = field(default_factory=deque)
    resting: dict[str, float] = field(default_factory=dict)

    def assign(
        self, device_id: str, assignment_id: str, *, base_version: int, learning_rate: float, now_s: float = 0.0
    ) -> tuple[str, ...]:
        """Records an assignment and returns the used updates that its device is to be told of."""
        slot = self.by_device.get(device_id)
        if slot is None:
            slot = self.by_device[device_id] = WorkSlot()
            self.turn.append(device_id)
        slot.assignment_id, slot.base_version, slot.learning_rate = assignment_id, base_version, learning_rate
        slot.num_sent, slot.asked_s = len(slot.used_assignments), now_s
        return slot.used_assignments

    def complete(self, device_id: str, assignment_id: str) -> WorkSlot | None:
        """Returns the slot of an assignment and clears it; None when it is not in flight."""
        slot = self.by_device.get(device_id)
        if slot is None or not assignment_id or slot.assignment_id != assignment_id:
            return None
        used_ids = (*slot.used_assignments, assignment_id)
        slot.used_assignments = used_ids[-max(MIN_USED_IDS, len(used_ids) - slot.num_sent) :]
        slot.assignment_id, slot.num_sent, slot.losses = "", 0, 0
        return slot

    def has_assignment(self, device_id: str) -> bool:
        slot = self.by_device.get(device_id)
        return slot is not None and slot.assignment_id != ""

    def is_in_flight(self, device_id: str, view: FleetView) -> bool:
        """Returns whether the device's assignment may still be answered."""
        slot = self.by_device.get(device_id)
        return slot is not None and slot.assignment_id in view.busy.get(device_id, ())

    def cancel(self, device_id: str, now_s: float) -> int:
        """Clears a lost assignment and returns its base version.

        One loss may be a device that left and came back. From the second in a row on it backs off, longer each time,
        or a device that fails at once would be asked without a pause.
        """
        slot = self.by_device[device_id]
        slot.assignment_id, slot.losses = "", slot.losses + 1
        if slot.losses > 1:
            self.resting[device_id] = now_s + min(MAX_BACKOFF_S, 2.0 ** min(slot.losses - 2, 10))
        return slot.base_version

    def select_next(self) -> Iterator[str]:
        """Yields the next few devices to check."""
        for _ in range(min(NUM_CHECKS_PER_CALL, len(self.turn))):
            device_id = self.turn[0]
            self.turn.rotate(-1)
            yield device_id

    def is_backing_off(self, device_id: str) -> bool:
        return device_id in self.resting

    def remove_expired_backoffs(self, now_s: float) -> None:
        """Removes expired back-offs, and those beyond the maximum, which another clock set."""
        for device_id, until_s in list(self.resting.items()):
            if not now_s < until_s <= now_s + MAX_BACKOFF_S:
                del self.resting[device_id]

    def compute_wake_s(self, now_s: float, max_s: float) -> float:
        return min([max_s, *(until_s - now_s for until_s in self.resting.values())])


def select_random_indices(num_idle: int, num_required: int, *seed: int | str) -> Iterable[int]:
    """Returns random indices below `num_idle`, with repeats, enough for about `num_required` distinct ones."""
    if 8 * num_required >= num_idle:
        indices: list[int] = derive_rng(*seed).permutation(num_idle).tolist()
        return indices
    # A generator per event would dominate the cost; a hash suffices for one or two numbers.
    return (derive_seed(*seed, number) % num_idle for number in range(4 * num_required + 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleUpdateConfig(SingleStepConfig):
    """Settings of strategies in which every update moves the model when it comes.

    Attributes:
        step_scale: part of an update that the model moves by. None takes 1/n for the n devices at work: n updates
            then move it as far as one round of `ssgd`, so that a learning rate that suits rounds suits them too. An
            update is about n - 1 versions old, and gradient descent with a delay is stable for steps of the order of
            1/delay of those without (Agarwal, Duchi, NIPS 2011; Zhang et al., IJCAI 2016, divide by the delay). 1 is
            the papers' algorithm, whose learning rate has to be found for each number of devices.
    """

    step_scale: float | None = field(default=None, metadata={"above": 0, "at_most": 1})


@dataclass(slots=True)
class AsyncState:
    """State of an asynchronous strategy, which owns `model` and updates it in place.

    `holders` counts the assignments in flight by version; `buffers` are the model's float buffers at those versions.
    `round_size` is the number of versions per round, `num_left` the number of idle devices not asked last,
    `num_workers` the number of devices that may be at work at the same time, as of the last assignments. `halvings`
    are the versions from which on the learning rate is half of what it was, and work that began before version
    `restored` follows from a model that was given up. `selections` has a record of each device that was asked, where
    they are selected by utility.
    """

    model: dict[str, Array]
    version: int = 0
    num_assigned: int = 0
    num_left: int = 0
    num_workers: int = 1
    round_size: int = 0
    slots: WorkSlots = field(default_factory=WorkSlots)
    queue: deque[QueuedUpdate] = field(default_factory=deque)
    used: tuple[str, ...] = ()
    holders: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, dict[str, Array]] = field(default_factory=dict)
    moments: ServerMoments = field(default_factory=dict)
    halvings: tuple[int, ...] = ()
    restored: int = 0
    selections: dict[str, SelectionRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousStrategy(Strategy[A]):
    """Base of strategies without rounds; subclasses implement `make_state` and `apply`.

    `rules.max_devices` and `rules.fraction` bound the number of busy devices; a k of n and a round time-out
    do not apply. `step_scale` is the part of an update that a strategy which adds updates moves the model by; see
    `SingleUpdateConfig`.
    """

    plan: TrainConfig
    lr_schedule: LearningRateSchedule
    rules: RoundRules
    step_scale: float | None = 1.0

    versions_per_round: ClassVar[int | None] = None
    models_per_device: ClassVar[float] = 0.0

    def make_state(self, model: dict[str, Array]) -> A:
        """Returns the initial state, which owns `model`."""
        raise NotImplementedError

    def apply(self, state: A, queued_update: QueuedUpdate) -> None:
        """Applies one update to `state.model`; `state.version` is still the one before it."""
        raise NotImplementedError

    def on_version_dispatched(self, state: A) -> None:
        """Called at the first assignment of the present version."""

    def on_version_released(self, state: A, version: int) -> None:
        """Called when no assignment of `version` is in flight any more."""

    def list_candidates(self, state: A, view: FleetView) -> Sequence[str]:  # noqa: ARG002 `bounded` looks into its state
        """Returns the idle devices that may be asked."""
        return view.idle

    def can_start(self, state: A, device_id: str) -> bool:  # noqa: ARG002 `bounded` says no
        return True

    def on_assigned(self, state: A, device_id: str) -> None:
        """Called when a device gets work."""

    def on_update(self, state: A, device_id: str) -> None:
        """Called when the update of a device has arrived."""

    def on_device_gone(self, state: A, device_id: str) -> None:
        """Called eventually for a device that has left."""

    def bytes_per_device(self, model_bytes: int) -> int:
        """Returns the bytes of state per busy device."""
        return math.ceil(self.models_per_device * model_bytes)

    def init(self, model: Tensors) -> A:
        # In C order, so that a flat view of a tensor is the tensor itself.
        return self.make_state({name: np.array(tensor, order="C") for name, tensor in model.items()})

    def assign(self, state: A, view: FleetView) -> tuple[A, Decision]:
        """Assigns work to every idle device, up to the maximum of busy ones."""
        if not state.num_assigned and len(view.idle) < self.rules.min_devices:
            return state, Decision(next_wake_s=MAX_WAIT_S)
        self._check_devices(state, view)
        state.num_workers = max(1, self._compute_max_busy(view))
        plan = self._make_plan(state)
        instructions = tuple(
            self._make_instruction(state, device_id, plan, view.now_s)
            for device_id in self._select_devices(state, view)
        )
        state.round_size = state.round_size or self.rules.updates_per_round or len(instructions)
        state.num_left = len(view.idle) - len(instructions)
        return state, Decision(
            instructions=instructions, next_wake_s=state.slots.compute_wake_s(view.now_s, MAX_WAIT_S)
        )

    def _make_plan(self, state: A) -> TrainConfig:
        scheduled = self.lr_schedule(state.version // ((self.versions_per_round or state.round_size) or 1))
        factor = compute_rate_factor(scheduled, state.halvings, state.version)
        return self.plan if factor == 1.0 else replace(self.plan, learning_rate=self.plan.learning_rate * factor)

    def _check_devices(self, state: A, view: FleetView) -> None:
        state.slots.remove_expired_backoffs(view.now_s)
        for device_id in state.slots.select_next():
            if state.slots.has_assignment(device_id) and not state.slots.is_in_flight(device_id, view):
                self._cancel_assignment(state, device_id, view.now_s)
            if device_id not in view.devices:
                self.on_device_gone(state, device_id)

    def _cancel_assignment(self, state: A, device_id: str, now_s: float) -> None:
        if device_id in state.selections:
            state.selections[device_id].silent_s = max(0.0, now_s - state.slots.by_device[device_id].asked_s)
        self._remove_version_holder(state, state.slots.cancel(device_id, now_s))

    def _select_devices(self, state: A, view: FleetView) -> list[str]:
        num_free = self._compute_max_busy(view) - len(view.busy)
        idle = self.list_candidates(state, view)

        def is_available(device_id: str) -> bool:
            if state.slots.has_assignment(device_id):  # though it is idle
                self._cancel_assignment(state, device_id, view.now_s)
            return not state.slots.is_backing_off(device_id) and self.can_start(state, device_id)

        if num_free >= len(idle):
            return [device_id for device_id in idle if is_available(device_id)]
        if num_free <= 0:
            return []
        if self.rules.selection is not None:
            return self._select_by_utility(state, [name for name in idle if is_available(name)], num_free)
        selected = self._select_random(state, idle, num_free, is_available)
        if selected or view.busy:
            return selected
        # With no device at work there is no wake-up, so all are scanned.
        return [device_id for device_id in idle if is_available(device_id)][:num_free]

    def _compute_max_busy(self, view: FleetView) -> int:
        """Returns the maximum of busy devices."""
        present = len(view.idle) + len(view.busy)
        if self.rules.fraction is not None:
            return min(present, max(1, math.ceil(self.rules.fraction * present - TICK_S)))
        return present if self.rules.max_devices is None else min(present, self.rules.max_devices)

    def _select_random(
        self, state: A, idle: Sequence[str], num_free: int, is_available: Callable[[str], bool]
    ) -> list[str]:
        """Returns up to `num_free` random available devices, in order; for a few it does not scan all."""
        indices: set[int] = set()
        for index in select_random_indices(len(idle), num_free, self.rules.seed, "chosen", state.num_assigned):
            if len(indices) == num_free:
                break
            if index not in indices and is_available(idle[index]):
                indices.add(index)
        return [idle[index] for index in sorted(indices)]

    def _select_by_utility(self, state: A, available: Sequence[str], num_free: int) -> list[str]:
        """Returns up to `num_free` available devices, in order; it looks at all of them."""
        if self.rules.selection is None or num_free >= len(available):
            return list(available)
        return select_by_utility(
            state.selections,
            available,
            num_free,
            settings=self.rules.selection,
            round_number=self._count_rounds(state),
            rng=derive_rng(self.rules.seed, "chosen", state.num_assigned),
            num_at_work=state.num_workers,
        )

    def _count_rounds(self, state: A) -> int:
        """Returns the number of the round of utility selection that it is, from 1, by the assignments made."""
        return 1 + state.num_assigned // (state.round_size or state.num_workers)

    def _record_selection(self, state: A, device_id: str) -> None:
        record = state.selections.setdefault(device_id, SelectionRecord())
        record.num_selected, record.last_round = record.num_selected + 1, self._count_rounds(state)

    def _make_instruction(self, state: A, device_id: str, plan: TrainConfig, now_s: float) -> TrainInstruction:
        if self.rules.selection is not None:
            self._record_selection(state, device_id)
        state.num_assigned += 1
        assignment_id = f"n{state.num_assigned}-{device_id}"
        used_ids = state.slots.assign(
            device_id, assignment_id, base_version=state.version, learning_rate=plan.learning_rate, now_s=now_s
        )
        self._add_version_holder(state)
        self.on_assigned(state, device_id)
        return TrainInstruction(
            assignment_id=assignment_id,
            device_id=device_id,
            base_version=state.version,
            plan=plan,
            codec=self.rules.codec,
            deadline_s=self.rules.deadline_s,
            used_assignments=used_ids,
        )

    def _add_version_holder(self, state: A) -> None:
        count = state.holders.get(state.version, 0)
        state.holders[state.version] = count + 1
        if count:
            return
        if self.rules.server.buffers:
            state.buffers[state.version] = {
                name: tensor.copy() for name, tensor in state.model.items() if self.is_averaged(name, tensor)
            }
        self.on_version_dispatched(state)

    def _remove_version_holder(self, state: A, version: int) -> None:
        state.holders[version] -= 1
        if not state.holders[version]:
            del state.holders[version]
            state.buffers.pop(version, None)
            self.on_version_released(state, version)

    def receive(self, state: A, update: Update) -> A:
        """Queues an expected update; an unknown, late or repeated one changes nothing."""
        queued_update = self.complete_assignment(state, update)
        if queued_update is not None:
            state.queue.append(queued_update)
        return state

    def complete_assignment(self, state: A, update: Update) -> QueuedUpdate | None:
        slot = state.slots.complete(update.device_id, update.assignment_id)
        if slot is None:
            return None
        self.on_update(state, update.device_id)
        if (record := state.selections.get(update.device_id)) is not None:
            (record.utility, record.duration_s), record.silent_s = measure_update(update, slot.asked_s), 0.0
        if slot.base_version < state.restored:
            self._remove_version_holder(state, slot.base_version)
            return None
        return QueuedUpdate(
            assignment_id=update.assignment_id,
            device_id=update.device_id,
            base_version=slot.base_version,
            learning_rate=slot.learning_rate,
            num_examples=update.metrics.num_examples,
            tensors=update.tensors,
            share=update.share,
        )

    def ready(self, state: A, view: FleetView) -> bool:  # noqa: ARG002 no device is waited for
        return bool(state.queue)

    def aggregate(self, state: A) -> A:
        queued_update = state.queue.popleft()
        # A diverging model's updates are rejected on arrival; here it only must not end the run.
        with np.errstate(over="ignore", invalid="ignore"):
            self.apply(state, queued_update)
        self.release_update(state, queued_update)
        state.version += 1
        state.used = (queued_update.assignment_id,)
        return state

    def release_update(self, state: A, queued_update: QueuedUpdate) -> None:
        """Releases an applied update, and what was stored for it alone."""
        unload_tensors(queued_update.tensors)
        self._remove_version_holder(state, queued_update.base_version)

    def compute_step_scale(self, state: A) -> float:
        """Returns the factor of an update's displacement: 1/n for n devices at work, unless it is set."""
        return 1.0 / state.num_workers if self.step_scale is None else self.step_scale

    def apply_displacement(self, state: A, queued_update: QueuedUpdate, displacement: Mapping[str, Tensor]) -> None:
        """Adds the server optimiser's step for the scaled `displacement`, and updates buffers and counters."""
        server, scale = self.rules.server, self.compute_step_scale(state)
        if scale != 1.0:
            displacement = {name: scale_tensor(tensor, scale) for name, tensor in displacement.items()}
        if server.kind != "none" or server.learning_rate != 1.0:
            displacement = server.step(
                state.moments, {name: to_writable(tensor) for name, tensor in displacement.items()}
            )
        for name, tensor in displacement.items():
            add_in_place(state.model[name], tensor)
        self.update_untrained(state, queued_update)

    def select_trained(self, state: A, queued_update: QueuedUpdate) -> dict[str, Tensor]:
        """Returns the displacement of the trained tensors."""
        return {
            name: require_tensor(queued_update, name, tensor)
            for name, tensor in state.model.items()
            if is_float(tensor) and name not in self.rules.server.buffers
        }

    def is_averaged(self, name: str, tensor: Array) -> bool:
        return name in self.rules.server.buffers and is_float(tensor)

    def update_untrained(self, state: A, queued_update: QueuedUpdate) -> None:
        """Updates untrained tensors: counters by displacement, running means towards the device's own.

        The sum of many displacements from one version would carry a running mean far beyond any measurement, and a
        running variance below zero; a mixture never does. n devices in turn weigh 1/n each.
        """
        delay = state.version - queued_update.base_version
        for name, tensor in state.model.items():
            if self.is_averaged(name, tensor) and delay:
                device_buffer = state.buffers[queued_update.base_version][name] + to_writable(
                    require_tensor(queued_update, name, tensor)
                )
                add_in_place(tensor, (device_buffer - tensor) / np.asarray(1 + delay, tensor.dtype))
            elif self.is_averaged(name, tensor) or not is_float(tensor):
                add_in_place(tensor, require_tensor(queued_update, name, tensor))

    def halve_learning_rate(self, state: A) -> A:
        state.halvings = (*state.halvings, state.version)
        return state

    def restore_model(self, state: A, model: Mapping[str, Array]) -> A:
        copy_tensors(state.model, model)
        while state.queue:
            self.release_update(state, state.queue.popleft())
        state.moments.clear()
        state.restored = state.version
        return state

    def resumed(self, state: A) -> A:
        """Returns the state after a coordinator restart: no assignments in flight, and no losses counted for it."""
        for slot in state.slots.by_device.values():
            if slot.assignment_id:
                self._remove_version_holder(state, slot.base_version)
            slot.assignment_id, slot.losses = "", 0
        state.slots.resting.clear()
        return state
