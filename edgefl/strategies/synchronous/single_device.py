"""One device alone: the reference line that every federated run is compared with.

The device trains as in a round of one, and the others rest. With the whole data set as its shard (cut it for one
device) this is training on pooled data; with its own shard it is what the device could do without the others.
Another device replaces it only when it may not be asked any more and the run file does not name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.core.types import Array, FleetView
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState, SlotRequest
from edgefl.strategies.synchronous.ssgd import weight_uniformly
from edgefl.strategies.synchronous.strategy import RoundRules, SynchronousStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceConfig(StrategyConfig):
    """Settings of a run with `local`: the `device` that trains, by default the first idle one by name."""

    device: str | None = None

    def build(self, rules: RoundRules) -> SynchronousStrategy[SingleDeviceState]:
        return SingleDevice(
            plan=self.plan(),
            compute_weight=weight_uniformly,
            rules=rules,
            lr_schedule=self.make_schedule(),
            device=self.device,
        )


@dataclass(slots=True)
class SingleDeviceState(RoundState):
    """State of `local`; `alone` is the device that trains, None before the first round."""

    alone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDevice(SynchronousStrategy[SingleDeviceState]):
    """Rounds in which one device takes part."""

    device: str | None = None

    def make_state(self, model: dict[str, Array]) -> SingleDeviceState:
        return SingleDeviceState(model=model, alone=self.device)

    def list_candidates(self, state: SingleDeviceState, view: FleetView) -> Sequence[str]:
        if self.device is None and state.alone not in view.idle:
            state.alone = min(view.idle, default=None)
        return [state.alone] if state.alone is not None and state.alone in view.idle else []

    def select_replacements(
        self, state: SingleDeviceState, current_round: OpenRound, view: FleetView
    ) -> Sequence[SlotRequest]:
        delivered = current_round.find_delivered()
        candidates = [name for name in self.list_candidates(state, view) if name not in delivered]
        return [SlotRequest(device_id=name) for name in self._select_devices(candidates, state)]
