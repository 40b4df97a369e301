"""Incarnation numbers of a run: every resume starts another, so that assignment ids stay unique.

Strategies count their assignments on from the checkpoint, so an id may be used a second time, for other work. On the
wire the incarnation precedes it. Every turn of the journal and every fleet snapshot of a checkpoint records the
incarnation: neither a clock nor a row that was not on the disk yet may decide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from edgefl.storage.rollback import MAX_INCARNATION_ROWS

FIRST_INCARNATION = 0


def format_wire_id(run_id: str, assignment_id: str, incarnation: int = FIRST_INCARNATION) -> str:
    """Returns the id of an assignment on the wire."""
    return (
        f"{run_id}/{assignment_id}" if incarnation == FIRST_INCARNATION else f"{run_id}/{incarnation}/{assignment_id}"
    )


class RunIncarnations:
    """Wire ids of the assignments of one run.

    Args:
        run_id: of the run.
        current: its present incarnation, 0 for the first.
        previous: the incarnations of earlier assignments, oldest first; assignments not listed are of the first.
    """

    def __init__(
        self, run_id: str, current: int = FIRST_INCARNATION, previous: Mapping[str, int] | None = None
    ) -> None:
        self.run_id, self.current = run_id, current
        self._previous = dict(previous or {})
        self._current_ids: dict[str, None] = {}

    def assign_wire_id(self, assignment_id: str) -> str:
        """Returns the wire id of an assignment that is dispatched now."""
        if self.current != FIRST_INCARNATION:
            self._current_ids.pop(assignment_id, None)
            self._current_ids[assignment_id] = None
            if len(self._current_ids) > MAX_INCARNATION_ROWS:
                del self._current_ids[next(iter(self._current_ids))]
        return format_wire_id(self.run_id, assignment_id, self.current)

    def get_wire_id(self, assignment_id: str) -> str:
        """Returns the wire id of a recent assignment, the newest if there were several."""
        incarnation = (
            self.current
            if assignment_id in self._current_ids
            else self._previous.get(assignment_id, FIRST_INCARNATION)
        )
        return format_wire_id(self.run_id, assignment_id, incarnation)

    def to_dict(self) -> dict[int, list[str]]:
        """Returns the newest assignments of each incarnation but the first, oldest first, to be stored."""
        incarnation_by_id = {
            assignment_id: incarnation
            for assignment_id, incarnation in self._previous.items()
            if assignment_id not in self._current_ids
        }
        incarnation_by_id |= dict.fromkeys(self._current_ids, self.current)
        ids_by_incarnation: dict[int, list[str]] = {}
        for assignment_id in islice(incarnation_by_id, max(0, len(incarnation_by_id) - MAX_INCARNATION_ROWS), None):
            if incarnation_by_id[assignment_id] != FIRST_INCARNATION:
                ids_by_incarnation.setdefault(incarnation_by_id[assignment_id], []).append(assignment_id)
        return ids_by_incarnation
