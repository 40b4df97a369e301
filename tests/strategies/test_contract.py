"""What every strategy promises, run over the registry: a new one is tested by being registered."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.storage.checkpoints import load_state, save_state
from edgefl.strategies.registry import BUILT_IN, REQUIRED, make_strategy, settings_of
from edgefl.strategies.rounds import RoundRules
from edgefl.types import Assignment, DeviceInfo, LazyTensors, SparseTensor, Update, UpdateMetrics

DEVICES = tuple(f"pi-{i}" for i in range(5))
SEEDS = (0, 1, 2)
each_strategy = pytest.mark.parametrize("name", sorted(BUILT_IN))
each_seed = pytest.mark.parametrize("seed", SEEDS)


def first_model(seed):
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.standard_normal((4, 3)).astype(np.float32),
        "half": rng.standard_normal(5).astype(np.float16),
        "double": rng.standard_normal(2),
        "scale": np.array(rng.standard_normal(), np.float32),
        "steps": np.array(7, np.int64),
    }


def view_of(busy=(), devices=DEVICES):
    return SimpleNamespace(
        now_s=0.0,
        devices={name: DeviceInfo(device_id=name) for name in devices},
        idle=[name for name in devices if name not in busy],
        busy=dict(busy),
        speeds={},
        progress={},
    )


def update_for(order, seed):
    """An update as decoding gives it: read-only, one tensor sparse, the whole thing lazy."""
    place = DEVICES.index(order.device_id)
    rng = np.random.default_rng((seed, order.base_version, place))
    tensors = {
        "weight": rng.standard_normal((4, 3)).astype(np.float32),
        "half": rng.standard_normal(5).astype(np.float16),
        "double": SparseTensor(indices=np.array([1]), values=rng.standard_normal(1), shape=(2,)),
        "scale": np.array(rng.standard_normal(), np.float32),
        "steps": np.array(place + 1, np.int64),
    }
    for tensor in tensors.values():
        (tensor.values if isinstance(tensor, SparseTensor) else tensor).flags.writeable = False
    return Update(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        base_version=order.base_version,
        tensors=LazyTensors(lambda: tensors),
        metrics=UpdateMetrics(num_examples=10 * (place + 1), iterations=3),
    )


def asked(strategy, state, view):
    state, decision = strategy.assign(state, view)
    return state, [order for order in decision.orders if isinstance(order, Assignment)]


def play_round(strategy, state, seed, order_of_arrival=None):
    """Asks, answers in some order, closes everything that is ready; returns the new state."""
    state, orders = asked(strategy, state, view_of())
    assert orders
    arrivals = orders if order_of_arrival is None else [orders[i] for i in order_of_arrival]
    busy = {order.device_id: (order.assignment_id,) for order in orders}
    for order in arrivals:
        del busy[order.device_id]
        state = strategy.receive(state, update_for(order, seed))
        while strategy.ready(state, view_of(busy)):
            state = strategy.aggregate(state)
    return state


def same_model(one, other):
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.shape == other[name].shape
        assert tensor.tobytes() == other[name].tobytes(), name
    return True


def built(name, **rules):
    return make_strategy(name, {}, RoundRules(**rules))


@each_strategy
@each_seed
def test_versions_go_up_by_one_and_every_update_is_used_once(name, seed):
    strategy = built(name)
    state, versions, used = strategy.init(first_model(seed)), [0], []
    for _ in range(4):
        state, orders = asked(strategy, state, view_of())
        busy = {order.device_id: (order.assignment_id,) for order in orders}
        for order in orders:
            del busy[order.device_id]
            for _ in range(2):  # twice: a repeated update must not count twice
                state = strategy.receive(state, update_for(order, seed))
            while strategy.ready(state, view_of(busy)):
                state = strategy.aggregate(state)
                versions.append(strategy.version(state))
                used += strategy.used(state)
    assert versions == list(range(len(versions)))
    assert len(versions) > 1
    assert len(used) == len(set(used)) == 4 * len(DEVICES)


@each_strategy
def test_assignment_ids_are_never_given_twice(name):
    strategy = built(name)
    state, given = strategy.init(first_model(0)), []
    for turn in range(6):
        state, orders = asked(strategy, state, view_of())
        given += [order.assignment_id for order in orders]
        for order in orders if turn % 2 else ():  # every other time all devices are lost
            state = strategy.receive(state, update_for(order, 0))
        while strategy.ready(state, view_of()):
            state = strategy.aggregate(state)
    assert len(given) == len(set(given)) >= 6


@each_strategy
@each_seed
def test_the_tensors_of_callers_are_left_as_they_were(name, seed):
    strategy, mine = built(name), first_model(seed)
    before = {key: tensor.copy() for key, tensor in mine.items()}
    for tensor in mine.values():
        tensor.flags.writeable = False
    state = strategy.init(mine)
    for _ in range(3):  # updates are read-only: writing to one would raise
        state = play_round(strategy, state, seed)
    assert same_model(mine, before)
    assert not any(np.shares_memory(mine[key], strategy.model(state)[key]) for key in mine)


@each_strategy
@each_seed
def test_tensors_keep_their_type_and_shape_and_do_move(name, seed):
    strategy, start = built(name), first_model(seed)
    model = strategy.model(play_round(strategy, strategy.init(start), seed))
    assert {key: (t.dtype, t.shape) for key, t in model.items()} == {k: (t.dtype, t.shape) for k, t in start.items()}
    assert all(not np.array_equal(model[key], start[key]) for key in start)
    assert all(np.isfinite(tensor).all() for tensor in model.values())


@each_strategy
@each_seed
def test_the_order_of_arrival_does_not_change_a_bit(name, seed):
    strategy, models = built(name), []
    for shuffle in range(4):
        rng, state = np.random.default_rng(shuffle), strategy.init(first_model(seed))
        for _ in range(3):
            state = play_round(strategy, state, seed, rng.permutation(len(DEVICES)) if shuffle else None)
        models.append(strategy.model(state))
    assert all(same_model(models[0], model) for model in models[1:])


@each_strategy
@each_seed
def test_the_same_seed_gives_the_same_run(name, seed):
    def whole_run():
        strategy = built(name, max_devices=3, seed=seed)
        state, trail = strategy.init(first_model(seed)), []
        for _ in range(4):
            state, orders = asked(strategy, state, view_of())
            trail += [order.assignment_id for order in orders]
            for order in orders:
                state = strategy.receive(state, update_for(order, seed))
            while strategy.ready(state, view_of()):
                state = strategy.aggregate(state)
        return trail, strategy.model(state)

    (trail, model), (again, same) = whole_run(), whole_run()
    assert trail == again
    assert same_model(model, same)


@each_strategy
@each_seed
def test_a_saved_state_goes_on_as_if_it_had_never_left(name, seed, tmp_path):
    strategy = built(name)
    states = [strategy.init(first_model(seed)), strategy.init(first_model(seed))]
    for number in range(4):
        save_state(tmp_path, states[1], number)
        states[1] = load_state(tmp_path, type(states[0]))
        assert strategy.used(states[0]) == strategy.used(states[1])
        _, first = asked(strategy, *_reopened(states[0], tmp_path))
        _, second = asked(strategy, *_reopened(states[1], tmp_path))
        assert first == second
        states = [play_round(strategy, state, seed) for state in states]
        assert strategy.version(states[0]) == strategy.version(states[1])
        assert same_model(strategy.model(states[0]), strategy.model(states[1]))


def _reopened(state, folder):
    """A state of its own with which to ask, since asking may change it in place."""
    save_state(folder / "asking", state, 0)
    return load_state(folder / "asking", type(state)), view_of()


@each_strategy
def test_nothing_is_ready_before_an_update_has_come(name):
    strategy = built(name)
    state = strategy.init(first_model(0))
    assert not strategy.ready(state, view_of())
    state, _ = asked(strategy, state, view_of())
    assert not strategy.ready(state, view_of())


@each_strategy
def test_a_strategy_without_devices_waits_and_does_not_fail(name):
    strategy = built(name)
    state = strategy.init(first_model(0))
    for _ in range(3):
        state, decision = strategy.assign(state, view_of(devices=()))
        assert decision.orders == ()
        assert decision.next_wake_s > 0


@each_strategy
def test_devices_are_told_which_of_their_updates_were_used(name):
    strategy = built(name)
    state, orders = asked(strategy, strategy.init(first_model(0)), view_of())
    for order in orders:
        state = strategy.receive(state, update_for(order, 0))
    while strategy.ready(state, view_of()):
        state = strategy.aggregate(state)
    _, following = asked(strategy, state, view_of())
    assert {o.device_id: o.settled for o in following} == {o.device_id: (o.assignment_id,) for o in orders}


@each_strategy
def test_every_setting_has_a_default(name):
    assert REQUIRED not in settings_of(name).values()
