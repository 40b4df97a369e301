"""The round loop over a scripted fleet with a clock of its own, real strategies and a journal that watches."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl.core.errors import RunFailedError, StrategyError
from edgefl.core.types import (
    Decision,
    DeviceAvailable,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    InstructionFailed,
    Role,
    StopRequested,
    Strategy,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.engine.evaluations import EvaluationTracker, VersionAccuracy
from edgefl.engine.progress import (
    MAX_CONSECUTIVE_FAILURES,
    DeviceWork,
    EpochSize,
    PriorProgress,
    ProgressTracker,
    RoundCounter,
    StoppingCriteria,
)
from edgefl.engine.round_loop import DRAIN_TIMEOUT_S, AcceptAllPolicy, RunLog, RunSubscriber, run_rounds
from edgefl.strategies.participation import EvaluationSchedule
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

NEVER = math.inf


class Journal:
    """Knows what was written and whether it is durable; gives updates back marked, as a real one rewrites them."""

    def __init__(self):
        self.entries, self.is_durable = [], True

    def record_events(self, events):
        self._write(*(("received", event) for event in events))
        return [replace(e, metrics=replace(e.metrics, extra={"kept": 1})) if is_update(e) else e for e in events]

    def record_decision(self, decision):
        self._write(*(("decided", order) for order in decision.instructions))

    def record_aggregation(self, version, assignment_ids, state):
        self._write(("aggregated", (version, tuple(assignment_ids))))

    def commit(self):
        self.is_durable = True

    def _write(self, *entries):
        self.entries += entries
        self.is_durable = self.is_durable and not entries

    def of(self, kind):
        return [entry for name, entry in self.entries if name == kind]


def is_update(event):
    return isinstance(event, Update)


class ScriptedFleet:
    """Devices answer so many seconds after an order (NEVER: not at all); `at` makes other things happen."""

    def __init__(self, answer_s, *, evaluators=(), journal=None):
        self.answer_s, self.journal = dict(answer_s), journal or Journal()
        self.present, self.now_s, self.out = {}, 0.0, {}
        self.orders, self.models, self.turns, self.waited_s = [], {}, 0, []
        self.accuracy, self.fails = lambda _version: 0.5, set()
        self.accuracy_of_nodes, self.nodes_answer_s = 0.5, None
        self._heap, self._order = [], itertools.count()
        for name in (*self.answer_s, *evaluators):
            self.add(name, evaluator=name in evaluators)

    def add(self, name, *, answer_s=1.0, evaluator=False):
        role = Role.EVALUATOR if evaluator else Role.TRAINER
        source = "coordinator" if evaluator else "device"
        self.answer_s.setdefault(name, answer_s)
        self.present[name] = DeviceInfo(device_id=name, role=role, source=source)

    def at(self, time_s, action):
        heapq.heappush(self._heap, (time_s, next(self._order), action))

    def join(self, name, **options):
        self.add(name, **options)
        return [DeviceAvailable(device_id=name)]

    def die(self, name):
        self.present.pop(name)
        gone = [key for key, order in self.out.items() if order.device_id == name]
        return [self.lose(key, UpdateStatus.LOST, "gone") for key in gone]

    def lose(self, key, outcome, reason):
        order = self.out.pop(key)
        return InstructionFailed(device_id=order.device_id, assignment_id=key, outcome=outcome, reason=reason)

    def view(self):
        busy = {}
        for key, order in self.out.items():
            if isinstance(order, TrainInstruction):
                busy.setdefault(order.device_id, []).append(key)
        trainers = [name for name, info in sorted(self.present.items()) if info.role == Role.TRAINER]
        idle = [name for name in trainers if name not in busy]
        return SimpleNamespace(
            now_s=self.now_s, devices=dict(self.present), idle=idle, busy=busy, speeds={}, progress={}, health={}
        )

    def dispatch(self, orders, source):
        assert self.journal.is_durable, "work was given out before it was written down"
        for order in orders:
            self.orders.append((self.now_s, order))
            if isinstance(order, FinishEarlyInstruction):
                continue
            model = source.device_model(order.subject) if isinstance(order, EvaluateInstruction) else source.model()
            self.models[order.assignment_id] = source.version, float(np.sum(model["w"]))
            self.out[order.assignment_id] = order
            answer_s = self.answer_s[order.device_id]
            if isinstance(order, EvaluateInstruction) and order.subject and self.nodes_answer_s is not None:
                answer_s = self.nodes_answer_s
            if answer_s < NEVER:
                self.at(self.now_s + answer_s, lambda order=order: self.answer(order))
            if isinstance(order, TrainInstruction) and order.deadline_s is not None:
                self.at(self.now_s + order.deadline_s, lambda order=order: self.expire(order))

    def expire(self, order):
        key = order.assignment_id
        return [self.lose(key, UpdateStatus.LOST, "too late")] if key in self.out else []

    def answer(self, order):
        key = order.assignment_id
        if key not in self.out:
            return []
        if order.device_id in self.fails:
            return [self.lose(key, UpdateStatus.FAILED, "no such task")]
        del self.out[key]
        if isinstance(order, EvaluateInstruction):
            return [self.evaluated(order)]
        return [update_of(order)]

    def evaluated(self, order):
        return EvaluateResult(
            assignment_id=order.assignment_id, device_id=order.device_id, version=order.version, round=order.round,
            source=self.present[order.device_id].source, num_examples=10, loss=1.0, subject=order.subject,
            accuracy=self.accuracy_of_nodes if order.subject else self.accuracy(order.version),
        )  # fmt: skip

    def wait(self, until_s):
        self.turns += 1
        assert self.turns < 500, "the loop does not end"
        self.waited_s.append(until_s - self.now_s)
        events = []
        while not events and self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            events = list(action() or ())
        self.now_s = self.now_s if events else until_s
        return events

    def given(self, kind):
        return [order for _, order in self.orders if isinstance(order, kind)]

    @property
    def aggregated(self):
        """The assignments of each version."""
        return [names for _, names in self.journal.of("aggregated")]

    @property
    def asked(self):
        """When which device was given work."""
        return [(at_s, order.device_id) for at_s, order in self.orders if isinstance(order, TrainInstruction)]


def evaluated_by(answer_s, **devices):
    """A fleet with an evaluator that answers so many seconds after it was asked."""
    fleet = ScriptedFleet(devices or {"a": 1.0}, evaluators=["e"])
    fleet.answer_s["e"] = answer_s
    return fleet


def update_of(order, value=1.0):
    return Update(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        base_version=order.base_version,
        tensors={"w": np.full(2, value, np.float32)},
        metrics=UpdateMetrics(iterations=1, num_examples=5, bytes_up=60, bytes_down=40),
    )


def run(fleet, *, strategy=None, goal=None, who="auto", every=1, state=None, rules=None, **options):
    strategy = strategy or make_strategy("fedavg", {}, RoundRules(**(rules or {})))
    evaluate = EvaluationSchedule(every=every, evaluate_on=who)
    facts = {
        "fleet": fleet,
        "journal": fleet.journal,
        "goal": goal or StoppingCriteria(rounds=3),
        "evaluate": evaluate,
    }
    return run_rounds(strategy, state or strategy.init({"w": np.zeros(2, np.float32)}), **facts, **options)


def watching(receive):
    """A strategy whose updates are seen on their way into it."""
    strategy = make_strategy("fedavg", {}, RoundRules())
    names = ("init", "assign", "ready", "aggregate", "model", "version", "used", "changed", "finish", "node_models")
    return SimpleNamespace(
        **{name: getattr(strategy, name) for name in names},
        receive=lambda state, update: (receive(update), strategy.receive(state, update))[1],
    )


def test_every_device_trains_once_a_round_and_the_model_moves_by_the_mean():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    state, reason = run(fleet, who="none")
    assert (state.model["w"].tolist(), reason) == ([3.0, 3.0], "rounds reached 3")
    assert fleet.asked == [(at_s, name) for at_s in (0.0, 2.0, 4.0) for name in "ab"]
    assert fleet.now_s == 6.0


def test_nothing_is_given_out_before_it_is_durable_and_nothing_used_that_was_not_written():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0}, evaluators=["e"])
    run(fleet)  # the fleet itself looks at the journal in dispatch
    received = [event.assignment_id for event in fleet.journal.of("received") if is_update(event)]
    assert sorted(received) == sorted(name for names in fleet.aggregated for name in names)
    kinds = [kind for kind, entry in fleet.journal.entries if kind == "aggregated" or is_update(entry)]
    assert kinds == ["received", "received", "aggregated"] * 3
    assert fleet.journal.is_durable


def test_the_strategy_is_given_updates_one_by_one_as_the_journal_gives_them_back():
    seen, gate = [], AcceptAllPolicy()
    gate.rejection_reason = lambda update: seen.append("looked at")
    strategy = watching(lambda update: seen.append(update.metrics.extra))
    run(ScriptedFleet({"a": 1.0, "b": 1.0}), strategy=strategy, goal=StoppingCriteria(rounds=1), policy=gate)
    assert seen == ["looked at", {"kept": 1}] * 2


@pytest.mark.parametrize(
    ("goal", "reason", "version"),
    [
        (StoppingCriteria(rounds=2), "rounds reached 2", 2),
        (StoppingCriteria(updates=5), "updates reached 5", 3),
        (StoppingCriteria(bytes=550), "bytes reached 550", 3),
        (StoppingCriteria(seconds=3.5), "seconds reached 3.5", 4),
        (StoppingCriteria(rounds=9, updates=2), "updates reached 2", 1),
    ],
)
def test_the_run_ends_with_the_first_goal_that_is_reached(goal, reason, version):
    state, why = run(ScriptedFleet({"a": 1.0, "b": 1.0}), goal=goal, who="none")
    assert (why, state.version) == (reason, version)


@pytest.mark.parametrize(
    ("earlier", "goal", "rounds"),
    [
        (PriorProgress(updates=4), StoppingCriteria(updates=6), 1),
        (PriorProgress(bytes=500), StoppingCriteria(bytes=700), 1),
        (PriorProgress(seconds=10.0), StoppingCriteria(seconds=13.0), 1),
        (PriorProgress(), StoppingCriteria(updates=6), 3),
        # An update is one iteration of batches of 2 on 5 examples: a third of an epoch.
        (PriorProgress(), StoppingCriteria(epochs=1.5, epoch=EpochSize(batch_size=2)), 5),
        (
            PriorProgress(work={name: DeviceWork(iterations=3, num_examples=5) for name in "ab"}),
            StoppingCriteria(epochs=1.5, epoch=EpochSize(batch_size=2)),
            2,
        ),
    ],
)
def test_goals_count_on_from_what_was_counted_before(earlier, goal, rounds):
    assert (
        run(ScriptedFleet({"a": 1.0, "b": 3.0}), goal=goal, who="none", prior_progress=earlier)[0].version == rounds
    )


def test_a_round_opens_when_enough_devices_are_there_and_seconds_count_from_then():
    fleet = ScriptedFleet({"a": 1.0})
    fleet.at(100.0, lambda: fleet.join("b"))
    state, _ = run(fleet, goal=StoppingCriteria(seconds=3), rules={"min_devices": 2}, who="none")
    assert fleet.asked[:2] == [(100.0, "a"), (100.0, "b")]
    assert (state.version, fleet.now_s) == (3, 103.0)


def test_the_run_ends_at_an_accuracy_and_a_worse_one_afterwards_does_not_revive_it():
    fleet = evaluated_by(1.5)
    fleet.accuracy = lambda version: 0.9 if version == 2 else 0.4
    state, reason = run(fleet, goal=StoppingCriteria(accuracy=0.8))
    assert (reason, state.version <= 5) == ("accuracy reached 0.8", True)


def test_a_model_that_is_good_enough_is_not_changed_by_what_is_still_in_flight():
    fleet = evaluated_by(0.5)
    fleet.accuracy = lambda _version: 0.9
    state, reason = run(fleet, goal=StoppingCriteria(accuracy=0.8))
    assert (reason, state.version) == ("accuracy reached 0.8", 1)
    assert [order.device_id for order in fleet.given(FinishEarlyInstruction)] == ["a"]


@pytest.mark.parametrize(("over", "version"), [(1, 2), (2, 3), (3, 4)])
def test_the_accuracy_may_have_to_hold_over_several_evaluations(over, version):
    fleet = evaluated_by(0.25)
    fleet.accuracy = lambda version: {1: 0.5, 2: 0.9, 3: 0.8, 4: 0.8, 5: 0.9}.get(version, 0.0)
    state, reason = run(fleet, goal=StoppingCriteria(accuracy=0.82, accuracy_window=over))
    assert (reason, state.version) == ("accuracy reached 0.82", version)


def test_two_devices_that_evaluate_end_no_run_unless_the_run_file_trusts_them():
    for trusts, expected in ((False, "rounds reached 9"), (True, "accuracy reached 0.8")):
        fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
        fleet.accuracy = lambda _version: 0.99
        _, reason = run(fleet, goal=StoppingCriteria(accuracy=0.8, rounds=9, trust_single_evaluation=trusts))
        assert reason == expected


def test_without_an_evaluator_the_devices_median_accuracy_counts_once_all_have_answered():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0, "c": 1.0})
    fleet.accuracy = lambda version: 0.1 * version
    state, reason = run(fleet, goal=StoppingCriteria(accuracy=0.29))
    assert (reason, state.version in {3, 4}) == ("accuracy reached 0.29", True)


def test_accuracy_is_the_mean_over_examples_and_never_that_of_an_older_version():
    board = EvaluationTracker()
    board.record_dispatch(
        [EvaluateInstruction(assignment_id=f"{v}{d}", device_id=d, version=v, round=v) for v in (1, 2) for d in "ab"]
    )
    score = {"round": 1, "source": "device", "loss": 0.0}
    for key, accuracy, num_examples in (("2a", 1.0, 30), ("2b", 0.0, 10), ("1a", 0.2, 5)):
        facts = {"assignment_id": key, "device_id": key[1], "version": int(key[0]), "accuracy": accuracy}
        board.record_event(EvaluateResult(**facts, num_examples=num_examples, **score))
        assert board.accuracy == (None if key == "2a" else 0.75)
    board.record_event(InstructionFailed(device_id="b", assignment_id="1b", outcome=UpdateStatus.LOST, reason="gone"))
    assert (board.accuracy, board.outstanding, board.results) == (0.75, {}, {})


def test_the_scoreboard_does_not_look_at_all_that_is_outstanding_for_each_order():
    class Watched(dict):
        def values(self):
            raise AssertionError("a look at all of them")

    scores = EvaluationTracker(outstanding=Watched())
    scores.record_dispatch([EvaluateInstruction(assignment_id="e3", device_id="e", version=3, round=3)])
    scores.record_dispatch([EvaluateInstruction(assignment_id="e2", device_id="e", version=2, round=2)])
    assert (scores.requested_version, set(scores.outstanding)) == (3, {"e2", "e3"})


@pytest.mark.parametrize(
    ("answer_s", "version", "end_s"),
    [({"a": 10.0, "b": 20.0}, 1, 20.0), ({"a": 1.0, "b": NEVER}, 0, 3.0 + DRAIN_TIMEOUT_S)],
)
def test_a_stop_recalls_what_is_in_flight_once_and_uses_what_comes_within_the_drain(answer_s, version, end_s):
    fleet = ScriptedFleet(answer_s)
    fleet.at(3.0, lambda: [StopRequested(reason="enough")])
    state, reason = run(fleet, who="none")
    assert (reason, state.version, fleet.now_s) == ("enough", version, end_s)
    assert [order.device_id for order in fleet.given(FinishEarlyInstruction)] == [
        name for name in "ab" if answer_s[name] > 3.0
    ]
    assert min(fleet.waited_s) >= 0


@pytest.mark.parametrize(("every", "versions", "expected"), [(1, 3, [1, 2, 3]), (2, 3, [2, 3]), (5, 3, [3])])
def test_the_last_version_is_evaluated_once_however_rarely_others_are(every, versions, expected):
    fleet = evaluated_by(1.0)
    run(fleet, every=every, goal=StoppingCriteria(rounds=versions))
    assert ([order.version for order in fleet.given(EvaluateInstruction)], fleet.out) == (expected, {})


def test_the_last_version_is_evaluated_even_when_a_straggler_never_comes_back():
    fleet = evaluated_by(50.0, a=1.0, b=NEVER)
    run(fleet, every=5, goal=StoppingCriteria(rounds=1), rules={"min_updates": 1})
    assert [order.version for order in fleet.given(EvaluateInstruction)] == [1]
    assert fleet.now_s == 1.0 + DRAIN_TIMEOUT_S + 50.0


def test_an_evaluator_that_never_answers_ends_the_wait_and_not_the_result():
    fleet = evaluated_by(NEVER)
    state, reason = run(fleet, goal=StoppingCriteria(rounds=2))
    assert (state.version, reason, fleet.now_s) == (2, "rounds reached 2", 2.0 + DRAIN_TIMEOUT_S)


@dataclass
class AsyncState:
    value: float = 0.0
    version: int = 0
    inbox: tuple = ()
    used: tuple = ()


class EveryUpdateIsAVersion(Strategy):
    """As small as an asynchronous strategy can be: no rounds, two devices at work on their own."""

    def init(self, model):
        return AsyncState()

    def assign(self, state, view):
        base = {"base_version": state.version, "plan": TrainConfig()}
        names = [(f"{name}-{state.version}", name) for name in view.idle]
        return state, Decision(
            instructions=tuple(TrainInstruction(assignment_id=key, device_id=name, **base) for key, name in names)
        )

    def receive(self, state, update):
        return replace(state, inbox=(*state.inbox, update))

    def ready(self, state, view):
        return bool(state.inbox)

    def aggregate(self, state):
        first, *rest = state.inbox
        used = (first.assignment_id,)
        return AsyncState(value=state.value + 1, version=state.version + 1, inbox=tuple(rest), used=used)

    def model(self, state):
        return {"w": np.array([state.value])}


def test_versions_that_close_together_are_each_evaluated_with_their_own_model():
    def wait(until_s):
        events = list(together(until_s))
        if events and fleet._heap and fleet._heap[0][0] == fleet.now_s:
            events += together(fleet.now_s)
        return events

    fleet = evaluated_by(1.0, a=1.0, b=1.0)
    together, fleet.wait = fleet.wait, wait
    run(fleet, strategy=EveryUpdateIsAVersion(), goal=StoppingCriteria(rounds=6))
    evaluations = {order.assignment_id: order.version for order in fleet.given(EvaluateInstruction)}
    assert sorted(evaluations.values()) == list(range(1, 1 + len(evaluations)))
    assert len(evaluations) >= 6
    assert all(fleet.models[key] == (version, float(version)) for key, version in evaluations.items())


# Somebody is missing in a round: the devices' seconds, what happens when, the rules, and what each version is of.
A, B = ("v0-a1-a",), ("v0-a1-a", "v0-a1-b")


@pytest.mark.parametrize(
    ("answer_s", "happens", "rounds", "rules", "aggregated", "end_s"),
    [
        ({"a": 1.0, "b": 5.0}, [(3.0, "die", "b")], 1, {}, [A], 3.0),
        (
            {"a": 2.0, "b": 2.0}, [(1.0, "die", "a"), (1.0, "die", "b"), (500.0, "join", "a")], 1, {},
            [("v0-a2-a",)], 502.0,
        ),
        ({"a": 1.0, "b": 1.5}, [], 1, {"min_updates": 1}, [A], 1.5),  # the late one was drained and not used
        ({"a": 1.0, "b": 9.0, "c": 2.0}, [], 1, {"min_updates": 2}, [("v0-a1-a", "v0-a1-c")], 9.0),
        (
            {"a": 1.0, "b": 5.0}, [(1.5, "join", "c"), (2.0, "die", "b")], 1, {"min_updates": 2},
            [("v0-a1-a", "v0-a2-c")], 3.0,
        ),
        ({"a": 1.0, "b": 2.0, "c": NEVER}, [(5.0, "die", "c")], 1, {"min_updates": 3}, [B], 5.0),
        ({"a": 1.0, "b": NEVER}, [], 2, {"deadline_s": 4.0}, [A, ("v1-a1-a",)], 8.0),
        ({"a": 10.0}, [(5.0, "join", "b")], 2, {}, [A, ("v1-a1-a", "v1-a1-b")], 20.0),
        (
            {"a": 1.0, "b": 1.0}, [(1.5, "die", "b")], 3, {"min_devices": 2},
            [B, ("v1-a1-a",), ("v2-a1-a",)], 3.0,
        ),
    ],
    ids=[
        "one that dies is not waited for",
        "all die and one comes back",
        "a late one changes nothing",
        "k of n close with the first k",
        "k of n ask others when too few are left",
        "k of n when nobody is left to ask",
        "a deadline passes",
        "a late joiner enters with the next round",
        "it goes on with fewer than it began with",
    ],
)  # fmt: skip
def test_a_round_closes_with_those_who_can(answer_s, happens, rounds, rules, aggregated, end_s):
    fleet = ScriptedFleet(answer_s)
    for at_s, what, name in happens:
        fleet.at(at_s, lambda what=what, name=name: getattr(fleet, what)(name))
    state, _ = run(fleet, who="none", goal=StoppingCriteria(rounds=rounds), rules=rules)
    assert fleet.aggregated == aggregated
    assert (state.version, fleet.now_s) == (rounds, end_s)
    assert state.model["w"].tolist() == [rounds, rounds]


def test_at_most_so_many_are_asked_and_all_have_their_turn():
    fleet = ScriptedFleet(dict.fromkeys("abcdef", 1.0))
    run(fleet, who="none", goal=StoppingCriteria(rounds=30), rules={"max_devices": 2})
    names = [name for _, name in fleet.asked]
    assert (len(names), min(names.count(name) for name in "abcdef") >= 4) == (60, True)


def test_when_nobody_ever_answers_or_is_there_time_or_a_stop_ends_the_run():
    fleet = ScriptedFleet({"a": NEVER})
    state, reason = run(fleet, goal=StoppingCriteria(seconds=200), who="none")
    assert (state.version, reason) == (0, "seconds reached 200")
    assert min(at_s for at_s, order in fleet.orders if isinstance(order, FinishEarlyInstruction)) == 200.0
    assert fleet.now_s <= 200 + 60 + DRAIN_TIMEOUT_S
    nobody = ScriptedFleet({})
    nobody.at(90.0, lambda: [StopRequested(reason="enough")])
    assert run(nobody)[1] == "enough"


def test_an_update_that_comes_twice_or_late_counts_once():
    def echo():
        return [update_of(order, 50.0) for order in fleet.given(TrainInstruction)]

    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    fleet.at(1.5, echo)  # a's again, and b's before its own
    fleet.at(2.2, echo)
    state, _ = run(fleet, who="none", goal=StoppingCriteria(rounds=2))
    assert [name for names in fleet.aggregated for name in names] == ["v0-a1-a", "v0-a1-b", "v1-a1-a"]
    assert state.model["w"].tolist() == [(1 + 50) / 2 + 50] * 2


def test_a_run_that_every_device_fails_ends_with_the_reason():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    fleet.fails = {"a", "b"}
    with pytest.raises(RunFailedError, match="no such task"):
        run(fleet)
    assert len(fleet.asked) == 2 * MAX_CONSECUTIVE_FAILURES
    assert fleet.journal.is_durable or fleet.journal.entries[-1][0] == "received"
    alone = ScriptedFleet({"a": 1.0, "b": 2.0})
    alone.fails = {"a"}
    strategy = make_strategy("local", {"device": "a"}, RoundRules())
    with pytest.raises(RunFailedError, match=r"no device that is asked can do this work, 6 tries.*a: no such task"):
        run(alone, strategy=strategy)


def test_a_run_goes_on_beside_failures_while_somebody_works():
    one = ScriptedFleet({"a": 1.0, "b": 2.0})
    one.fails = {"a"}
    assert run(one, goal=StoppingCriteria(rounds=8), who="none")[0].version == 8
    now_and_then = ScriptedFleet({"a": 1.0})
    for time_s in range(20):
        fails = {"a"} if time_s % 3 else set()
        now_and_then.at(time_s + 0.5, lambda fails=fails: setattr(now_and_then, "fails", fails))
    assert run(now_and_then, goal=StoppingCriteria(rounds=5), who="none")[0].version == 5
    at_first = ScriptedFleet({"a": 1.0, "b": 1.5})
    at_first.fails = {"a", "b"}
    at_first.at(2.5, lambda: setattr(at_first, "fails", set()))
    assert run(at_first, goal=StoppingCriteria(rounds=2), who="none")[0].version == 2
    beside = ScriptedFleet({"a": 0.1, "b": 400.0})
    beside.fails = {"a"}
    state, _ = run(
        beside, strategy=make_strategy("asgd", {}, RoundRules()), goal=StoppingCriteria(updates=1), who="none"
    )
    assert (state.version, [name for _, name in beside.asked].count("a") > 2 * MAX_CONSECUTIVE_FAILURES) == (1, True)


def test_failed_evaluations_and_vanished_devices_are_no_reason_to_give_up():
    fleet = evaluated_by(1.0)
    fleet.fails = {"e"}
    for time_s in range(1, 9):
        fleet.at(time_s - 0.5, lambda: fleet.die("a"))
        fleet.at(time_s - 0.4, lambda: fleet.join("a"))
    assert run(fleet, goal=StoppingCriteria(rounds=5))[0].version == 5
    tally = ProgressTracker()
    for subject in ("", "a"):
        order = EvaluateInstruction(assignment_id=f"e:{subject}", device_id="a", version=1, round=1, subject=subject)
        tally.record_dispatch([order], 0.0)
        assert tally.is_evaluating
        tally.record_event(
            InstructionFailed(
                device_id="a", assignment_id=order.assignment_id, outcome=UpdateStatus.FAILED, reason="diverged"
            )
        )
    assert (tally.failures, tally.is_evaluating) == ({}, False)


def test_whoever_interrupts_the_loop_is_given_the_state_to_go_on_with():
    def interrupted():
        raise KeyboardInterrupt

    fleet, strategy, left = ScriptedFleet({"a": 1.0, "b": 3.0}), make_strategy("fedavg", {}, RoundRules()), []
    fleet.at(7.5, interrupted)  # in the third round, when one of two has answered
    with pytest.raises(KeyboardInterrupt):
        run(fleet, strategy=strategy, who="none", on_abort=left.append)
    (state,) = left
    assert state.version == 2
    again = ScriptedFleet({"a": 1.0, "b": 3.0})
    state, reason = run(again, strategy=strategy, who="none", state=strategy.resumed(state))
    assert (state.model["w"].tolist(), reason) == ([3.0, 3.0], "rounds reached 3")
    assert [order.assignment_id for order in again.given(TrainInstruction)] == ["v2-a1-a", "v2-a1-b"]


def test_a_round_is_a_version_or_as_many_as_are_given_or_as_devices_are_asked_first():
    plain, three, asked = RoundCounter(), RoundCounter(versions_per_round=3), RoundCounter(versions_per_round=None)
    plain.start(5)
    assert [(plain.get_round(v), plain.count_closed(v), plain.is_round_end(v)) for v in (1, 2, 7)] == [
        (v, v, True) for v in (1, 2, 7)
    ]
    assert [three.get_round(version) for version in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [three.count_closed(version) for version in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [version for version in range(1, 8) if three.is_round_end(version)] == [3, 6]
    asked.start(4)
    asked.start(9)
    assert (asked.versions_per_round, asked.get_round(5)) == (4, 2)


@pytest.mark.parametrize(("given", "expected"), [(None, 2), (3, 3)])
def test_an_asynchronous_run_ends_after_so_many_whole_rounds(given, expected):
    fleet, rounds = ScriptedFleet({"a": 1.0, "b": 2.5}), RoundCounter(versions_per_round=given)
    state, reason = run(
        fleet, strategy=EveryUpdateIsAVersion(), goal=StoppingCriteria(rounds=2), who="none", rounds=rounds
    )
    assert (reason, rounds.versions_per_round) == ("rounds reached 2", expected)
    assert 2 * expected <= len(fleet.aggregated) <= 2 * expected + 2
    assert state.version == len(fleet.aggregated)


def test_an_asynchronous_run_is_evaluated_at_the_end_of_its_rounds_and_at_its_own():
    fleet = evaluated_by(1.0, a=1.0, b=1.5)
    run(
        fleet,
        strategy=EveryUpdateIsAVersion(),
        goal=StoppingCriteria(rounds=3),
        rounds=RoundCounter(versions_per_round=2),
    )
    orders = [(order.version, order.round) for order in fleet.given(EvaluateInstruction)]
    assert orders == [(2, 1), (4, 2), (6, 3), (len(fleet.aggregated), 4)]


class Choosy(AcceptAllPolicy):
    """Refuses what certain devices send, rests others, gives everybody two iterations, and keeps what it is told."""

    def __init__(self, *, refused=(), rests=()):
        self.refused, self.rests, self.told = refused, rests, []

    def eligible_view(self, view):
        return SimpleNamespace(**{**vars(view), "idle": [name for name in view.idle if name not in self.rests]})

    def adapt_instruction(self, order, view):
        return replace(order, plan=replace(order.plan, epochs=None, iterations=2))

    def rejection_reason(self, update):
        return f"{update.device_id} is not trusted" if update.device_id in self.refused else None

    def observe(self, event, accuracy):
        self.told.append((event, accuracy))


def test_an_update_that_the_gate_refuses_is_lost_with_the_reason_and_never_reaches_the_strategy():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
    run(fleet, who="none", goal=StoppingCriteria(rounds=2), policy=Choosy(refused={"b"}))
    lost = {
        (e.device_id, e.outcome, e.reason, e.is_strike)
        for e in fleet.journal.of("received")
        if isinstance(e, InstructionFailed)
    }
    assert lost == {("b", UpdateStatus.REJECTED, "b is not trusted", True)}
    assert fleet.aggregated == [("v0-a1-a",), ("v1-a1-a",)]
    with pytest.raises(RunFailedError, match="a is not trusted"):
        run(ScriptedFleet({"a": 1.0}), who="none", policy=Choosy(refused={"a"}))


def test_the_gate_says_who_is_asked_and_for_how_much():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
    run(fleet, who="none", goal=StoppingCriteria(rounds=2), policy=Choosy(rests={"b"}))
    orders = fleet.given(TrainInstruction)
    assert {(order.device_id, order.plan.iterations) for order in orders} == {("a", 2)}
    assert [order for order in fleet.journal.of("decided") if isinstance(order, TrainInstruction)] == orders


class EveryDeviceHasItsOwn(EveryUpdateIsAVersion):
    """The average is the version; a's model lies 10 above it, b's 10 below."""

    def node_models(self, state):
        return {"a": {"w": np.array([state.value + 10])}, "b": {"w": np.array([state.value - 10])}}


@pytest.mark.parametrize("strategy", [None, EveryDeviceHasItsOwn()])
def test_the_gate_is_told_what_happens_and_every_accuracy_of_the_average_once(strategy):
    gate, fleet = Choosy(), evaluated_by(0.25)
    fleet.accuracy, fleet.accuracy_of_nodes = (lambda _version: 0.5), 0.9  # the same again is news, too
    run(fleet, strategy=strategy, goal=StoppingCriteria(rounds=3), policy=gate)
    told, received = [event for event, _ in gate.told], fleet.journal.of("received")
    assert [event.assignment_id for event in told] == [event.assignment_id for event in received]
    assert [accuracy for _, accuracy in gate.told if accuracy is not None] == [0.5] * 3
    assert all(isinstance(event, EvaluateResult) for event, accuracy in gate.told if accuracy is not None)
    assert sum(isinstance(event, EvaluateResult) for event in told) == 3 * (3 if strategy else 1)


class ClosesOnlyAtTheEnd(EveryUpdateIsAVersion):
    """Keeps all updates until it is told that nothing more will be assigned."""

    def __init__(self):
        self.told = []

    def ready(self, state, view):
        return bool(self.told and state.inbox)

    def finish(self, state):
        self.told.append(len(state.inbox))
        return state


def test_a_strategy_is_told_once_that_nothing_more_is_assigned_and_may_still_close_what_it_has():
    fleet, strategy = evaluated_by(1.0, a=1.0, b=6.0), ClosesOnlyAtTheEnd()
    fleet.at(3.5, lambda: [StopRequested(reason="enough")])
    state, reason = run(fleet, strategy=strategy)
    assert (reason, strategy.told) == ("enough", [3])
    assert state.version == 5  # three of a, and those that were in flight
    last = [order for order in fleet.given(EvaluateInstruction) if order.version == 5]
    assert [fleet.models[order.assignment_id] for order in last] == [(5, 5.0)]


def asked_for(fleet):
    """Who was asked to evaluate whose model, of which version."""
    return {(order.device_id, order.subject, order.version) for order in fleet.given(EvaluateInstruction)}


def test_evaluators_are_asked_for_the_average_and_for_every_device_s_model_each_time():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5}, evaluators=["x", "y"])
    run(
        fleet,
        strategy=EveryDeviceHasItsOwn(),
        goal=StoppingCriteria(rounds=2),
        rounds=RoundCounter(versions_per_round=2),
    )
    versions = {version for _, _, version in asked_for(fleet)}
    assert {2, 4} <= versions
    models = {"": 0.0, "a": 10.0, "b": -10.0}
    assert asked_for(fleet) == {(judge, of, version) for judge in "xy" for of in models for version in versions}
    assert len({order.assignment_id for order in fleet.given(EvaluateInstruction)}) == 6 * len(versions)
    for order in fleet.given(EvaluateInstruction):
        assert fleet.models[order.assignment_id] == (order.version, order.version + models[order.subject])


def test_without_an_evaluator_every_device_evaluates_the_average_and_its_own_model_alone():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5, "c": 9.0})
    run(fleet, strategy=EveryDeviceHasItsOwn(), goal=StoppingCriteria(rounds=2))
    pairs = {(device, subject) for device, subject, _ in asked_for(fleet)}
    assert pairs == {("a", ""), ("a", "a"), ("b", ""), ("b", "b"), ("c", "")}


@pytest.mark.parametrize(("answer_s", "end_s"), [(30.0, 1.0 + 30.0), (NEVER, 1.0 + DRAIN_TIMEOUT_S)])
def test_the_last_evaluations_of_devices_models_are_waited_for_as_long_as_any_other(answer_s, end_s):
    fleet = evaluated_by(1.0)
    fleet.nodes_answer_s = answer_s
    _, reason = run(fleet, strategy=EveryDeviceHasItsOwn(), goal=StoppingCriteria(rounds=1))
    assert (reason, fleet.now_s) == ("rounds reached 1", end_s)


@pytest.mark.parametrize(("nodes", "average", "version"), [(0.95, 0.4, 6), (0.1, 0.9, 1)])
def test_only_the_average_reaches_an_accuracy_goal(nodes, average, version):
    fleet = evaluated_by(0.5)
    fleet.accuracy, fleet.accuracy_of_nodes = (lambda _version: average), nodes
    state, reason = run(fleet, strategy=EveryDeviceHasItsOwn(), goal=StoppingCriteria(accuracy=0.8, rounds=6))
    assert (reason, state.version) == ("accuracy reached 0.8" if average > 0.8 else "rounds reached 6", version)


def test_a_strategy_that_drops_a_model_before_it_was_sent_is_told_so():
    class Forgetful(EveryDeviceHasItsOwn):
        def node_models(self, state):
            return {} if state.value and not state.used else super().node_models(state)

        def assign(self, state, view):
            return super().assign(replace(state, used=()), view)

    with pytest.raises(StrategyError, match="node_models: there is no model of 'a' any more"):
        run(ScriptedFleet({"a": 1.0, "b": 1.5}), strategy=Forgetful(), goal=StoppingCriteria(rounds=3))


STOP = StopRequested(reason="enough")


class Wal:
    """Notes what it writes; fails at the kinds of entries in `refuses`."""

    def __init__(self, told: list[Any], refuses: Sequence[str] = ()) -> None:
        self.told, self.refuses = told, refuses

    def note(self, kind: str) -> None:
        if kind in self.refuses:
            raise OSError(kind)
        self.told.append(("wal", kind))

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        self.note("events")
        return [*events, STOP]

    def record_decision(self, decision: Decision) -> None:
        self.note("decision")

    def record_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None:
        self.note("aggregation")

    def commit(self) -> None:
        self.note("commit")


class Listener(RunSubscriber):
    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def on_events(self, events: Sequence[Event]) -> None:
        self.told.append(("listener", "events"))

    def on_decision(self, decision: Decision) -> None:
        self.told.append(("listener", "decision"))

    def on_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self.told.append(("listener", "aggregation"))

    def on_commit(self) -> None:
        self.told.append(("listener", "commit"))


def drive(log: RunLog) -> Sequence[Event]:
    events = log.record_events([STOP])
    log.record_decision(Decision(instructions=()))
    log.record_aggregation(1, ["a"], None)
    log.record_score(VersionAccuracy(version=1, accuracy=0.5, is_newest=True))  # which it need not care about
    log.finish()
    return events


def test_every_entry_is_in_the_write_ahead_log_first() -> None:
    told: list[Any] = []
    assert drive(RunLog(Wal(told), [Listener(told), RunSubscriber()])) == [STOP, STOP]
    kinds = ("events", "decision", "aggregation", "commit")
    assert told == [(who, kind) for kind in kinds for who in ("wal", "listener")]


@pytest.mark.parametrize("kind", ["events", "decision", "aggregation", "commit"])
def test_nothing_is_derived_from_what_could_not_be_written(kind: str) -> None:
    told: list[Any] = []
    with pytest.raises(OSError, match=kind):
        drive(RunLog(Wal(told, [kind]), [Listener(told)]))
    assert ("listener", kind) not in told


def test_without_a_write_ahead_log_events_stay_as_they_are() -> None:
    told: list[Any] = []
    assert drive(RunLog(None, [Listener(told)])) == [STOP]
    assert len(told) == 4
