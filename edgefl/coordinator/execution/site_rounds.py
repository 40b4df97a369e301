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

import logging
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgefl.compression.codec import decode_body
from edgefl.coordinator.execution.admission import AdmissionRequirements, NotEnoughDevicesError
from edgefl.coordinator.execution.fleet_view import AdmissionStatus, RunSpec
from edgefl.coordinator.execution.live_fleet import InterruptedRunError, LiveFleet
from edgefl.coordinator.execution.messaging import DeviceNotifier, InstructionTransport
from edgefl.coordinator.execution.site_outage import OutageLimits, OutageWork, SiteModel
from edgefl.coordinator.execution.site_records import (
    JOURNAL_FOLDER,
    MAX_KEPT_NAMES,
    MAX_KEPT_RUNS,
    RoundIndex,
    RoundRecord,
    compute_identity,
)
from edgefl.coordinator.execution.site_round import (
    POLL_S,
    OnAlive,
    RecordEvent,
    SentModel,
    SiteRound,
    SiteRun,
    combine_evaluations,
    get_site_limits,
    list_idle,
)
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceAdded,
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    RegistryEvent,
)
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.errors import DataError, JournalError, StoreError
from edgefl.core.protocol import Command, CommandKind
from edgefl.core.sites import SITE_LIMITS_KEY, SiteTask
from edgefl.core.types import (
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    InstructionFailed,
    Json,
    Progress,
    Role,
    StopRequested,
)
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.system.atomic_files import make_private_directory

log = logging.getLogger(__name__)

FOLDER = "site-rounds"
MAX_KEPT_ROUNDS = 16
"""Finished rounds whose answer is kept; the coordinator upstream asks for at most two again."""
READY_S = 20.0
"""Longest time in which boards say whether they can take part; upstream waits 30 s for the gateway's answer."""
ANSWER_S = 5.0
"""Once a board is ready, the time in which the others can still say that they are not."""
EVALUATION_S = 540.0
"""Longest evaluation of a site; upstream waits for it `EVALUATION_DEADLINE_S`."""
REJOIN_S = 30.0
"""After the start of the gateway, the time that a round waits for boards that have joined before."""
OUTAGE_EVENT_KIND = "site-outage"
_OF_ONE_MESSAGE = frozenset(
    {
        "assignment", "version", "plan", "codec", "used_assignments", "base_version", "prefetched_version",
        "keeps_model", "has_stored_reply", "has_model", "lineage", "model_sha256", "newest_record", "messages",
        "phase", "layout", "needs", "edgefl",
    }
)  # fmt: skip
"""Entries of an instruction's header that are not of its run."""


class SiteRounds:
    """Rounds of the site's boards for the coordinator upstream. One thread calls them; `post` and `stop` are for any.

    Args:
        folder: of the rounds under way and the newest finished ones.
        registry, notifier, open_transport: the site's boards, and how they are reached.
        clock: seconds, monotonic.
        record_event: writes an event to the gateway's history.
        outage: how far the site goes on without its coordinator.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        folder: Path,
        *,
        registry: DeviceRegistry,
        notifier: DeviceNotifier,
        open_transport: Callable[[], InstructionTransport],
        clock: Callable[[], float],
        record_event: RecordEvent = lambda _kind, _device, _message: None,
        outage: OutageLimits = OutageLimits(),  # noqa: B008 frozen
    ) -> None:
        self._folder, self._registry, self._notifier = folder, registry, notifier
        self._open_transport, self._clock, self._record_event = open_transport, clock, record_event
        self._started_s = clock()
        self._fleet: LiveFleet | None = None
        self._run_id = ""
        self._assignment = ""
        self._is_stopping = False
        self._early: deque[str] = deque(maxlen=MAX_KEPT_NAMES)
        self._runs: dict[str, SiteRun] = {}
        self._lock = threading.Lock()
        make_private_directory(folder)
        self._index = RoundIndex.load(folder)
        self._outage, self._outage_work = outage, OutageWork(folder=folder)
        self._outage_work.recover()
        self._model: SiteModel | None = None

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
        self._outage_work.drop(run_id)
        if self._model is not None and self._model.header.get("run") == run_id:
            self._model = None
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
        message = self._take_outage_work(record, header, body, task)
        try:
            used = self._index.add_round(record, header)
            reply = self._run_recorded_round(record, header, body, task, on_alive, used)
        except BaseException:  # a stop too: without an answer the work waits for the next round
            self._outage_work.restore(record.path)
            raise
        if message:
            self._outage_work.complete(record)
            self._record_outage(message)
        self._model = SiteModel.create(header, body, task, reply[1]) if self._outage.max_rounds else None
        return reply

    def run_offline_round(self, on_alive: OnAlive) -> bool:
        """Runs one more round of the site while upstream is away; returns whether there was one.

        It begins at the site's own model, and is not answered: the next answer takes along what it makes.

        Raises:
            DataError: no board has sent an update.
            InterruptedRunError: the gateway stops.
            StoreError: the disk is full.
        """
        model = self._model
        if model is None or model.rounds >= self._outage.max_rounds:
            return False
        header, body = model.make_instruction()
        record = RoundRecord.open(self._folder, header)
        try:
            used = self._index.get_used(str(header["run"]))
            _, update = self._run_recorded_round(record, header, body, model.task, on_alive, used)
            model.add_round(update)
            self._outage_work.save(model)
        finally:
            self._remove_round(record.path)
        log.info("the uplink is away; round %d of the site without it is done", model.rounds)
        return True

    def _take_outage_work(self, record: RoundRecord, header: Json, body: bytes, task: SiteTask) -> str:
        self._model = None
        if message := self._outage_work.drop_late(header, self._outage.max_staleness):
            self._record_outage(message)
        return self._outage_work.move_into(record, header, body, task)

    def _record_outage(self, message: str) -> None:
        log.info("%s", message)
        self._record_event(OUTAGE_EVENT_KIND, "", message)

    def _run_recorded_round(
        self,
        record: RoundRecord,
        header: Json,
        body: bytes,
        task: SiteTask,
        on_alive: OnAlive,
        used: Mapping[str, Sequence[str]],
    ) -> tuple[Json, bytes]:
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
                site_round = SiteRound(
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

    def _get_run(self, run_id: str) -> SiteRun:
        run = self._runs[run_id] = self._runs.pop(run_id, SiteRun())
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
            boards = list_idle(fleet, self._get_run(str(header["run"])).excluded)
            instructions = [
                EvaluateInstruction(
                    assignment_id=f"{identity}-{number}", device_id=board, version=version, round=version
                )
                for number, board in enumerate(boards)
            ]
            fleet.dispatch(instructions, SentModel(version))
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
            idle = set(list_idle(fleet, excluded))
            if names <= idle or (idle and self._clock() >= rejoin_s):
                break
            on_alive()
            fleet.wait(self._clock() + POLL_S / 4)
        if not list_idle(fleet, excluded):
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
            self._remove_round(path)

    def _remove_round(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self._index.unsaved.pop(path.name, None)
