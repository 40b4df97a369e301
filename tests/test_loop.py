"""The round loop over a scripted fleet with a clock of its own, real strategies and a journal that watches."""

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.errors import RunFailedError, StrategyError
from edgefl.loop import DRAIN_S, OpenGate, drive
from edgefl.strategies.evaluation import EvaluationSchedule
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules
from edgefl.tally import GIVE_UP_AFTER, Earlier, Goal, RoundCount, Scoreboard, Tally
from edgefl.types import (
    Assignment,
    Decision,
    DeviceInfo,
    Evaluated,
    Evaluation,
    Joined,
    LocalPlan,
    Lost,
    Outcome,
    Recall,
    Role,
    Stop,
    Update,
    UpdateMetrics,
)

NEVER = math.inf


class Journal:
    """Knows what was written and whether it is durable; gives updates back marked, as a real one rewrites them."""

    def __init__(self):
        self.entries, self.is_durable = [], True

    def received(self, events):
        self._write(*(("received", event) for event in events))
        return [replace(e, metrics=replace(e.metrics, extra={"kept": 1})) if is_update(e) else e for e in events]

    def decided(self, decision):
        self._write(*(("decided", order) for order in decision.orders))

    def aggregated(self, version, assignment_ids, state):
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
        source = "evaluator" if evaluator else "device"
        self.answer_s.setdefault(name, answer_s)
        self.present[name] = DeviceInfo(device_id=name, role=role, source=source)

    def at(self, time_s, action):
        heapq.heappush(self._heap, (time_s, next(self._order), action))

    def join(self, name, **options):
        self.add(name, **options)
        return [Joined(device_id=name)]

    def die(self, name):
        self.present.pop(name)
        gone = [key for key, order in self.out.items() if order.device_id == name]
        return [self.lose(key, Outcome.LOST, "gone") for key in gone]

    def lose(self, key, outcome, reason):
        order = self.out.pop(key)
        return Lost(device_id=order.device_id, assignment_id=key, outcome=outcome, reason=reason)

    def view(self):
        busy = {}
        for key, order in self.out.items():
            if isinstance(order, Assignment):
                busy.setdefault(order.device_id, []).append(key)
        trainers = [name for name, info in sorted(self.present.items()) if info.role == Role.TRAINER]
        idle = [name for name in trainers if name not in busy]
        return SimpleNamespace(
            now_s=self.now_s, devices=dict(self.present), idle=idle, busy=busy, speeds={}, progress={}, vitals={}
        )

    def dispatch(self, orders, source):
        assert self.journal.is_durable, "work was given out before it was written down"
        for order in orders:
            self.orders.append((self.now_s, order))
            if isinstance(order, Recall):
                continue
            model = source.model_of(order.subject) if isinstance(order, Evaluation) else source.model()
            self.models[order.assignment_id] = source.version, float(np.sum(model["w"]))
            self.out[order.assignment_id] = order
            answer_s = self.answer_s[order.device_id]
            if isinstance(order, Evaluation) and order.subject and self.nodes_answer_s is not None:
                answer_s = self.nodes_answer_s
            if answer_s < NEVER:
                self.at(self.now_s + answer_s, lambda order=order: self.answer(order))
            if isinstance(order, Assignment) and order.deadline_s is not None:
                self.at(self.now_s + order.deadline_s, lambda order=order: self.expire(order))

    def expire(self, order):
        key = order.assignment_id
        return [self.lose(key, Outcome.LOST, "too late")] if key in self.out else []

    def answer(self, order):
        key = order.assignment_id
        if key not in self.out:
            return []
        if order.device_id in self.fails:
            return [self.lose(key, Outcome.FAILED, "no such task")]
        del self.out[key]
        if isinstance(order, Evaluation):
            return [self.evaluated(order)]
        return [update_of(order)]

    def evaluated(self, order):
        return Evaluated(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            version=order.version,
            round=order.round,
            source=self.present[order.device_id].source,
            num_examples=10,
            loss=1.0,
            accuracy=self.accuracy_of_nodes if order.subject else self.accuracy(order.version),
            subject=order.subject,
        )

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


def update_of(order, value=1.0):
    return Update(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        base_version=order.base_version,
        tensors={"w": np.full(2, value, np.float32)},
        metrics=UpdateMetrics(num_examples=5, bytes_up=60, bytes_down=40),
    )


def run(fleet, *, strategy=None, goal=None, who="auto", every=1, rounds=None, gate=None, **rules):
    strategy = strategy or make_strategy("fedavg", {}, RoundRules(**rules))
    return drive(
        strategy,
        strategy.init({"w": np.zeros(2, np.float32)}),
        fleet=fleet,
        journal=fleet.journal,
        goal=goal or Goal(rounds=3),
        evaluate=EvaluationSchedule(every=every, who=who),
        rounds=rounds,
        gate=gate,
    )


