"""Who takes part in a run: what the run file says, held against who is present."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgefl.coordinator.roster import Roster
from edgefl.types import DeviceInfo, Json, Role, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """What the live fleet has to know of a run.

    Attributes:
        run_id: as in the store.
        header: what every device is told: task, options, seed.
        groups, names: who takes part; empty for everybody with a shard for `task`.
        join_at_start: only devices that are there when the first work is given out take part.
        encode: (model, version) -> body for the devices.
        decode: body -> displacement; raises CodecError.
    """

    run_id: str
    task: str
    header: Json
    groups: tuple[str, ...]
    names: tuple[str, ...]
    join_at_start: bool
    encode: Callable[[Tensors, int], bytes]
    decode: Callable[[bytes], Tensors]


class Participants:
    """The present devices that take part in a run. Evaluators with a shard for its task always do."""

    def __init__(self, run: FleetRun, roster: Roster) -> None:
        self._run, self._roster = run, roster
        self._members: frozenset[str] | None = None

    def present(self) -> dict[str, DeviceInfo]:
        """Returns who can be given work now, by id, sorted."""
        return {
            info.device_id: info
            for info in self._roster.workers()
            if self._run.task in info.tasks and (info.role == Role.EVALUATOR or self._takes_part(info))
        }

    def begin(self) -> None:
        """Says that the first work is given out: with `join_at_start` nobody enters after this."""
        if self._run.join_at_start and self._members is None:
            self._members = frozenset(self.present())

    def _takes_part(self, info: DeviceInfo) -> bool:
        run, members = self._run, self._members
        return (
            (not run.groups or not set(run.groups).isdisjoint(info.groups))
            and (not run.names or info.device_id in run.names)
            and (members is None or info.device_id in members)
        )
