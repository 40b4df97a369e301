"""What every strategy promises, run over the registry: a new one is tested by being registered."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from faulty_fleet import NAMES, TASK, FaultyFleet, displacement, first_model
from strategy_turns import update_of, view_of

from edgefl.core.errors import ConfigError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.types import DeviceInfo, Role, TrainInstruction
from edgefl.engine.progress import RoundCounter, StoppingCriteria
from edgefl.engine.round_loop import run_rounds
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy
from edgefl.strategies.decentralised.strategy import DecentralisedStrategy
from edgefl.strategies.participation import EvaluationSchedule
from edgefl.strategies.registry import BUILT_IN_STRATEGIES, make_strategy
from edgefl.strategies.strategy_config import RoundRules

DEVICES = tuple(f"pi-{i}" for i in range(5))
# As many updates fill a buffer as there are devices below, so that a round of them all is used.
NEEDED = {"fedbuff": {"buffer_size": len(DEVICES)}}
# Within the deadlines below; the others exchange after every iteration anyway.
NEEDED |= {name: {"iterations": 2} for name in ("ad-psgd", "admm-isvr", "dsgd", "k-gt", "pdmm-isvr")}
NEEDED |= {"gradient-tracking": {"exchanges_per_round": 4}}
TWO = "two at a time"
EVALUATOR = DeviceInfo(device_id=EVALUATOR_NAME, role=Role.EVALUATOR, source="coordinator")
"""The coordinator's own, which is there in every view; some strategies let it train."""
VARIANTS = {
    "adacomp, staleness of the update": ("adacomp", {"staleness": "update"}),
    "adacomp, no staleness": ("adacomp", {"staleness": "none", "improved": True}),
    "bounded, 0": ("bounded", {"staleness": 0}),
    "bounded, 3": ("bounded", {"staleness": 3}),
    "dc-asgd, adaptive": ("dc-asgd", {"variant": "adaptive"}),
    "dc-asgd, mxnet": ("dc-asgd", {"variant": "mxnet"}),
    "esync, live": ("esync", {"mode": "live"}),
    "esync, query": ("esync", {"mode": "query"}),
    "esync, nova": ("esync", {"aggregation": "nova"}),
    "fedasync, hinge": ("fedasync", {"staleness": "hinge"}),
    f"fedavg, {TWO}": ("fedavg", {"double_buffering": True}),
    f"ssgd, {TWO}": ("ssgd", {"double_buffering": True}),
}
CASES = {name: (name, NEEDED.get(name, {})) for name in BUILT_IN_STRATEGIES} | VARIANTS
TRACKING = ServerOptimizer(buffers=frozenset({"mean"}))
each_of_all = pytest.mark.parametrize("case", sorted(CASES))


def built(case, **rules):
    name, options = CASES[case]
    return make_strategy(name, options, RoundRules(**{"task": TASK, "server": TRACKING, **rules}))


# Nodes of a graph send messages and now and then a model, no updates; see `test_decentralised`.
each_strategy = pytest.mark.parametrize("case", [c for c in sorted(CASES) if not built(c).has_nodes])
# Those that apply updates in the order of arrival promise no more than what is the same for the same order.
each_in_rounds = pytest.mark.parametrize(
    "case", [c for c in sorted(CASES) if not isinstance(built(c), AsynchronousStrategy | DecentralisedStrategy)]
)


# Those with a rule that bounds what rogues can do.
each_robust = pytest.mark.parametrize("case", [c for c in sorted(CASES) if hasattr(built(c), "rule")])


def view_over(busy=(), devices=DEVICES):
    view = view_of(*devices, busy=busy, devices=devices)
    for place, name in enumerate(devices):
        blocks = {TASK: (place, (place + 1) % len(devices))}
        view.devices[name] = DeviceInfo(device_id=name, blocks=blocks)
    view.devices[EVALUATOR_NAME] = EVALUATOR
    return view


def update_for(order, seed):
    place = [*DEVICES, EVALUATOR_NAME].index(order.device_id) if order.block is None else order.block
    times = {"iterations": 1, "compute_s": 0.1 * (place + 1), "send_s": 0.1}
    return update_of(order, displacement(seed, order, is_sparse=False), num_examples=10 * (place + 1), **times)


def asked(strategy, state, view):
    state, decision = strategy.assign(state, view)
    return state, [order for order in decision.instructions if isinstance(order, TrainInstruction)]


def busy_with(orders):
    busy = {}
    for order in orders:
        busy.setdefault(order.device_id, []).append(order.assignment_id)
    return busy


