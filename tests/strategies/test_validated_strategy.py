"""A strategy that breaks its contract ends its run, with a line that names strategy and method."""

import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, JournalError, NotKeptError, StoreError, StrategyError
from edgefl.core.types import (
    Decision,
    DeviceInfo,
    EvaluateInstruction,
    FinishEarlyInstruction,
    LazyTensors,
    Role,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
)
from edgefl.engine.assembly.build import build_run
from edgefl.engine.progress import StoppingCriteria
from edgefl.engine.round_loop import run_rounds
from edgefl.storage.journal.record_encoding import encode_decision
from edgefl.storage.state_serialisation import encode_state
from edgefl.strategies.validated_strategy import REQUIRED_METHODS, ValidatedStrategy, make_validated_strategy

NAME = "mine:Median"
MODEL = {"w": np.zeros(3, np.float32), "n": np.array(0, np.int64)}
PLAN = TrainConfig(iterations=1)


@dataclass
class State:
    model: dict = field(default_factory=dict)
    version: int = 0
    asked: tuple = ()
    got: list = field(default_factory=list)
    used: tuple = ()


@dataclass
class OtherState:
    version: int = 0


class Mean:
    """Works; the tests replace one method at a time by one that does not."""

    def init(self, model):
        return State(model={name: tensor.copy() for name, tensor in model.items()})

    def assign(self, state, view):
        if state.asked:
            return state, Decision()
        state.asked = tuple(f"v{state.version}-{name}" for name in view.idle)
        orders = [assignment(key, name, state.version) for key, name in zip(state.asked, view.idle, strict=True)]
        return state, Decision(instructions=tuple(orders), next_wake_s=1)

    def receive(self, state, update):
        state.got.append(update)
        return state

    def ready(self, state, view):
        return bool(state.asked) and len(state.got) == len(state.asked)

    def aggregate(self, state):
        state.model["w"] += np.mean([update.tensors["w"] for update in state.got], axis=0)
        used = tuple(update.assignment_id for update in state.got)
        return State(model=state.model, version=state.version + 1, used=used)

    def model(self, state):
        return state.model

    def version(self, state):
        return state.version

    def used(self, state):
        return state.used

    def changed(self, state, since):
        return None


def assignment(key="a1", device="pi-1", version=0, plan=PLAN):
    return TrainInstruction(assignment_id=key, device_id=device, base_version=version, plan=plan)


class Devices:
    """A fleet whose devices answer each order at once."""

    def __init__(self, *names):
        self.names, self.answers, self.busy = names, [], {}

    def view(self):
        devices = {name: DeviceInfo(device_id=name) for name in self.names}
        devices["judge"] = DeviceInfo(device_id="judge", role=Role.EVALUATOR)
        idle = [name for name in self.names if name not in self.busy]
        return SimpleNamespace(
            now_s=0.0, devices=devices, idle=idle, busy=self.busy, speeds={}, progress={}, health={}
        )

    def dispatch(self, orders, source):
        assert source.model()["w"].shape == (3,)
        for order in orders:
            self.busy[order.device_id] = (order.assignment_id,)
            self.answers.append(update_of(order.assignment_id, order.device_id))

    def wait(self, until_s):
        events, self.answers, self.busy = self.answers, [], {}
        return events


class Notes:
    def record_events(self, events):
        return events

    def record_decision(self, decision):
        pass

    def record_aggregation(self, version, assignment_ids, state):
        pass

    def commit(self):
        pass


def update_of(key="a1", device="pi-1", tensors=None):
    if tensors is None:
        tensors = {"w": np.ones(3, np.float32), "n": np.array(0)}
    return Update(
        assignment_id=key, device_id=device, base_version=0, tensors=tensors, metrics=UpdateMetrics(num_examples=1)
    )


def run_with(**methods):
    """Drives a strategy with some methods replaced until three rounds are done."""
    strategy = Mean()
    for name, method in methods.items():
        setattr(strategy, name, method)
    checked = make_validated_strategy(NAME, lambda: strategy)
    state, reason = run_rounds(
        checked,
        checked.init(MODEL),
        fleet=Devices("pi-1", "pi-2"),
        journal=Notes(),
        goal=StoppingCriteria(rounds=3),
        evaluate=lambda *_: (),
    )
    return checked.model(state), reason


