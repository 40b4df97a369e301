"""A device's own control variate in a run of SCAFFOLD, which moves by what counted and by nothing else.

The coordinator's c is the mean of the devices' c_i only while both move by the same updates, and nothing brings them
together again: the optimum would be another one. So a move waits until its update is known to be used.
Source: Karimireddy et al., SCAFFOLD, ICML 2020, section 3; that updates get lost is not in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgefl.types import Array, LocalPlan

MAX_WAITING = 2
"""At most two assignments are outstanding per device."""
NAMED = 2
"""So many of the assignments that were used last a device is told of each time."""
_MAX_USED = 8
_INDEX, _OWN, _MOVE = "index", "own/", "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVariate:
    """c_i as one device has it.

    Attributes:
        began: the version of the model at which all variates of the run were zero; -1 for none yet.
        own: c_i by tensor, of all moves that counted; empty for zero, when none has.
        moves: assignment -> what c_i moves by if its update is used, oldest first.
        used: the assignments that were told last to be used.
    """

    began: int = -1
    own: Mapping[str, Array] = field(default_factory=dict)
    moves: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    used: tuple[str, ...] = ()

    @property
    def is_blank(self) -> bool:
        """Says whether no move has counted: new to the run, or all that it had is lost."""
        return not self.own

    def at(self, began: int, used: Collection[str]) -> OwnVariate:
        """Returns it at the beginning of an assignment, with the moves that counted meanwhile.

        Devices answer in the order in which they are asked, so a move that is older than a used one never will be. An
        update that was used and is not known here shows that a newer state than this one is lost, and one that was
        used and is told of no more that the run went back behind it: it begins at zero.

        Args:
            began: as the coordinator says.
            used: the device's newest used assignments, oldest first, at least the last `NAMED`.
        """
        used = tuple(used)
        is_older = not {*used} <= {*self.moves, *self.used}
        is_newer = self.used and self.used[-1] not in used and len({*used} & {*self.moves}) < NAMED
        if began != self.began or is_older or is_newer:
            return OwnVariate(began=began, used=used[-_MAX_USED:])
        own, waiting = self.own, dict(self.moves)
        newest = max((place for place, each in enumerate(waiting) if each in used), default=-1)
        for each in list(waiting)[: newest + 1]:
            move = waiting.pop(each)
            own = {name: own[name] + array if own else array for name, array in move.items()} if each in used else own
        known = tuple(dict.fromkeys((*self.used, *used)))[-_MAX_USED:]
        return replace(self, own=own, moves=waiting, used=known)

    def moved(self, assignment_id: str, after: Mapping[str, Array]) -> OwnVariate:
        """Returns it with the move of an assignment, in place of the one that was made when it was done before.

        Args:
            assignment_id: whose.
            after: c_i at the end of the assignment, by tensor; empty when the training diverged.
        """
        if after and any(_shapes(each) != _shapes(after) for each in (self.own, *self.moves.values()) if each):
            return replace(self, own={}, moves={}).moved(assignment_id, after)  # the task has another model now
        moves = {each: move for each, move in self.moves.items() if each != assignment_id}
        if after:
            moves[assignment_id] = {
                name: array - self.own[name] if self.own else np.array(array) for name, array in after.items()
            }
        return replace(self, moves=dict(list(moves.items())[-MAX_WAITING:]))

    def arrays(self) -> dict[str, Array]:
        """Returns all there is to keep on disk; the arrays are not to be written to."""
        index = json.dumps({"began": self.began, "moves": [*self.moves], "used": [*self.used]})
        moves = {
            f"{_MOVE}{place}/{name}": array
            for place, move in enumerate(self.moves.values())
            for name, array in move.items()
        }
        own = {f"{_OWN}{name}": array for name, array in self.own.items()}
        return {_INDEX: np.frombuffer(index.encode(), np.uint8), **own, **moves}


def began_in(plan: LocalPlan) -> int:
    """Returns the version at which the run's variates were zero: the number of the message that carries c."""
    return plan.inbox[0].step if plan.inbox else 0


def kept_variate(arrays: Mapping[str, Array]) -> OwnVariate:
    """Returns what `arrays` gave.

    Raises:
        ValueError: it is damaged, or of another program.
    """
    try:
        index = json.loads(arrays[_INDEX].tobytes())
        began, waiting, used = int(index["began"]), [str(each) for each in index["moves"]], index["used"]
        own = _named(arrays, _OWN)
        moves = {each: _named(arrays, f"{_MOVE}{place}/") for place, each in enumerate(waiting[:MAX_WAITING])}
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a control variate that was kept is damaged: {error!r}") from error
    shapes = [_shapes(each) for each in (own, *moves.values()) if each]
    if any(each != shapes[0] for each in shapes) or not all(moves.values()):
        raise ValueError("a control variate that was kept is damaged: its parts are of different models")
    return OwnVariate(began=began, own=own, moves=moves, used=tuple(str(each) for each in used)[-_MAX_USED:])


def _shapes(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _named(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    found = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if not all(array.dtype.kind == "f" and np.isfinite(array).all() for array in found.values()):
        raise ValueError("a control variate that was kept is damaged: it must be of finite numbers")
    return found
