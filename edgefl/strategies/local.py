"""One device alone: the reference line that every federated run is compared with.

The device trains as in a round of one, and the others rest. With the whole data set as its shard (cut it for one
device) this is training on pooled data; with its own shard it is what the device could do without the others.
Only when it may not be asked any more, and the run file does not name it, another one takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.strategies.open_round import Job, OpenRound, RoundState
from edgefl.strategies.rounds import RoundRules, Synchronous
from edgefl.strategies.settings import TrainingSettings
from edgefl.strategies.ssgd import equally
from edgefl.types import Array, FleetView


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(TrainingSettings):
    """Settings of a run with `local`: which `device` trains, the first idle one by its name when it is left out."""

    device: str | None = None

    def build(self, rules: RoundRules) -> Synchronous[LocalState]:
        return LocalRounds(plan=self.plan(), weigh=equally, rules=rules, rate=self.rate(), device=self.device)


@dataclass(slots=True)
class LocalState(RoundState):
    """`alone` is the device that trains, None before the first round."""

    alone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRounds(Synchronous[LocalState]):
    """Rounds in which one device takes part."""

    device: str | None = None

    def begin(self, model: dict[str, Array]) -> LocalState:
        return LocalState(model=model, alone=self.device)

    def candidates(self, state: LocalState, view: FleetView) -> Sequence[str]:
        if self.device is None and state.alone not in view.idle:
            state.alone = min(view.idle, default=None)
        return [state.alone] if state.alone is not None and state.alone in view.idle else []

    def replacements(self, state: LocalState, opened: OpenRound, view: FleetView) -> Sequence[Job]:
        delivered = opened.delivered()
        willing = [name for name in self.candidates(state, view) if name not in delivered]
        return [Job(device_id=name) for name in self._choose(willing, state)]