def play_round(strategy, state, seed, *, shuffle=None, copies=1):
    """Asks, answers in some order, closes all that is ready; returns the new state, the orders and what was used."""
    state, orders = asked(strategy, state, view_over())
    assert orders
    left = list(orders)
    used, arrivals = [], orders if shuffle is None else [orders[i] for i in shuffle.permutation(len(orders))]
    for order in arrivals:
        left.remove(order)
        for _ in range(copies):
            state = strategy.receive(state, update_for(order, seed))
        while strategy.ready(state, view_over(busy_with(left))):
            before = strategy.version(state)
            state = strategy.aggregate(state)
            assert strategy.version(state) == before + 1
            used += strategy.used(state)
    return state, orders, used


def same_model(one, other):
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.shape == other[name].shape
        assert tensor.tobytes() == other[name].tobytes(), name
    return True


@each_strategy
def test_every_update_is_used_once_however_often_it_comes_and_the_tensors_of_callers_are_left_as_they_were(case):
    strategy, start = built(case), first_model()
    before = {key: tensor.copy() for key, tensor in start.items()}
    for tensor in start.values():
        tensor.flags.writeable = False
    state, given, used = strategy.init(start), [], []
    for number in range(4):  # updates are read-only: writing to one would raise
        state, orders, now_used = play_round(strategy, state, 0, copies=2)
        assert number or not any(np.array_equal(strategy.model(state)[key], start[key]) for key in start)
        given += orders
        used += now_used
    assert strategy.version(state) >= 4
    assert len(used) == len(set(used))
    assert set(used) <= {order.assignment_id for order in given}
    # With redundant shards, a copy of what is there already is not used; of two rounds at a time, the last is open.
    closed = given[: -len(orders)] if case.endswith(TWO) else given
    assert {(o.base_version, o.block) for o in closed} <= {
        (o.base_version, o.block) for o in given if o.assignment_id in used
    }
    assert same_model(start, before)
    model = strategy.model(state)
    assert not any(np.shares_memory(start[key], model[key]) for key in start)
    assert {key: (t.dtype, t.shape) for key, t in model.items()} == {k: (t.dtype, t.shape) for k, t in start.items()}
    assert all(np.isfinite(tensor).all() for tensor in model.values())


@each_in_rounds
def test_in_rounds_the_order_of_arrival_does_not_change_a_bit(case):
    strategy, models = built(case), []
    for shuffle in range(3):
        rng, state = np.random.default_rng(shuffle), strategy.init(first_model())
        for _ in range(3):
            state, *_ = play_round(strategy, state, 0, shuffle=rng if shuffle else None)
        models.append(strategy.model(state))
    assert all(same_model(models[0], model) for model in models[1:])


@each_strategy
def test_nothing_is_ready_before_an_update_has_come(case):
    strategy = built(case)
    state = strategy.init(first_model())
    assert not strategy.ready(state, view_over())
    state, orders = asked(strategy, state, view_over())
    assert not strategy.ready(state, view_over(busy_with(orders)))


@each_of_all
def test_an_update_that_nobody_asked_for_changes_nothing(case):
    strategy = built(case)
    state, orders = asked(strategy, strategy.init(first_model()), view_over())
    foreign = TrainInstruction(assignment_id="x", device_id=DEVICES[0], base_version=0, plan=orders[0].plan)
    stranger = TrainInstruction(assignment_id="", device_id=DEVICES[-1], base_version=0, plan=orders[0].plan)
    for order in (foreign, stranger):
        state = strategy.receive(state, update_for(order, 0))
    assert not strategy.ready(state, view_over(busy_with(orders)))
    assert same_model(strategy.model(state), first_model())


@each_of_all
def test_it_waits_without_devices_and_begins_when_enough_are_there(case):
    strategy = built(case, min_devices=3)
    state = strategy.init(first_model())
    for devices in ((), DEVICES[:2], ()):
        state, decision = strategy.assign(state, view_over(devices=devices))
        assert decision.instructions == ()
        assert decision.next_wake_s > 0
    state, orders = asked(strategy, state, view_over(devices=DEVICES[:3]))
    assert orders
    for _ in range(3):
        state, more = asked(strategy, state, view_over(busy_with(orders), devices=DEVICES[:3]))
        orders += more
    assert max(Counter(order.device_id for order in orders).values()) <= 2


@each_strategy
def test_no_more_devices_work_at_a_time_than_the_run_allows(case):
    limit = 4 if case.endswith(TWO) else 2  # in each of two rounds
    for rules in ({"max_devices": 2}, {"fraction": 0.4}):
        strategy = built(case, **rules)
        state, orders = asked(strategy, strategy.init(first_model()), view_over())
        assert 1 <= len({order.device_id for order in orders} - {EVALUATOR_NAME}) <= limit
        _, more = asked(strategy, state, view_over(busy_with(orders)))
        assert len({order.device_id for order in [*orders, *more]} - {EVALUATOR_NAME}) <= limit


