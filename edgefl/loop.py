"""The one round loop: it drives the live fleet and the virtual one, and knows neither Flower nor a clock.

Each turn: fold what arrived, close what is ready, ask the strategy, write it all to the journal, and only then
give out work. After the goal is reached nothing new is assigned; what is in flight is recalled and drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

from edgefl.errors import StrategyError
from edgefl.tally import Earlier, Goal, RoundCount, Tally
from edgefl.types import (
    Assignment,
    Decision,
    Evaluation,
    Event,
    Fleet,
    FleetView,
    Gate,
    Indices,
    Journal,
    Lost,
    Order,
    Outcome,
    Recall,
    S,
    Strategy,
    Tensors,
    Update,
)

DRAIN_S = 60.0
"""How long the loop waits for what is in flight after the goal is reached, and then for the last evaluation."""

_NOTHING = Earlier()

EvaluationRule = Callable[[int, int, FleetView, bool, Collection[str]], Sequence[Evaluation]]
"""(version, round that it ended, view, is this the last one, devices with models of their own) -> what to ask for."""


class _Source(Generic[S]):
    """The newest model, and the devices' own where each has one, for the fleet to encode when it gives out work."""

    def __init__(self, strategy: Strategy[S], state: S) -> None:
        self.strategy, self.state = strategy, state

    @property
    def version(self) -> int:
        return self.strategy.version(self.state)

    def model(self) -> Tensors:
        return self.strategy.model(self.state)

    def model_of(self, subject: str) -> Tensors:
        if not subject:
            return self.model()
        model = self._node_models().get(subject)
        if model is None:
            raise StrategyError(
                f"node_models: there is no model of {subject!r} any more; a version keeps all that it began with"
            )
        return model

    def subjects(self) -> Sequence[str]:
        """Returns the devices that have models of their own."""
        return tuple(self._node_models())

    def changed(self, since: int) -> Indices | None:
        return self.strategy.changed(self.state, since)

    def _node_models(self) -> Mapping[str, Tensors]:
        told: Callable[[S], Mapping[str, Tensors]] | None = getattr(self.strategy, "node_models", None)
        return {} if told is None else told(self.state)


@dataclass(slots=True)
class Drain:
    """The end of a run: training may come in until `recalled_until_s`, scores until `scored_until_s`."""

    reason: str
    recalled_until_s: float
    scored_until_s: float
    keeps_model: bool
    asked: int = -1
    has_recalled: bool = False

    def evaluations(
        self, source: _Source[S], tally: Tally, view: FleetView, evaluate: EvaluationRule
    ) -> Sequence[Evaluation]:
        """Returns the last evaluations once the model is the last one, unless somebody was asked for them already."""
        if not self._is_settled(view) or tally.version in {self.asked, tally.scores.asked}:
            return ()
        self.asked, self.scored_until_s = tally.version, view.now_s + DRAIN_S
        return evaluate(tally.version, tally.rounds.of(tally.version), view, True, source.subjects())

    def is_over(self, tally: Tally, view: FleetView) -> bool:
        return self._is_settled(view) and (not tally.awaits_scores or view.now_s >= self.scored_until_s)

    def recalls(self, view: FleetView) -> Decision:
        """Returns recalls for all that is in flight, once: nothing is given out any more."""
        recalls: tuple[Recall, ...] = ()
        if not self.has_recalled:
            self.has_recalled = True
            recalls = tuple(
                Recall(assignment_id=assignment_id, device_id=device_id)
                for device_id, outstanding in view.busy.items()
                for assignment_id in outstanding
            )
        until_s = self.scored_until_s if self._is_settled(view) else self.recalled_until_s
        return Decision(orders=recalls, next_wake_s=max(0.0, min(5.0, until_s - view.now_s)))

    def _is_settled(self, view: FleetView) -> bool:
        return not view.busy or view.now_s >= self.recalled_until_s


@dataclass(slots=True)
class Course:
    """Where a run stands between two turns, beside the strategy's state; `drain` once its goal is reached."""

    tally: Tally = field(default_factory=Tally)
    drain: Drain | None = None

    @property
    def keeps_model(self) -> bool:
        return self.drain is not None and self.drain.keeps_model


class OpenGate:
    """Lets everything pass."""

    barred: Collection[str] = ()

    def view(self, view: FleetView) -> FleetView:
        return view

    def adjust(self, order: Assignment, view: FleetView) -> Assignment:  # noqa: ARG002 nobody is spared
        return order

    def refusal(self, update: Update) -> str | None:  # noqa: ARG002 every update is let in
        return None

    def strike(self, device_id: str) -> None: ...

    def note(self, event: Event, accuracy: float | None) -> None: ...


