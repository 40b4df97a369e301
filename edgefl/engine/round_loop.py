"""The round loop of live and simulated fleets; it depends on neither Flower nor a clock.

Each turn: fold arrivals, close complete rounds, ask the strategy, write it all to the journal, and only then
dispatch work. After the goal is reached nothing new is assigned; work in flight is finished early and drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol

from edgefl.core.errors import PrivacyBudgetError, StrategyError
from edgefl.core.types import (
    Array,
    ClippedUpdate,
    Decision,
    EvaluateInstruction,
    Event,
    FinishEarlyInstruction,
    Fleet,
    FleetView,
    Indices,
    Instruction,
    InstructionFailed,
    Journal,
    ParticipationPolicy,
    S,
    Strategy,
    Tensors,
    TrainInstruction,
    Update,
)
from edgefl.engine.divergence import MAX_HALVINGS, Divergence, DivergenceDetector, DivergenceRule
from edgefl.engine.evaluations import DeviceAccuracy, VersionAccuracy
from edgefl.engine.progress import (
    PriorProgress,
    ProgressTracker,
    RoundCounter,
    StoppingCriteria,
)

DRAIN_TIMEOUT_S = 60.0
"""Timeout of the drain of work in flight after the goal is reached, and then of the last evaluation."""

_NEW_RUN = PriorProgress()
_DEFAULT_RULE = DivergenceRule()

EvaluationRule = Callable[[int, int, FleetView, bool, Collection[str]], Sequence[EvaluateInstruction]]
"""(version, round that it ended, view, is last, devices with models of their own) -> evaluations."""

OnScore = Callable[[VersionAccuracy | DeviceAccuracy], None]


class _StrategyModelProvider(Generic[S]):
    """The newest model, and the devices' own where each has one, for the fleet to encode."""

    def __init__(self, strategy: Strategy[S], state: S) -> None:
        self.strategy, self.state = strategy, state

    @property
    def version(self) -> int:
        return self.strategy.version(self.state)

    def model(self) -> Tensors:
        return self.strategy.model(self.state)

    def device_model(self, device_id: str) -> Tensors:
        if not device_id:
            return self.model()
        model = self.strategy.node_models(self.state).get(device_id)
        if model is None:
            raise StrategyError(
                f"node_models: there is no model of {device_id!r} any more; a version keeps all that it began with"
            )
        return model

    def list_model_owners(self) -> Sequence[str]:
        """Returns the devices that have models of their own."""
        return tuple(self.strategy.node_models(self.state))

    def changed(self, since: int) -> Indices | None:
        return self.strategy.changed(self.state, since)


@dataclass(slots=True)
class DrainPhase:
    """Drain phase of a run: updates until `drain_until_s`, evaluations until `scored_until_s`."""

    reason: str
    drain_until_s: float
    scored_until_s: float
    keeps_model: bool
    requested_version: int = -1
    has_cancelled: bool = False

    def schedule_evaluations(
        self,
        provider: _StrategyModelProvider[S],
        progress: ProgressTracker,
        view: FleetView,
        evaluate: EvaluationRule,
    ) -> Sequence[EvaluateInstruction]:
        """Returns the final evaluations once the model is final, unless they were dispatched already."""
        requested_versions = {self.requested_version, progress.scores.requested_version}
        if not self._is_drained(view) or progress.version in requested_versions:
            return ()
        self.requested_version, self.scored_until_s = progress.version, view.now_s + DRAIN_TIMEOUT_S
        return evaluate(
            progress.version, progress.rounds.get_round(progress.version), view, True, provider.list_model_owners()
        )

    def is_over(self, progress: ProgressTracker, view: FleetView) -> bool:
        return self._is_drained(view) and (not progress.is_evaluating or view.now_s >= self.scored_until_s)

    def make_finish_early_decision(self, view: FleetView) -> Decision:
        """Returns requests to finish all work in flight early, once, and no other instructions."""
        cancellations: tuple[FinishEarlyInstruction, ...] = ()
        if not self.has_cancelled:
            self.has_cancelled = True
            cancellations = tuple(
                FinishEarlyInstruction(assignment_id=assignment_id, device_id=device_id)
                for device_id, outstanding in view.busy.items()
                for assignment_id in outstanding
            )
        until_s = self.scored_until_s if self._is_drained(view) else self.drain_until_s
        return Decision(instructions=cancellations, next_wake_s=max(0.0, min(5.0, until_s - view.now_s)))

    def _is_drained(self, view: FleetView) -> bool:
        return not view.busy or view.now_s >= self.drain_until_s


