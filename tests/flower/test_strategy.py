"""Flower's strategies, as they are, drive our rounds; what they compute is theirs to the bit."""

import logging
import random
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

import edgefl
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.settings import REQUIRED
from edgefl.core.types import DeviceInfo, SparseTensor, Update, UpdateMetrics, UpdateStatus
from edgefl.engine.assembly.build import build_run
from edgefl.flower.internals import ensure_identity
from edgefl.flower.strategy import (
    MAX_QUERIES,
    FlowerState,
    StubGrid,
    compute_node_id,
    export_attributes,
    make_flower_strategy,
    seed_global_generators,
)
from edgefl.flower.strategy_options import get_flower_settings, is_flower_strategy, list_flower_strategies
from edgefl.storage.checkpoints import load_state, save_state
from edgefl.storage.state_serialisation import encode_state
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.strategy_config import RoundRules

DEVICES = tuple(f"pi-{i}" for i in range(4))
NEEDED = {"flwr:QFedAvg": {"client_learning_rate": 0.1}}
each_strategy = pytest.mark.parametrize("name", list_flower_strategies())


def made(name, options=None, **rules):
    return make_flower_strategy(name, NEEDED.get(name, {}) if options is None else options, RoundRules(**rules))


def first_model():
    return {
        "w": np.array([[0.5, -1.0], [2.0, 0.25]], np.float32),
        "b": np.array(0.125, np.float64),
        "n": np.array(7, np.int64),
    }


def view_of(idle=DEVICES, busy=()):
    devices = {name: DeviceInfo(device_id=name) for name in DEVICES}
    return SimpleNamespace(
        now_s=0.0, devices=devices, idle=list(idle), busy=dict(busy), speeds={}, progress={}, health={}
    )


def moved(place, number):
    rng = np.random.default_rng((place, number))
    return {
        "w": rng.standard_normal((2, 2)).astype(np.float32),
        "b": np.array(rng.standard_normal()),
        "n": np.array(place, np.int64),
    }


def update_for(order, number=0, **tensors):
    place = DEVICES.index(order.device_id)
    return Update(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        base_version=order.base_version,
        tensors={**moved(place, number), **tensors},
        metrics=UpdateMetrics(num_examples=10 * (place + 1), iterations=3, loss=0.5 + place),
    )


def play(strategy, state, number, idle=DEVICES):
    """One round in which everybody answers, the last one first."""
    state, decision = strategy.assign(state, view_of(idle))
    for order in reversed(decision.instructions):
        state = strategy.receive(state, update_for(order, number))
    assert strategy.ready(state, view_of(idle))
    return strategy.aggregate(state), decision.instructions


def by_hand(name, options, num_rounds):
    """What Flower's own round would do with the same replies, without any of our code for rounds."""
    ensure_identity()
    strategy = getattr(flower, name.removeprefix("flwr:"))(min_train_nodes=4, min_available_nodes=4, **options)
    model = {key: tensor for key, tensor in first_model().items() if key != "n"}
    for number in range(num_rounds):
        arrays = ArrayRecord({key: Array(tensor) for key, tensor in model.items()})
        nodes = [compute_node_id(device) for device in DEVICES]
        list(strategy.configure_train(number + 1, arrays, ConfigRecord(), StubGrid(nodes)))
        replies = []
        for place, node in enumerate(nodes):
            trained = {key: model[key] + moved(place, number)[key] for key in model}
            content = RecordDict(
                {
                    "arrays": ArrayRecord({key: Array(np.asarray(tensor)) for key, tensor in trained.items()}),
                    "metrics": MetricRecord({"num-examples": 10 * (place + 1), "train_loss": 0.5 + place}),
                }
            )
            replies.append(Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN)))
        result, _ = strategy.aggregate_train(number + 1, replies)
        model = {key: result[key].numpy().astype(model[key].dtype) for key in model}
    return model


