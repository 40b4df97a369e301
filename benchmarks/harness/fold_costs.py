"""What it takes to make one model of many updates: time beside NumPy's addition, memory beside the model."""

from __future__ import annotations

import itertools
import math
import tempfile
import tracemalloc
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.types import (
    Array,
    DeviceInfo,
    Event,
    FleetView,
    Instruction,
    ModelProvider,
    ModelSpec,
    Scalar,
    TensorSpec,
    TrainInstruction,
    Update,
    UpdateMetrics,
)
from edgefl.engine.progress import StoppingCriteria
from edgefl.engine.round_loop import RunLog, run_rounds
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.robust import BLOCK_BYTES
from edgefl.strategies.update_guard import UpdateGuard
from harness.cost_rows import Row, interleaved, ratio

KEPT = 10
"""Copies that a mean over kept updates is taken of; it needs so many models of memory."""
MAX_RATIO, MAX_MODELS = 1.6, 3.0
ROBUST_RULES = {"multi-krum": {}, "trimmed-mean": {}, "geometric-median": {"neighbours": True}}
NUM_ROBUST_UPDATES = 20
RESNET_ELEMENTS = 9_444_864
"""Of the convolutions and vectors below at their full widths; fewer make them narrower."""


def resnet_shapes(num_elements: int) -> ModelSpec:
    """Returns tensors like those of a ResNet-18, with about so many entries: many, and a few large ones."""
    scale = min(1.0, math.sqrt(num_elements / RESNET_ELEMENTS))
    widths = [max(1, round(scale * width)) for width in (64, 64, 128, 128, 256, 256, 512, 512)]
    shapes = [(wide, narrow, 3, 3) for narrow, wide in itertools.pairwise([widths[0], *widths])]
    shapes = [shape for shape in shapes for _ in range(2)] + [(width,) for width in widths for _ in range(4)]
    whole = sum(math.prod(shape) for shape in shapes)
    shapes.append((max(1, num_elements - whole),))
    return tuple(TensorSpec(name=f"t{number}", shape=shape) for number, shape in enumerate(shapes))


