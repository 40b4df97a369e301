"""The base for strategies of your own: a synchronous round of which you write only how updates become one.

```python
@dataclass(frozen=True, kw_only=True)
class Median(RoundStrategy):
    def combine(self, updates):
        return {name: np.median([u.tensors[name] for u in updates], axis=0) for name in updates[0].tensors}
```

Choosing devices, dead and slow ones, k of n, barriers, schedules, the server optimiser and checkpoints are taken care
of. All updates of a round are in memory while `combine` runs; a mean of very many devices is better made as `fedavg`
makes it, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgefl.errors import StrategyError
from edgefl.strategies.fold import dense_tensor, release
from edgefl.strategies.open_round import OpenRound, RoundState
from edgefl.strategies.rounds import RoundRules, Synchronous
from edgefl.strategies.settings import TrainingSettings
from edgefl.strategies.ssgd import equally
from edgefl.types import Array, FleetView, LocalPlan, Tensor, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStrategy(TrainingSettings):
    """Settings of a strategy in rounds; subclasses are frozen dataclasses, their fields settings of the run file."""

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        """Returns what the model moves by, for every tensor of it.

        Args:
            updates: of one round, at least one, in the order in which the devices were asked; `update.tensors[name]`
                is the displacement w_end - w_start as a dense array, which must not be changed.
        """
        raise NotImplementedError

    def plan_for(self, plan: LocalPlan, device_id: str, view: FleetView) -> LocalPlan:  # noqa: ARG002 for subclasses
        """Returns what one device does in this round; `plan` is what the settings say."""
        return plan

    def build(self, rules: RoundRules) -> Synchronous[RoundState]:
        if type(self).combine is RoundStrategy.combine:
            raise StrategyError(f"strategy {named(self)} has no method combine(updates), which a RoundStrategy needs")
        return CombinedRounds(plan=self.plan(), weigh=equally, rules=rules, rate=self.rate(), author=self)


class DenseTensors(Mapping[str, Tensor]):
    """The tensors of an update, dense, each of the shape that the model has."""

    __slots__ = ("_model", "_update")

    def __init__(self, update: Update, model: Mapping[str, Array]) -> None:
        self._update, self._model = update, model

    def __getitem__(self, name: str) -> Tensor:
        return dense_tensor(self._update, name, self._model[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._model)

    def __len__(self) -> int:
        return len(self._model)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedRounds(Synchronous[RoundState]):
    """Rounds whose updates are handed to their author's `combine`."""

    author: RoundStrategy

    collects = True

    def plans(
        self,
        state: RoundState,  # noqa: ARG002 the author's hook does not look into it
        plan: LocalPlan,
        devices: Sequence[str],
        view: FleetView,
    ) -> Mapping[str, LocalPlan]:
        return {device_id: self._plan_for(plan, device_id, view) for device_id in devices}

    def displacement(self, state: RoundState, opened: OpenRound) -> Mapping[str, Array]:
        fold = opened.fold
        slots = [slot for slot in fold.expected if slot in fold.waiting]
        updates = [fold.waiting[slot] for slot in slots]
        dense = [replace(each, tensors=DenseTensors(each, state.model)) for each in updates]
        moved = self._checked(self._call("combine", lambda: self.author.combine(dense)), state.model)
        fold.used = {slot: each.assignment_id for slot, each in zip(slots, updates, strict=True)}
        fold.waiting.clear()
        for each in updates:
            release(each.tensors)
        return moved

    def _plan_for(self, plan: LocalPlan, device_id: str, view: FleetView) -> LocalPlan:
        made = self._call("plan_for", lambda: self.author.plan_for(plan, device_id, view))
        if not isinstance(made, LocalPlan):
            raise self._wrong("plan_for", f"must return a LocalPlan, got {type(made).__name__}")
        return made

    def _checked(self, moved: Any, model: Mapping[str, Array]) -> dict[str, Array]:
        if not isinstance(moved, Mapping):
            raise self._wrong("combine", f"must return a mapping of tensors by name, got {type(moved).__name__}")
        for name in moved:
            if name not in model:
                raise self._wrong("combine", f"returned a tensor {name!r} that the model does not have")
        return {name: self._fitted(moved, name, like) for name, like in model.items()}

    def _fitted(self, moved: Mapping[str, Any], name: str, like: Array) -> Array:
        """Returns one tensor in the model's type; a copy, since it may be a tensor of an update."""
        if name not in moved:
            raise self._wrong("combine", f"returned no tensor {name!r}; all of the model's are needed")
        tensor = self._call("combine", lambda: np.asarray(moved[name]))
        if tensor.dtype.kind not in "biuf":
            raise self._wrong(
                "combine", f"returned {name!r} as {type(moved[name]).__name__}, needed is an array of numbers"
            )
        if tensor.shape != like.shape:
            raise self._wrong("combine", f"returned {name!r} with shape {tensor.shape}, the model's is {like.shape}")
        is_counter = like.dtype.kind in "iu" and tensor.dtype.kind == "f"
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit the type is told below
            fitted = np.array(np.rint(tensor) if is_counter else tensor, dtype=like.dtype)
        if not (np.isfinite(tensor).all() and np.isfinite(fitted).all()):
            raise self._wrong("combine", f"returned a NaN or an infinity in {name!r}")
        return fitted

    def _call(self, method: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except StrategyError:
            raise
        except (Exception, SystemExit) as error:  # the author's code may raise anything
            raise self._wrong(method, f"raised {type(error).__name__}: {error}") from error

    def _wrong(self, method: str, what: str) -> StrategyError:
        return StrategyError(f"strategy {named(self.author)}: {method} {what}")


def named(author: RoundStrategy) -> str:
    return f"{type(author).__module__}:{type(author).__qualname__}"
