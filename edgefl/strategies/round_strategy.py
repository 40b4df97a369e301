"""Base of user strategies: a synchronous round with a user-defined combination of updates.

```python
@dataclass(frozen=True, kw_only=True)
class Median(RoundStrategy):
    def combine(self, updates):
        return {name: np.median([u.tensors[name] for u in updates], axis=0) for name in updates[0].tensors}
```

Device selection, dead and slow devices, k of n, time-outs, schedules, the server optimiser and checkpoints are
handled. All updates of a round are in memory while `combine` runs; for a mean over very many devices use streaming,
as `fedavg` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgefl.core.errors import StrategyError
from edgefl.core.types import Array, ComputedMapping, FleetView, Tensors, TrainConfig, Update
from edgefl.strategies.aggregation import dense_tensor, unload_tensors
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStrategy(StrategyConfig):
    """Settings of a strategy in rounds; subclasses are frozen dataclasses with settings as fields."""

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        """Returns the model's displacement, for every tensor of it.

        Args:
            updates: of one round, at least one, in the order in which the devices were asked; `update.tensors[name]`
                is the displacement w_end - w_start as a dense array, which must not be changed.
        """
        raise NotImplementedError

    def plan_for(self, plan: TrainConfig, device_id: str, view: FleetView) -> TrainConfig:  # noqa: ARG002 for subclasses
        """Returns one device's local training in this round; `plan` is that of the settings."""
        return plan

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        """Returns the strategy that plays the rounds."""
        if type(self).combine is RoundStrategy.combine:
            raise StrategyError(
                f"strategy {format_strategy_name(self)} has no method combine(updates), which a RoundStrategy needs"
            )
        return self.make(CombinedRoundStrategy, rules, compute_weight=weight_uniformly, user_strategy=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedRoundStrategy(SynchronousStrategy[RoundState]):
    """Rounds whose updates are combined by the user's `combine`."""

    user_strategy: RoundStrategy

    should_keep_updates = True

    def make_plans(
        self,
        state: RoundState,  # noqa: ARG002 the author's hook does not look into it
        plan: TrainConfig,
        devices: Sequence[str],
        view: FleetView,
    ) -> Mapping[str, TrainConfig]:
        return {device_id: self._call_plan_for(plan, device_id, view) for device_id in devices}

    def compute_displacement(self, state: RoundState, current_round: OpenRound) -> Mapping[str, Array]:
        updates = current_round.pop_updates()
        dense_updates = [_with_dense_tensors(update, state.model) for update in updates]
        displacement = self._validate_displacement(
            self._call("combine", lambda: self.user_strategy.combine(dense_updates)), state.model
        )
        for update in updates:
            unload_tensors(update.tensors)
        return displacement

    def _call_plan_for(self, plan: TrainConfig, device_id: str, view: FleetView) -> TrainConfig:
        device_plan = self._call("plan_for", lambda: self.user_strategy.plan_for(plan, device_id, view))
        if not isinstance(device_plan, TrainConfig):
            raise self._make_error("plan_for", f"must return a TrainConfig, got {type(device_plan).__name__}")
        return device_plan

    def _validate_displacement(self, displacement: Any, model: Mapping[str, Array]) -> dict[str, Array]:
        if not isinstance(displacement, Mapping):
            raise self._make_error(
                "combine", f"must return a mapping of tensors by name, got {type(displacement).__name__}"
            )
        for name in displacement:
            if name not in model:
                raise self._make_error("combine", f"returned a tensor {name!r} that the model does not have")
        return {name: self._to_model_tensor(displacement, name, like) for name, like in model.items()}

    def _to_model_tensor(self, displacement: Mapping[str, Any], name: str, like: Array) -> Array:
        """Returns one tensor in the model's type; a copy, since it may be a tensor of an update."""
        if name not in displacement:
            raise self._make_error("combine", f"returned no tensor {name!r}; all of the model's are needed")
        tensor = self._call("combine", lambda: np.asarray(displacement[name]))
        if tensor.dtype.kind not in "biuf":
            raise self._make_error(
                "combine", f"returned {name!r} as {type(displacement[name]).__name__}, needed is an array of numbers"
            )
        if tensor.shape != like.shape:
            raise self._make_error(
                "combine", f"returned {name!r} with shape {tensor.shape}, the model's is {like.shape}"
            )
        is_counter = like.dtype.kind in "iu" and tensor.dtype.kind == "f"
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is reported below
            converted = np.array(np.rint(tensor) if is_counter else tensor, dtype=like.dtype)
        if not (np.isfinite(tensor).all() and np.isfinite(converted).all()):
            raise self._make_error("combine", f"returned a NaN or an infinity in {name!r}")
        return converted

    def _call(self, method: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except StrategyError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise self._make_error(method, f"raised {type(error).__name__}: {error}") from error

    def _make_error(self, method: str, fault: str) -> StrategyError:
        return StrategyError(f"strategy {format_strategy_name(self.user_strategy)}: {method} {fault}")


def _with_dense_tensors(update: Update, model: Mapping[str, Array]) -> Update:
    """Returns the update with dense tensors, each in the model's shape."""
    tensors: Tensors = ComputedMapping(model, lambda name: dense_tensor(update, name, model[name]))
    return replace(update, tensors=tensors)


def format_strategy_name(strategy: RoundStrategy) -> str:
    return f"{type(strategy).__module__}:{type(strategy).__qualname__}"