@dataclass(slots=True)
class LoopState:
    """State of the loop between two turns, beside the strategy's; `drain` once the goal is reached."""

    progress: ProgressTracker = field(default_factory=ProgressTracker)
    drain: DrainPhase | None = None

    @property
    def is_model_frozen(self) -> bool:
        return self.drain is not None and self.drain.keeps_model


class JournalWriter(Protocol):
    """The write-ahead log of one run."""

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def record_decision(self, decision: Decision) -> None: ...
    def record_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def commit(self) -> None: ...


class RunSubscriber:
    """Derives something from a run's log; each method is called once its entry is written, durable or not yet."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Events, before they take effect."""

    def on_decision(self, decision: Decision) -> None:
        """Instructions, before they are dispatched."""

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        """A new version, from these updates; `state` is the strategy's, and changes in place later."""

    def on_score(self, score: VersionAccuracy | DeviceAccuracy) -> None:
        """The accuracy of a version, or of the devices' own models after a round."""

    def on_clipped(self, clipped: ClippedUpdate) -> None:
        """An update is used with a smaller norm."""

    def on_divergence(self, divergence: Divergence) -> None:
        """The loss diverges, oscillates or stands still."""

    def on_finish(self) -> None:
        """The run is over; a last commit follows."""

    def on_commit(self) -> None:
        """Everything before is durable."""


class RunLog:
    """Implements `Journal`; without a write-ahead log, nothing is recovered, and updates stay in memory."""

    def __init__(self, wal: JournalWriter | None, subscribers: Sequence[RunSubscriber]) -> None:
        self._wal, self._subscribers = wal, subscribers

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        journaled = events if self._wal is None else self._wal.record_events(events)
        for subscriber in self._subscribers:
            subscriber.on_events(events)
        return journaled

    def record_decision(self, decision: Decision) -> None:
        if self._wal is not None:
            self._wal.record_decision(decision)
        for subscriber in self._subscribers:
            subscriber.on_decision(decision)

    def record_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        if self._wal is not None:
            self._wal.record_aggregation(version, assignment_ids)
        for subscriber in self._subscribers:
            subscriber.on_aggregation(version, assignment_ids, state)

    def record_score(self, score: VersionAccuracy | DeviceAccuracy) -> None:
        """Passes on an accuracy, which follows from the events recorded before."""
        for subscriber in self._subscribers:
            subscriber.on_score(score)

    def record_clipped(self, clipped: ClippedUpdate) -> None:
        """Passes on that an update was clipped, which follows from the events recorded before."""
        for subscriber in self._subscribers:
            subscriber.on_clipped(clipped)

    def record_divergence(self, divergence: Divergence) -> None:
        """Passes on what was found about the loss, which follows from the events recorded before."""
        for subscriber in self._subscribers:
            subscriber.on_divergence(divergence)

    def commit(self) -> None:
        """Makes the write-ahead log durable, then tells the subscribers."""
        if self._wal is not None:
            self._wal.commit()
        for subscriber in self._subscribers:
            subscriber.on_commit()

    def finish(self) -> None:
        """Commits what is left of a run that is over."""
        for subscriber in self._subscribers:
            subscriber.on_finish()
        self.commit()


class AcceptAllPolicy:
    """Policy that accepts every device and every update."""

    blocked_devices: Collection[str] = ()

    def eligible_view(self, view: FleetView) -> FleetView:
        return view

    def adapt_instruction(self, instruction: TrainInstruction, view: FleetView) -> TrainInstruction:  # noqa: ARG002 nobody is spared
        return instruction

    def rejection_reason(self, update: Update) -> str | None:  # noqa: ARG002 every update is let in
        return None

    def is_strike(self, failure: InstructionFailed) -> bool:
        return failure.is_strike

    def record_rejection(self, device_id: str) -> None: ...

    def observe(self, event: Event, accuracy: float | None) -> None: ...

    def admit(self, update: Update) -> Sequence[Update]:
        return (update,)

    def release(self, view: FleetView) -> Sequence[Update]:  # noqa: ARG002 none is held
        return ()

    def hold_view(self, view: FleetView) -> FleetView:
        return view

    def observe_decision(self, decision: Decision) -> Decision:
        return decision

    def record_version(self, version: int) -> None: ...

    def pop_clipped(self) -> Sequence[ClippedUpdate]:
        return ()


