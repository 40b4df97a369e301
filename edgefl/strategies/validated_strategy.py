"""Validates a user's strategy against its contract; a violation ends the run and names the method.

The wrapper does not change the strategy's decisions. The cost of a check is independent of the number of devices;
tensors are compared by name, shape and type only.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

from edgefl.core.errors import EdgeflError, JournalError, NotKeptError, StoreError, StrategyError
from edgefl.core.types import (
    Array,
    ComputedMapping,
    Decision,
    EvaluateInstruction,
    FinishEarlyInstruction,
    FleetView,
    Indices,
    Instruction,
    Role,
    Scalar,
    SparseTensor,
    Strategy,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
)

log = logging.getLogger(__name__)

MAX_OUTSTANDING = 2
"""Maximum of assignments in flight per device."""
MAX_IDLE_AGGREGATIONS = 1000
"""Maximum of consecutive versions without an update, beyond the number of updates received."""
REQUIRED_METHODS = ("init", "assign", "receive", "ready", "aggregate", "model", "version", "used", "changed")

MAX_ID_BYTES = 255
"""Maximum id length in a journal record."""

T = TypeVar("T")
_TensorLayout = tuple[tuple[int, ...], str]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_FIELD_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", _is_int),
    "float": ("a finite number", lambda value: _is_number(value) and math.isfinite(value)),
}
"""Values that the journal stores, by a field's annotation, as text and predicate; others have types of edgefl."""


def make_validated_strategy(
    name: str, make: Callable[[], Strategy[Any]], *, pack: Callable[[Any], object] | None = None
) -> ValidatedStrategy:
    """Returns the strategy of `make`, validated against the contract.

    Args:
        name: in the run file.
        make: constructs it.
        pack: serialises a state as a checkpoint does; None where none are written.

    Raises:
        EdgeflError: raised by `make`, unchanged.
        StrategyError: `make` raised another error, or returned no strategy.
    """
    try:
        strategy = make()
    except EdgeflError:
        raise
    except (Exception, SystemExit) as error:
        raise StrategyError(f"strategy {name}: making it raised {_format_error(error, None)}") from error
    missing = [method for method in REQUIRED_METHODS if not callable(getattr(strategy, method, None))]
    if missing:
        raise StrategyError(f"strategy {name}: a {type(strategy).__name__} has no method {missing[0]}")
    return ValidatedStrategy(strategy=strategy, name=name, pack=pack)


