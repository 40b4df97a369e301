"""What the coordinator tells of itself unasked: figures for `/metrics`, and alerts for a webhook."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.config import AlertSettings
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.joining.own_certificates import own_expiries
from edgefl.coordinator.monitoring.alert_watch import AlertSources, AlertWatch
from edgefl.coordinator.monitoring.device_series import device_series
from edgefl.coordinator.monitoring.fleet_collector import FleetCollector, Sources
from edgefl.coordinator.monitoring.metrics import Metrics
from edgefl.coordinator.runs.run_meter import RunMeter
from edgefl.storage.database import sqlite_file
from edgefl.storage.records import RunStatus
from edgefl.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is looked at.

    Attributes:
        directory: of the coordinator.
        store: counts the runs that wait.
        roster: the devices.
        is_broker_connected: whether the bus is up.
        num_dropped: malformed MQTT messages so far.
    """

    directory: CoordinatorDirectory
    store: Store
    roster: Roster
    is_broker_connected: Callable[[], bool]
    num_dropped: Callable[[], int]


class Monitoring:
    """Metrics, the meter that runs are measured with, and the alerts.

    Args:
        watched: what is looked at.
        max_devices: a fleet of more devices gets no series of its own for each.

    Attributes:
        meter: has to be told of runs.
        metrics: for `/metrics`.
    """

    def __init__(self, watched: Watched, *, max_devices: int) -> None:
        self._watched = watched
        self.metrics = Metrics()
        self.meter = RunMeter(self.metrics.registry)
        sources = Sources(
            roster=watched.roster,
            meter=self.meter,
            directory=watched.directory.root,
            store_file=sqlite_file(watched.directory.store_url),
            num_queued=lambda: watched.store.num_runs(RunStatus.QUEUED),
            is_broker_connected=watched.is_broker_connected,
            num_dropped=watched.num_dropped,
            expiries=own_expiries(watched.directory),
            max_devices=max_devices,
        )
        self.metrics.watch(
            FleetCollector(sources),
            lambda: device_series(watched.roster, max_devices=max_devices, now=time.time()),
        )

    def alert_watch(self, settings: AlertSettings) -> AlertWatch | None:
        """Returns the watch that tells the webhook, not yet started; None without a webhook."""
        if settings.webhook is None:
            return None
        watched = self._watched
        records = watched.store.devices()
        sources = AlertSources(
            fleet=watched.directory.fleet,
            roster=watched.roster,
            meter=self.meter,
            directory=watched.directory.root,
            is_broker_connected=watched.is_broker_connected,
            expiries=own_expiries(watched.directory),
            expected=frozenset(r.device_id for r in records if r.presence not in {None, "offline"}),
        )
        return AlertWatch(sources, settings)