def test_every_device_trains_once_a_round_and_the_model_moves_by_the_mean():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    state, reason = run(fleet, who="none")
    assert state.model["w"].tolist() == [3.0, 3.0]
    assert reason == "rounds reached 3"
    assert [order.device_id for order in fleet.given(Assignment)] == ["a", "b"] * 3
    assert fleet.now_s == 6.0


def test_nothing_is_given_out_before_it_is_durable_and_nothing_used_that_was_not_written():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0}, evaluators=["e"])
    run(fleet)  # the fleet itself looks at the journal in dispatch
    received = [event.assignment_id for event in fleet.journal.of("received") if is_update(event)]
    used = [name for _, names in fleet.journal.of("aggregated") for name in names]
    assert sorted(received) == sorted(used)
    kinds = [kind for kind, entry in fleet.journal.entries if kind == "aggregated" or is_update(entry)]
    assert kinds == ["received", "received", "aggregated"] * 3
    assert fleet.journal.is_durable


def test_the_strategy_is_given_updates_as_the_journal_gives_them_back():
    strategy, seen = make_strategy("fedavg", {}, RoundRules()), []
    watched = SimpleNamespace(
        **{name: getattr(strategy, name) for name in ("init", "assign", "ready", "aggregate", "model")},
        **{name: getattr(strategy, name) for name in ("version", "used", "changed")},
        receive=lambda state, update: (seen.append(update.metrics.extra), strategy.receive(state, update))[1],
    )
    run(ScriptedFleet({"a": 1.0}), strategy=watched, goal=Goal(rounds=2))
    assert seen == [{"kept": 1}] * 2


def test_an_update_is_with_the_strategy_before_the_next_is_looked_at():
    strategy, seen = make_strategy("fedavg", {}, RoundRules()), []
    watched = SimpleNamespace(
        **{name: getattr(strategy, name) for name in ("init", "assign", "ready", "aggregate", "model")},
        **{name: getattr(strategy, name) for name in ("version", "used", "changed")},
        receive=lambda state, update: (seen.append("folded"), strategy.receive(state, update))[1],
    )
    gate = OpenGate()
    gate.refusal = lambda update: seen.append("looked at")
    run(ScriptedFleet({"a": 1.0, "b": 1.0}), strategy=watched, goal=Goal(rounds=1), gate=gate)
    assert seen == ["looked at", "folded"] * 2


@pytest.mark.parametrize(
    ("goal", "reason", "version"),
    [
        (Goal(rounds=2), "rounds reached 2", 2),
        (Goal(updates=5), "updates reached 5", 3),
        (Goal(bytes=550), "bytes reached 550", 3),
        (Goal(seconds=3.5), "seconds reached 3.5", 4),
        (Goal(rounds=9, updates=2), "updates reached 2", 1),
    ],
)
def test_the_run_ends_with_the_first_goal_that_is_reached(goal, reason, version):
    state, why = run(ScriptedFleet({"a": 1.0, "b": 1.0}), goal=goal, who="none")
    assert (why, state.version) == (reason, version)


def test_seconds_count_from_the_first_work_and_not_from_waiting_for_devices():
    fleet = ScriptedFleet({"a": 1.0})
    fleet.at(100.0, lambda: fleet.join("b"))
    state, _ = run(fleet, goal=Goal(seconds=3), min_devices=2, who="none")
    assert (state.version, fleet.now_s) == (3, 103.0)


def test_the_run_ends_at_an_accuracy_and_a_worse_one_afterwards_does_not_revive_it():
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["e"])
    fleet.answer_s["e"] = 1.5
    fleet.accuracy = lambda version: 0.9 if version == 2 else 0.4
    state, reason = run(fleet, goal=Goal(accuracy=0.8))
    assert reason == "accuracy reached 0.8"
    assert state.version <= 5


def test_a_model_that_is_good_enough_is_not_changed_by_what_is_still_in_flight():
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["e"])
    fleet.answer_s["e"] = 0.5
    fleet.accuracy = lambda _version: 0.9
    state, reason = run(fleet, goal=Goal(accuracy=0.8))
    assert (reason, state.version) == ("accuracy reached 0.8", 1)
    assert [order.device_id for order in fleet.given(Recall)] == ["a"]


