"""Which devices a run selects: its specification, its filter, and its candidates for admission."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl import DISTRIBUTION
from edgefl.coordinator.execution.headers import RunIncarnations
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.claims import DEFAULT_WEIGHT_RATIO
from edgefl.core.protocol import ReadinessPhase
from edgefl.core.types import DeviceInfo, Indices, Json, Role, Tensors
from edgefl.storage.lineage import Lineage

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
        lineage: of the store, which instructions and answers name; None to compare nothing.
        get_newest_record: () -> number of the journal's newest durable record.
        max_weight_ratio: of what one device may weigh to the median; see `ClaimLimits`.
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
    lineage: Lineage | None = None
    get_newest_record: Callable[[], int] = lambda: 0
    max_weight_ratio: float = DEFAULT_WEIGHT_RATIO


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


class AdmissionStatus(StrEnum):
    """Admission status of a device."""

    PENDING = "pending"
    READY = "ready"
    REJECTED = "rejected"


@dataclass(slots=True, kw_only=True)
class Candidate:
    """Admission state of one device.

    Attributes:
        phase, status: the phase of the query pending or answered last, and its outcome.
        first_query_s, sent_s: when the first and the newest query were sent.
        not_held_since_s: since when the newest query is delivered and not held; it may still be on the way.
        message_id: of the pending query; empty if there is none.
        model_version: of the model sent along; None if there was none.
        reason: why it was rejected.
        is_busy, current_assignment: it works on another assignment, and its id.
        is_heartbeat_requested: a heartbeat was requested.
        is_unannounced: it is ready, and `poll` has not returned it yet.
        is_rejection_recorded: the history has its rejection.
    """

    device_id: str
    first_query_s: float
    phase: ReadinessPhase = ReadinessPhase.CAN
    status: AdmissionStatus = AdmissionStatus.PENDING
    sent_s: float = 0.0
    not_held_since_s: float | None = None
    message_id: str = ""
    model_version: int | None = None
    reason: str = ""
    is_busy: bool = False
    current_assignment: str = ""
    is_heartbeat_requested: bool = False
    is_unannounced: bool = False
    is_rejection_recorded: bool = False


@dataclass(slots=True, kw_only=True)
class Candidates:
    """All candidates, and the devices that the run selects; `ready_s` limits admission, in seconds of `clock`."""

    run: RunSpec
    registry: DeviceRegistry
    ready_s: float
    clock: Callable[[], float]
    by_device: dict[str, Candidate] = field(default_factory=dict)

    def get_not_ready(self) -> dict[str, str]:
        """Returns the selected devices that are not ready, with the reason."""
        return {
            name: self.get_reason(name)
            for name in self.list_selected()
            if self.get_status(name) is not AdmissionStatus.READY
        }

    def list_selected(self) -> list[str]:
        """Returns the devices that the run file selects, sorted, present or not."""
        run = self.run
        if run.names and not run.groups:
            return sorted(run.names)
        trainers = [info for info in self.registry.list_devices() if info.role == Role.TRAINER]
        return sorted(
            info.device_id
            for info in trainers
            if (not run.groups or not set(run.groups).isdisjoint(info.groups))
            and (not run.names or info.device_id in run.names)
            and (run.groups or not self._get_permanent_reason(info))
        )

    def get_status(self, device_id: str) -> AdmissionStatus | None:
        """Returns the status of a device; None if it may still come."""
        candidate, info = self.by_device.get(device_id), self.registry.get_device(device_id)
        if candidate is None and (info is None or self._get_permanent_reason(info)):
            return AdmissionStatus.REJECTED
        return candidate.status if candidate is not None else None

    def get_reason(self, device_id: str) -> str:
        """Returns why a device is not ready."""
        candidate, info = self.by_device.get(device_id), self.registry.get_device(device_id)
        if candidate is not None:
            is_late = self.clock() >= candidate.first_query_s + self.ready_s
            no_answer = f"it has not answered within {self.ready_s:g} s" if is_late else "it has not answered yet"
            return candidate.reason or (
                f"it is busy with {candidate.current_assignment}"
                if candidate.is_busy
                else f"{no_answer} ({candidate.phase})"
            )
        if info is None:
            return "there is no such device in the fleet"
        return self._get_permanent_reason(info) or f"it is {self.registry.format_state(device_id) or 'not there'}"

    def _get_permanent_reason(self, info: DeviceInfo) -> str:
        """Returns why a device could not take part even if present; empty if it could."""
        if info.role != Role.TRAINER:
            return f"it is an {info.role}, and trains nothing"
        if self.run.task not in info.tasks:
            return f"it has no shard for task {self.run.task!r}; on the board: edgefl device shard add"
        return find_training_blocker(info, needs_torch=self.run.needs_torch)
