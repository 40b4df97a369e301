"""One run, driven from where it begins or goes on to its end: puts its journal, history and fleet around the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgefl.coordinator.dispatch.door import NotReadyError
from edgefl.coordinator.dispatch.journaled_fleet import JournaledFleet, Real
from edgefl.coordinator.dispatch.live_fleet import InterruptedRunError
from edgefl.coordinator.dispatch.replay import ReplayError, RunClock
from edgefl.coordinator.runs.facts import facts_of
from edgefl.coordinator.runs.keeper import Keeper
from edgefl.coordinator.runs.kept_models import ModelKeeper
from edgefl.coordinator.runs.ledger import Ledger
from edgefl.coordinator.runs.model_journal import ModelJournal
from edgefl.coordinator.runs.recorder import Recorder
from edgefl.coordinator.runs.resuming import Resumed
from edgefl.coordinator.runs.standing import GuardStanding, standing_of
from edgefl.errors import JournalError, NotKeptError, StoreError, StrategyError
from edgefl.loop import Course, EvaluationRule, drive
from edgefl.storage.journal import WalJournal
from edgefl.storage.state_files import num_encoded
from edgefl.strategies.gate import StrategyGate
from edgefl.tally import Goal, RoundCount
from edgefl.types import Assignment, Strategy


class Drivable(Protocol):
    """The part of an assembled run that the loop needs."""

    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def goal(self) -> Goal: ...
    @property
    def evaluate(self) -> EvaluationRule: ...
    @property
    def rounds(self) -> RoundCount: ...
    @property
    def gate(self) -> StrategyGate: ...


class _FollowedError(Exception):
    """A script has been told up to its last turn."""


@dataclass(slots=True, kw_only=True)
class Driver:
    """Used by the thread of the run, once.

    Attributes:
        made, before: the run's objects, and what it begins or goes on with.
        wal, ledger, keeper, models: where all of it goes.
        live, clock: the real boards, and the run's own time.
        gives_other_ids: a checkpoint is to be written before anything is given out, so that another life of the
            coordinator gives other ids.
    """

    made: Drivable
    before: Resumed
    wal: WalJournal
    ledger: Ledger
    keeper: Keeper
    models: ModelKeeper
    live: Real
    clock: RunClock
    gives_other_ids: bool = False
    recorder: Recorder = field(init=False)
    _fleet: JournaledFleet = field(init=False)
    _stand: tuple[Any, Course] | None = None

    def __post_init__(self) -> None:
        made, before, standing = self.made, self.before, self.before.standing
        self._fleet = JournaledFleet(
            self.live,
            self.wal,
            before.script,
            self.clock,
            None if standing is None else standing.fleet,
            lives=before.lives,
        )
        self.recorder = Recorder(
            wal=self._fleet,
            ledger=self.ledger,
            rounds=made.rounds,
            clock=self.clock.at,
            monotonic=self.clock.now_s,
            flagged=lambda: made.gate.guard.flagged,
            facts=facts_of(made.strategy),
            earlier=before.unused,
            may_repeat=before.lives.number > 0 and not before.is_exact,
        )

    def drive(self) -> tuple[Any, str]:
        """Returns the last state and why the run ended.

        Raises:
            InterruptedRunError: the coordinator stops, or boards that took part are away; the run can go on later.
            ReplayError: it does not come to what its journal says.
            EdgeflError: it has failed.
        """
        version = self.made.strategy.version(self.before.state)
        self.keeper.begin(version, at_once=self.gives_other_ids, soon=self.before.is_exact)
        try:
            return self._loop(self._turn)
        except (StoreError, JournalError):
            raise
        except Exception as error:
            if not self._fleet.is_live:  # what the journal has was survived once: it is no reason to fail now
                raise ReplayError(f"{type(error).__name__}: {error}") from error
            self.recorder.commit()  # what the last turn brought is history too
            self.ledger.finish()
            # Boards that are away must not cost a run what it has reached: it can be taken up once more.
            waits = isinstance(error, NotReadyError) and self.before.goes_on
            if self._stand and (waits or isinstance(error, InterruptedRunError)):
                self._checkpoint_unless_updates_wait(*self._stand)
            if waits:
                raise InterruptedRunError(str(error)) from error
            raise

    def follow(self) -> int:
        """Brings a run of a former life to where the last turn of its script begins; no board is asked for anything.

        Returns:
            The version there, of which a checkpoint is written: the run goes on from it in another life.

        Raises:
            ReplayError: it does not come to what its journal says.
            StoreError: as `drive`.
        """
        try:
            self._loop(self._turn_before_last)
        except _FollowedError:
            assert self._stand is not None
            self._checkpoint(*self._stand, is_of_former_life=True)
            return self._stand[1].tally.version
        except (StoreError, JournalError):
            raise
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        raise ReplayError("the run ends before its journal does")

    @property
    def is_live(self) -> bool:
        """Whether all that the journal knew has been told, and what is written down now is new."""
        return self._fleet.is_live

    def finish(self, state: Any) -> None:
        """Keeps the last state and the model of a run that is over."""
        strategy = self.made.strategy
        version = strategy.version(state)
        number, model, lives = self.made.rounds.of(version), strategy.model(state), self.before.lives
        self.keeper.keep_guard(GuardStanding.of(self.made.gate.guard))
        try:
            self.keeper.finish(version, number, state, model, self.models, lives)
        except NotKeptError as error:
            self.recorder.finish()  # all that came before is history nevertheless
            raise self._unsavable(version, error) from error

    def _loop(self, turn: Callable[[Any, Course], None]) -> tuple[Any, str]:
        try:
            return self._driven(turn)
        except NotKeptError as error:
            raise StrategyError(f"strategy {self._name}: gave what no journal keeps: {error}") from error

    def _unsavable(self, version: int, error: NotKeptError) -> StrategyError:
        methods = "assign, receive or aggregate" if version else "init, assign or receive"
        return StrategyError(
            f"strategy {self._name}: {methods} made a state of version {version} that cannot be saved: {error}"
        )

    @property
    def _name(self) -> str:
        return str(getattr(self.made.strategy, "name", type(self.made.strategy).__name__))

    def _driven(self, turn: Callable[[Any, Course], None]) -> tuple[Any, str]:
        made, before = self.made, self.before
        journal = ModelJournal(self.recorder, self.models, made.strategy.model, lambda: self.wal.last_record)
        course = None
        if before.standing is not None:
            before.standing.restore(made.gate)
            course = before.standing.course_of(made.rounds)
            out = (given.order for given in before.standing.fleet.out.values())
            asked = [order for order in out if isinstance(order, Assignment)]
            self.recorder.go_on(asked, course.tally, before.standing.opened_s, before.state)
            journal.go_on(course.tally.scores)
        elif before.goes_on and not before.is_exact:
            before.guard.restore(made.gate.guard)
            self.recorder.go_on_behind(made.strategy.version(before.state), before.state)
        return drive(
            made.strategy,
            before.state,
            fleet=self._fleet,
            journal=journal,
            goal=made.goal,
            evaluate=made.evaluate,
            rounds=made.rounds,
            gate=made.gate,
            earlier=before.earlier,
            course=course,
            turn=turn,
            left=self._left,
        )

    def _turn_before_last(self, state: Any, course: Course) -> None:
        self._stand = state, course
        if self.before.script.ends_with_next_turn:
            raise _FollowedError

    def _turn(self, state: Any, course: Course) -> None:
        self._stand = state, course
        if self._fleet.is_live and self.keeper.is_due(course.tally.version):
            self._checkpoint(state, course)

    def _left(self, state: Any) -> None:
        if self._stand is not None:
            self._stand = state, self._stand[1]

    def _checkpoint_unless_updates_wait(self, state: Any, course: Course) -> None:
        """Writes a checkpoint of a run that is interrupted, but not in the middle of a round.

        It would have every update that waits for its turn, decoded: a model's worth of memory and of disk for each.
        The journal has them too, and brings the run there again.
        """
        if self._goes_on_alone or num_encoded(state) == 0:
            self._checkpoint(state, course)

    @property
    def _goes_on_alone(self) -> bool:
        return bool(getattr(self.made.strategy, "goes_on_alone", False))

    def _checkpoint(self, state: Any, course: Course, *, is_of_former_life: bool = False) -> None:
        standing = None
        if self._goes_on_alone:
            self.keeper.keep_guard(GuardStanding.of(self.made.gate.guard))
        else:
            standing = standing_of(course, self._fleet.standing(), self.made.gate, self.recorder.opened_s)
        try:
            self.keeper.checkpoint(state, standing, is_of_former_life=is_of_former_life)
        except NotKeptError as error:
            raise self._unsavable(course.tally.version, error) from error
