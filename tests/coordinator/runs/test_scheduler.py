"""The run worker, over a real store: what must not wait for it, and what it takes up again."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from noted_calls import NotedCalls
from small_fleet import add_run, eventually, status

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.headers import RunIncarnations
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.replay import JournalReplay
from edgefl.coordinator.fleet.allotments import BoardClaim
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.flower.messages import Reply
from edgefl.coordinator.flower.superlink import SuperLink
from edgefl.coordinator.runs import compilation, scheduler, stalls
from edgefl.coordinator.runs.checkpointing import NEW_INCARNATION_FILE, PRIVACY_FILE, open_spend_recorder
from edgefl.coordinator.runs.recovery import MAX_CRASHES, RunStart, check_base, pin_base, record_base
from edgefl.coordinator.runs.scheduler import COORDINATOR_STOPPED, RunContext, RunScheduler, _ActiveExecution
from edgefl.coordinator.runs.stalls import STOP_TIMEOUT_S, SlowCallWatchdog, format_running_call
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import JournalError, StoreBusyError, StoreFullError, StoreTooNewError, UsageError
from edgefl.core.types import Decision, DeviceInfo, Json, Progress, Update, UpdateMetrics
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.fleet_state import FleetState
from edgefl.engine.progress import PriorProgress
from edgefl.storage.checkpoints import save_state
from edgefl.storage.journal.file_format import HEADER_BYTES, encode_record_header, list_journal_files
from edgefl.storage.journal.record_encoding import CheckpointMark, TurnStarted
from edgefl.storage.journal.wal_journal import WalJournal
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.state_serialisation import decode_state
from edgefl.storage.store import Store
from edgefl.strategies.private_mean import PrivacySpend, SpendRecorder
from edgefl.strategies.update_guard import GuardState
from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue
from edgefl.tasks.adaptation.base_file import encode_base
from edgefl.tasks.registry import make_task


class Bell:
    def notify(self, device_id: str) -> None: ...

    def send_command(self, device_id: str, command: Any) -> None: ...


def never_assembled(_config: Any, _run_id: str) -> Any:
    raise NotImplementedError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


with_parts = pytest.mark.parametrize("worker", [build_run], indirect=True)
"""For tests that drive a run; the others assemble nothing."""


@pytest.fixture
def worker(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> RunScheduler:
    site = RunContext(
        directory=CoordinatorDirectory(root=tmp_path, fleet="lab", hosts=()),
        store=store,
        registry=DeviceRegistry(PresenceTracker(), time.monotonic),
        superlink=SuperLink(on_reply=lambda _: None, observer=NotedCalls()),
        notifier=Bell(),
        build_run=request.param if hasattr(request, "param") else never_assembled,
    )
    return RunScheduler(site, on_fatal=lambda _: None)


def test_what_devices_send_is_passed_on_while_a_stop_waits_for_the_store(store: Store, worker: RunScheduler) -> None:
    add_run(store)
    passed = threading.Event()

    def pass_on() -> None:
        worker.post(Progress(device_id="a", assignment_id="x", iteration=1, seconds_per_iteration=1.0, age_s=0.0))
        assert not worker.is_active("r")
        assert not worker.is_blocked("r", "a")
        worker.flush()
        passed.set()

    with store.batch():
        stopping = threading.Thread(target=worker.stop_run, args=("r", "because"))
        stopping.start()
        eventually(worker._lock.locked)
        threading.Thread(target=pass_on, daemon=True).start()
        assert passed.wait(60)
    stopping.join(60)
    assert store.get_run("r").status is RunStatus.STOPPED


def test_gateways_are_told_the_end_of_a_run_and_other_boards_are_not(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str, str]] = []
    registry = worker._context.registry
    for number, (name, facts) in enumerate([("pi", {}), ("site-1", {"site": {"boards": 2, "online": 2}})]):
        registry.add(name, node_id=number + 1, role="trainer", groups=(), examples={}, facts=facts)
    monkeypatch.setattr(
        Bell, "send_command", lambda _self, name, command: told.append((name, str(command.kind), command.argument))
    )
    add_run(store)
    worker.stop_run("r", "because")
    assert told == [("site-1", "end", "r")]


CONFIG = {"run": {"task": "digits", "rounds": 3}}
RUN = parse_run(CONFIG).to_json()
TURN = TurnStarted(now_s=1.0, at=100.0, devices={"pi-1": DeviceInfo(device_id="pi-1", tasks=("digits",))})


def has_fleet(worker: RunScheduler) -> bool:
    """Whether a run is being driven."""
    return any(run.fleet is not None for run in worker._active.values())


def get_only(worker: RunScheduler) -> _ActiveExecution:
    """The only run that is active."""
    (run,) = worker._active.values()
    return run


def left_behind(
    worker: RunScheduler,
    status: RunStatus,
    *entries: TurnStarted,
    reason: str | None = None,
    strategy: str = "fedavg",
    more: Json | None = None,
    priority: int = 0,
) -> str:
    """A run as an earlier coordinator left it, with what its journal has."""
    config = parse_run({**CONFIG, "strategy": {"name": strategy}, **(more or {})}).to_json()
    store, directory = worker._context.store, worker._context.directory
    run_id = f"r{len(store.list_runs())}"
    add_run(store, run_id, config=config, priority=priority)
    store.set_run_status(run_id, status, at=2.0, reason=reason)
    with WalJournal(directory.runs / run_id / "journal", lambda _: {}) as wal:
        for entry in entries:
            wal.record_turn(entry)
    return run_id


@pytest.mark.parametrize(
    ("status", "reason", "after"),
    [
        (RunStatus.RUNNING, None, RunStatus.QUEUED),
        (RunStatus.INTERRUPTED, COORDINATOR_STOPPED, RunStatus.QUEUED),
        (RunStatus.INTERRUPTED, "its operator said so", RunStatus.INTERRUPTED),
        (RunStatus.STOPPING, "enough", RunStatus.STOPPED),
    ],
)
def test_a_run_whose_coordinator_ended_before_it_had_a_journal_begins_again(
    store: Store, worker: RunScheduler, status: RunStatus, reason: str | None, after: RunStatus
) -> None:
    add_run(store, "r", config=RUN)
    for _ in range(MAX_CRASHES):
        store.set_run_status("r", status, at=2.0, reason=reason)
        worker.recover()
        assert store.get_run("r").status is after
    if status is RunStatus.RUNNING:
        store.set_run_status("r", status, at=2.0)
        worker.recover()
        assert store.get_run("r").status is RunStatus.INTERRUPTED


SLEEPING = """
import time
from edgefl.system.processes import serve_call
serve_call(lambda request: time.sleep(300))
"""


@pytest.fixture
def compiling(worker: RunScheduler, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunScheduler:
    """A scheduler with one board without torch, two runs of a network, and a compilation that takes minutes."""
    (tmp_path / "sleeping_compiler.py").write_text(SLEEPING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compilation, "MODULE", "sleeping_compiler")
    monkeypatch.setattr(compilation, "NEEDED_PACKAGES", ())
    worker._context.registry.add(
        "small", node_id=1, role="trainer", groups=(), examples={"mnist": 5}, facts={"backends": ["numpy", "onnx"]}
    )
    for run_id in ("r", "later"):
        add_run(store, run_id, config=parse_run({"run": {"task": "mnist"}, "task": {"model": "cnn"}}).to_json())
    worker.start()
    eventually(lambda: list_states(worker)["r"] == "compiling")
    return worker


def list_states(worker: RunScheduler) -> dict[str, str]:
    runs = worker._context.store.list_runs()
    return {
        run.run_id: worker.apply_idle_state({"run_id": run.run_id, "status": run.status})["status"] for run in runs
    }


@with_parts
def test_a_run_that_compiles_says_so_and_is_stopped_at_once(store: Store, compiling: RunScheduler) -> None:
    later = compiling.apply_idle_state({"run_id": "later", "status": "queued"})
    assert later["reason"] == "it comes after run r, which compiles its task; to begin now: edgefl run stop r"
    compiling.stop_run("r", "enough")
    eventually(lambda: list_states(compiling)["later"] == "compiling", timeout_s=30)
    assert (store.get_run("r").status, store.get_run("r").reason) == (RunStatus.STOPPED, "enough")
    compiling.stop_run("later", "enough")
    compiling.stop()


@with_parts
def test_a_coordinator_that_stops_ends_a_compilation_and_the_next_one_begins_the_run_again(
    store: Store, compiling: RunScheduler
) -> None:
    compiling.stop()
    assert not compiling._threads[0].is_alive()
    assert (store.get_run("r").status, store.get_run("r").reason) == (RunStatus.INTERRUPTED, COORDINATOR_STOPPED)
    RunScheduler(compiling._context, on_fatal=lambda _: None).recover()
    assert store.get_run("r").status is RunStatus.QUEUED


@pytest.mark.parametrize(
    ("status", "reason", "turns", "after"),
    [
        (RunStatus.RUNNING, None, [TURN], RunStatus.QUEUED),
        (RunStatus.RUNNING, None, [], RunStatus.INTERRUPTED),
        (RunStatus.INTERRUPTED, COORDINATOR_STOPPED, [TURN], RunStatus.QUEUED),
        (RunStatus.INTERRUPTED, "too few devices are ready", [TURN], RunStatus.INTERRUPTED),
        (RunStatus.STOPPING, "somebody asked", [TURN], RunStatus.STOPPING),
    ],
)
def test_what_ended_with_its_coordinator_goes_on_and_what_ended_otherwise_waits(
    store: Store,
    worker: RunScheduler,
    status: RunStatus,
    reason: str | None,
    turns: list[TurnStarted],
    after: RunStatus,
) -> None:
    run_id = left_behind(worker, status, *turns, reason=reason)
    worker.recover()
    assert store.get_run(run_id).status is after
    assert store.get_run(run_id).resumes == 0
    assert worker.is_active(run_id) is (after is not RunStatus.INTERRUPTED), "its devices' work is not recalled"
    worker._active = {"another": _ActiveExecution(run_id="another")}
    assert not worker.is_active(run_id)
    worker._active = {}
    if after is RunStatus.QUEUED:
        worker.stop_run(run_id, "somebody asked")
        assert not worker.is_active(run_id)


def test_a_stop_that_meets_the_end_of_its_coordinator_is_brought_to_its_end_by_the_next_one(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)
    worker._active = {run_id: _ActiveExecution(run_id=run_id)}
    driving = threading.Thread(target=worker._end_run, args=(run_id, RunStatus.INTERRUPTED, COORDINATOR_STOPPED))
    write = store.set_run_status

    def while_the_driving_ends(run_id: str, status: RunStatus, **more: Any) -> None:
        write(run_id, status, **more)
        if status is RunStatus.STOPPING:
            driving.start()
            driving.join(0.2)  # waits for the stop; if it need not, it is done by then

    monkeypatch.setattr(store, "set_run_status", while_the_driving_ends)
    worker.stop_run(run_id, "somebody asked")
    driving.join()
    assert (store.get_run(run_id).status, store.get_run(run_id).reason) == (RunStatus.STOPPING, "somebody asked")


def test_a_run_that_goes_on_from_its_checkpoint_is_never_found_between_two_lives(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)
    worker._active = {run_id: _ActiveExecution(run_id=run_id)}
    stop = threading.Thread(target=worker.stop_run, args=(run_id, "somebody asked"))
    seen: list[RunStatus] = []

    def begin_life(record: RunRecord) -> None:
        stop.start()
        stop.join(0.2)
        with Store.open(worker._context.directory.database) as another:
            seen.append(another.get_run(run_id).status)
        begin(record)

    begin = worker._queue_new_incarnation
    monkeypatch.setattr(worker, "_queue_new_incarnation", begin_life)
    worker._requeue_from_checkpoint(store.get_run(run_id), JournalError("cut"))
    stop.join()
    assert seen == [RunStatus.RUNNING]
    assert (store.get_run(run_id).status, store.get_run(run_id).resumes) == (RunStatus.STOPPED, 1)


def test_the_deployments_of_a_run_that_finishes_are_planned_before_others_wait_and_recorded_with_its_end(
    store: Store, worker: RunScheduler
) -> None:
    run_id, seen = left_behind(worker, RunStatus.RUNNING, TURN), []

    def see() -> None:
        with Store.open(worker._context.directory.database) as another:
            seen.append((worker._lock.locked(), store.get_run(run_id).status, another.get_run(run_id).status))

    def plan(planned: str, config: RunConfig) -> Callable[[], None]:
        assert (planned, config) == (run_id, parse_run(CONFIG))
        with Store.open(worker._context.directory.database) as another:
            another.record_event("written", "by another meanwhile", at=1.0)
        see()
        return see

    worker._context = replace(worker._context, plan_deployments=plan)
    worker._active = {run_id: _ActiveExecution(run_id=run_id)}
    worker._complete_run(run_id, parse_run(CONFIG), "all rounds")
    running, finished = RunStatus.RUNNING, RunStatus.FINISHED
    assert seen == [(False, running, running), (True, finished, running)]
    assert store.get_run(run_id).status is finished
    worker._active = {run_id: _ActiveExecution(run_id=run_id, stop_reason="somebody asked")}
    worker._complete_run(run_id, parse_run(CONFIG), "somebody asked")
    assert (len(seen), store.get_run(run_id).status) == (2, RunStatus.STOPPED)


@pytest.mark.parametrize(
    ("resumed", "least"),
    [({}, 3), ({"is_resumed": True}, 1), ({"is_resumed": True, "replay": JournalReplay([TURN])}, 3)],
    ids=["new", "from its checkpoint", "where it was"],
)
@with_parts
def test_a_run_waits_for_its_minimum_anew_unless_it_goes_on_from_a_checkpoint(
    worker: RunScheduler, resumed: dict[str, Any], least: int
) -> None:
    components = build_run(parse_run({**CONFIG, "devices": {"min": 3}}), "r")
    start = RunStart(state=None, incarnations=RunIncarnations("r"), **resumed)
    spec = worker._make_run_spec(components, start, SimpleNamespace(synced_record=0), None)  # type: ignore[arg-type]
    assert (spec.run_id, spec.min_devices) == ("r", least)


def as_a_newer_edgefl_left_it(folder: Path, fate: str) -> dict[Path, bytes]:
    """Makes a journal, or the only record in it, one of a later format; returns what lies there."""
    path = list_journal_files(folder / "journal")[0]
    content = bytearray(path.read_bytes())
    if fate == "a header":
        content[8] += 1
        content[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(content[: HEADER_BYTES - 4]).to_bytes(4, "little")
    else:
        head = encode_record_header(
            99,  # type: ignore[arg-type]
            b"", [b"new"], salt=int.from_bytes(content[12:16], "little"), synced=HEADER_BYTES,
        )  # fmt: skip
        content[HEADER_BYTES:] = head + b"new"
    path.write_bytes(content)
    return {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("fate", ["a header", "a record"])
@with_parts
def test_a_run_that_a_newer_edgefl_went_on_with_is_left_as_it_is_and_others_go_on(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    monkeypatch.setattr(scheduler, "GIVE_WAY_AFTER_S", 0.1)
    fatal: list[Exception] = []
    worker._on_fatal = fatal.append
    running, queued, stopping = (
        left_behind(worker, status, TURN) for status in (RunStatus.RUNNING, RunStatus.QUEUED, RunStatus.STOPPING)
    )
    folders = {run_id: worker._context.directory.runs / run_id for run_id in (running, queued, stopping)}
    before = {run_id: as_a_newer_edgefl_left_it(folder, fate) for run_id, folder in folders.items()}
    other = left_behind(worker, RunStatus.RUNNING, TurnStarted(now_s=1.0, at=100.0, devices={}))
    worker.recover()
    worker.start()
    eventually(lambda: worker.is_active(other))
    eventually(lambda: store.get_run(queued).status is not RunStatus.QUEUED)
    eventually(lambda: worker.is_active(other))
    worker.stop()
    for run_id in (running, queued):
        ended = store.get_run(run_id)
        assert ended.status is RunStatus.INTERRUPTED
        assert re.search(
            r"this program (knows|reads) .*: a newer edgefl wrote it; start a newer edgefl", ended.reason or ""
        )
        with pytest.raises(StoreTooNewError):
            worker.resume_run(run_id)
    assert store.get_run(stopping).status is RunStatus.STOPPING
    for run_id, folder in folders.items():
        assert {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()} == before[run_id]
    assert not fatal


@with_parts
def test_a_run_of_which_coordinators_die_without_a_checkpoint_is_not_taken_up_for_ever(
    store: Store, worker: RunScheduler
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)

    def num_lives() -> int:
        for number in range(2 * MAX_CRASHES):
            store.set_run_status(run_id, RunStatus.RUNNING, at=3.0)
            worker.recover()
            if store.get_run(run_id).status is RunStatus.INTERRUPTED:
                return number
            # Stopped in good order, as often as anybody likes.
            store.set_run_status(run_id, RunStatus.INTERRUPTED, at=3.0, reason=COORDINATOR_STOPPED)
            worker.recover()
            assert store.get_run(run_id).status is RunStatus.QUEUED
        raise AssertionError("it is taken up for ever")

    assert num_lives() == MAX_CRASHES
    worker.resume_run(run_id)  # somebody who resumes it may lose as many again
    assert store.get_run(run_id).status is RunStatus.QUEUED
    assert num_lives() == MAX_CRASHES


def test_a_count_of_deaths_begins_anew_with_every_checkpoint_and_not_with_a_version(
    store: Store, worker: RunScheduler
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)

    def status_after_death(number: int) -> RunStatus:
        store.set_run_status(run_id, RunStatus.RUNNING, at=3.0)
        store.open_round(run_id, number, started_at=3.0)
        store.close_round(run_id, number, version=number, closed_at=4.0)
        worker.recover()
        return store.get_run(run_id).status

    folder, state = (
        worker._context.directory.runs / run_id / "checkpoints",
        PriorProgress(updates=1, bytes=2, seconds=3.0),
    )
    for number in range(1, 2 * MAX_CRASHES):
        save_state(folder, state, number, state)
        assert status_after_death(number) is RunStatus.QUEUED
    told = [status_after_death(20 + number) for number in range(MAX_CRASHES)]
    assert told == [RunStatus.QUEUED] * (MAX_CRASHES - 1) + [RunStatus.INTERRUPTED]


def test_a_count_of_deaths_of_a_job_begins_anew_with_every_update(store: Store, worker: RunScheduler) -> None:
    directory = worker._context.directory
    config = parse_run({"job": {"name": "none.there:Nothing"}}).to_json()
    add_run(store, "job", config=config, strategy="job")

    def status_after_death(*names: str) -> RunStatus:
        store.set_run_status("job", RunStatus.RUNNING, at=3.0)
        metrics = UpdateMetrics(iterations=1, num_examples=1)
        updates = [
            Update(assignment_id=name, device_id="a", base_version=0, tensors={}, metrics=metrics, body=b"x")
            for name in names
        ]
        with WalJournal(directory.runs / "job" / "journal", lambda _: {}) as wal:
            wal.record_turn(TURN)
            wal.record_events(updates)
        worker.recover()
        return store.get_run("job").status

    for number in range(2 * MAX_CRASHES):
        assert status_after_death(f"part-{number}") is RunStatus.QUEUED
    told = [status_after_death() for _ in range(MAX_CRASHES)]
    assert told == [RunStatus.QUEUED] * (MAX_CRASHES - 1) + [RunStatus.INTERRUPTED]


def test_a_stop_is_brought_to_its_end_unless_coordinators_die_of_it_again_and_again(
    store: Store, worker: RunScheduler
) -> None:
    run_id = left_behind(worker, RunStatus.STOPPING, TURN, reason="somebody asked")
    for _ in range(2 * MAX_CRASHES):  # they end in good order
        worker.recover()
        assert worker._get_next_run() is not None
        worker._end_run(run_id, RunStatus.INTERRUPTED, COORDINATOR_STOPPED)
        assert store.get_run(run_id).status is RunStatus.STOPPING
    dying = left_behind(worker, RunStatus.STOPPING, TURN, reason="somebody asked")
    for _ in range(MAX_CRASHES):
        worker.recover()
        assert store.get_run(dying).status is RunStatus.STOPPING
    worker.recover()
    ended = store.get_run(dying)
    assert ended.status is RunStatus.STOPPED
    assert (ended.reason or "").startswith("somebody asked; without its last model, since the coordinator died more")


def first_orders(run_id: str) -> Decision:
    """What the run decides when it sees `TURN`."""
    made, book = build_run(parse_run(CONFIG), run_id), FleetState()
    book.start_turn(TURN.now_s)
    for device_id, info in TURN.devices.items():
        book.update_device(device_id, info)
    _, decision = made.strategy.assign(made.strategy.init(made.model), book)
    assert decision.instructions
    return decision


@with_parts
@pytest.mark.parametrize(
    ("how", "told"),
    [("another decision", "the journal has aggregation"), ("an unreadable update", "CodecError"),
     ("an unreadable snapshot", "a GuardState was saved, expected a RunSnapshot")],
)  # fmt: skip
def test_a_run_that_its_journal_does_not_lead_back_goes_on_from_its_checkpoint_in_another_life(
    store: Store, worker: RunScheduler, how: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)
    folder = worker._context.directory.runs / run_id
    with WalJournal(folder / "journal", lambda _: {}) as wal:
        if how == "another decision":
            wal.record_aggregation(1, ["nobody-knows"])
        elif how == "an unreadable update":
            decision = first_orders(run_id)
            wal.record_decision(decision)
            (order,) = decision.instructions
            wal.record_events([Update(
                assignment_id=order.assignment_id, device_id="pi-1", base_version=0, tensors={},
                metrics=UpdateMetrics(iterations=1, num_examples=1), body=b"no codec's",
            )])  # fmt: skip
        else:
            made = build_run(parse_run(CONFIG), run_id)
            saved = save_state(folder / "checkpoints", made.strategy.init(made.model), wal.last_record, GuardState())
            wal.record_checkpoint(CheckpointMark(sha256=saved.sha256, last_record=saved.last_record))
        wal.record_turn(TURN)
    worker.recover()
    worker.start()
    eventually(lambda: store.get_run(run_id).resumes == 1 and has_fleet(worker))
    worker.stop()
    assert (store.get_run(run_id).status, store.get_run(run_id).resumes) == (RunStatus.INTERRUPTED, 1)
    assert told in caplog.text


def add_boards(worker: RunScheduler, **groups: tuple[str, ...]) -> None:
    """Adds boards with a shard of digits; none has said that it is there."""
    worker._context.registry.record_broker_link(connected=True)
    for node_id, (name, of_board) in enumerate(groups.items(), 1):
        worker._context.registry.add(
            name, node_id=node_id, role="trainer", groups=of_board, examples={"digits": 5}, facts=None
        )


FARM = {"devices": {"groups": ["farm"]}}


@with_parts
@pytest.mark.parametrize("is_to_be_stopped", [False, True])
def test_a_run_that_lacks_boards_gives_way_to_one_that_does_not_and_begins_behind_it(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch, is_to_be_stopped: bool
) -> None:
    monkeypatch.setattr(scheduler, "GIVE_WAY_AFTER_S", 0.1)
    monkeypatch.setattr(scheduler, "LOOK_INTERVAL_S", 0.1)
    add_boards(worker, pi=(), barn=("farm",))
    registry = worker._context.registry
    first = left_behind(worker, RunStatus.QUEUED, TurnStarted(now_s=1.0, at=100.0, devices={}), more=FARM)
    patient = left_behind(worker, RunStatus.QUEUED, more={"devices": {"min": 2}})
    worker.start()
    eventually(lambda: list_states(worker)[first] == "waiting")
    behind = worker.apply_idle_state({"run_id": patient, "status": "queued"})["reason"]
    assert behind.startswith(
        f"it comes after run {first}, which waits for boards, and before it after 60 s of that if"
    )
    if is_to_be_stopped:
        get_only(worker).stop_reason = "enough"  # a request that its fleet does not know yet
    registry.record_status("pi", status())
    second = left_behind(worker, RunStatus.QUEUED)
    eventually(lambda: store.get_run(second).status is RunStatus.RUNNING and has_fleet(worker))
    states = {run_id: store.get_run(run_id).status for run_id in (first, patient)}
    assert states == {first: RunStatus.STOPPED if is_to_be_stopped else RunStatus.QUEUED, patient: RunStatus.QUEUED}
    if not is_to_be_stopped:
        waited = "waiting for a board with a shard for digits"
        assert str(store.get_run(first).reason).startswith(f"gives way to run {second}: {waited}")
        folder = worker._context.directory.runs / first
        left = [*folder.glob("journal*"), *folder.glob("checkpoints/*")]
        assert not left, "what it requires counts when it begins"
        registry.record_status("barn", status())
        worker.stop_run(second, "enough")
        eventually(lambda: store.get_run(first).status is not RunStatus.QUEUED)
        assert store.get_run(first).resumes == 0
    worker.stop()


@pytest.mark.parametrize("has_decided", [False, True])
def test_a_run_that_gives_way_begins_anew_unless_a_board_came_in_the_same_moment(
    store: Store, worker: RunScheduler, has_decided: bool
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)
    journal = worker._context.directory.runs / run_id / "journal"
    if not has_decided:
        (journal.with_name("journal-of-waiting") / "old").mkdir(parents=True)  # a coordinator died here once
    if has_decided:
        with WalJournal(journal, lambda _: {}) as wal:
            wal.record_decision(first_orders(run_id))
    worker._active = {run_id: _ActiveExecution(run_id=run_id)}
    worker._requeue_lacking(run_id, "gives way")
    assert (store.get_run(run_id).status, store.get_run(run_id).reason) == (RunStatus.QUEUED, "gives way")
    assert journal.exists() is has_decided
    assert not journal.with_name("journal-of-waiting").exists()


@pytest.mark.parametrize("how", ["exact", "without a snapshot", "not yet at its first checkpoint"])
def test_a_run_that_gives_way_and_cannot_go_on_exactly_goes_on_in_another_incarnation(
    store: Store, worker: RunScheduler, how: str
) -> None:
    run_id = left_behind(worker, RunStatus.RUNNING, TURN)
    folder, state = worker._context.directory.runs / run_id, PriorProgress(updates=1, bytes=2, seconds=3.0)
    save_state(folder / "checkpoints", state, 1, None if how == "without a snapshot" else state)
    if how == "not yet at its first checkpoint":
        (folder / NEW_INCARNATION_FILE).touch()
    worker._active = {run_id: _ActiveExecution(run_id=run_id)}
    worker._requeue_lacking(run_id, "gives way")
    record = store.get_run(run_id)
    assert (record.status, record.reason, record.resumes) == (RunStatus.QUEUED, "gives way", int(how != "exact"))
    assert (folder / "journal").exists()


@with_parts
@pytest.mark.parametrize("kept", [None, "for a limited time", "its devices train by themselves"])
def test_a_run_keeps_its_place_that_waits_for_a_limited_time_or_whose_devices_train_by_themselves(
    store: Store, worker: RunScheduler, kept: str | None
) -> None:
    strategy = (
        {"name": "dsgd", "carrier": "peer"} if kept == "its devices train by themselves" else {"name": "fedavg"}
    )
    devices = {"groups": ["farm"], "wait_s": 600 if kept == "for a limited time" else None}
    run_id = left_behind(worker, RunStatus.QUEUED, TURN, more={"devices": devices, "strategy": strategy})
    with WalJournal(worker._context.directory.runs / run_id / "journal", lambda _: {}) as wal:
        wal.record_decision(first_orders(run_id))
    worker.start()
    eventually(lambda: has_fleet(worker))
    assert get_only(worker).keeps_place is bool(kept)
    worker.stop()


def test_a_run_gives_way_only_after_a_minute_without_its_boards(
    worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_boards(worker, pi=(), barn=("farm",))
    registry = worker._context.registry
    registry.record_status("pi", status())
    now_s, posted = [1000.0], []
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now_s[0])
    fleet: Any = SimpleNamespace(has_started=False, post=posted.append)
    worker._active = {"r": _ActiveExecution(run_id="r")}
    left_behind(worker, RunStatus.QUEUED)

    def wait(seconds: float) -> bool:
        now_s[0] += seconds
        worker._give_way("r", parse_run({**CONFIG, **FARM}), fleet, "waiting")
        return bool(posted)

    assert not wait(500.0), "it is looked at for the first time"
    assert not wait(59.0)
    registry.record_status("barn", status())
    assert not wait(1.0), "its board is there, and gets ready"
    registry.record_status("barn", status("offline"))
    assert not wait(1.0)
    assert not wait(59.0)
    assert wait(1.0)
    posted.clear()
    worker._active["r"].keeps_place = True
    assert not wait(100.0)
    worker._active["r"].keeps_place, fleet.has_started = False, True
    assert wait(10.0), "also one that has begun"
    posted.clear()
    registry.record_status("barn", status())
    assert not wait(10.0)
    assert not wait(100.0)
    registry.open_run(BoardClaim(run_id="r", selects=lambda info: info.device_id == "barn"))
    registry.decline_board("barn", "r")
    assert not wait(1.0)
    assert wait(60.0), "also one that has declined its only board"


def beside(worker: RunScheduler, num_slots: int = 2) -> RunScheduler:
    """A scheduler of the same coordinator, with so many slots."""
    return RunScheduler(replace(worker._context, num_slots=num_slots), on_fatal=lambda _: None)


def add_reachable(worker: RunScheduler, *names: str) -> None:
    """Adds boards that are there, and that Flower takes messages for."""
    registry = worker._context.registry
    registry.record_broker_link(connected=True)
    for name in names:
        node_id = worker._context.superlink.register(name.encode())
        registry.add(name, node_id=node_id, role="trainer", groups=(), examples={"digits": 5})
        registry.record_status(name, status())


def on(*names: str) -> Json:
    return {"devices": {"names": list(names)}}


def is_under_way(worker: RunScheduler, run_id: str) -> bool:
    run = worker._active.get(run_id)
    return run is not None and run.fleet is not None


@with_parts
def test_runs_are_active_side_by_side_and_one_that_lacks_its_boards_says_for_whom_they_work(
    store: Store, worker: RunScheduler
) -> None:
    add_reachable(worker, "pi", "barn")
    worker = beside(worker, 3)
    first, second, behind = (left_behind(worker, RunStatus.QUEUED, more=on(name)) for name in ("pi", "barn", "pi"))
    worker.start()
    eventually(lambda: is_under_way(worker, first) and is_under_way(worker, second))
    reason = lambda: worker.apply_idle_state({"run_id": behind, "status": "queued"}).get("reason")  # noqa: E731
    eventually(lambda: reason() == f"its boards work for other runs: pi for {first}", timeout_s=30)
    worker.post(Progress(device_id="pi", assignment_id=f"{first}/x", iteration=1, seconds_per_iteration=1.0, age_s=0))
    worker.stop_run(first, "enough")
    eventually(lambda: is_under_way(worker, behind))
    assert (store.get_run(first).status, store.get_run(second).status) == (RunStatus.STOPPED, RunStatus.RUNNING)
    worker.stop()
    for run_id in (second, behind):
        assert (store.get_run(run_id).status, store.get_run(run_id).reason) == (
            RunStatus.INTERRUPTED, COORDINATOR_STOPPED,
        )  # fmt: skip
    again = beside(worker)
    again.recover()
    assert again.is_active(second)
    assert again.is_active(behind)
    again.start()
    eventually(lambda: is_under_way(again, second) and is_under_way(again, behind))
    again.stop()


@with_parts
def test_a_run_of_higher_priority_takes_the_place_of_the_lowest_which_goes_on_when_it_is_over(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_reachable(worker, "pi", "barn")
    worker = beside(worker)
    low, middle = (
        left_behind(worker, RunStatus.QUEUED, more=on(name), priority=priority)
        for name, priority in (("pi", 0), ("barn", 1))
    )
    worker.start()
    eventually(lambda: is_under_way(worker, low) and is_under_way(worker, middle))
    equal = left_behind(worker, RunStatus.QUEUED, more=on("pi"))
    worker.wake()
    worker.flush()
    high = left_behind(worker, RunStatus.QUEUED, more=on("barn"), priority=5)
    worker.wake()
    eventually(lambda: worker.flush() or is_under_way(worker, high))  # type: ignore[func-returns-value]
    assert str(store.get_run(low).reason).startswith(f"gives way to run {high}, whose priority is 5")
    states = {run_id: store.get_run(run_id).status for run_id in (low, middle, equal)}
    assert states == {low: RunStatus.QUEUED, middle: RunStatus.RUNNING, equal: RunStatus.QUEUED}
    assert worker._context.registry.get_allotted_run("barn") == high
    worker.stop_run(middle, "enough")
    eventually(lambda: is_under_way(worker, low), timeout_s=30)
    worker.stop()


def test_recovered_runs_have_the_boards_that_they_had_before_the_first_of_them_is_active(
    store: Store, worker: RunScheduler
) -> None:
    add_reachable(worker, "barn", "pi", "shed")
    registry = worker._context.registry
    worker = beside(worker)
    first, second, third = (
        left_behind(worker, RunStatus.RUNNING, replace(TURN, devices={name: registry.get_device(name)}))
        for name in ("pi", "barn", "shed")
    )

    def holders() -> list[str | None]:
        return [registry.get_allotted_run(name) for name in ("pi", "barn", "shed")]

    worker.recover()
    assert holders() == [first, second, first], "of as many runs as there are places"
    assert (worker._get_next_run() or store.get_run(third)).run_id == first
    assert holders() == [first, second, first]
    assert (worker._get_next_run() or store.get_run(third)).run_id == second
    registry.remove("barn")
    registry.add("barn", node_id=99, role="trainer", groups=(), examples={"digits": 5})
    assert holders() == [first, second, first]
    worker._active = {}
    worker.stop_run(second, "enough")
    assert holders() == [first, first, first], "also of one that was not active yet"


def test_why_runs_are_queued_is_looked_at_without_the_lock_and_only_now_and_then(
    worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_reachable(worker, "pi")
    worker = beside(worker)
    active, behind = (left_behind(worker, status, more=on("pi")) for status in (RunStatus.RUNNING, RunStatus.QUEUED))
    worker._active = {active: _ActiveExecution(run_id=active)}
    was_locked: list[bool] = []

    def explain(_record: RunRecord) -> str:
        was_locked.append(worker._lock.locked())
        return "so it is"

    monkeypatch.setattr(worker._queue, "explain_wait", explain)
    for _ in range(3):
        worker.flush()
    assert was_locked == [False]
    assert worker.apply_idle_state({"run_id": behind, "status": "queued"})["reason"] == "so it is"
    worker.wake()
    worker.flush()
    assert was_locked == [False, False], "after a run was queued"


@pytest.mark.usefixtures("quick")
def test_a_run_that_pauses_before_it_gives_way_keeps_no_other_from_that(
    worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_reachable(worker, "pi")
    worker, posted = beside(worker, 1 + 1), list[Any]()
    fleet: Any = SimpleNamespace(post=posted.append, run_id="x")
    paused, other = (left_behind(worker, RunStatus.RUNNING, TURN, more=on("pi")) for _ in range(2))
    worker._active = {name: _ActiveExecution(run_id=name, fleet=fleet) for name in (other, paused)}
    left_behind(worker, RunStatus.QUEUED, more=on("pi"), priority=5)
    worker.flush()
    assert (worker._active[paused].is_preempted, len(posted)) == (True, 1)
    worker._active[paused].fleet = None
    record, backoff = worker._context.store.get_run(paused), worker._make_backoff()
    assert worker._wait_for_storage(record, StoreFullError("no room"), backoff) is not None
    worker.wake()
    worker.flush()
    assert (worker._active[other].is_preempted, len(posted)) == (True, 2)


def test_what_a_device_sends_goes_to_the_run_that_it_names_and_else_to_all(worker: RunScheduler) -> None:
    posted: dict[str, list[Any]] = {"r1": [], "r2": []}
    worker._active = {
        name: _ActiveExecution(run_id=name, fleet=SimpleNamespace(post=items.append))  # type: ignore[arg-type]
        for name, items in posted.items()
    }
    progress = Progress(device_id="a", assignment_id="r2/x", iteration=1, seconds_per_iteration=1.0, age_s=0.0)
    reply = Reply(node_id=1, instruction_id="i", header={"assignment": "r1/x"}, body=b"", bytes_up=0, bytes_down=0)
    unnamed = replace(reply, header={"error": "malformed"})
    for item in (progress, reply, unnamed):
        worker.post(item)
    assert posted == {"r1": [reply, unnamed], "r2": [progress, unnamed]}


class Hindered:
    """Assembles nothing: raises what it is told to, once each."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.num_calls = list(errors), 0

    def __call__(self, _config: Any, _run_id: str) -> Any:
        self.num_calls += 1
        raise self.errors.pop(0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are looked at often."""
    monkeypatch.setattr(stalls, "FIRST_RETRY_S", 0.02)


@pytest.mark.parametrize("error", [StoreFullError("no room in x"), StoreBusyError("x is in use")])
@pytest.mark.usefixtures("quick")
def test_a_hindrance_pauses_a_run_until_it_passes_or_the_coordinator_stops_and_ends_nothing(
    store: Store, worker: RunScheduler, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = threading.Event()
    monkeypatch.setattr(stalls, "has_room", lambda _: room.is_set())
    assemble = Hindered(error, UsageError("it cannot work"), error)
    worker._context = replace(worker._context, build_run=assemble)
    add_run(store, config=RUN)
    worker.start()
    row = {"run_id": "r", "status": "running", "reason": None}
    eventually(lambda: worker.apply_idle_state(row)["status"] == "paused")
    assert worker.apply_idle_state(row)["reason"] == str(error)
    assert worker.apply_idle_state({**row, "run_id": "other"})["status"] == "running"
    assert (store.get_run("r").status, assemble.num_calls) == (RunStatus.RUNNING, 1)
    room.set()
    eventually(lambda: store.get_run("r").status is RunStatus.FAILED)
    assert worker.apply_idle_state(row) == row
    kinds = [event["kind"] for event in read_history(store, "events", run="r")]
    assert kinds == ["run-paused", "run-unpaused", "run-failed"]
    room.clear()
    add_run(store, "next", config=RUN)
    worker.wake()
    eventually(lambda: worker.apply_idle_state({"run_id": "next"}).get("status") == "paused")
    worker.stop()
    assert (store.get_run("next").status, store.get_run("next").reason) == (
        RunStatus.INTERRUPTED,
        COORDINATOR_STOPPED,
    )


@pytest.mark.usefixtures("quick")
def test_threads_of_several_runs_back_off_each_by_itself(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "has_room", lambda _: False)
    backoffs: list[stalls.StorageBackoff] = []

    class Noted(stalls.StorageBackoff):
        def wait_until_writable(self, run_id: str, error: Any) -> bool:
            backoffs.append(self)
            return super().wait_until_writable(run_id, error)

    monkeypatch.setattr(scheduler, "StorageBackoff", Noted)
    add_reachable(worker, "pi", "barn")
    worker = beside(worker)
    worker._context = replace(worker._context, build_run=Hindered(*[StoreFullError("no room")] * 2))
    runs = [left_behind(worker, RunStatus.QUEUED, more=on(name)) for name in ("pi", "barn")]
    worker.start()
    eventually(lambda: set(list_states(worker).values()) == {"paused"} and len(list_states(worker)) == len(runs))
    worker.stop()
    assert len(set(map(id, backoffs))) == len(runs)


@pytest.mark.usefixtures("quick")
def test_a_hindrance_at_the_end_of_a_pause_begins_another_one(
    store: Store, worker: RunScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, refusals = store.get_run, [StoreFullError("no room again")]

    def run(run_id: str) -> Any:
        if refusals and threading.current_thread() is not threading.main_thread():
            raise refusals.pop()
        return known(run_id)

    monkeypatch.setattr(store, "get_run", run)
    worker._context = replace(
        worker._context, build_run=Hindered(StoreFullError("no room"), UsageError("it cannot work"))
    )
    add_run(store, config=RUN)
    worker.start()
    eventually(lambda: store.get_run("r").status is RunStatus.FAILED)
    kinds = [event["kind"] for event in read_history(store, "events", run="r")]
    assert kinds == ["run-paused", "run-unpaused", "run-paused", "run-unpaused", "run-failed"]
    worker.stop()


def test_a_stop_that_a_coordinator_died_of_is_brought_to_its_end_before_anything_else(
    store: Store, worker: RunScheduler
) -> None:
    add_run(store, "q", config=RUN, submitted_at=0.5)
    run_id = left_behind(worker, RunStatus.STOPPING, TURN, reason="somebody asked")
    worker.recover()
    record = worker._get_next_run()
    assert record is not None
    assert (record.run_id, store.get_run(run_id).status) == (run_id, RunStatus.STOPPING)
    worker._end_run(run_id, RunStatus.INTERRUPTED, COORDINATOR_STOPPED)
    assert store.get_run(run_id).status is RunStatus.STOPPING
    worker.recover()
    worker._get_next_run()
    worker._end_run(run_id, RunStatus.INTERRUPTED, "its journal is damaged")
    ended = store.get_run(run_id)
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, "somebody asked")
    taken = worker._get_next_run()
    assert taken is not None
    assert taken.run_id == "q"


@pytest.mark.parametrize("turns", [(), (TURN,)], ids=["it cannot go on exactly", "it is stopped once more"])
def test_a_stop_that_need_not_be_driven_to_its_end_is_over_at_once(
    store: Store, worker: RunScheduler, turns: tuple[TurnStarted, ...]
) -> None:
    run_id = left_behind(worker, RunStatus.STOPPING, *turns, reason="somebody asked")
    worker.recover()
    if turns:
        worker.stop_run(run_id, "asked again")
    assert worker._get_next_run() is None
    ended = store.get_run(run_id)
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, "asked again" if turns else "somebody asked")


@with_parts
def test_of_a_run_that_is_over_nothing_stays_until_garbage_is_collected(store: Store, worker: RunScheduler) -> None:
    add_run(store, "r", config=RUN)
    gc.disable()
    try:
        worker.start()
        eventually(lambda: has_fleet(worker))
        fleet = weakref.ref(get_only(worker).fleet)
        worker.stop_run("r", "enough")
        eventually(lambda: store.get_run("r").status is RunStatus.STOPPED)

        eventually(lambda: fleet() is None)
    finally:
        gc.enable()
        worker.stop()


MINE = """
import threading
from dataclasses import dataclass
from edgefl.strategies.synchronous.fedavg import FedAvgConfig

released = threading.Event()

class Wrong:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)