def test_without_an_evaluator_the_devices_mean_accuracy_counts_once_all_have_answered():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
    fleet.accuracy = lambda version: 0.1 * version
    state, reason = run(fleet, goal=Goal(accuracy=0.29))
    assert reason == "accuracy reached 0.29"
    assert state.version in {3, 4}


def test_accuracy_is_the_mean_over_examples_and_never_that_of_an_older_version():
    board = Scoreboard()
    ask = [Evaluation(assignment_id=f"{v}{d}", device_id=d, version=v, round=v) for v in (1, 2) for d in "ab"]
    board.ask(ask)
    score = {"round": 1, "source": "device", "loss": 0.0}
    for key, accuracy, num_examples in (("2a", 1.0, 30), ("2b", 0.0, 10), ("1a", 0.2, 5)):
        board.note(
            Evaluated(
                assignment_id=key, device_id=key[1], version=int(key[0]), accuracy=accuracy,
                num_examples=num_examples, **score,
            )
        )  # fmt: skip
        assert board.accuracy == (None if key == "2a" else 0.75)
    board.note(Lost(device_id="b", assignment_id="1b", outcome=Outcome.LOST, reason="gone"))
    assert board.accuracy == 0.75
    assert (board.outstanding, board.results) == ({}, {})


def test_a_stop_recalls_what_is_in_flight_and_uses_what_comes():
    fleet = ScriptedFleet({"a": 10.0, "b": 20.0})
    fleet.at(3.0, lambda: [Stop(reason="enough")])
    state, reason = run(fleet, who="none")
    assert reason == "enough"
    assert {order.device_id for order in fleet.given(Recall)} == {"a", "b"}
    assert state.version == 1
    assert fleet.now_s == 20.0


def test_what_never_comes_back_is_waited_for_no_longer_than_the_drain():
    fleet = ScriptedFleet({"a": 1.0, "b": NEVER})
    fleet.at(3.0, lambda: [Stop(reason="enough")])
    state, _ = run(fleet, who="none")
    assert (state.version, fleet.now_s) == (0, 3.0 + DRAIN_S)


@pytest.mark.parametrize(("every", "versions", "expected"), [(1, 3, [1, 2, 3]), (2, 3, [2, 3]), (5, 3, [3])])
def test_the_last_version_is_evaluated_once_however_rarely_others_are(every, versions, expected):
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["e"])
    run(fleet, every=every, goal=Goal(rounds=versions))
    assert [order.version for order in fleet.given(Evaluation)] == expected
    assert not fleet.out


def test_the_last_version_is_evaluated_even_when_a_straggler_never_comes_back():
    fleet = ScriptedFleet({"a": 1.0, "b": NEVER}, evaluators=["e"])
    fleet.answer_s["e"] = 50.0
    run(fleet, every=5, goal=Goal(rounds=1), min_updates=1)
    assert [order.version for order in fleet.given(Evaluation)] == [1]
    assert fleet.now_s == 1.0 + DRAIN_S + 50.0


def test_an_evaluator_that_never_answers_ends_the_wait_and_not_the_result():
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["e"])
    fleet.answer_s["e"] = NEVER
    state, reason = run(fleet, goal=Goal(rounds=2))
    assert (state.version, reason) == (2, "rounds reached 2")
    assert fleet.now_s == 2.0 + DRAIN_S


@dataclass
class AsyncState:
    value: float = 0.0
    version: int = 0
    inbox: tuple = ()
    used: tuple = ()


class EveryUpdateIsAVersion:
    """As small as an asynchronous strategy can be: no rounds, two devices at work on their own."""

    def init(self, model):
        return AsyncState()

    def assign(self, state, view):
        orders = tuple(
            Assignment(
                assignment_id=f"{name}-{state.version}", device_id=name, base_version=state.version, plan=LocalPlan()
            )
            for name in view.idle
        )
        return state, Decision(orders=orders)

    def receive(self, state, update):
        return replace(state, inbox=(*state.inbox, update))

    def ready(self, state, view):
        return bool(state.inbox)

    def aggregate(self, state):
        first, *rest = state.inbox
        return AsyncState(
            value=state.value + 1, version=state.version + 1, inbox=tuple(rest), used=(first.assignment_id,)
        )

    def model(self, state):
        return {"w": np.array([state.value])}

    def version(self, state):
        return state.version

    def used(self, state):
        return state.used

    def changed(self, state, since):
        return None