@dataclass(slots=True, kw_only=True)
class ValidatedStrategy(Strategy[Any]):
    """Implements `Strategy` around another one; it holds state of one run, so every run needs its own.

    Attributes:
        strategy: the wrapped one.
        name: in the run file.
        pack: raises `JournalError` for a state that cannot be saved; called for the first version, the next, and the
            one after each power of two: a few dozen times in the longest run.
        calling, num_calls: the running method, empty for none, and the number of calls so far; read by other threads.
    """

    strategy: Strategy[Any]
    name: str
    pack: Callable[[Any], object] | None = None
    calling: str = field(default="", init=False)
    num_calls: int = field(default=0, init=False)
    _state_class: type[Any] | None = field(default=None, init=False)
    _layouts: dict[str, _TensorLayout] = field(default_factory=dict, init=False)
    _assignment_ids: set[str] = field(default_factory=set, init=False)
    _version: int = field(default=-1, init=False)
    _num_received: int = field(default=0, init=False)
    _num_aggregated: int = field(default=0, init=False)

    @property
    def versions_per_round(self) -> int | None:
        count: Any = getattr(self.strategy, "versions_per_round", 1)
        if count is not None and not (_is_int(count) and count >= 1):
            raise self._make_error("versions_per_round", f"is {count!r}, it must be a whole number above 0 or None")
        return None if count is None else int(count)

    @property
    def has_nodes(self) -> bool:
        return bool(getattr(self.strategy, "has_nodes", False))

    @property
    def is_autonomous(self) -> bool:
        return bool(getattr(self.strategy, "is_autonomous", False))

    @property
    def root_examples(self) -> int:
        return self._get_count("root_examples")

    @property
    def needed_updates(self) -> int:
        return self._get_count("needed_updates")

    def _get_count(self, name: str) -> int:
        count: Any = getattr(self.strategy, name, 0)
        if not _is_int(count) or count < 0:
            raise self._make_error(name, f"is {count!r}, it must be a whole number of 0 or more")
        return int(count)

    def halve_learning_rate(self, state: Any) -> Any:
        halved = self._call("halve_learning_rate", state)
        return None if halved is None else self._validate_state("halve_learning_rate", halved)

    def restore_model(self, state: Any, model: Mapping[str, Array]) -> Any:
        restored = self._call("restore_model", state, model)
        return None if restored is None else self._validate_state("restore_model", restored)

    def resumed(self, state: Any) -> Any:
        return self._validate_state("resumed", self._call("resumed", state))

    def bytes_per_device(self, model_bytes: int) -> int:
        return self._count_bytes("bytes_per_device", model_bytes)

    def bytes_per_message(self, model_bytes: int) -> int:
        return self._count_bytes("bytes_per_message", model_bytes)

    def _count_bytes(self, method: str, model_bytes: int) -> int:
        count = self._call(method, model_bytes)
        self._require(_is_int(count), method, count, "a whole number")
        return int(count)

    def init(self, model: Tensors) -> Any:
        state = self._call("init", model)
        self._require(is_dataclass(state) and not isinstance(state, type), "init", state, "a dataclass")
        self._state_class, self._layouts = (
            type(state),
            {name: _describe_tensor(tensor) for name, tensor in model.items()},
        )
        self._check_savable("init", state)
        return state

    def assign(self, state: Any, view: FleetView) -> tuple[Any, Decision]:
        self._num_aggregated = 0
        result = self._call("assign", state, view)
        is_pair = isinstance(result, tuple) and len(result) == 2
        self._require(is_pair, "assign", result, "a pair of state and Decision")
        state, decision = result
        self._require(isinstance(decision, Decision), "assign", decision, "a Decision after the state")
        self._require(
            isinstance(decision.instructions, Sequence), "assign", decision.instructions, "a tuple of instructions"
        )
        self._check_wake_time(decision.next_wake_s)
        if isinstance(decision.next_wake_s, np.generic):  # a float32 would round the run's time as well
            decision = replace(decision, next_wake_s=float(decision.next_wake_s))
        if decision.instructions:
            decision = replace(decision, instructions=self._validate_instructions(decision.instructions, view))
        return self._validate_state("assign", state), decision

    def receive(self, state: Any, update: Update) -> Any:
        self._num_aggregated, self._num_received = 0, self._num_received + 1
        return self._validate_state("receive", self._call("receive", state, update))

    def ready(self, state: Any, view: FleetView) -> bool:
        result = self._call("ready", state, view)
        self._require(isinstance(result, bool | np.bool_), "ready", result, "True or False")
        return bool(result)

    def aggregate(self, state: Any) -> Any:
        version_before, self._num_aggregated = self.version(state), self._num_aggregated + 1
        if self._num_aggregated > MAX_IDLE_AGGREGATIONS + self._num_received:
            raise self._make_error("ready", f"said True {self._num_aggregated} times, and no update came in between")
        state = self._validate_state("aggregate", self._call("aggregate", state))
        if (version_after := self.version(state)) <= version_before:
            raise self._make_error("aggregate", f"left the version at {version_after}, it must go up")
        if version_after.bit_length() > max(version_before, 0).bit_length():
            self._check_savable("aggregate", state)
        return state

    def finish(self, state: Any) -> Any:
        return self._validate_state("finish", self._call("finish", state))

    def check_final_state(self, state: Any) -> None:
        """Checks that the final state of a run can be saved, as a live run does.

        Raises:
            StrategyError: it cannot be saved.
        """
        self._check_savable("receive, aggregate or finish", state)

    def model(self, state: Any) -> Tensors:
        return self._validate_model("model", self._call("model", state))

    def node_models(self, state: Any) -> Mapping[str, Tensors]:
        models = self._call("node_models", state)
        is_valid = isinstance(models, Mapping) and all(isinstance(device_id, str) for device_id in models)
        self._require(is_valid, "node_models", models, "models by device id")
        # Each is validated when it is read: there are as many as devices.
        return ComputedMapping(models, lambda name: self._validate_model("node_models", models[name]))

    def facts(self, state: Any) -> Mapping[str, float]:
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
            raise self._make_error("version", f"went down from {self._version} to {version}")
        self._version = int(version)
        return self._version

    def used(self, state: Any) -> Sequence[str]:
        assignment_ids = self._call("used", state)
        is_valid = (
            isinstance(assignment_ids, Sequence)
            and not isinstance(assignment_ids, str)
            and all(isinstance(x, str) for x in assignment_ids)
        )
        self._require(is_valid, "used", assignment_ids, "a tuple of assignment ids")
        return cast("Sequence[str]", assignment_ids)

    def changed(self, state: Any, since: int) -> Indices | None:
        indices = self._call("changed", state, since)
        self._require(
            indices is None or isinstance(indices, Mapping), "changed", indices, "indices by tensor, or None"
        )
        return cast("Indices | None", indices)

    def _call(self, method: str, *arguments: Any) -> Any:
        self.calling, self.num_calls = method, self.num_calls + 1
        try:
            if (own := getattr(self.strategy, method, None)) is None:
                return getattr(Strategy, method)(self.strategy, *arguments)
            return own(*arguments)
        except NotKeptError as error:
            advice = "copy what is needed for longer than the next version"
            raise self._make_error(
                method, f"looked at tensors that are not kept any more: {error}; {advice}"
            ) from error
        except (StoreError, JournalError):
            raise  # an update's first access reads the journal: a failing disk is not the strategy's fault
        except StrategyError as error:
            if error.__cause__ is not None:
                log.exception("strategy %s: %s", self.name, method)
            if str(error).startswith("strategy "):
                raise  # a base class of edgefl has named the strategy and the method already
            raise StrategyError(f"strategy {self.name}: {error}") from error
        except (
            Exception,
            SystemExit,
        ) as error:  # user code: its run ends, and its author needs the traceback
            log.exception("strategy %s: %s raised", self.name, method)
            raise self._make_error(method, f"raised {_format_error(error, self.strategy)}") from error
        finally:
            self.calling = ""

    def _make_error(self, method: str, fault: str) -> StrategyError:
        return StrategyError(f"strategy {self.name}: {method} {fault}")

    def _require(self, is_valid: bool, method: str, value: object, expected: str) -> None:
        if not is_valid:
            raise self._make_error(method, f"returned {_format_value(value)}, it must return {expected}")

    def _validate_state(self, method: str, state: Any) -> Any:
        self._state_class = self._state_class or type(state)
        self._require(
            type(state) is self._state_class, method, state, f"the state, {_format_class(self._state_class)}"
        )
        return state

    def _validate_model(self, method: str, model: Any) -> Tensors:
        self._require(isinstance(model, Mapping), method, model, "tensors by name")
        for name, tensor in model.items():
            is_tensor = isinstance(tensor, np.ndarray | SparseTensor)
            self._require(is_tensor, method, tensor, f"an array for tensor {name!r}")
        layouts: dict[str, _TensorLayout] = {name: _describe_tensor(tensor) for name, tensor in model.items()}
        # After a restart the state comes from a checkpoint, and the first model defines the layout.
        self._layouts = self._layouts or layouts
        if layouts != self._layouts:
            raise self._make_error(method, self._find_mismatch(layouts))
        return cast("Tensors", model)

    def _check_savable(self, method: str, state: Any) -> None:
        try:
            if self.pack is not None:
                self.pack(state)
        except JournalError as error:
            raise self._make_error(method, f"returned a state that cannot be saved: {error}") from error

    def _find_mismatch(self, found: Mapping[str, _TensorLayout]) -> str:
        """Returns the first difference between a model and the one passed to `init`."""
        for name, (shape, kind) in self._layouts.items():
            if name not in found:
                return f"returned a model without tensor {name!r}"
            if found[name] != (shape, kind):
                return f"returned tensor {name!r} as {found[name][1]} {found[name][0]}, it must be {kind} {shape}"
        return f"returned a tensor {next(iter(set(found) - set(self._layouts)))!r} that the task does not have"

    def _check_wake_time(self, next_wake_s: Any) -> None:
        if not _is_number(next_wake_s) or not math.isfinite(next_wake_s) or next_wake_s < 0:
            raise self._make_error(
                "assign", f"returned next_wake_s = {next_wake_s!r}, it must be seconds of 0 or more"
            )

    def _validate_instructions(self, instructions: Sequence[Instruction], view: FleetView) -> tuple[Instruction, ...]:
        devices, busy, num_new, plans = view.devices, view.busy, dict[str, int](), dict[int, TrainConfig]()
        plain_instructions = []
        for instruction in instructions:
            is_instruction = isinstance(instruction, TrainInstruction | EvaluateInstruction | FinishEarlyInstruction)
            self._require(is_instruction, "assign", instruction, "Train-, Evaluate- or FinishEarlyInstructions")
            instruction = self._to_plain(instruction, plans)  # noqa: PLW2901 the same instruction, in serialisable numbers
            plain_instructions.append(instruction)
            if isinstance(instruction, FinishEarlyInstruction):
                continue  # its device may have left meanwhile
            name, device_id = instruction.assignment_id, instruction.device_id
            if device_id not in devices:
                raise self._make_error("assign", f"gave work to device {device_id!r}, which is not there")
            if name in self._assignment_ids:
                raise self._make_error("assign", f"used assignment id {name!r} a second time")
            self._assignment_ids.add(name)
            if isinstance(instruction, TrainInstruction):
                num_new[device_id] = num_new.get(device_id, 0) + 1
                self._check_assignment(
                    instruction, devices[device_id].role, len(busy.get(device_id, ())) + num_new[device_id]
                )
        return tuple(plain_instructions)

    def _to_plain(self, instruction: Instruction, plans: dict[int, TrainConfig]) -> Instruction:
        """Returns an instruction with Python's numbers for NumPy's; a plan shared by many is converted once."""
        try:
            _check_assignment_id(instruction.assignment_id)
            instruction = _to_plain_fields(instruction, "the order's ")
            if not (isinstance(instruction, TrainInstruction) and isinstance(instruction.plan, TrainConfig)):
                return instruction
            plan = plans.get(id(instruction.plan))
            if plan is None:
                plan = plans[id(instruction.plan)] = _to_plain_train_config(instruction.plan)
        except ValueError as error:
            raise self._make_error(
                "assign", f"gave device {instruction.device_id!r} what cannot be written down: {error}"
            ) from error
        return instruction if plan is instruction.plan else replace(instruction, plan=plan)

    def _check_assignment(self, instruction: TrainInstruction, role: Role, num_outstanding: int) -> None:
        prefix, plan = f"gave device {instruction.device_id!r}", instruction.plan
        if role != Role.TRAINER:
            raise self._make_error("assign", f"{prefix} training to do, but it is an {role}")
        if num_outstanding > MAX_OUTSTANDING:
            raise self._make_error(
                "assign", f"{prefix} {num_outstanding} assignments at a time, {MAX_OUTSTANDING} at most"
            )
        if not isinstance(plan, TrainConfig):
            raise self._make_error("assign", f"{prefix} the plan {_format_value(plan)}, it must be a TrainConfig")
        if sum(budget is not None for budget in (plan.iterations, plan.epochs, plan.seconds)) != 1:
            raise self._make_error(
                "assign", f"{prefix} a plan that needs exactly one of iterations, epochs and seconds"
            )