def run_rounds(  # noqa: PLR0913 the parts of a run, by name
    strategy: Strategy[S],
    state: S,
    *,
    fleet: Fleet,
    journal: Journal,
    goal: StoppingCriteria,
    evaluate: EvaluationRule,
    rounds: RoundCounter | None = None,
    policy: ParticipationPolicy | None = None,
    prior_progress: PriorProgress = _NEW_RUN,
    loop_state: LoopState | None = None,
    on_turn: Callable[[S, LoopState], None] = lambda _state, _loop_state: None,
    on_abort: Callable[[S], None] = lambda _: None,
    on_score: OnScore = lambda _: None,
    on_clipped: Callable[[ClippedUpdate], None] = lambda _: None,
    divergence: DivergenceRule = _DEFAULT_RULE,
    on_divergence: Callable[[Divergence], None] = lambda _: None,
) -> tuple[S, str]:
    """Runs a strategy on a fleet until the goal is reached.

    Args:
        strategy: the federated algorithm.
        state: of the strategy, to continue from.
        fleet: executes the instructions.
        journal: records everything before it takes effect.
        goal: stopping criteria.
        evaluate: called at the end of every round.
        rounds: versions per round; one when None.
        policy: eligible devices and accepted updates; all when None.
        prior_progress: counts of a resumed run.
        loop_state: of a run that resumes exactly there; `prior_progress` is ignored then.
        on_turn: called with both states at the beginning of every turn; the journal has all before it.
        on_abort: called with the state, which is consistent, when the fleet raises instead of returning events.
        on_score: called with every accuracy, after the events that it follows from are recorded.
        on_clipped: called with every update that is used with a smaller norm, likewise.
        divergence: what follows when the loss diverges, oscillates or stands still.
        on_divergence: called when it does, likewise.

    Returns:
        The last state and why the run ended.

    Raises:
        RunFailedError: no device can make progress.
    """
    source = _StrategyModelProvider(strategy, state)
    if loop_state is None:
        loop_state = LoopState(ProgressTracker(version=source.version, rounds=rounds or RoundCounter()))
        loop_state.progress.restore(prior_progress)
        if divergence.action == "halve" and not strategy.has_nodes:
            loop_state.progress.divergence.keep_model(strategy.model(state))
    progress, policy = loop_state.progress, policy or AcceptAllPolicy()
    progress.scores.trusts_single = goal.trust_single_evaluation

    receive = partial(_receive, source, policy, loop_state, on_clipped)
    report_divergence = partial(_handle_divergence, source, progress, divergence, on_divergence)
    while True:
        on_turn(source.state, loop_state)
        view = fleet.view()
        receive(policy.release(view))
        view = policy.hold_view(view)

        def dispatch(*instructions: Instruction, now_s: float = view.now_s) -> None:
            journal.record_decision(Decision(instructions=instructions))
            journal.commit()
            progress.record_dispatch(instructions, now_s)
            fleet.dispatch(instructions, source)

        aggregate_ready = partial(
            _aggregate_ready,
            source,
            view,
            progress,
            evaluate,
            journal=journal,
            policy=policy,
            dispatch=dispatch,
            on_round_end=lambda number: report_divergence(
                _close_round(source, progress.divergence, divergence, number)
            ),
        )
        report_divergence(progress.find_not_finite(view, divergence), is_round_end=False)
        instructions = _close_rounds(source, view, loop_state, goal, aggregate_ready, dispatch)
        if loop_state.drain is None:
            decision = _schedule(source, view, progress, policy)
        else:
            instructions += loop_state.drain.schedule_evaluations(source, progress, view, evaluate)
            if not instructions and loop_state.drain.is_over(progress, view):
                journal.commit()
                _publish_scores(progress.nodes.complete_pending(), on_score)
                return source.state, loop_state.drain.reason
            decision = loop_state.drain.make_finish_early_decision(view)
        dispatch(*instructions, *decision.instructions)
        until_s = progress.compute_wake_s(
            goal, view.now_s + decision.next_wake_s, is_over=loop_state.drain is not None
        )
        events = deque(_wait_for_events(fleet, until_s, source, on_abort))
        while events:  # one by one, so that an update's memory is free before the next is decoded
            journaled = journal.record_events([_validate_event(events.popleft(), policy)])
            _apply_events(journaled, receive, loop_state, policy, on_score)


