"""The lives of a run: every resume begins another, and devices take no assignment of one for that of another.

Strategies count their assignments on from the checkpoint, so an id may be given a second time, for other work. On the
wire the life stands before it. Which life that was is written down with every turn of the journal and every standing
of a checkpoint: neither a clock nor a row that was not on the disk yet may decide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from edgefl.storage.rewinding import REMEMBERED

FIRST = 0


def wire_id(run_id: str, assignment_id: str, life: int = FIRST) -> str:
    """Returns the id that devices know an assignment by."""
    return f"{run_id}/{assignment_id}" if life == FIRST else f"{run_id}/{life}/{assignment_id}"


class Lives:
    """Says under which id devices know an assignment of this run.

    Args:
        run_id: of the run.
        number: of its present life, 0 for the first.
        before: the lives of assignments that were given before, oldest first; the first where nothing is said.
    """

    def __init__(self, run_id: str, number: int = FIRST, before: Mapping[str, int] | None = None) -> None:
        self.run_id, self.number = run_id, number
        self._before = dict(before or {})
        self._given: dict[str, None] = {}

    def given(self, assignment_id: str) -> str:
        """Returns the id of an assignment that is given now."""
        if self.number != FIRST:
            self._given.pop(assignment_id, None)
            self._given[assignment_id] = None
            if len(self._given) > REMEMBERED:
                del self._given[next(iter(self._given))]
        return wire_id(self.run_id, assignment_id, self.number)

    def known(self, assignment_id: str) -> str:
        """Returns the id of an assignment that was given lately, the newest where there were several."""
        life = self.number if assignment_id in self._given else self._before.get(assignment_id, FIRST)
        return wire_id(self.run_id, assignment_id, life)

    def told(self) -> dict[int, list[str]]:
        """Returns the newest assignments of each life but the first, oldest first, to be written down."""
        known = {name: life for name, life in self._before.items() if name not in self._given}
        known |= dict.fromkeys(self._given, self.number)
        told: dict[int, list[str]] = {}
        for name in islice(known, max(0, len(known) - REMEMBERED), None):
            if known[name] != FIRST:
                told.setdefault(known[name], []).append(name)
        return told
