"""The fleet's broker as a unit of its own: a coordinator may come and go beside it, and what it retains stays."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgefl.coordinator.attempts import Attempts
from edgefl.coordinator.brokers.broker import Broker, BrokerAddress, BrokerTls
from edgefl.coordinator.brokers.choice import make_broker
from edgefl.coordinator.brokers.refusals import Refusals
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.joining.rotation import own_serial
from edgefl.errors import StoreError
from edgefl.processes import on_stop_signal, open_many_files
from edgefl.protocol import is_slug
from edgefl.storage.store import Store
from edgefl.watchdog import LoopLife, Notifier, watched

log = logging.getLogger(__name__)

REFUSE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """How `edgefl coordinator broker` was called; `kind` is auto, mosquitto or embedded."""

    host: str
    port: int
    kind: str = "auto"


def serve_broker(
    directory: CoordinatorDirectory, options: BrokerOptions, on_ready: Callable[[BrokerAddress], None]
) -> None:
    """Runs the fleet's broker until SIGTERM or SIGINT; `on_ready` gets where it listens, once it does.

    Devices that are removed meanwhile are shut out within `REFUSE_EVERY_S` seconds.

    Raises:
        BrokerError: it does not come up.
        PortInUseError: the port is taken.
        StoreError: another broker runs on this directory, or the store cannot be opened.
    """
    open_many_files()
    stopping, notifier = threading.Event(), Notifier.from_environment()
    with on_stop_signal(stopping.set), contextlib.ExitStack() as closers:
        closers.enter_context(directory.broker_locked())
        store = closers.enter_context(Store.open(directory.store_url))
        attempts = Attempts(store=store, clock=time.time, monotonic=time.monotonic, is_device=is_slug)
        broker = make_broker(
            options.kind,
            directory=directory.broker,
            fleet=directory.fleet,
            tls=BrokerTls(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key),
            host=options.host,
            port=options.port,
            authority=directory.authority(),
            on_denied=lambda who, what: attempts.note("mqtt", who, what),
        )
        refusals = Refusals(broker, store, own=lambda: own_serial(directory))
        refusals.update()
        address = broker.start()
        closers.callback(broker.stop)
        log.info("broker of fleet %s at %s:%d", directory.fleet, options.host, options.port)
        on_ready(address)
        life = LoopLife()
        with watched(notifier, life):
            _keep_refusing(refusals, attempts, ServerCertificate(broker, directory.server_cert), life, stopping)
        log.info("stopping")


class ServerCertificate:
    """Has the broker take up the server's certificate when a coordinator has renewed it."""

    def __init__(self, broker: Broker, path: Path) -> None:
        self._broker, self._path = broker, path
        self._shown = path.read_bytes()

    def look(self) -> None:
        with contextlib.suppress(OSError):  # it is put back from a backup just now
            there = self._path.read_bytes()
            if there != self._shown:
                self._shown = there
                self._broker.reload()


def _keep_refusing(
    refusals: Refusals,
    attempts: Attempts,
    certificate: ServerCertificate,
    life: LoopLife,
    stopping: threading.Event,
) -> None:
    was_read = True
    while not stopping.wait(REFUSE_EVERY_S):
        life.beat()
        certificate.look()
        try:
            refusals.update()
            attempts.flush()
        except StoreError as error:
            # The devices need the broker whatever becomes of the store.
            if was_read:
                log.warning("devices that are removed now are not yet shut out (%s); trying again", error)
            was_read = False
        else:
            was_read = True
