"""One round of a site: the boards' instructions, their updates as they come, and the answer that they make.

The updates are added up in double precision, in the order of the boards' names, each times its number of examples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.coordinator.execution.live_fleet import LiveFleet
from edgefl.coordinator.execution.site_outage import load_taken_work
from edgefl.coordinator.execution.site_records import RoundRecord
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.claims import ClaimLimits
from edgefl.core.errors import DataError, TaskError
from edgefl.core.metrics import MetricSet
from edgefl.core.sites import MAX_SITE_BOARDS, SITE_KEY, SITE_LIMITS_KEY, BoardShare, SiteLimits, SiteTask
from edgefl.core.types import (
    EPSILON,
    Array,
    Decision,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    Instruction,
    InstructionFailed,
    Json,
    SparseTensor,
    Tensor,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateStatus,
    derive_rng,
)
from edgefl.engine.fleet_state import FleetState
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.store import REJECTED_EVENT_KIND
from edgefl.strategies.aggregation import StreamingMean
from edgefl.strategies.update_guard import UpdateGuard

log = logging.getLogger(__name__)

EARLY_S = 30.0
"""Time in which a board that is asked to finish early has to answer."""
PATIENCE_S, PATIENCE_RATIO = 1800.0, 4.0
"""Without a deadline, once half of the boards have answered: the others have so long, or that many times as long as
the last of these took, whichever is more."""
MAX_MARGIN_S, MARGIN_SHARE = 30.0, 0.1
"""Of the run's deadline, which is for the way upstream."""
POLL_S = 1.0
SPARSE_SHARE = 0.45
"""An entry of a sparse update costs an index beside its value: above this share of entries a dense one is smaller."""
_NOT_IN_PATTERNS = frozenset("*?[];=| ")
"""What means something in a codec line; a tensor with such a name is sent dense."""

OnAlive = Callable[[], None]
"""Called every so often while the boards work."""
RecordEvent = Callable[[str, str, str], None]
"""(kind, device, message) -> None; writes an event to the gateway's history."""


class SentModel:
    """Model provider of one instruction: its body, as it came."""

    def __init__(self, version: int) -> None:
        self.version = version

    def model(self) -> Tensors:
        return {}

    def device_model(self, device_id: str) -> Tensors:
        raise DataError(f"a gateway has no model of {device_id!r}")

    def changed(self, since: int) -> None:  # noqa: ARG002 boards of a site get whole models
        return None


@dataclass(slots=True)
class SiteRun:
    """What is known of a run while the gateway runs: boards that cannot take part, and the refusals of others."""

    rejected: set[str] = field(default_factory=set)
    guard: UpdateGuard = field(default_factory=UpdateGuard)

    @property
    def excluded(self) -> frozenset[str]:
        return frozenset(self.rejected | self.guard.state.quarantined)


