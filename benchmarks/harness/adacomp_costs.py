"""How many updates of `adacomp` a coordinator applies, and what counting staleness in other ways would take."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.core.config import parse_run
from edgefl.core.types import Array, DeviceInfo, SparseTensor, Tensors, TrainInstruction, Update, UpdateMetrics
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.components import RunComponents
from harness.cost_rows import Row

NUM_DEVICES, NUM_BODIES = 200, 64
TURN = 100
"""Updates in one turn of the stopwatch; as many devices are chosen at random."""
SLOW_TURN = 3
CHECKED = 400
AIM_PER_S = 2000


def rows(repeats: int) -> list[Row]:
    """Returns rates, after the strategy was held against a slow count.

    Raises:
        AssertionError: its model is another one.
    """
    differing = _differing_from_slow_count()
    fleet = Fleet()
    for _ in range(3 * NUM_DEVICES // TURN):
        fleet.answer(TURN)
    taken: dict[str, list[float]] = {"decoded and applied": [], "all": [], "window": [], "loops": []}
    for _ in range(repeats):
        fleet.seconds = dict.fromkeys(fleet.seconds, 0.0)
        fleet.answer(TURN)
        applied_s = sum(fleet.seconds[name] for name in ("decode", "receive", "aggregate"))
        taken["decoded and applied"].append(applied_s / TURN)
        taken["all"].append(sum(fleet.seconds.values()) / TURN)
        taken["window"].append(_timed(lambda: _window_counts(fleet), SLOW_TURN))
        taken["loops"].append(_timed(lambda: _python_counts(fleet), 1))
    median = {name: statistics.median(found) for name, found in taken.items()}
    return [
        Row(part="adacomp", what=f"{CHECKED} updates against a slow count of touches: entries that differ",
            value=differing, unit="entries", aim=0),
        Row(part="adacomp", what=f"updates of {NUM_DEVICES} devices, decoded and applied",
            value=1 / median["decoded and applied"], unit="a second", aim=AIM_PER_S, more_is_better=True),
        Row(part="adacomp", what="the same with the guard before, and new work given out behind",
            value=1 / median["all"], unit="a second"),
        Row(part="adacomp", what="counting in the window of index sets, alone, to all of ours that is applied",
            value=median["window"] / median["decoded and applied"], unit="times"),
        Row(part="adacomp", what="counting with Python's loops, alone, to the same",
            value=median["loops"] / median["decoded and applied"], unit="times"),
    ]  # fmt: skip


def _timed(run: Any, number: int) -> float:
    begun_s = time.process_time()
    for _ in range(number):
        run()
    return (time.process_time() - begun_s) / number


@dataclass(slots=True)
class Fleet:
    """Devices at work on the MNIST CNN, of which some answer in any order; `seconds` says what took how long."""

    made: RunComponents = field(init=False)
    state: Any = field(init=False)
    bodies: list[bytes] = field(init=False)
    busy: dict[str, tuple[str, ...]] = field(default_factory=dict)
    out: dict[str, TrainInstruction] = field(default_factory=dict)
    window: deque[Tensors] = field(default_factory=lambda: deque(maxlen=NUM_DEVICES - 1))
    newest: Tensors = field(default_factory=dict)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("decode", "guard", "receive", "aggregate", "assign"), 0.0)
    )
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    _answered: int = 0

    def __post_init__(self) -> None:
        config = {"run": {"task": "mnist", "updates": 10**9}, "strategy": {"name": "adacomp", "batch_size": 10}}
        self.made = build_run(parse_run(config), "r")
        self.state = self.made.strategy.init(self.made.model)
        self._assign(f"d{number:03}" for number in range(NUM_DEVICES))
        codec = make_codec(next(iter(self.out.values())).codec or "dense", self.made.shapes)
        # Some entries are large time and again, as in training, so that touches pile up.
        scale = {spec.name: self._rng.exponential(size=spec.shape) ** 2 for spec in self.made.shapes}
        self.bodies = [
            codec.encode(
                {name: (each * self._rng.standard_normal(each.shape)).astype(np.float32) / 100
                 for name, each in scale.items()},
                self._rng,
            )
            for _ in range(NUM_BODIES)
        ]  # fmt: skip

    def answer(self, number: int) -> None:
        """Lets so many devices answer, one after the other; each is given work again at once."""
        strategy = self.made.strategy
        for name in self._rng.choice(sorted(self.out), number):
            order, body = self.out.pop(name), self.bodies[self._answered % NUM_BODIES]
            del self.busy[name]
            self._answered += 1
            self.newest = self._clocked("decode", self.made.decode, body)
            update = Update(
                assignment_id=order.assignment_id, device_id=name, base_version=order.base_version,
                tensors=self.newest, metrics=UpdateMetrics(num_examples=10),
            )  # fmt: skip
            assert self._clocked("guard", self.made.policy.rejection_reason, update) is None
            self.state = self._clocked("receive", strategy.receive, self.state, update)
            self.state = self._clocked("aggregate", strategy.aggregate, self.state)
            self.window.append(self.newest)
            self._assign([name])

    def _assign(self, idle: Any) -> None:
        idle = list(idle)
        devices = {name: DeviceInfo(device_id=name) for name in [*self.out, *idle]}
        view = SimpleNamespace(
            now_s=0.0, devices=devices, idle=idle, busy=self.busy, speeds={}, progress={}, health={}
        )
        self.state, decision = self._clocked("assign", self.made.strategy.assign, self.state, view)
        for order in decision.instructions:
            self.out[order.device_id] = order
            self.busy[order.device_id] = (order.assignment_id,)

    def _clocked(self, name: str, run: Any, *arguments: Any) -> Any:
        begun_s = time.process_time()
        try:
            return run(*arguments)
        finally:
            self.seconds[name] += time.process_time() - begun_s


def _window_counts(fleet: Fleet) -> list[Array]:
    """Returns the touches since an update's version by counting in all index sets that came after it."""
    counts = []
    for spec in fleet.made.shapes:
        window = np.concatenate([_indices(tensors, spec.name) for tensors in fleet.window])
        counts.append(np.bincount(window, minlength=spec.size)[_indices(fleet.newest, spec.name)])
    return counts


