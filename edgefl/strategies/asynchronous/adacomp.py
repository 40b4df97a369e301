"""AdaComp: Hardy, Le Merrer, Sericola, Distributed deep learning on edge-devices, NCA 2017.

Devices send the largest fraction c of every tensor's entries, and each entry has a staleness of its own.

sigma_p counts the updates that touched entry p since the device got its model, and w[p] += d[p] / max(1, sigma_p): an
entry that nobody else moved takes the full step, however late its update comes. With c = 1 every update touches every
entry, and sigma is the delay of the whole update. Nothing is kept of the entries that are not sent.

*Differs from the original code*: it took an update without delay for one of maximal delay. By default `improved` and
`step_scale` go beyond the paper: an update moves the model by 1/n, and what is not sent is kept for the next time
(error feedback, without which a part of each gradient need not converge: Karimireddy et al., Error Feedback Fixes
SignSGD, ICML 2019), with quantised values. `improved = false` and `step_scale = 1` are the paper's algorithm. Its
division alone is not enough at a learning rate that suits rounds: the largest entries of a gradient are the same ones
on most devices. In either mode `changed` knows which entries moved since any version, so that a delta downlink sends
those alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Indices, SparseTensor, Tensor
from edgefl.strategies.aggregation import QueuedUpdate, add_at_indices, is_float
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState, SingleUpdateConfig
from edgefl.strategies.strategy_config import RoundRules

MIN_FRACTION = 1e-12
"""Smallest fraction that the codec accepts."""
MAX_COUNT = np.iinfo(np.uint16).max


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaCompConfig(SingleUpdateConfig):
    """Settings of a run with `adacomp`.

    Attributes:
        compression: c, the fraction of each tensor's entries that is sent. A `[compression] up` other than `dense`
            is taken instead.
        staleness: of each `parameter`, of the whole `update` (divided by its delay), or `none`.
        improved: error feedback and 8-bit values. With a hundred devices the residual is stale when it is sent, and
            8-bit values alone (`[compression] up = "topk:0.01|int8"`) take fewer updates.
    """

    compression: float = 0.01
    staleness: Literal["parameter", "update", "none"] = "parameter"
    improved: bool = True

    def build(self, rules: RoundRules) -> AdaComp:
        if not MIN_FRACTION <= self.compression <= 1:
            raise ConfigError(
                f"strategy.compression must be a fraction from {MIN_FRACTION:g} to 1, got {self.compression!r}"
            )
        if rules.server.kind != "none":
            raise ConfigError(
                f"server.optimizer must be none with adacomp, got {rules.server.kind!r}: its moments would move "
                "entries that no device touched"
            )
        if rules.codec in {None, "dense"}:
            rules = replace(rules, codec=self.make_codec_spec())
        return self.make(AdaComp, rules, step_scale=self.step_scale, staleness=self.staleness)

    def make_codec_spec(self) -> str:
        """Returns the codec of the devices' updates."""
        if self.compression == 1:
            return "ef|int8" if self.improved else "dense"
        top_k = f"topk:{self.compression!r}"
        return f"ef|{top_k}|int8|rice" if self.improved else top_k


