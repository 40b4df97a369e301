"""SCAFFOLD against its formulas, and to the exact optimum where FedAvg stays off it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from node_network import Quadratics
from strategy_turns import view_of

from edgefl.core.errors import ConfigError
from edgefl.core.types import ZERO_CONTROL_VARIATE, PeerMessage, TrainConfig, TrainInstruction, Update, UpdateMetrics
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.scaffold import encode_control_variate
from edgefl.tasks.local_algorithms.registry import make_local_algorithm
from edgefl.tasks.local_algorithms.scaffold import ClientControlVariate, get_start_version

NAMES = tuple(f"n{place}" for place in range(8))
QUADRATICS = Quadratics.drawn(8)


class Exact:
    """A learner whose gradient is exact."""

    def __init__(self, gradient: Any) -> None:
        self.parameters = {"w": np.zeros(10)}
        self.gradients = {"w": np.zeros(10)}
        self._gradient = gradient

    def fill(self) -> None:
        self.gradients["w"][...] = self._gradient(self.parameters["w"])


class Fleet:
    """Devices that do what they are asked in the order of their names, each with what its step keeps."""

    def __init__(self, name: str, *, names: tuple[str, ...] = NAMES, **options: Any) -> None:
        rate = 0.2 / QUADRATICS.smoothness
        self.strategy = make_strategy(name, {"learning_rate": rate, "iterations": 8, **options}, RoundRules())
        self.state = self.strategy.init({"w": np.zeros(10)})
        self.learners = {each: Exact(gradient) for each, gradient in zip(NAMES, QUADRATICS.gradients(), strict=True)}
        self.kept: dict[str, ClientControlVariate] = {}
        self.names = names

    def round(
        self,
        names: tuple[str, ...] | None = None,
        iterations: dict[str, int] | None = None,
        *,
        lost: tuple[str, ...] = (),
        clipped: tuple[str, ...] = (),
        idle: tuple[str, ...] = (),
    ) -> None:
        """One round; the updates of the `lost` do not arrive, and the guard leaves nothing of the `clipped`.

        The `idle` answer with the model as it came, or nearly so.
        """
        present = names or self.names
        view = view_of(*present, devices=NAMES)
        self.state, decision = self.strategy.assign(self.state, view)
        for order in decision.instructions:
            assert isinstance(order, TrainInstruction)
            update = self.update(order, (iterations or {}).get(order.device_id))
            if order.device_id in clipped:
                update = replace(update, tensors={"w": 1e-9 * update.tensors["w"]}, is_clipped=True, share=1e-9)
            if order.device_id in idle:
                update = replace(update, tensors={"w": 1e-9 * update.tensors["w"]})
            if order.device_id not in lost:
                self.state = self.strategy.receive(self.state, update)
        assert self.strategy.ready(self.state, view)
        self.state = self.strategy.aggregate(self.state)

    def update(self, order: TrainInstruction, iterations: int | None) -> Update:
        learner, count = self.learners[order.device_id], iterations or order.plan.iterations or 1
        start = np.array(self.strategy.model(self.state)["w"])
        learner.parameters["w"][...] = start
        step: Any = make_local_algorithm(order.plan)
        step.start(learner)
        kept = self.kept.get(order.device_id, ClientControlVariate())
        if order.plan.keeps_state:
            kept = kept.apply_used(get_start_version(order.plan), order.used_assignments)
            step.restore(kept.value)
        for _ in range(count):
            learner.fill()
            step.step(learner, range(1))
        step.finish(learner)
        if order.plan.keeps_state:
            self.kept[order.device_id] = kept = kept.add_move(order.assignment_id, step.state())
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors={"w": learner.parameters["w"] - start},
            metrics=UpdateMetrics(
                num_examples=1, iterations=count, extra={ZERO_CONTROL_VARIATE: 1.0} if kept.is_zero else {}
            ),
        )

    def gap(self) -> float:
        """How far c is from the mean of the devices' own, with the moves of the last round, which was used."""
        used_assignments = {name: tuple(self.state.used_assignments.get(name, ())) for name in self.kept}
        own = [kept.apply_used(self.state.began, used_assignments[name]).value for name, kept in self.kept.items()]
        mean = np.sum([each["w"] for each in own if each], axis=0) / len(self.state.members)
        return float(np.abs(self.state.control["w"] - mean).max())

    def error(self) -> float:
        optimum = QUADRATICS.optimum()
        return float(np.linalg.norm(self.strategy.model(self.state)["w"] - optimum) / np.linalg.norm(optimum))


def test_it_comes_to_the_optimum_and_fedavg_does_not() -> None:
    scaffold, fedavg = Fleet("scaffold"), Fleet("fedavg")
    for _ in range(400):
        scaffold.round()
        fedavg.round()
    assert scaffold.error() < 1e-14
    assert 0.009 < fedavg.error() < 0.9


def test_the_coordinators_variate_is_the_mean_of_the_devices_own_also_when_some_take_no_part() -> None:
    fleet = Fleet("scaffold")
    fleet.round()
    for number in range(20):
        fleet.round(NAMES[number % 3 :: 2], {NAMES[4]: 3})
    assert fleet.gap() < 1e-12


def test_an_update_that_is_lost_moves_neither_variate() -> None:
    fleet = Fleet("scaffold")
    for number in range(12):
        fleet.round(lost=(NAMES[number % 3],) if number % 2 else ())
    assert fleet.gap() < 1e-12
    assert fleet.state.began == 0
    for _ in range(400):
        fleet.round()
    assert fleet.error() < 1e-14