def raises(error):
    def method(*_):
        raise error

    return method


def test_a_strategy_that_keeps_its_contract_is_left_alone():
    model, reason = run_with()
    assert model["w"].tolist() == [3, 3, 3]
    assert reason == "rounds reached 3"


@pytest.mark.parametrize("method", [name for name in REQUIRED_METHODS if name != "changed"])
def test_an_exception_in_any_method_is_told_with_its_name(method):
    with pytest.raises(StrategyError, match=f"^strategy mine:Median: {method} raised ValueError: no such") as caught:
        run_with(**{method: raises(ValueError("no such luck"))})
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), "aggregate raised SystemExit"),
        (RecursionError("deep"), "aggregate raised RecursionError"),
        (StrategyError("combine returned no tensor 'w'"), "combine returned no tensor 'w'$"),
    ],
)
def test_no_kind_of_exception_passes_and_what_a_strategy_says_itself_is_kept(error, told):
    with pytest.raises(StrategyError, match=f"^strategy mine:Median: {told}"):
        run_with(aggregate=raises(error))


def test_the_line_of_the_strategys_own_file_is_told():
    class Broken(Mean):
        def aggregate(self, state):
            return self.halve(state.got)

        def halve(self, got):
            return np.zeros(2) + np.zeros(len(got) + 1)

    checked = ValidatedStrategy(strategy=Broken(), name=NAME)
    with pytest.raises(StrategyError, match=r"aggregate raised ValueError: operands .* \(in halve, line \d+\)$"):
        checked.aggregate(State(got=[1, 2]))


@pytest.mark.parametrize("error", [StoreError("disk"), JournalError("damaged")])
def test_a_journal_that_cannot_be_read_is_no_fault_of_the_strategy(error):
    with pytest.raises(type(error), match=str(error)):
        run_with(receive=raises(error))

    def load():
        raise JournalError("gone")

    checked = ValidatedStrategy(strategy=Mean(), name=NAME)
    state = checked.receive(checked.init(MODEL), update_of(tensors=LazyTensors(load)))
    with pytest.raises(JournalError, match="gone"):
        checked.aggregate(state)


@pytest.mark.parametrize(
    ("method", "value", "told"),
    [
        ("init", {}, "init returned a dict, it must return a dataclass"),
        ("assign", None, "assign returned None, it must return a pair of state and Decision"),
        ("assign", (State(), [assignment()]), "assign returned a list, it must return a Decision after the state"),
        ("assign", (None, Decision()), "assign returned None, it must return the state, a State"),
        (
            "assign",
            (State(), Decision(instructions=None)),
            "assign returned None, it must return a tuple of instructions",
        ),
        (
            "assign",
            (State(), Decision(instructions=("go",))),
            "assign returned 'go', it must return Train-, Evaluate- or FinishEarlyInstructions",
        ),
        ("assign", (State(), Decision(next_wake_s="soon")), "next_wake_s = 'soon', it must be seconds"),
        ("assign", (State(), Decision(next_wake_s=float("nan"))), "next_wake_s = nan"),
        ("receive", None, "receive returned None, it must return the state, a State"),
        ("ready", 1, "ready returned 1, it must return True or False"),
        ("aggregate", None, "aggregate returned None, it must return the state, a State"),
        ("model", [np.zeros(3)], "model returned a list, it must return tensors by name"),
        ("model", {"w": [0, 0, 0]}, "model returned a list, it must return an array for tensor 'w'"),
        ("model", {"w": MODEL["w"]}, "model returned a model without tensor 'n'"),
        ("model", {**MODEL, "x": MODEL["w"]}, "model returned a tensor 'x' that the task does not have"),
        ("model", {**MODEL, "w": np.zeros(3)}, "tensor 'w' as float64 (3,), it must be float32 (3,)"),
        ("version", 1.0, "version returned 1.0, it must return a whole number"),
        ("used", "v0-pi-1", "used returned 'v0-pi-1', it must return a tuple of assignment ids"),
        ("used", [1], "used returned a list, it must return a tuple of assignment ids"),
    ],
)
def test_a_wrong_return_is_told_with_what_is_right(method, value, told):
    with pytest.raises(StrategyError, match=f"^strategy mine:Median: .*{re.escape(told)}"):
        run_with(**{method: lambda *_: value})