@dataclass(slots=True, kw_only=True)
class SiteRound:
    """One round of the boards, between two calls of the fleet."""

    header: Json
    task: SiteTask
    record: RoundRecord
    fleet: LiveFleet
    wal: WalJournal
    used: Mapping[str, Sequence[str]]
    run: SiteRun
    record_event: RecordEvent
    assigned: dict[str, TrainInstruction] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _updates: dict[str, Update] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _mean: StreamingMean = field(default_factory=lambda: StreamingMean(precision="float64"))
    _like: dict[str, Array] = field(init=False)
    _nonzero: dict[str, Array] = field(default_factory=dict)
    _is_dense: bool = False

    def __post_init__(self) -> None:
        self._like = {spec.name: np.broadcast_to(np.zeros((), spec.dtype), spec.shape) for spec in self.task.spec}

    def resume(self, registry: DeviceRegistry) -> None:
        """Takes up what the journal has of the round; boards whose update it lacks are asked for it."""
        for _, entry in self.wal.read_entries():
            if isinstance(entry, Decision):
                self._add_instructions([each for each in entry.instructions if isinstance(each, TrainInstruction)])
            elif isinstance(entry, Update | InstructionFailed):
                self._apply(entry)
        remaining = [instruction for key, instruction in self.assigned.items() if key not in self._done]
        if not remaining:
            return
        state = FleetState(limits=ClaimLimits(task=str(self.header["task"])))
        for instruction in self.assigned.values():  # what a board weighs depends on all that were asked
            state.claim_limits.record_order(instruction.device_id, registry.get_device(instruction.device_id))
        for instruction in remaining:
            state.update_device(instruction.device_id, registry.get_device(instruction.device_id))
            state.assign(instruction)
        view = self.fleet.view()
        state.start_turn(view.now_s)
        view.restore_from(state)
        in_flight = [replace(each, dispatched_s=view.now_s) for each in state.in_flight.values()]
        self.fleet.resume_in_flight(in_flight, SentModel(int(self.header["version"])))

    def collect(
        self, clock: Callable[[], float], on_alive: OnAlive, ends_early: Callable[[], bool] = lambda: False
    ) -> None:
        """Returns when every board has answered, or is lost, or has had its time."""
        if not self.assigned:
            self._assign()
        times = _RoundTimes(started_s=clock(), deadline_s=get_site_limits(self.header).deadline_s)
        while len(self._done) < len(self.assigned):
            on_alive()
            events = self.fleet.wait(clock() + POLL_S)
            results = [self._check(event) for event in events if isinstance(event, Update | InstructionFailed)]
            has_half = 2 * len(self._updates) >= len(self.assigned)
            if not results and (reason := times.find_reason_to_end(clock(), has_half=has_half)):
                results = self._give_up(reason)
            journaled = self.wal.record_events(results)
            self.wal.commit()
            for event in journaled:
                self._apply(event)
            if times.early_s is None and ends_early():
                times.early_s = clock()
                self._finish_early()
            times.newest_s = clock() if any(isinstance(event, Update) for event in results) else times.newest_s

    def _list_pending(self) -> list[TrainInstruction]:
        return [each for key, each in self.assigned.items() if key not in self._done]

    def _give_up(self, reason: str) -> list[Event]:
        """Returns the failures of the boards that have not answered."""
        return [
            InstructionFailed(
                device_id=each.device_id,
                assignment_id=each.assignment_id,
                outcome=UpdateStatus.LOST,
                reason=reason,
            )
            for each in self._list_pending()
        ]

    def make_reply(self) -> tuple[Json, bytes]:
        """Returns the answer to the coordinator upstream.

        Raises:
            DataError: no board has sent an update.
        """
        if not self._updates:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in [*self._reasons.items()][:5])
            raise DataError(f"no board of this site has sent an update: {reasons}")
        mean, taken = self._mean.compute_mean(self._like), load_taken_work(self.record, self.task.spec)
        displacement = {
            name: (np.asarray(mean[name]) + taken.get(name, 0)).astype(like.dtype)
            for name, like in self._like.items()
        }
        codec = "dense" if self._is_dense or taken else _choose_codec(self._nonzero)
        body = make_codec(codec, self.task.spec).encode(displacement, derive_rng(0))
        updates = self._list_updates()
        return {"metrics": {**_combine_metrics(updates, self._plan), SITE_KEY: _list_shares(updates)}}, body

    def list_used(self) -> dict[str, str]:
        """Returns by board its assignment whose update is in the answer."""
        return {update.device_id: update.assignment_id for update in self._list_updates()}

    def _list_updates(self) -> list[Update]:
        """Returns the updates without their tensors, in the order of the boards' names."""
        return [self._updates[key] for key in self.assigned if key in self._updates]

    @property
    def _plan(self) -> TrainConfig:
        return TrainConfig.from_json(self.header.get("plan", {}))

    def _assign(self) -> None:
        """Gives the instruction to every board that is there."""
        plan, version = self._plan, int(self.header["version"])
        instructions = [
            TrainInstruction(
                assignment_id=f"{self.record.identity}-{number}",
                device_id=board,
                base_version=version,
                plan=plan,
                codec=str(self.header.get("codec", "dense")),
                used_assignments=tuple(self.used.get(board, ())),
            )
            for number, board in enumerate(list_idle(self.fleet, self.run.excluded))
        ]
        self.wal.record_decision(Decision(instructions=tuple(instructions)))
        self.wal.commit()
        self._add_instructions(instructions)
        orders: list[Instruction] = [*instructions]
        self.fleet.dispatch(orders, SentModel(version))

    def _add_instructions(self, instructions: Sequence[TrainInstruction]) -> None:
        for instruction in instructions:
            self.assigned[instruction.assignment_id] = instruction
            self._mean.expected.append(instruction.assignment_id)

    def _finish_early(self) -> None:
        orders = [
            FinishEarlyInstruction(assignment_id=each.assignment_id, device_id=each.device_id)
            for each in self._list_pending()
        ]
        self.fleet.dispatch(orders, SentModel(int(self.header["version"])))

    def _check(self, event: Update | InstructionFailed) -> Event:
        """Returns an event; in place of an update that cannot be one, its failure."""
        if isinstance(event, InstructionFailed) or (reason := self.run.guard.rejection_reason(event)) is None:
            return event
        log.warning("the update of %s is refused: %s", event.device_id, reason)
        self.record_event(REJECTED_EVENT_KIND, event.device_id, f"its update is refused: {reason}")
        return InstructionFailed.from_rejected(event, reason)

    def _apply(self, event: Event) -> None:
        """Counts a journaled event, once."""
        if not isinstance(event, Update | InstructionFailed) or event.assignment_id in self._done:
            return
        if event.assignment_id not in self.assigned:
            return
        self._done.add(event.assignment_id)
        if isinstance(event, InstructionFailed):
            log.warning("%s sends no update in this round: %s", event.device_id, event.reason)
            self._reasons[event.device_id] = event.reason
            return
        self._updates[event.assignment_id] = replace(event, tensors={}, body=None)
        self._note_entries(event.tensors)
        self._mean.add_update(event.assignment_id, event, weight=_weigh(event))
        self._mean.unload_waiting(event.assignment_id)
        self._add_next()

    def _add_next(self) -> None:
        """Adds the updates that are next in the order of the boards, and passes over boards that are lost."""
        mean = self._mean
        mean.add_next_updates(self._like)
        while mean.cursor < len(mean.expected) and mean.expected[mean.cursor] in self._done - self._updates.keys():
            mean.cursor += 1
            mean.add_next_updates(self._like)

    def _note_entries(self, tensors: Tensors) -> None:
        """Notes which entries are not zero, while all updates are sparse."""
        if self._is_dense:
            return
        floats = [spec for spec in self.task.spec if np.issubdtype(np.dtype(spec.dtype), np.inexact)]
        if not any(isinstance(tensors[spec.name], SparseTensor) for spec in floats):
            self._is_dense, self._nonzero = True, {}
            return
        for spec in floats:
            entries = self._nonzero.setdefault(spec.name, np.zeros(spec.size, bool))
            _mark_entries(entries, tensors[spec.name])