def test_versions_that_close_together_are_each_evaluated_with_their_own_model():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0}, evaluators=["e"])
    together = fleet.wait

    def wait(until_s):
        events = list(together(until_s))
        if events and fleet._heap and fleet._heap[0][0] == fleet.now_s:
            events += together(fleet.now_s)
        return events

    fleet.wait = wait
    run(fleet, strategy=EveryUpdateIsAVersion(), goal=Goal(rounds=6))
    evaluations = {order.assignment_id: order.version for order in fleet.given(Evaluation)}
    assert sorted(evaluations.values()) == list(range(1, 1 + len(evaluations)))
    assert len(evaluations) >= 6
    assert all(fleet.models[key] == (version, float(version)) for key, version in evaluations.items())


def test_a_device_that_dies_in_a_round_neither_blocks_nor_spoils_it():
    fleet = ScriptedFleet({"a": 1.0, "b": 5.0, "c": 2.0})
    fleet.at(7.0, lambda: fleet.die("b"))
    state, _ = run(fleet, who="none")
    assert fleet.journal.of("aggregated")[1] == (2, ("v1-a1-a", "v1-a1-c"))
    assert state.model["w"].tolist() == [3.0, 3.0]
    assert fleet.now_s == 5.0 + 2.0 + 2.0


def test_when_all_have_died_the_round_goes_on_with_whoever_comes_back():
    fleet = ScriptedFleet({"a": 2.0, "b": 2.0})
    fleet.at(1.0, lambda: fleet.die("a") + fleet.die("b"))
    fleet.at(500.0, lambda: fleet.join("a"))
    run(fleet, who="none", goal=Goal(rounds=1))
    assert fleet.journal.of("aggregated") == [(1, ("v0-a2-a",))]
    assert fleet.now_s == 502.0


def test_when_nobody_ever_answers_the_time_limit_ends_the_run():
    fleet = ScriptedFleet({"a": NEVER})
    state, reason = run(fleet, goal=Goal(seconds=200), who="none")
    assert (state.version, reason) == (0, "seconds reached 200")
    assert fleet.now_s <= 200 + 60 + DRAIN_S


def test_without_devices_a_stop_ends_the_run():
    fleet = ScriptedFleet({})
    fleet.at(90.0, lambda: [Stop(reason="enough")])
    assert run(fleet)[1] == "enough"


def test_an_update_that_comes_twice_or_late_counts_once():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})

    def echo():
        return [update_of(order, 50.0) for order in fleet.given(Assignment)]

    fleet.at(1.5, echo)  # a's again, and b's before its own
    fleet.at(2.2, echo)
    state, _ = run(fleet, who="none", goal=Goal(rounds=2))
    used = [name for _, names in fleet.journal.of("aggregated") for name in names]
    assert used == ["v0-a1-a", "v0-a1-b", "v1-a1-a"]
    assert state.model["w"].tolist() == [(1 + 50) / 2 + 50] * 2


def test_a_late_update_of_a_closed_round_changes_nothing():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5})
    state, _ = run(fleet, who="none", goal=Goal(rounds=1), min_updates=1)
    assert fleet.journal.of("aggregated") == [(1, ("v0-a1-a",))]
    assert state.model["w"].tolist() == [1.0, 1.0]
    assert fleet.now_s == 1.5  # it was drained and not used


def test_a_round_opens_only_when_enough_devices_are_there():
    fleet = ScriptedFleet({"a": 1.0})
    fleet.at(30.0, lambda: fleet.join("b"))
    run(fleet, who="none", goal=Goal(rounds=1), min_devices=2)
    assert [(at, order.device_id) for at, order in fleet.orders] == [(30.0, "a"), (30.0, "b")]


def test_a_run_that_has_begun_goes_on_with_fewer_than_it_began_with():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
    fleet.at(1.5, lambda: fleet.die("b"))
    state, _ = run(fleet, who="none", goal=Goal(rounds=4), min_devices=2)
    assert state.version == 4


def test_at_most_so_many_are_asked_and_all_have_their_turn():
    fleet = ScriptedFleet(dict.fromkeys("abcdef", 1.0))
    run(fleet, who="none", goal=Goal(rounds=30), max_devices=2)
    asked = [order.device_id for order in fleet.given(Assignment)]
    assert len(asked) == 60
    assert min(asked.count(name) for name in "abcdef") >= 4


def test_k_of_n_closes_with_the_first_k():
    fleet = ScriptedFleet({"a": 1.0, "b": 9.0, "c": 2.0})
    run(fleet, who="none", goal=Goal(rounds=1), min_updates=2)
    assert fleet.journal.of("aggregated") == [(1, ("v0-a1-a", "v0-a1-c"))]


def test_k_of_n_asks_others_when_too_few_are_left():
    fleet = ScriptedFleet({"a": 1.0, "b": 5.0})
    fleet.at(1.5, lambda: fleet.join("c"))
    fleet.at(2.0, lambda: fleet.die("b"))
    run(fleet, who="none", goal=Goal(rounds=1), min_updates=2)
    assert fleet.journal.of("aggregated") == [(1, ("v0-a1-a", "v0-a2-c"))]


