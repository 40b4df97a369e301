"""Orders as headers for devices, and headers of replies as events: what comes back is checked before it counts.

An assignment id is unique within its run. On the wire the run stands before it, so that a device that remembers an
answer, a recall or a report from an earlier run never takes it for one of this run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from edgefl.coordinator.dispatch.lives import Lives
from edgefl.decentralised.mailbag import unpack_mail
from edgefl.protocol import finite
from edgefl.types import AHEAD, Assignment, EdgeMessage, Evaluated, Evaluation, Json, UpdateMetrics

MAX_COUNT = 2**53
"""Counts beyond this are no counts: JSON numbers are exact up to here."""
PLAUSIBLE = MappingProxyType(
    {
        "max_temperature_c": (-40.0, 150.0),
        "signal_dbm": (-200.0, 0.0),
        "link_bits_per_s": (0.0, 1e12),
        "energy_j": (0.0, 1e12),
        "paced_s": (0.0, 1e8),
    }
)
"""What a device may say of its board; anything else is taken for not known."""


def order_header(lives: Lives, order: Assignment | Evaluation, *, key: str | None = None) -> Json:
    """Returns what a device is told of one order, besides what it is told of the run.

    `key` is the id on the wire of an order that was given before; without it the order is given now.
    """
    header: Json = {"assignment": key or lives.given(order.assignment_id)}
    if isinstance(order, Evaluation):
        return {**header, "version": order.version}
    if order.block is not None:
        header["block"] = order.block
    plan = {name: value for name, value in asdict(order.plan).items() if value is not None and name != "inbox"}
    return {
        **header,
        "version": order.base_version,
        "plan": plan,
        "codec": order.codec or "dense",
        "settled": [lives.known(assignment_id) for assignment_id in order.settled],
    }


def update_metrics(
    metrics: Json, *, turnaround_s: float, bytes_up: int, bytes_down: int, ahead: tuple[int, int] = (0, 0)
) -> UpdateMetrics:
    """Returns what the device measured; as sending time, all of the turnaround that was not computing.

    `ahead` are bytes up and down that it spent before the run; they are counted here.

    Raises:
        KeyError, TypeError, ValueError: a measurement is missing or makes no sense.
    """
    compute_s = _number(metrics["compute_s"])
    extra = metrics.get("extra")
    numbers = {str(name): finite(value) for name, value in extra.items()} if isinstance(extra, Mapping) else {}
    numbers |= {name: float(value) or None for name, value in zip(AHEAD, ahead, strict=True)}
    return UpdateMetrics(
        iterations=_count(metrics["iterations"]),
        num_examples=_count(metrics["num_examples"]),
        loss=finite(metrics.get("loss")),
        compute_s=compute_s,
        send_s=max(0.0, turnaround_s - compute_s),
        bytes_up=bytes_up + ahead[0],
        bytes_down=bytes_down + ahead[1],
        extra={name: value for name, value in numbers.items() if value is not None},
        **_vitals(metrics.get("vitals")),
    )


def _vitals(told: Any) -> dict[str, Any]:
    """Returns how the board says that it was; what makes no sense is not worth refusing an update for."""
    if not isinstance(told, Mapping):
        return {}
    vitals: dict[str, Any] = {}
    for name, (least, most) in PLAUSIBLE.items():
        value = finite(told.get(name))
        if value is not None and least <= value <= most:
            vitals[name] = value
    throttled = told.get("throttled")
    if isinstance(throttled, str) and re.fullmatch(r"[a-z,-]{1,100}", throttled):
        vitals["throttled"] = throttled
    return vitals


def evaluated(order: Evaluation, metrics: Json, source: str) -> Evaluated:
    """Returns the outcome of an evaluation.

    Raises:
        KeyError, TypeError, ValueError: a figure is missing or makes no sense.
    """
    accuracy = _number(metrics["accuracy"])
    if accuracy > 1:
        raise ValueError(f"accuracy must lie in 0 to 1, got {accuracy!r}")
    return Evaluated(
        assignment_id=order.assignment_id,
        device_id=order.device_id,
        version=order.version,
        round=order.round,
        source=source,
        num_examples=_count(metrics["num_examples"]),
        loss=_number(metrics["loss"], at_least=-math.inf),
        accuracy=accuracy,
        subject=order.subject,
    )


def node_messages(order: Assignment, header: Json, body: bytes) -> tuple[tuple[EdgeMessage, ...], bytes]:
    """Returns a node's messages and what is behind them; the body as it is of a device that is no node.

    Raises:
        ValueError: it answers for another node, or for an edge that it does not have.
        NetworkError: the header does not fit the body.
    """
    plan = order.plan.node
    if plan is None:
        return (), body
    outbox, rest = unpack_mail(header.get("mail", []), body)
    edges = {(order.device_id, side.neighbour) for side in plan.edges}
    strange = [message.edge for message in outbox if message.edge not in edges]
    if strange:
        raise ValueError(f"it sends along {' - '.join(strange[0])}, which is no edge of its own")
    if bool(rest) != plan.reports:
        raise ValueError("it holds no model, which was asked for" if plan.reports else "it holds more than messages")
    return outbox, rest


def _number(value: Any, *, at_least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_COUNT:
        raise ValueError(f"not a number: {value!r:.40}")
    number = float(value)
    if not (math.isfinite(number) and number >= at_least):
        raise ValueError(f"must be finite and at least {at_least:g}, got {number!r}")
    return number


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"must be a whole number, got {number!r}")
    return int(number)