@dataclass(slots=True, kw_only=True)
class _RoundTimes:
    """When a round began, was asked to end early, and got its newest update; seconds of the gateway's clock."""

    started_s: float
    deadline_s: float | None
    early_s: float | None = None
    newest_s: float | None = None

    def find_reason_to_end(self, now_s: float, *, has_half: bool) -> str:
        """Returns why the round ends without the boards that are missing; empty while it goes on."""
        if self.early_s is not None and now_s >= self.early_s + EARLY_S:
            return f"not back within {EARLY_S:g} s of the request to finish early"
        limit_s = self.deadline_s
        if limit_s is None and has_half:
            limit_s = max(PATIENCE_S, PATIENCE_RATIO * ((self.newest_s or self.started_s) - self.started_s))
        if limit_s is not None and now_s >= self.started_s + limit_s:
            return f"not back within {limit_s:g} s"
        return ""


def _list_shares(updates: Sequence[Update]) -> list[Json]:
    """Returns what each board has given, for the history upstream."""
    return [
        BoardShare(
            board=update.device_id,
            num_examples=update.metrics.num_examples,
            loss=update.metrics.loss,
            compute_s=update.metrics.compute_s,
        ).to_json()
        for update in updates
    ]


def _weigh(update: Update) -> float:
    """Returns the weight of an update, as upstream weighs one: by its examples, and 1 without any."""
    return float(max(1, update.metrics.num_examples))


def _mark_entries(entries: Array, tensor: Tensor) -> None:
    if isinstance(tensor, SparseTensor):
        entries[tensor.indices[tensor.values != 0]] = True
    else:
        entries |= np.asarray(tensor).reshape(-1) != 0


