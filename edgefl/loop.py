"""The one round loop: it drives the live fleet and the virtual one, and knows neither Flower nor a clock.

Each turn: fold what arrived, close what is ready, ask the strategy, write it all to the journal, and only then
give out work. After the goal is reached nothing new is assigned; what is in flight is recalled and drained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

from edgefl.types import (
    Decision,
    Evaluated,
    Evaluation,
    Event,
    Fleet,
    FleetView,
    Indices,
    Journal,
    Lost,
    Recall,
    S,
    Stop,
    Strategy,
    Tensors,
    Update,
)

DRAIN_S = 60.0
"""How long the loop waits for what is in flight after the goal is reached, in seconds."""

EvaluationRule = Callable[[int, FleetView, bool], Sequence[Evaluation]]
"""(version, view, is this the last one) -> the evaluations to ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When a run is over: whichever is reached first; None does not count."""

    versions: int | None = None
    updates: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    accuracy: float | None = None


@dataclass(slots=True)
class Tally:
    """What the goal is measured against. Accuracy is that of the newest version anybody has evaluated fully."""

    started_s: float
    version: int = 0
    updates: int = 0
    bytes: int = 0
    accuracy: float | None = None
    stop_reason: str | None = None
    evaluating: set[str] = field(default_factory=set)

    def note(self, event: Event) -> None:
        match event:
            case Update():
                self.bytes += event.metrics.bytes_up + event.metrics.bytes_down
            case Evaluated():
                self.evaluating.discard(event.assignment_id)
                self.accuracy = event.accuracy if event.source != "device" else self.accuracy
            case Lost():
                self.evaluating.discard(event.assignment_id)
            case Stop():
                self.stop_reason = event.reason

    def reached(self, goal: Goal, now_s: float) -> str | None:
        """Returns why the run is over, or None."""
        facts: tuple[tuple[str, float | None, float | None], ...] = (
            ("rounds", self.version, goal.versions),
            ("updates", self.updates, goal.updates),
            ("seconds", now_s - self.started_s, goal.seconds),
            ("bytes", self.bytes, goal.bytes),
            ("accuracy", self.accuracy, goal.accuracy),
        )
        for name, value, limit in facts:
            if value is not None and limit is not None and value >= limit:
                return f"{name} reached {limit:g}"
        return self.stop_reason


class _Source(Generic[S]):
    """The newest model, for the fleet to encode when it gives out work."""

    def __init__(self, strategy: Strategy[S], state: S) -> None:
        self.strategy, self.state = strategy, state

    @property
    def version(self) -> int:
        return self.strategy.version(self.state)

    def model(self) -> Tensors:
        return self.strategy.model(self.state)

    def changed(self, since: int) -> Indices | None:
        return self.strategy.changed(self.state, since)


def drive(
    strategy: Strategy[S], state: S, *, fleet: Fleet, journal: Journal, goal: Goal, evaluate: EvaluationRule
) -> tuple[S, str]:
    """Runs a strategy on a fleet until the goal is reached.

    Returns:
        The last state and why the run ended.
    """
    source = _Source(strategy, state)
    tally = Tally(started_s=fleet.view().now_s, version=source.version)
    drain_until_s: float | None = None
    evaluated = -1
    while True:
        view = fleet.view()
        orders: list[Evaluation] = []
        while strategy.ready(source.state, view):
            _close(source, journal, tally)
            orders += evaluate(tally.version, view, False)
        reason = tally.reached(goal, view.now_s)
        if reason is None:
            source.state, decision = strategy.assign(source.state, view)
        else:
            drain_until_s = drain_until_s or view.now_s + DRAIN_S
            decision = _drain(view, drain_until_s)
            if not view.busy and evaluated != tally.version:
                orders = orders or list(evaluate(tally.version, view, True))
                evaluated = tally.version
            in_flight = view.busy or tally.evaluating or orders
            if not in_flight or view.now_s >= drain_until_s:
                journal.commit()
                return source.state, reason
        decision = replace(decision, orders=(*orders, *decision.orders))
        tally.evaluating.update(order.assignment_id for order in orders)
        evaluated = max((order.version for order in orders), default=evaluated)
        journal.decided(decision)
        journal.commit()
        fleet.dispatch(decision.orders, source)
        for event in journal.received(fleet.wait(view.now_s + decision.next_wake_s)):
            tally.note(event)
            if isinstance(event, Update):
                source.state = strategy.receive(source.state, event)


def _close(source: _Source[S], journal: Journal, tally: Tally) -> None:
    source.state = source.strategy.aggregate(source.state)
    used = source.strategy.used(source.state)
    tally.version, tally.updates = source.version, tally.updates + len(used)
    journal.aggregated(tally.version, used, source.state)


def _drain(view: FleetView, until_s: float) -> Decision:
    """Returns recalls for all that is in flight; a device that was recalled already ignores the second one."""
    recalls = tuple(
        Recall(assignment_id=assignment_id, device_id=device_id)
        for device_id, outstanding in view.busy.items()
        for assignment_id in outstanding
    )
    return Decision(orders=recalls, next_wake_s=max(0.0, min(5.0, until_s - view.now_s)))
