"""Holds a strategy that is not ours to its contract: what it does wrong ends its run and names the method.

Goes around any strategy and changes nothing in what it decides. Every check costs the same however many devices there
are; tensors are compared by name, shape and type only.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from types import FunctionType
from typing import Any, cast

import numpy as np

from edgefl.errors import EdgeflError, JournalError, NotKeptError, StoreError, StrategyError
from edgefl.strategies.plain_orders import plain_order, plain_plan
from edgefl.types import (
    Assignment,
    Decision,
    Evaluation,
    FleetView,
    Indices,
    LocalPlan,
    Order,
    Recall,
    Role,
    SparseTensor,
    Strategy,
    Tensors,
    Update,
)

log = logging.getLogger(__name__)

MAX_OUTSTANDING = 2
"""Assignments that one device may have at a time."""
MAX_CLOSED_AT_ONCE = 1000
"""Versions that may follow each other without an update, beyond the number of updates that ever came."""
METHODS = tuple(name for name, value in vars(Strategy).items() if isinstance(value, FunctionType) and name[0] != "_")

_Look = tuple[tuple[int, ...], str]


def make_checked(
    name: str, make: Callable[[], Strategy[Any]], *, pack: Callable[[Any], object] | None = None
) -> Checked:
    """Returns the strategy that `make` gives, held to its contract.

    Args:
        name: what the run file calls it.
        make: makes it.
        pack: packs a state as a checkpoint does; None where none are written.

    Raises:
        EdgeflError: what `make` refuses, as it is.
        StrategyError: it raised something else, or what it gave is no strategy.
    """
    try:
        strategy = make()
    except EdgeflError:
        raise
    except (Exception, SystemExit) as error:
        raise StrategyError(f"strategy {name}: making it raised {_told(error, None)}") from error
    missing = [method for method in METHODS if not callable(getattr(strategy, method, None))]
    if missing:
        raise StrategyError(f"strategy {name}: a {type(strategy).__name__} has no method {missing[0]}")
    return Checked(strategy=strategy, name=name, pack=pack)


@dataclass(slots=True, kw_only=True)
class Checked:
    """Implements `Strategy` with another one. It remembers one run, so every run needs its own.

    Attributes:
        strategy: who decides.
        name: what the run file calls it.
        pack: raises `JournalError` for a state that cannot be saved; tried on the first version's, on
            that after it, and on the one after each power of two: a few dozen times in the longest run.
        calling, num_calls: the method that runs, empty for none, and how many did so far; other threads look at them.
    """

    strategy: Strategy[Any]
    name: str
    pack: Callable[[Any], object] | None = None
    calling: str = field(default="", init=False)
    num_calls: int = field(default=0, init=False)
    _state: type[Any] | None = field(default=None, init=False)
    _looks: dict[str, _Look] = field(default_factory=dict, init=False)
    _given: set[str] = field(default_factory=set, init=False)
    _version: int = field(default=-1, init=False)
    _num_received: int = field(default=0, init=False)
    _num_closed: int = field(default=0, init=False)

    @property
    def versions_per_round(self) -> int | None:
        count: Any = getattr(self.strategy, "versions_per_round", 1)
        if count is not None and not (_is_int(count) and count >= 1):
            raise self._broken("versions_per_round", f"is {count!r}, it must be a whole number above 0 or None")
        return None if count is None else int(count)

    @property
    def has_nodes(self) -> bool:
        return bool(getattr(self.strategy, "has_nodes", False))

    @property
    def goes_on_alone(self) -> bool:
        return bool(getattr(self.strategy, "goes_on_alone", False))

    def resumed(self, state: Any) -> Any:
        if not hasattr(self.strategy, "resumed"):
            return self._checked_state("resumed", state)  # what is out is in nobody's `busy`, and so lost
        return self._checked_state("resumed", self._call("resumed", state))

    def bytes_per_device(self, model_bytes: int) -> int:
        if not hasattr(self.strategy, "bytes_per_device"):
            return 0
        count = self._call("bytes_per_device", model_bytes)
        self._require(_is_int(count), "bytes_per_device", count, "a whole number")
        return int(count)

    def init(self, model: Tensors) -> Any:
        state = self._call("init", model)
        self._require(is_dataclass(state) and not isinstance(state, type), "init", state, "a dataclass")
        self._state, self._looks = type(state), {name: _look(tensor) for name, tensor in model.items()}
        self._check_savable("init", state)
        return state

    def assign(self, state: Any, view: FleetView) -> tuple[Any, Decision]:
        self._num_closed = 0
        answer = self._call("assign", state, view)
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        self._require(is_pair, "assign", answer, "a pair of state and Decision")
        state, decision = answer
        self._require(isinstance(decision, Decision), "assign", decision, "a Decision after the state")
        self._require(isinstance(decision.orders, Sequence), "assign", decision.orders, "a tuple of orders")
        self._check_wake(decision.next_wake_s)
        if isinstance(decision.next_wake_s, np.generic):  # a float32 would round the run's time as well
            decision = replace(decision, next_wake_s=float(decision.next_wake_s))
        if decision.orders:
            decision = replace(decision, orders=self._checked_orders(decision.orders, view))
        return self._checked_state("assign", state), decision

    def receive(self, state: Any, update: Update) -> Any:
        self._num_closed, self._num_received = 0, self._num_received + 1
        return self._checked_state("receive", self._call("receive", state, update))

    def ready(self, state: Any, view: FleetView) -> bool:
        answer = self._call("ready", state, view)
        self._require(isinstance(answer, bool | np.bool_), "ready", answer, "True or False")
        return bool(answer)

    def aggregate(self, state: Any) -> Any:
        before, self._num_closed = self.version(state), self._num_closed + 1
        if self._num_closed > MAX_CLOSED_AT_ONCE + self._num_received:
            raise self._broken("ready", f"said True {self._num_closed} times, and no update came in between")
        state = self._checked_state("aggregate", self._call("aggregate", state))
        if (after := self.version(state)) <= before:
            raise self._broken("aggregate", f"left the version at {after}, it must go up")
        if after.bit_length() > max(before, 0).bit_length():
            self._check_savable("aggregate", state)
        return state

    def finish(self, state: Any) -> Any:
        if not hasattr(self.strategy, "finish"):
            return state
        return self._checked_state("finish", self._call("finish", state))

    def check_last(self, state: Any) -> None:
        """Tries to save the state that a run ends with, as a live one does.

        Raises:
            StrategyError: it cannot be saved.
        """
        self._check_savable("receive, aggregate or finish", state)

    def model(self, state: Any) -> Tensors:
        return self._checked_model("model", self._call("model", state))

    def node_models(self, state: Any) -> Mapping[str, Tensors]:
        if not hasattr(self.strategy, "node_models"):
            return {}
        models = self._call("node_models", state)
        is_right = isinstance(models, Mapping) and all(isinstance(device_id, str) for device_id in models)
        self._require(is_right, "node_models", models, "models by device id")
        return _Models(models, lambda model: self._checked_model("node_models", model))

    def facts(self, state: Any) -> Mapping[str, float]:
        if not hasattr(self.strategy, "facts"):
            return {}
        facts = self._call("facts", state)
        self._require(isinstance(facts, Mapping), "facts", facts, "numbers by name")
        for name, value in facts.items():
            self._require(isinstance(name, str), "facts", name, "numbers by name")
            self._require(_is_number(value), "facts", value, f"a number for {name!r}")
        return {name: float(value) for name, value in facts.items()}

    def version(self, state: Any) -> int:
        version = self._call("version", state)
        self._require(_is_int(version), "version", version, "a whole number")
        if version < self._version:
            raise self._broken("version", f"went down from {self._version} to {version}")
        self._version = int(version)
        return self._version

    def used(self, state: Any) -> Sequence[str]:
        used = self._call("used", state)
        is_right = isinstance(used, Sequence) and not isinstance(used, str) and all(isinstance(x, str) for x in used)
        self._require(is_right, "used", used, "a tuple of assignment ids")
        return cast("Sequence[str]", used)

    def changed(self, state: Any, since: int) -> Indices | None:
        changed = self._call("changed", state, since)
        self._require(
            changed is None or isinstance(changed, Mapping), "changed", changed, "indices by tensor, or None"
        )
        return cast("Indices | None", changed)

    def _call(self, method: str, *arguments: Any) -> Any:
        self.calling, self.num_calls = method, self.num_calls + 1
        try:
            return getattr(self.strategy, method)(*arguments)
        except NotKeptError as error:
            wanted = "copy what is needed for longer than the next version"
            raise self._broken(method, f"looked at tensors that are not kept any more: {error}; {wanted}") from error
        except (StoreError, JournalError):
            raise  # an update is read from the journal when it is looked at: a disk that fails is no fault of theirs
        except StrategyError as error:
            if error.__cause__ is not None:
                log.exception("strategy %s: %s", self.name, method)
            if str(error).startswith("strategy "):
                raise  # a base class of ours has said whose it is, and in which method
            raise StrategyError(f"strategy {self.name}: {error}") from error
        except (
            Exception,
            SystemExit,
        ) as error:  # code of users: its run ends, and whoever wrote it needs the traceback
            log.exception("strategy %s: %s raised", self.name, method)
            raise self._broken(method, f"raised {_told(error, self.strategy)}") from error
        finally:
            self.calling = ""

    def _broken(self, method: str, what: str) -> StrategyError:
        return StrategyError(f"strategy {self.name}: {method} {what}")

    def _require(self, is_right: bool, method: str, value: object, wanted: str) -> None:
        if not is_right:
            raise self._broken(method, f"returned {_short(value)}, it must return {wanted}")

    def _checked_state(self, method: str, state: Any) -> Any:
        self._state = self._state or type(state)
        self._require(type(state) is self._state, method, state, f"the state, {_short_class(self._state)}")
        return state

    def _checked_model(self, method: str, model: Any) -> Tensors:
        self._require(isinstance(model, Mapping), method, model, "tensors by name")
        for name, tensor in model.items():
            is_tensor = isinstance(tensor, np.ndarray | SparseTensor)
            self._require(is_tensor, method, tensor, f"an array for tensor {name!r}")
        found: dict[str, _Look] = {name: _look(tensor) for name, tensor in model.items()}
        # After a restart the state comes from a checkpoint, and the first model says how it looks.
        self._looks = self._looks or found
        if found != self._looks:
            raise self._broken(method, self._misfit(found))
        return cast("Tensors", model)

    def _check_savable(self, method: str, state: Any) -> None:
        try:
            if self.pack is not None:
                self.pack(state)
        except JournalError as error:
            raise self._broken(method, f"returned a state that cannot be saved: {error}") from error

    def _misfit(self, found: Mapping[str, _Look]) -> str:
        """Returns the first difference between a model and the one that `init` was given."""
        for name, (shape, kind) in self._looks.items():
            if name not in found:
                return f"returned a model without tensor {name!r}"
            if found[name] != (shape, kind):
                return f"returned tensor {name!r} as {found[name][1]} {found[name][0]}, it must be {kind} {shape}"
        return f"returned a tensor {next(iter(set(found) - set(self._looks)))!r} that the task does not have"

    def _check_wake(self, next_wake_s: Any) -> None:
        if not _is_number(next_wake_s) or not math.isfinite(next_wake_s) or next_wake_s < 0:
            raise self._broken("assign", f"returned next_wake_s = {next_wake_s!r}, it must be seconds of 0 or more")

    def _checked_orders(self, orders: Sequence[Order], view: FleetView) -> tuple[Order, ...]:
        devices, busy, new, plans = view.devices, view.busy, dict[str, int](), dict[int, LocalPlan]()
        plain = []
        for order in orders:
            is_order = isinstance(order, Assignment | Evaluation | Recall)
            self._require(is_order, "assign", order, "Assignments, Evaluations and Recalls as orders")
            order = self._plain(order, plans)  # noqa: PLW2901 the same order, in numbers that can be written down
            plain.append(order)
            if isinstance(order, Recall):
                continue  # its device may have gone meanwhile
            name, device_id = order.assignment_id, order.device_id
            if device_id not in devices:
                raise self._broken("assign", f"gave work to device {device_id!r}, which is not there")
            if name in self._given:
                raise self._broken("assign", f"used assignment id {name!r} a second time")
            self._given.add(name)
            if isinstance(order, Assignment):
                new[device_id] = new.get(device_id, 0) + 1
                self._check_assignment(order, devices[device_id].role, len(busy.get(device_id, ())) + new[device_id])
        return tuple(plain)

    def _plain(self, order: Order, plans: dict[int, LocalPlan]) -> Order:
        """Returns an order as `plain_order` does; a plan that many orders share is looked at once."""
        try:
            order = plain_order(order)
            if not (isinstance(order, Assignment) and isinstance(order.plan, LocalPlan)):
                return order
            plan = plans.get(id(order.plan))
            if plan is None:
                plan = plans[id(order.plan)] = plain_plan(order.plan)
        except ValueError as error:
            raise self._broken(
                "assign", f"gave device {order.device_id!r} what cannot be written down: {error}"
            ) from error
        return order if plan is order.plan else replace(order, plan=plan)

    def _check_assignment(self, order: Assignment, role: Role, num_outstanding: int) -> None:
        what, plan = f"gave device {order.device_id!r}", order.plan
        if role != Role.TRAINER:
            raise self._broken("assign", f"{what} training to do, but it is an {role}")
        if num_outstanding > MAX_OUTSTANDING:
            raise self._broken("assign", f"{what} {num_outstanding} assignments at a time, {MAX_OUTSTANDING} at most")
        if not isinstance(plan, LocalPlan):
            raise self._broken("assign", f"{what} the plan {_short(plan)}, it must be a LocalPlan")
        if sum(budget is not None for budget in (plan.iterations, plan.epochs, plan.seconds)) != 1:
            raise self._broken("assign", f"{what} a plan that needs exactly one of iterations, epochs and seconds")


class _Models(Mapping[str, Tensors]):
    """Models by device. Each is looked at when it is asked for: there are as many as devices."""

    __slots__ = ("_look_at", "_models")

    def __init__(self, models: Mapping[str, Any], look_at: Callable[[Any], Tensors]) -> None:
        self._models, self._look_at = models, look_at

    def __getitem__(self, device_id: str) -> Tensors:
        return self._look_at(self._models[device_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _look(tensor: Any) -> _Look:
    kind = tensor.values.dtype if isinstance(tensor, SparseTensor) else tensor.dtype
    return tuple(tensor.shape), str(kind)


def _short(value: object) -> str:
    """Returns a value as a message shows it: small ones themselves, others by their class."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.60}"
    return _short_class(type(value))


def _short_class(kind: type[Any]) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"


def _told(error: BaseException, strategy: object) -> str:
    """Returns class and text of an error, and where in the strategy's own file it happened."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        file = inspect.getsourcefile(type(strategy))
    except TypeError:
        file = None
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{text} (in {own[-1].name}, line {own[-1].lineno})" if own else text