def _describe_tensor(tensor: Any) -> _TensorLayout:
    kind = tensor.values.dtype if isinstance(tensor, SparseTensor) else tensor.dtype
    return tuple(tensor.shape), str(kind)


def _format_value(value: object) -> str:
    """Returns a value for an error message: small ones themselves, others by their class."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.60}"
    return _format_class(type(value))


def _format_class(cls: type[Any]) -> str:
    return f"{'an' if cls.__name__[0] in 'aeiouAEIOU' else 'a'} {cls.__name__}"


def _format_error(error: BaseException, strategy: object) -> str:
    """Returns class and text of an error, and its line in the strategy's own file."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        file = inspect.getsourcefile(type(strategy))
    except TypeError:
        file = None
    own_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{text} (in {own_frames[-1].name}, line {own_frames[-1].lineno})" if own_frames else text


def _check_assignment_id(assignment_id: object) -> None:
    if not isinstance(assignment_id, str) or not assignment_id:
        raise ValueError(_format_mismatch("the assignment id", assignment_id, "a text"))
    size = len(assignment_id.encode())  # a lone surrogate raises a `ValueError` itself
    if size > MAX_ID_BYTES:
        raise ValueError(
            f"the assignment id {assignment_id[:20]!r}… has {size} bytes, at most {MAX_ID_BYTES} are possible"
        )