def _choose_codec(nonzero: Mapping[str, Array]) -> str:
    """Returns the codec of merged sparse updates that loses nothing: it keeps the entries that any board sent."""
    layers = ["dense"]
    for name, entries in nonzero.items():
        share = float(np.count_nonzero(entries)) / max(1, entries.size)
        if share < SPARSE_SHARE and not set(name) & _NOT_IN_PATTERNS:
            layers.append(f"{name} = topk:{math.ceil(share * 1e6 + 1) / 1e6:.6f}")
    return "; ".join(layers)


def _combine_metrics(updates: Sequence[Update], plan: TrainConfig) -> Json:
    """Returns the figures of a site's update: sums where they add up, else the mean or the most of its boards."""
    weight = sum(_weigh(update) for update in updates)
    losses = [(_weigh(update), update.metrics.loss) for update in updates if update.metrics.loss is not None]
    measured = sum(share for share, _ in losses)
    iterations = plan.count_iterations(int(weight)) if plan.epochs is not None else None
    spent = [update.metrics.extra[EPSILON] for update in updates if EPSILON in update.metrics.extra]
    energy = [update.metrics.energy_j for update in updates if update.metrics.energy_j is not None]
    return {
        "iterations": max(update.metrics.iterations for update in updates) if iterations is None else iterations,
        "num_examples": int(weight),
        "loss": sum(share * loss for share, loss in losses) / measured if measured else None,
        "compute_s": max(update.metrics.compute_s for update in updates),
        **({"extra": {EPSILON: max(spent)}} if spent else {}),
        **({"health": {"energy_j": sum(energy)}} if energy else {}),
    }


def combine_evaluations(
    results: Sequence[EvaluateResult],
    metrics: MetricSet,
    record_event: RecordEvent = lambda _kind, _device, _message: None,
) -> tuple[Json, bytes]:
    """Returns the evaluation of all examples that these are of, without boards whose sums no device can have.

    Raises:
        DataError: there is none.
    """
    kept, sums = _add_evaluations(results, metrics, record_event)
    if not kept:
        raise DataError("no board of this site has evaluated the model")
    total = sum(result.num_examples for result in kept)
    accuracies = [result.accuracy for result in kept if result.accuracy is not None]
    accuracy = None
    if len(accuracies) == len(kept):
        weighted = [result.num_examples * found for result, found in zip(kept, accuracies, strict=True)]
        accuracy = sum(weighted) / total
    loss = sum(result.num_examples * result.loss for result in kept) / total
    figures = {"num_examples": total, "loss": loss, "accuracy": accuracy}
    return {"metrics": figures}, sums


def _add_evaluations(
    results: Sequence[EvaluateResult], metrics: MetricSet, record_event: RecordEvent
) -> tuple[list[EvaluateResult], bytes]:
    """Returns the evaluations that add up, and their sums: the largest come last, so that a false one is left out."""

    def measure(result: EvaluateResult) -> float:
        sums = metrics.decode(result.sums) if result.sums else {}
        arrays = [array for each in sums.values() for array in each.values()]
        return max((float(np.abs(array.astype(np.float64)).max(initial=0)) for array in arrays), default=0.0)

    kept: list[EvaluateResult] = []
    total = b""
    for result in sorted(results, key=lambda each: (measure(each), each.device_id)):
        try:
            total = metrics.add([total, result.sums] if kept else [result.sums])
        except (ValueError, TaskError) as error:
            log.warning("the evaluation of %s is left out: %s", result.device_id, error)
            record_event(REJECTED_EVENT_KIND, result.device_id, f"its evaluation is left out: {error}")
        else:
            kept.append(result)
    return kept, total


def list_idle(fleet: LiveFleet, excluded: frozenset[str]) -> list[str]:
    """Returns the boards that can be given work now, by name."""
    return [name for name in fleet.view().idle if name not in excluded][:MAX_SITE_BOARDS]


def get_site_limits(header: Json) -> SiteLimits:
    """Returns the limits of a run at this level; its deadline is a little before that of upstream."""
    limits = SiteLimits.parse(header.get(SITE_LIMITS_KEY))
    if limits.deadline_s is None:
        return limits
    margin_s = min(MAX_MARGIN_S, MARGIN_SHARE * limits.deadline_s)
    return replace(limits, deadline_s=limits.deadline_s - margin_s)
