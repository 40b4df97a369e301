"""A round that waits too long: one rescue when the barrier passes, and an end of the run when it passes again.

As `ssgd_timeout_limit` of Parallel-SGD: the rescue is tried once, and after the same time again the run ends and says
whom it waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from edgefl.errors import StrategyError
from edgefl.strategies.open_round import TICK_S, OpenRound
from edgefl.strategies.round_rules import RoundRules

MAX_NAMED = 10
"""So many devices are named in a message."""


class Step(Enum):
    """What is to be done now."""

    WAIT = auto()
    RESCUE = auto()
    CLOSE = auto()
    FAIL = auto()


def step(opened: OpenRound, rules: RoundRules, now_s: float) -> Step:
    """Returns what is to be done about a round in which devices are waited for; the rescue comes up once."""
    # The clock of a coordinator that was started again may be behind that of the one before.
    opened.since_s = now_s if opened.since_s is None else min(opened.since_s, now_s)
    due_s = alarm_s(opened, rules)
    if due_s is None or opened.is_given_up or now_s + TICK_S < due_s:
        return Step.WAIT
    if not opened.is_rescued:
        opened.is_rescued = True
        return Step.RESCUE
    return Step.CLOSE if rules.rescue == "go-on" and opened.num_received else Step.FAIL


def alarm_s(opened: OpenRound, rules: RoundRules) -> float | None:
    """Returns when `step` has something to say, None for never."""
    if rules.barrier_s is None or opened.since_s is None:
        return None
    return opened.since_s + rules.barrier_s * (1 + opened.is_rescued)


def failure(
    opened: OpenRound, rules: RoundRules, *, number: int, now_s: float, missing: Iterable[str]
) -> StrategyError:
    """Returns the error of a round that nothing could save.

    Args:
        opened: the round.
        rules: with the barrier that has passed twice.
        number: of the round, from 1.
        now_s: on the fleet's clock.
        missing: who is waited for.
    """
    names = list(dict.fromkeys(missing))
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    waited_s = now_s - (now_s if opened.since_s is None else opened.since_s)
    return StrategyError(
        f"round {number} waited {waited_s:g} s for {', '.join(names[:MAX_NAMED])}{rest}: "
        f"barrier_s = {rules.barrier_s:g} passed twice and the rescue ({rules.rescue}) did not help"
    )
