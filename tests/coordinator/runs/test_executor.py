"""A run that is interrupted anywhere: what is written down then, and that it goes on to the same model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faulty_fleet import TASK, FaultyFleet, first_model
from live_faulty_fleet import LiveFaultyFleet
from synced_wal import SyncedWal

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.replay import RunClock
from edgefl.coordinator.runs.checkpointing import (
    NEW_INCARNATION_FILE,
    PRIVACY_FILE,
    Checkpointer,
    open_spend_recorder,
)
from edgefl.coordinator.runs.executor import RunExecutor
from edgefl.coordinator.runs.history_recorder import HistoryRecorder
from edgefl.coordinator.runs.history_writer import HistoryWriter
from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.coordinator.runs.recovery import RunStart, can_auto_finish, restore_exactly, restore_from_checkpoint
from edgefl.core.config import ModelsSection, RunConfig, parse_run
from edgefl.core.errors import RunFailedError, StrategyError
from edgefl.core.metrics import NO_METRICS, MetricSet, ReplyMetrics
from edgefl.core.types import (
    Event,
    FinishEarlyInstruction,
    Instruction,
    ModelProvider,
    Strategy,
    TensorKind,
    Tensors,
    TensorSpec,
    TrainInstruction,
)
from edgefl.engine.divergence import DivergenceRule
from edgefl.engine.progress import EpochSize, RoundCounter, StoppingCriteria
from edgefl.engine.round_loop import EvaluationRule
from edgefl.storage.checkpoints import list_checkpoints
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.rollback import record_resume
from edgefl.storage.state_serialisation import (
    count_encoded_updates,
    decode_state,
    decode_tensors,
    encode_model,
    encode_state,
)
from edgefl.storage.store import Store
from edgefl.strategies.correlated_noise import CorrelatedNoise, ParticipationLimits
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.private_mean import PrivacySpend, PrivateMean, Release, SpendRecorder
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.update_guard import UpdateGuard

ROUNDS = 3


class Killed(BaseException):
    """Nothing that is written down: the process has ended."""


def raises(error: type[BaseException]) -> Any:
    def step(*_args: Any, **_options: Any) -> None:
        raise error

    return step


class StillClock(RunClock):
    """Shows the fleet's time, which is no time of this machine."""

    def start(self) -> None:
        self.set_time(0.0, 100.0)


class TickingClock(StillClock):
    """Goes on a little with every look, also under the next coordinator."""

    def __init__(self, ticks: Iterator[int]) -> None:
        super().__init__()
        self._ticks, self._is_live = ticks, False

    def start(self) -> None:
        super().start()
        self._is_live = True

    def unix_s(self) -> float:
        return 100.0 + 1e-3 * next(self._ticks) if self._is_live else super().unix_s()


class Boards(LiveFaultyFleet):
    """The faulty fleet; its coordinator is stopped, or dies, when it waits for the so-manyth time."""

    def __init__(self, fleet: FaultyFleet, *, stops_at: int | None = None, dies: bool = False) -> None:
        super().__init__(fleet)
        self.waits, self.stops_at, self.dies = 0, stops_at, dies
        self.given: list[str] = []
        self.asked: list[str] = []

    def dispatch(self, orders: Sequence[Instruction], source: ModelProvider) -> None:
        self.given += [order.assignment_id for order in orders if not isinstance(order, FinishEarlyInstruction)]
        self.asked += [order.device_id for order in orders if isinstance(order, TrainInstruction)]
        super().dispatch(orders, source)

    def wait(self, until_s: float) -> Sequence[Event]:
        self.waits += 1
        if self.waits == self.stops_at:
            raise Killed if self.dies else InterruptedRunError("the coordinator was stopped")
        events = super().wait(until_s)
        self.fleet.journal.record_events(events)  # whose checks want to know
        return events


