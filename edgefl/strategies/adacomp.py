"""AdaComp: Hardy, Le Merrer, Sericola, Distributed deep learning on edge-devices, NCA 2017.

Devices send the largest fraction c of every tensor's entries, and each entry has a staleness of its own.

sigma_p counts the updates that touched entry p since the device got its model, and w[p] += d[p] / max(1, sigma_p): an
entry that nobody else moved takes the full step, however late its update comes. With c = 1 every update touches every
entry, and sigma is the delay of the whole update. Nothing is kept of the entries that are not sent.

*Differs from the original code*: it took an update without delay for one of maximal delay. `improved` goes beyond the
paper: what is not sent is kept for the next time (error feedback), and the values are quantised. In either mode
`changed` knows which entries moved since any version, so that a delta downlink sends those alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import Arrival, add_at, is_float
from edgefl.strategies.asgd import StepSettings
from edgefl.strategies.asynchronous import Asynchronous, AsyncState
from edgefl.strategies.rounds import RoundRules
from edgefl.types import Array, Indices, SparseTensor, Tensor

SMALLEST = 1e-12
"""The smallest fraction that the codec takes."""
STALENESS = ("parameter", "update", "none")
MAX_COUNT = np.iinfo(np.uint16).max


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaComp(StepSettings):
    """Settings of a run with `adacomp`; with others than the defaults it is the baselines of the paper.

    Attributes:
        compression: c, the fraction of each tensor's entries that is sent. A `[compression] up` other than `dense`
            is taken instead.
        staleness: of each `parameter`, of the whole `update` (divided by its delay), or `none`.
        improved: error feedback and 8-bit values. Among many devices what was left out is old when it is sent, and
            8-bit values alone (`[compression] up = "topk:0.01|int8"`) take fewer updates.
    """

    compression: float = 0.01
    staleness: str = "parameter"
    improved: bool = False

    def build(self, rules: RoundRules) -> AdaptiveCompression:
        if not SMALLEST <= self.compression <= 1:
            raise ConfigError(
                f"strategy.compression must be a fraction from {SMALLEST:g} to 1, got {self.compression!r}"
            )
        if self.staleness not in STALENESS:
            raise ConfigError(f"strategy.staleness must be one of {', '.join(STALENESS)}, got {self.staleness!r}")
        if rules.server.kind != "none":
            raise ConfigError(
                f"server.optimizer must be none with adacomp, got {rules.server.kind!r}: its moments would move "
                "entries that no device touched"
            )
        if rules.codec in {None, "dense"}:
            rules = replace(rules, codec=self.codec())
        return AdaptiveCompression(
            plan=self.plan(),
            rate=self.rate(),
            rules=rules,
            staleness=self.staleness,  # type: ignore[arg-type]  # it is one of STALENESS
        )

    def codec(self) -> str:
        """Returns the codec of the devices' updates."""
        if self.compression == 1:
            return "ef|int8" if self.improved else "dense"
        kept = f"topk:{self.compression!r}"
        return f"ef|{kept}|int8|rice" if self.improved else kept


@dataclass(slots=True)
class TouchState(AsyncState):
    """Flat arrays over the entries of all trained tensors, in the model's order.

    `counts` [n] is how often each was touched, wrapping; `snapshots` what it was at the versions that somebody works
    on; `moved_at` [n] the newest version that moved it.
    """

    counts: Array = field(default_factory=lambda: np.zeros(0, np.uint16))
    moved_at: Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    snapshots: dict[int, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveCompression(Asynchronous[TouchState]):
    """Divides every entry of a displacement by its staleness."""

    staleness: Literal["parameter", "update", "none"] = "parameter"

    def bytes_per_device(self, model_bytes: int) -> int:
        """Returns the bytes of a snapshot: two for each entry, which has four in single precision."""
        return model_bytes // 2 if self.staleness == "parameter" else 0

    def begin(self, model: dict[str, Array]) -> TouchState:
        size = sum(tensor.size for name, tensor in model.items() if self._is_trained(name, tensor))
        return TouchState(model=model, counts=np.zeros(size, np.uint16), moved_at=np.zeros(size, np.uint32))

    def keep(self, state: TouchState) -> None:
        if self.staleness == "parameter":
            state.snapshots[state.version] = state.counts.copy()

    def release(self, state: TouchState, version: int) -> None:
        state.snapshots.pop(version, None)

    def apply(self, state: TouchState, arrival: Arrival) -> None:
        displacement, factor = self.trained(state, arrival), self.rules.server.learning_rate
        touched = _touched(displacement)
        now = state.counts[touched]
        divisor = self._divisor(state, arrival, touched, now)
        start = 0
        for name, tensor in displacement.items():
            entries, moved = _entries(tensor)
            if factor != 1.0:
                moved = np.multiply(moved, factor, dtype=moved.dtype)
            if divisor is not None:
                moved = moved / (divisor[start : start + moved.size] if divisor.ndim else divisor)
            add_at(state.model[name].reshape(-1), entries, moved)
            start += moved.size
        state.counts[touched] = now + np.uint16(1)
        state.moved_at[touched] = state.version + 1
        self.track(state, arrival)

    def _divisor(self, state: TouchState, arrival: Arrival, touched: Array | slice, now: Array) -> Array | None:
        """Returns max(1, sigma) of each entry, one number where it is that of all, None for all ones."""
        delay = state.version - arrival.base_version
        if self.staleness == "none" or delay <= 1:  # sigma is at most the delay
            return None
        if self.staleness == "update" or delay > MAX_COUNT:  # the counts have wrapped; the delay bounds them
            return np.array(delay, np.float32)
        # Counts wrap, and so does their difference, back to the right value.
        staleness: Array = now - state.snapshots[arrival.base_version][touched]
        return np.maximum(staleness, np.uint16(1), out=staleness)

    def changed(self, state: TouchState, since: int) -> Indices | None:
        """Returns exactly the entries that moved since a version; what is not trained counts as moved whole."""
        if not 0 <= since <= state.version:
            return None
        places = dict(self._places(state.model))
        return {
            name: np.flatnonzero(state.moved_at[places[name]] > since) if name in places else np.arange(tensor.size)
            for name, tensor in state.model.items()
        }

    def _places(self, model: dict[str, Array]) -> Iterator[tuple[str, slice]]:
        start = 0
        for name, tensor in model.items():
            if self._is_trained(name, tensor):
                yield name, slice(start, start + tensor.size)
                start += tensor.size

    def _is_trained(self, name: str, tensor: Array) -> bool:
        return is_float(tensor) and name not in self.rules.server.buffers


def _touched(displacement: Mapping[str, Tensor]) -> Array | slice:
    """Returns which entries of all trained tensors an update has, in the order of `TouchState`; all are a slice."""
    if not any(isinstance(tensor, SparseTensor) for tensor in displacement.values()):
        return slice(None)
    places = np.empty(sum(_entries(tensor)[1].size for tensor in displacement.values()), np.int64)
    start = at = 0
    for tensor in displacement.values():
        entries, moved = _entries(tensor)
        indices = np.arange(moved.size) if isinstance(entries, slice) else entries
        np.add(indices, start, out=places[at : at + moved.size])
        start, at = start + math.prod(tensor.shape), at + moved.size
    return places


def _entries(tensor: Tensor) -> tuple[Array | slice, Array]:
    """Returns which flat entries of its tensor an update has, and their values; a dense one has all, zeros too."""
    if isinstance(tensor, SparseTensor):
        return tensor.indices, tensor.values
    return slice(None), tensor.reshape(-1)
