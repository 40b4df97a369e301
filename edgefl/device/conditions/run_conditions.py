"""Conditions of runs on a board: those of the run that it works for, and the answer whether it would be free now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgefl.core.allowance import Allowance, Window
from edgefl.core.conditions import (
    Blocker,
    RunConditions,
    find_blocker,
    find_close_s,
    find_next_open_s,
    is_open,
    parse_run_conditions,
)
from edgefl.core.errors import ConfigError, NetworkError
from edgefl.core.protocol import ALLOWANCE_KEY, METERED_KEY, Command, CommandReply
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.conditions.facts import LOAD_INTERVAL_S, FactReader

log = logging.getLogger(__name__)

LOAD_MARGIN_S = 0.1
PLANNED_RUN = "plan"
"""In place of the id of a run that is none yet."""


NO_RUN_CONDITIONS = RunConditions()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRun:
    """Run of the newest instruction, and its conditions.

    Attributes:
        run_id: of the run; empty before the first.
        conditions: that must hold beside the owner's.
        fault: why they cannot be read here, which lets nothing be done for the run; else empty.
        needs_base: whether its base was not fetched over a metered connection.
        asks_metered: whether it asks heartbeats to tell whether the connection is metered.
    """

    run_id: str = ""
    conditions: RunConditions = NO_RUN_CONDITIONS
    fault: str = ""
    needs_base: bool = False
    asks_metered: bool = False

    @property
    def has_conditions(self) -> bool:
        """Whether anything could block its work."""
        return bool(self.fault) or self.needs_base or self.conditions != NO_RUN_CONDITIONS

    @classmethod
    def parse(cls, run_id: str, value: object) -> AdmittedRun:
        """Returns the run of an instruction, whose header has this value of conditions."""
        try:
            return cls(run_id=run_id, conditions=parse_run_conditions(value))
        except ConfigError as error:
            return cls(run_id=run_id, fault=f"its conditions cannot be kept here: {error}")


def publish_answer(
    command: Command,
    *,
    find_owner_blocker: Callable[[], Blocker | None],
    publish: Callable[[CommandReply], bool],
    facts: FactReader | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> threading.Thread:
    """Answers a command `conditions` in a thread of its own: why this board would not be free for such a run now.

    Args:
        command: its argument is an object with the conditions under `conditions`, and `metered` where it is asked
            whether the connection is metered.
        find_owner_blocker: returns why this board may not train at all.
        publish: sends the reply.
        facts: reads what conditions ask of the board.
        clock: Unix seconds.
        sleep: waits for a second reading of the load.

    Returns:
        the thread, already started.
    """
    reader = facts or FactReader()

    def send() -> None:
        try:
            question = _parse_question(command)
            conditions = parse_run_conditions(question["conditions"])
            blocker = find_owner_blocker()
            if blocker is None:
                blocker = _find_blocker_now(conditions, reader, clock, sleep)
            content: Json = _find_hours(conditions, clock()) if blocker is None else {"blocked": blocker.to_json()}
            if question.get(METERED_KEY) is True:
                content[METERED_KEY] = reader.read_metered()
            reply = CommandReply(id=command.id, content=content)
        except (ConfigError, NetworkError) as error:
            reply = CommandReply(id=command.id, error=str(error))
        if not publish(reply):
            log.info("not connected: the answer to %s is dropped", command.id)

    thread = threading.Thread(target=send, name="conditions", daemon=True)
    thread.start()
    return thread


def _parse_question(command: Command) -> Json:
    try:
        question = parse_json(command.argument or "")
    except ValueError:
        question = None
    if not isinstance(question, dict) or "conditions" not in question:
        raise NetworkError("the question makes no sense: its argument is no JSON object with conditions")
    return question


def find_window(conditions: RunConditions, now_s: float) -> Window | None:
    """Returns the hours that hold at a moment, on the same clock; None where nothing ends them within nine days.

    Outside of them it is that they have ended.
    """
    ends_s = find_close_s(conditions, now_s) if is_open(conditions, now_s) else now_s
    return None if ends_s is None else Window(ends_s=ends_s, reopens_s=find_next_open_s(conditions, ends_s))


def _find_hours(conditions: RunConditions, now_s: float) -> Json:
    """Returns how long the run's own hours still last, as of an allowance; empty where nothing ends them."""
    window = find_window(conditions, now_s)
    if window is None:
        return {}
    return {ALLOWANCE_KEY: Allowance(run=PLANNED_RUN, run_window=window.shift(-now_s)).to_json()}


def _find_blocker_now(
    conditions: RunConditions, facts: FactReader, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Blocker | None:
    if conditions.max_other_load is not None:  # a load is that between two readings
        facts.read(conditions)
        sleep(LOAD_INTERVAL_S + LOAD_MARGIN_S)
    blocker = find_blocker(conditions, facts.read(conditions), clock())
    return None if blocker is None else replace(blocker, run=PLANNED_RUN)
