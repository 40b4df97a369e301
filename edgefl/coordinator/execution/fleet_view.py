"""Devices of a run: which it selects, its candidates for admission, its view of them, and the report that it waits.

The live view fills its state from registry events, a resumed run from its journal; both give the same view.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from edgefl import DISTRIBUTION
from edgefl.coordinator.execution.headers import RunIncarnations
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceAdded,
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    RegistryEvent,
    parse_shard_errors,
)
from edgefl.coordinator.split.service import SplitRun
from edgefl.core.claims import DEFAULT_WEIGHT_RATIO, ClaimLimits, OnBounded, ignore_bounded
from edgefl.core.conditions import Blocker
from edgefl.core.metrics import NO_METRICS, MetricSet
from edgefl.core.protocol import (
    APP_CODING_KEY,
    COMPILED_KEY,
    CONDITIONS_KEY,
    FOR_ALL_KEY,
    NUMPY,
    ONNX,
    SLICES_KEY,
    SPARSE_KEY,
    TORCH,
    ReadinessPhase,
    select_backend,
)
from edgefl.core.types import (
    DeviceInfo,
    EvaluateInstruction,
    FleetView,
    HealthMetrics,
    Indices,
    Json,
    Progress,
    Role,
    Tensors,
    TrainInstruction,
)
from edgefl.engine.fleet_state import FleetState
from edgefl.storage.lineage import Lineage

log = logging.getLogger(__name__)

NO_TORCH = f"it has no torch, and can only use finished models; on the board: install {DISTRIBUTION}[train]"
NO_ONNX = "it has no onnxruntime for a compiled task; on the board: pip install onnxruntime"
NO_NUMPY = "it says that it cannot train; edgefl device probe, on the board, says why"
MAX_REASON_CHARS = 300
EncodeChanges = Callable[[Tensors, Indices, int], bytes | None]
"""(model, changed indices, version) -> delta body for an older model; None where the full model is smaller."""

RUN_WAITING = "run-waiting"
"""Kind of the event of a waiting run."""
SHOW_AFTER_S = 2.0
"""A run without work for so long is shown as waiting."""
UPDATE_INTERVAL_S = 1.0
REPORT_AFTER_S = 30.0
"""And after so long the history says it."""
MAX_NAMES = 5


def ignore_shortages(_view: FleetView, _device_id: str) -> Blocker | None:
    """Returns that every work fits, of a run that foresees none."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Specification of a run for the live fleet.

    Attributes:
        run_id: as in the store.
        header: common to all its instructions: task, options, seed.
        groups, names: which devices take part; empty for all with a shard for `task`.
        excluded: which do not, evaluators among them.
        join_at_start: only devices present at the first dispatch take part.
        encode: (model, version) -> body for the devices.
        decode: body -> displacement; raises CodecError.
        encode_changes: for devices that keep the model they were sent; None to always send the full model.
        encode_input: part of a job -> body for its device, in place of a model; None in a training.
        encode_whole: for evaluators, where `encode` gives devices a part of the network; None where it gives all.
        split: trains the rest of a network that is cut; None where it is not.
        metrics: of the task, whose sums come with each evaluation.
        needs_torch: devices without torch take no part: they can only use finished models.
        incarnations: give the wire ids of its assignments; None for the first incarnation.
        lineage: of the store, which instructions and answers name; None to compare nothing.
        get_newest_record: () -> number of the journal's newest durable record.
        max_weight_ratio: of what one device may weigh to the median; see `ClaimLimits`.
        min_devices: that the first round waits for.
        wait_s: how long the run may be without work; None for no limit.
        find_shortage: (view, device) -> why no work of the run fits into its hours and budgets, on the view's clock.
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
    encode_input: Callable[[int], bytes] | None = None
    encode_whole: Callable[[Tensors, int], bytes] | None = None
    split: SplitRun | None = None
    metrics: MetricSet = NO_METRICS
    needs_torch: bool = False
    incarnations: RunIncarnations | None = None
    lineage: Lineage | None = None
    get_newest_record: Callable[[], int] = lambda: 0
    max_weight_ratio: float = DEFAULT_WEIGHT_RATIO
    min_devices: int = 1
    wait_s: float | None = None
    find_shortage: Callable[[FleetView, str], Blocker | None] = ignore_shortages
    excluded: tuple[str, ...] = ()

    @property
    def compiled(self) -> Json | None:
        """What instructions say of the compiled task; None where there is none."""
        return self.header.get(COMPILED_KEY)


