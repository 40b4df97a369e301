"""Orders in plain numbers and texts: what a journal keeps and a device reads, whatever a strategy computed with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

from edgefl.types import LocalPlan, Order, Scalar

MAX_ID_BYTES = 255
"""What a journal's record has room for."""

T = TypeVar("T")

_WHOLE: tuple[type, ...] = (int,)
_NUMBER: tuple[type, ...] = (int, float)
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "str | None": ("a text or None", lambda value: value is None or isinstance(value, str)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: _is_finite(value, _WHOLE)),
    "int | None": ("a whole number or None", lambda value: value is None or _is_finite(value, _WHOLE)),
    "float": ("a finite number", lambda value: _is_finite(value, _NUMBER)),
    "float | None": ("a finite number or None", lambda value: value is None or _is_finite(value, _NUMBER)),
}
"""What may stand in a field, by its annotation, in words and as a question; other fields have values of our own."""


def plain_order(order: Order) -> Order:
    """Returns an order with Python's numbers in the place of NumPy's; the same object where it has none.

    Raises:
        ValueError: a value that no journal keeps, or an id that is too long; the text says which, and what is right.
    """
    _check_id(order.assignment_id)
    return _plain_fields(order, "the order's ")


def plain_plan(plan: LocalPlan) -> LocalPlan:
    """Returns a plan as `plain_order` does an order.

    Raises:
        ValueError: as `plain_order`.
    """
    plan = _plain_fields(plan, "the plan's ")
    if plan.options:
        options = {name: _plain(value) for name, value in plan.options.items()}
        for name, value in options.items():
            is_scalar = isinstance(value, str | bool) or _is_finite(value, _NUMBER)
            if not (isinstance(name, str) and is_scalar):
                raise ValueError(
                    _told(f"the plan's options[{name!r}]", value, "a finite number, text, True or False")
                )
        if any(options[name] is not value for name, value in plan.options.items()):
            plan = replace(plan, options=cast("Mapping[str, Scalar]", options))
    return plan if plan.node is None else _with_node(plan)


def _with_node(plan: LocalPlan) -> LocalPlan:
    assert plan.node is not None
    node = _plain_fields(plan.node, "the plan's node: ")
    return plan if node is plan.node else replace(plan, node=node)


def _check_id(assignment_id: object) -> None:
    if not isinstance(assignment_id, str) or not assignment_id:
        raise ValueError(_told("the assignment id", assignment_id, "a text"))
    size = len(assignment_id.encode())  # half a character is a `ValueError` of its own
    if size > MAX_ID_BYTES:
        raise ValueError(
            f"the assignment id {assignment_id[:20]!r}… has {size} bytes, at most {MAX_ID_BYTES} are possible"
        )


def _plain_fields(value: T, what: str) -> T:
    """Returns a dataclass whose texts and numbers are plain, or raises for the first that cannot be."""
    changed = {}
    for name, wanted, is_right in _rules(cast("Any", type(value))):
        found = getattr(value, name)
        plain = _plain(found)
        if not is_right(plain):
            raise ValueError(_told(what + name, found, wanted))
        if plain is not found:
            changed[name] = plain
    return cast("T", replace(cast("Any", value), **changed)) if changed else value


@cache
def _rules(kind: type[Any]) -> tuple[tuple[str, str, Callable[[Any], bool]], ...]:
    return tuple((each.name, *_KINDS[str(each.type)]) for each in fields(kind) if each.type in _KINDS)


def _plain(value: object) -> object:
    is_numpy = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return cast("np.generic", value).item() if is_numpy else value


def _is_finite(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(cast("float", value))


def _told(what: str, value: object, wanted: str) -> str:
    return f"{what} = {' '.join(repr(value).split()):.60}, it must be {wanted}"
