"""Collector of the metrics of fleet, active run, store and broker, read at each scrape."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgefl.coordinator.fleet.presence import DevicePresence
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.core.errors import StoreError
from edgefl.storage.repositories.records import RunStatus

NEVER_SEEN = "never-seen"
PRESENCE_LABELS = (*(str(state) for state in DevicePresence), NEVER_SEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorInputs:
    """Sources of the metrics.

    Attributes:
        registry: of the devices.
        run_metrics: of the active run.
        directory: of the coordinator, on the monitored disk.
        store_file: the SQLite database, None for a store elsewhere.
        num_queued: number of queued runs.
        is_broker_connected: whether the MQTT client is connected.
        num_dropped: malformed MQTT messages so far.
        expiries: certificate -> its end, in Unix seconds.
        max_devices: a larger fleet gets no series per device; 0 for no series at all.
    """

    registry: DeviceRegistry
    run_metrics: RunMetrics
    directory: Path
    store_file: Path | None
    num_queued: Callable[[], int]
    is_broker_connected: Callable[[], bool]
    num_dropped: Callable[[], int]
    expiries: Mapping[str, float] = field(default_factory=dict)
    max_devices: int


class FleetCollector(Collector):
    """Yields the metrics at each scrape; see `CollectorInputs`."""

    def __init__(self, inputs: CollectorInputs) -> None:
        self._inputs = inputs

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_fleet()
        yield from self._collect_run()
        yield from self._collect_coordinator()

    def _collect_fleet(self) -> Iterator[Metric]:
        sources = self._inputs
        rows = sources.registry.list_status_rows()
        counts = Counter(str(row["presence"]).replace(" ", "-") for row in rows)
        devices = GaugeMetricFamily("edgefl_devices", "Devices that have joined, by presence.", labels=["presence"])
        for presence in PRESENCE_LABELS:
            devices.add_metric([presence], counts.get(presence, 0))
        yield devices
        has_series = len(rows) <= sources.max_devices
        yield GaugeMetricFamily(
            "edgefl_devices_without_series",
            "Devices that are only counted: a fleet of more than --device-metrics has no series for each.",
            value=0 if has_series else len(rows),
        )

    def _collect_run(self) -> Iterator[Metric]:
        sources, run = self._inputs, self._inputs.run_metrics.get_active_run()
        runs = GaugeMetricFamily("edgefl_runs", "Runs that wait or are at work, by status.", labels=["status"])
        with contextlib.suppress(StoreError):  # a scrape returns what is available
            runs.add_metric([str(RunStatus.QUEUED)], sources.num_queued())
        for status in (RunStatus.RUNNING, RunStatus.STOPPING):
            runs.add_metric([str(status)], int(run is not None and run.status is status))
        yield runs
        if run is None:
            return
        info = GaugeMetricFamily(
            "edgefl_run_info", "1, with the active run.", labels=["run", "name", "task", "strategy"]
        )
        info.add_metric([run.run_id, run.name, run.task, run.strategy], 1)
        yield info
        yield GaugeMetricFamily("edgefl_run_round", "The active run's last closed round.", value=run.round)
        yield GaugeMetricFamily("edgefl_run_version", "The active run's model version.", value=run.version)
        if run.accuracy is not None:
            yield GaugeMetricFamily(
                "edgefl_run_accuracy_ratio", "The active run's newest accuracy, 0 to 1.", value=run.accuracy
            )

    def _collect_coordinator(self) -> Iterator[Metric]:
        sources = self._inputs
        if sources.store_file is not None:
            size = sum(_get_file_size(Path(f"{sources.store_file}{part}")) for part in ("", "-wal"))
            yield GaugeMetricFamily("edgefl_store_size_bytes", "The database and its write-ahead log.", value=size)
        with contextlib.suppress(OSError):
            yield GaugeMetricFamily(
                "edgefl_disk_free_bytes",
                "Room on the disk of the coordinator's directory.",
                value=shutil.disk_usage(sources.directory).free,
            )
        yield GaugeMetricFamily(
            "edgefl_broker_connected", "1 while the MQTT broker is reached.", value=int(sources.is_broker_connected())
        )
        yield CounterMetricFamily(
            "edgefl_mqtt_messages_dropped", "Malformed MQTT messages of devices.", value=sources.num_dropped()
        )
        expiries = GaugeMetricFamily(
            "edgefl_certificate_expiry_timestamp_seconds", "When a certificate ends.", labels=["certificate"]
        )
        for name, ends_at in sources.expiries.items():
            expiries.add_metric([name], ends_at)
        yield expiries


def _get_file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