class WithFunction(Wrong):
    def finish(self, state):
        state.used = (print,)
        return state

class Asleep(Wrong):
    def assign(self, state, view):
        released.wait(60)
        return self.inner.assign(state, view)

@dataclass(frozen=True, kw_only=True)
class Hanging(FedAvgConfig):
    def build(self, rules):
        return Asleep(FedAvgConfig.build(self, rules))

@dataclass(frozen=True, kw_only=True)
class Unsavable(FedAvgConfig):
    def build(self, rules):
        return WithFunction(FedAvgConfig.build(self, rules))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with strategies of a user's."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", name)
    yield name
    sys.modules.pop(name, None)


@with_parts
def test_a_strategy_whose_state_cannot_be_saved_ends_its_run_and_not_the_coordinator(
    store: Store, worker: RunScheduler, mine: str
) -> None:
    fatal: list[Exception] = []
    worker._on_fatal = fatal.append
    bad = left_behind(worker, RunStatus.STOPPING, TURN, reason="somebody asked", strategy=f"{mine}:Unsavable")
    worker.recover()
    worker.start()
    add_run(store, "next", config=RUN)
    worker.wake()
    eventually(lambda: store.get_run("next").status is RunStatus.RUNNING)
    worker.stop()
    ended = store.get_run(bad)
    assert ended.status is RunStatus.FAILED
    assert f"strategy {mine}:Unsavable: " in str(ended.reason)
    assert "that cannot be saved: cannot save" in str(ended.reason)
    assert fatal == []