def _close_rounds(
    source: _StrategyModelProvider[S],
    view: FleetView,
    loop_state: LoopState,
    goal: StoppingCriteria,
    aggregate_ready: Callable[[], Sequence[EvaluateInstruction]],
    dispatch: Callable[..., None],
) -> list[EvaluateInstruction]:
    """Closes the complete rounds, and starts the drain once the goal is reached; returns evaluations to dispatch."""
    progress = loop_state.progress
    evaluations = [] if loop_state.is_model_frozen else [*aggregate_ready()]
    progress.scores.record_dispatch(evaluations)
    if loop_state.drain is not None or (reason := progress.find_stop_reason(goal, view)) is None:
        return evaluations
    until_s = view.now_s + DRAIN_TIMEOUT_S
    # A model that is as good as asked stays as it is; otherwise updates that finish early still count.
    is_good = goal.is_quality_reached(progress.scores)
    loop_state.drain = DrainPhase(reason=reason, drain_until_s=until_s, scored_until_s=until_s, keeps_model=is_good)
    if is_good:
        return evaluations
    dispatch(*evaluations)  # with the present model
    source.state = source.strategy.finish(source.state)
    evaluations = [*aggregate_ready()]
    progress.scores.record_dispatch(evaluations)
    return evaluations


def _wait_for_events(
    fleet: Fleet, until_s: float, provider: _StrategyModelProvider[S], on_abort: Callable[[S], None]
) -> Sequence[Event]:
    """Returns the fleet's events; when it raises instead, the state is handed over first."""
    try:
        return fleet.wait(until_s)
    except BaseException:  # an interrupt too, which a run is resumed after
        on_abort(provider.state)
        raise


def _schedule(
    provider: _StrategyModelProvider[S], view: FleetView, progress: ProgressTracker, policy: ParticipationPolicy
) -> Decision:
    """Returns the strategy's decision, as adapted by the policy."""
    progress.check_progress_possible(view, policy.blocked_devices)
    provider.state, decision = provider.strategy.assign(provider.state, policy.eligible_view(view))
    decision = policy.observe_decision(decision)
    instructions = tuple(
        policy.adapt_instruction(instruction, view) if isinstance(instruction, TrainInstruction) else instruction
        for instruction in decision.instructions
    )
    return replace(decision, instructions=instructions)


def _validate_event(event: Event, policy: ParticipationPolicy) -> Event:
    """Returns the event; for a rejected update, its failure with the reason."""
    if isinstance(event, InstructionFailed) and policy.is_strike(event):
        policy.record_rejection(event.device_id)
        event = replace(event, is_strike=True)
    reason = policy.rejection_reason(event) if isinstance(event, Update) else None
    if reason is None or not isinstance(event, Update):
        return event
    return InstructionFailed.from_rejected(event, reason)


def _apply_events(
    events: Sequence[Event],
    receive: Callable[[Sequence[Update]], None],
    loop_state: LoopState,
    policy: ParticipationPolicy,
    on_score: OnScore,
) -> None:
    """Applies journaled events; the policy gets the accuracy of each newest version once."""
    for event in events:
        scores = loop_state.progress.record_event(event)
        newest = (score.accuracy for score in scores if isinstance(score, VersionAccuracy) and score.is_newest)
        policy.observe(event, next(newest, None))
        _publish_scores(scores, on_score)
        if isinstance(event, Update):
            receive(policy.admit(event))


