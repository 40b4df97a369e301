"""The fleet's broker as a process of its own, whose retained messages outlive coordinator restarts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgefl.coordinator.brokers.broker import Broker, BrokerAddress, BrokerTls
from edgefl.coordinator.brokers.factory import make_broker
from edgefl.coordinator.brokers.revocation import RevocationSync
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.rotation import get_own_serial
from edgefl.coordinator.rejected_requests import RejectedRequestLog
from edgefl.core.errors import StoreError
from edgefl.core.protocol import is_slug
from edgefl.storage.store import Store
from edgefl.system.process_control import on_stop_signal, raise_file_limit
from edgefl.system.systemd import LivenessMonitor, SystemdNotifier, run_watchdog

log = logging.getLogger(__name__)

REVOCATION_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneBrokerOptions:
    """Options of `edgefl coordinator broker`; `kind` is auto, mosquitto or embedded."""

    host: str
    port: int
    kind: str = "auto"


def run_broker(
    directory: CoordinatorDirectory, options: StandaloneBrokerOptions, on_ready: Callable[[BrokerAddress], None]
) -> None:
    """Runs the fleet's broker until SIGTERM or SIGINT; `on_ready` gets its address once it listens.

    Removed devices are revoked within `REVOCATION_INTERVAL_S` seconds.

    Raises:
        BrokerError: it does not start.
        PortInUseError: the port is taken.
        StoreError: another broker runs on this directory, or the store cannot be opened.
    """
    raise_file_limit()
    stopping, notifier = threading.Event(), SystemdNotifier.from_environment()
    with on_stop_signal(stopping.set), contextlib.ExitStack() as closers:
        closers.enter_context(directory.lock_broker())
        store = closers.enter_context(Store.open(directory.store_url))
        rejections = RejectedRequestLog(store=store, clock=time.time, monotonic=time.monotonic, is_device=is_slug)
        broker = make_broker(
            options.kind,
            directory=directory.broker,
            fleet=directory.fleet,
            tls=BrokerTls(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key),
            host=options.host,
            port=options.port,
            authority=directory.load_authority(),
            on_denied=lambda identity, action: rejections.record("mqtt", identity, action),
        )
        revocations = RevocationSync(broker, store, get_own_serial=lambda: get_own_serial(directory))
        revocations.update()
        address = broker.start()
        closers.callback(broker.stop)
        log.info("broker of fleet %s at %s:%d", directory.fleet, options.host, options.port)
        on_ready(address)
        liveness = LivenessMonitor()
        with run_watchdog(notifier, liveness):
            _sync_revocations(
                revocations, rejections, CertificateReloader(broker, directory.server_cert), liveness, stopping
            )
        log.info("stopping")


class CertificateReloader:
    """Reloads the broker when a coordinator has renewed the server's certificate."""

    def __init__(self, broker: Broker, path: Path) -> None:
        self._broker, self._path = broker, path
        self._loaded = path.read_bytes()

    def poll(self) -> None:
        with contextlib.suppress(OSError):  # it is being restored from a backup
            current = self._path.read_bytes()
            if current != self._loaded:
                self._loaded = current
                self._broker.reload()


def _sync_revocations(
    revocations: RevocationSync,
    rejections: RejectedRequestLog,
    certificate: CertificateReloader,
    liveness: LivenessMonitor,
    stopping: threading.Event,
) -> None:
    is_store_readable = True
    while not stopping.wait(REVOCATION_INTERVAL_S):
        liveness.record_progress()
        certificate.poll()
        try:
            revocations.update()
            rejections.flush()
        except StoreError as error:
            # The devices need the broker even without the store.
            if is_store_readable:
                log.warning("devices that are removed now are not yet shut out (%s); trying again", error)
            is_store_readable = False
        else:
            is_store_readable = True
