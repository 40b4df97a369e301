"""One device alone: the reference line that every federated run is compared with.

The device trains as in a round of one, and the others rest. With the whole data set as its shard (cut it for one
device) this is training on pooled data; with its own shard it is what the device could do without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.strategies.rounds import RoundRules, RoundState, Synchronous
from edgefl.strategies.settings import TrainingSettings
from edgefl.strategies.ssgd import equally
from edgefl.types import FleetView


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(TrainingSettings):
    """Settings of a run with `local`: which `device` trains, the first by its name when it is left out."""

    device: str | None = None

    def build(self, rules: RoundRules) -> Synchronous[RoundState]:
        return LocalRounds(plan=self.plan(), weigh=equally, rules=rules, rate=self.rate(), device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRounds(Synchronous[RoundState]):
    """Rounds in which one device takes part."""

    device: str | None = None

    def willing(self, view: FleetView) -> Sequence[str]:
        alone = min(view.idle, default=None) if self.device is None else self.device
        return [alone] if alone is not None and alone in view.idle else []