@each_strategy
def test_devices_are_told_which_of_their_updates_were_used(case):
    strategy = built(case)
    state, orders, used = play_round(strategy, strategy.init(first_model()), 0)
    _, following = asked(strategy, state, view_over())
    told = {assignment_id for order in following for assignment_id in order.used_assignments}
    assert told == set(used)
    given_to = {order.assignment_id: order.device_id for order in orders}
    assert all(given_to[used_id] == order.device_id for order in following for used_id in order.used_assignments)


ROGUE_DIRECTIONS = {
    "far away": lambda rng, honest: 1e6 * np.ones_like(honest[0]),
    "against the others": lambda rng, honest: -10 * honest.mean(axis=0),
    "just beside them": lambda rng, honest: honest.mean(axis=0) - 1.5 * honest.std(axis=0),
    "one entry": lambda rng, honest: honest[0] + 1e9 * np.eye(1, honest.shape[1])[0],
    "noise": lambda rng, honest: 1e3 * rng.standard_normal(honest.shape[1]),
}


def play_rogues(strategy, honest, rogues):
    """The step of a round, by honest devices and rogues, any of whom may be asked first."""
    names = [f"d{place:02}" for place in range(len(honest) + len(rogues))]
    order = np.random.default_rng(len(names)).permutation(len(names))
    rows = np.concatenate([honest, rogues])[order]
    state, orders = asked(strategy, strategy.init({"w": np.zeros(rows.shape[1], np.float32)}), view_over((), names))
    for instruction, row in zip(orders, rows, strict=True):
        state = strategy.receive(state, update_of(instruction, {"w": row.astype(np.float32)}, num_examples=1))
    return strategy.model(strategy.aggregate(state))["w"]


@each_robust
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("direction", ROGUE_DIRECTIONS)
def test_fewer_rogues_than_a_rule_allows_cannot_push_the_model_beyond_the_honest_updates(case, direction, neighbours):
    num_rogues, rng = 2, np.random.default_rng(5)
    num_devices = 4 * num_rogues + 3  # what the most demanding rule needs
    honest = 1 + 0.1 * rng.standard_normal((num_devices - num_rogues, 20))
    spread = np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()
    rogues = np.array([ROGUE_DIRECTIONS[direction](rng, honest) for _ in range(num_rogues)])
    strategy = make_strategy(
        CASES[case][0], {**CASES[case][1], "num_rogues": num_rogues, "neighbours": neighbours}, RoundRules()
    )
    step = play_rogues(strategy, honest, rogues)
    assert np.linalg.norm(step - honest.mean(axis=0)) <= spread


def run(strategy, seed, goal=None, *, fleet=None, **options):
    """Drives a strategy through the real loop; returns the fleet, the last model and why it ended."""
    fleet = fleet or FaultyFleet(seed, **options)
    state, reason = run_rounds(
        strategy,
        strategy.init(first_model(seed)),
        fleet=fleet,
        journal=fleet.journal,
        goal=goal or StoppingCriteria(rounds=5),
        evaluate=EvaluationSchedule(evaluate_on="devices"),
        rounds=RoundCounter(versions_per_round=getattr(strategy, "versions_per_round", 1)),
    )
    return fleet, strategy.model(state), reason


@each_of_all
def test_devices_that_die_are_slow_answer_twice_or_late_neither_stop_nor_spoil_a_run(case):
    fleet, model, reason = run(built(case, deadline_s=4.0), 0)  # the fleet checks every order
    assert reason == "rounds reached 5"
    assert fleet.now_s < 600
    assert all(np.isfinite(tensor).all() for tensor in model.values())
    assert max(np.abs(tensor).max() for tensor in model.values()) < 1000


@each_of_all
def test_a_run_goes_on_when_everybody_was_lost_and_came_back(case):
    fleet = FaultyFleet(faults={})
    fleet.at(0.4, lambda: [event for name in NAMES for event in fleet.leave(name)])
    fleet.at(500.0, lambda: [event for name in NAMES for event in fleet.join(name)])
    *_, reason = run(built(case), 0, fleet=fleet)
    assert reason == "rounds reached 5"
    assert 500 < fleet.now_s < 700


@each_of_all
def test_the_same_seed_gives_the_same_run_and_another_one_another(case):
    def trail(seed):
        fleet, model, _ = run(built(case, max_devices=3, deadline_s=4.0, seed=seed), seed)
        return [order.assignment_id for order in fleet.given], fleet.journal.used, fleet.now_s, model

    (*first, model), (*again, same), (*_, other) = trail(0), trail(0), trail(1)
    assert first == again
    assert same_model(model, same)
    assert not np.array_equal(model["weight"], other["weight"])


