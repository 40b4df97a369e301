"""Availability of boards under the conditions of a run: each board is asked, as only it knows what they are about."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgefl.core.allowance import Allowance, parse_allowance
from edgefl.core.conditions import Blocker, format_blocker, parse_blocker
from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import ALLOWANCE_KEY, METERED_KEY, CommandKind
from edgefl.core.types import Json

log = logging.getLogger(__name__)

ANSWER_S, ASKING_S = 5.0, 15.0
"""How long a board may take to answer, and all of them together; one whose turn comes later is not asked."""
MAX_ASKED, MAX_AT_ONCE = 500, 50
"""Boards that are asked, and those at the same time; more are not known."""
MAX_NAMES = 5


class CallDevice(Protocol):
    """Asks one device; see `DeviceRpc.call`."""

    def __call__(
        self, device_id: str, kind: CommandKind, argument: Mapping[str, object], *, timeout_s: float | None = None
    ) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Which boards would be free now.

    Attributes:
        free: ids of those that would.
        blocked: why others would not, by id.
        unknown: those that did not answer.
        unasked: those that were not asked, as they were too many or the time was over.
        allowances: of the free ones whose hours for the run end; times count from the answer.
        metered: those of them all whose connection is metered, where they were asked for that.
    """

    free: tuple[str, ...] = ()
    blocked: Mapping[str, str]
    unknown: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    metered: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Returns the numbers."""
        return {
            "free": len(self.free),
            "blocked": len(self.blocked),
            "unknown": len(self.unknown) + len(self.unasked),
        }

    def list_warnings(self, unknown: str = "they would be free now") -> list[str]:
        """Returns a line about boards that did not answer, and one about those not asked; none where all have.

        `unknown` is what is not known of them.
        """
        num_asked = len(self.free) + len(self.blocked) + len(self.unknown)
        return [
            f"whether {unknown} is not known, as {why}: {_list_names(names)}"
            for names, why in ((self.unknown, "they did not answer"), (self.unasked, f"only {num_asked} were asked"))
            if names
        ]


def ask_availability(
    device_ids: Sequence[str],
    conditions: Json,
    call: CallDevice,
    *,
    asks_metered: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Availability:
    """Returns which boards would be free now for a run with these conditions.

    Args:
        device_ids: of boards that know conditions of runs.
        conditions: as instructions have them.
        call: asks one device; may raise `EdgeflError`.
        asks_metered: whether they are asked whether their connection is metered, too.
        clock: seconds, monotonic.
    """
    allowances = dict[str, Allowance]()
    until_s, unasked, metered = clock() + ASKING_S, set(device_ids[MAX_ASKED:]), set[str]()
    question = {"conditions": conditions, **({METERED_KEY: True} if asks_metered else {})}

    def ask(device_id: str) -> Blocker | bool | None:
        """Returns what blocks a board, False for nothing, None without an answer."""
        left_s = until_s - clock()
        if left_s <= 0:
            unasked.add(device_id)
            return None
        try:
            timeout_s = min(ANSWER_S, left_s)
            reply = call(device_id, CommandKind.CONDITIONS, question, timeout_s=timeout_s)
        except EdgeflError as error:
            log.info("%s", error)
            return None
        if (allowance := parse_allowance(reply.get(ALLOWANCE_KEY))) is not None:
            allowances[device_id] = allowance
        if reply.get(METERED_KEY) is True:
            metered.add(device_id)
        return parse_blocker(reply["blocked"]) if "blocked" in reply else False

    asked = list(device_ids)[:MAX_ASKED]
    with ThreadPoolExecutor(max_workers=max(1, min(MAX_AT_ONCE, len(asked)))) as threads:
        answers = dict(zip(asked, threads.map(ask, asked), strict=True))
    return Availability(
        free=tuple(name for name, answer in answers.items() if answer is False),
        blocked={name: _explain(answer) for name, answer in answers.items() if isinstance(answer, Blocker)},
        unknown=tuple(name for name, answer in answers.items() if answer is None and name not in unasked),
        unasked=tuple(name for name in device_ids if name in unasked),
        allowances=allowances,
        metered=tuple(name for name in device_ids if name in metered),
    )


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _explain(blocker: Blocker) -> str:
    if not blocker.run:
        return f"it may not train now: {format_blocker(blocker)}"
    return f"not now by the run's [conditions]: {format_blocker(replace(blocker, run=''))}"
