"""Rounds of a site: an instruction of the coordinator upstream goes to the site's boards, and one answer goes back.

A site gateway is a coordinator for its boards and one device for the coordinator upstream. Here is what lies between:
the boards are given the instruction as it came, their updates are added up in the order of the boards' names, and the
answer is the mean of them, weighted by their examples, with the sum of the examples. A mean of such means, weighted
by these sums, is the mean over all boards.

A round has a folder with a journal of its own, named by the instruction. An update is durable before it counts; a
gateway that was killed goes on with the same round, asks only the boards whose update it lacks, and sends an answer
that it has finished again, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.error_feedback import MAX_PENDING
from edgefl.coordinator.execution.admission import AdmissionRequirements, NotEnoughDevicesError
from edgefl.coordinator.execution.fleet_view import AdmissionStatus, RunSpec
from edgefl.coordinator.execution.live_fleet import InterruptedRunError, LiveFleet
from edgefl.coordinator.execution.messaging import DeviceNotifier, InstructionTransport
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceAdded,
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    RegistryEvent,
)
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.claims import ClaimLimits
from edgefl.core.errors import DataError, JournalError, StoreError, TaskError
from edgefl.core.metrics import MetricSet
from edgefl.core.protocol import Command, CommandKind
from edgefl.core.safe_parsing import parse_json
from edgefl.core.sites import MAX_SITE_BOARDS, SITE_KEY, SITE_LIMITS_KEY, BoardShare, SiteLimits, SiteTask
from edgefl.core.types import (
    EPSILON,
    Array,
    Decision,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    Instruction,
    InstructionFailed,
    Json,
    Progress,
    Role,
    SparseTensor,
    StopRequested,
    Tensor,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateStatus,
    derive_rng,
)
from edgefl.engine.fleet_state import FleetState
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.store import REJECTED_EVENT_KIND
from edgefl.strategies.aggregation import StreamingMean
from edgefl.strategies.update_guard import UpdateGuard
from edgefl.system.atomic_files import make_private_directory, write_atomic

log = logging.getLogger(__name__)

FOLDER = "site-rounds"
REPLY_FILE, JOURNAL_FOLDER, INDEX_FILE = "reply", "journal", "index.json"
MAX_KEPT_ROUNDS = 16
"""Finished rounds whose answer is kept; the coordinator upstream asks for at most two again."""
MAX_KEPT_RUNS, MAX_KEPT_NAMES = 16, 64
"""Runs of which something is known, and assignments of which is known that they were used, or end early."""
READY_S = 20.0
"""Longest time in which boards say whether they can take part; upstream waits 30 s for the gateway's answer."""
ANSWER_S = 5.0
"""Once a board is ready, the time in which the others can still say that they are not."""
EARLY_S = 30.0
"""Time in which a board that is asked to finish early has to answer."""
PATIENCE_S, PATIENCE_RATIO = 1800.0, 4.0
"""Without a deadline, once half of the boards have answered: the others have so long, or that many times as long as
the last of these took, whichever is more."""
MAX_MARGIN_S, MARGIN_SHARE = 30.0, 0.1
"""Of the run's deadline, which is for the way upstream."""
EVALUATION_S = 540.0
"""Longest evaluation of a site; upstream waits for it `EVALUATION_DEADLINE_S`."""
REJOIN_S = 30.0
"""After the start of the gateway, the time that a round waits for boards that have joined before."""
POLL_S = 1.0
SPARSE_SHARE = 0.45
"""An entry of a sparse update costs an index beside its value: above this share of entries a dense one is smaller."""

OnAlive = Callable[[], None]
"""Called every so often while the boards work."""
RecordEvent = Callable[[str, str, str], None]
"""(kind, device, message) -> None; writes an event to the gateway's history."""

_OF_ONE_MESSAGE = frozenset(
    {
        "assignment", "version", "plan", "codec", "used_assignments", "base_version", "prefetched_version",
        "keeps_model", "has_stored_reply", "has_model", "lineage", "model_sha256", "newest_record", "messages",
        "phase", "layout", "needs", "edgefl",
    }
)  # fmt: skip
"""Entries of an instruction's header that are not of its run."""


class _SentModel:
    """Model provider of one instruction: its body, as it came."""

    def __init__(self, version: int) -> None:
        self.version = version

    def model(self) -> Tensors:
        return {}

    def device_model(self, device_id: str) -> Tensors:
        raise DataError(f"a gateway has no model of {device_id!r}")

    def changed(self, since: int) -> None:  # noqa: ARG002 boards of a site get whole models
        return None


