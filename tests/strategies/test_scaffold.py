"""SCAFFOLD against its formulas, and to the exact optimum where FedAvg stays off it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node_network import Quadratics

from edgefl.errors import ConfigError
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.scaffold import packed
from edgefl.tasks.local_steps import make_local_step
from edgefl.types import Array, Assignment, DeviceInfo, EdgeMessage, LocalPlan, Update, UpdateMetrics

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
        self.kept: dict[str, dict[str, Array]] = {}
        self.names = names

    def round(self, names: tuple[str, ...] | None = None, iterations: dict[str, int] | None = None) -> None:
        present = names or self.names
        view = SimpleNamespace(
            now_s=0.0, devices={name: DeviceInfo(device_id=name) for name in NAMES}, idle=list(present), busy={},
            speeds={}, progress={}, vitals={},
        )  # fmt: skip
        self.state, decision = self.strategy.assign(self.state, view)
        for order in decision.orders:
            assert isinstance(order, Assignment)
            self.state = self.strategy.receive(
                self.state, self.update(order, (iterations or {}).get(order.device_id))
            )
        assert self.strategy.ready(self.state, view)
        self.state = self.strategy.aggregate(self.state)

    def update(self, order: Assignment, iterations: int | None) -> Update:
        learner, count = self.learners[order.device_id], iterations or order.plan.iterations or 1
        start = np.array(self.strategy.model(self.state)["w"])
        learner.parameters["w"][...] = start
        step: Any = make_local_step(order.plan)
        step.begin(learner)
        if order.plan.keeps_state and order.device_id in self.kept:
            step.restore(self.kept[order.device_id])
        for _ in range(count):
            learner.fill()
            step.step(learner, range(1))
        step.end(learner)
        if order.plan.keeps_state:
            self.kept[order.device_id] = step.state()
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors={"w": learner.parameters["w"] - start},
            metrics=UpdateMetrics(num_examples=1, iterations=count),
        )

    def error(self) -> float:
        optimum = QUADRATICS.optimum()
        return float(np.linalg.norm(self.strategy.model(self.state)["w"] - optimum) / np.linalg.norm(optimum))


def test_it_comes_to_the_optimum_and_fedavg_does_not() -> None:
    scaffold, fedavg = Fleet("scaffold"), Fleet("fedavg")
    for _ in range(1000):
        scaffold.round()
        fedavg.round()
    assert scaffold.error() < 1e-14
    assert 0.009 < fedavg.error() < 0.9


def test_the_coordinators_variate_is_the_mean_of_the_devices_own_also_when_some_take_no_part() -> None:
    fleet = Fleet("scaffold")
    fleet.round()
    for number in range(20):
        fleet.round(NAMES[number % 3 :: 2], {NAMES[4]: 3})
    mean = np.mean([kept["w"] for kept in fleet.kept.values()], axis=0)
    assert np.allclose(fleet.state.control["w"], mean, rtol=1e-9, atol=1e-12)


def test_two_steps_by_hand() -> None:
    # x = 1, c = 0.5, c_i = 2, g = y: y <- y - 0.1 (y - 2 + 0.5), twice; then c_i <- 2 - 0.5 + (1 - y) / 0.2
    learner = Exact(lambda w: w)
    learner.parameters["w"][...] = 1.0
    inbox = (EdgeMessage(edge=("coordinator", "a"), step=1, body=packed({"w": np.full(10, 0.5)})),)
    step: Any = make_local_step(
        LocalPlan(algorithm="scaffold", iterations=2, learning_rate=0.1, keeps_state=True, inbox=inbox)
    )
    step.begin(learner)
    step.restore({"w": np.full(10, 2.0)})
    for _ in range(2):
        learner.fill()
        step.step(learner, range(1))
    step.end(learner)
    first = 1 - 0.1 * (1 - 1.5)
    second = first - 0.1 * (first - 1.5)
    assert learner.parameters["w"] == pytest.approx(np.full(10, second))
    assert step.state()["w"] == pytest.approx(np.full(10, 1.5 + (1 - second) / 0.2))


def test_a_variate_of_another_model_is_refused_and_one_that_was_kept_of_another_is_left_aside() -> None:
    learner = Exact(lambda w: w)
    inbox = (EdgeMessage(edge=("coordinator", "a"), step=1, body=b"1234"),)
    step: Any = make_local_step(LocalPlan(algorithm="scaffold", iterations=1, inbox=inbox))
    with pytest.raises(ConfigError, match="has 4 bytes, expected 80"):
        step.begin(learner)
    step = make_local_step(LocalPlan(algorithm="scaffold", iterations=1))
    step.begin(learner)
    step.restore({"w": np.ones(3)})
    assert step.state()["w"].tolist() == [0.0] * 10


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_anything_but_sgd_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be sgd without momentum"):
        make_strategy("scaffold", options, RoundRules())