def time_rows(num_elements: int, repeats: int) -> list[Row]:
    """Returns what an update costs from the moment at which it is decoded, and from its bytes on."""
    shapes, rng = resnet_shapes(num_elements), np.random.default_rng(1)
    update = {spec.name: rng.standard_normal(spec.shape, dtype=np.float32) for spec in shapes}
    body = make_codec("dense", shapes).encode(update, rng)
    sums = {name: np.zeros_like(tensor) for name, tensor in update.items()}
    kept = [{name: tensor.copy() for name, tensor in update.items()} for _ in range(KEPT)]
    guard, asked = UpdateGuard(shapes=shapes), _Asked(update)

    def add() -> None:
        for name, tensor in update.items():
            np.add(sums[name], tensor, out=sums[name])

    def mean() -> None:
        for name in update:
            np.average([tensors[name] for tensors in kept], axis=0, weights=range(1, KEPT + 1))

    with tempfile.TemporaryDirectory() as root, _open(Path(root), shapes) as wal:

        def whole() -> None:
            event = asked.update(decode_body(body, shapes), body)
            assert guard.rejection_reason(event) is None
            (durable,) = wal.record_events([event])
            wal.commit()
            asked.receive(durable)  # type: ignore[arg-type] # an update comes back as an update

        ways = {
            "add": add,
            "fold": lambda: asked.receive(asked.update(update)),
            "mean": mean,
            "checksum": lambda: zlib.crc32(body),
            "whole": whole,
        }
        interleaved(ways, 2)
        times = interleaved(ways, repeats)
    million = f"{num_elements / 1e6:.3g} million numbers"
    return [
        Row(part="fold", what=f"an update of {million} into the weighted sum, to np.add",
            value=ratio(times["fold"], times["add"]), unit="times", aim=MAX_RATIO),
        Row(part="fold", what=f"np.average over {KEPT} kept copies, per update, to np.add",
            value=ratio(times["mean"], times["add"]) / KEPT, unit="times"),
        Row(part="fold", what="decode, guard, journal with fsync and fold, to np.add",
            value=ratio(times["whole"], times["add"]), unit="times"),
        Row(part="fold", what="of these, its two checksums (one comes with the codec, one with the journal)",
            value=2 * ratio(times["checksum"], times["add"]), unit="times"),
        Row(part="fold", what="np.add itself", value=1000 * sorted(times["add"])[repeats // 2], unit="ms"),
    ]  # fmt: skip


def memory_rows(num_elements: int, fleets: Sequence[int]) -> list[Row]:
    """Returns what rounds of several fleets take at most, all in all: first model, strategy, loop and journal."""
    shapes = resnet_shapes(num_elements)
    return [
        Row(part="memory", what=f"most that is in memory with {num_devices} devices, the last to answer asked first",
            value=_most_models(shapes, num_devices), unit="models", aim=MAX_MODELS + 0.1)
        for num_devices in fleets
    ]  # fmt: skip


def robust_rows(num_elements: int) -> list[Row]:
    """Returns what two rounds of robust rules take at most, the block of columns included."""
    shapes = resnet_shapes(num_elements)
    num_bytes = sum(spec.nbytes for spec in shapes)
    limit = min(BLOCK_BYTES / num_bytes, NUM_ROBUST_UPDATES) + MAX_MODELS + 0.1
    return [
        Row(part="robust", what=f"most that is in memory with {NUM_ROBUST_UPDATES} updates, {name}",
            value=_most_models(shapes, NUM_ROBUST_UPDATES, name, options), unit="models", aim=limit)
        for name, options in ROBUST_RULES.items()
    ]  # fmt: skip


def _most_models(
    shapes: ModelSpec, num_devices: int, name: str = "fedavg", options: Mapping[str, Scalar] = MappingProxyType({})
) -> float:
    """Returns the most bytes that a run of two rounds had allocated at a time, in models."""
    num_bytes, fleet = sum(spec.nbytes for spec in shapes), BackwardFleet(num_devices, shapes)
    tracemalloc.start()
    try:
        strategy: Any = make_strategy(name, options, RoundRules(min_devices=num_devices))
        state = strategy.init({spec.name: np.zeros(spec.shape, np.float32) for spec in shapes})
        with tempfile.TemporaryDirectory() as root, _open(Path(root), shapes) as wal:
            state, _ = run_rounds(
                strategy,
                state,
                fleet=fleet,
                journal=RunLog(wal, ()),
                goal=StoppingCriteria(rounds=2),
                evaluate=EvaluationSchedule(evaluate_on="none"),
                policy=RunParticipationPolicy(guard=UpdateGuard(shapes=shapes)),
            )
        assert np.allclose(state.model["t0"], 2.0)
        return tracemalloc.get_traced_memory()[1] / num_bytes
    finally:
        tracemalloc.stop()


def _open(root: Path, shapes: ModelSpec) -> WalJournal:
    return WalJournal(root / "journal", lambda body: decode_body(body, shapes))


class BackwardFleet:
    """Devices that answer one by one, whoever was asked last first: all but one update wait for their turn.

    The bytes of an update are made when it comes, as if the last had just arrived, and nothing here keeps them.
    """

    def __init__(self, num_devices: int, shapes: ModelSpec) -> None:
        self._shapes, self._out = shapes, deque[TrainInstruction]()
        ones = {spec.name: np.ones(spec.shape, np.float32) for spec in shapes}
        self._body = bytearray(make_codec("dense", shapes).encode(ones, np.random.default_rng(1)))
        self._devices = {f"d{number:03}": DeviceInfo(device_id=f"d{number:03}") for number in range(num_devices)}

    def view(self) -> FleetView:
        busy = {order.device_id: (order.assignment_id,) for order in self._out}
        idle = [name for name in self._devices if name not in busy]
        return SimpleNamespace(  # type: ignore[return-value] # it has all that a view has
            now_s=0.0, devices=self._devices, idle=idle, busy=busy, speeds={}, progress={}, health={}
        )

    def dispatch(self, orders: Sequence[Instruction], source: ModelProvider) -> None:  # noqa: ARG002 nobody looks at the model
        self._out += (order for order in orders if isinstance(order, TrainInstruction))

    def wait(self, until_s: float) -> Sequence[Event]:  # noqa: ARG002 there is always somebody who answers
        order = self._out.pop()
        body = bytes(self._body)
        return [
            Update(
                assignment_id=order.assignment_id,
                device_id=order.device_id,
                base_version=order.base_version,
                tensors=decode_body(body, self._shapes),
                metrics=UpdateMetrics(num_examples=3),
                body=body,
            )
        ]


class _Asked:
    """A round of FedAvg that asks one more device for every update that is received."""

    def __init__(self, model: dict[str, Array]) -> None:
        self._strategy: Any = make_strategy("fedavg", {}, RoundRules())
        self._numbers = itertools.count()
        self._state = self._strategy.init(model)
        view = SimpleNamespace(now_s=0.0, devices={}, idle=["first"], busy={}, speeds={}, progress={}, health={})
        self._state, _ = self._strategy.assign(self._state, view)
        (self._round,) = self._state.open
        self._round.fold.expected.clear()

    def update(self, tensors: Any, body: bytes | None = None) -> Update:
        """Returns an update that is waited for."""
        name = f"a-{next(self._numbers)}"
        self._round.add_assignment(name, "first")
        metrics = UpdateMetrics(num_examples=3)
        return Update(
            assignment_id=name, device_id="first", base_version=0, tensors=tensors, metrics=metrics, body=body
        )

    def receive(self, update: Update) -> None:
        self._state = self._strategy.receive(self._state, update)