def _receive(
    source: _StrategyModelProvider[S],
    policy: ParticipationPolicy,
    loop_state: LoopState,
    on_clipped: Callable[[ClippedUpdate], None],
    updates: Sequence[Update],
) -> None:
    for clipped in policy.pop_clipped():
        on_clipped(clipped)
    for update in () if loop_state.is_model_frozen else updates:
        source.state = source.strategy.receive(source.state, update)


def _publish_scores(scores: Sequence[VersionAccuracy | DeviceAccuracy], on_score: OnScore) -> None:
    for score in scores:
        on_score(score)


def _aggregate_ready(  # noqa: PLR0913 the parts of a run, by name
    provider: _StrategyModelProvider[S],
    view: FleetView,
    progress: ProgressTracker,
    evaluate: EvaluationRule,
    *,
    journal: Journal,
    policy: ParticipationPolicy,
    dispatch: Callable[..., None],
    on_round_end: Callable[[int], None],
) -> Sequence[EvaluateInstruction]:
    """Aggregates while the strategy is ready; returns the evaluations of the newest model."""
    instructions: Sequence[EvaluateInstruction] = ()
    while provider.strategy.ready(provider.state, view):
        if instructions:  # the fleet sends the newest model: dispatch evaluations of this one first
            dispatch(*instructions)
            instructions = ()
        try:
            _aggregate_once(provider, journal, progress)
        except PrivacyBudgetError:  # the goal says so, too, and ends the run with the model that it has
            break
        policy.record_version(progress.version)
        if progress.rounds.is_round_end(progress.version):
            on_round_end(progress.rounds.get_round(progress.version))
            instructions = evaluate(
                progress.version,
                progress.rounds.get_round(progress.version),
                view,
                False,
                provider.list_model_owners(),
            )
    return instructions


def _handle_divergence(
    source: _StrategyModelProvider[S],
    progress: ProgressTracker,
    rule: DivergenceRule,
    on_divergence: Callable[[Divergence], None],
    found: Divergence | None,
    *,
    is_round_end: bool = True,
) -> None:
    """Does what the run file says about a finding, and passes it on with that in words."""
    if found is None:
        return
    done = ""
    if rule.action == "halve":
        # Within a round devices may have this version's model already, so it stays.
        model = progress.divergence.good_model if is_round_end else {}
        done = _halve_learning_rate(source, progress.divergence, model)
    elif rule.action == "stop":
        progress.stop_reason = f"stopped, since in {found.message}"
    on_divergence(replace(found, message=found.message + done))


def _halve_learning_rate(
    source: _StrategyModelProvider[S], detector: DivergenceDetector, model: Mapping[str, Array]
) -> str:
    """Halves the learning rate and goes back to a model, where both can be; returns what was done in words.

    A model that has diverged may not learn again at any rate, such as one whose units are all off.
    """
    strategy = source.strategy
    halved = strategy.halve_learning_rate(source.state) if detector.num_halvings < MAX_HALVINGS else None
    if halved is None:
        return "; the learning rate cannot be halved any more"
    source.state, detector.num_halvings = halved, detector.num_halvings + 1
    done = f"; the learning rate is halved, 1/{2**detector.num_halvings} of what it was at first"
    restored = strategy.restore_model(source.state, model) if model else None
    detector.start_again(None if restored is None else model)
    if restored is None:
        return done
    source.state = restored
    return f"{done}, and the run goes back to its last good model"


def _close_round(
    source: _StrategyModelProvider[S], detector: DivergenceDetector, rule: DivergenceRule, number: int
) -> Divergence | None:
    """Returns what is found at the end of a round, if anything."""
    found = detector.close_round(number, rule)
    if rule.action == "halve" and not source.strategy.has_nodes:
        detector.keep_model(source.strategy.model(source.state))
    return found


def _aggregate_once(provider: _StrategyModelProvider[S], journal: Journal, progress: ProgressTracker) -> None:
    provider.state = provider.strategy.aggregate(provider.state)
    assignment_ids = provider.strategy.used(provider.state)
    progress.version, progress.updates = provider.version, progress.updates + len(assignment_ids)
    journal.record_aggregation(progress.version, assignment_ids, provider.state)