OPTIONAL = {
    "node_models": lambda checked, state: checked.node_models(state)["pi-1"],
    "facts": lambda checked, state: checked.facts(state),
    "changed": lambda checked, state: checked.changed(state, 0),
    "finish": lambda checked, state: checked.finish(state),
    "resumed": lambda checked, state: checked.resumed(state),
    "bytes_per_device": lambda checked, _: checked.bytes_per_device(100),
    "bytes_per_message": lambda checked, _: checked.bytes_per_message(100),
}


@pytest.mark.parametrize(
    ("method", "answer", "told"),
    [
        ("node_models", [MODEL], "node_models returned a list, it must return models by device id"),
        ("node_models", {"pi-1": None}, "node_models returned None, it must return tensors by name"),
        ("node_models", {"pi-1": {"w": MODEL["w"]}}, "node_models returned a model without tensor 'n'"),
        ("node_models", ValueError("no such luck"), "node_models raised ValueError: no such luck"),
        ("facts", 0.5, "facts returned 0.5, it must return numbers by name"),
        ("facts", {1: 0.5}, "facts returned 1, it must return numbers by name"),
        ("facts", {"disagreement": "much"}, "facts returned 'much', it must return a number for 'disagreement'"),
        ("facts", {"is_connected": True}, "facts returned True, it must return a number for 'is_connected'"),
        ("changed", [1, 2], "changed returned a list, it must return indices by tensor, or None"),
        ("finish", None, "finish returned None, it must return the state, a State"),
        ("resumed", OtherState(), "resumed returned"),
        ("bytes_per_device", "much", "bytes_per_device returned 'much', it must return a whole number"),
        ("bytes_per_message", 0.5, "bytes_per_message returned 0.5, it must return a whole number"),
    ],
)
def test_a_wrong_answer_of_a_method_that_may_be_left_out_is_told(method, answer, told):
    checked = ValidatedStrategy(strategy=Mean(), name=NAME)
    state = checked.init(MODEL)
    is_error = isinstance(answer, Exception)
    setattr(checked.strategy, method, raises(answer) if is_error else lambda *_: answer)
    with pytest.raises(StrategyError, match=f"^strategy mine:Median: .*{re.escape(told)}"):
        OPTIONAL[method](checked, state)


def assigns(*orders):
    return lambda state, _view: (state, Decision(instructions=orders))


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        ([assignment(device="pi-9")], "assign gave work to device 'pi-9', which is not there"),
        (
            [EvaluateInstruction(assignment_id="e", device_id="x", version=0, round=0)],
            "device 'x', which is not there",
        ),
        ([assignment(device="judge")], "gave device 'judge' training to do, but it is an evaluator"),
        ([assignment(), assignment(device="pi-2")], "assign used assignment id 'a1' a second time"),
        (
            [assignment("a"), assignment("b"), assignment("c")],
            "gave device 'pi-1' 3 assignments at a time, 2 at most",
        ),
        ([assignment(plan={"iterations": 1})], "gave device 'pi-1' the plan a dict, it must be a TrainConfig"),
        ([assignment(plan=TrainConfig())], "a plan that needs exactly one of iterations, epochs and seconds"),
    ],
)
def test_an_order_that_nobody_can_follow_is_refused(orders, told):
    with pytest.raises(StrategyError, match=re.escape(told)):
        run_with(assign=assigns(*orders))


@pytest.mark.parametrize(
    ("plan", "right"),
    [
        (
            {"iterations": np.clip(7, 2, 5), "learning_rate": np.float32(0.5), "keeps_state": np.bool_(True)},
            TrainConfig(iterations=5, learning_rate=0.5, keeps_state=True),
        ),
        ({"epochs": np.array(2.0), "batch_size": np.uint8(8)}, TrainConfig(epochs=2.0, batch_size=8)),
        ({"iterations": 1, "options": {"mu": np.float32(0.25)}}, TrainConfig(iterations=1, options={"mu": 0.25})),
    ],
)
def test_a_number_of_numpys_in_an_order_is_the_same_number_of_pythons(plan, right):
    checked = ValidatedStrategy(strategy=Mean(), name=NAME)
    order = replace(assignment(plan=TrainConfig(**plan)), base_version=np.int64(0), deadline_s=np.float32(2))
    checked.strategy.assign = lambda state, _: (state, Decision(instructions=[order], next_wake_s=np.float32(3)))
    _, decision = checked.assign(checked.init(MODEL), Devices("pi-1").view())
    assert decision == Decision(instructions=(replace(assignment(plan=right), deadline_s=2.0),), next_wake_s=3)
    assert encode_decision(decision) == encode_decision(replace(decision, next_wake_s=3.0))


