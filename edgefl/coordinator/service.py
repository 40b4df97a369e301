"""The coordinator process: puts all its parts together, runs until it is told to stop, and closes them in order."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from starlette.requests import Request

from edgefl.config import AlertSettings, CoordinatorSettings, RunConfig
from edgefl.coordinator import pki
from edgefl.coordinator.access import Watch, is_loopback
from edgefl.coordinator.attempts import Attempts, network_of
from edgefl.coordinator.brokers.broker import Broker, BrokerAddress, BrokerTls, connect_host
from edgefl.coordinator.brokers.bus import Bus
from edgefl.coordinator.brokers.choice import make_broker
from edgefl.coordinator.brokers.refusals import Refusals
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.questions import Questions
from edgefl.coordinator.evaluator import EvaluatorProcess
from edgefl.coordinator.fleet.diary import Diary
from edgefl.coordinator.fleet.draining import Draining
from edgefl.coordinator.fleet.membership import Membership
from edgefl.coordinator.fleet.presence import Presence
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.joining.enrolment import BrokerSite, EnrolmentService
from edgefl.coordinator.joining.own_certificates import renew_own
from edgefl.coordinator.joining.renewal import RenewalService
from edgefl.coordinator.joining.rotation import Rotation, note_own, own_serial
from edgefl.coordinator.joining.tokens import TokenTerms, make_token
from edgefl.coordinator.monitoring.alert_watch import AlertSources, AlertWatch
from edgefl.coordinator.monitoring.device_series import device_series
from edgefl.coordinator.monitoring.fleet_collector import FleetCollector, Sources
from edgefl.coordinator.monitoring.metrics import Metrics
from edgefl.coordinator.rollouts.bundle_files import BundleFiles
from edgefl.coordinator.rollouts.deployment_files import Export
from edgefl.coordinator.rollouts.deployments import Deployments
from edgefl.coordinator.rollouts.installations import Installations
from edgefl.coordinator.runs.device_state import check_device_state, check_messages
from edgefl.coordinator.runs.kept_models import sweep_models
from edgefl.coordinator.runs.planning import plan_run
from edgefl.coordinator.runs.run_meter import RunMeter
from edgefl.coordinator.runs.trainers import check_trainers
from edgefl.coordinator.runs.worker import Assemble, Assembled, RunSite, RunWorker
from edgefl.coordinator.superlink import Reply, SuperLink
from edgefl.coordinator.web.feed import Feed
from edgefl.coordinator.web.feed_state import FeedState
from edgefl.coordinator.web.https_port import WebServer, listen, make_app
from edgefl.coordinator.web.routes import Answering, all_routers
from edgefl.errors import EdgeflError, TaskError
from edgefl.processes import on_stop_signal
from edgefl.protocol import EVALUATOR_NAME, Command, CommandKind, Heartbeat, Topic, checked_address
from edgefl.storage.database import sqlite_file
from edgefl.storage.news import last_seen
from edgefl.storage.records import RunStatus
from edgefl.storage.store import Store
from edgefl.types import Json, Progress
from edgefl.watchdog import LoopLife, Notifier, watched

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.5
BUS_TIMEOUT_S = 3.0
EVALUATOR_TOKEN_TTL_S = 600.0
_DEFAULTS = CoordinatorSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How `edgefl coordinator start` was called."""

    host: str = _DEFAULTS.host
    port: int = _DEFAULTS.port
    broker: str = _DEFAULTS.broker
    broker_port: int = _DEFAULTS.broker_port
    store_url: str | None = None
    test_shards: Mapping[str, Path] = field(default_factory=dict)
    heartbeat_s: float = _DEFAULTS.heartbeat_s
    device_metrics: int = _DEFAULTS.device_metrics
    alerts: AlertSettings | None = None  # None for those of the directory
    keep_history_days: float | None = _DEFAULTS.keep_history_days

    @property
    def has_external_broker(self) -> bool:
        return self.broker.startswith("mqtts://")