class EligibilityFilter:
    """Decides which devices take part in a run. Evaluators with a shard for its task do unless they are excluded."""

    def __init__(self, run: RunSpec) -> None:
        self._run = run
        self._members: frozenset[str] | None = None

    def is_eligible(self, info: DeviceInfo) -> bool:
        """Returns whether a device may get instructions of this run."""
        run = self._run
        if (run.needs_torch or info.role != Role.EVALUATOR) and find_training_blocker(
            info, needs_torch=run.needs_torch, compiled=run.compiled
        ):
            return False
        if info.role == Role.EVALUATOR:
            return is_selected_evaluator(info, task=run.task, excluded=run.excluded)
        if explain_missing_features(info, run.header):
            return False
        is_member = self._members is None or info.device_id in self._members
        return is_member and is_selected(
            info, task=run.task, groups=run.groups, names=run.names, excluded=run.excluded
        )

    def on_first_dispatch(self, present_ids: Iterable[str]) -> None:
        """Records the first dispatch: with `join_at_start` no device joins afterwards."""
        if self._run.join_at_start and self._members is None:
            self._members = frozenset(present_ids)


def is_selected(
    info: DeviceInfo, *, task: str, groups: Sequence[str], names: Sequence[str], excluded: Sequence[str] = ()
) -> bool:
    """Returns whether a run file selects this trainer, by shard for the task, group and name."""
    return (
        task in info.tasks
        and (not groups or not set(groups).isdisjoint(info.groups))
        and (not names or info.device_id in names)
        and info.device_id not in excluded
    )


def is_selected_evaluator(info: DeviceInfo, *, task: str, excluded: Sequence[str]) -> bool:
    """Returns whether a device evaluates the models of a task's run, whatever groups and names it selects."""
    return info.role == Role.EVALUATOR and task in info.tasks and info.device_id not in excluded


def explain_missing_shard(info: DeviceInfo, task: str) -> str:
    """Returns why a device has no data for a task: it was given none, or cannot read it."""
    if (error := parse_shard_errors(info.capabilities).get(task)) is not None:
        return f"it cannot read its shard for task {task!r}: {error}"
    return f"it has no shard for task {task!r}"


def find_training_blocker(info: DeviceInfo, *, needs_torch: bool, compiled: Json | None = None) -> str:
    """Returns why a device cannot train, in its own words if it gave any; empty if it can.

    Args:
        info: the device.
        needs_torch: whether the task's model is one of torch.
        compiled: of the run's header; None where its task was not compiled.
    """
    backends = info.capabilities.get("backends")
    if not isinstance(backends, list) or select_backend(backends, compiled, needs_torch=needs_torch) is not None:
        return ""
    is_for_all = compiled is not None and compiled.get(FOR_ALL_KEY)
    backend = (ONNX if is_for_all else TORCH) if needs_torch else NUMPY
    reasons = info.capabilities.get("backend_reasons")
    reason = reasons.get(backend) if isinstance(reasons, Mapping) else None
    if isinstance(reason, str):
        return reason[:MAX_REASON_CHARS]
    return {TORCH: NO_TORCH, ONNX: NO_ONNX, NUMPY: NO_NUMPY}[backend]