@dataclass(kw_only=True)
class Made:
    strategy: Strategy[Any] = field(
        default_factory=lambda: make_strategy("fedavg", {}, RoundRules(task=TASK, deadline_s=4.0, seed=1))
    )
    model: Tensors = field(default_factory=lambda: first_model(1))
    goal: StoppingCriteria = field(default_factory=lambda: StoppingCriteria(rounds=ROUNDS))
    evaluate: EvaluationRule = field(default_factory=EvaluationSchedule)
    rounds: RoundCounter = field(default_factory=RoundCounter)
    policy: RunParticipationPolicy = field(default_factory=RunParticipationPolicy)
    divergence: DivergenceRule = field(default_factory=DivergenceRule)
    metrics: MetricSet = NO_METRICS
    config: RunConfig = field(default_factory=lambda: parse_run({"run": {"task": TASK}}))
    read_reply: Any = None

    def make_whole(self, model: Tensors) -> Tensors:
        return model


class Site:
    """A run's files and rows; every `drive` is what one coordinator does."""

    def __init__(self, root: Path, store: Store) -> None:
        self.directory, self.store = CoordinatorDirectory(root=root, fleet="lab", hosts=()), store
        store.add_run(run_id="r", name="n", task=TASK, strategy="fedavg", config={}, seed=1, submitted_at=1.0)
        store.set_run_status("r", RunStatus.RUNNING, at=2.0)

    @property
    def num_checkpoints(self) -> int:
        return len(list_checkpoints(self.directory.runs / "r" / "checkpoints"))

    def begin_life(self, at: float) -> None:
        """As a run that came out of a backup does."""
        (self.directory.runs / "r" / NEW_INCARNATION_FILE).touch()
        self.store.requeue_run("r")
        record_resume(self.store, "r", "", at=at)

    def before(self) -> RunStart:
        """What the next coordinator would begin with."""
        with WalJournal(self.directory.runs / "r" / "journal", decode_tensors) as wal:
            arguments = self.store.get_run("r"), Made(), self.directory, self.store, wal
            return restore_exactly(*arguments) or restore_from_checkpoint(*arguments)

    def drive(
        self,
        boards: Boards,
        goal: StoppingCriteria | None = None,
        *,
        made: Made | None = None,
        clock: RunClock | None = None,
    ) -> tuple[Any, bool]:
        """The state that a coordinator comes to, and whether that is the run's end."""
        made, ledger = made or (Made() if goal is None else Made(goal=goal)), HistoryWriter(self.store, "r")
        with WalJournal(self.directory.runs / "r" / "journal", decode_tensors) as wal:
            arguments = self.store.get_run("r"), made, self.directory, self.store, wal
            before = restore_exactly(*arguments) or restore_from_checkpoint(*arguments)
            models = ModelRetention(self.directory.models, self.store, "r", ModelsSection())
            driver = RunExecutor(
                components=made,
                start=before,
                wal=wal,
                history=ledger,
                checkpointer=Checkpointer(self.directory, "r", wal=wal, history=ledger),
                model_retention=models,
                live_fleet=boards,  # type: ignore[arg-type] # its view is one of the faulty fleet
                clock=clock or StillClock(),
                has_new_ids=bool(self.store.get_run("r").resumes),
            )
            try:
                state, _ = driver.run()
            except InterruptedRunError:
                assert driver._last_turn is not None
                return driver._last_turn[0], False
            finally:
                models.close()
            driver.finish(state)
            driver.finish_history()
        return state, True


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Site]]:
    with Store.open(tmp_path / "a.db") as first, Store.open(tmp_path / "b.db") as second:
        yield [Site(tmp_path / "a", first), Site(tmp_path / "b", second)]


def digest(state: Any) -> str:
    return hashlib.sha256(encode_model(state.model)).hexdigest()


def decoded(state: Any) -> list[Any]:
    """Updates that wait for their turn and are in memory as tensors."""
    waiting = [update.tensors for opened in state.open for update in opened.fold.waiting.values()]
    return [tensors for tensors in waiting if tensors._loaded is not None]