class Forgetful:
    """A strategy whose state is written and read anew before every step: nothing may live anywhere else."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __getattr__(self, name):
        return getattr(self.strategy, name)

    def _fresh(self, state):
        return decode_state(encode_state(state), type(state))

    def assign(self, state, view):
        return self.strategy.assign(self._fresh(state), view)

    def receive(self, state, update):
        return self.strategy.receive(self._fresh(state), update)

    def aggregate(self, state):
        return self.strategy.aggregate(self._fresh(state))


@pytest.mark.extended
@each_of_all
def test_a_run_whose_state_is_saved_and_loaded_at_every_step_is_the_same_run(case):
    # A round of those without a server is as many exchanges, and their states hold all nodes.
    goal = StoppingCriteria(rounds=1 if built(case).has_nodes else 3)
    first, model, _ = run(built(case, deadline_s=4.0), 0, goal)
    second, same, _ = run(Forgetful(built(case, deadline_s=4.0)), 0, goal)
    assert [order.assignment_id for order in first.given] == [order.assignment_id for order in second.given]
    assert first.journal.used == second.journal.used
    assert same_model(model, same)


@each_of_all
def test_a_server_optimiser_changes_the_run_or_is_refused_before_it(case):
    goal = StoppingCriteria(updates=10)
    _, plain, _ = run(built(case), 0, goal, faults={})
    server = replace(TRACKING, kind="yogi", learning_rate=0.1)
    if case.startswith("adacomp") or built(case).has_nodes:
        with pytest.raises(ConfigError, match=r"server\.optimizer"):
            built(case, server=server)
        return
    strategy = built(case, server=server)
    _, model, _ = run(strategy, 0, goal, faults={})
    assert not np.array_equal(plain["weight"], model["weight"])
    assert all(np.isfinite(tensor).all() for tensor in model.values())


class Looks:
    """How many entries of the view were looked at."""

    def __init__(self):
        self.num = 0


class Watched(Mapping, Sequence):
    """A mapping or a sequence that counts each entry that is looked at; a length costs one, a walk all of it."""

    def __init__(self, entries, looks):
        self.entries, self.looks = entries, looks

    def __getitem__(self, key):
        self.looks.num += 1
        return self.entries[key]

    def __contains__(self, key):
        self.looks.num += 1 if isinstance(self.entries, dict) else len(self.entries)
        return key in self.entries

    def get(self, key, default=None):
        self.looks.num += 1
        return self.entries.get(key, default)

    def __len__(self):
        self.looks.num += 1
        return len(self.entries)

    def __iter__(self):
        for entry in self.entries:
            self.looks.num += 1
            yield entry


NUM_DEVICES = 300
"""Enough to tell: a strategy that looks at all of them for each event would do so 180 000 times."""


@each_strategy
@pytest.mark.parametrize("rules", [{}, {"fraction": 0.1}])
def test_an_event_costs_the_same_however_many_devices_there_are(case, rules):
    strategy, looks = built(case, **rules), Looks()
    names = [f"n{place:05d}" for place in range(NUM_DEVICES)]
    busy, idle = {}, list(names)
    devices = {name: DeviceInfo(device_id=name, blocks={TASK: (place,)}) for place, name in enumerate(names)}
    devices[EVALUATOR_NAME] = EVALUATOR
    view = SimpleNamespace(
        now_s=0.0, devices=Watched(devices, looks), idle=Watched(idle, looks), busy=Watched(busy, looks),
        speeds={}, progress={}, health={},
    )  # fmt: skip
    moved = {"w": np.full(2, 1e-3, np.float32)}
    state, queue, num_events = strategy.init({"w": np.zeros(2, np.float32)}), [], 0
    for _ in range(2 * NUM_DEVICES):
        while strategy.ready(state, view):
            state = strategy.aggregate(state)
        state, orders = asked(strategy, state, view)
        for order in orders:
            busy.setdefault(order.device_id, []).append(order.assignment_id)
            queue.append(order)
        for device_id in {order.device_id for order in orders} & set(idle):
            idle.remove(device_id)
        if not queue:
            break
        order = queue.pop(0)
        update = update_of(order, moved, num_examples=5, iterations=1, compute_s=1.0, send_s=0.1)
        busy[order.device_id].remove(order.assignment_id)
        if not busy[order.device_id]:
            del busy[order.device_id]
            if order.device_id in names:
                idle.append(order.device_id)
        state = strategy.receive(state, update)
        num_events += 1
    # A round may begin with a look at everybody; without rounds there is one beginning.
    num_begun = 1 if isinstance(strategy, AsynchronousStrategy) else 1 + strategy.version(state)
    allowed = 20 * num_events + 8 * NUM_DEVICES * num_begun
    assert looks.num < allowed, f"{looks.num} looks for {num_events} events in {num_begun} rounds"
