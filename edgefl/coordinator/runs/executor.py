"""Run executor: runs the round loop with the run's journal, history and fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgefl.coordinator.execution.admission import NotEnoughDevicesError
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.recording_fleet import RecordingFleet, UnderlyingFleet
from edgefl.coordinator.execution.replay import ReplayError, RunClock
from edgefl.coordinator.runs.checkpointing import Checkpointer
from edgefl.coordinator.runs.history_recorder import HistoryRecorder
from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.coordinator.runs.model_saving_journal import ModelSavingJournal
from edgefl.coordinator.runs.recovery import RunStart
from edgefl.coordinator.runs.run_snapshot import GuardSnapshot, create_run_snapshot
from edgefl.coordinator.runs.strategy_metrics import find_metrics_hook
from edgefl.core.errors import JournalError, NotKeptError, StoreError, StrategyError
from edgefl.core.types import Strategy, TrainInstruction
from edgefl.engine.round_loop import EvaluationRule, LoopState, run_rounds
from edgefl.engine.stopping import RoundCounter, StoppingCriteria
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.state_serialisation import count_encoded_updates
from edgefl.strategies.participation import RunParticipationPolicy


class ExecutableRun(Protocol):
    """The part of an assembled run that the loop needs."""

    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def goal(self) -> StoppingCriteria: ...
    @property
    def evaluate(self) -> EvaluationRule: ...
    @property
    def rounds(self) -> RoundCounter: ...
    @property
    def policy(self) -> RunParticipationPolicy: ...


class _ReplayFinishedError(Exception):
    """Raised when a replay has reached its last turn."""


@dataclass(slots=True, kw_only=True)
class RunExecutor:
    """Executes one run, once. Not thread-safe: used by the run's thread alone.

    Attributes:
        components, start: the run's objects, and the state it starts or resumes from.
        wal, history, checkpointer, model_retention: where its records, rows, states and models go.
        live_fleet, clock: the live devices, and the run's own time.
        has_new_ids: write a checkpoint before the first dispatch, so that a restarted coordinator assigns other ids.
    """

    components: ExecutableRun
    start: RunStart
    wal: WalJournal
    history: HistoryWriter
    checkpointer: Checkpointer
    model_retention: ModelRetention
    live_fleet: UnderlyingFleet
    clock: RunClock
    has_new_ids: bool = False
    recorder: HistoryRecorder = field(init=False)
    _fleet: RecordingFleet = field(init=False)
    _last_turn: tuple[Any, LoopState] | None = None

    def __post_init__(self) -> None:
        components, start, snapshot = self.components, self.start, self.start.snapshot
        self._fleet = RecordingFleet(
            self.live_fleet,
            self.wal,
            start.replay,
            self.clock,
            None if snapshot is None else snapshot.fleet,
            incarnations=start.incarnations,
        )
        self.recorder = HistoryRecorder(
            wal=self._fleet,
            history=self.history,
            rounds=components.rounds,
            clock=self.clock.unix_s,
            monotonic=self.clock.now_s,
            get_blocked=lambda: components.policy.guard.blocked_devices,
            compute_metrics=find_metrics_hook(components.strategy),
            unused_updates=start.unused_updates,
            can_repeat=start.incarnations.current > 0 and not start.is_exact,
        )

    def run(self) -> tuple[Any, str]:
        """Returns the last state and the reason of the run's end.

        Raises:
            InterruptedRunError: the coordinator stops, or previous devices are away; the run can be resumed.
            ReplayError: the replay deviates from the journal.
            EdgeflError: it has failed.
        """
        version = self.components.strategy.version(self.start.state)
        self.checkpointer.start(version, is_due_now=self.has_new_ids, is_due_soon=self.start.is_exact)
        try:
            return self._run_loop(self._on_turn)
        except (StoreError, JournalError):
            raise
        except Exception as error:
            if not self._fleet.is_live:  # the journaled turns did not fail before: the replay deviates
                raise ReplayError(f"{type(error).__name__}: {error}") from error
            self.recorder.commit()  # the last turn is history too
            self.history.finish()
            # Absent devices must not cost a run its progress: it can be resumed once more.
            is_awaiting_devices = isinstance(error, NotEnoughDevicesError) and self.start.is_resumed
            if self._last_turn and (is_awaiting_devices or isinstance(error, InterruptedRunError)):
                self._checkpoint_unless_updates_pending(*self._last_turn)
            if is_awaiting_devices:
                raise InterruptedRunError(str(error)) from error
            raise

    def replay(self) -> int:
        """Replays a run of an earlier incarnation to its last turn, without contacting any device.

        Returns:
            The version there, which is checkpointed: the run goes on from it in another incarnation.

        Raises:
            ReplayError: the replay deviates from the journal.
            StoreError: as `run`.
        """
        try:
            self._run_loop(self._on_replayed_turn)
        except _ReplayFinishedError:
            assert self._last_turn is not None
            self._save_checkpoint(*self._last_turn, is_of_previous_incarnation=True)
            return self._last_turn[1].tally.version
        except (StoreError, JournalError):
            raise
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        raise ReplayError("the run ends before its journal does")

    @property
    def is_live(self) -> bool:
        """Whether the replay is over, and everything recorded is new."""
        return self._fleet.is_live

    def finish(self, state: Any) -> None:
        """Saves the last state and the model of a run that is over."""
        strategy = self.components.strategy
        version = strategy.version(state)
        number, model, incarnations = (
            self.components.rounds.get_round(version),
            strategy.model(state),
            self.start.incarnations,
        )
        self.checkpointer.save_guard(GuardSnapshot.from_guard(self.components.policy.guard))
        try:
            self.checkpointer.finish(version, number, state, model, self.model_retention, incarnations)
        except NotKeptError as error:
            self.recorder.finish()  # the history up to here is kept nevertheless
            raise self._create_save_error(version, error) from error

    def _run_loop(self, on_turn: Callable[[Any, LoopState], None]) -> tuple[Any, str]:
        try:
            return self._run_rounds(on_turn)
        except NotKeptError as error:
            raise StrategyError(f"strategy {self._strategy_name}: gave what no journal keeps: {error}") from error

    def _create_save_error(self, version: int, error: NotKeptError) -> StrategyError:
        methods = "assign, receive or aggregate" if version else "init, assign or receive"
        return StrategyError(
            f"strategy {self._strategy_name}: {methods} made a state of version {version} "
            f"that cannot be saved: {error}"
        )

    @property
    def _strategy_name(self) -> str:
        return str(getattr(self.components.strategy, "name", type(self.components.strategy).__name__))

    def _run_rounds(self, on_turn: Callable[[Any, LoopState], None]) -> tuple[Any, str]:
        components, start = self.components, self.start
        journal = ModelSavingJournal(
            self.recorder, self.model_retention, components.strategy.model, lambda: self.wal.last_record
        )
        loop_state = None
        if start.snapshot is not None:
            start.snapshot.restore(components.policy)
            loop_state = start.snapshot.restore_loop_state(components.rounds)
            in_flight = (dispatched.order for dispatched in start.snapshot.fleet.out.values())
            assignments = [instruction for instruction in in_flight if isinstance(instruction, TrainInstruction)]
            self.recorder.resume(assignments, loop_state.tally, start.snapshot.opened_s, start.state)
            journal.resume(loop_state.tally.scores)
        elif start.is_resumed and not start.is_exact:
            start.guard_snapshot.restore(components.policy.guard)
            self.recorder.resume_after(components.strategy.version(start.state), start.state)
        return run_rounds(
            components.strategy,
            start.state,
            fleet=self._fleet,
            journal=journal,
            goal=components.goal,
            evaluate=components.evaluate,
            rounds=components.rounds,
            policy=components.policy,
            prior_progress=start.earlier_progress,
            loop_state=loop_state,
            on_turn=on_turn,
            on_abort=self._on_abort,
        )

    def _on_replayed_turn(self, state: Any, loop_state: LoopState) -> None:
        self._last_turn = state, loop_state
        if self.start.replay.is_at_last_turn:
            raise _ReplayFinishedError

    def _on_turn(self, state: Any, loop_state: LoopState) -> None:
        self._last_turn = state, loop_state
        if self._fleet.is_live and self.checkpointer.is_due(loop_state.tally.version):
            self._save_checkpoint(state, loop_state)

    def _on_abort(self, state: Any) -> None:
        if self._last_turn is not None:
            self._last_turn = state, self._last_turn[1]

    def _checkpoint_unless_updates_pending(self, state: Any, loop_state: LoopState) -> None:
        """Checkpoints an interrupted run, unless its state holds unused updates.

        These are decoded, each a model's worth of memory and of disk. The journal has them too, and a replay
        restores them.
        """
        if self._is_autonomous or count_encoded_updates(state) == 0:
            self._save_checkpoint(state, loop_state)

    @property
    def _is_autonomous(self) -> bool:
        return bool(getattr(self.components.strategy, "goes_on_alone", False))

    def _save_checkpoint(
        self, state: Any, loop_state: LoopState, *, is_of_previous_incarnation: bool = False
    ) -> None:
        snapshot = None
        if self._is_autonomous:
            self.checkpointer.save_guard(GuardSnapshot.from_guard(self.components.policy.guard))
        else:
            snapshot = create_run_snapshot(
                loop_state, self._fleet.create_snapshot(), self.components.policy, self.recorder.round_starts_s
            )
        try:
            self.checkpointer.save(state, snapshot, is_of_previous_incarnation=is_of_previous_incarnation)
        except NotKeptError as error:
            raise self._create_save_error(loop_state.tally.version, error) from error
