"""Coordinator process: assembles its services, runs until it is stopped, and closes them in order.

While its store cannot be written (a full disk, a store that another program locks) it goes on: devices and page are
served, and writes are buffered within a limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from starlette.requests import Request

from edgefl.coordinator.api.access import Authenticator, record_actions
from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.feed import Feed
from edgefl.coordinator.api.feed_state import FeedState
from edgefl.coordinator.api.server import WebServer, make_app, make_routers, open_listener
from edgefl.coordinator.auth import (
    RejectedRequestLog,
    get_request_source,
    require_device,
)
from edgefl.coordinator.brokers.broker import get_connect_host
from edgefl.coordinator.brokers.mqtt_service import MqttService
from edgefl.coordinator.central_evaluator import CentralEvaluator
from edgefl.coordinator.connections import make_limiters
from edgefl.coordinator.device_clients import DeviceClients, DeviceMessageRouter
from edgefl.coordinator.directory import CoordinatorDirectory, StartOptions
from edgefl.coordinator.enrolment.certificates import CertificateRotation, renew_ca, replace_own_certificates
from edgefl.coordinator.enrolment.enrolment_service import EnrolmentService, RenewalService
from edgefl.coordinator.execution.site_outage import OutageLimits
from edgefl.coordinator.execution.site_rounds import FOLDER as SITE_FOLDER
from edgefl.coordinator.execution.site_rounds import SiteRounds
from edgefl.coordinator.fleet.membership import DrainController, Membership
from edgefl.coordinator.fleet.presence import CloneRejected, PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry, RegistryEvent
from edgefl.coordinator.fleet.supernode_presence import SuperNodePresence
from edgefl.coordinator.fleet.telemetry_writer import TelemetryWriter
from edgefl.coordinator.flower.superlink import SuperLink
from edgefl.coordinator.monitoring.metrics import Monitoring
from edgefl.coordinator.rollouts.deployments import ExportModel
from edgefl.coordinator.runs.model_retention import remove_orphans
from edgefl.coordinator.runs.planning import BuildRun, RunValidator
from edgefl.coordinator.runs.scheduler import RunContext
from edgefl.coordinator.runs.stalls import IdleRuns, check_room
from edgefl.coordinator.split.service import SplitRuns
from edgefl.core.config import RunConfig
from edgefl.core.errors import RETRYABLE_STORE_ERRORS, EdgeflError, TaskError, UsageError
from edgefl.core.protocol import Command, CommandKind, Topic, validate_address
from edgefl.core.types import Json
from edgefl.storage.lineage import open_lineage
from edgefl.storage.queries.dashboard import get_last_seen_times
from edgefl.storage.store import Store
from edgefl.system.processes import LivenessMonitor, SystemdNotifier, on_stop_signal, raise_file_limit, run_watchdog

if TYPE_CHECKING:
    from edgefl.coordinator.failover import Failover

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
FLUSH_INTERVAL_S = 0.5


PrepareDirectory = Callable[[CoordinatorDirectory], CoordinatorDirectory]


def _keep_unchanged(directory: CoordinatorDirectory) -> CoordinatorDirectory:
    return directory


class _StoppedBeforeActiveError(Exception):
    """Raised when a coordinator is stopped before it became the active one of its fleet."""


class Coordinator:
    """A running coordinator with all its services. A context manager, which closes what it has opened.

    Args:
        directory: locked for this coordinator while it runs.
        options: of its start.
        build_run: builds the objects of a run.
        prepare_directory: called with the directory locked and the port open; may return a changed directory.
        export: exports a model to the file that devices deploy.
    """

    def __init__(
        self,
        directory: CoordinatorDirectory,
        options: StartOptions,
        build_run: BuildRun,
        prepare_directory: PrepareDirectory = _keep_unchanged,
        export: ExportModel | None = None,
    ) -> None:
        self._directory, self._options, self._build_run, self._prepare_directory = (
            directory,
            options,
            build_run,
            prepare_directory,
        )
        self._export = export or _reject_export
        self._stopping = threading.Event()
        self.liveness = LivenessMonitor()
        self._fatal: EdgeflError | None = None
        self._router = DeviceMessageRouter()
        self._idle_runs, self._split_runs = IdleRuns(), SplitRuns()
        self._web: WebServer | None = None
        self._failover: Failover | None = None
        self._closers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:  # an interrupt too: what is open is closed
            self._closers.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closers.close()

    @property
    def waits_for_lease(self) -> bool:
        """Whether other hosts share the fleet, so that opening this may wait for the lease."""
        return self._directory.shared_models is not None

    def stop(self) -> None:
        """Ends `wait`."""
        self._stopping.set()

    def wait(self) -> None:
        """Flushes periodically until the coordinator is stopped.

        Raises:
            EdgeflError: it cannot go on (the store is damaged or missing).
        """
        num_ticks = -1
        while not self._stopping.wait(FLUSH_INTERVAL_S):
            # A coordinator that flushes and answers no request counts as dead.
            if self._web is not None and self._web.num_ticks != num_ticks:
                num_ticks = self._web.num_ticks
                self.liveness.record_progress()
            self._supernodes.tick()
            self._registry.tick()
            self._store_guard.run(self._flush)
            if self._store.database.damage is not None:  # a request met it, which was answered with an error
                raise self._store.database.damage
        if self._fatal is not None:
            raise self._fatal

    def _flush(self) -> None:
        """Writes buffered rows, and updates broker, certificates and feed."""
        self._telemetry.flush()
        self._rejections.flush()
        self._mqtt.update()
        self._rotation.poll()
        self._clients.run_scheduler.flush()
        self._feed.update()
        for limiter in self._limiters:
            limiter.log_refusals()

    def open_site(self, outage: OutageLimits = OutageLimits()) -> SiteRounds:  # noqa: B008 frozen
        """Returns the rounds of these boards for a coordinator upstream; call it once, when this one is open.

        Args:
            outage: how far the site goes on without it.
        """

        def record_event(kind: str, device_id: str, message: str) -> None:
            self._store.record_event(kind, message, at=time.time(), device_id=device_id or None)

        site = SiteRounds(
            self._directory.root / SITE_FOLDER,
            registry=self._registry,
            notifier=self._mqtt.client,
            open_transport=self._superlink.open_run,
            clock=time.monotonic,
            record_event=record_event,
            outage=outage,
        )
        self._router.open_site(site)
        return site

    def _open(self) -> None:
        """Opens everything in order; the closers run in the opposite one.

        So at the end the evaluator stops first, then the active run is interrupted, and only then MQTT client, broker
        and store close.
        """
        self._closers.enter_context(self._directory.lock())
        self._wait_for_lease()
        listener = self._open_port()
        self._open_store()
        self._open_fleet()
        self._open_mqtt()
        self._clients = clients = self._make_clients()
        clients.run_scheduler.recover()
        self._router.open(clients)
        self._open_web(listener, clients)
        self._start(clients)
        log.info("fleet %s at https://%s:%d", self._directory.fleet, self._options.host, self._options.port)

    def _wait_for_lease(self) -> None:
        """Waits, where several hosts share the fleet, until this one is to be the active one."""
        if self._directory.shared_models is not None:
            from edgefl.coordinator.failover import Failover  # noqa: PLC0415 only with a second host

            self._failover = self._closers.enter_context(
                Failover(self._directory, on_lost=self._fail, on_progress=self.liveness.record_progress)
            )
            if not self._failover.wait_for_lease(self._stopping):
                raise _StoppedBeforeActiveError

    def _open_port(self) -> socket.socket:
        """Opens the port, and returns the listening socket."""
        check_room(self._directory.root)
        listener = open_listener(self._options.host, self._options.port)
        self._closers.callback(listener.close)
        self._directory = self._prepare_directory(self._directory)
        self._limiters = make_limiters(self._directory.connections)
        if renew_ca(self._directory, now=time.time()):
            log.info("the certificate of the fleet's CA is renewed, with the same key")
        return listener

    def _open_store(self) -> None:
        self._store = Store.open(self._directory.store_url)
        self._closers.callback(self._store.close)
        self._store.database.check()
        if self._failover is not None:
            self._failover.open(self._store)
        self._lineage = open_lineage(
            self._store,
            self._directory.root,
            runs_folder=self._directory.runs,
            now=time.time(),
            is_shared=self._failover is not None,
        )
        self._closers.callback(self._lineage.close)
        self._store_guard = StoreOutageGuard(
            record=lambda kind, message, at: self._store.record_event(kind, message, at=at)
        )
        replace_own_certificates(self._directory, self._store, now=time.time(), only_if_due=True)
        remove_orphans(self._directory.models, self._store, now=time.time())

    def _open_fleet(self) -> None:
        """Restores the devices of the store, and opens the services that track them."""
        options = self._options
        self._registry = DeviceRegistry(PresenceTracker(heartbeat_s=options.heartbeat_s), time.monotonic)
        self._telemetry = TelemetryWriter(
            store=self._store,
            registry=self._registry,
            clock=time.time,
            on_progress=self._router.route_reply,
            on_heartbeat=self._router.on_heartbeat,
            keep_history_days=options.keep_history_days,
        )
        self._closers.callback(self._flush_last)
        self._rejections = RejectedRequestLog(
            store=self._store,
            clock=time.time,
            monotonic=time.monotonic,
            is_device=lambda name: self._registry.get_device(name) is not None,
        )
        self._supernodes = SuperNodePresence(self._registry, time.monotonic)
        self._superlink = SuperLink(
            on_reply=self._router.route_reply,
            observer=self._registry,
            on_rejected=self._record_rejection,
            on_supernode=self._supernodes.on_request,
            folder=self._directory.root,
        )
        self._members = Membership(self._store, self._superlink, self._registry, self._supernodes)
        self._members.restore()
        self._evaluator = CentralEvaluator(self._directory, self._store, self._members)
        self._drain_controller = DrainController(self._store, self._registry, self._send_command, time.time)
        self._drain_controller.restore()
        self._feed = Feed(
            FeedState(store=self._store, registry=self._registry, idle_runs=self._idle_runs),
            last_seen=lambda: get_last_seen_times(self._store),
        )
        self._registry.subscribe(self._feed.on_registry_event)

    def _open_mqtt(self) -> None:
        """Opens broker and MQTT client, and the services that send commands to arriving devices."""
        self._mqtt = MqttService(
            directory=self._directory,
            options=self._options,
            store=self._store,
            registry=self._registry,
            record_rejection=self._rejections.record,
            on_message=self._on_message,
            closers=self._closers,
            limiter=self._limiters[1],
        )
        self._drain_controller.subscribe()
        self._registry.subscribe(self._notify_clone)
        self._rotation = CertificateRotation(
            directory=self._directory,
            store=self._store,
            registry=self._registry,
            send_command=self._send_command,
            on_own_renewed=self._reload_certificates,
        )
        self._rotation.subscribe()

    def _make_clients(self) -> DeviceClients:
        """Returns the services that send instructions, not yet started, and opens monitoring."""
        mqtt_client, store, registry = self._mqtt.client, self._store, self._registry
        self._monitoring = Monitoring(
            directory=self._directory,
            store=store,
            registry=registry,
            is_broker_connected=mqtt_client.is_connected,
            num_dropped=lambda: sum(mqtt_client.malformed_counts().values()),
            max_devices=self._options.device_metrics,
            limiters=self._limiters,
        )
        context = RunContext(
            directory=self._directory,
            store=store,
            registry=registry,
            superlink=self._superlink,
            notifier=mqtt_client,
            build_run=self._build_run,
            metrics=self._monitoring.run_metrics,
            idle_runs=self._idle_runs,
            lineage=self._lineage,
            mirror=None if self._failover is None else self._failover.mirror,
            split_runs=self._split_runs,
            num_slots=self._options.parallel_runs,
        )
        return DeviceClients.create(context, export=self._export, on_fatal=self._fail)

    def _open_web(self, listener: socket.socket, clients: DeviceClients) -> None:
        context = self._make_api_context(clients)
        app = make_app(
            self._superlink.api,
            make_routers(context),
            record_rejection=self._rejections.record,
            is_operator=self._auth.can_act,
        )
        recorded = record_actions(app, self._store, find_actor=self._auth.find_actor)
        counted = self._monitoring.metrics.count_responses(recorded)
        self._web = web = WebServer(counted, self._directory, listener, self._limiters[0])
        web.start()
        self._closers.callback(web.stop)
        self._closers.callback(self._feed.close)  # first: open feeds would delay the server's end

    def _check_no_site(self, check: Callable[[RunConfig], Json]) -> Callable[[RunConfig], Json]:
        """Returns the check of runs, which refuses them all while these boards work for a coordinator upstream."""

        def check_run(config: RunConfig) -> Json:
            if self._router.has_site:
                raise UsageError(
                    "this is a site gateway, whose boards work for the coordinator upstream; submit the run there"
                )
            return check(config)

        return check_run

    def _make_api_context(self, clients: DeviceClients) -> ApiContext:
        """Returns the services of the HTTPS API."""
        directory, store = self._directory, self._store
        validator = RunValidator(self._build_run, self._registry, store, clients.device_rpc.call)
        record_rejection = self._rejections.record
        self._auth = auth = Authenticator(
            directory, store, listen_host=self._options.host, record_rejection=record_rejection
        )
        return ApiContext(
            viewer=auth.require_viewer,
            operator=auth.require_operator,
            admin=auth.require_admin,
            device=require_device(self._members.get_signer, record_rejection=record_rejection),
            signer=require_device(self._members.get_signer, record_rejection=record_rejection, checks_body=False),
            split_runs=self._split_runs,
            auth=auth,
            record_rejection=record_rejection,
            directory=directory,
            store=store,
            registry=self._registry,
            clients=clients,
            drain_controller=self._drain_controller,
            feed=self._feed,
            enrolment=EnrolmentService(
                directory=directory,
                store=store,
                on_enrolled=self._members.add,
                broker_port=self._mqtt.address.port,
                broker_host=self._mqtt.get_advertised_host(),
                evaluator_token=lambda: self._evaluator.token_id,
            ),
            renewal=RenewalService(
                directory=directory,
                store=store,
                on_renewed=self._on_renewed,
                on_reenrolled=self._members.update_key,
                clock=time.time,
            ),
            rotation=self._rotation,
            remove_device=self._remove,
            add_supernode=self._members.add_supernode,
            check_run=self._check_no_site(validator.check),
            plan_run=validator.plan,
            render_metrics=self._monitoring.metrics.render,
        )

    def _start(self, clients: DeviceClients) -> None:
        """Starts every service with a thread or a process of its own."""
        alerts = self._monitoring.make_alert_monitor(self._options.alerts or self._directory.alerts)
        home_assistant = self._monitoring.make_home_assistant_bridge()
        for service in (alerts, home_assistant, clients.deployments, clients.installations, clients.run_scheduler):
            if service is not None:
                service.start()
                self._closers.callback(service.stop)
        if self._options.test_shards:
            address = validate_address(get_connect_host(self._options.host), self._options.port)
            self._closers.callback(self._evaluator.start(self._options.test_shards, address).stop)

    def _on_message(self, device_id: str, kind: Topic, payload: bytes) -> None:
        """Handles an MQTT message."""
        if kind is Topic.ANSWER:
            self._router.on_command_reply(device_id, payload)
        else:
            self._telemetry.on_message(device_id, kind, payload)

    def _record_rejection(self, kind: str, request: Request, node_id: int | None, detail: str) -> None:
        device_id = None if node_id is None else self._registry.get_device_id(node_id)
        self._rejections.record(kind, device_id or get_request_source(request), detail)

    def _on_renewed(self, device_id: str, public_key: bytes) -> None:
        self._members.update_key(device_id, public_key)
        self._rotation.mark_renewed(device_id)

    def _remove(self, device_id: str) -> None:
        """Removes a device: from Flower at once, from the broker with the next flush."""
        self._members.remove(device_id)
        self._mqtt.client.clear_retained(device_id)
        log.info("%s was removed from the fleet", device_id)

    def _notify_clone(self, event: RegistryEvent) -> None:
        """Notifies a clone that it is rejected, on the topic of its device."""
        if isinstance(event, CloneRejected):
            argument = json.dumps({"boot_id": event.rejected_boot_id, "reason": event.reason})
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.LOCKOUT, argument=argument)
            self._send_command(event.device_id, command)

    def _reload_certificates(self) -> None:
        """Reloads the coordinator's renewed certificates."""
        self._mqtt.reload()
        if self._web is not None:
            self._web.reload()

    def _send_command(self, device_id: str, command: Command) -> None:
        self._mqtt.client.send_command(device_id, command)

    def _flush_last(self) -> None:
        try:
            self._telemetry.flush()
            self._rejections.flush(is_last=True)
        except EdgeflError as error:
            log.warning("the last heartbeats were not kept: %s", error)

    def _fail(self, error: EdgeflError) -> None:
        self._fatal = error
        self.stop()