@each_strategy
def test_the_model_is_what_flower_computes_to_the_bit(name):
    strategy = made(name)
    state = strategy.init(first_model())
    for number in range(2):
        state, _ = play(strategy, state, number)
    expected = by_hand(name, NEEDED.get(name, {}), 2)
    for key, tensor in expected.items():
        assert strategy.model(state)[key].dtype == first_model()[key].dtype
        assert strategy.model(state)[key].tobytes() == tensor.tobytes(), key
    assert strategy.version(state) == 2
    assert strategy.model(state)["n"] == 7 + 2 * 3, "counters are those of the update with most examples"


@each_strategy
def test_a_saved_state_goes_on_as_if_it_had_never_left(name, tmp_path):
    strategy, state = made(name), None
    state, _ = play(strategy, strategy.init(first_model()), 0)
    state, decision = strategy.assign(state, view_of())
    state = strategy.receive(state, update_for(decision.instructions[0], 1))
    save_state(tmp_path, state, 0)
    finished = []
    for then, state in ((made(name), load_state(tmp_path, FlowerState)), (strategy, state)):  # noqa: B020 one after the other
        now = state
        for order in decision.instructions[1:]:
            now = then.receive(now, update_for(order, 1))
        now, orders = play(then, then.aggregate(now), 2)
        finished.append((then.model(now), orders))
    (model, orders), (other, same_orders) = finished
    assert orders == same_orders
    assert {key: tensor.tobytes() for key, tensor in model.items()} == {k: t.tobytes() for k, t in other.items()}


@pytest.mark.parametrize("name", ["flwr:Krum", "flwr:FedTrimmedAvg", "flwr:FedMedian"])
def test_an_outlier_does_not_count(name):
    strategy = made(name, {"beta": 0.25} if name == "flwr:FedTrimmedAvg" else {})
    state, decision = strategy.assign(strategy.init({"w": np.zeros(2, np.float32)}), view_of())
    for order in decision.instructions:
        value = 100.0 if order.device_id == "pi-2" else 1.0
        tensors = {"w": np.full(2, value, np.float32)}
        state = strategy.receive(state, update_for(order, **tensors))
    assert strategy.model(strategy.aggregate(state))["w"].tolist() == [1.0, 1.0]


def test_sparse_updates_are_whole_models_for_flower():
    strategy = made("flwr:FedAvg")
    state, decision = strategy.assign(strategy.init({"w": np.ones((2, 2), np.float32)}), view_of(idle=DEVICES[:1]))
    sparse = SparseTensor(indices=np.array([3]), values=np.array([2.0], np.float32), shape=(2, 2))
    state = strategy.receive(state, update_for(decision.instructions[0], w=sparse))
    assert strategy.model(strategy.aggregate(state))["w"].tolist() == [[1, 1], [1, 3]]


def test_the_tensors_of_callers_are_left_as_they_were_and_bulyan_leaves_the_model_when_replies_are_too_few():
    model, strategy = first_model(), made("flwr:FedAdam")
    play(strategy, strategy.init(model), 0)
    assert all(np.array_equal(model[key], tensor) for key, tensor in first_model().items())
    strategy = made("flwr:Bulyan", {"num_malicious_nodes": 1})
    state, _ = play(strategy, strategy.init(first_model()), 0)
    assert strategy.version(state) == 1
    assert all(np.array_equal(strategy.model(state)[key], tensor) for key, tensor in first_model().items())


def test_a_round_closes_without_a_device_that_is_lost():
    strategy = made("flwr:FedAvg")
    state, decision = strategy.assign(strategy.init(first_model()), view_of())
    lost, *others = decision.instructions
    for order in others:
        state = strategy.receive(state, update_for(order))
        assert not strategy.ready(state, view_of(idle=(), busy={lost.device_id: (lost.assignment_id,)}))
    state = strategy.aggregate(state) if strategy.ready(state, view_of(idle=DEVICES[1:])) else None
    assert set(strategy.used(state)) == {order.assignment_id for order in others}


