"""Monitoring of a coordinator: metrics for `/metrics`, and alerts for a webhook."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.server_certificates import list_own_expiries
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.alert_monitor import AlertInputs, AlertMonitor
from edgefl.coordinator.monitoring.device_series import render_device_series
from edgefl.coordinator.monitoring.fleet_collector import CollectorInputs, FleetCollector
from edgefl.coordinator.monitoring.metrics import Metrics
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.core.config import AlertSettings
from edgefl.storage.database import get_sqlite_path
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringInputs:
    """Sources of metrics and alerts.

    Attributes:
        directory: of the coordinator.
        store: counts the queued runs.
        registry: of the devices.
        is_broker_connected: whether the MQTT client is connected.
        num_dropped: malformed MQTT messages so far.
    """

    directory: CoordinatorDirectory
    store: Store
    registry: DeviceRegistry
    is_broker_connected: Callable[[], bool]
    num_dropped: Callable[[], int]


class Monitoring:
    """Metrics of coordinator and runs, and the alerts.

    Args:
        inputs: sources of metrics and alerts.
        max_devices: a larger fleet gets no series per device.

    Attributes:
        run_metrics: to be updated with the events of runs.
        metrics: for `/metrics`.
    """

    def __init__(self, inputs: MonitoringInputs, *, max_devices: int) -> None:
        self._inputs = inputs
        self.metrics = Metrics()
        self.run_metrics = RunMetrics(self.metrics.registry)
        sources = CollectorInputs(
            registry=inputs.registry,
            run_metrics=self.run_metrics,
            directory=inputs.directory.root,
            store_file=get_sqlite_path(inputs.directory.store_url),
            num_queued=lambda: inputs.store.count_runs(RunStatus.QUEUED),
            is_broker_connected=inputs.is_broker_connected,
            num_dropped=inputs.num_dropped,
            expiries=list_own_expiries(inputs.directory),
            max_devices=max_devices,
        )
        self.metrics.register(
            FleetCollector(sources),
            lambda: render_device_series(inputs.registry, max_devices=max_devices, now=time.time()),
        )

    def make_alert_monitor(self, settings: AlertSettings) -> AlertMonitor | None:
        """Returns the alert monitor, not yet started; None without a webhook."""
        if settings.webhook is None:
            return None
        inputs = self._inputs
        records = inputs.store.list_devices()
        sources = AlertInputs(
            fleet=inputs.directory.fleet,
            registry=inputs.registry,
            run_metrics=self.run_metrics,
            directory=inputs.directory.root,
            is_broker_connected=inputs.is_broker_connected,
            expiries=list_own_expiries(inputs.directory),
            expected=frozenset(r.device_id for r in records if r.presence not in {None, "offline"}),
        )
        return AlertMonitor(sources, settings)
