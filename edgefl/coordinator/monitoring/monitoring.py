"""Monitoring of a coordinator: metrics for `/metrics`, and alerts for a webhook."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgefl.coordinator.connections import ConnectionLimiter
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.certificates import list_own_expiries
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.alerts import AlertMonitor
from edgefl.coordinator.monitoring.metrics import ConnectionCollector, FleetCollector, Metrics, render_device_series
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.core.config import AlertSettings
from edgefl.storage.database import get_sqlite_path
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store


class Monitoring:
    """Metrics of coordinator and runs, and the alerts.

    Args:
        directory: of the coordinator.
        store: counts the queued runs.
        registry: of the devices.
        is_broker_connected: whether the MQTT client is connected.
        num_dropped: malformed MQTT messages so far.
        max_devices: a larger fleet gets no series per device.
        limiters: of the coordinator's listeners.

    Attributes:
        run_metrics: to be updated with the events of runs.
        metrics: for `/metrics`.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        store: Store,
        registry: DeviceRegistry,
        is_broker_connected: Callable[[], bool],
        num_dropped: Callable[[], int],
        max_devices: int,
        limiters: Sequence[ConnectionLimiter] = (),
    ) -> None:
        self._directory, self._store, self._registry = directory, store, registry
        self._is_broker_connected = is_broker_connected
        self.metrics = Metrics()
        self.metrics.registry.register(ConnectionCollector(limiters))
        self.run_metrics = RunMetrics(self.metrics.registry)
        collector = FleetCollector(
            registry=registry,
            run_metrics=self.run_metrics,
            directory=directory.root,
            store_file=get_sqlite_path(directory.store_url),
            num_queued=lambda: store.count_runs(RunStatus.QUEUED),
            is_broker_connected=is_broker_connected,
            num_dropped=num_dropped,
            expiries=list_own_expiries(directory),
            max_devices=max_devices,
        )
        self.metrics.register(
            collector, lambda: render_device_series(registry, max_devices=max_devices, now=time.time())
        )

    def make_alert_monitor(self, settings: AlertSettings) -> AlertMonitor | None:
        """Returns the alert monitor, not yet started; None without a webhook."""
        if settings.webhook is None:
            return None
        records = self._store.list_devices()
        return AlertMonitor(
            settings,
            fleet=self._directory.fleet,
            registry=self._registry,
            run_metrics=self.run_metrics,
            directory=self._directory.root,
            is_broker_connected=self._is_broker_connected,
            expiries=list_own_expiries(self._directory),
            expected=[record.device_id for record in records if record.presence not in {None, "offline"}],
        )