def test_flower_chooses_whom_to_ask_the_same_in_every_run_and_the_global_random_is_left_alone():
    def chosen():
        strategy = made("flwr:FedAvg", {"fraction_train": 0.5}, seed=3)
        state, trail = strategy.init(first_model()), []
        for number in range(5):
            state, orders = play(strategy, state, number)
            trail.append({order.device_id for order in orders})
        return trail

    random.seed(1)
    before, first = random.getstate(), chosen()
    assert random.getstate() == before
    random.seed(2)
    assert chosen() == first
    assert all(len(names) == 2 for names in first)
    assert len(set(map(frozenset, first))) > 1, "it is always the same two"


def test_seeded_generators_are_put_back_when_the_block_fails():
    def draw_and_fail():
        with seed_global_generators(2**100):
            drawn.append((random.random(), legacy.rand()))
            raise ValueError("stop")

    drawn, legacy = [], np.random
    legacy.seed(5)
    random.seed(5)
    python_state, numpy_state = random.getstate(), legacy.get_state()[1].tolist()
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"):
            draw_and_fail()
    assert drawn[0] == drawn[1]
    assert (random.getstate(), legacy.get_state()[1].tolist()) == (python_state, numpy_state)


@pytest.mark.timeout(20)
def test_a_strategy_that_wants_more_nodes_than_are_idle_is_asked_again_and_does_not_sleep():
    strategy = made("flwr:FedAvg", {"min_train_nodes": 3, "min_available_nodes": 3})
    state, decision = strategy.assign(strategy.init(first_model()), view_of(idle=DEVICES[:2]))
    assert decision.instructions == ()
    assert not strategy.ready(state, view_of(idle=DEVICES[:2]))
    state, orders = play(strategy, state, 0)
    assert len(orders) == 4
    assert strategy.version(state) == 1


def test_min_devices_of_the_run_file_replaces_flowers_own_minimum_of_two_and_can_be_met():
    strategy = made("flwr:FedAvg")
    _, decision = strategy.assign(strategy.init(first_model()), view_of(idle=DEVICES[:1]))
    assert len(decision.instructions) == 1
    with pytest.raises(ConfigError, match=r"strategy\.min_train_nodes must be at most devices.count = 2, got 3"):
        made("flwr:FedAvg", {"min_train_nodes": 3}, max_devices=2)


def test_what_a_device_does_is_in_the_run_file():
    options = {"learning_rate": 0.2, "epochs": 3.0, "batch_size": 8, "schedule": "step:1:0.5", "eta": 0.3}
    strategy = made("flwr:FedAdam", options)
    state, orders = play(strategy, strategy.init(first_model()), 0)
    assert {(o.plan.learning_rate, o.plan.epochs, o.plan.batch_size) for o in orders} == {(0.2, 3.0, 8)}
    assert strategy.flower.eta == 0.3
    _, orders = play(strategy, state, 1)
    assert orders[0].plan.learning_rate == 0.1


def test_fedprox_sends_its_mu_to_the_devices_and_replaces_no_optimizer_that_was_asked_for():
    strategy = made("flwr:FedProx", {"proximal_mu": 0.25})
    _, orders = play(strategy, strategy.init(first_model()), 0)
    assert {(order.plan.algorithm, order.plan.options["mu"]) for order in orders} == {("prox", 0.25)}
    strategy = made("flwr:FedProx", {"proximal_mu": 0.25, "optimizer": "adam"})
    with pytest.raises(StrategyError, match=r"proximal term, which needs strategy\.optimizer = 'sgd', got 'adam'"):
        strategy.assign(strategy.init(first_model()), view_of())


def test_devices_are_told_which_of_their_updates_were_used():
    strategy = made("flwr:FedAvg")
    state, first = play(strategy, strategy.init(first_model()), 0)
    _, second = play(strategy, state, 1)
    assert {o.device_id: o.used_assignments for o in second} == {o.device_id: (o.assignment_id,) for o in first}


