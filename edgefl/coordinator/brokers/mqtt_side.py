"""The coordinator's side of MQTT: its broker, whom that refuses, and its own connection to it."""

from __future__ import annotations

import contextlib
import logging

from edgefl.coordinator.access import is_loopback
from edgefl.coordinator.attempts import Note
from edgefl.coordinator.brokers.broker import Broker, BrokerTls
from edgefl.coordinator.brokers.bus import Bus, OnMessage
from edgefl.coordinator.brokers.choice import make_broker
from edgefl.coordinator.brokers.refusals import Refusals
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.joining.rotation import own_serial
from edgefl.coordinator.start_options import StartOptions
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

BUS_TIMEOUT_S = 3.0


class MqttSide:
    """Broker and bus, started together; the closers that it is given end them.

    Args:
        directory: of the coordinator, with the certificates of both ends.
        options: say which broker, and where it listens.
        store: says whom the broker refuses.
        roster: is told whether the bus is up; its workers' bells are rung when it is back.
        note: told of who tried at the broker what they may not.
        on_message: takes what devices say, in the bus's own thread.
        closers: get what has to be closed, in the order in which it was opened.

    Attributes:
        broker: it runs.
        bus: connected, or trying to.
        address: where the broker is, seen from here.

    Raises:
        EdgeflError: the broker could not be started.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        options: StartOptions,
        store: Store,
        roster: Roster,
        note: Note,
        on_message: OnMessage,
        closers: contextlib.ExitStack,
    ) -> None:
        self._directory, self._options, self._roster = directory, options, roster
        self.broker = self._make_broker(note)
        if not options.has_external_broker:
            closers.enter_context(directory.broker_locked())
        self._refusals = Refusals(self.broker, store, own=lambda: own_serial(directory))
        self._refusals.update()
        self.address = self.broker.start()
        closers.callback(self.broker.stop)
        self.bus = self._connected(on_message)
        closers.callback(self.bus.close)
        if not self.bus.wait_connected(BUS_TIMEOUT_S):
            log.warning("the broker does not answer yet; devices poll meanwhile")

    def update(self) -> None:
        """Tells the broker whom it has to refuse from now on; see `Refusals.update`."""
        self._refusals.update()

    def reload(self) -> None:
        """Takes up new certificates of the coordinator, at both ends."""
        self.broker.reload()
        self.bus.reload()

    def outside_host(self) -> str | None:
        """Returns the broker's host for devices when it is not this machine, which they know by their own names."""
        host = self.address.host
        return host if self._options.has_external_broker and not is_loopback(host) else None

    def _make_broker(self, note: Note) -> Broker:
        directory, options = self._directory, self._options
        return make_broker(
            options.broker,
            directory=directory.broker,
            fleet=directory.fleet,
            tls=BrokerTls(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key),
            host=options.host,
            port=options.broker_port,
            authority=directory.authority(),
            on_denied=lambda who, what: note("mqtt", who, what),
        )

    def _connected(self, on_message: OnMessage) -> Bus:
        directory = self._directory
        own = BrokerTls(ca=directory.ca_cert, cert=directory.client_cert, key=directory.client_key)
        bus = Bus(
            self.address,
            own,
            directory.fleet,
            on_message,
            lambda connected: self._changed(bus, is_connected=connected),
        )
        bus.connect()
        return bus

    def _changed(self, bus: Bus, *, is_connected: bool) -> None:
        """Tells presence; and rings every bell when the bus is back, for those that nobody heard meanwhile."""
        self._roster.note_bus(connected=is_connected)
        if is_connected:
            for info in self._roster.workers():
                bus.ring(info.device_id)
