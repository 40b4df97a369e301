"""Conversion of instructions to plain numbers and texts, as the journal and devices need them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

from edgefl.core.types import Instruction, Scalar, TrainConfig

MAX_ID_BYTES = 255
"""Maximum id length in a journal record."""

T = TypeVar("T")

_INTEGER_TYPES: tuple[type, ...] = (int,)
_NUMBER_TYPES: tuple[type, ...] = (int, float)
_FIELD_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "str | None": ("a text or None", lambda value: value is None or isinstance(value, str)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: _is_finite(value, _INTEGER_TYPES)),
    "int | None": ("a whole number or None", lambda value: value is None or _is_finite(value, _INTEGER_TYPES)),
    "float": ("a finite number", lambda value: _is_finite(value, _NUMBER_TYPES)),
    "float | None": ("a finite number or None", lambda value: value is None or _is_finite(value, _NUMBER_TYPES)),
}
"""Valid values by a field's annotation, as text and predicate; other fields have types of edgefl."""


def to_plain_instruction(instruction: Instruction) -> Instruction:
    """Returns an instruction with Python's numbers for NumPy's; the same object where it has none.

    Raises:
        ValueError: a value that the journal cannot store, or a too long id; the text says which, and what is right.
    """
    _check_assignment_id(instruction.assignment_id)
    return _to_plain_fields(instruction, "the order's ")


def to_plain_train_config(plan: TrainConfig) -> TrainConfig:
    """Returns a plan converted as by `to_plain_instruction`.

    Raises:
        ValueError: as `to_plain_instruction`.
    """
    plan = _to_plain_fields(plan, "the plan's ")
    if plan.options:
        options = {name: _to_plain(value) for name, value in plan.options.items()}
        for name, value in options.items():
            is_scalar = isinstance(value, str | bool) or _is_finite(value, _NUMBER_TYPES)
            if not (isinstance(name, str) and is_scalar):
                raise ValueError(
                    _format_error(f"the plan's options[{name!r}]", value, "a finite number, text, True or False")
                )
        if any(options[name] is not value for name, value in plan.options.items()):
            plan = replace(plan, options=cast("Mapping[str, Scalar]", options))
    return plan if plan.node is None else _with_plain_gossip_config(plan)


def _with_plain_gossip_config(plan: TrainConfig) -> TrainConfig:
    assert plan.node is not None
    node = _to_plain_fields(plan.node, "the plan's node: ")
    return plan if node is plan.node else replace(plan, node=node)


def _check_assignment_id(assignment_id: object) -> None:
    if not isinstance(assignment_id, str) or not assignment_id:
        raise ValueError(_format_error("the assignment id", assignment_id, "a text"))
    size = len(assignment_id.encode())  # a lone surrogate raises a `ValueError` itself
    if size > MAX_ID_BYTES:
        raise ValueError(
            f"the assignment id {assignment_id[:20]!r}… has {size} bytes, at most {MAX_ID_BYTES} are possible"
        )


def _to_plain_fields(value: T, prefix: str) -> T:
    """Returns a dataclass with plain texts and numbers, or raises for the first invalid one."""
    replacements = {}
    for name, expectation, is_valid in _get_field_checks(cast("Any", type(value))):
        field_value = getattr(value, name)
        plain_value = _to_plain(field_value)
        if not is_valid(plain_value):
            raise ValueError(_format_error(prefix + name, field_value, expectation))
        if plain_value is not field_value:
            replacements[name] = plain_value
    return cast("T", replace(cast("Any", value), **replacements)) if replacements else value


@cache
def _get_field_checks(cls: type[Any]) -> tuple[tuple[str, str, Callable[[Any], bool]], ...]:
    return tuple((item.name, *_FIELD_CHECKS[str(item.type)]) for item in fields(cls) if item.type in _FIELD_CHECKS)


def _to_plain(value: object) -> object:
    is_numpy = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return cast("np.generic", value).item() if is_numpy else value


def _is_finite(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool) and math.isfinite(cast("float", value))


def _format_error(name: str, value: object, expected: str) -> str:
    return f"{name} = {' '.join(repr(value).split()):.60}, it must be {expected}"
