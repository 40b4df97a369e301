"""Adapter that runs a Flower strategy, `flwr:FedAdam` or the `module:Class` of a subclass, unchanged.

Flower's object selects among the idle devices, configures them and computes the next model; rounds, deadlines and
time-outs are those of the synchronous strategies. It gets the floating-point tensors; counters are taken from the
update with most examples, as everywhere. A Flower strategy needs all models of a round at once, so a round holds one
for each device that answered. Its attributes that are numbers, arrays, mappings and lists of them, or `ArrayRecord`s
are part of the state and survive a restart; other attributes do not, and the strategy then continues from the start
of the round as if they were new.

The only module that seeds the global generators, so that the same seed gives the same run. The `Grid` that Flower's
object sees has no network.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy import Strategy as FlowerBase

from edgefl.core.errors import StrategyError
from edgefl.core.types import Algorithm, Array, FleetView, Instruction, Scalar, TrainConfig, Update, derive_seed
from edgefl.flower.internals import ensure_identity
from edgefl.flower.strategy_options import (
    check_min_nodes,
    find_flower_strategy,
    get_flower_settings,
    make_flower_object,
)
from edgefl.strategies.aggregation import dense_tensor, unload_tensors
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState, SlotRequest
from edgefl.strategies.synchronous.strategy import SynchronousStrategy

log = logging.getLogger(__name__)

__all__ = ["FlowerStrategy", "get_flower_settings", "make_flower_strategy"]

ALIASES = {"lr": "learning_rate", "local_epochs": "epochs", "proximal_mu": "mu"}
"""Names in Flower's tutorials of differently named plan settings."""
_BUDGETS = ("iterations", "epochs", "seconds")
_PLAN_FIELDS = frozenset({*_BUDGETS, "batch_size", "learning_rate", "momentum", "weight_decay"})
_PLAIN_TYPES = (str, int, float, bool, type(None))

MAX_QUERIES = 6
"""Flower's `sample_nodes` queries, sleeps and repeats without end; no node joins during its sleep here."""


