"""Any strategy written for Flower as one of ours: `flwr:FedAdam`, or the `module:Class` of a subclass, unchanged.

Flower's object decides whom of the idle devices to ask, with which configuration, and what the next model is; rounds,
deadlines and barriers are those of our synchronous strategies. It sees the floating-point tensors; counters are taken
from the update with most examples, as everywhere. A Flower strategy wants all models of a round at once, so a round
holds one for each device that answered. What it remembers between rounds (numbers, arrays, mappings and
lists of them, `ArrayRecord`s) is part of our state and survives a restart; other attributes do not, and the strategy
then goes on from the start of the round as if they were new.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy as FlowerBase

from edgefl.adapters.flower_grid import IdleGrid, TooFewNodesError
from edgefl.adapters.flower_memory import SavedArrays, is_plain, recall, remember
from edgefl.adapters.flower_options import check_minima, find_flower_strategy, flower_settings, make_flower_object
from edgefl.adapters.process_globals import ensure_identity, seeded
from edgefl.errors import StrategyError
from edgefl.strategies.fold import dense_tensor, release
from edgefl.strategies.open_round import Job, OpenRound, RoundState
from edgefl.strategies.round_rules import RoundRules
from edgefl.strategies.rounds import Synchronous
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import Algorithm, Array, FleetView, LocalPlan, Order, Scalar, Update, derived_seed

__all__ = ["FlowerStrategy", "flower_settings", "make_flower_strategy"]

ALIASES = {"lr": "learning_rate", "local_epochs": "epochs", "proximal_mu": "mu"}
"""Names of Flower's tutorials for what a plan calls otherwise."""
_BUDGETS = ("iterations", "epochs", "seconds")
_IN_PLAN = frozenset({*_BUDGETS, "batch_size", "learning_rate", "momentum", "weight_decay"})