@dataclass(slots=True)
class AdaCompState(AsyncState):
    """Flat arrays over the entries of all trained tensors, in the model's order.

    `counts` [n] is the wrapping count of updates to each entry; `snapshots` its value at the versions in flight;
    `moved_at` [n] the newest version that moved it.
    """

    counts: Array = field(default_factory=lambda: np.zeros(0, np.uint16))
    moved_at: Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    snapshots: dict[int, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaComp(AsynchronousStrategy[AdaCompState]):
    """Divides every entry of a displacement by its staleness."""

    staleness: Literal["parameter", "update", "none"] = "parameter"

    def bytes_per_device(self, model_bytes: int) -> int:
        """Returns the bytes of a snapshot: two per entry, against four in single precision."""
        return model_bytes // 2 if self.staleness == "parameter" else 0

    def make_state(self, model: dict[str, Array]) -> AdaCompState:
        size = sum(tensor.size for name, tensor in model.items() if self._is_trained(name, tensor))
        return AdaCompState(model=model, counts=np.zeros(size, np.uint16), moved_at=np.zeros(size, np.uint32))

    def on_version_dispatched(self, state: AdaCompState) -> None:
        if self.staleness == "parameter":
            state.snapshots[state.version] = state.counts.copy()

    def on_version_released(self, state: AdaCompState, version: int) -> None:
        state.snapshots.pop(version, None)

    def apply(self, state: AdaCompState, queued_update: QueuedUpdate) -> None:
        displacement = self.select_trained(state, queued_update)
        factor = self.rules.server.learning_rate * self.compute_step_scale(state)
        touched_entries = _find_touched_entries(displacement)
        counts = state.counts[touched_entries]
        divisor = self._compute_divisor(state, queued_update, touched_entries, counts)
        start = 0
        for name, tensor in displacement.items():
            entries, values = _get_entries(tensor)
            if factor != 1.0:
                values = np.multiply(values, factor, dtype=values.dtype)
            if divisor is not None:
                values = values / (divisor[start : start + values.size] if divisor.ndim else divisor)
            add_at_indices(state.model[name].reshape(-1), entries, values)
            start += values.size
        state.counts[touched_entries] = counts + np.uint16(1)
        state.moved_at[touched_entries] = state.version + 1
        self.update_untrained(state, queued_update)

    def restore_model(self, state: AdaCompState, model: Mapping[str, Array]) -> AdaCompState:
        state.moved_at[:] = state.version
        return AsynchronousStrategy.restore_model(self, state, model)

    def _compute_divisor(
        self, state: AdaCompState, queued_update: QueuedUpdate, touched: Array | slice, now: Array
    ) -> Array | None:
        """Returns max(1, sigma) per entry, one number where all are equal, None for all ones."""
        delay = state.version - queued_update.base_version
        if self.staleness == "none" or delay <= 1:  # sigma is at most the delay
            return None
        if self.staleness == "update" or delay > MAX_COUNT:  # the counts have wrapped; the delay bounds them
            return np.array(delay, np.float32)
        # Counts wrap, and so does their difference, back to the right value.
        staleness: Array = now - state.snapshots[queued_update.base_version][touched]
        return np.maximum(staleness, np.uint16(1), out=staleness)

    def changed(self, state: AdaCompState, since: int) -> Indices | None:
        """Returns exactly the entries that moved since a version; untrained tensors count as moved whole."""
        if not 0 <= since <= state.version:
            return None
        slices = dict(self._list_slices(state.model))
        return {
            name: np.flatnonzero(state.moved_at[slices[name]] > since) if name in slices else np.arange(tensor.size)
            for name, tensor in state.model.items()
        }

    def _list_slices(self, model: dict[str, Array]) -> Iterator[tuple[str, slice]]:
        start = 0
        for name, tensor in model.items():
            if self._is_trained(name, tensor):
                yield name, slice(start, start + tensor.size)
                start += tensor.size

    def _is_trained(self, name: str, tensor: Array) -> bool:
        return is_float(tensor) and name not in self.rules.server.buffers


def _find_touched_entries(displacement: Mapping[str, Tensor]) -> Array | slice:
    """Returns the indices of an update's entries in the order of `AdaCompState`; a slice for all."""
    if not any(isinstance(tensor, SparseTensor) for tensor in displacement.values()):
        return slice(None)
    touched_indices = np.empty(sum(_get_entries(tensor)[1].size for tensor in displacement.values()), np.int64)
    start = position = 0
    for tensor in displacement.values():
        entries, values = _get_entries(tensor)
        indices = np.arange(values.size) if isinstance(entries, slice) else entries
        np.add(indices, start, out=touched_indices[position : position + values.size])
        start, position = start + math.prod(tensor.shape), position + values.size
    return touched_indices


def _get_entries(tensor: Tensor) -> tuple[Array | slice, Array]:
    """Returns the flat indices and values of an update's entries in its tensor; a dense one has all."""
    if isinstance(tensor, SparseTensor):
        return tensor.indices, tensor.values
    return slice(None), tensor.reshape(-1)
