"""Redundant shards: every block of the data lies on r devices, and counts once a round however many copies arrive.

Source: Parallel-SGD's block assignments with its Plain codec: the mean over blocks, any copy of which will do. A
block's random streams follow from the block, so that every holder's copy is the same; r - 1 lost devices then change
nothing, not a bit of the model. Cut shards with the scheme `redundant:R` or `duplicate:R`; a device whose shard has
no blocks takes part with all of it.

A device has at most two assignments; holders begin with different blocks, and a copy that has become needless is
recalled. When all holders of a block are gone, the round goes on without it, after the barrier if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.errors import ConfigError
from edgefl.strategies.fedavg import by_examples
from edgefl.strategies.gate import may_get_more
from edgefl.strategies.open_round import Job, OpenRound, RoundState
from edgefl.strategies.rounds import RoundRules, Synchronous, recalls
from edgefl.strategies.ssgd import OneStep, equally
from edgefl.types import FleetView, Order, Recall, Update

WEIGHTS = ("uniform", "samples")
_FEEDBACK = re.compile(r"\s*ef\s*([|;]|$)")
MAX_OUTSTANDING = 2
MAX_RETRIES = 3
"""So often a round asks again for a block that its holders have failed to bring."""
BLOCK = "block:"
"""Slots of blocks begin with this, which no assignment id does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundant(OneStep):
    """Settings of a run with `redundant`; `weights` says how blocks are averaged: alike, or by their examples."""

    weights: str = "uniform"

    def build(self, rules: RoundRules) -> Synchronous[RoundState]:
        if self.weights not in WEIGHTS:
            raise ConfigError(f"strategy.weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        if self.keep_optimizer:
            raise ConfigError("strategy.keep_optimizer: with it the copies of a block differ; redundant needs it off")
        if rules.codec is not None and _FEEDBACK.match(rules.codec):
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
        weigh = equally if self.weights == "uniform" else by_examples
        return RedundantRounds(plan=self.plan(), weigh=weigh, rules=rules, rate=self.rate())


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantRounds(Synchronous[RoundState]):
    """Rounds whose slots are blocks; a device without blocks is a slot of its own."""

    def candidates(self, state: RoundState, view: FleetView) -> Sequence[str]:  # noqa: ARG002 the fleet says it all
        return _present(view)

    def open_round(self, state: RoundState, chosen: Sequence[str], view: FleetView) -> tuple[Order, ...]:
        opened, holders = state.open[-1], self._holders(chosen, view)
        opened.fold.expected = [_slot(block) for block in holders]
        opened.queued = _queues(holders)
        whole = [Job(device_id=name) for name in chosen if name not in view.busy and not self._blocks(name, view)]
        return _recall_all(view) + self.give(state, opened, [*whole, *_next_jobs(opened, view)], view)

    def note(self, state: RoundState, opened: OpenRound, update: Update) -> None:  # noqa: ARG002 the round knows all
        _, slot = opened.asked[update.assignment_id]
        opened.needless.append(slot)

    def watch(self, state: RoundState, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:
        """Recalls needless copies, gives devices with room their next block, and asks holders that have come back."""
        needless = [name for slot in opened.needless for name in opened.copies.get(slot, ())]
        opened.needless.clear()
        orders = recalls(opened, [name for name in needless if _is_out(opened, name, view)])
        orders += self.give(state, opened, _next_jobs(opened, view), view)
        if orders or _is_at_work(opened, view) or not self._may_ask_again(opened, view):
            return orders
        opened.num_retries, state.attempt = opened.num_retries + 1, state.attempt + 1
        return self.give(state, opened, self.second_copies(opened, view), view)

    def is_pending(self, opened: OpenRound, view: FleetView) -> bool:
        """Returns whether somebody works for the round, or is to; with a barrier also whether a block is missing."""
        if _is_at_work(opened, view):
            return True
        return self.rules.barrier_s is not None and not opened.is_given_up and bool(_missing(opened))

    def is_complete(self, opened: OpenRound, view: FleetView) -> bool:
        return not self.is_pending(opened, view) and not self._may_ask_again(opened, view)

    def replacements(self, state: RoundState, opened: OpenRound, view: FleetView) -> Sequence[Job]:
        """Returns those that have their data for themselves, when nothing at all has come."""
        if opened.num_received:
            return ()
        whole = [Job(device_id=name) for name in view.idle if not self._blocks(name, view)]
        state.attempt += bool(whole)
        return whole

    def second_copies(self, opened: OpenRound, view: FleetView) -> Sequence[Job]:
        """Returns whom to ask for missing blocks: holders that are not at work on them, or else all holders."""
        at_work = {opened.asked[name] for name in opened.pending(view)}
        missing = _missing(opened)
        holders = {
            block: [name for name in names if (name, _slot(block)) not in at_work] or names
            for block, names in self._holders(_present(view), view).items()
            if block in missing
        }
        opened.queued = _queues(holders)
        return _next_jobs(opened, view)

    def missing(self, opened: OpenRound, view: FleetView) -> Iterable[str]:
        """Returns what is waited for: blocks with those that were asked for them, and devices."""
        for block in sorted(_missing(opened)):
            asked = {opened.asked[name][0] for name in opened.copies.get(_slot(block), ())}
            yield f"block {block} of {' or '.join(sorted(asked)) or 'nobody'}"
        for name in opened.pending(view):
            device_id, slot = opened.asked[name]
            if slot not in opened.copies:
                yield device_id

    def _may_ask_again(self, opened: OpenRound, view: FleetView) -> bool:
        """Returns whether somebody who is there holds a block that is missing, and has not failed again and again."""
        missing = _missing(opened)
        if not missing or (opened.num_retries >= MAX_RETRIES and opened.num_received):
            return False
        return any(block in missing for name in _present(view) for block in self._blocks(name, view))

    def _blocks(self, device_id: str, view: FleetView) -> tuple[int, ...]:
        info = view.devices.get(device_id)
        return () if info is None else tuple(info.blocks.get(self.rules.task, ()))

    def _holders(self, names: Iterable[str], view: FleetView) -> dict[int, list[str]]:
        """Returns who holds which block, by block."""
        holders: dict[int, list[str]] = {}
        for name in names:
            for block in self._blocks(name, view):
                holders.setdefault(block, []).append(name)
        return dict(sorted(holders.items()))


def _present(view: FleetView) -> list[str]:
    """Returns the idle, and those at work, if only on a needless copy for a round that is closed."""
    return sorted({*view.idle, *(name for name in view.busy if may_get_more(name, view))})


def _queues(holders: Mapping[int, Sequence[str]]) -> dict[str, list[int]]:
    """Returns the blocks of each device in the order in which it does them.

    Each block is a first choice of its first holder, a second one of the next, and so on, so that copies come last.
    """
    choices: dict[str, list[tuple[int, int]]] = {}
    for block, names in holders.items():
        for rank, name in enumerate(names):
            choices.setdefault(name, []).append((rank, block))
    return {name: [block for _, block in sorted(ranked)] for name, ranked in choices.items()}


def _next_jobs(opened: OpenRound, view: FleetView) -> list[Job]:
    """Takes the next blocks from the queues of those that are there and have room."""
    jobs, busy = [], view.busy
    for name in [name for name in opened.queued if may_get_more(name, view)]:
        queue, room = opened.queued[name], MAX_OUTSTANDING - len(busy.get(name, ()))
        while queue and room > 0:
            block = queue.pop(0)
            if not opened.fold.has(_slot(block)):
                jobs.append(Job(device_id=name, slot=_slot(block), block=block))
                room -= 1
        if not queue:
            del opened.queued[name]
    return jobs


def _is_at_work(opened: OpenRound, view: FleetView) -> bool:
    """Returns whether somebody works for the round, or is there and waits to be asked."""
    if opened.is_pending(view):
        return True
    has = opened.fold.has
    return any(
        may_get_more(name, view) and not all(has(_slot(block)) for block in queue)
        for name, queue in opened.queued.items()
    )


def _is_out(opened: OpenRound, assignment_id: str, view: FleetView) -> bool:
    device_id, _ = opened.asked[assignment_id]
    return assignment_id in view.busy.get(device_id, ())


def _missing(opened: OpenRound) -> set[int]:
    """Returns the blocks of which no copy has come."""
    expected, has = opened.fold.expected, opened.fold.has
    return {int(slot.removeprefix(BLOCK)) for slot in expected if slot.startswith(BLOCK) and not has(slot)}


def _slot(block: int) -> str:
    return f"{BLOCK}{block}"


def _recall_all(view: FleetView) -> tuple[Order, ...]:
    """Returns recalls for whatever is still out when a round opens: copies that nobody needs."""
    return tuple(
        Recall(assignment_id=assignment_id, device_id=name)
        for name, outstanding in view.busy.items()
        for assignment_id in outstanding
    )
