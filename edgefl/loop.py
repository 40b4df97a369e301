"""The one round loop: it drives the live fleet and the virtual one, and knows neither Flower nor a clock.

Each turn: fold what arrived, close what is ready, ask the strategy, write it all to the journal, and only then
give out work. After the goal is reached nothing new is assigned; what is in flight is recalled and drained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from edgefl.errors import RunFailedError
from edgefl.types import (
    Assignment,
    Decision,
    Evaluated,
    Evaluation,
    Event,
    Fleet,
    FleetView,
    Indices,
    Journal,
    Lost,
    Order,
    Outcome,
    Recall,
    Role,
    S,
    Stop,
    Strategy,
    Tensors,
    Update,
)

DRAIN_S = 60.0
"""How long the loop waits for what is in flight after the goal is reached, and then for the last evaluation."""
GIVE_UP_AFTER = 3
"""The run fails when every device has failed so often since the last update that arrived."""

EvaluationRule = Callable[[int, FleetView, bool], Sequence[Evaluation]]
"""(version, view, is this the last one) -> the evaluations to ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When a run is over: whichever is reached first; None does not count. `seconds` count from the first work."""

    versions: int | None = None
    updates: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    accuracy: float | None = None


@dataclass(slots=True)
class Scoreboard:
    """`accuracy` is that of the newest version that everybody who was asked has evaluated, or been lost over.

    It is the mean over the test examples of the evaluators; of the devices' own splits where there is no evaluator.
    """

    accuracy: float | None = None
    version: int = -1
    asked: int = -1
    outstanding: dict[str, int] = field(default_factory=dict)
    results: dict[int, list[Evaluated]] = field(default_factory=dict)

    def ask(self, orders: Sequence[Order]) -> None:
        self.outstanding |= {o.assignment_id: o.version for o in orders if isinstance(o, Evaluation)}
        self.asked = max([self.asked, *self.outstanding.values()])

    def note(self, event: Evaluated | Lost) -> None:
        version = self.outstanding.pop(event.assignment_id, None)
        if version is None:
            return
        if isinstance(event, Evaluated):
            self.results.setdefault(version, []).append(event)
        if version not in self.outstanding.values():
            self._score(version, self.results.pop(version, []))

    def reached(self, accuracy: float | None) -> bool:
        return accuracy is not None and self.accuracy is not None and self.accuracy >= accuracy

    def _score(self, version: int, results: Sequence[Evaluated]) -> None:
        chosen = [result for result in results if result.source != "device"] or results
        num_examples = sum(result.num_examples for result in chosen)
        if num_examples and version > self.version:
            self.version = version
            self.accuracy = sum(result.accuracy * result.num_examples for result in chosen) / num_examples


@dataclass(slots=True)
class Tally:
    """What the goal is measured against."""

    version: int = 0
    updates: int = 0
    bytes: int = 0
    started_s: float | None = None
    stop_reason: str | None = None
    scores: Scoreboard = field(default_factory=Scoreboard)
    failures: dict[str, int] = field(default_factory=dict)
    last_failure: str = ""

    def give(self, orders: Sequence[Order], now_s: float) -> None:
        self.scores.ask(orders)
        if self.started_s is None and any(isinstance(order, Assignment) for order in orders):
            self.started_s = now_s

    def note(self, event: Event) -> None:
        match event:
            case Update():
                self.bytes += event.metrics.bytes_up + event.metrics.bytes_down
                self.failures.clear()
            case Lost() if event.assignment_id not in self.scores.outstanding:
                if event.outcome in {Outcome.FAILED, Outcome.REFUSED}:
                    self.failures[event.device_id] = self.failures.get(event.device_id, 0) + 1
                    self.last_failure = f"{event.device_id}: {event.reason}"
            case Evaluated():
                self.bytes += event.bytes_up + event.bytes_down
                self.scores.note(event)
            case Lost():
                self.scores.note(event)
            case Stop():
                self.stop_reason = event.reason

    def reached(self, goal: Goal, now_s: float) -> str | None:
        """Returns why the run is over, or None."""
        facts: tuple[tuple[str, float | None, float | None], ...] = (
            ("rounds", self.version, goal.versions),
            ("updates", self.updates, goal.updates),
            ("seconds", None if self.started_s is None else now_s - self.started_s, goal.seconds),
            ("bytes", self.bytes, goal.bytes),
            ("accuracy", self.scores.accuracy, goal.accuracy),
        )
        for name, value, limit in facts:
            if value is not None and limit is not None and value >= limit:
                return f"{name} reached {limit:g}"
        return self.stop_reason

    def next_wake_s(self, goal: Goal, until_s: float, *, is_over: bool) -> float:
        """Returns when to look again: at `until_s`, or earlier when the time of the run ends before."""
        if is_over or goal.seconds is None or self.started_s is None:
            return until_s
        return min(until_s, self.started_s + goal.seconds)

    def check_hope(self, view: FleetView) -> None:
        """Ends a run that no device can do, instead of asking for ever.

        Raises:
            RunFailedError: every trainer that is there fails again and again, and nobody brought an update.
        """
        trainers = [info.device_id for info in view.devices.values() if info.role == Role.TRAINER]
        if trainers and all(self.failures.get(device_id, 0) >= GIVE_UP_AFTER for device_id in trainers):
            raise RunFailedError(
                f"no device can do this work, each failed {GIVE_UP_AFTER} times; {self.last_failure}"
            )


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


@dataclass(slots=True)
class _Drain:
    """The end of a run: training may come in until `recalled_until_s`, scores until `scored_until_s`."""

    reason: str
    recalled_until_s: float
    scored_until_s: float
    keeps_model: bool
    asked: int = -1

    def evaluations(self, tally: Tally, view: FleetView, evaluate: EvaluationRule) -> Sequence[Evaluation]:
        """Returns the last evaluations once the model is the last one, unless somebody was asked for them already."""
        if not self._is_settled(view) or tally.version in {self.asked, tally.scores.asked}:
            return ()
        self.asked, self.scored_until_s = tally.version, view.now_s + DRAIN_S
        return evaluate(tally.version, view, True)

    def is_over(self, tally: Tally, view: FleetView) -> bool:
        return self._is_settled(view) and (not tally.scores.outstanding or view.now_s >= self.scored_until_s)

    def recalls(self, view: FleetView) -> Decision:
        """Returns recalls for all that is in flight; a device that was recalled already ignores the second one."""
        recalls = tuple(
            Recall(assignment_id=assignment_id, device_id=device_id)
            for device_id, outstanding in view.busy.items()
            for assignment_id in outstanding
        )
        until_s = self.scored_until_s if self._is_settled(view) else self.recalled_until_s
        return Decision(orders=recalls, next_wake_s=max(0.0, min(5.0, until_s - view.now_s)))

    def _is_settled(self, view: FleetView) -> bool:
        return not view.busy or view.now_s >= self.recalled_until_s


def drive(
    strategy: Strategy[S], state: S, *, fleet: Fleet, journal: Journal, goal: Goal, evaluate: EvaluationRule
) -> tuple[S, str]:
    """Runs a strategy on a fleet until the goal is reached.

    Returns:
        The last state and why the run ended.

    Raises:
        RunFailedError: no device can do the work.
    """
    source = _Source(strategy, state)
    tally = Tally(version=source.version)
    drain: _Drain | None = None

    def give(*orders: Order) -> None:
        journal.decided(Decision(orders=orders))
        journal.commit()
        tally.give(orders, fleet.view().now_s)
        fleet.dispatch(orders, source)

    while True:
        view = fleet.view()
        orders: list[Evaluation] = []
        keeps_model = drain is not None and drain.keeps_model
        while not keeps_model and strategy.ready(source.state, view):
            if orders:  # the fleet sends the newest model: what is to be done with this one leaves now
                give(*orders)
            _close(source, journal, tally)
            orders = list(evaluate(tally.version, view, False))
        tally.scores.ask(orders)
        if drain is None and (reason := tally.reached(goal, view.now_s)) is not None:
            until_s = view.now_s + DRAIN_S
            # A model that is good enough stays as it is; otherwise what is recalled is still learnt from.
            is_good = tally.scores.reached(goal.accuracy)
            drain = _Drain(reason=reason, recalled_until_s=until_s, scored_until_s=until_s, keeps_model=is_good)
        if drain is None:
            tally.check_hope(view)
            source.state, decision = strategy.assign(source.state, view)
        else:
            orders += drain.evaluations(tally, view, evaluate)
            if not orders and drain.is_over(tally, view):
                journal.commit()
                return source.state, drain.reason
            decision = drain.recalls(view)
        give(*orders, *decision.orders)
        until_s = tally.next_wake_s(goal, view.now_s + decision.next_wake_s, is_over=drain is not None)
        for event in journal.received(fleet.wait(until_s)):
            tally.note(event)
            if isinstance(event, Update) and not (drain is not None and drain.keeps_model):
                source.state = strategy.receive(source.state, event)


def _close(source: _Source[S], journal: Journal, tally: Tally) -> None:
    source.state = source.strategy.aggregate(source.state)
    used = source.strategy.used(source.state)
    tally.version, tally.updates = source.version, tally.updates + len(used)
    journal.aggregated(tally.version, used, source.state)