@dataclass(slots=True)
class _SiteRun:
    """What is known of a run while the gateway runs: boards that cannot take part, and the refusals of others."""

    rejected: set[str] = field(default_factory=set)
    guard: UpdateGuard = field(default_factory=UpdateGuard)

    @property
    def excluded(self) -> frozenset[str]:
        return frozenset(self.rejected | self.guard.state.quarantined)


class SiteRounds:
    """Rounds of the site's boards for the coordinator upstream. One thread calls them; `post` and `stop` are for any.

    Args:
        folder: of the rounds under way and the newest finished ones.
        registry, notifier, open_transport: the site's boards, and how they are reached.
        clock: seconds, monotonic.
        record_event: writes an event to the gateway's history.
    """

    def __init__(
        self,
        folder: Path,
        *,
        registry: DeviceRegistry,
        notifier: DeviceNotifier,
        open_transport: Callable[[], InstructionTransport],
        clock: Callable[[], float],
        record_event: RecordEvent = lambda _kind, _device, _message: None,
    ) -> None:
        self._folder, self._registry, self._notifier = folder, registry, notifier
        self._open_transport, self._clock, self._record_event = open_transport, clock, record_event
        self._started_s = clock()
        self._fleet: LiveFleet | None = None
        self._run_id = ""
        self._assignment = ""
        self._is_stopping = False
        self._early: deque[str] = deque(maxlen=MAX_KEPT_NAMES)
        self._runs: dict[str, _SiteRun] = {}
        self._lock = threading.Lock()
        make_private_directory(folder)
        self._index = RoundIndex.load(folder)

    # For the messages of the boards.

    def post(self, item: Reply | Progress) -> None:
        """Passes a reply or a progress report of a board to the round under way."""
        fleet = self._fleet
        if fleet is not None:
            fleet.post(item)

    def is_current(self, run_id: str) -> bool:
        """Returns whether the newest instruction is of this run."""
        return bool(run_id) and run_id == self._run_id

    def stop(self) -> None:
        """Interrupts the round under way; it goes on when its instruction comes again."""
        with self._lock:
            self._is_stopping = True
            if self._fleet is not None:
                self._fleet.post(InterruptedRunError("the gateway stops"))

    def finish_early(self, assignment: str) -> None:
        """Asks the boards to send what they have of an instruction."""
        with self._lock:
            self._early.append(assignment)
            if self._fleet is not None and assignment == self._assignment:
                self._fleet.post(StopRequested(reason="the coordinator upstream wants the answer now"))

    def complete_run(self, run_id: str) -> None:
        """Tells the boards that a run is over upstream: its conditions block them no more."""
        if self.is_current(run_id):
            self._run_id = ""
        self._runs.pop(run_id, None)
        for info in self.list_boards():
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.END, argument=run_id)
            self._notifier.send_command(info.device_id, command)

    # For the coordinator upstream.

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Calls `on_change` when boards come, go or have other data; returns what ends that."""

        def on_event(event: RegistryEvent) -> None:
            if isinstance(event, DeviceAdded | DeviceChanged | DeviceRemoved | PresenceChanged):
                on_change()

        return self._registry.subscribe(on_event)

    def list_boards(self) -> list[DeviceInfo]:
        """Returns the boards of the site that train, present or not, by name."""
        boards = [info for info in self._registry.list_devices() if info.role == Role.TRAINER]
        return sorted(boards, key=lambda info: info.device_id)

    def count_online(self) -> int:
        """Returns how many boards can be given work now."""
        return sum(info.role == Role.TRAINER for info in self._registry.list_schedulable())

    def count_examples(self) -> dict[str, int]:
        """Returns by task what the site's boards weigh together: their examples, at least one for each board."""
        counts: dict[str, int] = {}
        for info in self.list_boards():
            for task in info.tasks:
                counts[task] = counts.get(task, 0) + max(1, info.examples.get(task, 0))
        return counts

    def check_ready(self, header: Json, task: SiteTask, on_alive: OnAlive) -> None:
        """Returns once a board is ready for the run of a header; those that are not get no work of it.

        Raises:
            DataError: the site has no board that could take part, with the reason of each.
            InterruptedRunError: the gateway stops.
        """
        self._require_boards(str(header.get("task")))
        needs = header.get("needs") or {}
        requirements = AdmissionRequirements(
            ready_s=READY_S,
            model_fingerprint=str(header.get("layout")),
            memory_bytes=int(needs.get("memory_bytes", 0)),
            disk_bytes=int(needs.get("disk_bytes", 0)),
            should_prefetch_model=False,
        )
        fleet = self._open_fleet(header, task, b"", requirements)
        until_s = self._clock() + READY_S
        ready_s = None
        try:
            while self._clock() < until_s:
                on_alive()
                fleet.wait(min(until_s, self._clock() + POLL_S / 4))
                ready_s = self._clock() if ready_s is None and fleet.view().idle else ready_s
                has_answered = AdmissionStatus.PENDING not in fleet.get_admission_statuses().values()
                if ready_s is not None and (has_answered or self._clock() >= ready_s + ANSWER_S):
                    return
            if ready_s is not None:
                return
        except NotEnoughDevicesError as error:
            raise DataError(f"no board of this site can take part: {error}") from None
        finally:
            statuses = fleet.get_admission_statuses().items()
            rejected = {name for name, status in statuses if status is AdmissionStatus.REJECTED}
            self._get_run(str(header["run"])).rejected = rejected
            self._close_fleet(fleet, will_resume=False)
        raise DataError(f"no board of this site was ready within {READY_S:g} s: {self._explain_absence(header)}")

    def load_reply(self, header: Json) -> tuple[Json, bytes] | None:
        """Returns the answer to an instruction where its round is complete."""
        return RoundRecord.open(self._folder, header).load_reply()

    def run_round(self, header: Json, body: bytes, task: SiteTask, on_alive: OnAlive) -> tuple[Json, bytes]:
        """Returns the site's update: header entries and encoded mean displacement.

        Args:
            header: of the instruction.
            body: whole model, encoded.
            task: that is trained.
            on_alive: see `OnAlive`.

        Raises:
            DataError: no board has sent an update.
            InterruptedRunError: the gateway stops.
        """
        record = RoundRecord.open(self._folder, header)
        if (reply := record.load_reply()) is not None:
            log.info("%s is answered again from disk", header.get("assignment"))
            return reply
        used = self._index.add_round(record, header)
        try:
            return self._run_round(record, header, body, task, on_alive, used)
        except JournalError as error:
            # The boards still have their answers, and upstream counts one answer to an instruction.
            log.warning("the round of %s begins anew: %s", header.get("assignment"), error)
            shutil.rmtree(record.path / JOURNAL_FOLDER)
            return self._run_round(record, header, body, task, on_alive, used)
        finally:
            with self._lock:
                self._early = deque(
                    (name for name in self._early if name != header.get("assignment")), maxlen=MAX_KEPT_NAMES
                )
            self._remove_old_rounds(record)

    def _run_round(
        self,
        record: RoundRecord,
        header: Json,
        body: bytes,
        task: SiteTask,
        on_alive: OnAlive,
        used: Mapping[str, Sequence[str]],
    ) -> tuple[Json, bytes]:
        run = self._get_run(str(header["run"]))
        run.guard.shapes = task.spec
        fleet = self._open_fleet(header, task, body)
        is_done = False
        try:
            with WalJournal(record.path / JOURNAL_FOLDER, lambda content: decode_body(content, task.spec)) as wal:
                site_round = _SiteRound(
                    header=header,
                    task=task,
                    record=record,
                    fleet=fleet,
                    wal=wal,
                    used=used,
                    run=run,
                    record_event=self._record_event,
                )
                site_round.resume(self._registry)
                if not site_round.assigned:
                    self._wait_for_boards(fleet, header, on_alive)
                site_round.collect(self._clock, on_alive, lambda: self._ends_early(header))
                is_done = True
                reply, shares = site_round.make_reply(), site_round.list_used()
            self._save_reply(record, reply, shares)
        finally:
            self._close_fleet(fleet, will_resume=not is_done)
        return reply

    def _save_reply(self, record: RoundRecord, reply: tuple[Json, bytes], shares: Mapping[str, str]) -> None:
        """Writes an answer; where that fails the journal stays, from which it can be made again."""
        try:
            record.save_reply(reply, shares)
        except StoreError as error:
            log.warning("the answer goes upstream, and is kept here only in the round's journal: %s", error)
            self._index.unsaved[record.path.name] = dict(shares)

    def _ends_early(self, header: Json) -> bool:
        with self._lock:
            return str(header.get("assignment")) in self._early

    def _get_run(self, run_id: str) -> _SiteRun:
        run = self._runs[run_id] = self._runs.pop(run_id, _SiteRun())
        for name in [*self._runs][:-MAX_KEPT_RUNS]:
            self._runs.pop(name, None)
        return run

    def evaluate(self, header: Json, body: bytes, task: SiteTask, on_alive: OnAlive) -> tuple[Json, bytes]:
        """Returns the site's evaluation of a model: header entries, and the sums of the task's metrics.

        Raises:
            DataError: no board has evaluated it.
            InterruptedRunError: the gateway stops.
        """
        fleet, version = self._open_fleet(header, task, body), int(header["version"])
        identity = compute_identity(header)
        is_done = False
        try:
            self._wait_for_boards(fleet, header, on_alive)
            boards = _list_idle(fleet, self._get_run(str(header["run"])).excluded)
            instructions = [
                EvaluateInstruction(
                    assignment_id=f"{identity}-{number}", device_id=board, version=version, round=version
                )
                for number, board in enumerate(boards)
            ]
            fleet.dispatch(instructions, _SentModel(version))
            pending = {instruction.assignment_id for instruction in instructions}
            results: list[EvaluateResult] = []
            until_s = self._clock() + EVALUATION_S
            while pending and self._clock() < until_s:
                on_alive()
                for event in fleet.wait(self._clock() + POLL_S):
                    if isinstance(event, EvaluateResult | InstructionFailed):
                        pending.discard(event.assignment_id)
                    if isinstance(event, EvaluateResult) and event.num_examples > 0:
                        results.append(event)
            is_done = True
        finally:
            self._close_fleet(fleet, will_resume=not is_done)
        return combine_evaluations(results, task.metrics, self._record_event)

    def _open_fleet(
        self, header: Json, task: SiteTask, body: bytes, requirements: AdmissionRequirements | None = None
    ) -> LiveFleet:
        run_id, limits = str(header["run"]), get_site_limits(header)
        run = RunSpec(
            run_id=run_id,
            task=str(header["task"]),
            header={
                **{name: value for name, value in header.items() if name not in _OF_ONE_MESSAGE},
                SITE_LIMITS_KEY: limits.to_json(),
            },
            groups=(),
            names=(),
            join_at_start=False,
            encode=lambda _model, _version: body,
            decode=lambda content: decode_body(content, task.spec),
            metrics=task.metrics,
            needs_torch=task.needs_torch,
            max_weight_ratio=limits.max_weight_ratio,
        )
        fleet = LiveFleet(
            run=run,
            transport=self._open_transport(),
            registry=self._registry,
            notifier=self._notifier,
            clock=self._clock,
            requirements=requirements,
            record_event=self._record_event,
            spool_folder=self._folder,
        )
        with self._lock:
            self._fleet, self._run_id, self._assignment = fleet, run_id, str(header.get("assignment"))
            if self._is_stopping:
                fleet.post(InterruptedRunError("the gateway stops"))
        return fleet

    def _close_fleet(self, fleet: LiveFleet, *, will_resume: bool) -> None:
        with self._lock:
            self._fleet = None
        fleet.close(will_resume=will_resume)

    def _require_boards(self, task: str) -> list[DeviceInfo]:
        """Returns the site's boards with a shard for a task.

        Raises:
            DataError: there is none.
        """
        boards = [info for info in self.list_boards() if task in info.tasks]
        if not boards:
            raise DataError(
                f"this site has no board with a shard for task {task!r}, of {len(self.list_boards())} that have "
                "joined; `edgefl gateway token` lets boards join"
            )
        return boards

    def _wait_for_boards(self, fleet: LiveFleet, header: Json, on_alive: OnAlive) -> None:
        """Returns when a board with a shard is there; after a start of the gateway it waits a while for all.

        Raises:
            DataError: none is there.
        """
        excluded, now_s = self._get_run(str(header["run"])).excluded, self._clock()
        names = {info.device_id for info in self._require_boards(str(header["task"]))} - excluded
        rejoin_s, until_s = self._started_s + REJOIN_S, max(now_s + POLL_S, self._started_s + REJOIN_S)
        while self._clock() < until_s and not self._ends_early(header):
            idle = set(_list_idle(fleet, excluded))
            if names <= idle or (idle and self._clock() >= rejoin_s):
                break
            on_alive()
            fleet.wait(self._clock() + POLL_S / 4)
        if not _list_idle(fleet, excluded):
            raise DataError(f"no board of this site is there: {self._explain_absence(header)}")

    def _explain_absence(self, header: Json) -> str:
        reasons = [
            f"{info.device_id}: {self._registry.explain_absence(info.device_id, self._run_id)}"
            for info in self.list_boards()
            if str(header.get("task")) in info.tasks
        ]
        return "; ".join(reasons[:5]) or "it has none"

    def _remove_old_rounds(self, present: RoundRecord) -> None:
        order = {name: number for number, name in enumerate(self._index.rounds)}
        folders = [path for path in self._folder.iterdir() if path.is_dir() and path != present.path]
        folders.sort(key=lambda path: order.get(path.name, -1))
        for path in folders[: -(MAX_KEPT_ROUNDS - 1)]:
            shutil.rmtree(path, ignore_errors=True)
            self._index.unsaved.pop(path.name, None)