Settle = Callable[[CoordinatorDirectory], CoordinatorDirectory]


def _as_it_is(directory: CoordinatorDirectory) -> CoordinatorDirectory:
    return directory


class Coordinator:
    """All parts of a running coordinator. Use it as a context manager: it closes what it has opened.

    Args:
        directory: held for this coordinator alone while it runs.
        options: how it was called.
        assemble: makes the parts of a run.
        settle: called when the directory is held and the port listened on; returns the directory, possibly changed.
        export: makes the file of a model that devices deploy.
    """

    def __init__(
        self,
        directory: CoordinatorDirectory,
        options: StartOptions,
        assemble: Assemble,
        settle: Settle = _as_it_is,
        export: Export | None = None,
    ) -> None:
        self._directory, self._options, self._assemble, self._settle = directory, options, assemble, settle
        self._export = export or _no_export
        self._evaluator_token_id: str | None = None
        self._stopping = threading.Event()
        self.life = LoopLife()
        self._fatal: EdgeflError | None = None
        self._worker: RunWorker | None = None
        self._web: WebServer | None = None
        self._deployments: Deployments | None = None
        self._installations: Installations | None = None
        self._questions: Questions | None = None
        self._closers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._closers.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closers.close()

    def stop(self) -> None:
        """Ends `wait`."""
        self._stopping.set()

    def wait(self) -> None:
        """Keeps the fleet's diary until somebody stops the coordinator.

        Raises:
            EdgeflError: it cannot go on (the disk is full, the store is gone).
        """
        turns = -1
        while not self._stopping.wait(FLUSH_EVERY_S):
            # A coordinator that writes its diary and answers nobody is as good as dead.
            if self._web is not None and self._web.turns != turns:
                turns = self._web.turns
                self.life.beat()
            self._roster.tick()
            self._diary.flush()
            self._attempts.flush()
            self._refusals.update()
            self._rotation.look()
            if self._worker is not None:
                self._worker.flush()
            self._feed.update()
        if self._fatal is not None:
            raise self._fatal

    def _open(self) -> None:
        """Opens everything in order; the closers run in the opposite one.

        So at the end the evaluator says goodbye first, the active run recalls what is out, and only then bus, broker
        and store close.
        """
        options = self._options
        self._closers.enter_context(self._directory.locked())
        listener = listen(options.host, options.port)
        self._closers.callback(listener.close)
        self._directory = directory = self._settle(self._directory)
        former = own_serial(directory)
        has_renewed = renew_own(directory, now=time.time())
        self._store = Store.open(options.store_url or directory.database)
        self._closers.callback(self._store.close)
        if has_renewed:
            note_own(directory, self._store, former=former, now=time.time())
        sweep_models(directory.models, self._store, now=time.time())
        self._roster = Roster(Presence(heartbeat_s=options.heartbeat_s), time.monotonic)
        self._diary = Diary(
            store=self._store,
            roster=self._roster,
            clock=time.time,
            on_progress=self._post,
            on_heartbeat=self._call_back,
            keep_history_days=options.keep_history_days,
        )
        self._closers.callback(self._last_flush)
        self._attempts = Attempts(
            store=self._store,
            clock=time.time,
            monotonic=time.monotonic,
            is_device=lambda name: self._roster.info(name) is not None,
        )
        self._superlink = SuperLink(
            on_reply=self._post, on_contact=self._roster.note_contact, on_refused=self._note_refused
        )
        self._members = Membership(self._store, self._superlink, self._roster)
        self._members.restore()
        self._draining = Draining(self._store, self._roster, self._send_command, time.time)
        self._draining.restore()
        self._feed = Feed(FeedState(store=self._store, roster=self._roster), last_seen=lambda: last_seen(self._store))
        self._roster.listen(self._feed.heard)
        self._bus = self._open_bus()
        self._draining.listen()
        self._rotation = Rotation(
            directory=directory,
            store=self._store,
            roster=self._roster,
            send=self._send_command,
            on_own=self._take_own,
        )
        self._rotation.listen()
        self._metrics = Metrics()
        self._meter = RunMeter(self._metrics.registry)
        self._questions = Questions(self._bus, self._roster)
        self._deployments = deployments = self._make_deployments(self._bus)
        self._installations = installations = self._make_installations(self._bus)
        self._worker = worker = self._make_worker(self._bus, deployments)
        worker.recover()
        self._watch_metrics()
        self._open_web(listener, worker, self._questions, deployments, installations)
        self._open_alerts()
        deployments.start()
        self._closers.callback(deployments.stop)
        installations.start()
        self._closers.callback(installations.stop)
        worker.start()
        self._closers.callback(worker.stop)
        self._open_evaluator()
        log.info("fleet %s at https://%s:%d", directory.fleet, options.host, options.port)

    def _make_deployments(self, bus: Bus) -> Deployments:
        return Deployments(
            store=self._store,
            roster=self._roster,
            directory=self._directory,
            commander=bus,
            export=self._export,
            on_fatal=self._die,
        )

    def _make_installations(self, bus: Bus) -> Installations:
        return Installations(
            store=self._store,
            roster=self._roster,
            files=BundleFiles(self._directory.root / "bundles"),
            commander=bus,
            on_fatal=self._die,
        )

    def _make_worker(self, bus: Bus, deployments: Deployments) -> RunWorker:
        site = RunSite(
            directory=self._directory,
            store=self._store,
            roster=self._roster,
            superlink=self._superlink,
            bell=bus,
            assemble=self._assemble,
            meter=self._meter,
            on_finished=deployments.after_run,
        )
        return RunWorker(site, on_fatal=self._die)

    def _watch_metrics(self) -> None:
        directory, bus = self._directory, self._bus
        sources = Sources(
            roster=self._roster,
            meter=self._meter,
            directory=directory.root,
            store_file=sqlite_file(self._options.store_url or directory.database),
            num_queued=lambda: self._store.num_runs(RunStatus.QUEUED),
            is_broker_connected=bus.is_connected,
            num_dropped=lambda: sum(bus.malformed_counts().values()),
            expiries=_expiries(directory),
            max_devices=self._options.device_metrics,
        )
        self._metrics.watch(
            FleetCollector(sources),
            lambda: device_series(self._roster, max_devices=sources.max_devices, now=time.time()),
        )

    def _open_alerts(self) -> None:
        settings = self._options.alerts or self._directory.alerts
        if settings.webhook is None:
            return
        sources = AlertSources(
            fleet=self._directory.fleet,
            roster=self._roster,
            meter=self._meter,
            directory=self._directory.root,
            is_broker_connected=self._bus.is_connected,
            expiries=_expiries(self._directory),
            expected=frozenset(r.device_id for r in self._store.devices() if r.presence not in {None, "offline"}),
        )
        watch = AlertWatch(sources, settings)
        watch.start()
        self._closers.callback(watch.stop)

    def _post(self, item: Reply | Progress) -> None:
        """Hands what a device sent to the active run; devices of an earlier coordinator speak before there is one."""
        if self._worker is not None:
            self._worker.post(item)

    def _call_back(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Recalls work for a run that is over; a coordinator that was killed could not, and it may take hours.

        Likewise ends a node that nobody listens to any more, since it is flagged.
        """
        if self._deployments is not None:
            self._deployments.heard(device_id, heartbeat)
        if self._installations is not None:
            self._installations.heard(device_id, heartbeat)
        worker, assignment, run = self._worker, heartbeat.assignment, heartbeat.run
        if worker is None or run is None:
            return
        is_wanted = worker.is_active(run) or worker.goes_on(run)
        if is_wanted and (assignment or not worker.bars(run, device_id)):
            return
        # The same id each time: a device obeys a command once.
        if assignment:
            recall = Command(id=f"recall-{assignment}", kind=CommandKind.RECALL, argument=assignment)
            self._bus.command(device_id, recall)
        else:  # a node that goes on by itself
            self._bus.command(device_id, Command(id=f"end-{run}", kind=CommandKind.END, argument=run))

    def _open_bus(self) -> Bus:
        directory, options = self._directory, self._options
        tls = BrokerTls(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key)
        self._broker: Broker = make_broker(
            options.broker,
            directory=directory.broker,
            fleet=directory.fleet,
            tls=tls,
            host=options.host,
            port=options.broker_port,
            authority=directory.authority(),
            on_denied=lambda who, what: self._attempts.note("mqtt", who, what),
        )
        if not options.has_external_broker:
            self._closers.enter_context(directory.broker_locked())
        self._refusals = Refusals(self._broker, self._store, own=lambda: own_serial(directory))
        self._refusals.update()
        self._broker_address: BrokerAddress = self._broker.start()
        self._closers.callback(self._broker.stop)
        own = BrokerTls(ca=directory.ca_cert, cert=directory.client_cert, key=directory.client_key)
        bus = Bus(
            self._broker_address,
            own,
            directory.fleet,
            self._heard,
            lambda connected: self._bus_changed(bus, is_connected=connected),
        )
        bus.connect()
        self._closers.callback(bus.close)
        if not bus.wait_connected(BUS_TIMEOUT_S):
            log.warning("the broker does not answer yet; devices poll meanwhile")
        return bus

    def _heard(self, device_id: str, kind: Topic, payload: bytes) -> None:
        """Takes an MQTT message; before all of this stands nobody has asked anything."""
        if kind is Topic.ANSWER:
            if self._questions is not None:
                self._questions.answered(device_id, payload)
            return
        self._diary.message(device_id, kind, payload)

    def _bus_changed(self, bus: Bus, *, is_connected: bool) -> None:
        """Tells presence; and rings every bell when the bus is back, for those that nobody heard meanwhile."""
        self._roster.note_bus(connected=is_connected)
        if is_connected:
            for info in self._roster.workers():
                bus.ring(info.device_id)

    def _open_web(
        self,
        listener: socket.socket,
        worker: RunWorker,
        questions: Questions,
        deployments: Deployments,
        installations: Installations,
    ) -> None:
        enrolment = EnrolmentService(
            directory=self._directory,
            store=self._store,
            on_enrolled=self._members.enrolled,
            broker=BrokerSite(port=self._broker_address.port, host=self._outside_host()),
            evaluator_token=lambda: self._evaluator_token_id,
        )
        renewal = RenewalService(
            directory=self._directory, store=self._store, on_renewed=self._renewed, clock=time.time
        )
        routers = all_routers(
            Answering(
                host=self._options.host,
                directory=self._directory,
                store=self._store,
                roster=self._roster,
                members=self._members,
                worker=worker,
                questions=questions,
                deployments=deployments,
                installations=installations,
                draining=self._draining,
                feed=self._feed,
                metrics=self._metrics,
                enrolment=enrolment,
                renewal=renewal,
                rotation=self._rotation,
                remove=self._remove,
                watch=Watch(note=self._attempts.note),
                check=self._check,
                plan=self._plan,
            )
        )
        app = make_app(self._superlink.api, routers, note=self._attempts.note)
        self._web = web = WebServer(self._metrics.counting(app), self._directory, listener)
        web.start()
        self._closers.callback(web.stop)
        self._closers.callback(self._feed.close)  # first: open feeds would hold up the server's end

    def _note_refused(self, what: str, request: Request, node_id: int | None, detail: str) -> None:
        device_id = None if node_id is None else self._roster.device_of(node_id)
        self._attempts.note(what, device_id or network_of(request.client.host if request.client else None), detail)

    def _renewed(self, device_id: str, public_key: bytes) -> None:
        self._members.rekeyed(device_id, public_key)
        self._rotation.renewed(device_id)

    def _remove(self, device_id: str) -> None:
        """Takes a device out everywhere: Flower at once, and the broker, which is told with the next flush."""
        self._members.remove(device_id)
        self._bus.forget(device_id)
        log.info("%s was removed from the fleet", device_id)

    def _take_own(self) -> None:
        """Takes up certificates of the coordinator that are new."""
        self._broker.reload()
        self._bus.reload()
        if self._web is not None:
            self._web.reload()

    def _send_command(self, device_id: str, command: Command) -> None:
        self._bus.command(device_id, command)

    def _outside_host(self) -> str | None:
        """Returns the broker's host for devices when it is not this machine, which they know by their own names."""
        host = self._broker_address.host
        return host if self._options.has_external_broker and not is_loopback(host) else None

    def _check(self, config: RunConfig) -> Json:
        return self._checked(self._assemble(config, "check"))

    def _checked(self, run: Assembled) -> Json:
        check_messages(run.strategy, run.model)
        check_trainers(run.config, self._roster, needs_torch=run.needs_torch)
        return check_device_state(run.config, run.strategy, run.model, self._roster)

    def _plan(self, config: RunConfig) -> Json:
        """Returns what a run would do, once it is sure that it would be let in."""
        run = self._assemble(config, "plan")
        return {**self._checked(run), **plan_run(run, self._roster, self._store)}

    def _open_evaluator(self) -> None:
        shards = self._options.test_shards
        if not shards:
            return
        state_dir = self._directory.root / "evaluator"
        known = {record.device_id for record in self._store.devices()}
        has_joined = EVALUATOR_NAME in known and (state_dir / "device.json").exists()
        address = checked_address(connect_host(self._options.host), self._options.port)
        token = None
        if not has_joined:
            if EVALUATOR_NAME in known:  # its state directory is gone, and with it the key that holds the name
                self._members.remove(EVALUATOR_NAME)
            terms = TokenTerms(ttl_s=EVALUATOR_TOKEN_TTL_S, role="evaluator")
            made = make_token(self._store, self._directory, terms, now=time.time())
            self._evaluator_token_id, token = made.token_id, made.text()
        child = EvaluatorProcess(
            state_dir=state_dir,
            shards={task: Path(path).resolve() for task, path in shards.items()},
            address=address,
            token=token,
            log_file=self._directory.root / "evaluator.log",
        )
        child.start()
        self._closers.callback(child.stop)

    def _last_flush(self) -> None:
        try:
            self._diary.flush()
            self._attempts.flush(is_last=True)
        except EdgeflError as error:
            log.warning("the last heartbeats were not kept: %s", error)

    def _die(self, error: EdgeflError) -> None:
        self._fatal = error
        self.stop()


def _expiries(directory: CoordinatorDirectory) -> dict[str, float]:
    """Returns when each of the coordinator's certificates ends, in unix seconds."""
    files = {"ca": directory.ca_cert, "server": directory.server_cert, "coordinator": directory.client_cert}
    return {name: pki.expires_at(path.read_bytes()) for name, path in files.items()}


def _no_export(task: str, _options: object, _model: Path, _out: Path) -> None:
    raise TaskError(f"this coordinator cannot export models of task {task}")


def serve(
    directory: CoordinatorDirectory,
    options: StartOptions,
    assemble: Assemble,
    settle: Settle = _as_it_is,
    export: Export | None = None,
) -> None:
    """Runs a coordinator until SIGTERM or SIGINT; the arguments are those of `Coordinator`.

    Raises:
        EdgeflError: it could not start, or cannot go on.
    """
    coordinator = Coordinator(directory, options, assemble, settle, export)
    notifier = Notifier.from_environment()  # before there are children, who must not speak for us
    with on_stop_signal(coordinator.stop), coordinator:
        with watched(notifier, coordinator.life):
            coordinator.wait()
        log.info("stopping")
