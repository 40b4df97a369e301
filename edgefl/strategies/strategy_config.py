"""Settings shared by most strategies: local training for one assignment."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, TrainConfig
from edgefl.strategies.learning_rate_schedules import LearningRateSchedule, parse_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """Settings of local training; strategies inherit them and add their own.

    Attributes:
        learning_rate: of the local optimiser, in the first round.
        schedule: of the learning rate by round; see `learning_rate_schedules`.
        epochs: passes over the shard; `iterations`, when set, replaces them, and so does `seconds`.
        optimizer: a local algorithm, built in (`types.Algorithm`) or installed on the boards.
        keep_optimizer: moments of the optimiser persist from one assignment to the next.
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

    def plan(self) -> TrainConfig:
        """Returns the plan of the first round.

        Raises:
            ConfigError: an invalid setting.
        """
        plan = TrainConfig(
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

    def make_schedule(self) -> LearningRateSchedule:
        """Returns the schedule: closed rounds -> factor of the learning rate."""
        return parse_schedule(self.schedule)


def check_plan(plan: TrainConfig) -> None:
    """Checks a plan before the run begins, as every device would.

    Raises:
        ConfigError: an invalid number, or two budgets.
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