def test_a_late_joiner_enters_with_the_next_round():
    fleet = ScriptedFleet({"a": 10.0})
    fleet.at(5.0, lambda: fleet.join("b", answer_s=1.0))
    run(fleet, who="none", goal=Goal(rounds=2))
    assert [(at, order.device_id) for at, order in fleet.orders] == [(0.0, "a"), (10.0, "a"), (10.0, "b")]


def test_k_of_n_closes_with_fewer_when_nobody_is_left_to_ask():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0, "c": NEVER})
    fleet.at(5.0, lambda: fleet.die("c"))
    state, _ = run(fleet, who="none", goal=Goal(rounds=1), min_updates=3)
    assert fleet.journal.of("aggregated") == [(1, ("v0-a1-a", "v0-a1-b"))]
    assert (state.version, fleet.now_s) == (1, 5.0)


def test_the_time_of_a_run_is_over_on_time_although_nothing_happens():
    fleet = ScriptedFleet({"a": NEVER})
    run(fleet, who="none", goal=Goal(seconds=7.0))
    assert min(at for at, order in fleet.orders if isinstance(order, Recall)) == 7.0


def test_an_assignment_past_its_deadline_closes_the_round_without_it():
    fleet = ScriptedFleet({"a": 1.0, "b": NEVER})
    state, _ = run(fleet, who="none", goal=Goal(rounds=2), deadline_s=4.0)
    assert fleet.now_s == 8.0
    assert [names for _, names in fleet.journal.of("aggregated")] == [("v0-a1-a",), ("v1-a1-a",)]
    assert state.version == 2


def test_a_run_that_every_device_fails_ends_with_the_reason():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    fleet.fails = {"a", "b"}
    with pytest.raises(RunFailedError, match="no such task"):
        run(fleet)
    assert len(fleet.given(Assignment)) == 2 * GIVE_UP_AFTER
    assert fleet.journal.is_durable or fleet.journal.entries[-1][0] == "received"


def test_one_device_that_always_fails_does_not_end_the_run():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    fleet.fails = {"a"}
    state, _ = run(fleet, goal=Goal(rounds=8), who="none")
    assert state.version == 8


def test_a_device_that_fails_now_and_then_is_never_given_up():
    fleet = ScriptedFleet({"a": 1.0})
    for time_s in range(20):
        fleet.at(time_s + 0.5, lambda fails=time_s % 3: setattr(fleet, "fails", {"a"} if fails else set()))
    state, _ = run(fleet, goal=Goal(rounds=5), who="none")
    assert state.version == 5


def test_failed_evaluations_and_vanished_devices_are_no_reason_to_give_up():
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["e"])
    fleet.fails = {"e"}
    for time_s in range(1, 9):
        fleet.at(time_s - 0.5, lambda: fleet.die("a"))
        fleet.at(time_s - 0.4, lambda: fleet.join("a"))
    state, _ = run(fleet, goal=Goal(rounds=5))
    assert state.version == 5