def test_a_clipped_update_moves_neither_variate_and_does_not_stop_the_others() -> None:
    fleet, without = Fleet("scaffold"), Fleet("scaffold", names=NAMES[1:])
    for number in range(400):
        fleet.round(clipped=NAMES[:1], iterations={NAMES[4]: 3 + number % 2})
        without.round()
    assert fleet.gap() < 1e-12
    assert not fleet.state.uncounted
    distance = fleet.strategy.model(fleet.state)["w"] - without.strategy.model(without.state)["w"]
    assert np.linalg.norm(distance) < 1e-6


def test_a_device_that_answers_with_the_model_as_it_came_does_not_stop_the_others() -> None:
    fleet, without = Fleet("scaffold"), Fleet("scaffold", names=NAMES[1:])
    for _ in range(400):
        fleet.round(idle=NAMES[:1])
        without.round()
    distance = fleet.strategy.model(fleet.state)["w"] - without.strategy.model(without.state)["w"]
    assert np.linalg.norm(distance) < 1e-6


@pytest.mark.parametrize("goes_back_to", [None, 20])
def test_a_device_that_lost_its_variate_makes_all_begin_again_and_once(goes_back_to: int | None) -> None:
    fleet = Fleet("scaffold")
    old = ClientControlVariate()
    for number in range(40):
        if number == goes_back_to:
            old = fleet.kept["n3"]  # a card whose files are as old as that
        fleet.round()
    fleet.kept["n3"] = old
    fleet.round(lost=("n3",))  # it cannot tell yet
    assert fleet.state.began == 0
    fleet.round()
    assert fleet.state.began == 42
    assert not fleet.state.control["w"].any()
    for _ in range(400):
        fleet.round()
    assert fleet.state.began == 42
    assert fleet.gap() < 1e-12
    assert fleet.error() < 1e-14


def test_a_coordinator_that_goes_back_behind_its_devices_makes_all_begin_again() -> None:
    fleet = Fleet("scaffold")
    for number in range(40):
        if number == 30:
            backup = deepcopy(fleet.state)
        fleet.round()
    fleet.state = backup
    for _ in range(400):
        fleet.round()
    assert fleet.state.began == 31
    assert fleet.error() < 1e-14


def test_a_device_that_comes_late_to_a_run_begins_at_zero_and_changes_nothing_for_others() -> None:
    fleet = Fleet("scaffold")
    for _ in range(10):
        fleet.round(NAMES[:-1])
    fleet.round()
    fleet.round()
    assert fleet.state.began == 0
    assert fleet.gap() < 1e-12


def test_two_steps_by_hand() -> None:
    # x = 1, c = 0.5, c_i = 2, g = y: y <- y - 0.1 (y - 2 + 0.5), twice; then c_i <- 2 - 0.5 + (1 - y) / 0.2
    learner = Exact(lambda w: w)
    learner.parameters["w"][...] = 1.0
    messages = (PeerMessage(edge=("coordinator", "a"), step=1, body=encode_control_variate({"w": np.full(10, 0.5)})),)
    step: Any = make_local_algorithm(
        TrainConfig(algorithm="scaffold", iterations=2, learning_rate=0.1, keeps_state=True, messages=messages)
    )
    step.start(learner)
    step.restore({"w": np.full(10, 2.0)})
    for _ in range(2):
        learner.fill()
        step.step(learner, range(1))
    step.finish(learner)
    first = 1 - 0.1 * (1 - 1.5)
    second = first - 0.1 * (first - 1.5)
    assert learner.parameters["w"] == pytest.approx(np.full(10, second))
    assert step.state()["w"] == pytest.approx(np.full(10, 1.5 + (1 - second) / 0.2))


def test_a_variate_of_another_model_is_refused_and_one_that_was_kept_of_another_is_left_aside() -> None:
    learner = Exact(lambda w: w)
    messages = (PeerMessage(edge=("coordinator", "a"), step=1, body=b"1234"),)
    step: Any = make_local_algorithm(TrainConfig(algorithm="scaffold", iterations=1, messages=messages))
    with pytest.raises(ConfigError, match="has 4 bytes, expected 80"):
        step.start(learner)
    step = make_local_algorithm(TrainConfig(algorithm="scaffold", iterations=1))
    step.start(learner)
    step.restore({"w": np.ones(3)})
    assert step.state()["w"].tolist() == [0.0] * 10


def test_a_device_that_claims_few_steps_for_a_long_way_has_a_bounded_part_in_the_control_variate():
    def play(claimed):
        strategy = make_strategy("scaffold", {"learning_rate": 0.1, "iterations": 100}, RoundRules())
        state = strategy.init({"w": np.zeros(4)})
        for number in range(2):
            state, decision = strategy.assign(state, view_of(*NAMES, devices=NAMES))
            for place, order in enumerate(decision.instructions):
                iterations = claimed if number and not place else 100
                tensors = {"w": np.full(4, 1.0)}
                metrics = UpdateMetrics(num_examples=1, iterations=iterations)
                state = strategy.receive(state, Update(
                    assignment_id=order.assignment_id, device_id=order.device_id, base_version=order.base_version,
                    tensors=tensors, metrics=metrics,
                ))  # fmt: skip
            before = state.control["w"].copy()
            state = strategy.aggregate(state)
        return np.abs(state.control["w"] - before).max()

    # Mean gradients are 0.1 long; that of one in eight counts as 0.8 in place of 10.
    assert play(100) == pytest.approx(0.0, abs=1e-12)
    assert play(1) == pytest.approx((7 * 0.1 + 0.8) / 8 - 0.1)