def explain_missing_features(info: DeviceInfo, header: Json) -> str:
    """Returns what a device's agent is too old for of what a run's header asks for; empty where it is not."""
    known = (
        (CONDITIONS_KEY, "[conditions] of a run"),
        (SLICES_KEY, "slices of updates"),
        (SPARSE_KEY, "sparse graph of secure aggregation"),
        (APP_CODING_KEY, "ef or down in the compression of a Flower app"),
    )
    for key, feature in known:
        if key in header and info.capabilities.get(key) is not True:
            return f"its agent knows no {feature}; update edgefl on it"
    return ""


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

    def get_not_ready(self, *, with_unselected: bool = False) -> dict[str, str]:
        """Returns the selected devices that are not ready, with the reason.

        `with_unselected` adds, at the end, those that only lack what the task needs, such as a shard.
        """
        names = self.list_selected()
        if with_unselected:
            infos = self._get_trainers()
            others = {*infos, *self.run.names}.difference(names)
            names += sorted(name for name in others if self._is_matching(name, infos.get(name)))
        return {name: self.get_reason(name) for name in names if self.get_status(name) is not AdmissionStatus.READY}

    def list_selected(self) -> list[str]:
        """Returns the devices that the run file selects, sorted, present or not."""
        run = self.run
        if run.names and not run.groups:
            return sorted(run.names)
        return sorted(
            name
            for name, info in self._get_trainers().items()
            if self._is_matching(name, info) and (run.groups or not self._get_permanent_reason(info))
        )

    def _get_trainers(self) -> dict[str, DeviceInfo]:
        return {info.device_id: info for info in self.registry.list_devices() if info.role == Role.TRAINER}

    def _is_matching(self, name: str, info: DeviceInfo | None) -> bool:
        """Returns whether a device is among the names and groups of the run file, where it has any."""
        run = self.run
        is_in_groups = info is None or not run.groups or not set(run.groups).isdisjoint(info.groups)
        return is_in_groups and (not run.names or name in run.names)

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
        return self._get_permanent_reason(info) or self.registry.explain_absence(device_id, self.run.run_id)

    def _get_permanent_reason(self, info: DeviceInfo) -> str:
        """Returns why a device could not take part even if present; empty if it could."""
        if info.role != Role.TRAINER:
            return f"it is an {info.role}, and trains nothing"
        if self.run.task not in info.tasks:
            return f"{explain_missing_shard(info, self.run.task)}; on the board: edgefl device shard add"
        return find_training_blocker(
            info, needs_torch=self.run.needs_torch, compiled=self.run.compiled
        ) or explain_missing_features(info, self.run.header)


