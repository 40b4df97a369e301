"""Redundant shards: every block of the data lies on r devices, and counts once a round however many copies arrive.

Source: Parallel-SGD's block assignments with its Plain codec: the mean over blocks, any copy of which will do. A
block's random streams follow from the block, so that every holder's copy is the same; r - 1 lost devices then change
nothing, not a bit of the model. Cut shards with the scheme `redundant:R` or `duplicate:R`; a device whose shard has
no blocks takes part with all of it.

With `copies = "slices"` each of the r holders that are there when a round opens sends another part of the block's
update, so no entry travels twice. The part of a holder that is gone is another's, who trains the block once more.
Source: `ndc` of Parallel-SGD. Differs: there the parts of a lost holder are lost. A round that closes without a part
moves its entries by the mean over the other blocks.

A device has at most two assignments; holders begin with different blocks, a redundant copy finishes early. When all
holders of a block are gone, the round continues without it, after the round time-out if there is one.

A step is by the mean over m blocks, where `ssgd` has n mini-batches of n boards: m/n times fewer steps are as much
work, and the mean's noise has so much less variance. So the default learning rate is √(m/n) times the task's, and
falls at the end. Sources: Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014, section
4 (the square root); Goyal et al., Accurate, Large Minibatch SGD, 2017 (it cannot grow with the batch for ever);
Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, NeurIPS 2024 (constant, then
down).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from edgefl.core.errors import ConfigError
from edgefl.core.types import MAX_PARTS, FinishEarlyInstruction, FleetView, Instruction, TrainConfig, Update
from edgefl.strategies.participation import can_receive_work
from edgefl.strategies.strategy_config import CONSTANT, RoundRules, SingleStepConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState, SlotRequest
from edgefl.strategies.synchronous.strategy import (
    SynchronousStrategy,
    make_finish_early_instructions,
    weight_by_examples,
    weight_uniformly,
)

_ERROR_FEEDBACK = re.compile(r"\s*ef\s*([|;]|$)")
MAX_OUTSTANDING = 2
MAX_RETRIES = 3
"""Retries per round for blocks that their holders failed to deliver."""
MAX_RATE_FACTOR = 2.5
"""At 3 times the task's learning rate some runs of digits were unstable."""
FALLING_PART = 0.3
"""Of the rounds, the last, over which a scaled learning rate falls to 0."""
BLOCK_SLOT_PREFIX = "block:"
"""Prefix of the slots of blocks, which no assignment id has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantShardsConfig(SingleStepConfig):
    """Settings of a run with `redundant`; `weights` averages blocks uniformly or by their examples.

    With `copies` each holder sends its block's update whole, and the first counts, or a slice of it. `scale_rate`
    scales the learning rate for the number of blocks, and in a run of so many rounds lets it fall to 0 over the last
    three tenths, unless there is another schedule. It is on where the run file gives no `learning_rate`.
    """

    weights: Literal["uniform", "samples"] = "uniform"
    copies: Literal["whole", "slices"] = "whole"
    scale_rate: bool = False

    without_rate: ClassVar[Mapping[str, Any]] = {"scale_rate": True}

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        if self.keep_optimizer:
            raise ConfigError("strategy.keep_optimizer: with it the copies of a block differ; redundant needs it off")
        if rules.codec is not None and _ERROR_FEEDBACK.match(rules.codec):
            raise ConfigError(
                f"compression.up = {rules.codec!r}: error feedback makes the copies of a block differ; leave ef out, "
                "and with auto name codecs without it, as in auto:fp16,int8"
            )
        if self.seconds is not None:
            raise ConfigError(
                "strategy.seconds: a budget in seconds makes the copies of a block differ; give iterations"
            )
        if rules.min_updates is not None:
            raise ConfigError("run.min_updates: redundant waits for every block; give strategy fedavg for k of n")
        weigh = weight_uniformly if self.weights == "uniform" else weight_by_examples
        config = self
        if self.scale_rate and self.schedule == CONSTANT and rules.rounds is not None:
            config = replace(self, schedule=f"linear:{rules.rounds}:{FALLING_PART}")
        return config.make(
            RedundantShards,
            rules,
            compute_weight=weigh,
            sends_slices=self.copies == "slices",
            scales_rate=self.scale_rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantShards(SynchronousStrategy[RoundState]):
    """Rounds whose slots are blocks, or parts of them; a device without blocks is its own slot."""

    sends_slices: bool = False
    scales_rate: bool = False

    def make_plans(
        self, state: RoundState, plan: TrainConfig, devices: Sequence[str], view: FleetView
    ) -> Mapping[str, TrainConfig]:
        if self.scales_rate:
            # Of the round, not of those asked now: all copies of a block must be the same.
            factor = _compute_rate_factor(state.open[-1], state.num_holders)
            plan = replace(plan, learning_rate=plan.learning_rate * factor)
        return SynchronousStrategy.make_plans(self, state, plan, devices, view)

    def list_candidates(self, state: RoundState, view: FleetView) -> Sequence[str]:  # noqa: ARG002 the fleet says it all
        return _list_present(view)

    def open_round(self, state: RoundState, selected: Sequence[str], view: FleetView) -> tuple[Instruction, ...]:
        new_round, holders = state.open[-1], self._find_holders(selected, view)
        state.num_holders = max(state.num_holders, sum(bool(self._get_blocks(name, view)) for name in selected))
        new_round.fold.expected = [
            slot
            for block, names in holders.items()
            for slot in _format_slots(block, min(len(names), MAX_PARTS) if self.sends_slices else 1)
        ]
        new_round.queued = _make_queues(holders.items())
        requests = [
            SlotRequest(device_id=name)
            for name in selected
            if name not in view.busy and not self._get_blocks(name, view)
        ]
        return _finish_all_early(view) + self.assign_slots(
            state, new_round, [*requests, *_select_next_requests(new_round, view)], view
        )

    def get_part_group(self, slot: str) -> str:
        """Returns the block that a slot is for a part of; empty where it is not."""
        place = _parse_slot(slot)
        return str(place.block) if place and place.num_parts > 1 else ""

    def on_update(self, state: RoundState, current_round: OpenRound, update: Update) -> None:  # noqa: ARG002 the round knows all
        _, slot = current_round.assigned[update.assignment_id]
        current_round.needless.append(slot)

    def schedule_during_round(
        self, state: RoundState, current_round: OpenRound, view: FleetView
    ) -> tuple[Instruction, ...]:
        """Recalls redundant copies, assigns next blocks, and asks holders that have returned."""
        redundant_ids = [
            assignment_id for slot in current_round.needless for assignment_id in current_round.copies.get(slot, ())
        ]
        current_round.needless.clear()
        instructions = make_finish_early_instructions(
            current_round,
            [assignment_id for assignment_id in redundant_ids if _is_in_flight(current_round, assignment_id, view)],
        )
        instructions += self.assign_slots(state, current_round, _select_next_requests(current_round, view), view)
        if instructions or _is_in_progress(current_round, view) or not self._can_retry(current_round, view):
            return instructions
        current_round.num_retries, state.attempt = current_round.num_retries + 1, state.attempt + 1
        return self.assign_slots(state, current_round, self.select_backups(current_round, view), view)

    def is_pending(self, current_round: OpenRound, view: FleetView) -> bool:
        """Returns whether work is in flight or queued, or, with a round time-out, a block is missing."""
        if _is_in_progress(current_round, view):
            return True
        return (
            self.rules.round_timeout_s is not None
            and not current_round.is_abandoned
            and bool(_find_missing(current_round))
        )

    def is_complete(self, current_round: OpenRound, view: FleetView) -> bool:
        return not self.is_pending(current_round, view) and not self._can_retry(current_round, view)

    def select_replacements(
        self, state: RoundState, current_round: OpenRound, view: FleetView
    ) -> Sequence[SlotRequest]:
        """Returns requests to devices without blocks, when no update has arrived."""
        if current_round.num_received:
            return ()
        requests = [SlotRequest(device_id=name) for name in view.idle if not self._get_blocks(name, view)]
        state.attempt += bool(requests)
        return requests

    def select_backups(self, current_round: OpenRound, view: FleetView) -> Sequence[SlotRequest]:
        """Returns requests for missing blocks: to holders not at work on them, or else to all; for a part to one."""
        in_flight = {current_round.assigned[name] for name in current_round.list_pending(view)}
        holders = self._find_holders(_list_present(view), view)
        choices = list[tuple[int, Sequence[str]]]()
        for slot, place in _find_missing(current_round).items():
            names = holders.get(place.block, [])
            names = [name for name in names if (name, slot) not in in_flight] or names
            if place.num_parts > 1 and names:
                names = [names[place.part % len(names)]]
            choices.append((place.block, names))
        current_round.queued = _make_queues(choices)
        return _select_next_requests(current_round, view)

    def list_missing(self, current_round: OpenRound, view: FleetView) -> Iterable[str]:
        """Returns the missing blocks with their asked devices, and the pending devices."""
        for slot, place in _find_missing(current_round).items():
            device_ids = {current_round.assigned[name][0] for name in current_round.copies.get(slot, ())}
            part = f"part {place.part} of {place.num_parts} of " if place.num_parts > 1 else ""
            yield f"{part}block {place.block} of {' or '.join(sorted(device_ids)) or 'nobody'}"
        for name in current_round.list_pending(view):
            device_id, slot = current_round.assigned[name]
            if slot not in current_round.copies:
                yield device_id

    def _can_retry(self, current_round: OpenRound, view: FleetView) -> bool:
        """Returns whether a present device holds a missing block, with retries left."""
        missing = {place.block for place in _find_missing(current_round).values()}
        if not missing or (current_round.num_retries >= MAX_RETRIES and current_round.num_received):
            return False
        return any(block in missing for name in _list_present(view) for block in self._get_blocks(name, view))

    def _get_blocks(self, device_id: str, view: FleetView) -> tuple[int, ...]:
        info = view.devices.get(device_id)
        return () if info is None else tuple(info.blocks.get(self.rules.task, ()))

    def _find_holders(self, device_ids: Iterable[str], view: FleetView) -> dict[int, list[str]]:
        """Returns the holders of each block."""
        holders: dict[int, list[str]] = {}
        for name in device_ids:
            for block in self._get_blocks(name, view):
                holders.setdefault(block, []).append(name)
        return dict(sorted(holders.items()))


def _compute_rate_factor(current_round: OpenRound, num_holders: int) -> float:
    """Returns the factor of the learning rate for the blocks of a round; 1 where there are fewer than devices."""
    if not num_holders:  # an open round of a state that did not count them
        return 1.0
    places = map(_parse_slot, current_round.fold.expected)
    num_blocks = len({place.block for place in places if place})
    return min(MAX_RATE_FACTOR, math.sqrt(max(1.0, num_blocks / num_holders)))


def _list_present(view: FleetView) -> list[str]:
    """Returns idle devices, and busy ones that may get more work, such as after a redundant copy."""
    return sorted({*view.idle, *(name for name in view.busy if can_receive_work(name, view))})


def _make_queues(choices: Iterable[tuple[int, Sequence[str]]]) -> dict[str, list[int]]:
    """Returns each device's queue of blocks, from blocks and their holders.

    Each block is a first choice of its first holder, a second one of the next, and so on, so that copies come last.
    """
    ranked: dict[str, list[tuple[int, int]]] = {}
    for block, names in choices:
        for rank, name in enumerate(names):
            ranked.setdefault(name, []).append((rank, block))
    return {name: [block for _, block in sorted(ranked_blocks)] for name, ranked_blocks in ranked.items()}


def _select_next_requests(current_round: OpenRound, view: FleetView) -> list[SlotRequest]:
    """Pops the next blocks from the queues of devices with capacity."""
    names = [name for name in current_round.queued if can_receive_work(name, view)]
    if not names:
        return []
    requests, busy, missing = list[SlotRequest](), view.busy, dict[int, dict[str, _Place]]()
    for slot, place in _find_missing(current_round).items():
        missing.setdefault(place.block, {})[slot] = place
    in_flight = [current_round.assigned[assignment_id] for assignment_id in current_round.list_pending(view)]
    for name in names:
        queue, capacity = current_round.queued[name], MAX_OUTSTANDING - len(busy.get(name, ()))
        while queue and capacity > 0:
            block = queue.pop(0)
            if slots := missing.get(block):
                slot = _choose_slot(name, slots, in_flight)
                place, capacity = slots[slot], capacity - 1
                in_flight.append((name, slot))
                part = (place.part, place.num_parts) if place.num_parts > 1 else None
                requests.append(SlotRequest(device_id=name, slot=slot, block=block, part=part))
        if not queue:
            del current_round.queued[name]
    return requests


def _choose_slot(name: str, slots: Iterable[str], in_flight: Collection[tuple[str, str]]) -> str:
    """Returns the first slot that fewest devices work on, one that this device does not work on before all others."""
    at_work = Counter(slot for _, slot in in_flight)
    return min(slots, key=lambda slot: ((name, slot) in in_flight, at_work[slot]))


def _is_in_progress(current_round: OpenRound, view: FleetView) -> bool:
    """Returns whether the round has work in flight, or a present device with queued blocks."""
    if current_round.is_pending(view):
        return True
    missing = {place.block for place in _find_missing(current_round).values()}
    return any(
        can_receive_work(name, view) and not missing.isdisjoint(queue) for name, queue in current_round.queued.items()
    )


def _is_in_flight(current_round: OpenRound, assignment_id: str, view: FleetView) -> bool:
    device_id, _ = current_round.assigned[assignment_id]
    return assignment_id in view.busy.get(device_id, ())


class _Place(NamedTuple):
    """A block, or a part of one: part 1 of 1 is all of it."""

    block: int
    part: int
    num_parts: int


def _find_missing(current_round: OpenRound) -> dict[str, _Place]:
    """Returns the slots of blocks and parts without any received copy, in order."""
    has_update = current_round.fold.has_update
    places = ((slot, _parse_slot(slot)) for slot in current_round.fold.expected if not has_update(slot))
    return {slot: place for slot, place in places if place}


def _format_slots(block: int, num_parts: int) -> list[str]:
    if num_parts == 1:
        return [f"{BLOCK_SLOT_PREFIX}{block}"]
    return [f"{BLOCK_SLOT_PREFIX}{block}:{part}:{num_parts}" for part in range(1, num_parts + 1)]


def _parse_slot(slot: str) -> _Place | None:
    """Returns the block and part of a slot; None for that of a device without blocks."""
    if not slot.startswith(BLOCK_SLOT_PREFIX):
        return None
    block, *part = map(int, slot.removeprefix(BLOCK_SLOT_PREFIX).split(":"))
    return _Place(block, *part) if part else _Place(block, 1, 1)


def _finish_all_early(view: FleetView) -> tuple[Instruction, ...]:
    """Returns instructions to finish early for all redundant copies still in flight when a round opens."""
    return tuple(
        FinishEarlyInstruction(assignment_id=assignment_id, device_id=name)
        for name, outstanding in view.busy.items()
        for assignment_id in outstanding
    )