def test_an_assignment_id_of_an_earlier_round_is_refused_and_a_device_that_left_may_be_recalled():
    checked = ValidatedStrategy(strategy=Mean(), name=NAME)
    view, state = Devices("pi-1").view(), checked.init(MODEL)
    checked.strategy.assign = assigns(FinishEarlyInstruction(assignment_id="a", device_id="gone"))
    assert checked.assign(state, view)[1].instructions
    order = assignment("same")
    checked.strategy.assign = assigns(order)
    assert checked.assign(state, view)[1].instructions[0] is order
    with pytest.raises(StrategyError, match="assign used assignment id 'same' a second time"):
        checked.assign(state, view)


@pytest.mark.parametrize(
    ("versions", "told"),
    [([0, 0, 1, 0], "version went down from 1 to 0"), ([0] * 9, "aggregate left the version at 0, it must go up")],
)
def test_a_version_goes_up_with_every_aggregation_and_never_down(versions, told):
    given = iter(versions)
    with pytest.raises(StrategyError, match=told):
        run_with(version=lambda _: next(given))


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ({"plan": TrainConfig(iterations=1.5)}, "the plan's iterations = 1.5, it must be a whole number or None"),
        (
            {"plan": TrainConfig(iterations=1, learning_rate=float("nan"))},
            "the plan's learning_rate = nan, it must be a",
        ),
        (
            {"plan": TrainConfig(iterations=1, momentum=np.zeros(2))},
            "the plan's momentum = array([0., 0.]), it must be",
        ),
        (
            {"plan": TrainConfig(iterations=1, options={"mu": [1]})},
            "options['mu'] = [1], it must be a finite number, tex",
        ),
        ({"key": "x" * 256}, "'xxxxxxxxxxxxxxxxxxxx'… has 256 bytes, at most 255 are possible"),
        ({"key": 7}, "the assignment id = 7, it must be a text"),
        ({"key": "\ud800"}, "can't encode character"),
        ({"version": "1"}, "the order's base_version = '1', it must be a whole number"),
    ],
)
def test_an_order_that_no_journal_keeps_is_refused_with_its_value(order, told):
    said = "strategy mine:Median: assign gave device 'pi-1' what cannot be written down: "
    with pytest.raises(StrategyError, match=f"^{said}.*{re.escape(told)}"):
        run_with(assign=assigns(assignment(**order)))


def test_a_state_that_cannot_be_saved_ends_the_run_before_a_checkpoint_would():
    @dataclass
    class Odd:
        thing: object = None
        version: int = 0

    class Forgetting(Mean):
        def __init__(self, first, then):
            self.first, self.then = first, then

        def init(self, model):
            return Odd(thing=self.first)

        def aggregate(self, state):
            return Odd(thing=self.then, version=state.version + 1)

    def checked(first, then):
        return make_validated_strategy(NAME, lambda: Forgetting(first, then), pack=encode_state)

    assert checked(1, 2).aggregate(checked(1, 2).init(MODEL)).thing == 2
    with pytest.raises(StrategyError, match=r"mine:Median: init returned a state that cannot be saved: .*Odd\.thing"):
        checked(print, 2).init(MODEL)
    with pytest.raises(StrategyError, match=r"aggregate returned a state that cannot be saved"):
        checked(1, print).aggregate(Odd())


def test_a_state_that_becomes_unsavable_later_is_found_out_soon_after():
    class Late(Mean):
        def aggregate(self, state):
            thing = {} if state.version < 4 else {"thing": print}
            return State(model=state.model, version=state.version + 1, got=[thing])

    checked = make_validated_strategy(NAME, Late, pack=encode_state)
    state = checked.init(MODEL)
    for _ in range(7):
        state = checked.aggregate(state)
    with pytest.raises(StrategyError, match=r"aggregate returned a state that cannot be saved: .*got\[0\]"):
        checked.aggregate(state)