def test_the_run_files_server_optimizer_takes_flowers_step_for_a_gradient():
    plain, halved = made("flwr:FedAvg"), made("flwr:FedAvg", server=ServerOptimizer(learning_rate=0.5))
    states = [play(strategy, strategy.init(first_model()), 0)[0] for strategy in (plain, halved)]
    start, whole, half = first_model()["w"], plain.model(states[0])["w"], halved.model(states[1])["w"]
    np.testing.assert_allclose(half - start, (whole - start) / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        (
            "flwr:FedAdam",
            {"etta": 1},
            "strategy.etta: flwr:FedAdam has no such setting (did you mean eta?); known: learning_rate",
        ),
        ("flwr:FedAdam", {"eta": "fast"}, "strategy.eta must be a number, got 'fast'"),
        ("flwr:FedAdam", {"eta": True}, "strategy.eta must be a number, got true"),
        ("flwr:FedAdam", {"iterations": "ten"}, "strategy.iterations must be a whole number at least 1, got 'ten'"),
        ("flwr:FedAdam", {"learning_rate": -1}, "strategy.learning_rate must be a number at least 0"),
        ("flwr:QFedAvg", {}, "strategy.client_learning_rate is missing: flwr:QFedAvg cannot do without"),
        ("flwr:FedAvg", {"train_metrics_aggr_fn": "x"}, "has no such setting"),
        ("flwr:FedAvg", {"fraction_train": 0}, "strategy.fraction_train must be above 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(name, options, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        made(name, options)


@pytest.mark.parametrize("name", ["flwr:FedWhat", "flwr:Strategy", "flwr:FedXgbBagging", "flwr:Result", "flwr:"])
def test_a_name_that_flower_does_not_have_is_answered_with_those_it_has(name):
    with pytest.raises(StrategyError, match=r"Flower has no strategy .* known: flwr:Bulyan, .*flwr:FedAdam"):
        made(name)


def test_the_settings_are_ours_for_devices_and_flowers_own():
    settings = get_flower_settings("flwr:QFedAvg")
    assert (settings["learning_rate"], settings["q"]) == (0.05, 0.1)
    assert settings["client_learning_rate"] is REQUIRED
    assert "train_metrics_aggr_fn" not in settings


OWN = """
from flwr.app import ConfigRecord, RecordDict, Message, MessageType
from flwr.serverapp.strategy import FedAvg

class Slowing(FedAvg):
    def __init__(self, *, decay=0.5, **kwargs):
        super().__init__(**kwargs)
        self.decay, self.rounds, self.log = decay, 0, print

    def configure_train(self, server_round, arrays, config, grid):
        self.rounds += 1
        config["lr"] *= self.decay ** (server_round - 1)
        config["local-epochs"] = 2
        return super().configure_train(server_round, arrays, config, grid)

class Halving(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        if server_round % 2 == 0:
            config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)

class Waiting(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        while len(list(grid.get_node_ids())) < 99:
            pass

class Calling(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        grid.send_and_receive([])

class Personal(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        own = arrays.copy()
        own.pop("b")
        return [Message(RecordDict({"arrays": own}), n, MessageType.TRAIN) for n in grid.get_node_ids()]

class Stranger(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        return [Message(RecordDict({"arrays": arrays}), 1, MessageType.TRAIN)]

class Forgetful(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        arrays.pop("b")
        return arrays, metrics

class NoStrategy:
    pass
"""


@pytest.fixture
def own(installed):
    installed({"own_flower": OWN})
    return "own_flower"


def test_a_users_subclass_runs_unchanged_and_its_configuration_is_the_plan(own):
    strategy = made(f"{own}:Slowing", {"decay": 0.25, "learning_rate": 0.8, "fraction_train": 1.0})
    state, first = play(strategy, strategy.init(first_model()), 0)
    state, second = play(strategy, state, 1)
    assert [(o.plan.learning_rate, o.plan.epochs) for o in (first[0], second[0])] == [(0.8, 2), (0.2, 2)]
    assert state.memory["rounds"] == 2
    assert "log" not in state.memory


def test_what_would_come_back_as_something_else_is_not_remembered():
    class Mixed:
        def __init__(self):
            self.rounds, self.kept = 2, {"w": np.zeros(2)}
            self.seen, self.masked, self.outcome = Counter(a=1), np.ma.array([1.0], mask=[1]), UpdateStatus.USED

    memory = export_attributes(Mixed())
    assert set(memory) == {"rounds", "kept"}
    encode_state(FlowerState(model=first_model(), memory=memory))


def test_what_a_strategy_does_to_its_configuration_lasts_as_it_does_with_flower(own, tmp_path):
    rates, options = [], {"learning_rate": 0.8, "schedule": "step:4:0.1", "fraction_train": 1.0}
    strategy = made(f"{own}:Halving", options)
    state = strategy.init(first_model())
    for number in range(6):
        state, orders = play(strategy, state, number)
        rates.append(orders[0].plan.learning_rate)
        save_state(tmp_path / "state", state, last_record=0)
        strategy, state = made(f"{own}:Halving", options), load_state(tmp_path / "state", FlowerState)
    assert rates == pytest.approx([0.8, 0.4, 0.4, 0.2, 0.02, 0.01])


def test_devices_that_are_asked_later_in_a_round_get_its_configuration(own):
    strategy = made(f"{own}:Halving", {"learning_rate": 0.8, "fraction_train": 1.0})
    state, _ = play(strategy, strategy.init(first_model()), 0)
    state, first = strategy.assign(state, view_of())
    state, again = strategy.assign(state, view_of())  # all of them were lost
    assert [decision.instructions[0].plan.learning_rate for decision in (first, again)] == [0.4, 0.4]


@pytest.mark.timeout(20)
def test_a_users_strategy_that_waits_for_nodes_is_stopped_and_asked_again(own):
    strategy = made(f"{own}:Waiting", {})
    for _ in range(3):
        _, decision = strategy.assign(strategy.init(first_model()), view_of())
        assert decision.instructions == ()
    assert MAX_QUERIES < 10


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Calling", "configure_train calls grid.send_and_receive"),
        ("Personal", "configure_train sends a node another model than the global one"),
        ("Stranger", "configure_train asks node 1, which is not among those"),
        ("Forgetful", "aggregate_train returned nothing for tensor 'b'"),
    ],
)
def test_what_cannot_be_done_here_is_said(own, name, told):
    strategy = made(f"{own}:{name}", {})
    with pytest.raises(StrategyError, match=told):
        play(strategy, strategy.init(first_model()), 0)


