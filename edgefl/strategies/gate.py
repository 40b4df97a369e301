"""Who may be asked, for how much, and which updates are let in: goes around any strategy.

The selection leaves out boards that do not fit and spares those that are not well; the guard refuses updates that
would spoil the model, and flags a device that keeps sending them. Where a run file leaves the codec of updates open
(`auto`), whoever chooses it stands here, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from edgefl.types import (
    Array,
    Assignment,
    DeviceInfo,
    Event,
    FleetView,
    Progress,
    Shapes,
    SparseTensor,
    Speed,
    Tensors,
    Update,
    Vitals,
)

SPARED_BUDGET = 0.5
"""An unwell board gets this fraction of its budget."""
NORMS_KEPT = 32
NORMS_NEEDED = 5
"""A ratio to the median of fewer norms than this says nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What `[devices]` asks of a board; `unwell` is `smaller`, `rest` or `ignore`. None asks nothing."""

    min_memory_bytes: int | None = None
    needs_accelerator: bool = False
    max_temperature_c: float | None = None
    min_battery: float | None = None
    unwell: str = "smaller"

    @property
    def asks_nothing(self) -> bool:
        return self.min_memory_bytes is None and not self.needs_accelerator and self.unwell != "rest"

    def fits(self, info: DeviceInfo) -> bool:
        """Returns whether the board is able; one that reports no memory is taken to have enough."""
        memory = info.capabilities.get("memory_bytes")
        if self.min_memory_bytes is not None and isinstance(memory, int) and memory < self.min_memory_bytes:
            return False
        return not self.needs_accelerator or bool(info.capabilities.get("accelerators"))

    def is_unwell(self, vitals: Vitals | None) -> bool:
        """Returns whether the board is throttled, too hot, or on little battery."""
        if vitals is None or self.unwell == "ignore":
            return False
        too_hot = _beyond(vitals.temperature_c, self.max_temperature_c)
        too_empty = _beyond(self.min_battery, vitals.battery_fraction)
        return bool(vitals.is_throttled) or too_hot or too_empty

    def spared(self, order: Assignment) -> Assignment:
        """Returns the same assignment with a smaller budget, at least one iteration."""
        plan = order.plan
        if plan.iterations is not None:
            plan = replace(plan, iterations=max(1, math.floor(plan.iterations * SPARED_BUDGET)))
        elif plan.epochs is not None:
            plan = replace(plan, epochs=plan.epochs * SPARED_BUDGET)
        elif plan.seconds is not None:
            plan = replace(plan, seconds=plan.seconds * SPARED_BUDGET)
        return replace(order, plan=plan)


class SelectedView:
    """A fleet's view whose `idle` leaves out those that are not to be asked; everything else as it is.

    `is_spared` says of those at work who is to get no more, see `may_get_more`; `flagged` are asked never again.
    """

    def __init__(
        self,
        view: FleetView,
        idle: Sequence[str],
        is_spared: Callable[[str], bool] = lambda _: False,
        flagged: Collection[str] = (),
    ) -> None:
        self._view, self._idle, self.is_spared, self.flagged = view, idle, is_spared, flagged

    @property
    def now_s(self) -> float:
        return self._view.now_s

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        return self._view.devices

    @property
    def idle(self) -> Sequence[str]:
        return self._idle

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._view.busy

    @property
    def speeds(self) -> Mapping[str, Speed]:
        return self._view.speeds

    @property
    def progress(self) -> Mapping[str, Progress]:
        return self._view.progress

    @property
    def vitals(self) -> Mapping[str, Vitals]:
        return self._view.vitals


def may_get_more(device_id: str, view: FleetView) -> bool:
    """Returns whether a device that is at work may be given more: nobody looks for it among the idle."""
    return device_id in view.devices and not (isinstance(view, SelectedView) and view.is_spared(device_id))


def is_flagged(device_id: str, view: FleetView) -> bool:
    """Returns whether a device is never asked again, since its updates were refused too often."""
    return isinstance(view, SelectedView) and device_id in view.flagged


@dataclass(slots=True, kw_only=True)
class Guard:
    """Refuses updates that would spoil the model; strikes are forgotten with the next update that is let in.

    `max_norm` bounds the Euclidean norm over all tensors, `max_norm_ratio` its ratio to the median of the last ones.
    Where devices are nodes of a graph (`takes_models`) an update holds a whole model, or none; then neither norm says
    anything.
    """

    takes_models: bool = False
    shapes: Shapes = ()
    max_norm: float | None = None
    max_norm_ratio: float | None = None
    flag_after: int = 3
    strikes: dict[str, int] = field(default_factory=dict)
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS_KEPT))
    flagged: set[str] = field(default_factory=set)

    def refusal(self, update: Update) -> str | None:
        """Returns what is wrong with an update, or None."""
        norm = 0.0
        if self.takes_models and not update.tensors:
            return None
        reason = self._misfit(update.tensors)
        if reason is None:
            norm = _norm(update.tensors)
            reason = self._excess(norm)
        if reason is None:
            self.strikes.pop(update.device_id, None)
            self.norms.append(norm)
            return None
        count = self.strike(update.device_id)
        if count < self.flag_after:
            return reason
        return f"{reason}; refused {count} times in a row, so {update.device_id} is flagged and not asked again"

    def strike(self, device_id: str) -> int:
        """Counts a refusal, and returns how many there were in a row."""
        count = self.strikes[device_id] = self.strikes.get(device_id, 0) + 1
        if count >= self.flag_after:
            self.flagged.add(device_id)
        return count

    def _misfit(self, tensors: Tensors) -> str | None:
        for spec in self.shapes:
            if spec.name not in tensors:
                return f"the update has no tensor {spec.name!r}"
            tensor = tensors[spec.name]
            if tensor.shape != spec.shape:
                return f"tensor {spec.name!r} has shape {tensor.shape}, the model's is {spec.shape}"
        return None

    def _excess(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return "the update holds a NaN or an infinity: its training has diverged"
        if self.takes_models:
            return None
        if self.max_norm is not None and norm > self.max_norm:
            return f"the update's norm is {norm:.4g}, at most {self.max_norm:g} is let in"
        if self.max_norm_ratio is not None and len(self.norms) >= NORMS_NEEDED:
            usual = float(np.median(self.norms))
            if norm > self.max_norm_ratio * usual:
                return f"the update's norm is {norm:.4g}, {norm / max(usual, 1e-30):.3g} times the usual {usual:.4g}"
        return None


class CodecChoice(Protocol):
    """Chooses the codec of every assignment by what came of those before (`compression.auto`).

    `learnt` is a dataclass with all that it knows, to be kept over a restart.
    """

    learnt: Any

    def adjust(self, order: Assignment) -> Assignment: ...
    def note(self, event: Event, accuracy: float | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyGate:
    """Implements `Gate` with a selection, a guard and, where there is one, a choice of codecs."""

    selection: Selection = Selection()
    guard: Guard = field(default_factory=Guard)
    codecs: CodecChoice | None = None

    @property
    def barred(self) -> Collection[str]:
        return self.guard.flagged

    def view(self, view: FleetView) -> FleetView:
        flagged = self.guard.flagged
        if self.selection.asks_nothing and not flagged:
            return view
        devices, vitals, rests = view.devices, view.vitals, self.selection.unwell == "rest"

        def is_spared(device_id: str) -> bool:
            if device_id in flagged or not self.selection.fits(devices[device_id]):
                return True
            return rests and self.selection.is_unwell(vitals.get(device_id))

        idle = [device_id for device_id in view.idle if not is_spared(device_id)]
        return SelectedView(view, idle, is_spared, flagged)

    def adjust(self, order: Assignment, view: FleetView) -> Assignment:
        if self.codecs is not None:
            order = self.codecs.adjust(order)
        # Made smaller, a block would differ from its other copies, and an exchange of a node is no matter of size.
        if order.block is not None or order.plan.node is not None:
            return order
        if self.selection.unwell != "smaller" or not self.selection.is_unwell(view.vitals.get(order.device_id)):
            return order
        return self.selection.spared(order)

    def refusal(self, update: Update) -> str | None:
        return self.guard.refusal(update)

    def strike(self, device_id: str) -> None:
        self.guard.strike(device_id)

    def note(self, event: Event, accuracy: float | None) -> None:
        if self.codecs is not None:
            self.codecs.note(event, accuracy)


def _beyond(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _norm(tensors: Tensors) -> float:
    """Returns the norm over all float tensors; NaN or infinite when an entry is."""
    total = 0.0
    for tensor in tensors.values():
        values: Array = tensor.values if isinstance(tensor, SparseTensor) else tensor
        if values.dtype.kind in "fc":
            flat = values.reshape(-1).astype(np.float32 if values.dtype == np.float16 else values.dtype, copy=False)
            with np.errstate(over="ignore", invalid="ignore"):  # the norm itself says so, and the update is refused
                total += float(np.dot(flat, flat))
    return math.sqrt(total) if total >= 0 else math.nan