def test_tensors_that_are_not_kept_any_more_are_the_fault_of_who_looks_at_them():
    def load():
        raise NotKeptError("it was pruned")

    checked = ValidatedStrategy(strategy=Mean(), name=NAME)
    state = checked.receive(checked.init(MODEL), update_of(tensors=LazyTensors(load)))
    told = r"mine:Median: aggregate looked at tensors that are not kept any more: it was pruned; copy what"
    with pytest.raises(StrategyError, match=told):
        checked.aggregate(state)


def test_a_state_from_a_checkpoint_is_taken_up():
    checked = ValidatedStrategy(strategy=Mean(), name=NAME)
    state = State(model=dict(MODEL), version=7)
    assert checked.version(state) == 7
    assert checked.model(state) is state.model
    with pytest.raises(StrategyError, match="without tensor 'n'"):
        checked.model(State(model={"w": MODEL["w"]}))


def test_what_a_strategy_declares_is_passed_on():
    strategy = Mean()
    checked = ValidatedStrategy(strategy=strategy, name=NAME)
    assert (checked.versions_per_round, checked.bytes_per_device(100)) == (1, 0)
    strategy.versions_per_round, strategy.bytes_per_device = None, lambda size: 2 * size
    assert (checked.versions_per_round, checked.bytes_per_device(100)) == (None, 200)
    assert checked.finish(state := State()) is state
    strategy.finish = lambda state: replace(state, version=9)
    assert checked.finish(State()).version == 9
    assert checked.resumed(state) is state
    assert checked.changed(state, 0) is None
    strategy.versions_per_round = 0
    with pytest.raises(StrategyError, match="versions_per_round is 0, it must be a whole number above 0 or None"):
        _ = checked.versions_per_round


def test_what_goes_wrong_while_it_is_made_is_told():
    with pytest.raises(StrategyError, match=r"^strategy mine:Median: a SimpleNamespace has no method init$"):
        make_validated_strategy(NAME, SimpleNamespace)
    with pytest.raises(StrategyError, match="strategy mine:Median: making it raised ZeroDivisionError"):
        make_validated_strategy(NAME, lambda: 1 // 0)
    with pytest.raises(ConfigError, match="no such setting"):
        make_validated_strategy(NAME, raises(ConfigError("no such setting")))


@pytest.mark.parametrize(("name", "is_checked"), [("apart_strategy:Apart", True), ("fedavg", False)])
def test_the_strategies_of_users_are_checked_and_ours_are_not(name, is_checked, monkeypatch):
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "apart_strategy")
    config = parse_run({"run": {"task": "digits", "rounds": 3}, "strategy": {"name": name}})
    assert isinstance(build_run(config, "r").strategy, ValidatedStrategy) is is_checked


def test_a_strategy_that_is_always_ready_is_stopped():
    class Eager(Mean):
        def ready(self, state, view):
            return True

        def aggregate(self, state):
            return replace(state, version=state.version + 1)

    strategy = ValidatedStrategy(strategy=Eager(), name=NAME)
    state = strategy.init(MODEL)
    told = r"mine:Median: ready said True \d+ times, and no update came"
    with pytest.raises(StrategyError, match=told):
        close_all(strategy, state)


def test_models_and_figures_of_devices_are_passed_on():
    strategy = Mean()
    checked = ValidatedStrategy(strategy=strategy, name=NAME)
    state = checked.init(MODEL)
    assert (checked.node_models(state), checked.facts(state)) == ({}, {})
    own = {"pi-1": MODEL, "pi-2": {**MODEL, "w": np.ones(3, np.float32)}}
    strategy.node_models, strategy.facts = lambda _: own, lambda _: {"disagreement": np.float32(0.5), "edges": 4}
    models = checked.node_models(state)
    assert (list(models), len(models), models["pi-2"]) == (["pi-1", "pi-2"], 2, own["pi-2"])
    assert checked.facts(state) == {"disagreement": 0.5, "edges": 4.0}
    assert {type(value) for value in checked.facts(state).values()} == {float}


def close_all(strategy, state):
    while strategy.ready(state, None):
        state = strategy.aggregate(state)