def _reject_export(task: str, _options: object, _model: Path, _out: Path) -> None:
    raise TaskError(f"this coordinator cannot export models of task {task}")


def serve(coordinator: Coordinator) -> None:
    """Runs a coordinator until SIGTERM or SIGINT.

    Raises:
        EdgeflError: it could not start, or cannot go on.
    """
    log.info("up to %d files and connections at a time", raise_file_limit())
    notifier = (
        SystemdNotifier.from_environment()
    )  # before there are child processes, which must not notify in our name
    with (
        on_stop_signal(coordinator.stop),
        contextlib.suppress(_StoppedBeforeActiveError),
        contextlib.ExitStack() as stack,
    ):
        if coordinator.waits_for_lease:  # for days: to the service manager it is ready meanwhile
            stack.enter_context(run_watchdog(notifier, coordinator.liveness))
            notifier.notify("STATUS=standing by")
            with coordinator.liveness.track_work():
                stack.enter_context(coordinator)
            notifier.notify("STATUS=active")
            coordinator.wait()
        else:
            stack.enter_context(coordinator)
            with run_watchdog(notifier, coordinator.liveness):
                coordinator.wait()
        log.info("stopping")


@dataclass(slots=True, kw_only=True)
class StoreOutageGuard:
    """Runs writes, and reports outages of the store. Not thread-safe.

    Attributes:
        record: (kind, message, Unix seconds) -> None; writes an event to the store.
        clock, monotonic: Unix seconds, and seconds.
    """

    record: Callable[[str, str, float], None]
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _outage_since_s: float | None = None
    _outage_since: float = 0.0
    _logged_s: float = 0.0
    _reason: str = ""

    def run(self, write: Callable[[], None]) -> None:
        """Calls `write`; a full or locked store is logged once a minute instead of raised.

        Once it works again, the outage and its duration are recorded as an event.
        """
        try:
            write()
            if self._outage_since_s is not None:
                lasted_s = self.monotonic() - self._outage_since_s
                self.record("store-unavailable", f"{self._reason}; for {lasted_s:.0f} s", self._outage_since)
                log.info("the store can be written again, after %.0f s", lasted_s)
                self._outage_since_s = None
        except RETRYABLE_STORE_ERRORS as error:
            self._on_outage(error)

    def _on_outage(self, error: EdgeflError) -> None:
        now_s = self.monotonic()
        if self._outage_since_s is None:
            self._outage_since_s, self._outage_since, self._reason = now_s, self.clock(), str(error)
        elif now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        log.warning("%s; devices are heard meanwhile, and what there is to write waits", error)
