"""Strategies of one's own in one method, and what is said when it is wrong."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run

from edgefl.core.errors import StrategyError
from edgefl.core.types import LazyTensors, SparseTensor, Update, UpdateMetrics
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.round_strategy import RoundStrategy
from edgefl.strategies.strategy_config import RoundRules

WHOLE_STRATEGY = """
from dataclasses import dataclass

import numpy as np

from edgefl.strategies.round_strategy import RoundStrategy


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(RoundStrategy):
    trim: int = 1

    def combine(self, updates):
        moved = {}
        for name in updates[0].tensors:
            ordered = np.sort([update.tensors[name] for update in updates], axis=0)
            moved[name] = ordered[self.trim : len(updates) - self.trim].mean(axis=0)
        return moved
"""


@dataclass(frozen=True, kw_only=True)
class Median(RoundStrategy):
    def combine(self, updates):
        return {name: np.median([u.tensors[name] for u in updates], axis=0) for name in updates[0].tensors}


def built(author, **rules):
    return author.build(RoundRules(**rules))


def model():
    return {"w": np.zeros(2, np.float32), "half": np.zeros((), np.float16), "steps": np.array(5, np.int64)}


def answered(strategy, moves, *, tensors_of=dict):
    """A round whose devices send so much for every tensor, in any order of arrival."""
    state = strategy.init(model())
    state, decision = strategy.assign(state, PacedFleet({name: Board(1.0) for name in moves}).view())
    for order in reversed(decision.instructions):
        value = moves[order.device_id]
        tensors = {
            "w": SparseTensor(indices=np.array([1]), values=np.array([value], np.float32), shape=(2,)),
            "half": np.array(value, np.float16),
            "steps": np.array(value, np.int64),
        }
        update = Update(
            assignment_id=order.assignment_id, device_id=order.device_id, base_version=0,
            tensors=tensors_of(tensors), metrics=UpdateMetrics(num_examples=3),
        )  # fmt: skip
        state = strategy.receive(state, update)
    return state


def combined(author, moves):
    strategy = built(author)
    state = strategy.aggregate(answered(strategy, moves))
    return strategy.model(state), strategy.used(state)


def test_a_whole_strategy_fits_into_twenty_lines_and_is_found_by_its_name(tmp_path, monkeypatch):
    assert len([line for line in WHOLE_STRATEGY.splitlines() if line]) <= 20
    (tmp_path / "own_trimmed.py").write_text(WHOLE_STRATEGY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "own_trimmed")
    strategy = make_strategy(
        "own_trimmed:TrimmedMean", {"trim": 1, "learning_rate": 0.5, "iterations": 1}, RoundRules()
    )
    fleet = PacedFleet({name: Board(1.0, target=t) for name, t in (("a", 2.0), ("b", 4.0), ("c", 1e6))})
    state = run(fleet, strategy, rounds=30)
    assert state.model["w"] == pytest.approx(4.0, rel=1e-3)
    assert strategy.plan.iterations == 1


def test_the_model_moves_by_what_combine_returns_and_keeps_its_types():
    moved, used = combined(Median(), {"a": 1.0, "b": 7.0, "c": 3.0})
    assert moved["w"].tolist() == [0.0, 3.0]
    assert (moved["half"], moved["steps"]) == (3.0, 8)
    assert {name: tensor.dtype.name for name, tensor in moved.items()} == {
        "w": "float32", "half": "float16", "steps": "int64",
    }  # fmt: skip
    assert used == ("v0-a1-a", "v0-a1-b", "v0-a1-c")


def test_updates_come_in_the_order_of_their_assignment_dense_and_complete():
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Watching(Median):
        def combine(self, updates):
            seen.extend((u.device_id, u.tensors["w"].tolist(), list(u.tensors), len(u.tensors)) for u in updates)
            return Median.combine(self, updates)

    combined(Watching(), {"b": 2.0, "a": 1.0})
    assert seen == [("a", [0.0, 1.0], ["w", "half", "steps"], 3), ("b", [0.0, 2.0], ["w", "half", "steps"], 3)]


def test_combine_may_return_a_tensor_of_an_update_and_nobodys_array_is_written_to():
    @dataclass(frozen=True, kw_only=True)
    class First(RoundStrategy):
        def combine(self, updates):
            return updates[0].tensors

    strategy, arrays = built(First()), deque()

    def tensors_of(tensors):
        arrays.extend((tensors["half"], tensors["half"].copy()))
        tensors["half"].flags.writeable = False
        return tensors

    strategy.aggregate(answered(strategy, {"a": 1.0, "b": 2.0}, tensors_of=tensors_of))
    assert arrays[0] == arrays[1]


def test_decoded_updates_are_let_go_when_the_round_is_closed():
    released = []

    class Watched(LazyTensors):
        def unload(self):
            released.append(True)
            super().unload()

    strategy = built(Median())
    state = answered(strategy, {"a": 1.0, "b": 2.0}, tensors_of=lambda t: Watched(lambda: t))
    released.clear()
    strategy.aggregate(state)
    assert len(released) == 2


def test_a_hook_changes_the_plan_of_one_device():
    @dataclass(frozen=True, kw_only=True)
    class Gentle(Median):
        def plan_for(self, plan, device_id, view):
            return replace(plan, learning_rate=plan.learning_rate / 10) if device_id == "a" else plan

    strategy = built(Gentle(learning_rate=0.5, schedule="step:1:0.5"))
    fleet = PacedFleet({"a": Board(1.0), "b": Board(1.0)})
    run(fleet, strategy, rounds=2)
    rates = [(order.device_id, order.plan.learning_rate) for order in fleet.assignments()]
    assert rates == [("a", 0.05), ("b", 0.5), ("a", 0.025), ("b", 0.25)]


def returns(value):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(RoundStrategy):
        def combine(self, updates):
            return value(updates) if callable(value) else value

    return Wrong()


GOOD = {"w": np.zeros(2), "half": np.zeros(()), "steps": 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "combine must return a mapping of tensors by name, got NoneType"),
        (
            {"w": np.zeros(2), "half": np.zeros(())},
            "combine returned no tensor 'steps'; all of the model's are needed",
        ),
        ({**GOOD, "v": np.zeros(2)}, "combine returned a tensor 'v' that the model does not have"),
        ({**GOOD, "w": np.zeros(3)}, r"combine returned 'w' with shape \(3,\), the model's is \(2,\)"),
        ({**GOOD, "w": "zero"}, "combine returned 'w' as str, needed is an array of numbers"),
        ({**GOOD, "w": [[1.0], [1.0, 2.0]]}, "combine raised ValueError"),
        ({**GOOD, "w": np.array([1.0, np.nan])}, "combine returned a NaN or an infinity in 'w'"),
        (lambda updates: 1 / 0, "combine raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_answer_is_one_line_that_names_the_strategy_and_its_method(value, message):
    with pytest.raises(StrategyError, match=rf"^strategy .*Wrong: {message}"):
        combined(returns(value), {"a": 1.0, "b": 2.0})


def test_a_strategy_that_forgot_its_method_is_refused_before_the_run():
    @dataclass(frozen=True, kw_only=True)
    class Empty(RoundStrategy):
        combin = 3

    with pytest.raises(StrategyError, match=r"Empty has no method combine\(updates\)"):
        built(Empty())