@dataclass(slots=True)
class FlowerState(RoundState):
    """State of a Flower strategy; `memory` holds its object's attributes by name.

    `config` is the configuration after its last call: Flower passes the same one on from round to round, so that
    `config["lr"] *= 0.5` lasts. `config_rate` is the learning rate that it was made with; `round_config` is that
    of the start of round `config_round`, for devices that are asked later in it.
    """

    memory: dict[str, Any | SavedArrays] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_rate: float = 0.0
    round_config: dict[str, Any] = field(default_factory=dict)
    config_round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerStrategy(SynchronousStrategy[FlowerState]):
    """Implements `Strategy` with a Flower strategy; `flower` is used by one run."""

    should_keep_updates: ClassVar[bool] = True

    flower: FlowerBase
    name: str

    def make_state(self, model: dict[str, Array]) -> FlowerState:
        return FlowerState(model=model, memory=export_attributes(self.flower))

    def assign_slots(
        self,
        state: FlowerState,
        current_round: OpenRound,
        requests: Sequence[SlotRequest],
        view: FleetView,  # noqa: ARG002 Flower sees node ids alone
    ) -> tuple[Instruction, ...]:
        """Assigns to those of the requested devices that Flower's object selects, perhaps none."""
        plans = self._configure_round(state, [request.device_id for request in requests])
        return tuple(
            self._make_instruction(state, current_round, request, plans[request.device_id])
            for request in requests
            if request.device_id in plans
        )

    def compute_displacement(self, state: FlowerState, current_round: OpenRound) -> Mapping[str, Array]:
        updates = _pop_updates(current_round)
        result = self._aggregate_replies(state, [self._make_reply(state, update) for update in updates])
        if result is None:
            log.info("round %d: %s left the model as it is", state.version + 1, self.name)
            return {}
        counters = _compute_counters(state.model, updates)
        new_model = {
            name: _to_model_tensor(result, name, tensor) for name, tensor in _select_floats(state.model).items()
        }
        if self.rules.server.kind == "none" and self.rules.server.learning_rate == 1.0:
            for name, tensor in new_model.items():  # not by a difference: the model is bit-identical to Flower's
                state.model[name][...] = tensor
            return counters
        return {**{name: np.subtract(tensor, state.model[name]) for name, tensor in new_model.items()}, **counters}

    def _configure_round(self, state: FlowerState, devices: Sequence[str]) -> dict[str, TrainConfig]:
        """Returns the plans of the selected devices."""
        plan = self._make_round_plan(state)
        device_ids = {compute_node_id(device_id): device_id for device_id in devices}
        round_number, grid = state.version + 1, StubGrid(list(device_ids))
        if not grid.has_enough_for(self.flower):
            return {}
        arrays, config = (
            _to_array_record(_select_floats(state.model)),
            _make_round_config(state, round_number, plan.learning_rate),
        )
        restore_attributes(self.flower, state.memory)
        try:
            with seed_global_generators(derive_seed(self.rules.seed, "flower", round_number, state.attempt)):
                messages = list(self.flower.configure_train(round_number, arrays, config, grid) or ())
        except TooFewNodesError:
            return {}
        state.memory = export_attributes(self.flower)
        state.config = {key: value for key, value in config.items() if is_plain(value)}
        return {
            device_ids[node_id]: node_plan for node_id, node_plan in _parse_plans(messages, plan, arrays, device_ids)
        }

    def _aggregate_replies(self, state: FlowerState, replies: list[Message]) -> Mapping[str, Array] | None:
        restore_attributes(self.flower, state.memory)
        with seed_global_generators(derive_seed(self.rules.seed, "flower", state.version + 1, "aggregate")):
            arrays, _ = self.flower.aggregate_train(state.version + 1, replies)
        state.memory = export_attributes(self.flower)
        return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}

    def _make_reply(self, state: FlowerState, update: Update) -> Message:
        """Returns an update as a ClientApp would send it: the trained model, not the displacement."""
        arrays = {
            name: np.add(tensor, dense_tensor(update, name, tensor), dtype=tensor.dtype)
            for name, tensor in _select_floats(state.model).items()
        }
        metrics: dict[str, Any] = {
            "num-examples": max(1, update.metrics.num_examples),
            "iterations": update.metrics.iterations,
        }
        if update.metrics.loss is not None:
            metrics |= {"loss": update.metrics.loss, "train_loss": update.metrics.loss}
        content = RecordDict({"arrays": _to_array_record(arrays), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=Message(RecordDict(), compute_node_id(update.device_id), MessageType.TRAIN))


def make_flower_strategy(name: str, options: Mapping[str, Scalar], rules: RoundRules) -> FlowerStrategy:
    """Returns a Flower strategy ready to run.

    Args:
        name: `flwr:Class`, or `module:Class`.
        options: local training (`StrategyConfig`); all others go to the class.
        rules: of every round, from the run file.

    Raises:
        StrategyError: there is no such class.
        ConfigError: an option is unknown or missing, or its value has the wrong type or is invalid.
    """
    ensure_identity()
    logging.getLogger("flwr").setLevel(logging.WARNING)  # it logs every round's devices at INFO
    strategy_class = find_flower_strategy(name)
    flower = make_flower_object(name, strategy_class, options)
    check_min_nodes(flower, rules.max_devices)
    training = {item.name for item in dataclasses.fields(StrategyConfig)}
    settings = StrategyConfig(**{key: value for key, value in options.items() if key in training})  # type: ignore[arg-type] # checked with the other options
    return FlowerStrategy(
        flower=flower,
        name=name,
        plan=settings.plan(),
        compute_weight=lambda _: 1.0,
        rules=rules,
        lr_schedule=settings.make_schedule(),
    )


def compute_node_id(device_id: str) -> int:
    """Returns the node id of a device in Flower's object, the same in every run."""
    return derive_seed("flower-node", device_id) % 2**63


def _make_round_config(state: FlowerState, round_number: int, learning_rate: float) -> ConfigRecord:
    """Returns the round's configuration: the last round's, with `lr` by both schedules."""
    if state.config_round != round_number:
        rate, last_rate = learning_rate, state.config.get("lr")
        if isinstance(last_rate, int | float) and state.config_rate:
            rate = (
                last_rate if learning_rate == state.config_rate else last_rate * (learning_rate / state.config_rate)
            )
        state.round_config, state.config_round = {**state.config, "lr": rate}, round_number
        state.config_rate = learning_rate
    return ConfigRecord(dict(state.round_config))


def _to_array_record(tensors: Mapping[str, Array]) -> ArrayRecord:
    return ArrayRecord({name: FlowerArray(np.ascontiguousarray(t).reshape(t.shape)) for name, t in tensors.items()})


def _select_floats(model: Mapping[str, Array]) -> dict[str, Array]:
    return {name: tensor for name, tensor in model.items() if np.issubdtype(tensor.dtype, np.inexact)}


def _compute_counters(model: Mapping[str, Array], updates: Sequence[Update]) -> dict[str, Array]:
    """Returns the displacements of counters; unloads the updates' decoded tensors."""
    largest = max(updates, key=lambda update: update.metrics.num_examples)
    counters = {name: tensor for name, tensor in model.items() if not np.issubdtype(tensor.dtype, np.inexact)}
    displacements = {
        name: dense_tensor(largest, name, tensor).astype(tensor.dtype) for name, tensor in counters.items()
    }
    for update in updates:
        unload_tensors(update.tensors)
    return displacements


def _to_model_tensor(result: Mapping[str, Array], name: str, like: Array) -> Array:
    """Returns a tensor of the next model in its own type; Flower's may be float64."""
    if name not in result or result[name].shape != like.shape:
        description = f"shape {result[name].shape}" if name in result else "nothing"
        raise StrategyError(
            f"aggregate_train returned {description} for tensor {name!r}, the model's is {like.shape}"
        )
    return result[name].astype(like.dtype)


def _pop_updates(current_round: OpenRound) -> list[Update]:
    """Returns the received updates in the order of their slots, and marks them as used."""
    mean = current_round.fold
    slots = [slot for slot in mean.expected if slot in mean.waiting]
    mean.used |= {slot: mean.waiting[slot].assignment_id for slot in slots}
    return [mean.waiting.pop(slot) for slot in slots]


def _parse_plans(
    messages: Iterable[Message], plan: TrainConfig, arrays: ArrayRecord, device_ids: Mapping[int, str]
) -> Iterable[tuple[int, TrainConfig]]:
    for message in messages:
        node_id, content = message.metadata.dst_node_id, message.content
        if node_id not in device_ids:
            raise StrategyError(f"configure_train asks node {node_id}, which is not among those that it was given")
        if any(record is not arrays and dict(record) != dict(arrays) for record in content.array_records.values()):
            raise StrategyError(
                "configure_train sends a node another model than the global one; that is not supported"
            )
        yield node_id, _apply_config(plan, content.config_records.values())


def _apply_config(plan: TrainConfig, records: Iterable[ConfigRecord]) -> TrainConfig:
    """Returns the plan with the settings of a ClientApp's configuration; other keys are ignored."""
    for key, value in (item for record in records for item in record.items()):
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name == "mu" and isinstance(value, int | float) and value > 0:
            if plan.algorithm not in {Algorithm.SGD, Algorithm.PROX}:
                raise StrategyError(
                    "configure_train asks for a proximal term, which needs strategy.optimizer = 'sgd', "
                    f"got {str(plan.algorithm)!r}"
                )
            plan = replace(plan, algorithm=Algorithm.PROX, options={**plan.options, "mu": float(value)})
        elif name in _PLAN_FIELDS and getattr(plan, name) != value:
            unset = {budget: None for budget in _BUDGETS if name in _BUDGETS and budget != name}
            plan = replace(plan, **{**unset, name: value})  # type: ignore[arg-type] # devices check the values
    return plan


@dataclass(slots=True)
class SavedArrays:
    """An `ArrayRecord` as NumPy arrays."""

    arrays: dict[str, Array]


def export_attributes(strategy: object) -> dict[str, Any]:
    """Returns the attributes that can be saved, settings among them; functions and other objects are skipped."""
    attributes = {name: _to_saved(value) for name, value in vars(strategy).items() if is_plain(value)}
    return {name: value for name, value in attributes.items() if not name.startswith("__")}


def restore_attributes(strategy: object, attributes: Mapping[str, Any]) -> None:
    """Sets saved attributes on a strategy."""
    for name, value in attributes.items():
        setattr(strategy, name, _from_saved(value))


def is_plain(value: object) -> bool:
    """Returns whether a value can be part of a saved state."""
    if isinstance(value, ArrayRecord):
        return all(array.stype == "numpy.ndarray" for array in value.values())
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biuf"
    if type(value) is dict:
        return all(type(key) in {str, int, bool} and is_plain(entry) for key, entry in value.items())
    if type(value) in {list, tuple}:
        return all(is_plain(entry) for entry in value)  # type: ignore[attr-defined] # a list or a tuple
    return type(value) in _PLAIN_TYPES


def _to_saved(value: Any) -> Any:
    """Returns a deep copy of a value, so that the strategy's next step does not change the saved one."""
    if isinstance(value, ArrayRecord):
        return SavedArrays({name: array.numpy() for name, array in value.items()})
    if type(value) is dict:
        return {key: _to_saved(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_to_saved(entry) for entry in value)
    return value


def _from_saved(value: Any) -> Any:
    if isinstance(value, SavedArrays):
        return ArrayRecord({name: FlowerArray(array) for name, array in value.arrays.items()})
    if type(value) is dict:
        return {key: _from_saved(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_from_saved(entry) for entry in value)
    return value


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """Seeds the global generators for the block and restores them afterwards."""
    # A thread that draws meanwhile gets predictable numbers: secrets never come from these generators.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 Flower's strategies use it
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 likewise
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 likewise


class TooFewNodesError(Exception):
    """The strategy waits for more nodes than are idle."""


class StubGrid(Grid):
    """Grid that holds the ids of the nodes that may be asked now."""

    def __init__(self, node_ids: Sequence[int]) -> None:
        self._node_ids, self._num_queries = node_ids, 0

    def has_enough_for(self, strategy: Strategy) -> bool:
        """Returns whether a strategy with the usual settings would proceed without waiting for nodes."""
        settings: Any = strategy
        sample = max(
            int(len(self._node_ids) * getattr(settings, "fraction_train", 0.0)),
            getattr(settings, "min_train_nodes", 1),
        )
        return len(self._node_ids) >= max(sample, getattr(settings, "min_available_nodes", 1))

    def get_node_ids(self) -> Iterable[int]:
        self._num_queries += 1
        if self._num_queries > MAX_QUERIES:
            raise TooFewNodesError
        return list(self._node_ids)

    @property
    def run(self) -> Any:
        _reject("run")

    def set_run(self, run: Any) -> None:  # noqa: ARG002 Grid's
        _reject("set_run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # noqa: ARG002 Grid's
        _reject("push_messages")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: ARG002 Grid's
        _reject("pull_messages")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002 Grid's
        _reject("send_and_receive")


def _reject(method: str) -> NoReturn:
    raise StrategyError(f"configure_train calls grid.{method}; here it only says whom to ask, edgefl does the rest")