def test_an_exception_of_the_fleet_ends_the_loop_at_once():
    fleet = ScriptedFleet({"a": 1.0})

    def interrupted():
        raise KeyboardInterrupt

    fleet.at(0.5, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(fleet)


def test_whoever_interrupts_the_loop_is_given_the_state_to_go_on_with():
    fleet, strategy, left = ScriptedFleet({"a": 1.0, "b": 3.0}), make_strategy("fedavg", {}, RoundRules()), []

    def interrupted():
        raise KeyboardInterrupt

    fleet.at(7.5, interrupted)  # in the third round, when one of two has answered
    arguments = {"journal": fleet.journal, "goal": Goal(rounds=3), "evaluate": EvaluationSchedule(who="none")}
    with pytest.raises(KeyboardInterrupt):
        drive(strategy, strategy.init({"w": np.zeros(2)}), fleet=fleet, left=left.append, **arguments)
    (state,) = left
    assert state.version == 2
    again = ScriptedFleet({"a": 1.0, "b": 3.0})
    arguments["journal"] = again.journal
    state, reason = drive(strategy, strategy.resumed(state), fleet=again, **arguments)
    assert (state.model["w"].tolist(), reason) == ([3.0, 3.0], "rounds reached 3")
    assert [order.assignment_id for order in again.given(Assignment)] == ["v2-a1-a", "v2-a1-b"]


@pytest.mark.parametrize(
    ("earlier", "goal", "rounds"),
    [
        (Earlier(updates=4), Goal(updates=6), 1),
        (Earlier(bytes=500), Goal(bytes=700), 1),
        (Earlier(seconds=10.0), Goal(seconds=13.0), 1),
        (Earlier(), Goal(updates=6), 3),
    ],
)
def test_goals_count_on_from_what_was_counted_before(earlier, goal, rounds):
    fleet, strategy = ScriptedFleet({"a": 1.0, "b": 3.0}), make_strategy("fedavg", {}, RoundRules())
    state, _ = drive(
        strategy,
        strategy.init({"w": np.zeros(2)}),
        fleet=fleet,
        journal=fleet.journal,
        goal=goal,
        evaluate=EvaluationSchedule(who="none"),
        earlier=earlier,
    )
    assert state.version == rounds


def test_the_loop_never_asks_to_wait_for_a_negative_time():
    fleet = ScriptedFleet({"a": 1.0, "b": NEVER}, evaluators=["e"])
    fleet.at(3.0, lambda: [Stop(reason="enough")])
    run(fleet)
    assert min(fleet.waited_s) >= 0


def test_rounds_of_one_version_are_the_versions():
    count = RoundCount()
    count.begin(5)
    assert [(count.of(v), count.closed(v), count.ends_at(v)) for v in (1, 2, 7)] == [
        (1, 1, True),
        (2, 2, True),
        (7, 7, True),
    ]


def test_a_round_of_three_versions_is_whole_at_its_third():
    count = RoundCount(versions_per_round=3)
    assert [count.of(version) for version in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [count.closed(version) for version in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [version for version in range(1, 8) if count.ends_at(version)] == [3, 6]


def test_a_count_that_is_not_given_is_that_of_the_devices_asked_first_and_stays():
    count = RoundCount(versions_per_round=None)
    count.begin(4)
    count.begin(9)
    assert (count.versions_per_round, count.of(5)) == (4, 2)


@pytest.mark.parametrize(("given", "expected"), [(None, 2), (3, 3)])
def test_an_asynchronous_run_ends_after_so_many_whole_rounds(given, expected):
    fleet, rounds = ScriptedFleet({"a": 1.0, "b": 2.5}), RoundCount(versions_per_round=given)
    state, reason = run(fleet, strategy=EveryUpdateIsAVersion(), goal=Goal(rounds=2), who="none", rounds=rounds)
    assert reason == "rounds reached 2"
    assert rounds.versions_per_round == expected
    versions = [version for version, _ in fleet.journal.of("aggregated")]
    assert 2 * expected <= len(versions) <= 2 * expected + 2
    assert state.version == len(versions)


def test_an_asynchronous_run_is_evaluated_at_the_end_of_its_rounds_and_at_its_own():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5}, evaluators=["e"])
    run(fleet, strategy=EveryUpdateIsAVersion(), goal=Goal(rounds=3), rounds=RoundCount(versions_per_round=2))
    orders = [(order.version, order.round) for order in fleet.given(Evaluation)]
    assert orders[:3] == [(2, 1), (4, 2), (6, 3)]
    assert orders[3:] == [(fleet.journal.of("aggregated")[-1][0], 4)]


class Choosy(OpenGate):
    """Refuses what certain devices send, rests others, and gives everybody two iterations."""

    def __init__(self, *, refused=(), rests=()):
        self.refused, self.rests = refused, rests

    def view(self, view):
        return SimpleNamespace(**{**vars(view), "idle": [name for name in view.idle if name not in self.rests]})

    def adjust(self, order, view):
        return replace(order, plan=replace(order.plan, epochs=None, iterations=2))

    def refusal(self, update):
        return f"{update.device_id} is not trusted" if update.device_id in self.refused else None


def test_an_update_that_the_gate_refuses_is_lost_with_the_reason_and_never_reaches_the_strategy():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
    run(fleet, who="none", goal=Goal(rounds=2), gate=Choosy(refused={"b"}))
    lost = [event for event in fleet.journal.of("received") if isinstance(event, Lost)]
    assert {(event.device_id, event.outcome, event.reason) for event in lost} == {
        ("b", Outcome.REFUSED, "b is not trusted")
    }
    assert [names for _, names in fleet.journal.of("aggregated")] == [("v0-a1-a",), ("v1-a1-a",)]


def test_a_fleet_whose_updates_are_all_refused_ends_the_run():
    with pytest.raises(RunFailedError, match="a is not trusted"):
        run(ScriptedFleet({"a": 1.0}), who="none", gate=Choosy(refused={"a"}))


def test_the_gate_says_who_is_asked_and_for_how_much():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.0})
    run(fleet, who="none", goal=Goal(rounds=2), gate=Choosy(rests={"b"}))
    orders = fleet.given(Assignment)
    assert {order.device_id for order in orders} == {"a"}
    assert {order.plan.iterations for order in orders} == {2}
    assert [order for order in fleet.journal.of("decided") if isinstance(order, Assignment)] == orders


