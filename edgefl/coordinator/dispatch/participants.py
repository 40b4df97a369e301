"""Who takes part in a run: what the run file says of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgefl import DISTRIBUTION
from edgefl.coordinator.dispatch.lives import Lives
from edgefl.types import DeviceInfo, Indices, Json, Role, Tensors

NO_TORCH = f"it has no torch, and can only use finished models; on the board: install {DISTRIBUTION}[train]"
NO_NUMPY = "it says that it cannot train; edgefl device probe, on the board, says why"
MAX_REASON_CHARS = 300
EncodeChanges = Callable[[Tensors, Indices, int], bytes | None]
"""(model, what changed, version) -> body that turns an older model into this one; None where the whole is smaller."""


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
        encode_changes: for devices that keep the model they were sent; None when everybody always gets the whole one.
        needs_torch: devices without it take no part: they can only use finished models.
        lives: under which ids devices know its assignments; None for a run in its first life.
    """

    run_id: str
    task: str
    header: Json
    groups: tuple[str, ...]
    names: tuple[str, ...]
    join_at_start: bool
    encode: Callable[[Tensors, int], bytes]
    decode: Callable[[bytes], Tensors]
    encode_changes: EncodeChanges | None = None
    needs_torch: bool = False
    lives: Lives | None = None


class Participants:
    """Judges which devices take part in a run. Evaluators with a shard for its task always do."""

    def __init__(self, run: FleetRun) -> None:
        self._run = run
        self._members: frozenset[str] | None = None

    def accepts(self, info: DeviceInfo) -> bool:
        """Returns whether the device may be given work of this run."""
        run = self._run
        if run.needs_torch and not has_torch(info):
            return False
        if info.role == Role.EVALUATOR:
            return run.task in info.tasks
        if why_untrained(info, needs_torch=run.needs_torch):
            return False
        is_member = self._members is None or info.device_id in self._members
        return is_member and is_meant(info, task=run.task, groups=run.groups, names=run.names)

    def begin(self, present: Iterable[str]) -> None:
        """Says that the first work is given out: with `join_at_start` nobody enters after this."""
        if self._run.join_at_start and self._members is None:
            self._members = frozenset(present)


def is_meant(info: DeviceInfo, *, task: str, groups: Sequence[str], names: Sequence[str]) -> bool:
    """Returns whether a run file means this trainer: a shard for the task, and a group and a name as asked."""
    return (
        task in info.tasks
        and (not groups or not set(groups).isdisjoint(info.groups))
        and (not names or info.device_id in names)
    )


def why_untrained(info: DeviceInfo, *, needs_torch: bool) -> str:
    """Returns why a board cannot train a task, empty where it can; its own words where it has any."""
    known = info.capabilities.get("backends")
    backend = "torch" if needs_torch else "numpy"
    if not isinstance(known, list) or backend in known:
        return ""
    reasons = info.capabilities.get("backend_reasons")
    told = reasons.get(backend) if isinstance(reasons, Mapping) else None
    return told[:MAX_REASON_CHARS] if isinstance(told, str) else (NO_TORCH if needs_torch else NO_NUMPY)


def has_torch(info: DeviceInfo) -> bool:
    """Returns whether a device has torch; one that does not say is taken to have what it needs."""
    backends = info.capabilities.get("backends")
    return not isinstance(backends, list) or "torch" in backends