def drive(  # noqa: PLR0913 the parts of a run, by name
    strategy: Strategy[S],
    state: S,
    *,
    fleet: Fleet,
    journal: Journal,
    goal: Goal,
    evaluate: EvaluationRule,
    rounds: RoundCount | None = None,
    gate: Gate | None = None,
    earlier: Earlier = _NOTHING,
    course: Course | None = None,
    turn: Callable[[S, Course], None] = lambda _state, _course: None,
    left: Callable[[S], None] = lambda _: None,
) -> tuple[S, str]:
    """Runs a strategy on a fleet until the goal is reached.

    Args:
        strategy: who trains, and how updates become the next model.
        state: of the strategy, to go on from.
        fleet: who does the work.
        journal: told everything before it is acted on.
        goal: when it is over.
        evaluate: asked at the end of every round.
        rounds: how many versions are a round; one when None.
        gate: who may be asked and whose updates are let in; everybody when None.
        earlier: what a run that goes on has counted before.
        course: where it stood, of a run that goes on exactly there; nothing is counted from `earlier` then.
        turn: told at the beginning of every turn how things stand; all that came before is in the journal.
        left: given the state when the fleet raises instead of bringing events; it is whole then.

    Returns:
        The last state and why the run ended.

    Raises:
        RunFailedError: no device can do the work.
    """
    source = _Source(strategy, state)
    if course is None:
        course = Course(Tally(version=source.version, rounds=rounds or RoundCount()))
        course.tally.go_on(earlier)
    tally, gate = course.tally, gate or OpenGate()

    while True:
        turn(source.state, course)
        view = fleet.view()

        def give(*orders: Order, now_s: float = view.now_s) -> None:
            journal.decided(Decision(orders=orders))
            journal.commit()
            tally.give(orders, now_s)
            fleet.dispatch(orders, source)

        orders: list[Evaluation] = []
        if not course.keeps_model:
            orders += _close_ready(source, view, tally, evaluate, journal=journal, give=give)
        tally.scores.ask(orders)
        if course.drain is None and (reason := tally.reached(goal, view.now_s)) is not None:
            until_s = view.now_s + DRAIN_S
            # A model that is good enough stays as it is; otherwise what is recalled is still learnt from.
            is_good = tally.scores.reached(goal)
            course.drain = Drain(reason=reason, recalled_until_s=until_s, scored_until_s=until_s, keeps_model=is_good)
            if not is_good:
                give(*orders)  # with the model as it is now
                source.state = _finished(strategy, source.state)
                orders = [*_close_ready(source, view, tally, evaluate, journal=journal, give=give)]
                tally.scores.ask(orders)
        if course.drain is None:
            decision = _asked(source, view, tally, gate)
        else:
            orders += course.drain.evaluations(source, tally, view, evaluate)
            if not orders and course.drain.is_over(tally, view):
                journal.commit()
                return source.state, course.drain.reason
            decision = course.drain.recalls(view)
        give(*orders, *decision.orders)
        until_s = tally.next_wake_s(goal, view.now_s + decision.next_wake_s, is_over=course.drain is not None)
        arrived = deque(_waited(fleet, until_s, source, left))
        while arrived:  # one by one, so that what an update takes is free again before the next one is looked at
            _take(journal.received([_let_in(arrived.popleft(), gate)]), source, course, gate)


def _waited(fleet: Fleet, until_s: float, source: _Source[S], left: Callable[[S], None]) -> Sequence[Event]:
    """Returns what the fleet brings; when it raises instead, the state is handed over first."""
    try:
        return fleet.wait(until_s)
    except BaseException:
        left(source.state)
        raise


def _asked(source: _Source[S], view: FleetView, tally: Tally, gate: Gate) -> Decision:
    """Returns what the strategy decides, as the gate lets it pass."""
    tally.check_hope(view, gate.barred)
    source.state, decision = source.strategy.assign(source.state, gate.view(view))
    orders = tuple(gate.adjust(order, view) if isinstance(order, Assignment) else order for order in decision.orders)
    return replace(decision, orders=orders)


def _let_in(event: Event, gate: Gate) -> Event:
    """Returns the event; in place of an update that the gate refuses, that it is lost and why."""
    if isinstance(event, Lost) and event.is_strike:
        gate.strike(event.device_id)
    reason = gate.refusal(event) if isinstance(event, Update) else None
    if reason is None or not isinstance(event, Update):
        return event
    return Lost(
        device_id=event.device_id,
        assignment_id=event.assignment_id,
        outcome=Outcome.REFUSED,
        reason=reason,
        is_strike=True,
    )


def _take(events: Sequence[Event], source: _Source[S], course: Course, gate: Gate) -> None:
    for event in events:
        _note(event, course.tally, gate)
        if isinstance(event, Update) and not course.keeps_model:
            source.state = source.strategy.receive(source.state, event)


def _note(event: Event, tally: Tally, gate: Gate) -> None:
    """Tells the tally and the gate; the gate learns the accuracy of a version once, when it is known."""
    known = tally.scores.version
    tally.note(event)
    gate.note(event, tally.scores.accuracy if tally.scores.version != known else None)


def _close_ready(
    source: _Source[S],
    view: FleetView,
    tally: Tally,
    evaluate: EvaluationRule,
    *,
    journal: Journal,
    give: Callable[..., None],
) -> Sequence[Evaluation]:
    """Aggregates while the strategy has something to aggregate; returns the evaluations of the newest model."""
    orders: Sequence[Evaluation] = ()
    while source.strategy.ready(source.state, view):
        if orders:  # the fleet sends the newest model: what is to be done with this one leaves now
            give(*orders)
            orders = ()
        _close(source, journal, tally)
        if tally.rounds.ends_at(tally.version):
            orders = evaluate(tally.version, tally.rounds.of(tally.version), view, False, source.subjects())
    return orders


def _finished(strategy: Strategy[S], state: S) -> S:
    """Tells a strategy that wants to know that nothing more will be assigned."""
    finish: Callable[[S], S] | None = getattr(strategy, "finish", None)
    return state if finish is None else finish(state)


def _close(source: _Source[S], journal: Journal, tally: Tally) -> None:
    source.state = source.strategy.aggregate(source.state)
    used = source.strategy.used(source.state)
    tally.version, tally.updates = source.version, tally.updates + len(used)
    journal.aggregated(tally.version, used, source.state)