@dataclass(slots=True)
class FlowerState(RoundState):
    """`memory` is what Flower's object remembers, by attribute.

    `config` is the configuration as it left it: Flower hands the same one on from round to round, so that
    `config["lr"] *= 0.5` lasts. `config_rate` is the learning rate that it was made with; `round_config` is what
    round `config_round` began with, for devices that are asked later in it.
    """

    memory: dict[str, Any | SavedArrays] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_rate: float = 0.0
    round_config: dict[str, Any] = field(default_factory=dict)
    config_round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerStrategy(Synchronous[FlowerState]):
    """Implements `Strategy` with one of Flower's; `flower` is used by one run."""

    collects: ClassVar[bool] = True

    flower: FlowerBase
    name: str

    def begin(self, model: dict[str, Array]) -> FlowerState:
        return FlowerState(model=model, memory=remember(self.flower))

    def give(
        self,
        state: FlowerState,
        opened: OpenRound,
        jobs: Sequence[Job],
        view: FleetView,  # noqa: ARG002 Flower sees node ids alone
    ) -> tuple[Order, ...]:
        """Asks those of the jobs' devices that Flower's object chooses, perhaps none."""
        plans = self._configured(state, [job.device_id for job in jobs])
        return tuple(self._order(state, opened, job, plans[job.device_id]) for job in jobs if job.device_id in plans)

    def displacement(self, state: FlowerState, opened: OpenRound) -> Mapping[str, Array]:
        updates = _taken(opened)
        result = self._aggregated(state, [self._reply(state, update) for update in updates])
        if result is None:
            log.info("round %d: %s left the model as it is", state.version + 1, self.name)
            return {}
        counted = _counted(state.model, updates)
        new = {name: _fitting(result, name, tensor) for name, tensor in _floats(state.model).items()}
        if self.rules.server.kind == "none" and self.rules.server.learning_rate == 1.0:
            for name, tensor in new.items():  # not by a difference: the model shall be Flower's to the bit
                state.model[name][...] = tensor
            return counted
        return {**{name: np.subtract(tensor, state.model[name]) for name, tensor in new.items()}, **counted}

    def _configured(self, state: FlowerState, devices: Sequence[str]) -> dict[str, LocalPlan]:
        """Returns the plans of the devices that are chosen."""
        plan = self._scheduled(state)
        names = {node_id_of(device_id): device_id for device_id in devices}
        number, grid = state.version + 1, IdleGrid(list(names))
        if not grid.has_enough_for(self.flower):
            return {}
        arrays, config = _record(_floats(state.model)), _config(state, number, plan.learning_rate)
        recall(self.flower, state.memory)
        try:
            with seeded(derived_seed(self.rules.seed, "flower", number, state.attempt)):
                messages = list(self.flower.configure_train(number, arrays, config, grid) or ())
        except TooFewNodesError:
            return {}
        state.memory = remember(self.flower)
        state.config = {key: value for key, value in config.items() if is_plain(value)}
        return {names[node_id]: made for node_id, made in _plans(messages, plan, arrays, names)}

    def _aggregated(self, state: FlowerState, replies: list[Message]) -> Mapping[str, Array] | None:
        recall(self.flower, state.memory)
        with seeded(derived_seed(self.rules.seed, "flower", state.version + 1, "aggregate")):
            arrays, _ = self.flower.aggregate_train(state.version + 1, replies)
        state.memory = remember(self.flower)
        return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}

    def _reply(self, state: FlowerState, update: Update) -> Message:
        """Returns an update as a ClientApp would have sent it: the trained model, not the displacement."""
        arrays = {
            name: np.add(tensor, dense_tensor(update, name, tensor), dtype=tensor.dtype)
            for name, tensor in _floats(state.model).items()
        }
        metrics: dict[str, Any] = {
            "num-examples": max(1, update.metrics.num_examples),
            "iterations": update.metrics.iterations,
        }
        if update.metrics.loss is not None:
            metrics |= {"loss": update.metrics.loss, "train_loss": update.metrics.loss}
        content = RecordDict({"arrays": _record(arrays), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=Message(RecordDict(), node_id_of(update.device_id), MessageType.TRAIN))


def make_flower_strategy(name: str, options: Mapping[str, Scalar], rules: RoundRules) -> FlowerStrategy:
    """Returns a Flower strategy ready to run.

    Args:
        name: `flwr:Class`, or `module:Class`.
        options: what a device does (`settings.TrainingSettings`); all others go to the class.
        rules: what the run file says about every round.

    Raises:
        StrategyError: there is no such class.
        ConfigError: an option is unknown or missing, or its value has the wrong type or makes no sense.
    """
    ensure_identity()
    logging.getLogger("flwr").setLevel(logging.WARNING)  # it says at INFO whom it asks, every round
    found = find_flower_strategy(name)
    flower = make_flower_object(name, found, options)
    check_minima(flower, rules.max_devices)
    training = {item.name for item in dataclasses.fields(TrainingSettings)}
    settings = TrainingSettings(**{key: value for key, value in options.items() if key in training})  # type: ignore[arg-type] # checked with the other options
    return FlowerStrategy(
        flower=flower, name=name, plan=settings.plan(), weigh=lambda _: 1.0, rules=rules, rate=settings.rate()
    )


def node_id_of(device_id: str) -> int:
    """Returns the node id under which Flower's object knows a device, the same in every run."""
    return derived_seed("flower-node", device_id) % 2**63


log = logging.getLogger(__name__)


def _config(state: FlowerState, number: int, learning_rate: float) -> ConfigRecord:
    """Returns the configuration of a round: that of the round before, `lr` as our schedule and theirs have it."""
    if state.config_round != number:
        rate, before = learning_rate, state.config.get("lr")
        if isinstance(before, int | float) and state.config_rate:
            rate = before if learning_rate == state.config_rate else before * (learning_rate / state.config_rate)
        state.round_config, state.config_round = {**state.config, "lr": rate}, number
        state.config_rate = learning_rate
    return ConfigRecord(dict(state.round_config))


def _record(tensors: Mapping[str, Array]) -> ArrayRecord:
    return ArrayRecord({name: FlowerArray(np.ascontiguousarray(t).reshape(t.shape)) for name, t in tensors.items()})


def _floats(model: Mapping[str, Array]) -> dict[str, Array]:
    return {name: tensor for name, tensor in model.items() if np.issubdtype(tensor.dtype, np.inexact)}


def _counted(model: Mapping[str, Array], updates: Sequence[Update]) -> dict[str, Array]:
    """Returns how counters move; lets go of what was decoded for the updates."""
    most = max(updates, key=lambda update: update.metrics.num_examples)
    counters = {name: tensor for name, tensor in model.items() if not np.issubdtype(tensor.dtype, np.inexact)}
    moved = {name: dense_tensor(most, name, tensor).astype(tensor.dtype) for name, tensor in counters.items()}
    for update in updates:
        release(update.tensors)
    return moved


def _fitting(result: Mapping[str, Array], name: str, like: Array) -> Array:
    """Returns a tensor of the next model in the type that it had; Flower's may come as float64."""
    if name not in result or result[name].shape != like.shape:
        found = f"shape {result[name].shape}" if name in result else "nothing"
        raise StrategyError(f"aggregate_train returned {found} for tensor {name!r}, the model's is {like.shape}")
    return result[name].astype(like.dtype)


def _taken(opened: OpenRound) -> list[Update]:
    """Returns what has come, in the order in which it was asked for, and notes that all of it is used."""
    fold = opened.fold
    slots = [slot for slot in fold.expected if slot in fold.waiting]
    fold.used |= {slot: fold.waiting[slot].assignment_id for slot in slots}
    return [fold.waiting.pop(slot) for slot in slots]


def _plans(
    messages: Iterable[Message], plan: LocalPlan, arrays: ArrayRecord, known: Mapping[int, str]
) -> Iterable[tuple[int, LocalPlan]]:
    for message in messages:
        node_id, content = message.metadata.dst_node_id, message.content
        if node_id not in known:
            raise StrategyError(f"configure_train asks node {node_id}, which is not among those that it was given")
        if any(sent is not arrays and dict(sent) != dict(arrays) for sent in content.array_records.values()):
            raise StrategyError(
                "configure_train sends a node another model than the global one; that is not supported"
            )
        yield node_id, _configured_plan(plan, content.config_records.values())


def _configured_plan(plan: LocalPlan, records: Iterable[ConfigRecord]) -> LocalPlan:
    """Returns the plan with what a ClientApp would have read from the configuration; other keys say nothing here."""
    for key, value in (pair for record in records for pair in record.items()):
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name == "mu" and isinstance(value, int | float) and value > 0:
            if plan.algorithm not in {Algorithm.SGD, Algorithm.PROX}:
                raise StrategyError(
                    "configure_train asks for a proximal term, which needs strategy.optimizer = 'sgd', "
                    f"got {str(plan.algorithm)!r}"
                )
            plan = replace(plan, algorithm=Algorithm.PROX, options={**plan.options, "mu": float(value)})
        elif name in _IN_PLAN and getattr(plan, name) != value:
            others = {budget: None for budget in _BUDGETS if name in _BUDGETS and budget != name}
            plan = replace(plan, **{**others, name: value})  # type: ignore[arg-type] # devices check the values
    return plan
