"""The coordinator process: puts all its parts together, runs until it is told to stop, and closes them in order."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from edgefl.config import CoordinatorSettings, RunConfig
from edgefl.coordinator.access import require_operator, require_viewer
from edgefl.coordinator.api import operator_router
from edgefl.coordinator.broker import Broker, BrokerAddress, BrokerTls, make_broker
from edgefl.coordinator.bus import Bus
from edgefl.coordinator.diary import Diary
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment import BrokerSite, EnrolmentService, enrolment_router
from edgefl.coordinator.evaluator import EvaluatorProcess
from edgefl.coordinator.presence import Presence
from edgefl.coordinator.roster import Roster
from edgefl.coordinator.runs import Assemble, RunSite, RunWorker
from edgefl.coordinator.superlink import Reply, SuperLink
from edgefl.coordinator.tokens import TokenTerms, make_token
from edgefl.coordinator.web import WebServer, listen, make_app
from edgefl.errors import EdgeflError
from edgefl.protocol import EVALUATOR_NAME
from edgefl.storage.store import Store
from edgefl.types import Progress

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.5
BUS_TIMEOUT_S = 10.0
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


class Coordinator:
    """All parts of a running coordinator. Use it as a context manager: it closes what it has opened."""

    def __init__(self, directory: CoordinatorDirectory, options: StartOptions, assemble: Assemble) -> None:
        self._directory, self._options, self._assemble = directory, options, assemble
        self._stopping = threading.Event()
        self._fatal: EdgeflError | None = None
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
        """Ends `wait`. Safe in a signal handler."""
        self._stopping.set()

    def wait(self) -> None:
        """Keeps the fleet's diary until somebody stops the coordinator.

        Raises:
            EdgeflError: it cannot go on (the disk is full, the store is gone).
        """
        while not self._stopping.wait(FLUSH_EVERY_S):
            self._roster.tick()
            self._diary.flush()
        if self._fatal is not None:
            raise self._fatal

    def _open(self) -> None:
        """Opens everything in order; the closers run in the opposite one."""
        directory, options = self._directory, self._options
        listener = listen(options.host, options.port)
        self._closers.callback(listener.close)
        self._store = Store.open(options.store_url or directory.database)
        self._closers.callback(self._store.close)
        self._roster = Roster(Presence(heartbeat_s=options.heartbeat_s), time.monotonic)
        self._diary = Diary(
            store=self._store,
            roster=self._roster,
            clock=time.time,
            on_progress=self._post,
        )
        self._closers.callback(self._last_flush)
        self._superlink = SuperLink(on_reply=self._post, on_contact=self._roster.note_contact)
        self._restore_devices()
        self._bus = self._open_bus()
        self._worker = RunWorker(
            RunSite(
                directory=directory,
                store=self._store,
                roster=self._roster,
                superlink=self._superlink,
                bell=self._bus,
                assemble=self._assemble,
            ),
            on_fatal=self._die,
        )
        self._open_web(listener)
        self._worker.start()
        self._closers.callback(self._worker.stop)
        self._open_evaluator()
        log.info("fleet %s at https://%s:%d", directory.fleet, options.host, options.port)

    def _post(self, item: Reply | Progress) -> None:
        """Hands what a device sent to the active run; the worker is made after those who call this."""
        self._worker.post(item)

    def _restore_devices(self) -> None:
        for record in self._store.devices():
            if record.node_id is None:
                self._enrolled(record.device_id, record.public_key)
            else:
                self._superlink.state.restore_node(record.node_id, record.public_key)
                self._roster.add(
                    record.device_id,
                    node_id=record.node_id,
                    role=record.role,
                    groups=record.groups,
                    examples=record.examples,
                )

    def _enrolled(self, device_id: str, public_key: bytes) -> None:
        """Gives a device that has just joined its place in Flower and in the roster."""
        node_id = self._superlink.register(public_key, device_id)
        self._store.set_node_id(device_id, node_id)
        record = self._store.device(device_id)
        examples = self._store.capabilities().get(device_id)
        counts = examples.shards if examples else record.examples
        self._roster.add(device_id, node_id=node_id, role=record.role, groups=record.groups, examples=counts)
        self._store.record_event("device-joined", f"as {record.role}", at=time.time(), device_id=device_id)

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
        )
        self._broker_address: BrokerAddress = self._broker.start()
        self._closers.callback(self._broker.stop)
        own = BrokerTls(ca=directory.ca_cert, cert=directory.client_cert, key=directory.client_key)
        bus = Bus(
            self._broker_address,
            own,
            directory.fleet,
            self._diary.message,
            lambda connected: self._roster.note_bus(connected=connected),
        )
        bus.connect()
        self._closers.callback(bus.close)
        if not bus.wait_connected(BUS_TIMEOUT_S):
            log.warning("the broker does not answer yet; devices poll meanwhile")
        return bus

    def _open_web(self, listener: Any) -> None:
        directory, options = self._directory, self._options
        site = BrokerSite(port=self._broker_address.port, host=self._outside_host())
        service = EnrolmentService(directory=directory, store=self._store, on_enrolled=self._enrolled, broker=site)
        operator = operator_router(
            store=self._store,
            roster=self._roster,
            worker=self._worker,
            check=self._check,
            viewer=require_viewer(directory, listen_host=options.host),
            operator=require_operator(directory),
        )
        app = make_app(self._superlink.api, [enrolment_router(service), operator])
        web = WebServer(app, directory, listener)
        web.start()
        self._closers.callback(web.stop)

    def _outside_host(self) -> str | None:
        """Returns the broker's host for devices when it is not this machine."""
        return self._broker_address.host if self._options.broker.startswith("mqtts://") else None

    def _check(self, config: RunConfig) -> None:
        self._assemble(config, "check")

    def _open_evaluator(self) -> None:
        shards = self._options.test_shards
        if not shards:
            return
        state_dir = self._directory.root / "evaluator"
        known = {record.device_id for record in self._store.devices()}
        has_joined = EVALUATOR_NAME in known and (state_dir / "device.json").exists()
        address = f"127.0.0.1:{self._options.port}"
        token = None
        if not has_joined:
            terms = TokenTerms(ttl_s=EVALUATOR_TOKEN_TTL_S, role="evaluator")
            token = make_token(self._store, self._directory, terms, now=time.time()).text()
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
        except EdgeflError as error:
            log.warning("the last heartbeats were not kept: %s", error)

    def _die(self, error: EdgeflError) -> None:
        self._fatal = error
        self.stop()


def serve(directory: CoordinatorDirectory, options: StartOptions, assemble: Assemble) -> None:
    """Runs a coordinator until SIGTERM or SIGINT.

    Raises:
        EdgeflError: it could not start, or cannot go on.
    """
    with Coordinator(directory, options, assemble) as coordinator, _on_signals(coordinator):
        coordinator.wait()
        log.info("stopping")


@contextlib.contextmanager
def _on_signals(coordinator: Coordinator) -> Iterator[None]:
    def handle(_number: int, _frame: Any) -> None:
        coordinator.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
