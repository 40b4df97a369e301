"""MQTT service of the coordinator: its broker, revocations, and its own client."""

from __future__ import annotations

import contextlib
import logging

from edgefl.coordinator.auth import is_loopback
from edgefl.coordinator.brokers.broker import Broker, BrokerTls
from edgefl.coordinator.brokers.factory import make_broker
from edgefl.coordinator.brokers.mqtt_client import MqttClient, OnMessage
from edgefl.coordinator.brokers.revocation import RevocationSync
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.rotation import get_own_serial
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rejected_requests import RecordRejection
from edgefl.coordinator.start_options import StartOptions
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 3.0


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
    ) -> None:
        self._directory, self._options, self._registry = directory, options, registry
        self.broker = self._make_broker(record_rejection)
        if not options.has_external_broker:
            closers.enter_context(directory.lock_broker())
        self._revocations = RevocationSync(self.broker, store, get_own_serial=lambda: get_own_serial(directory))
        self._revocations.update()
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

    def _make_broker(self, record_rejection: RecordRejection) -> Broker:
        directory, options = self._directory, self._options
        return make_broker(
            options.broker,
            directory=directory.broker,
            fleet=directory.fleet,
            tls=BrokerTls(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key),
            host=options.host,
            port=options.broker_port,
            authority=directory.load_authority(),
            on_denied=lambda who, what: record_rejection("mqtt", who, what),
        )

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