@with_parts
def test_a_stored_run_whose_strategy_is_not_allowed_any_more_fails_and_imports_nothing(
    store: Store, worker: RunScheduler, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGEFL_ALLOW_MODULES")
    names = (f"{mine}:Hanging", "subprocess:Popen")
    run_ids = [left_behind(worker, RunStatus.QUEUED, strategy=name) for name in names]
    worker.start()
    eventually(lambda: all(store.get_run(run_id).status is RunStatus.FAILED for run_id in run_ids))
    worker.stop()
    assert f"the module {mine} is not allowed here" in str(store.get_run(run_ids[0]).reason)
    assert "subprocess is of Python's own library" in str(store.get_run(run_ids[1]).reason)
    assert mine not in sys.modules


@pytest.fixture
def hung(store: Store, worker: RunScheduler, mine: str) -> Iterator[str]:
    """A run that is in a method of its strategy, which does not return until the test is over."""
    run_id = left_behind(worker, RunStatus.QUEUED, strategy=f"{mine}:Hanging")
    worker.start()
    eventually(
        lambda: any(format_running_call(run.strategy).startswith("assign of") for run in worker._active.values())
    )
    yield run_id
    sys.modules[mine].released.set()
    worker.stop()
    worker._threads[0].join(60)


@with_parts
def test_a_coordinator_ends_without_a_run_whose_strategy_does_not_return(
    store: Store, worker: RunScheduler, mine: str, hung: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("edgefl.coordinator.runs.scheduler.STOP_TIMEOUT_S", 0.1)
    worker.stop()
    assert worker._threads[0].is_alive()
    said = (
        f"run {hung} does not end within 0 s, the coordinator ends without it: assign of strategy {mine}:Hanging has"
    )
    assert said in caplog.text
    assert worker._threads[0].daemon, "it ends with the process"
    assert store.get_run(hung).status is RunStatus.RUNNING

    RunScheduler(worker._context, on_fatal=lambda _: None).recover()
    assert store.get_run(hung).status is RunStatus.QUEUED


@with_parts
def test_a_stop_that_a_strategy_keeps_from_its_turn_is_told_once(
    store: Store, worker: RunScheduler, mine: str, hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.stop_run(hung, "somebody asked")
    worker.flush()
    assert read_history(store, "events", run=hung) == [], "it is too early"
    monkeypatch.setattr("edgefl.coordinator.runs.scheduler.REPORT_AFTER_S", 0.0)
    worker.flush()
    worker.flush()
    (event,) = read_history(store, "events", run=hung)
    assert event["kind"] == "run-stalled"
    assert event["message"].startswith(
        f"cannot be stopped now: assign of strategy {mine}:Hanging has not returned for"
    )


def test_a_method_that_is_called_again_and_again_holds_nobody_up() -> None:
    watch, strategy = SlowCallWatchdog(), SimpleNamespace(name="mine", calling="ready", num_calls=1)
    assert [watch.compute_call_s(strategy, now_s) for now_s in (5.0, 7.0)] == [0.0, 2.0]
    strategy.num_calls = 2
    assert [watch.compute_call_s(strategy, now_s) for now_s in (8.0, 9.0)] == [0.0, 1.0]
    strategy.calling = ""
    assert [watch.compute_call_s(strategy, now_s) for now_s in (10.0, 11.0)] == [0.0, 0.0]


def test_a_coordinator_gives_up_on_a_run_before_systemd_does_on_the_coordinator() -> None:
    unit = Path(__file__).parents[3] / "provisioning/units/edgefl-coordinator.service"
    (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
    assert int(limit) / 2 >= STOP_TIMEOUT_S


def test_a_run_goes_on_with_the_base_that_it_began_with_or_waits_for_it(
    store: Store, worker: RunScheduler, tmp_path: Path
) -> None:
    directory, catalogue = worker._context.directory, BaseCatalogue(worker._context.directory.bases)
    first, other = (make_task("digits", {}).init(seed) for seed in (1, 2))
    for name, tensors in (("first", first), ("other", other)):
        (tmp_path / f"{name}.safetensors").write_bytes(encode_base(tensors))
    begun = catalogue.add(tmp_path / "first.safetensors", "net").sha256
    config = parse_run({**CONFIG, "adapt": {"method": "head", "base": "net"}})

    def assemble(config: RunConfig) -> RunComponents:
        return build_run(config, "r", bases=directory.bases)

    assert pin_base(config, "r", directory) == config, "it has not begun"
    record_base(assemble(config), "r", directory)
    catalogue.add(tmp_path / "other.safetensors", "second")
    names = directory.bases / "names.json"
    names.write_text(names.read_text().replace('"net"', '"old"').replace('"second"', '"net"'))  # a name re-bound
    assert assemble(config).adapted.plan.sha256 != begun
    pinned = assemble(pin_base(config, "r", directory))
    assert pinned.adapted.plan.sha256 == begun
    worker._record_base(pinned, "r")
    (directory.bases / f"{begun}.safetensors").write_bytes(b"damaged")
    with pytest.raises(InterruptedRunError, match=f"SHA-256 {begun}, got .*bring that file again"):
        worker._record_base(assemble(pin_base(config, "r", directory)), "r")
    with pytest.raises(UsageError, match="must go on with the base that it began with"):
        check_base(assemble(config), "r", directory)


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.INTERRUPTED])
def test_the_noise_key_of_a_private_run_that_has_failed_is_deleted(
    store: Store, worker: RunScheduler, tmp_path: Path, status: RunStatus
) -> None:
    add_run(store)
    folder, recorder = tmp_path / "runs" / "r", SpendRecorder(spend=PrivacySpend(key=b"k" * 32))
    open_spend_recorder(folder, recorder)
    recorder.record(1, b"one")
    worker._end_run("r", status, "because")
    spend = decode_state((folder / PRIVACY_FILE).read_bytes(), PrivacySpend)
    has_failed = status is RunStatus.FAILED
    assert (spend.sampled, spend.key) == (1, b"" if has_failed else b"k" * 32)
    assert (folder / NEW_INCARNATION_FILE).exists() == has_failed, "killed here, it would not replay without its key"
