"""`/metrics` in Prometheus' text format: collectors of the fleet and its devices, HTTP counters.

Nothing here reads history from the store: values come from the device registry, `RunMetrics` and a few `stat` calls.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl import __version__
from edgefl.coordinator.connections import REFUSAL_REASONS, ConnectionLimiter
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.certificates import list_own_expiries
from edgefl.coordinator.fleet.presence import PRESENT_STATES, DevicePresence
from edgefl.coordinator.fleet.registry import NEVER_SEEN, DeviceRegistry
from edgefl.coordinator.monitoring.alerts import AlertMonitor
from edgefl.coordinator.monitoring.home_assistant import HomeAssistantBridge
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.core.config import AlertSettings
from edgefl.core.errors import StoreError
from edgefl.core.fleet_messages import FLEET_PREFIX
from edgefl.core.protocol import Heartbeat
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json
from edgefl.storage.database import get_sqlite_path
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store

METRIC_PREFIX = "edgefl_device_"
_HEALTH_METRICS: Mapping[str, tuple[str, Callable[[Heartbeat], float | None]]] = {
    "temperature_celsius": ("Of its processor.", lambda h: h.temperature_c),
    "throttled": (
        "1 while the board is throttled.",
        lambda h: None if h.throttled is None else float(h.throttled != "ok"),
    ),
    "battery_ratio": ("Charge, 0 to 1.", lambda h: h.battery_fraction),
    "power_watts": ("What the board draws.", lambda h: h.power_w),
}


class Metrics:
    """Everything that the coordinator exports; `registry` is its own, not the library's global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._render_device_series: Callable[[], str] = str
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        Gauge("edgefl_build_info", "1, with the version of edgefl.", ["version"], registry=self.registry).labels(
            __version__
        ).set(1)
        self._responses = Counter(
            "edgefl_http_responses",
            "Answers over HTTPS: to devices (fleet) and to everybody else (edgefl), by status; 401 and 403: refused.",
            ["api", "code"],
            registry=self.registry,
        )

    def register(self, collector: Collector, render_device_series: Callable[[], str]) -> None:
        """Adds a collector, and a function that renders more series as text, to each scrape."""
        self.registry.register(collector)
        self._render_device_series = render_device_series

    def render(self) -> bytes:
        """Returns the response to a scrape."""
        return generate_latest(self.registry) + self._render_device_series().encode()

    def count_responses(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with its responses counted."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            api = "fleet" if str(scope.get("path", "")).startswith(FLEET_PREFIX) else "edgefl"

            async def send_counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._responses.labels(api, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, send_counted)

        return count


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
        """Returns the alert monitor, not yet started; None where nobody is told.

        Raises:
            ConfigError: an address of a service is none, or cannot be read.
        """
        if settings.webhook is None and not settings.notify:
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

    def make_home_assistant_bridge(self) -> HomeAssistantBridge | None:
        """Returns the bridge to Home Assistant, not yet started; None where no broker is set.

        Raises:
            ConfigError: the login or the authority of the broker is none.
        """
        if not self._directory.home_assistant.host:
            return None
        return HomeAssistantBridge(
            self._directory.home_assistant,
            fleet=self._directory.fleet,
            registry=self._registry,
            run_metrics=self.run_metrics,
        )


def load_grafana_dashboard() -> Json:
    """Returns a Grafana dashboard over these metrics, for `Dashboards > Import`."""
    content: Json = json.loads((files("edgefl.coordinator.monitoring") / "grafana.json").read_text(encoding="utf-8"))
    return content


@dataclass(eq=False, slots=True, kw_only=True)
class FleetCollector(Collector):
    """Collects the metrics of fleet, active run, store and broker at each scrape.

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

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_fleet()
        yield from self._collect_run()
        yield from self._collect_coordinator()

    def _collect_fleet(self) -> Iterator[Metric]:
        counts = self.registry.count_by_presence()
        num_devices = counts.total()
        devices = GaugeMetricFamily("edgefl_devices", "Devices that have joined, by presence.", labels=["presence"])
        for presence in (*DevicePresence, NEVER_SEEN):
            devices.add_metric([presence.replace(" ", "-")], counts[presence])
        yield devices
        has_series = num_devices <= self.max_devices
        yield GaugeMetricFamily(
            "edgefl_devices_without_series",
            "Devices that are only counted: a fleet of more than --device-metrics has no series for each.",
            value=0 if has_series else num_devices,
        )

    def _collect_run(self) -> Iterator[Metric]:
        active = self.run_metrics.list_active_runs()
        runs = GaugeMetricFamily("edgefl_runs", "Runs that wait or are at work, by status.", labels=["status"])
        with contextlib.suppress(StoreError):  # a scrape returns what is available
            runs.add_metric([str(RunStatus.QUEUED)], self.num_queued())
        for status in (RunStatus.RUNNING, RunStatus.STOPPING):
            runs.add_metric([str(status)], sum(run.status is status for run in active))
        yield runs
        if not active:
            return
        info = GaugeMetricFamily(
            "edgefl_run_info", "1, with each active run.", labels=["run", "name", "task", "strategy"]
        )
        for run in active:
            info.add_metric([escape_text(label) for label in (run.run_id, run.name, run.task, run.strategy)], 1)
        yield info
        for name, text, values in (
            ("round", "An active run's last closed round.", {run.run_id: run.round for run in active}),
            ("version", "An active run's model version.", {run.run_id: run.version for run in active}),
            ("accuracy_ratio", "An active run's newest accuracy, 0 to 1.", {r.run_id: r.accuracy for r in active}),
        ):
            family = GaugeMetricFamily(f"edgefl_run_{name}", text, labels=["run"])
            for run_id, value in values.items():
                if value is not None:
                    family.add_metric([escape_text(run_id)], value)
            if family.samples:
                yield family

    def _collect_coordinator(self) -> Iterator[Metric]:
        if self.store_file is not None:
            size = sum(_get_file_size(Path(f"{self.store_file}{part}")) for part in ("", "-wal"))
            yield GaugeMetricFamily("edgefl_store_size_bytes", "The database and its write-ahead log.", value=size)
        with contextlib.suppress(OSError):
            yield GaugeMetricFamily(
                "edgefl_disk_free_bytes",
                "Room on the disk of the coordinator's directory.",
                value=shutil.disk_usage(self.directory).free,
            )
        yield GaugeMetricFamily(
            "edgefl_broker_connected", "1 while the MQTT broker is reached.", value=int(self.is_broker_connected())
        )
        yield CounterMetricFamily(
            "edgefl_mqtt_messages_dropped", "Malformed MQTT messages of devices.", value=self.num_dropped()
        )
        expiries = GaugeMetricFamily(
            "edgefl_certificate_expiry_timestamp_seconds", "When a certificate ends.", labels=["certificate"]
        )
        for name, ends_at in self.expiries.items():
            expiries.add_metric([name], ends_at)
        yield expiries


@dataclass(eq=False, slots=True)
class ConnectionCollector(Collector):
    """Collects the connections of the coordinator's listeners at each scrape."""

    limiters: Sequence[ConnectionLimiter]

    def collect(self) -> Iterator[Metric]:
        connections = GaugeMetricFamily(
            "edgefl_connections",
            "Open connections by listener: pending ones have shown no key or access token yet.",
            labels=["listener", "state"],
        )
        refused = CounterMetricFamily(
            "edgefl_connections_refused",
            "Connections that were refused, or closed at a deadline, by listener and reason.",
            labels=["listener", "reason"],
        )
        for limiter in self.limiters:
            connections.add_metric([limiter.name, "pending"], limiter.num_pending)
            connections.add_metric([limiter.name, "authenticated"], limiter.num_owned)
            for reason in REFUSAL_REASONS:
                refused.add_metric([limiter.name, reason], limiter.refused[reason])
        yield connections
        yield refused


def _get_file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def render_device_series(registry: DeviceRegistry, *, max_devices: int, now: float) -> str:
    """Returns the text of all series with the label `device`; nothing for a fleet of more than `max_devices`.

    Device ids need no escaping: they are slugs.

    Args:
        registry: of the devices.
        max_devices: maximum number of devices with series.
        now: Unix seconds.
    """
    rows = registry.list_status_rows()
    if len(rows) > max_devices:
        return ""
    heartbeats = registry.list_heartbeats()
    parts = [
        _render_family(
            "present",
            "1 while the device is there.",
            {r["device_id"]: int(r["presence"] in PRESENT_STATES) for r in rows},
        ),
        _render_family(
            "last_seen_timestamp_seconds",
            "Last sign of life.",
            {r["device_id"]: round(now - r["silent_s"], 1) for r in rows if r["silent_s"] is not None},
        ),
    ]
    for name, (text, read) in _HEALTH_METRICS.items():
        values = {device_id: read(heartbeat) for device_id, heartbeat in heartbeats.items()}
        parts.append(
            _render_family(name, text, {device_id: value for device_id, value in values.items() if value is not None})
        )
    return "".join(parts)


def _render_family(name: str, text: str, values: Mapping[str, float]) -> str:
    full_name = METRIC_PREFIX + name
    lines = [f'{full_name}{{device="{device_id}"}} {value!r}\n' for device_id, value in values.items()]
    return f"# HELP {full_name} {text}\n# TYPE {full_name} gauge\n{''.join(lines)}" if lines else ""