def _to_plain_train_config(plan: TrainConfig) -> TrainConfig:
    plan = _to_plain_fields(plan, "the plan's ")
    options = {name: _to_plain_scalar(value) for name, value in plan.options.items()}
    for name, value in options.items():
        is_scalar = isinstance(value, str | bool) or (_is_number(value) and math.isfinite(cast("float", value)))
        if not (isinstance(name, str) and is_scalar):
            expectation = "a finite number, text, True or False"
            raise ValueError(_format_mismatch(f"the plan's options[{name!r}]", value, expectation))
    if any(options[name] is not value for name, value in plan.options.items()):
        plan = replace(plan, options=cast("Mapping[str, Scalar]", options))
    if plan.node is None:
        return plan
    node = _to_plain_fields(plan.node, "the plan's node: ")
    return plan if node is plan.node else replace(plan, node=node)


def _to_plain_fields(value: T, prefix: str) -> T:
    """Returns a dataclass with plain texts and numbers, the same object where it has them, or raises `ValueError`."""
    replacements = {}
    for name, expectation, is_valid, is_optional in _get_field_checks(cast("Any", type(value))):
        field_value = getattr(value, name)
        plain_value = _to_plain_scalar(field_value)
        if not (is_valid(plain_value) or (is_optional and plain_value is None)):
            raise ValueError(_format_mismatch(prefix + name, field_value, expectation))
        if plain_value is not field_value:
            replacements[name] = plain_value
    return cast("T", replace(cast("Any", value), **replacements)) if replacements else value


@cache
def _get_field_checks(cls: type[Any]) -> tuple[tuple[str, str, Callable[[Any], bool], bool], ...]:
    checks = []
    for item in fields(cls):
        kind, _, rest = str(item.type).partition(" | ")
        if kind in _FIELD_CHECKS and rest in {"", "None"}:
            expectation, is_valid = _FIELD_CHECKS[kind]
            checks.append((item.name, f"{expectation} or None" if rest else expectation, is_valid, bool(rest)))
    return tuple(checks)


def _to_plain_scalar(value: object) -> object:
    is_numpy = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return cast("np.generic", value).item() if is_numpy else value


def _format_mismatch(name: str, value: object, expected: str) -> str:
    return f"{name} = {' '.join(repr(value).split()):.60}, it must be {expected}"
