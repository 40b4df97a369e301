"""The coordinator process: puts all its parts together, runs until it is told to stop, and closes them in order."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

from starlette.requests import Request

from edgefl.coordinator.access import Watch
from edgefl.coordinator.askers import Askers
from edgefl.coordinator.attempts import Attempts, network_of
from edgefl.coordinator.brokers.broker import connect_host
from edgefl.coordinator.brokers.mqtt_side import MqttSide
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.evaluator import OwnEvaluator
from edgefl.coordinator.fleet.diary import Diary
from edgefl.coordinator.fleet.draining import Draining
from edgefl.coordinator.fleet.membership import Membership
from edgefl.coordinator.fleet.presence import Presence
from edgefl.coordinator.fleet.roster import Roster, RosterEvent
from edgefl.coordinator.fleet.twins import Cloned, TwinTried
from edgefl.coordinator.hindrance import Hindrance
from edgefl.coordinator.joining.enrolment import BrokerSite, EnrolmentService
from edgefl.coordinator.joining.own_certificates import renew_ca, renew_own
from edgefl.coordinator.joining.readmission import ReadmissionService
from edgefl.coordinator.joining.renewal import RenewalService
from edgefl.coordinator.joining.rotation import Rotation, note_own, own_serial
from edgefl.coordinator.monitoring.monitoring import Monitoring, Watched
from edgefl.coordinator.rollouts.deployment_files import Export
from edgefl.coordinator.runs.kept_models import sweep_models
from edgefl.coordinator.runs.pauses import Pauses
from edgefl.coordinator.runs.vetting import Vetting
from edgefl.coordinator.runs.worker import Assemble, RunSite
from edgefl.coordinator.start_options import StartOptions
from edgefl.coordinator.superlink import SuperLink
from edgefl.coordinator.switchboard import Switchboard
from edgefl.coordinator.web.feed import Feed
from edgefl.coordinator.web.feed_state import FeedState
from edgefl.coordinator.web.https_port import WebServer, listen, make_app
from edgefl.coordinator.web.routes import Answering, all_routers
from edgefl.errors import EdgeflError, TaskError
from edgefl.processes import on_stop_signal, open_many_files
from edgefl.protocol import Command, CommandKind, Topic, checked_address
from edgefl.storage.news import last_seen
from edgefl.storage.store import Store
from edgefl.watchdog import LoopLife, Notifier, watched

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.5


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
        self._stopping = threading.Event()
        self.life = LoopLife()
        self._fatal: EdgeflError | None = None
        self._switchboard = Switchboard()
        self._pauses = Pauses()
        self._web: WebServer | None = None
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
            EdgeflError: it cannot go on (the store is damaged, or gone).
        """
        turns = -1
        while not self._stopping.wait(FLUSH_EVERY_S):
            # A coordinator that writes its diary and answers nobody is as good as dead.
            if self._web is not None and self._web.turns != turns:
                turns = self._web.turns
                self.life.beat()
            self._roster.tick()
            self._hindrance.attempt(self._keep_account)
        if self._fatal is not None:
            raise self._fatal

    def _keep_account(self) -> None:
        """Writes what has gathered, and shows what is new."""
        self._diary.flush()
        self._attempts.flush()
        self._mqtt.update()
        self._rotation.look()
        self._askers.worker.flush()
        self._feed.update()

    def _open(self) -> None:
        """Opens everything in order; the closers run in the opposite one.

        So at the end the evaluator says goodbye first, the active run recalls what is out, and only then bus, broker
        and store close.
        """
        listener = self._hold_directory()
        self._open_store()
        self._open_fleet()
        self._open_mqtt()
        self._askers = askers = self._make_askers()
        self._switchboard.open(askers)
        askers.worker.recover()
        self._open_web(listener, askers)
        self._start(askers)
        log.info("fleet %s at https://%s:%d", self._directory.fleet, self._options.host, self._options.port)

    def _hold_directory(self) -> socket.socket:
        """Takes directory and port for this coordinator alone, and returns the socket that it listens on."""
        self._closers.enter_context(self._directory.locked())
        listener = listen(self._options.host, self._options.port)
        self._closers.callback(listener.close)
        self._directory = self._settle(self._directory)
        if renew_ca(self._directory, now=time.time()):
            log.info("the certificate of the fleet's CA is renewed, with the same key")
        return listener

    def _open_store(self) -> None:
        directory = self._directory
        former = own_serial(directory)
        has_renewed = renew_own(directory, now=time.time())
        self._store = Store.open(self._directory.store_url)
        self._closers.callback(self._store.close)
        self._hindrance = Hindrance(record=lambda kind, told, at: self._store.record_event(kind, told, at=at))
        if has_renewed:
            note_own(directory, self._store, former=former, now=time.time())
        sweep_models(directory.models, self._store, now=time.time())

    def _open_fleet(self) -> None:
        """Brings back the devices that the store knows, with all that keeps account of them."""
        options = self._options
        self._roster = Roster(Presence(heartbeat_s=options.heartbeat_s), time.monotonic)
        self._diary = Diary(
            store=self._store,
            roster=self._roster,
            clock=time.time,
            on_progress=self._switchboard.post,
            on_heartbeat=self._switchboard.heartbeat,
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
            on_reply=self._switchboard.post,
            watcher=self._roster,
            on_refused=self._note_refused,
            folder=self._directory.root,
        )
        self._members = Membership(self._store, self._superlink, self._roster)
        self._members.restore()
        self._evaluator = OwnEvaluator(self._directory, self._store, self._members)
        self._draining = Draining(self._store, self._roster, self._send_command, time.time)
        self._draining.restore()
        self._feed = Feed(
            FeedState(store=self._store, roster=self._roster, pauses=self._pauses),
            last_seen=lambda: last_seen(self._store),
        )
        self._roster.listen(self._feed.heard)

    def _open_mqtt(self) -> None:
        """Opens the broker and the connection to it, and what sends commands when devices come."""
        self._mqtt = MqttSide(
            directory=self._directory,
            options=self._options,
            store=self._store,
            roster=self._roster,
            note=self._attempts.note,
            on_message=self._heard,
            closers=self._closers,
        )
        self._draining.listen()
        self._roster.listen(self._turn_away)
        self._rotation = Rotation(
            directory=self._directory,
            store=self._store,
            roster=self._roster,
            send=self._send_command,
            on_own=self._take_own,
        )
        self._rotation.listen()

    def _make_askers(self) -> Askers:
        """Returns what asks devices for something, not yet started, and watched."""
        bus, store, roster = self._mqtt.bus, self._store, self._roster
        watched = Watched(
            directory=self._directory,
            store=store,
            roster=roster,
            is_broker_connected=bus.is_connected,
            num_dropped=lambda: sum(bus.malformed_counts().values()),
        )
        self._monitoring = Monitoring(watched, max_devices=self._options.device_metrics)
        site = RunSite(
            directory=self._directory,
            store=store,
            roster=roster,
            superlink=self._superlink,
            bell=bus,
            assemble=self._assemble,
            meter=self._monitoring.meter,
            pauses=self._pauses,
        )
        return Askers.at(site, export=self._export, on_fatal=self._die)

    def _open_web(self, listener: socket.socket, askers: Askers) -> None:
        routers = all_routers(self._answering(askers))
        app = make_app(self._superlink.api, routers, note=self._attempts.note)
        self._web = web = WebServer(self._monitoring.metrics.counting(app), self._directory, listener)
        web.start()
        self._closers.callback(web.stop)
        self._closers.callback(self._feed.close)  # first: open feeds would hold up the server's end

    def _answering(self, askers: Askers) -> Answering:
        """Returns the parts that answer over HTTPS."""
        directory, store = self._directory, self._store
        vetting = Vetting(self._assemble, self._roster, store)
        return Answering(
            host=self._options.host,
            directory=directory,
            store=store,
            roster=self._roster,
            members=self._members,
            worker=askers.worker,
            questions=askers.questions,
            deployments=askers.deployments,
            installations=askers.installations,
            draining=self._draining,
            feed=self._feed,
            metrics=self._monitoring.metrics,
            enrolment=EnrolmentService(
                directory=directory,
                store=store,
                on_enrolled=self._members.enrolled,
                broker=BrokerSite(port=self._mqtt.address.port, host=self._mqtt.outside_host()),
                evaluator_token=lambda: self._evaluator.token_id,
            ),
            renewal=RenewalService(directory=directory, store=store, on_renewed=self._renewed, clock=time.time),
            readmission=ReadmissionService(
                directory=directory, store=store, on_readmitted=self._members.rekeyed, clock=time.time
            ),
            rotation=self._rotation,
            remove=self._remove,
            watch=Watch(note=self._attempts.note),
            check=vetting.check,
            plan=vetting.plan,
        )

    def _start(self, askers: Askers) -> None:
        """Sets everything going that has a thread or a process of its own."""
        alerts = self._monitoring.alert_watch(self._options.alerts or self._directory.alerts)
        for part in (alerts, askers.deployments, askers.installations, askers.worker):
            if part is not None:
                part.start()
                self._closers.callback(part.stop)
        if self._options.test_shards:
            address = checked_address(connect_host(self._options.host), self._options.port)
            self._closers.callback(self._evaluator.started(self._options.test_shards, address).stop)

    def _heard(self, device_id: str, kind: Topic, payload: bytes) -> None:
        """Takes an MQTT message."""
        if kind is Topic.ANSWER:
            self._switchboard.answer(device_id, payload)
        else:
            self._diary.message(device_id, kind, payload)

    def _note_refused(self, what: str, request: Request, node_id: int | None, detail: str) -> None:
        device_id = None if node_id is None else self._roster.device_of(node_id)
        self._attempts.note(what, device_id or network_of(request.client.host if request.client else None), detail)

    def _renewed(self, device_id: str, public_key: bytes) -> None:
        self._members.rekeyed(device_id, public_key)
        self._rotation.renewed(device_id)

    def _remove(self, device_id: str) -> None:
        """Takes a device out everywhere: Flower at once, and the broker, which is told with the next flush."""
        self._members.remove(device_id)
        self._mqtt.bus.forget(device_id)
        log.info("%s was removed from the fleet", device_id)

    def _turn_away(self, event: RosterEvent) -> None:
        """Tells an agent that it is a copy, and is not wanted; on the topic of the device whose copy it is."""
        if isinstance(event, Cloned | TwinTried):
            told = json.dumps({"boot_id": event.refused, "reason": event.reason})
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.REFUSED, argument=told)
            self._send_command(event.device_id, command)

    def _take_own(self) -> None:
        """Takes up certificates of the coordinator that are new."""
        self._mqtt.reload()
        if self._web is not None:
            self._web.reload()

    def _send_command(self, device_id: str, command: Command) -> None:
        self._mqtt.bus.command(device_id, command)

    def _last_flush(self) -> None:
        try:
            self._diary.flush()
            self._attempts.flush(is_last=True)
        except EdgeflError as error:
            log.warning("the last heartbeats were not kept: %s", error)

    def _die(self, error: EdgeflError) -> None:
        self._fatal = error
        self.stop()


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
    log.info("up to %d files and connections at a time", open_many_files())
    coordinator = Coordinator(directory, options, assemble, settle, export)
    notifier = Notifier.from_environment()  # before there are children, who must not speak for us
    with on_stop_signal(coordinator.stop), coordinator:
        with watched(notifier, coordinator.life):
            coordinator.wait()
        log.info("stopping")
