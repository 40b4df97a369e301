"""MQTT service of a fleet: the broker with its revocations, beside the coordinator's client or as its own process.

The retained messages of a broker in a process of its own outlive restarts of the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.coordinator.auth import RecordRejection, RejectedRequestLog, is_loopback
from edgefl.coordinator.brokers.broker import Broker, BrokerAddress, BrokerTls
from edgefl.coordinator.brokers.factory import make_broker
from edgefl.coordinator.brokers.mqtt_client import MqttClient, OnMessage
from edgefl.coordinator.brokers.revocation import RevocationSync
from edgefl.coordinator.connections import ConnectionLimiter, make_limiters
from edgefl.coordinator.directory import CoordinatorDirectory, StartOptions
from edgefl.coordinator.enrolment.certificates import get_own_serial
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.errors import StoreError
from edgefl.core.protocol import is_slug
from edgefl.storage.store import Store
from edgefl.system.processes import LivenessMonitor, SystemdNotifier, on_stop_signal, raise_file_limit, run_watchdog

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 3.0
REVOCATION_INTERVAL_S = 2.0


class MqttService:
    """Broker and MQTT client, started together and closed through `closers`.

    Args:
        directory: of the coordinator, with the certificates of both ends.
        options: the kind of broker, and where it listens.
        store: has the revoked devices and certificates.
        registry: gets the state of the connection; its devices are woken after a reconnect.
        record_rejection: called for actions that the broker denied.
        on_message: handles device messages, in the client's own thread.
        closers: gets what has to be closed, in the order in which it was opened.
        limiter: of an embedded broker's connections.

    Attributes:
        broker: started.
        client: connected, or trying to connect.
        address: of the broker, seen from here.

    Raises:
        EdgeflError: the broker could not be started.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        options: StartOptions,
        store: Store,
        registry: DeviceRegistry,
        record_rejection: RecordRejection,
        on_message: OnMessage,
        closers: contextlib.ExitStack,
        limiter: ConnectionLimiter | None = None,
    ) -> None:
        self._directory, self._options, self._registry = directory, options, registry
        if not options.has_external_broker:
            closers.enter_context(directory.lock_broker())
        self.broker, self._revocations = _make_broker(
            directory, store, options.broker, options.host, options.broker_port, record_rejection, limiter
        )
        self.address = self.broker.start()
        closers.callback(self.broker.stop)
        self.client = self._connect(on_message)
        closers.callback(self.client.close)
        if not self.client.wait_connected(CLIENT_TIMEOUT_S):
            log.warning("the broker does not answer yet; devices poll meanwhile")

    def update(self) -> None:
        """Updates the revocations of the broker; see `RevocationSync.update`."""
        self._revocations.update()

    def reload(self) -> None:
        """Reloads the coordinator's certificates, at both ends."""
        self.broker.reload()
        self.client.reload()

    def get_advertised_host(self) -> str | None:
        """Returns the broker's host for devices; None for this machine, which they know already."""
        host = self.address.host
        return host if self._options.has_external_broker and not is_loopback(host) else None

    def _connect(self, on_message: OnMessage) -> MqttClient:
        directory = self._directory
        tls = BrokerTls(ca=directory.ca_cert, cert=directory.client_cert, key=directory.client_key)
        client = MqttClient(
            self.address,
            tls,
            directory.fleet,
            on_message,
            lambda connected: self._on_connection(client, is_connected=connected),
        )
        client.connect()
        return client

    def _on_connection(self, client: MqttClient, *, is_connected: bool) -> None:
        """Updates presence; wakes every device after a reconnect, since wake-ups were lost meanwhile."""
        self._registry.record_broker_link(connected=is_connected)
        if is_connected:
            for info in self._registry.list_schedulable():
                client.notify(info.device_id)


def run_broker(
    directory: CoordinatorDirectory,
    *,
    host: str,
    port: int,
    kind: str = "auto",
    on_ready: Callable[[BrokerAddress], None],
) -> None:
    """Runs the fleet's broker until SIGTERM or SIGINT; removed devices are revoked every `REVOCATION_INTERVAL_S`.

    Args:
        directory: of the coordinator.
        host: address to listen on.
        port: port to listen on.
        kind: auto, mosquitto or embedded.
        on_ready: called with its address once it listens.

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
        limiter = make_limiters(directory.connections)[1]
        broker, revocations = _make_broker(directory, store, kind, host, port, rejections.record, limiter)
        address = broker.start()
        closers.callback(broker.stop)
        log.info("broker of fleet %s at %s:%d", directory.fleet, host, port)
        on_ready(address)
        liveness = LivenessMonitor()
        with run_watchdog(notifier, liveness):
            certificate = directory.server_cert.read_bytes()
            is_store_readable = True
            while not stopping.wait(REVOCATION_INTERVAL_S):
                liveness.record_progress()
                limiter.log_refusals()
                certificate = _reload_if_renewed(broker, directory.server_cert, certificate)
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
        log.info("stopping")


def _make_broker(  # noqa: PLR0913, PLR0917 one keyword per fact
    directory: CoordinatorDirectory,
    store: Store,
    kind: str,
    host: str,
    port: int,
    record_rejection: RecordRejection,
    limiter: ConnectionLimiter | None,
) -> tuple[Broker, RevocationSync]:
    """Returns a broker with the present revocations, not yet started."""
    broker = make_broker(
        kind,
        directory=directory.broker,
        fleet=directory.fleet,
        tls=BrokerTls(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key),
        host=host,
        port=port,
        authority=directory.load_authority(),
        limiter=limiter,
        on_denied=lambda identity, action: record_rejection("mqtt", identity, action),
    )
    revocations = RevocationSync(broker, store, get_own_serial=lambda: get_own_serial(directory))
    revocations.update()
    return broker, revocations


def _reload_if_renewed(broker: Broker, path: Path, loaded: bytes) -> bytes:
    """Reloads the broker when a coordinator has renewed the server's certificate; returns the loaded one."""
    with contextlib.suppress(OSError):  # it is being restored from a backup
        current = path.read_bytes()
        if current != loaded:
            broker.reload()
            return current
    return loaded