class HealthSnapshot(Mapping[str, HealthMetrics]):
    """Health of devices as last read: constant within a turn, with each change reported once.

    Args:
        source: the current health.
    """

    def __init__(self, source: Mapping[str, HealthMetrics]) -> None:
        self._source = source
        self._by_device: dict[str, HealthMetrics | None] = {}
        self._current_ids: set[str] = set()
        self._changes: dict[str, HealthMetrics | None] = {}

    def start_turn(self, by_device: Mapping[str, HealthMetrics | None] | None = None) -> None:
        """Starts another turn; `by_device` restores the health reported before."""
        self._current_ids.clear()
        if by_device is not None:
            self._by_device = dict(by_device)

    def pop_changes(self) -> dict[str, HealthMetrics | None]:
        """Returns the health read since the last call that had changed."""
        changes, self._changes = self._changes, {}
        return changes

    @property
    def by_device(self) -> Mapping[str, HealthMetrics | None]:
        return self._by_device

    def __getitem__(self, device_id: str) -> HealthMetrics:
        if device_id not in self._current_ids:
            self._current_ids.add(device_id)
            current = self._source.get(device_id)
            if device_id not in self._by_device or self._by_device[device_id] != current:
                self._by_device[device_id] = self._changes[device_id] = current
        health = self._by_device[device_id]
        if health is None:
            raise KeyError(device_id)
        return health

    def __iter__(self) -> Iterator[str]:
        return (device_id for device_id in list(self._source) if device_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LiveFleetView(FleetState):
    """Implements `FleetView`: constant until `refresh`, but for the run's own dispatches.

    Not thread-safe but for the handling of registry events: used by the run's thread alone.
    """

    def __init__(
        self,
        run: RunSpec,
        registry: DeviceRegistry,
        clock: Callable[[], float],
        *,
        is_admitted: Callable[[str], bool] = lambda _: True,
        on_bounded: OnBounded = ignore_bounded,
    ) -> None:
        self.health_snapshot = HealthSnapshot(registry.health)
        limits = ClaimLimits(
            task=run.task,
            max_weight_ratio=run.max_weight_ratio,
            test_fraction=float(run.header.get("test_fraction", 0.0)),
            on_bounded=on_bounded,
        )
        super().__init__(self.health_snapshot, limits=limits)
        self.run_id = run.run_id
        self._registry, self._clock, self._is_admitted = registry, clock, is_admitted
        self._eligibility = EligibilityFilter(run)
        self._stale_ids: set[str] = set()
        self._changes: dict[str, DeviceInfo | None] = {}
        self._progress_reports: list[Progress] = []
        self._lock = threading.Lock()
        self.close = registry.subscribe(self._on_registry_event)
        for info in registry.list_schedulable(run.run_id):
            self._update_from_registry(info.device_id)
        self.start_turn(clock())

    def refresh(self) -> LiveFleetView:
        """Applies the device changes since the last call, and returns itself."""
        with self._lock:
            stale, self._stale_ids = self._stale_ids, set()
        for device_id in stale:
            self._update_from_registry(device_id)
        self.start_turn(self._clock())
        self.health_snapshot.start_turn()
        return self

    def pop_changes(self) -> tuple[dict[str, DeviceInfo | None], tuple[Progress, ...]]:
        """Returns the changes since the last call: devices (None for one that left), and progress reports."""
        changed, self._changes = self._changes, {}
        reports, self._progress_reports = self._progress_reports, []
        return changed, tuple(reports)

    def is_eligible(self, device_id: str) -> bool:
        """Returns whether a device is a present trainer that the run selects."""
        info = self._registry.get_schedulable(device_id, self.run_id)
        return info is not None and info.role == Role.TRAINER and self._eligibility.is_eligible(info)

    def admit(self, device_id: str) -> None:
        """Marks a device for the next `refresh`: one that is admitted, or reports another allowance."""
        with self._lock:
            self._stale_ids.add(device_id)

    def assign(self, instruction: TrainInstruction | EvaluateInstruction) -> None:
        if isinstance(instruction, TrainInstruction):
            self._eligibility.on_first_dispatch(self.devices)
        super().assign(instruction)

    def record_progress(self, progress: Progress) -> None:
        self._progress_reports.append(progress)
        super().record_progress(progress)

    def restore_from(self, other: FleetState) -> None:
        """Restores the state at the end of a journal; its devices are absent until they report again."""
        if other.busy or other.speeds:
            self._eligibility.on_first_dispatch(other.devices)
        super().restore_from(other)
        absent: dict[str, DeviceInfo | None] = dict.fromkeys(other.devices)
        self._changes = {**absent, **self.devices}

    def _on_registry_event(self, event: RegistryEvent) -> None:
        if isinstance(event, PresenceChanged | DeviceAdded | DeviceChanged | DeviceRemoved):
            with self._lock:
                self._stale_ids.add(event.device_id)

    def _update_from_registry(self, device_id: str) -> None:
        info = self._registry.get_schedulable(device_id, self.run_id)
        may_work = info is not None and (info.role == Role.EVALUATOR or self._is_admitted(device_id))
        is_eligible = info is not None and self._eligibility.is_eligible(info)
        if info is not None and not is_eligible and self._registry.get_allotted_run(device_id) == self.run_id:
            self._registry.decline_board(device_id, self.run_id)
        listed_info = info if may_work and is_eligible else None
        if listed_info is not None:
            allowance = self._registry.get_allowance(device_id, self.run_id, self._clock())
            listed_info = listed_info if allowance is None else replace(listed_info, allowance=allowance)
        if listed_info != self.devices.get(device_id):
            self._changes[device_id] = listed_info
        self.update_device(device_id, listed_info)


class IdleRunReporter:
    """Says that a run has no work, and whom it lacks. Not thread-safe: used by the run's thread alone.

    Attributes:
        run: the run.
        clock: seconds, monotonic.
        record_event: (kind, message) -> None; writes an event of the run to the history, once per wait.
        get_not_ready: () -> why devices are not ready, by id.
        on_waiting: (reason) -> None; what the run waits for, every second, and empty once it has work.
        has_started: training was dispatched; the run goes on with any device from then on.
    """

    def __init__(
        self,
        run: RunSpec,
        clock: Callable[[], float],
        record_event: Callable[[str, str], None],
        *,
        get_not_ready: Callable[[], Mapping[str, str]] = dict,
        on_waiting: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._run, self._clock, self._record_event = run, clock, record_event
        self._get_not_ready, self._on_waiting = get_not_ready, on_waiting
        self._since_s: float | None = None
        self._update_s = 0.0
        self._is_reported = False
        self._reason = ""
        self.has_started = False

    def poll(self, idle_devices: Sequence[str], *, has_work: bool) -> bool:
        """Updates the reason; returns whether it has just recorded the event, `REPORT_AFTER_S` after the last work.

        `idle_devices` are those that could work.
        """
        now_s = self._clock()
        if has_work:
            if self._reason:
                self._on_waiting("")
            self._since_s, self._is_reported, self._reason = None, False, ""
            return False
        if self._since_s is None:
            self._since_s, self._update_s = now_s, now_s + SHOW_AFTER_S
        if now_s >= self._update_s:
            self._reason, self._update_s = self._format_reason(idle_devices), now_s + UPDATE_INTERVAL_S
            self._on_waiting(self._reason)
        if self._is_reported or now_s - self._since_s < REPORT_AFTER_S:
            return False
        self._is_reported = True
        log.warning("run %s is %s", self._run.run_id, self._reason)
        self._record_event(RUN_WAITING, self._reason)
        return True

    def find_overdue_reason(self) -> str | None:
        """Returns why the run ends, since it has waited for `wait_s`; None while it has not."""
        limit_s, since_s = self._run.wait_s, self._since_s
        if limit_s is None or since_s is None or self._clock() < since_s + limit_s:
            return None
        return f"gave up after devices.wait_s = {limit_s:g} s: {self._reason or self._format_reason(())}"

    def next_poll_s(self) -> float | None:
        """Returns when to poll next; None while there is work."""
        if self._since_s is None:
            return None
        report_s = self._update_s if self._is_reported else min(self._update_s, self._since_s + REPORT_AFTER_S)
        return report_s if self._run.wait_s is None else min(report_s, self._since_s + self._run.wait_s)

    def _format_reason(self, idle_devices: Sequence[str]) -> str:
        names = ", ".join(idle_devices[:MAX_NAMES]) + (", …" if len(idle_devices) > MAX_NAMES else "")
        ready = f"{len(idle_devices)} ready ({names})" if idle_devices else "none is ready"
        count = (1 if self.has_started else self._run.min_devices) - len(idle_devices)
        if count <= 0 and self._run.encode_input is not None:
            others = [_format_absent(name, reason) for name, reason in self._get_not_ready().items()]
            listed = "; ".join(others[:MAX_NAMES]) or "they get no more of them in this run, or rest"
            return f"waiting: {ready}, and parts that are left are those of other boards: {listed}"
        if count <= 0:
            return (
                f"waiting: {ready}, and they get no work: they rest, or the strategy's graph has boards that are not"
                " there"
            )
        boards = "a board" if count == 1 and not idle_devices else f"{count} more board{'s' if count > 1 else ''}"
        absent = [_format_absent(name, reason) for name, reason in self._get_not_ready().items()]
        more = [f"and {len(absent) - MAX_NAMES} more that are not"] if len(absent) > MAX_NAMES else []
        listed = ", ".join([ready, *absent[:MAX_NAMES], *more])
        return f"waiting for {boards} with a shard for {self._run.task}: {listed}"


def _format_absent(device_id: str, reason: str) -> str:
    words = reason.partition(";")[0]  # what to do about it follows
    return f"{device_id} {words.removeprefix('it ')}" if words.startswith("it ") else f"{device_id}: {words}"
