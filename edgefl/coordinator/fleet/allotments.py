"""Which run each board works for: one run at a time, by priority.

A policy alone: a reply counts for the run that sent its instruction, whatever is allotted by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.core.types import DeviceInfo


@dataclass(slots=True, kw_only=True)
class BoardClaim:
    """What an active run claims.

    Attributes:
        run_id: of the run.
        selects: whether it could use a device.
        priority: a board goes to the run with the highest; among equals it stays where it is.
        is_kept: its boards go to no other run, whatever the priority.
        preferred_ids: boards that it had before its coordinator started.
        declined_ids: boards that it cannot use until they report anew; it has them only where no other run could.
    """

    run_id: str
    selects: Callable[[DeviceInfo], bool]
    priority: int = 0
    is_kept: bool = False
    preferred_ids: frozenset[str] = frozenset()
    declined_ids: set[str] = field(default_factory=set)


class BoardAllotments:
    """Allots boards to active runs. Not thread-safe: used under the lock of the registry.

    Args:
        is_blocked: (device, run) -> whether the conditions of this run keep the device from it now.
    """

    def __init__(self, is_blocked: Callable[[str, str], bool]) -> None:
        self._is_blocked = is_blocked
        self._claims: dict[str, BoardClaim] = {}
        self._run_ids: dict[str, str] = {}

    def open(self, claim: BoardClaim) -> None:
        """Adds the claim of a run, or replaces it; `update` then allots the boards."""
        if (former := self._claims.get(claim.run_id)) is not None:
            claim.declined_ids |= former.declined_ids
            claim.preferred_ids |= former.preferred_ids
        self._claims[claim.run_id] = claim

    def close(self, run_id: str) -> None:
        """Removes the claim of a run that is over, or waits in the queue."""
        self._claims.pop(run_id, None)

    def decline(self, device_id: str, run_id: str) -> None:
        """Records that a run cannot use a board now."""
        if (claim := self._claims.get(run_id)) is not None:
            claim.declined_ids.add(device_id)

    def accept(self, device_id: str, run_id: str | None = None) -> None:
        """Records that a run can use a board again, or, without `run_id`, that each may try it again."""
        for claim in self._claims.values():
            if run_id in {None, claim.run_id}:
                claim.declined_ids.discard(device_id)

    def remove(self, device_id: str) -> None:
        """Removes a device that has left the fleet."""
        self._run_ids.pop(device_id, None)
        self.accept(device_id)

    def get_run(self, device_id: str) -> str | None:
        """Returns the run that a board is allotted to."""
        return self._run_ids.get(device_id)

    def update(self, info: DeviceInfo) -> bool:
        """Allots a board anew; returns whether it went from one run to another, which both must be told."""
        if not self._claims and not self._run_ids:
            return False
        device_id = info.device_id
        former_id = self._run_ids.pop(device_id, None)
        former = self._claims.get(former_id or "")
        claims = [claim for claim in self._claims.values() if claim.selects(info)]
        # Of equals, max takes the first: the run that has been active for longest.
        best = max(claims, key=lambda claim: self._rank(claim, device_id, former), default=None)
        if best is not None:
            self._run_ids[device_id] = best.run_id
        return former_id is not None and best is not None and best.run_id != former_id

    def is_obtainable(self, device_id: str, run_id: str, priority: int, *, without: str | None = None) -> bool:
        """Returns whether a run of this priority would be allotted a board, if run `without` were not active."""
        holder, own = self._run_ids.get(device_id), self._claims.get(run_id)
        if own is not None and device_id in own.declined_ids:
            return False
        if holder is None or holder in {run_id, without}:
            return True
        claim = self._claims.get(holder)
        if claim is None or claim.is_kept:
            return claim is None
        return claim.priority < priority or not self._is_able(claim, device_id)

    def _rank(self, claim: BoardClaim, device_id: str, former: BoardClaim | None) -> tuple[object, ...]:
        return (
            claim is former and claim.is_kept,
            self._is_able(claim, device_id),
            claim.priority,
            device_id in claim.preferred_ids,
            claim is former,
        )

    def _is_able(self, claim: BoardClaim, device_id: str) -> bool:
        return device_id not in claim.declined_ids and not self._is_blocked(device_id, claim.run_id)