def get_site_limits(header: Json) -> SiteLimits:
    """Returns the limits of a run at this level; its deadline is a little before that of upstream."""
    limits = SiteLimits.parse(header.get(SITE_LIMITS_KEY))
    if limits.deadline_s is None:
        return limits
    margin_s = min(MAX_MARGIN_S, MARGIN_SHARE * limits.deadline_s)
    return replace(limits, deadline_s=limits.deadline_s - margin_s)


def compute_identity(header: Json) -> str:
    """Returns what tells an instruction from every other one of its coordinator: 24 hexadecimal digits.

    A coordinator whose store was rolled back uses assignments' names again, in another lineage or for another model.
    """
    parts = [header.get(name) for name in ("lineage", "assignment", "version", "model_sha256")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What is kept of a round: a folder with the journal, and with the answer once that is complete.

    Attributes:
        path: of the folder.
        identity: of the instruction; see `compute_identity`.
    """

    path: Path
    identity: str

    @classmethod
    def open(cls, folder: Path, header: Json) -> RoundRecord:
        """Returns the record of an instruction; of other work under its name nothing stays."""
        identity = compute_identity(header)
        name = _hash_name(str(header.get("assignment")))
        for path in folder.glob(f"{name}-*"):
            is_same_work = path.name == f"{name}-{identity}" or header.get("model_sha256") is None
            if is_same_work:
                return cls(path=path, identity=path.name.partition("-")[2])
            shutil.rmtree(path)
        path = folder / f"{name}-{identity}"
        make_private_directory(path)
        return cls(path=path, identity=identity)

    def load_reply(self) -> tuple[Json, bytes] | None:
        """Returns the answer, None where the round is not complete."""
        loaded = _load_reply(self.path / REPLY_FILE)
        return None if loaded is None else (loaded[0]["reply"], loaded[1])

    def save_reply(self, reply: tuple[Json, bytes], used: Mapping[str, str]) -> None:
        """Writes the answer, durably, and removes the journal: `used` are the boards' assignments that are in it."""
        content, body = reply
        line = {"v": 1, "reply": content, _USED: dict(used), "sha256": hashlib.sha256(body).hexdigest()}
        write_atomic(self.path / REPLY_FILE, json.dumps(line).encode() + b"\n" + body)
        shutil.rmtree(self.path / JOURNAL_FOLDER, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class RoundIndex:
    """Durable index of a site's rounds: their order, and by run the boards' newest updates that upstream has used.

    A board that was away for long has to be told of its own newest two; the answers that they are in are gone then.

    Attributes:
        folder: of the rounds.
        rounds: names of their folders, the newest last.
        runs: by run, the newest last: `seen`, folders of used answers, and `boards`, the assignments by board.
        unsaved: by folder, what would be in an answer that could not be written.
    """

    folder: Path
    rounds: list[str] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    unsaved: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> RoundIndex:
        path = folder / INDEX_FILE
        try:
            content = parse_json(path.read_text())
            runs = {
                str(run): {
                    "seen": [str(name) for name in row["seen"]],
                    "boards": {str(board): [str(own) for own in names] for board, names in row["boards"].items()},
                }
                for run, row in content["runs"].items()
            }
            return cls(folder=folder, rounds=[str(name) for name in content["rounds"]], runs=runs)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and begins anew: %s", path, error)
        return cls(folder=folder)

    def add_round(self, record: RoundRecord, header: Json) -> dict[str, list[str]]:
        """Adds a round, durably; returns by board its newest assignments whose updates upstream has used.

        Raises:
            StoreError: the index cannot be written.
        """
        run_id = str(header["run"])
        row = self.runs[run_id] = self.runs.pop(run_id, {"seen": [], "boards": {}})
        for assignment in header.get("used_assignments", ()):
            for path in self.folder.glob(f"{_hash_name(str(assignment))}-*"):
                self._add_used(row, path)
        self.rounds = [*(name for name in self.rounds if name != record.path.name), record.path.name]
        self.rounds, row["seen"] = self.rounds[-MAX_KEPT_NAMES:], row["seen"][-MAX_KEPT_NAMES:]
        self.runs = dict([*self.runs.items()][-MAX_KEPT_RUNS:])
        content = {"v": 1, "rounds": self.rounds, "runs": self.runs}
        write_atomic(self.folder / INDEX_FILE, json.dumps(content).encode())
        return {board: list(names) for board, names in row["boards"].items()}

    def _add_used(self, row: dict[str, Any], path: Path) -> None:
        loaded = None if path.name in row["seen"] else _load_reply(path / REPLY_FILE)
        shares = self.unsaved.get(path.name) if loaded is None else loaded[0][_USED]
        if path.name in row["seen"] or shares is None:
            return
        row["seen"].append(path.name)
        for board, own in shares.items():
            row["boards"][board] = [*row["boards"].get(board, ()), own][-MAX_PENDING:]


_NOT_IN_PATTERNS = frozenset("*?[];=| ")
"""What means something in a codec line; a tensor with such a name is sent dense."""
_USED = "used"
"""Of an answer on disk: board -> its assignment whose update is in it."""


@dataclass(slots=True, kw_only=True)
class _SiteRound:
    """One round of the boards, between two calls of the fleet."""

    header: Json
    task: SiteTask
    record: RoundRecord
    fleet: LiveFleet
    wal: WalJournal
    used: Mapping[str, Sequence[str]]
    run: _SiteRun
    record_event: RecordEvent
    assigned: dict[str, TrainInstruction] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _updates: dict[str, Update] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _mean: StreamingMean = field(default_factory=lambda: StreamingMean(precision="float64"))
    _like: dict[str, Array] = field(init=False)
    _nonzero: dict[str, Array] = field(default_factory=dict)
    _is_dense: bool = False

    def __post_init__(self) -> None:
        self._like = {spec.name: np.broadcast_to(np.zeros((), spec.dtype), spec.shape) for spec in self.task.spec}

    def resume(self, registry: DeviceRegistry) -> None:
        """Takes up what the journal has of the round; boards whose update it lacks are asked for it."""
        for _, entry in self.wal.read_entries():
            if isinstance(entry, Decision):
                self._add_instructions([each for each in entry.instructions if isinstance(each, TrainInstruction)])
            elif isinstance(entry, Update | InstructionFailed):
                self._apply(entry)
        remaining = [instruction for key, instruction in self.assigned.items() if key not in self._done]
        if not remaining:
            return
        state = FleetState(limits=ClaimLimits(task=str(self.header["task"])))
        for instruction in self.assigned.values():  # what a board weighs depends on all that were asked
            state.claim_limits.record_order(instruction.device_id, registry.get_device(instruction.device_id))
        for instruction in remaining:
            state.update_device(instruction.device_id, registry.get_device(instruction.device_id))
            state.assign(instruction)
        view = self.fleet.view()
        state.start_turn(view.now_s)
        view.restore_from(state)
        in_flight = [replace(each, dispatched_s=view.now_s) for each in state.in_flight.values()]
        self.fleet.resume_in_flight(in_flight, _SentModel(int(self.header["version"])))

    def collect(
        self, clock: Callable[[], float], on_alive: OnAlive, ends_early: Callable[[], bool] = lambda: False
    ) -> None:
        """Returns when every board has answered, or is lost, or has had its time."""
        if not self.assigned:
            self._assign()
        times = _RoundTimes(started_s=clock(), deadline_s=get_site_limits(self.header).deadline_s)
        while len(self._done) < len(self.assigned):
            on_alive()
            events = self.fleet.wait(clock() + POLL_S)
            results = [self._check(event) for event in events if isinstance(event, Update | InstructionFailed)]
            has_half = 2 * len(self._updates) >= len(self.assigned)
            if not results and (reason := times.find_reason_to_end(clock(), has_half=has_half)):
                results = self._give_up(reason)
            journaled = self.wal.record_events(results)
            self.wal.commit()
            for event in journaled:
                self._apply(event)
            if times.early_s is None and ends_early():
                times.early_s = clock()
                self._finish_early()
            times.newest_s = clock() if any(isinstance(event, Update) for event in results) else times.newest_s

    def _list_pending(self) -> list[TrainInstruction]:
        return [each for key, each in self.assigned.items() if key not in self._done]

    def _give_up(self, reason: str) -> list[Event]:
        """Returns the failures of the boards that have not answered."""
        return [
            InstructionFailed(
                device_id=each.device_id,
                assignment_id=each.assignment_id,
                outcome=UpdateStatus.LOST,
                reason=reason,
            )
            for each in self._list_pending()
        ]

    def make_reply(self) -> tuple[Json, bytes]:
        """Returns the answer to the coordinator upstream.

        Raises:
            DataError: no board has sent an update.
        """
        if not self._updates:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in [*self._reasons.items()][:5])
            raise DataError(f"no board of this site has sent an update: {reasons}")
        mean = self._mean.compute_mean(self._like)
        displacement = {name: np.asarray(mean[name]).astype(like.dtype) for name, like in self._like.items()}
        codec = "dense" if self._is_dense else _choose_codec(self._nonzero)
        body = make_codec(codec, self.task.spec).encode(displacement, derive_rng(0))
        updates = self._list_updates()
        return {"metrics": {**_combine_metrics(updates, self._plan), SITE_KEY: _list_shares(updates)}}, body

    def list_used(self) -> dict[str, str]:
        """Returns by board its assignment whose update is in the answer."""
        return {update.device_id: update.assignment_id for update in self._list_updates()}

    def _list_updates(self) -> list[Update]:
        """Returns the updates without their tensors, in the order of the boards' names."""
        return [self._updates[key] for key in self.assigned if key in self._updates]

    @property
    def _plan(self) -> TrainConfig:
        return TrainConfig.from_json(self.header.get("plan", {}))

    def _assign(self) -> None:
        """Gives the instruction to every board that is there."""
        plan, version = self._plan, int(self.header["version"])
        instructions = [
            TrainInstruction(
                assignment_id=f"{self.record.identity}-{number}",
                device_id=board,
                base_version=version,
                plan=plan,
                codec=str(self.header.get("codec", "dense")),
                used_assignments=tuple(self.used.get(board, ())),
            )
            for number, board in enumerate(_list_idle(self.fleet, self.run.excluded))
        ]
        self.wal.record_decision(Decision(instructions=tuple(instructions)))
        self.wal.commit()
        self._add_instructions(instructions)
        orders: list[Instruction] = [*instructions]
        self.fleet.dispatch(orders, _SentModel(version))

    def _add_instructions(self, instructions: Sequence[TrainInstruction]) -> None:
        for instruction in instructions:
            self.assigned[instruction.assignment_id] = instruction
            self._mean.expected.append(instruction.assignment_id)

    def _finish_early(self) -> None:
        orders = [
            FinishEarlyInstruction(assignment_id=each.assignment_id, device_id=each.device_id)
            for each in self._list_pending()
        ]
        self.fleet.dispatch(orders, _SentModel(int(self.header["version"])))

    def _check(self, event: Update | InstructionFailed) -> Event:
        """Returns an event; in place of an update that cannot be one, its failure."""
        if isinstance(event, InstructionFailed) or (reason := self.run.guard.rejection_reason(event)) is None:
            return event
        log.warning("the update of %s is refused: %s", event.device_id, reason)
        self.record_event(REJECTED_EVENT_KIND, event.device_id, f"its update is refused: {reason}")
        return InstructionFailed.from_rejected(event, reason)

    def _apply(self, event: Event) -> None:
        """Counts a journaled event, once."""
        if not isinstance(event, Update | InstructionFailed) or event.assignment_id in self._done:
            return
        if event.assignment_id not in self.assigned:
            return
        self._done.add(event.assignment_id)
        if isinstance(event, InstructionFailed):
            log.warning("%s sends no update in this round: %s", event.device_id, event.reason)
            self._reasons[event.device_id] = event.reason
            return
        self._updates[event.assignment_id] = replace(event, tensors={}, body=None)
        self._note_entries(event.tensors)
        self._mean.add_update(event.assignment_id, event, weight=_weigh(event))
        self._mean.unload_waiting(event.assignment_id)
        self._add_next()

    def _add_next(self) -> None:
        """Adds the updates that are next in the order of the boards, and passes over boards that are lost."""
        mean = self._mean
        mean.add_next_updates(self._like)
        while mean.cursor < len(mean.expected) and mean.expected[mean.cursor] in self._done - self._updates.keys():
            mean.cursor += 1
            mean.add_next_updates(self._like)

    def _note_entries(self, tensors: Tensors) -> None:
        """Notes which entries are not zero, while all updates are sparse."""
        if self._is_dense:
            return
        floats = [spec for spec in self.task.spec if np.issubdtype(np.dtype(spec.dtype), np.inexact)]
        if not any(isinstance(tensors[spec.name], SparseTensor) for spec in floats):
            self._is_dense, self._nonzero = True, {}
            return
        for spec in floats:
            entries = self._nonzero.setdefault(spec.name, np.zeros(spec.size, bool))
            _mark_entries(entries, tensors[spec.name])


@dataclass(slots=True, kw_only=True)
class _RoundTimes:
    """When a round began, was asked to end early, and got its newest update; seconds of the gateway's clock."""

    started_s: float
    deadline_s: float | None
    early_s: float | None = None
    newest_s: float | None = None

    def find_reason_to_end(self, now_s: float, *, has_half: bool) -> str:
        """Returns why the round ends without the boards that are missing; empty while it goes on."""
        if self.early_s is not None and now_s >= self.early_s + EARLY_S:
            return f"not back within {EARLY_S:g} s of the request to finish early"
        limit_s = self.deadline_s
        if limit_s is None and has_half:
            limit_s = max(PATIENCE_S, PATIENCE_RATIO * ((self.newest_s or self.started_s) - self.started_s))
        if limit_s is not None and now_s >= self.started_s + limit_s:
            return f"not back within {limit_s:g} s"
        return ""


def _list_shares(updates: Sequence[Update]) -> list[Json]:
    """Returns what each board has given, for the history upstream."""
    return [
        BoardShare(
            board=update.device_id,
            num_examples=update.metrics.num_examples,
            loss=update.metrics.loss,
            compute_s=update.metrics.compute_s,
        ).to_json()
        for update in updates
    ]


def _weigh(update: Update) -> float:
    """Returns the weight of an update, as upstream weighs one: by its examples, and 1 without any."""
    return float(max(1, update.metrics.num_examples))


def _mark_entries(entries: Array, tensor: Tensor) -> None:
    if isinstance(tensor, SparseTensor):
        entries[tensor.indices[tensor.values != 0]] = True
    else:
        entries |= np.asarray(tensor).reshape(-1) != 0


def _choose_codec(nonzero: Mapping[str, Array]) -> str:
    """Returns the codec of merged sparse updates that loses nothing: it keeps the entries that any board sent."""
    layers = ["dense"]
    for name, entries in nonzero.items():
        share = float(np.count_nonzero(entries)) / max(1, entries.size)
        if share < SPARSE_SHARE and not set(name) & _NOT_IN_PATTERNS:
            layers.append(f"{name} = topk:{math.ceil(share * 1e6 + 1) / 1e6:.6f}")
    return "; ".join(layers)


def _combine_metrics(updates: Sequence[Update], plan: TrainConfig) -> Json:
    """Returns the figures of a site's update: sums where they add up, else the mean or the most of its boards."""
    weight = sum(_weigh(update) for update in updates)
    losses = [(_weigh(update), update.metrics.loss) for update in updates if update.metrics.loss is not None]
    measured = sum(share for share, _ in losses)
    iterations = plan.count_iterations(int(weight)) if plan.epochs is not None else None
    spent = [update.metrics.extra[EPSILON] for update in updates if EPSILON in update.metrics.extra]
    energy = [update.metrics.energy_j for update in updates if update.metrics.energy_j is not None]
    return {
        "iterations": max(update.metrics.iterations for update in updates) if iterations is None else iterations,
        "num_examples": int(weight),
        "loss": sum(share * loss for share, loss in losses) / measured if measured else None,
        "compute_s": max(update.metrics.compute_s for update in updates),
        **({"extra": {EPSILON: max(spent)}} if spent else {}),
        **({"health": {"energy_j": sum(energy)}} if energy else {}),
    }


def combine_evaluations(
    results: Sequence[EvaluateResult],
    metrics: MetricSet,
    record_event: RecordEvent = lambda _kind, _device, _message: None,
) -> tuple[Json, bytes]:
    """Returns the evaluation of all examples that these are of, without boards whose sums no device can have.

    Raises:
        DataError: there is none.
    """
    kept, sums = _add_evaluations(results, metrics, record_event)
    if not kept:
        raise DataError("no board of this site has evaluated the model")
    total = sum(result.num_examples for result in kept)
    accuracies = [result.accuracy for result in kept if result.accuracy is not None]
    accuracy = None
    if len(accuracies) == len(kept):
        weighted = [result.num_examples * found for result, found in zip(kept, accuracies, strict=True)]
        accuracy = sum(weighted) / total
    loss = sum(result.num_examples * result.loss for result in kept) / total
    figures = {"num_examples": total, "loss": loss, "accuracy": accuracy}
    return {"metrics": figures}, sums


def _add_evaluations(
    results: Sequence[EvaluateResult], metrics: MetricSet, record_event: RecordEvent
) -> tuple[list[EvaluateResult], bytes]:
    """Returns the evaluations that add up, and their sums: the largest come last, so that a false one is left out."""

    def measure(result: EvaluateResult) -> float:
        sums = metrics.decode(result.sums) if result.sums else {}
        arrays = [array for each in sums.values() for array in each.values()]
        return max((float(np.abs(array.astype(np.float64)).max(initial=0)) for array in arrays), default=0.0)

    kept: list[EvaluateResult] = []
    total = b""
    for result in sorted(results, key=lambda each: (measure(each), each.device_id)):
        try:
            total = metrics.add([total, result.sums] if kept else [result.sums])
        except (ValueError, TaskError) as error:
            log.warning("the evaluation of %s is left out: %s", result.device_id, error)
            record_event(REJECTED_EVENT_KIND, result.device_id, f"its evaluation is left out: {error}")
        else:
            kept.append(result)
    return kept, total


def _list_idle(fleet: LiveFleet, excluded: frozenset[str]) -> list[str]:
    return [name for name in fleet.view().idle if name not in excluded][:MAX_SITE_BOARDS]


def _hash_name(assignment: str) -> str:
    return hashlib.sha256(assignment.encode()).hexdigest()[:24]


def _load_reply(path: Path) -> tuple[Json, bytes] | None:
    """Returns the first line and the body of an answer on disk; None where there is none that is whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    line, _, body = content.partition(b"\n")
    try:
        header = parse_json(line.decode())
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("sha256") != hashlib.sha256(body).hexdigest():
        log.warning("%s is damaged; the round goes on without it", path)
        return None
    return header, body
