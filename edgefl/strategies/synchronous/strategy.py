"""The synchronous template: ask idle devices, fold their updates, close the round, repeat.

A round closes when no asked device is still busy, or when `min_updates` have arrived. A device that dies leaves
`view.busy`, so that a round never waits for it. All devices are scanned only when a round opens, when a time-out
passes, and when nothing is waited for any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from edgefl.core.errors import StrategyError
from edgefl.core.types import (
    EPSILON,
    Array,
    CollectiveConfig,
    Decision,
    FinishEarlyInstruction,
    FleetView,
    Instruction,
    Role,
    Strategy,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    derive_rng,
)
from edgefl.strategies.aggregation import StreamingMean, apply_step, copy_tensors
from edgefl.strategies.participation import can_receive_work
from edgefl.strategies.private_mean import PrivateMean, compute_clip_factor
from edgefl.strategies.strategy_config import (
    MAX_WAIT_S,
    MIN_USED_IDS,
    TICK_S,
    LearningRateSchedule,
    RoundRules,
    check_plan,
    compute_rate_factor,
)
from edgefl.strategies.synchronous.collective_rounds import (
    compute_reduced,
    discard_updates,
    find_holder,
    has_displacement,
    make_group,
    record_reductions,
)
from edgefl.strategies.synchronous.round_state import (
    DeadlineAction,
    OpenRound,
    RoundState,
    SlotRequest,
    check_round_deadline,
    compute_alarm_s,
    make_timeout_error,
)
from edgefl.strategies.utility_selection import record_round, select_by_utility

R = TypeVar("R", bound=RoundState)

MAX_REST_S = 7 * 86_400.0
"""Longest wait for a device whose participation is permitted, while others are there."""


def weight_by_examples(update: Update) -> float:
    """Returns the weight n_k of FedAvg; a device without examples (a no-op task) counts as one."""
    return float(max(1, update.metrics.num_examples))


def weight_uniformly(update: Update) -> float:  # noqa: ARG001 every update weighs the same
    return 1.0


def format_slice_codec(codec: str | None, part: int, num_parts: int) -> str:
    """Returns the codec of one part of an update, such as `slice:1:2|fp16` of `fp16`; of layers, that of each."""
    lines = list[str]()
    for layer in (codec or "dense").split(";"):
        pattern, separator, line = layer.rpartition("=")
        stages = [stage for stage in map(str.strip, line.split("|")) if stage != "dense"]
        sliced = "|".join([f"slice:{part}:{num_parts}", *stages])
        lines.append(f"{pattern.strip()} = {sliced}" if separator else sliced)
    return "; ".join(lines)


def compute_constant_rate(closed_rounds: int) -> float:  # noqa: ARG001 the same learning rate in every round
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousStrategy(Strategy[R]):
    """Base of strategies in rounds; subclasses change selection, instructions, monitoring and averaging.

    Attributes:
        plan: local training in the first round.
        compute_weight: update -> its share in the mean.
        rules: of the run file.
        compute_norm: update -> divisor of its displacement; see `StreamingMean.compute_mean`.
        lr_schedule: closed rounds -> factor of the learning rate.
        double_buffering: two rounds are open at a time, so that devices compute while the round before is sent and
            closed: w_{t+1} = w_t + Δ(w_{t-1}). The first two rounds both begin at w_0 (and draw the same batches).
    """

    plan: TrainConfig
    compute_weight: Callable[[Update], float]
    rules: RoundRules
    compute_norm: Callable[[Update], float] = weight_uniformly
    lr_schedule: LearningRateSchedule = compute_constant_rate
    double_buffering: bool = False

    should_keep_updates: ClassVar[bool] = False
    """Whether updates are stored until the round closes, instead of being added one by one."""

    def __post_init__(self) -> None:
        check_plan(self.plan)

    # Hooks of subclasses.

    def make_state(self, model: dict[str, Array]) -> R:
        """Returns the initial state, which owns `model`."""
        return RoundState(model=model)  # type: ignore[return-value] # a subclass with another state says so here

    def list_available(self, view: FleetView) -> Sequence[str]:
        """Returns the idle devices that may be asked."""
        return view.idle

    def list_candidates(self, state: R, view: FleetView) -> Sequence[str]:
        """Returns the devices that may be asked to take part in a new round."""
        return self._list_with_capacity(state, view) if state.open else self.list_available(view)

    def make_plans(
        self,
        state: R,  # noqa: ARG002 for subclasses
        plan: TrainConfig,
        devices: Sequence[str],
        view: FleetView,  # noqa: ARG002 likewise
    ) -> Mapping[str, TrainConfig]:
        """Returns the plan of each device; `plan` has the learning rate of this round."""
        return dict.fromkeys(devices, plan)

    def compute_deadline_s(self, state: R) -> float | None:  # noqa: ARG002 for subclasses
        return self.rules.deadline_s

    def open_round(self, state: R, selected: Sequence[str], view: FleetView) -> tuple[Instruction, ...]:
        """Asks the selected devices to take part in the newest open round."""
        return self.assign_slots(
            state, state.open[-1], [SlotRequest(device_id=device_id) for device_id in selected], view
        )

    def on_update(self, state: R, current_round: OpenRound, update: Update) -> None:
        """Called with every update that fills a slot, before it is counted."""

    def get_part_group(self, slot: str) -> str:  # noqa: ARG002 for subclasses
        """Returns what the slots of an update's parts have in common; empty for a slot of whole updates."""
        return ""

    def compute_divisor(self, state: R, update: Update) -> float:  # noqa: ARG002 for subclasses
        """Returns what the displacement of an update is divided by; see `StreamingMean.compute_mean`."""
        return self.compute_norm(update)

    def schedule_during_round(self, state: R, current_round: OpenRound, view: FleetView) -> tuple[Instruction, ...]:  # noqa: ARG002 for subclasses
        """Returns further instructions of an open round; may set `current_round.alarm_s`."""
        return ()

    def is_pending(self, current_round: OpenRound, view: FleetView) -> bool:
        """Returns whether the round waits for a device that may still answer."""
        return current_round.is_pending(view)

    def is_complete(self, current_round: OpenRound, view: FleetView) -> bool:
        """Returns whether a round with at least one update needs no more."""
        if self.rules.min_updates is not None:
            return current_round.num_received >= self.rules.min_updates
        return not self.is_pending(current_round, view)

    def select_replacements(self, state: R, current_round: OpenRound, view: FleetView) -> Sequence[SlotRequest]:
        """Returns requests to other devices when none is waited for and too few have answered."""
        if self.rules.privacy is not None:
            return []  # who takes part must not depend on who answers
        if current_round.num_received and not self.can_close(current_round):
            if (holder := find_holder(current_round, view)) is not None:
                state.attempt += 1
                return [SlotRequest(device_id=holder[0], resend=holder[1])]
            discard_updates(current_round)
        delivered = current_round.find_delivered()
        candidates = [device_id for device_id in self.list_available(view) if device_id not in delivered]
        return [SlotRequest(device_id=device_id) for device_id in self._select_devices(candidates, state)]

    def compute_displacement(self, state: R, current_round: OpenRound) -> Mapping[str, Array]:
        """Returns the model's displacement by the round, before the server optimiser."""
        if self.rules.collective is not None:
            total = self.rules.collective.reductions
            return compute_reduced(current_round, state.model, self.rules.server.buffers, total)
        if self.rules.privacy is not None:
            return self._release_mean(state, current_round, self.rules.privacy)
        return current_round.fold.compute_mean(state.model, self.rules.server.buffers)

    def _release_mean(self, state: R, current_round: OpenRound, privacy: PrivateMean) -> Mapping[str, Array]:
        current_round.fold.add_waiting(state.model)
        # All that were asked: who is asked later must not depend on who answered.
        participants = sorted({device_id for device_id, _ in current_round.assigned.values()})
        released = privacy.release(
            current_round.fold.total,
            state.model,
            version=state.version + 1,
            clip=privacy.get_clip(state.clip),
            num_below=sum(current_round.below_clip.values()),
            participants=participants,
        )
        state.clip = released.clip
        if privacy.correlation is None:
            return released.displacement
        if (counts := released.participations) is not None:
            state.participations = {name: (count, 0) for name, count in counts.items()}
        for name in participants:
            count = state.participations.get(name, (0, 0))[0] + (counts is None)
            state.participations[name] = count, state.version + 1
        return released.displacement

    def _weigh_update(self, state: R, current_round: OpenRound, update: Update) -> float | None:
        """Returns the weight of an update; None where it does not count in a private round."""
        if (privacy := self.rules.privacy) is None:
            return self.compute_weight(update)
        device_id, _ = current_round.assigned[update.assignment_id]
        is_refused = device_id in current_round.below_clip or not self._permits(state, device_id)
        factor = None if is_refused else compute_clip_factor(update.tensors, privacy.get_clip(state.clip))
        if factor is not None:
            current_round.below_clip[device_id] = 0.5 if factor == 1.0 else -0.5
        return factor

    def move_model(self, state: R, closing: OpenRound) -> None:
        """Makes the next version's model from the updates of a round."""
        apply_step(state.model, self.rules.server.step(state.moments, self.compute_displacement(state, closing)))

    def can_close(self, current_round: OpenRound) -> bool:
        """Returns whether the updates of a round say how the model moves."""
        if self.rules.privacy is not None:
            return True  # by noise alone, where nobody was asked or answered
        return current_round.num_received > 0 and (self.rules.collective is None or has_displacement(current_round))

    # The Strategy.

    def init(self, model: Tensors) -> R:
        return self.make_state({name: np.array(tensor) for name, tensor in model.items()})

    def assign(self, state: R, view: FleetView) -> tuple[R, Decision]:
        """Schedules the oldest round, and opens another while one more may be open."""
        if self.rules.selection is not None:
            for open_round in state.open:
                open_round.answers.now_s = view.now_s
        instructions = self._schedule_open_round(state, state.open[0], view) if state.open else ()
        while len(state.open) < 1 + self.double_buffering:
            if not self._has_enough_devices(state, view):
                break
            num_attempts = state.attempt
            selected = self._select_devices(self.list_candidates(state, view), state)
            if not selected and not (self._samples and state.attempt > num_attempts):
                break
            # In single precision the sum of many clipped updates differs by more than one of them.
            fold = StreamingMean(precision="float32" if self.rules.privacy is None else "float64")
            state.open.append(OpenRound(fold=fold, since_s=None if state.open else view.now_s))
            instructions += self.open_round(state, selected, view)
        return state, Decision(instructions=instructions, next_wake_s=self._compute_wake_s(state, view))

    def _has_enough_devices(self, state: R, view: FleetView) -> bool:
        """Returns whether a round may open: the first one with enough idle devices, the others with those left.

        A private round always needs as many, idle or busy: one that hardly anybody takes part in spends as much.
        """
        if (privacy := self.rules.privacy) is not None and privacy.correlation is not None:
            return self._has_enough_rested(state, view)
        if privacy is not None:
            busy = sum(view.devices[name].role == Role.TRAINER for name in view.busy if name in view.devices)
            return len(view.idle) + busy >= self.rules.min_devices
        return bool(state.open) or state.version > 0 or len(view.idle) >= self.rules.min_devices

    def _permits(self, state: R, device_id: str) -> bool:
        """Returns whether the limits of participation let a device into the next version."""
        privacy = self.rules.privacy
        return privacy is None or privacy.permits(state.participations.get(device_id, (0, 0)), state.version + 1)

    def _has_enough_rested(self, state: R, view: FleetView) -> bool:
        """Returns whether a round has enough idle devices that may take part in it.

        Raises:
            StrategyError: for `MAX_REST_S` there were devices enough, but no round could have them.
        """
        needed, idle = self.rules.min_devices, self.list_available(view)
        num_idle = sum(self._permits(state, name) for name in idle)
        there = [*idle, *(name for name in view.busy if name in view.devices)]  # late ones of a round before
        num_permitted = sum(self._permits(state, name) for name in there)
        if state.open or num_permitted >= needed or len(there) < needed:
            state.waiting_since_s = None
            return num_idle >= needed
        since_s = view.now_s if state.waiting_since_s is None else min(view.now_s, state.waiting_since_s)
        state.waiting_since_s = since_s
        if view.now_s - since_s > MAX_REST_S:
            raise StrategyError(
                f"round {state.version + 1} waited {MAX_REST_S / 86_400:g} days for {needed} boards "
                f"that may take part, {num_permitted} of {len(there)} may: the others have "
                "taken part as often as privacy.participations allows, or less than privacy.separation rounds ago"
            )
        return False

    def receive(self, state: R, update: Update) -> R:
        """Adds an expected update; an unknown, late or repeated one changes nothing but the ε that is spent."""
        state.epsilon = max(state.epsilon, update.metrics.extra.get(EPSILON, 0.0))
        used_assignments = state.used_assignments.get(update.device_id, {})
        for assignment_id in [
            name for name in list(used_assignments)[:-MIN_USED_IDS] if used_assignments[name] <= update.base_version
        ]:
            del used_assignments[assignment_id]  # the device was notified with this assignment
        for open_round in state.open:
            device_id, slot = open_round.assigned.get(update.assignment_id, ("", None))
            if slot is not None and not open_round.fold.has_update(slot):
                weight = self._weigh_update(state, open_round, update)
                if weight is None:
                    continue
                self.on_update(state, open_round, update)
                open_round.answers.add_update(device_id, update)
                if self.rules.collective is not None:
                    record_reductions(open_round, slot, update, self.rules.collective.reductions)
                open_round.fold.add_update(
                    slot,
                    update,
                    weight=weight,
                    norm=self.compute_divisor(state, update),
                    part_group=self.get_part_group(slot),
                )
                if not self.should_keep_updates and self.rules.collective is None:
                    open_round.fold.add_next_updates(state.model, self.rules.server.buffers)
                open_round.fold.unload_waiting(slot)
        return state

    def ready(self, state: R, view: FleetView) -> bool:
        if not state.open or not self.can_close(state.open[0]) or self.is_budget_spent(state):
            return False
        oldest = state.open[0]
        if self.double_buffering and len(state.open) == 1 and not state.is_over:
            return False  # the next round begins with the present model
        if state.is_over and not oldest.is_pending(view):
            return True
        return oldest.is_abandoned or self.is_complete(oldest, view)

    def aggregate(self, state: R) -> R:
        closing = state.open.pop(0)
        delivered = closing.find_delivered()
        self.move_model(state, closing)
        state.version, state.attempt = state.version + 1, 0
        state.used = tuple(closing.fold.used.values())
        state.silent = {device_id for device_id, _ in closing.assigned.values()} - delivered
        record_round(state.selections, closing.answers, state.version)
        for assignment_id in state.used:
            device_id, _ = closing.assigned[assignment_id]
            state.used_assignments.setdefault(device_id, {})[assignment_id] = state.version
        return state

    def finish(self, state: R) -> R:
        """Marks the run as over: rounds close as their updates arrive."""
        state.is_over = True
        return state

    def is_budget_spent(self, state: R) -> bool:
        """Returns whether another version would pass the run's privacy budget."""
        return self.rules.privacy is not None and not self.rules.privacy.can_release(state.version + 1)

    def facts(self, state: R) -> Mapping[str, float]:
        privacy = self.rules.privacy
        if self.rules.example_privacy is not None:
            return {"epsilon": state.epsilon}
        if privacy is None:
            return {}
        return {"epsilon": privacy.compute_spent(state.version), "clip_norm": privacy.get_clip(state.clip)}

    def halve_learning_rate(self, state: R) -> R:
        state.halvings = (*state.halvings, state.version)
        return state

    def restore_model(self, state: R, model: Mapping[str, Array]) -> R:
        copy_tensors(state.model, model)
        state.open.clear()
        state.moments.clear()
        return state

    def resumed(self, state: R) -> R:
        """Returns the state after a coordinator restart: open rounds are asked for again."""
        state.open.clear()
        state.attempt, state.is_over = 0, False
        return state

    # Instructions to devices.

    def assign_slots(
        self, state: R, current_round: OpenRound, requests: Sequence[SlotRequest], view: FleetView
    ) -> tuple[Instruction, ...]:
        """Returns the instructions of some slot requests, recorded in the round."""
        devices = list(dict.fromkeys(request.device_id for request in requests))
        plans = self.make_plans(state, self._make_round_plan(state), devices, view)
        if self.rules.collective is not None:
            collective = self._make_collective(state, devices, view)
            plans = {name: replace(plan, collective=collective) for name, plan in plans.items()}
        instructions = tuple(
            self._make_instruction(state, current_round, request, plans[request.device_id]) for request in requests
        )
        if self.rules.selection is not None:
            for instruction in instructions:
                info = view.devices.get(instruction.device_id)
                if info is not None and info.role == Role.TRAINER:  # not the evaluator of fltrust
                    current_round.answers.add_assignment(instruction.assignment_id, instruction.device_id, view.now_s)
        return instructions

    def _make_instruction(
        self, state: R, current_round: OpenRound, request: SlotRequest, plan: TrainConfig
    ) -> TrainInstruction:
        block = "" if request.block is None else f"-b{request.block}"
        if request.part is not None:
            block += f"-p{request.part[0]}"
        work = f"{request.device_id}{block}"
        while (assignment_id := f"v{state.version}-a{state.attempt}-{work}") in current_round.assigned:
            state.attempt += 1  # it was asked for the same in this attempt
        current_round.add_assignment(assignment_id, request.device_id, request.slot)
        if request.resend and plan.collective is not None:
            current_round.resent[assignment_id] = request.resend
            plan = replace(plan, collective=replace(plan.collective, resend=request.resend))
        return TrainInstruction(
            assignment_id=assignment_id,
            device_id=request.device_id,
            base_version=state.version,
            plan=plan,
            codec=self.rules.codec if request.part is None else format_slice_codec(self.rules.codec, *request.part),
            deadline_s=self.compute_deadline_s(state),
            block=request.block,
            used_assignments=tuple(state.used_assignments.get(request.device_id, ())),
        )

    def _make_collective(self, state: R, devices: Sequence[str], view: FleetView) -> CollectiveConfig:
        assert self.rules.collective is not None
        group, model_bytes = f"v{state.version}-a{state.attempt}", sum(part.nbytes for part in state.model.values())
        config = make_group(
            self.rules.collective, devices, view, version=state.version, group=group, model_bytes=model_bytes
        )
        return replace(config, weighting="uniform" if self.compute_weight is weight_uniformly else "examples")

    def _make_round_plan(self, state: R) -> TrainConfig:
        factor = compute_rate_factor(self.lr_schedule(state.version), state.halvings, state.version)
        return self.plan if factor == 1.0 else replace(self.plan, learning_rate=self.plan.learning_rate * factor)

    def _select_devices(self, available: Sequence[str], state: R) -> Sequence[str]:
        """Returns some available devices in order; drawn anew each time, or the others would never take part."""
        if self.rules.privacy is not None and self.rules.privacy.correlation is not None:
            available = [name for name in available if self._permits(state, name)]
        limit = len(available) if self.rules.max_devices is None else self.rules.max_devices
        if self.rules.fraction is not None:
            # 0.1 x 30 is above 3 in floating point, and must not become 4.
            limit = min(limit, math.ceil(self.rules.fraction * len(available) - TICK_S))
        state.attempt += bool(available)
        if self.rules.privacy is not None and self._samples:
            return self.rules.privacy.sample(available, state.version + 1)
        if limit >= len(available):
            return list(available)
        rng = derive_rng(self.rules.seed, "chosen", state.version, state.attempt)
        if (selection := self.rules.selection) is not None:
            return select_by_utility(
                state.selections,
                available,
                max(1, limit),
                settings=selection,
                round_number=state.version + 1,
                rng=rng,
            )
        return [available[index] for index in np.sort(rng.permutation(len(available))[: max(1, limit)])]

    @property
    def _samples(self) -> bool:
        return self.rules.privacy is not None and self.rules.privacy.sampling is not None

    def _list_with_capacity(self, state: R, view: FleetView) -> list[str]:
        """Returns idle devices, and those busy with the open round only; without silent ones of the last."""
        busy, available = view.busy, set(self.list_available(view))
        for device_id, _ in state.open[-1].assigned.values():
            has_capacity = len(busy.get(device_id, ())) == 1
            if has_capacity and device_id not in state.silent and can_receive_work(device_id, view):
                available.add(device_id)
        return sorted(available)

    # Monitoring of a round.

    def _schedule_open_round(self, state: R, current_round: OpenRound, view: FleetView) -> tuple[Instruction, ...]:
        instructions = self.schedule_during_round(state, current_round, view)
        if instructions or self.is_pending(current_round, view):
            return instructions + self._check_deadline(state, current_round, view)
        current_round.since_s = current_round.alarm_s = None
        if current_round.is_abandoned or (self.can_close(current_round) and self.is_complete(current_round, view)):
            return instructions
        requests = self.select_replacements(state, current_round, view)
        if requests:
            current_round.since_s = view.now_s
            return instructions + self.assign_slots(state, current_round, requests, view)
        # No eligible device is left to ask: the round must close with fewer updates.
        current_round.is_abandoned = self.can_close(current_round)
        return instructions

    def _check_deadline(self, state: R, current_round: OpenRound, view: FleetView) -> tuple[Instruction, ...]:
        match check_round_deadline(current_round, self.rules, view.now_s):
            case DeadlineAction.RECOVER:
                return self.recover_round(state, current_round, view)
            case DeadlineAction.CLOSE if self.can_close(current_round):
                current_round.is_abandoned = True
            case DeadlineAction.CLOSE | DeadlineAction.FAIL:
                number, missing = state.version + 1, self.list_missing(current_round, view)
                raise make_timeout_error(current_round, self.rules, number=number, now_s=view.now_s, missing=missing)
        return ()

    def recover_round(self, state: R, current_round: OpenRound, view: FleetView) -> tuple[Instruction, ...]:
        """Applies the action for a passed round time-out."""
        if self.rules.on_timeout == "aggregate":
            current_round.is_abandoned = self.can_close(current_round)
            return make_finish_early_instructions(current_round, current_round.list_pending(view))
        if self.rules.on_timeout == "reassign":
            requests = self.select_backups(current_round, view)
            state.attempt += bool(requests)
            return self.assign_slots(state, current_round, requests, view)
        return ()

    def select_backups(self, current_round: OpenRound, view: FleetView) -> Sequence[SlotRequest]:
        """Returns requests to other devices for missing slots."""
        pending = [current_round.assigned[assignment_id] for assignment_id in current_round.list_pending(view)]
        return [
            SlotRequest(device_id=device, slot=slot)
            for device, slot in pending
            if len(view.busy.get(device, ())) == 1 and can_receive_work(device, view)
        ]

    def list_missing(self, current_round: OpenRound, view: FleetView) -> Iterable[str]:
        """Returns the names of the pending devices."""
        return (current_round.assigned[assignment_id][0] for assignment_id in current_round.list_pending(view))

    def _compute_wake_s(self, state: R, view: FleetView) -> float:
        if not state.open:
            return MAX_WAIT_S
        oldest, now_s = state.open[0], view.now_s
        is_full = oldest.num_received == len(oldest.fold.expected)
        # With double buffering it waits for the next round, which waits for an available device.
        can_close = not self.double_buffering or len(state.open) > 1
        if can_close and (oldest.is_abandoned or (is_full and (self.double_buffering or not oldest.order))):
            return 0.0  # it can be closed at once
        alarms = (oldest.alarm_s, compute_alarm_s(oldest, self.rules))
        wake_s = min([MAX_WAIT_S, *(alarm_s - now_s for alarm_s in alarms if alarm_s is not None)])
        return max(TICK_S, wake_s)


def make_finish_early_instructions(
    current_round: OpenRound, assignment_ids: Iterable[str]
) -> tuple[Instruction, ...]:
    """Returns instructions to finish early, for assignments that got none before."""
    new_ids = [assignment_id for assignment_id in assignment_ids if assignment_id not in current_round.cancelled]
    current_round.cancelled.update(new_ids)
    return tuple(
        FinishEarlyInstruction(assignment_id=assignment_id, device_id=current_round.assigned[assignment_id][0])
        for assignment_id in new_ids
    )