def _python_counts(fleet: Fleet) -> list[list[int]]:
    """Returns the same as a program without NumPy counts them."""
    counts = []
    for spec in fleet.made.shapes:
        window = [set(_indices(tensors, spec.name).tolist()) for tensors in fleet.window]
        counts.append(
            [sum(index in touched for touched in window) for index in _indices(fleet.newest, spec.name).tolist()]
        )
    return counts


def _indices(tensors: Tensors, name: str) -> Array:
    tensor = tensors[name]
    assert isinstance(tensor, SparseTensor)
    return tensor.indices


def _differing_from_slow_count() -> int:
    """Returns how many of the model's entries differ from those of a model that is made by the paper's definition."""
    fleet = Fleet()
    model = {name: tensor.copy() for name, tensor in fleet.made.model.items()}
    history: list[Tensors] = []
    for _ in range(CHECKED):
        before = {name: order.base_version for name, order in fleet.out.items()}
        fleet.answer(1)
        (answered,) = (name for name, order in fleet.out.items() if order.base_version != before[name])
        _apply_slowly(model, fleet.newest, history[before[answered] :])
        history.append(fleet.newest)
    ours = fleet.made.strategy.model(fleet.state)
    return sum(int(np.count_nonzero(ours[name] != tensor)) for name, tensor in model.items())


def _apply_slowly(model: dict[str, Array], update: Tensors, since: Sequence[Tensors]) -> None:
    for name, tensor in model.items():
        sent, touches = update[name], np.zeros(tensor.size, np.int64)
        assert isinstance(sent, SparseTensor)
        for earlier in since:
            touches[_indices(earlier, name)] += 1
        staleness = np.maximum(touches[sent.indices], 1).astype(np.uint16)
        tensor.reshape(-1)[sent.indices] += sent.values / staleness
