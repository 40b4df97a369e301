"""The settings that most strategies share: how a device trains for one assignment."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgefl.errors import ConfigError
from edgefl.strategies.schedules import Schedule, parse_schedule
from edgefl.types import Algorithm, LocalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What a device does; strategies inherit these settings and add their own.

    Attributes:
        learning_rate: of the local optimiser, in the first round.
        schedule: how it changes by round; see `schedules`.
        epochs: passes over the shard; `iterations`, when set, replaces them, and so does `seconds`.
        optimizer: a local algorithm, built in (`types.Algorithm`) or installed on the boards.
        keep_optimizer: moments of the optimiser live on from one assignment to the next.
    """

    learning_rate: float = 0.05
    schedule: str = "constant"
    epochs: float = 1.0
    iterations: int | None = None
    seconds: float | None = None
    batch_size: int = 32
    optimizer: str = Algorithm.SGD
    momentum: float = 0.0
    weight_decay: float = 0.0
    keep_optimizer: bool = False

    def plan(self) -> LocalPlan:
        """Returns the plan of the first round.

        Raises:
            ConfigError: a setting makes no sense.
        """
        plan = LocalPlan(
            algorithm=self.optimizer,
            iterations=self.iterations,
            epochs=self.epochs if self.iterations is None and self.seconds is None else None,
            seconds=self.seconds,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            keeps_state=self.keep_optimizer,
        )
        check_plan(plan)
        return plan

    def rate(self) -> Schedule:
        """Returns the schedule: closed rounds -> factor of the learning rate."""
        return parse_schedule(self.schedule)


def check_plan(plan: LocalPlan) -> None:
    """Refuses what every device would refuse, before the run begins.

    Raises:
        ConfigError: a number of the plan makes no sense, or it has two budgets.
    """
    if plan.iterations is not None and plan.seconds is not None:
        raise ConfigError("strategy.iterations and strategy.seconds are two budgets; give one of them")
    for name in ("iterations", "epochs", "seconds", "batch_size"):
        value = getattr(plan, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"strategy.{name} must be a number above 0, got {value!r}")
    for name in ("learning_rate", "momentum", "weight_decay"):
        value = getattr(plan, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"strategy.{name} must be a number of 0 or more, got {value!r}")