@pytest.mark.parametrize(("over", "version"), [(1, 2), (2, 3), (3, 4)])
def test_the_accuracy_may_have_to_hold_over_several_evaluations(over, version):
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["e"])
    fleet.answer_s["e"] = 0.25
    seen = {1: 0.5, 2: 0.9, 3: 0.8, 4: 0.8, 5: 0.9}
    fleet.accuracy = lambda version: seen.get(version, 0.0)
    state, reason = run(fleet, goal=Goal(accuracy=0.82, accuracy_over=over))
    assert (reason, state.version) == ("accuracy reached 0.82", version)


def test_what_is_in_flight_at_the_end_is_recalled_once():
    fleet = ScriptedFleet({"a": 40.0, "b": 50.0})
    fleet.at(3.0, lambda: [Stop(reason="enough")])
    run(fleet, who="none")
    assert [order.device_id for order in fleet.given(Recall)] == ["a", "b"]
    assert fleet.now_s == 50.0


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
    fleet, strategy = ScriptedFleet({"a": 1.0, "b": 6.0}, evaluators=["e"]), ClosesOnlyAtTheEnd()
    fleet.at(3.5, lambda: [Stop(reason="enough")])
    state, reason = run(fleet, strategy=strategy)
    assert (reason, strategy.told) == ("enough", [3])
    assert state.version == 5  # three of a, and those that were in flight
    last = [order for order in fleet.given(Evaluation) if order.version == 5]
    assert [fleet.models[order.assignment_id] for order in last] == [(5, 5.0)]


def test_a_fleet_that_has_only_failed_goes_on_as_soon_as_one_update_comes():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5})
    fleet.fails = {"a", "b"}
    fleet.at(2.5, lambda: setattr(fleet, "fails", set()))
    state, _ = run(fleet, who="none", goal=Goal(rounds=2))
    assert state.version == 2


def test_a_run_whose_only_device_that_is_asked_always_fails_ends_although_others_are_there():
    fleet = ScriptedFleet({"a": 1.0, "b": 2.0})
    fleet.fails = {"a"}
    strategy = make_strategy("local", {"device": "a"}, RoundRules())
    with pytest.raises(RunFailedError, match=r"no device that is asked can do this work, 6 tries.*a: no such task"):
        run(fleet, strategy=strategy)


def test_failures_beside_a_device_that_still_works_do_not_end_the_run():
    fleet = ScriptedFleet({"a": 0.1, "b": 400.0})
    fleet.fails = {"a"}
    state, _ = run(fleet, strategy=make_strategy("asgd", {}, RoundRules()), goal=Goal(updates=1), who="none")
    assert len([order for order in fleet.given(Assignment) if order.device_id == "a"]) > 2 * GIVE_UP_AFTER
    assert state.version == 1


def test_the_scoreboard_does_not_look_at_all_that_is_outstanding_for_each_order():
    class Watched(dict):
        def values(self):
            raise AssertionError("a look at all of them")

    scores = Scoreboard(outstanding=Watched())
    scores.ask([Evaluation(assignment_id="e3", device_id="e", version=3, round=3)])
    scores.ask([Evaluation(assignment_id="e2", device_id="e", version=2, round=2)])
    assert (scores.asked, set(scores.outstanding)) == (3, {"e2", "e3"})


class Listening(OpenGate):
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def note(self, event, accuracy):
        self.told.append((event, accuracy))


def test_the_gate_is_told_what_happens_and_every_accuracy_once():
    gate, fleet = Listening(), ScriptedFleet({"a": 1.0, "b": 1.0}, evaluators=["e"])
    fleet.answer_s["e"] = 0.25
    fleet.accuracy = lambda version: 0.5  # the same again is news, too
    run(fleet, goal=Goal(rounds=3), gate=gate)
    told, received = [event for event, _ in gate.told], fleet.journal.of("received")
    assert [event.assignment_id for event in told] == [event.assignment_id for event in received]
    assert [accuracy for _, accuracy in gate.told if accuracy is not None] == [0.5] * 3
    assert all(isinstance(event, Evaluated) for event, accuracy in gate.told if accuracy is not None)


