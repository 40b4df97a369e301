"""Round deadline: one rescue when the barrier passes, and the end of the run when it passes again.

As `ssgd_timeout_limit` of Parallel-SGD: the rescue is tried once, and after the same time again the run ends and
names the missing devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from edgefl.core.errors import StrategyError
from edgefl.strategies.round_rules import RoundRules
from edgefl.strategies.synchronous.round_state import TICK_S, OpenRound

MAX_LISTED_DEVICES = 10
"""Maximum of devices named in a message."""


class DeadlineAction(Enum):
    """Action on a round that waits."""

    WAIT = auto()
    RECOVER = auto()
    CLOSE = auto()
    FAIL = auto()


def check_round_deadline(current_round: OpenRound, rules: RoundRules, now_s: float) -> DeadlineAction:
    """Returns the action on a waiting round; the rescue is due once."""
    # The clock of a restarted coordinator may be behind that of the one before.
    current_round.since_s = now_s if current_round.since_s is None else min(current_round.since_s, now_s)
    due_s = compute_alarm_s(current_round, rules)
    if due_s is None or current_round.is_given_up or now_s + TICK_S < due_s:
        return DeadlineAction.WAIT
    if not current_round.is_rescued:
        current_round.is_rescued = True
        return DeadlineAction.RECOVER
    return DeadlineAction.CLOSE if rules.rescue == "go-on" and current_round.num_received else DeadlineAction.FAIL


def compute_alarm_s(current_round: OpenRound, rules: RoundRules) -> float | None:
    """Returns when `check_round_deadline` is due next, None for never."""
    if rules.barrier_s is None or current_round.since_s is None:
        return None
    return current_round.since_s + rules.barrier_s * (1 + current_round.is_rescued)


def make_timeout_error(
    current_round: OpenRound, rules: RoundRules, *, number: int, now_s: float, missing: Iterable[str]
) -> StrategyError:
    """Returns the error of a round that missed its deadline in spite of the rescue.

    Args:
        current_round: the round.
        rules: with the barrier that has passed twice.
        number: of the round, from 1.
        now_s: on the fleet's clock.
        missing: names of the pending devices.
    """
    names = list(dict.fromkeys(missing))
    suffix = f" and {len(names) - MAX_LISTED_DEVICES} more" if len(names) > MAX_LISTED_DEVICES else ""
    waited_s = now_s - (now_s if current_round.since_s is None else current_round.since_s)
    return StrategyError(
        f"round {number} waited {waited_s:g} s for {', '.join(names[:MAX_LISTED_DEVICES])}{suffix}: "
        f"barrier_s = {rules.barrier_s:g} passed twice and the rescue ({rules.rescue}) did not help"
    )