@pytest.mark.parametrize("stops_at", range(2, 14, 2))
def test_a_run_that_is_stopped_in_mid_round_decodes_no_update_and_goes_on_to_the_same_model(
    stores: list[Site], stops_at: int
) -> None:
    whole, stopped = stores
    expected, is_over = whole.drive(Boards(FaultyFleet(1)))
    assert is_over

    fleet = FaultyFleet(1)
    state, is_over = stopped.drive(boards := Boards(fleet, stops_at=stops_at))
    assert not is_over
    assert decoded(state) == []
    assert stopped.num_checkpoints == (count_encoded_updates(state) == 0), (
        "what waits is in the journal, and nowhere else"
    )

    boards.stops_at = None
    state, is_over = stopped.drive(boards)
    assert is_over
    assert digest(state) == digest(expected)
    names = ("assignment_id", "outcome", "applied_version")
    rows = [
        [[row[name] for name in names] for row in read_history(site.store, "updates", run="r")] for site in stores
    ]
    assert sorted(rows[0]) == sorted(rows[1])


@pytest.mark.parametrize("step", [(ModelRetention, "finish"), (HistoryRecorder, "on_finish")])
def test_a_coordinator_that_dies_while_it_writes_down_the_end_of_a_run_is_followed_by_one_that_ends_it(
    stores: list[Site], step: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = stores
    expected, _ = whole.drive(Boards(FaultyFleet(1)))
    with monkeypatch.context() as patched:
        patched.setattr(*step, raises(Killed))
        with pytest.raises(Killed):
            killed.drive(boards := Boards(FaultyFleet(1)))
    assert can_auto_finish(killed.store.get_run("r"), killed.directory)
    killed.store.requeue_run("r")
    state, is_over = killed.drive(boards)
    assert (digest(state), is_over) == (digest(expected), True)
    for kind, name in (("rounds", "round"), ("updates", "assignment_id")):
        rows = [sorted(row[name] for row in read_history(site.store, kind, run="r")) for site in stores]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("step", [(ModelRetention, "finish"), (HistoryRecorder, "on_finish")])
def test_the_last_round_of_an_asynchronous_run_ends_with_it_whoever_writes_that_down(
    stores: list[Site], step: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Made

    def asynchronous(goal: StoppingCriteria) -> Made:
        strategy = make_strategy("fedasync", {}, RoundRules(task=TASK, deadline_s=4.0, seed=1))
        return make(strategy=strategy, rounds=RoundCounter(versions_per_round=4), goal=goal)

    monkeypatch.setitem(globals(), "Made", asynchronous)
    whole, killed = stores
    goal, boards = StoppingCriteria(updates=10), Boards(FaultyFleet(1, faults={}))
    state, _ = whole.drive(Boards(FaultyFleet(1, faults={})), goal)
    assert state.version % 4, "the last round is not whole"
    with monkeypatch.context() as patched:
        patched.setattr(*step, raises(Killed))
        with pytest.raises(Killed):
            killed.drive(boards, goal)
    killed.store.requeue_run("r")
    assert killed.drive(boards, goal)[1]
    names = ("round", "version", "num_updates")
    rows = [[[row[name] for name in names] for row in read_history(site.store, "rounds", run="r")] for site in stores]
    assert rows[0] == rows[1]
    assert rows[0][-1][1] == state.version


def test_epochs_are_counted_on_after_kills(stores: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 2)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    goal, (whole, killed) = StoppingCriteria(epochs=12.0, epoch=EpochSize(batch_size=10)), stores
    expected, _ = whole.drive(Boards(FaultyFleet(1, faults={})), goal)
    assert expected.version > 2
    boards, kills = Boards(FaultyFleet(1, faults={}), stops_at=7, dies=True), 0
    while True:
        try:
            state, is_over = killed.drive(boards, goal)
        except Killed:
            kills, boards.stops_at = kills + 1, boards.waits + 7
        else:
            break
    assert (is_over, kills > 2, state.version) == (True, True, expected.version)


@pytest.mark.parametrize("ends", [True, False], ids=["after its end", "from a checkpoint"])
def test_who_was_flagged_is_asked_no_more_in_a_later_life(
    stores: list[Site], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    site, boards = stores[0], Boards(FaultyFleet(1, faults={"h": "diverges"}), stops_at=None if ends else 40)
    assert site.drive(boards, StoppingCriteria(rounds=6 if ends else 60))[1] == ends
    assert boards.asked.count("h") == 3
    site.begin_life(at=1e12)
    before = site.before()
    assert (before.is_exact, before.guard_state.quarantined) == (False, {"h"})
    again = Boards(FaultyFleet(2, faults={"h": "diverges"}))  # which would refuse an id that it has had
    again.fleet.journal.arrived |= boards.fleet.journal.arrived
    assert site.drive(again, StoppingCriteria(rounds=70))[1]
    assert again.asked
    assert "h" not in again.asked


GUARD_EVENT_KINDS = {"update-clipped", "update-rejected", "device-quarantined"}
GUARDED_FAULTS = {"a": "long", "b": "long", "h": "diverges"}


def make_guarded(strategy: str, hold_updates: int | None, goal: StoppingCriteria) -> Made:
    shapes = tuple(
        TensorSpec(
            name=name, shape=tensor.shape, dtype=str(tensor.dtype),
            kind=TensorKind.BUFFER if name in {"mean", "steps"} else TensorKind.PARAMETER,
        )
        for name, tensor in first_model(1).items()
    )  # fmt: skip
    guard = UpdateGuard(shapes=shapes, norm_ratio=4.0, min_cosine=0.0, hold_updates=hold_updates)
    return Made(
        strategy=make_strategy(strategy, {}, RoundRules(task=TASK, deadline_s=4.0, seed=1)),
        policy=RunParticipationPolicy(guard=guard),
        rounds=RoundCounter(versions_per_round=1 if hold_updates is None else 4),
        goal=goal,
    )


@pytest.mark.extended
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["from the journal", "from a checkpoint"])
@pytest.mark.parametrize(("strategy", "hold_updates"), [("fedavg", None), ("fedasync", 5)])
def test_after_a_kill_anywhere_the_guard_has_held_clipped_and_refused_the_same_updates(
    stores: list[Site],
    strategy: str,
    hold_updates: int | None,
    is_checkpointed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_checkpointed:
        monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
        monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    whole, killed = stores
    outcomes = []
    for site, kills in ((whole, False), (killed, True)):
        boards = Boards(FaultyFleet(1, faults=GUARDED_FAULTS), stops_at=3 if kills else None, dies=True)
        num_held, is_over, ticks = 0, False, itertools.count()
        while not is_over:
            made_now = make_guarded(strategy, hold_updates, StoppingCriteria(updates=60))
            try:
                state, is_over = site.drive(boards, made=made_now, clock=TickingClock(ticks))
            except Killed:
                num_held += bool(made_now.policy.guard.state.held)
                boards.stops_at = boards.waits + 7
        events = [
            (row["kind"], row["device_id"], row["message"]) for row in read_history(site.store, "events", run="r")
        ]
        decided = [row for row in events if row[0] in GUARD_EVENT_KINDS]
        outcomes.append((digest(state), encode_state(made_now.policy.guard.state), decided))
        assert {kind for kind, *_ in decided} == GUARD_EVENT_KINDS
        assert bool(num_held) == kills, "a kill met held updates"
    assert outcomes[0] == outcomes[1]


class Alone:
    """A strategy whose devices go on without a coordinator."""

    is_autonomous = True

    def __init__(self, inner: Strategy[Any]) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_who_was_flagged_is_known_after_a_kill_in_a_run_whose_devices_go_on_alone(
    stores: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    make = Made
    monkeypatch.setitem(globals(), "Made", lambda **given: make(strategy=Alone(make().strategy), **given))
    boards = Boards(FaultyFleet(1, faults={"h": "diverges"}), stops_at=40, dies=True)
    with pytest.raises(Killed):
        stores[0].drive(boards, StoppingCriteria(rounds=60))
    before = stores[0].before()
    assert (before.is_resumed, before.guard_state.quarantined) == (True, {"h"})


@pytest.mark.parametrize("dies_at", [1, 3, 14])
def test_what_was_given_keeps_the_life_that_gave_it_whatever_rows_and_clocks_say(
    stores: list[Site], dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    site = stores[0]
    site.drive(Boards(FaultyFleet(1, faults={}), stops_at=2))
    site.begin_life(at=1e12)  # the clock is set right a moment later, and goes back
    boards = Boards(FaultyFleet(1, faults={}), stops_at=dies_at, dies=True)
    with pytest.raises(Killed):
        site.drive(boards)

    rows = read_history(site.store, "updates", run="r", where=["outcome!=lost"])
    known = {row["assignment_id"] for row in rows}
    assert not set(boards.given) <= known, "rows of the newest orders are in no store yet"
    lives = site.before().incarnations
    assert [lives.get_wire_id(name) for name in boards.given] == [f"r/1/{name}" for name in boards.given]
    assert lives.assign_wire_id("new") == "r/1/new"


def test_a_further_life_knows_the_lives_before_it_by_the_checkpoint(
    stores: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    site = stores[0]
    site.drive(Boards(FaultyFleet(1, faults={}), stops_at=2))
    site.begin_life(at=1e12)
    boards = Boards(FaultyFleet(1, faults={}), stops_at=14, dies=True)
    with pytest.raises(Killed):
        site.drive(boards)
    site.begin_life(at=2e12)
    lives = site.before().incarnations
    assert lives.get_wire_id(boards.given[0]) == f"r/1/{boards.given[0]}"
    assert lives.assign_wire_id(boards.given[0]) == f"r/2/{boards.given[0]}"


def test_a_run_that_came_to_its_end_knows_its_lives_whatever_clocks_say(stores: list[Site]) -> None:
    site, boards = stores[0], Boards(FaultyFleet(1, faults={}))
    assert site.drive(boards)[1]
    site.begin_life(at=1.0)
    lives = site.before().incarnations
    assert [lives.get_wire_id(name) for name in boards.given] == [f"r/{name}" for name in boards.given]

    boards.given.clear()
    assert site.drive(boards, StoppingCriteria(rounds=2 * ROUNDS))[1]
    site.begin_life(at=1e12)
    lives = site.before().incarnations
    assert lives.assign_wire_id("new") == "r/2/new"
    assert boards.given
    assert [lives.get_wire_id(name) for name in boards.given] == [f"r/1/{name}" for name in boards.given]


def test_a_run_that_goes_on_where_it_was_stays_in_its_life_however_often_it_was_taken_up(stores: list[Site]) -> None:
    site, boards = stores[0], Boards(FaultyFleet(1, faults={}), stops_at=2)
    site.drive(boards)
    boards.stops_at, boards.dies = 6, True
    with pytest.raises(Killed):
        site.drive(boards)
    site.store.requeue_run("r")  # it was stopped while it waited in the queue
    record_resume(site.store, "r", "", at=1.0)
    before = site.before()
    assert before.is_exact
    assert [before.incarnations.get_wire_id(name) for name in boards.given] == [f"r/{name}" for name in boards.given]
    assert before.incarnations.assign_wire_id("new") == "r/new"


class Unsavable:
    """A strategy that is like another one, but for its state from a version on."""

    name = "mine:Median"

    def __init__(self, inner: Strategy[Any], since: int) -> None:
        self.inner, self.since = inner, since

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def aggregate(self, state: Any) -> Any:
        state = self.inner.aggregate(state)
        if self.inner.version(state) >= self.since:
            state.used = (*state.used, print)
        return state

    def used(self, state: Any) -> Any:
        return tuple(name for name in self.inner.used(state) if name is not print)


@pytest.mark.parametrize("since", [2, ROUNDS], ids=["while it goes on", "when it is over"])
def test_a_state_that_cannot_be_saved_is_the_strategys_fault_and_costs_no_history(
    stores: list[Site], since: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if since < ROUNDS:
        monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
        monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    make = Made
    monkeypatch.setitem(globals(), "Made", lambda: make(strategy=Unsavable(make().strategy, since)))
    told = (
        rf"^strategy mine:Median: assign, receive or aggregate made a state of version {since} that cannot be saved: "
    )
    with pytest.raises(StrategyError, match=told + r"cannot save .*used\["):
        stores[0].drive(Boards(FaultyFleet(1)))
    closed = [
        row["round"] for row in read_history(stores[0].store, "rounds", run="r") if row["closed_at"] is not None
    ]
    assert len(closed) == since


@pytest.mark.parametrize("error", [RunFailedError, InterruptedRunError])
def test_the_last_round_of_an_app_that_fails_is_closed_and_of_one_that_goes_on_later_it_is_not(
    stores: list[Site], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(read_reply=lambda _: ReplyMetrics(is_evaluation=False))
    monkeypatch.setattr(Boards, "wait", raises(error))
    with contextlib.suppress(RunFailedError):
        stores[0].drive(Boards(FaultyFleet(1)), made=made)
    (row,) = read_history(stores[0].store, "rounds", run="r")
    assert (row["closed_at"] is not None) == (error is RunFailedError)


def test_updates_wait_in_some_of_these_places(stores: list[Site]) -> None:
    state, _ = stores[0].drive(Boards(FaultyFleet(1), stops_at=8))
    assert count_encoded_updates(state) > 1


@pytest.mark.parametrize("stops_at", range(6, 16))
def test_after_a_power_cut_the_history_has_all_that_the_checkpoint_knows(
    stores: list[Site], stops_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 1)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    whole, cut = stores
    expected, _ = whole.drive(Boards(FaultyFleet(1)))

    synced = SyncedWal(cut.store, monkeypatch)
    _, is_over = cut.drive(boards := Boards(FaultyFleet(1), stops_at=stops_at))
    assert not is_over
    boards.stops_at = None
    with Store.open(synced.cut(tmp_path / "cut.db")) as cut.store:
        state, is_over = cut.drive(boards)
        assert (digest(state), is_over) == (digest(expected), True)
        rows = [read_history(site.store, "updates", run="r") for site in stores]
    known = [sorted((row["assignment_id"], row["outcome"], row["applied_version"]) for row in each) for each in rows]
    assert known[0] == known[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedMean(PrivateMean):
    """Keeps what it has released of each version, over all lives of a run."""

    released: dict[int, set[bytes]]

    def release(self, *tensors: Any, version: int, **options: Any) -> Any:
        found = PrivateMean.release(self, *tensors, version=version, **options)
        self.released.setdefault(version, set()).add(found.displacement["weight"].tobytes())
        return found


class PrivateSite:
    """A private run; every life is that of one coordinator, which keeps each version's model that it has sent."""

    def __init__(
        self,
        site: Site,
        *,
        budget: float = 1e9,
        sampling: float | None = None,
        limits: ParticipationLimits | None = None,
    ) -> None:
        self.site, self.budget, self.sampling, self.limits = site, budget, sampling, limits
        self.sent: dict[int, set[bytes]] = {}
        self.released: dict[int, set[bytes]] = {}

    def live(self, boards: Boards, goal: StoppingCriteria, before_save: Any = None) -> bool:
        recorder = SpendRecorder(spend=PrivacySpend(key=b"k" * 32))
        mean = NotedMean(
            first_clip=0.5, quantile=None, noise_multiplier=1.0, num_expected=8.0, epsilon=self.budget,
            sampling=self.sampling, compute_epsilon=lambda sampled, repeated: float(sampled + repeated),
            recorder=recorder, released=self.released,
            correlation=None if self.limits is None else CorrelatedNoise(limits=self.limits, bands=2),
        )  # fmt: skip
        open_spend_recorder(self.site.directory.runs / "r", recorder)
        if before_save is not None:
            recorder.save = before_save(recorder.save)
        count = None if self.limits is None else 2
        rules = RoundRules(task=TASK, deadline_s=4.0, seed=1, privacy=mean, max_devices=count)
        strategy = make_strategy("fedavg", {}, rules)
        goal = dataclasses.replace(goal, is_budget_spent=lambda version: not mean.can_release(version + 1))
        send = boards.dispatch

        def dispatch(orders: Sequence[Instruction], source: ModelProvider) -> None:
            if any(isinstance(order, TrainInstruction) for order in orders):
                self.sent.setdefault(source.version, set()).add(source.model()["weight"].tobytes())
            send(orders, source)

        boards.dispatch = dispatch  # type: ignore[method-assign]
        try:
            return self.site.drive(boards, made=Made(strategy=strategy, goal=goal))[1]
        finally:
            boards.dispatch = send  # type: ignore[method-assign]

    def read_spend(self) -> PrivacySpend:
        return decode_state((self.site.directory.runs / "r" / PRIVACY_FILE).read_bytes(), PrivacySpend)


@pytest.mark.parametrize(
    "options",
    [{}, {"sampling": 0.5}, {"limits": ParticipationLimits(separation=2, participations=3)}],
    ids=["all", "a sample", "limits"],
)
@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_a_private_run_that_is_killed_again_and_again_sends_one_model_of_each_version_and_spends_no_more(
    stores: list[Site], every: int, options: dict[str, Any]
) -> None:
    run, goal = PrivateSite(stores[0], **options), StoppingCriteria(rounds=5)
    boards, kills = Boards(FaultyFleet(1, faults={}), stops_at=every, dies=True), 0
    while True:
        try:
            assert run.live(boards, goal)
        except Killed:
            kills, boards.stops_at = kills + 1, boards.waits + every
        else:
            break
    assert kills >= 2
    assert {version: len(sums) for version, sums in run.released.items()} == dict.fromkeys(range(1, 6), 1)
    spend = run.read_spend()
    assert (spend.sampled, spend.repeated, spend.restarts, spend.key) == (5, 0, (), b"")
    if run.limits is not None:
        assert sum(spend.participations.values()) == 5 * 2
        assert max(spend.participations.values()) <= 3


@pytest.mark.parametrize("limits", [None, ParticipationLimits(separation=2, participations=3)])
@pytest.mark.parametrize("is_saved", [False, True], ids=["before it is recorded", "after it is recorded"])
@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_coordinator_that_dies_at_the_record_of_a_release_never_releases_another_sum(
    stores: list[Site], version: int, is_saved: bool, limits: ParticipationLimits | None
) -> None:
    run, goal = PrivateSite(stores[0], limits=limits), StoppingCriteria(rounds=5)
    boards = Boards(FaultyFleet(1, faults={}))

    def die_at(save: Any) -> Any:
        def record(spend: PrivacySpend) -> None:
            if spend.newest >= version:
                if is_saved:
                    save(spend)
                raise Killed
            save(spend)

        return record

    with pytest.raises(Killed):
        run.live(boards, goal, die_at)
    assert version not in run.sent, "no board has a model whose release is not recorded"
    assert run.read_spend().sampled == version - (not is_saved)
    assert run.live(boards, goal)
    assert {len(sums) for sums in run.released.values()} == {1}
    spend = run.read_spend()
    assert (spend.sampled, spend.repeated) == (5, 0)


def die_behind_a_checkpoint(
    stores: list[Site], monkeypatch: pytest.MonkeyPatch, limits: ParticipationLimits | None = None
) -> tuple[PrivateSite, PrivacySpend, Boards]:
    """Returns a private run whose coordinator died, what it had spent, and boards that will send other updates."""
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.CHECKPOINT_EVERY_VERSIONS", 3)
    monkeypatch.setattr("edgefl.coordinator.runs.checkpointing.MIN_CHECKPOINT_INTERVAL_S", 0.0)
    run = PrivateSite(stores[0], budget=7.0, limits=limits)
    boards = Boards(FaultyFleet(1, faults={}), stops_at=45 if limits is None else 16, dies=True)
    with pytest.raises(Killed):
        run.live(boards, StoppingCriteria(rounds=50))
    stores[0].begin_life(at=1e12)
    again = Boards(FaultyFleet(2, faults={}))
    again.fleet.journal.arrived |= boards.fleet.journal.arrived
    return run, run.read_spend(), again


def test_what_a_later_life_makes_anew_counts_again_and_the_run_ends_at_its_budget(
    stores: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before, again = die_behind_a_checkpoint(stores, monkeypatch)
    assert before.sampled >= 4
    assert run.live(again, StoppingCriteria(rounds=50))
    spend = run.read_spend()
    assert spend.repeated > 0
    assert before.sampled <= spend.sampled
    assert spend.sampled + spend.repeated == 7, "all of the budget, and no more"
    events = read_history(stores[0].store, "events", run="r")
    (said,) = (row["message"] for row in events if row["kind"] == "privacy-spent")
    assert said.startswith(f"epsilon {before.sampled} is spent; versions behind ")


def test_a_later_life_begins_correlated_noise_anew_and_counts_participations_on(
    stores: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ParticipationLimits(separation=2, participations=3)
    run, before, again = die_behind_a_checkpoint(stores, monkeypatch, limits)
    assert 3 < before.total < 7
    assert run.live(again, StoppingCriteria(rounds=50))
    spend = run.read_spend()
    assert spend.total == 7, "all of the budget, and no more"
    assert spend.restarts == (before.total,)
    assert spend.list_segments(7) == (before.total, 7 - before.total)
    assert all(spend.participations[name] >= count for name, count in before.participations.items())
    assert max(spend.participations.values()) <= 3


@pytest.mark.parametrize("every", [2, 3, 5])
def test_noise_that_began_anew_in_a_release_and_who_was_asked_since_come_back_after_kills(
    stores: list[Site], every: int
) -> None:
    run = PrivateSite(stores[0], limits=ParticipationLimits(separation=2, participations=4))
    boards, goal = Boards(FaultyFleet(1, faults={}), stops_at=2, dies=True), StoppingCriteria(rounds=5)
    with pytest.raises(Killed):
        run.live(boards, goal)
    other = Release(digest=b"other", sampled=1, repeated=0)
    taken_part = {"a": 2, "h": 2}
    spent = dataclasses.replace(
        run.read_spend(), sampled=1, newest=1, repeatable=1, releases={1: other}, participations=taken_part
    )
    (stores[0].directory.runs / "r" / PRIVACY_FILE).write_bytes(encode_state(spent))
    while True:
        boards.stops_at = boards.waits + every
        try:
            assert run.live(boards, goal)
        except Killed:
            continue
        break
    assert {version: len(sums) for version, sums in run.released.items()} == dict.fromkeys(range(1, 6), 1)
    spend = run.read_spend()
    assert (spend.total, spend.restarts) == (6, (1,))
    assert sum(spend.participations.values()) == sum(taken_part.values()) + 5 * 2
    assert max(spend.participations.values()) <= 4


def test_a_later_life_without_budget_ends_and_releases_nothing(
    stores: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before, again = die_behind_a_checkpoint(stores, monkeypatch)
    run.budget = float(before.sampled)
    assert run.live(again, StoppingCriteria(rounds=50))
    assert again.asked == [], "no board works for what cannot be released"
    assert (run.read_spend().sampled, run.read_spend().repeated) == (before.sampled, 0)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_after_a_power_cut_the_journal_has_the_updates_of_each_recorded_release(
    stores: list[Site], version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, goal, boards = PrivateSite(stores[0]), StoppingCriteria(rounds=5), Boards(FaultyFleet(1, faults={}))
    synced, kept, sync = dict[Path, int](), dict[Path, int](), os.fdatasync

    def note(handle: int) -> None:
        sync(handle)
        synced[Path(f"/proc/self/fd/{handle}").readlink()] = os.fstat(handle).st_size

    def cut_at(save: Any) -> Any:
        def record(spend: PrivacySpend) -> None:
            save(spend)
            if spend.newest >= version:
                kept.update(synced)
                raise Killed

        return record

    monkeypatch.setattr(os, "fdatasync", note)
    with pytest.raises(Killed):
        run.live(boards, goal, cut_at)
    (journal,) = (stores[0].directory.runs / "r" / "journal").glob("*.wal")
    os.truncate(journal, kept[journal.resolve()])
    assert run.live(boards, goal)
    assert {len(sums) for sums in run.released.values()} == {1}
    assert (run.read_spend().sampled, run.read_spend().repeated) == (5, 0)


def test_a_release_that_cannot_be_repeated_ends_a_run_whose_budget_is_spent(stores: list[Site]) -> None:
    run, goal = PrivateSite(stores[0], budget=3.0), StoppingCriteria(rounds=5)
    boards = Boards(FaultyFleet(1, faults={}), stops_at=2, dies=True)
    with pytest.raises(Killed):
        run.live(boards, goal)
    spend = run.read_spend()
    assert spend.newest == 0
    other = {number: Release(digest=b"other", sampled=number, repeated=0) for number in (1, 2, 3)}
    spent = dataclasses.replace(spend, sampled=3, newest=3, repeatable=3, releases=other)
    (stores[0].directory.runs / "r" / PRIVACY_FILE).write_bytes(encode_state(spent))
    assert run.live(boards, goal)
    assert run.released == {}
    assert (run.read_spend().sampled, run.read_spend().repeated, run.read_spend().key) == (3, 0, b"")
