"""Eligibility of devices for a run, by its run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgefl import DISTRIBUTION
from edgefl.coordinator.execution.incarnations import RunIncarnations
from edgefl.core.types import DeviceInfo, Indices, Json, Role, Tensors

NO_TORCH = f"it has no torch, and can only use finished models; on the board: install {DISTRIBUTION}[train]"
NO_NUMPY = "it says that it cannot train; edgefl device probe, on the board, says why"
MAX_REASON_CHARS = 300
EncodeChanges = Callable[[Tensors, Indices, int], bytes | None]
"""(model, changed indices, version) -> delta body for an older model; None where the full model is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Specification of a run for the live fleet.

    Attributes:
        run_id: as in the store.
        header: common to all its instructions: task, options, seed.
        groups, names: which devices take part; empty for all with a shard for `task`.
        join_at_start: only devices present at the first dispatch take part.
        encode: (model, version) -> body for the devices.
        decode: body -> displacement; raises CodecError.
        encode_changes: for devices that keep the model they were sent; None to always send the full model.
        needs_torch: devices without torch take no part: they can only use finished models.
        incarnations: give the wire ids of its assignments; None for the first incarnation.
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
    incarnations: RunIncarnations | None = None


class EligibilityFilter:
    """Decides which devices take part in a run. Evaluators with a shard for its task always do."""

    def __init__(self, run: RunSpec) -> None:
        self._run = run
        self._members: frozenset[str] | None = None

    def is_eligible(self, info: DeviceInfo) -> bool:
        """Returns whether a device may get instructions of this run."""
        run = self._run
        if run.needs_torch and not has_torch(info):
            return False
        if info.role == Role.EVALUATOR:
            return run.task in info.tasks
        if find_training_blocker(info, needs_torch=run.needs_torch):
            return False
        is_member = self._members is None or info.device_id in self._members
        return is_member and is_selected(info, task=run.task, groups=run.groups, names=run.names)

    def on_first_dispatch(self, present_ids: Iterable[str]) -> None:
        """Records the first dispatch: with `join_at_start` no device joins afterwards."""
        if self._run.join_at_start and self._members is None:
            self._members = frozenset(present_ids)


def is_selected(info: DeviceInfo, *, task: str, groups: Sequence[str], names: Sequence[str]) -> bool:
    """Returns whether a run file selects this trainer, by shard for the task, group and name."""
    return (
        task in info.tasks
        and (not groups or not set(groups).isdisjoint(info.groups))
        and (not names or info.device_id in names)
    )


def find_training_blocker(info: DeviceInfo, *, needs_torch: bool) -> str:
    """Returns why a device cannot train, in its own words if it gave any; empty if it can."""
    backends = info.capabilities.get("backends")
    backend = "torch" if needs_torch else "numpy"
    if not isinstance(backends, list) or backend in backends:
        return ""
    reasons = info.capabilities.get("backend_reasons")
    reason = reasons.get(backend) if isinstance(reasons, Mapping) else None
    return reason[:MAX_REASON_CHARS] if isinstance(reason, str) else (NO_TORCH if needs_torch else NO_NUMPY)


def has_torch(info: DeviceInfo) -> bool:
    """Returns whether a device has torch; True if it does not report its backends."""
    backends = info.capabilities.get("backends")
    return not isinstance(backends, list) or "torch" in backends
