"""Learning rate schedules by round, as one line of text.

`constant`, `step:N:F` (times F every N rounds), `exponential:F` (times F every round), `inverse-sqrt` (over the
square root of the round), `cosine:N` (down to zero in N rounds), `linear:N` (likewise, in a straight line).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edgefl.core.errors import ConfigError, StrategyError

SCHEDULES = ("constant", "step:N:F", "exponential:F", "inverse-sqrt", "cosine:N", "linear:N")

LearningRateSchedule = Callable[[int], float]
"""Number of closed rounds -> factor of the learning rate, 1 at first."""


def parse_schedule(spec: str) -> LearningRateSchedule:
    """Returns the schedule of a line of text.

    An unbounded one raises a StrategyError when its factor overflows.

    Raises:
        ConfigError: no such schedule, or an invalid number.
    """
    name, *numbers = spec.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ConfigError(f"strategy.schedule: the numbers of {spec!r} must be finite and above 0")
    match name, values:
        case "constant", []:
            return lambda _: 1.0
        case "step", [every, factor]:
            return lambda done: _compute_power(spec, factor, done // every, done)
        case "exponential", [factor]:
            return lambda done: _compute_power(spec, factor, done, done)
        case "inverse-sqrt", []:
            return lambda done: 1.0 / math.sqrt(done + 1)
        case "cosine", [length]:
            return lambda done: 0.5 * (1.0 + math.cos(math.pi * min(1.0, done / length)))
        case "linear", [length]:
            return lambda done: max(0.0, 1.0 - done / length)
    raise ConfigError(f"strategy.schedule must be one of {', '.join(SCHEDULES)}, got {spec!r}")


def _compute_power(spec: str, factor: float, exponent: float, closed_rounds: int) -> float:
    """Returns the power, or raises when it overflows."""
    try:
        power = math.pow(factor, exponent)
    except OverflowError:
        power = math.inf
    if math.isinf(power):
        raise StrategyError(
            f"strategy.schedule {spec!r} is too large for a number after {closed_rounds} closed rounds; "
            "take a smaller factor"
        )
    return power