def test_names_are_told_apart(own):
    assert is_flower_strategy("flwr:FedAdam")
    assert is_flower_strategy(f"{own}:Slowing")
    for other in (
        f"{own}:NoStrategy",
        f"{own}:Nothing",
        "no_such_module:X",
        "fedavg",
        "edgefl.engine.round_loop:Goal",
    ):
        assert not is_flower_strategy(other)


def test_a_run_file_can_name_one(own):
    for name, option in (("flwr:FedAdam", "eta"), (f"{own}:Slowing", "decay")):
        config = {"run": {"task": "digits"}, "strategy": {"name": name, option: 0.5}}
        strategy = build_run(parse_run(config), "r").strategy
        assert (strategy.name, getattr(strategy.strategy.flower, option)) == (name, 0.5)
    with pytest.raises(ConfigError, match="no such setting"):
        build_run(parse_run({"run": {"task": "digits"}, "strategy": {"name": "flwr:FedAvg", "eta": 1}}), "r")


def test_the_identity_of_a_process_that_has_one_stays():
    ensure_identity()
    message = Message(RecordDict(), 5, MessageType.TRAIN)
    ensure_identity()
    assert message.metadata.run_id == Message(RecordDict(), 5, MessageType.TRAIN).metadata.run_id
    assert logging.getLogger("flwr").level >= logging.WARNING or made("flwr:FedAvg")


@pytest.mark.slow
def test_a_live_run_with_fedadam_learns(tmp_path):
    config = {"run": {"task": "digits", "rounds": 15}, "strategy": {"name": "flwr:FedAdam", "eta": 0.05}}
    result = edgefl.run(config, devices=3, root=tmp_path)
    assert result.status == "finished"
    assert result.metrics["accuracy"] > 0.8