class EveryDeviceHasItsOwn(EveryUpdateIsAVersion):
    """The average is the version; a's model lies 10 above it, b's 10 below."""

    def node_models(self, state):
        return {"a": {"w": np.array([state.value + 10])}, "b": {"w": np.array([state.value - 10])}}


def asked_for(fleet):
    """Who was asked to evaluate whose model, of which version."""
    return {(order.device_id, order.subject, order.version) for order in fleet.given(Evaluation)}


def test_evaluators_are_asked_for_the_average_and_for_every_device_s_model_each_time():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5}, evaluators=["x", "y"])
    run(fleet, strategy=EveryDeviceHasItsOwn(), goal=Goal(rounds=2), rounds=RoundCount(versions_per_round=2))
    versions = {version for _, _, version in asked_for(fleet)}
    assert {2, 4} <= versions
    models = ("", "a", "b")
    assert asked_for(fleet) == {(judge, of, version) for judge in "xy" for of in models for version in versions}
    assert len({order.assignment_id for order in fleet.given(Evaluation)}) == 6 * len(versions)
    shifts = {"": 0.0, "a": 10.0, "b": -10.0}
    for order in fleet.given(Evaluation):
        assert fleet.models[order.assignment_id] == (order.version, order.version + shifts[order.subject])


def test_without_an_evaluator_every_device_evaluates_the_average_and_its_own_model_alone():
    fleet = ScriptedFleet({"a": 1.0, "b": 1.5, "c": 9.0})
    run(fleet, strategy=EveryDeviceHasItsOwn(), goal=Goal(rounds=2))
    pairs = {(device, subject) for device, subject, _ in asked_for(fleet)}
    assert pairs == {("a", ""), ("a", "a"), ("b", ""), ("b", "b"), ("c", "")}


@pytest.mark.parametrize(("answer_s", "end_s"), [(30.0, 1.0 + 30.0), (NEVER, 1.0 + DRAIN_S)])
def test_the_last_evaluations_of_devices_models_are_waited_for_as_long_as_any_other(answer_s, end_s):
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["x"])
    fleet.nodes_answer_s = answer_s
    _, reason = run(fleet, strategy=EveryDeviceHasItsOwn(), goal=Goal(rounds=1))
    assert reason == "rounds reached 1"
    assert fleet.now_s == end_s


@pytest.mark.parametrize(("nodes", "average", "version"), [(0.95, 0.4, 6), (0.1, 0.9, 1)])
def test_only_the_average_reaches_an_accuracy_goal(nodes, average, version):
    fleet = ScriptedFleet({"a": 1.0}, evaluators=["x"])
    fleet.answer_s["x"] = 0.5
    fleet.accuracy, fleet.accuracy_of_nodes = (lambda _version: average), nodes
    state, reason = run(fleet, strategy=EveryDeviceHasItsOwn(), goal=Goal(accuracy=0.8, rounds=6))
    assert reason == ("accuracy reached 0.8" if average > 0.8 else "rounds reached 6")
    assert state.version == version


def test_the_gate_is_told_the_accuracy_of_the_average_and_of_nothing_else():
    gate, fleet = Listening(), ScriptedFleet({"a": 1.0}, evaluators=["x"])
    fleet.answer_s["x"] = 0.25
    fleet.accuracy, fleet.accuracy_of_nodes = (lambda _version: 0.5), 0.9
    run(fleet, strategy=EveryDeviceHasItsOwn(), goal=Goal(rounds=3), gate=gate)
    assert [accuracy for _, accuracy in gate.told if accuracy is not None] == [0.5] * 3
    assert sum(isinstance(event, Evaluated) for event, _ in gate.told) == 3 * 3


def test_an_evaluation_that_fails_is_no_failed_work_whoever_s_model_it_is_of():
    tally = Tally()
    for subject in ("", "a"):
        order = Evaluation(assignment_id=f"e:{subject}", device_id="a", version=1, round=1, subject=subject)
        tally.give([order], 0.0)
        assert tally.awaits_scores
        tally.note(Lost(device_id="a", assignment_id=order.assignment_id, outcome=Outcome.FAILED, reason="diverged"))
    assert (tally.failures, tally.awaits_scores) == ({}, False)


def test_a_strategy_that_drops_a_model_before_it_was_sent_is_told_so():
    class Forgetful(EveryDeviceHasItsOwn):
        def node_models(self, state):
            return {} if state.value and not state.used else super().node_models(state)

        def assign(self, state, view):
            return super().assign(replace(state, used=()), view)

    with pytest.raises(StrategyError, match="node_models: there is no model of 'a' any more"):
        run(ScriptedFleet({"a": 1.0, "b": 1.5}), strategy=Forgetful(), goal=Goal(rounds=3))
