"""What `/metrics` says of the fleet, the active run, the store and the broker, looked up at each scrape."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgefl.coordinator.fleet.presence import DeviceState
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.runs.run_meter import RunMeter
from edgefl.errors import StoreError
from edgefl.storage.records import RunStatus

NEVER_SEEN = "never-seen"
PRESENCES = (*(str(state) for state in DeviceState), NEVER_SEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the figures come from.

    Attributes:
        roster: the devices.
        meter: the active run.
        directory: of the coordinator; its disk is meant.
        store_file: the SQLite database, None for a store elsewhere.
        num_queued: how many runs wait.
        is_broker_connected: whether the bus is up.
        num_dropped: malformed MQTT messages so far.
        expiries: certificate -> when it ends, in unix seconds.
        max_devices: a fleet of more devices than this gets no series of its own for each; 0 for none ever.
    """

    roster: Roster
    meter: RunMeter
    directory: Path
    store_file: Path | None
    num_queued: Callable[[], int]
    is_broker_connected: Callable[[], bool]
    num_dropped: Callable[[], int]
    expiries: Mapping[str, float] = field(default_factory=dict)
    max_devices: int


class FleetCollector(Collector):
    """Gives the figures at each scrape; see `Sources`."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def describe(self) -> list[Metric]:
        """Returns nothing: a collector is not asked for figures before there are any."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._fleet()
        yield from self._run()
        yield from self._house()

    def _fleet(self) -> Iterator[Metric]:
        sources = self._sources
        rows = sources.roster.facts()
        counts = Counter(str(row["presence"]).replace(" ", "-") for row in rows)
        devices = GaugeMetricFamily("edgefl_devices", "Devices that have joined, by presence.", labels=["presence"])
        for presence in PRESENCES:
            devices.add_metric([presence], counts.get(presence, 0))
        yield devices
        has_series = len(rows) <= sources.max_devices
        yield GaugeMetricFamily(
            "edgefl_devices_without_series",
            "Devices that are only counted: a fleet of more than --device-metrics has no series for each.",
            value=0 if has_series else len(rows),
        )

    def _run(self) -> Iterator[Metric]:
        sources, run = self._sources, self._sources.meter.active()
        runs = GaugeMetricFamily("edgefl_runs", "Runs that wait or are at work, by status.", labels=["status"])
        with contextlib.suppress(StoreError):  # a scrape says what can be said
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

    def _house(self) -> Iterator[Metric]:
        sources = self._sources
        if sources.store_file is not None:
            size = sum(_size(Path(f"{sources.store_file}{part}")) for part in ("", "-wal"))
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
        for name, at in sources.expiries.items():
            expiries.add_metric([name], at)
        yield expiries


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
