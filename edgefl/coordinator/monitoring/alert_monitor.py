"""Alert monitor: evaluates the rules in a thread of its own, and sends changes to the webhook."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgefl.coordinator.fleet.presence import PRESENT_STATES, DevicePresence
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.alerts import AlertTracker, Readings, evaluate_rules
from edgefl.coordinator.monitoring.webhook import WebhookConfig, WebhookSender
from edgefl.coordinator.runs.run_metrics import FailedRun, RunMetrics
from edgefl.core.config import AlertSettings
from edgefl.core.protocol import EVALUATOR_NAME

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertInputs:
    """Sources of the readings.

    Attributes:
        fleet: its name.
        registry: of the devices.
        run_metrics: of the runs.
        directory: of the coordinator, on the monitored disk.
        is_broker_connected: whether the MQTT client is connected.
        expiries: certificate -> its end, in Unix seconds.
        expected: devices that were not offline when the coordinator last stopped.
    """

    fleet: str
    registry: DeviceRegistry
    run_metrics: RunMetrics
    directory: Path
    is_broker_connected: Callable[[], bool]
    expiries: Mapping[str, float]
    expected: frozenset[str] = frozenset()


class AlertMonitor:
    """Evaluates the alert rules from `start` to `stop`.

    Args:
        inputs: sources of the readings.
        settings: its webhook must be set.
        clock: Unix seconds, for the alerts.
        monotonic: seconds, for durations.
    """

    def __init__(
        self,
        inputs: AlertInputs,
        settings: AlertSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inputs, self._settings = inputs, settings
        self._clock, self._monotonic = clock, monotonic
        self._sender = WebhookSender(WebhookConfig(url=settings.webhook or "", secret=settings.secret))
        self._tracker = AlertTracker()
        self._gone_since: dict[str, float] = {}
        self._broker_lost_since: float | None = None
        self._failed_runs: list[FailedRun] = []
        self._last_failure = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> None:
        self._sender.start()
        self._thread.start()

    def stop(self) -> None:
        """Checks once more, so that the cause of a stop is reported too, and ends both threads."""
        self._stopping.set()
        self._thread.join()
        self._check()
        self._sender.stop()

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.check_s):
            self._check()

    def _check(self) -> None:
        try:
            conditions = evaluate_rules(self._collect_readings(), self._settings, self._tracker.active)
            for alert in self._tracker.update(conditions, self._clock()):
                body = alert.to_json(self._inputs.fleet)
                log.warning("%s", body["text"])
                self._sender.send(body)
        except Exception:  # the boundary of the thread: one failed check must not stop the next
            log.exception("the alerts could not be looked at")

    def _collect_readings(self) -> Readings:
        sources, now_s, now = self._inputs, self._monotonic(), self._clock()
        free = {
            device_id: heartbeat.disk_free_bytes
            for device_id, heartbeat in sources.registry.list_heartbeats().items()
            # The coordinator's own evaluator is on the coordinator's disk.
            if heartbeat.disk_free_bytes is not None and device_id != EVALUATOR_NAME and self._is_present(device_id)
        }
        with contextlib.suppress(OSError):
            free[COORDINATOR] = shutil.disk_usage(sources.directory).free
        return Readings(
            gone_s=self._measure_gone(now_s),
            run=sources.run_metrics.get_active_run(),
            failed=self._list_failed_runs(),
            disk_free_bytes=free,
            broker_lost_s=self._measure_broker_lost(now_s),
            certificate_left_s={name: ends_at - now for name, ends_at in sources.expiries.items()},
        )

    def _measure_gone(self, now_s: float) -> dict[str, float]:
        """Returns the seconds that each device has been gone, as seen since the coordinator's start."""
        gone = {info.device_id for info in self._inputs.registry.list_devices() if self._is_missing(info.device_id)}
        self._gone_since = {device_id: self._gone_since.get(device_id, now_s) for device_id in sorted(gone)}
        return {device_id: now_s - since for device_id, since in self._gone_since.items()}

    def _is_present(self, device_id: str) -> bool:
        return self._inputs.registry.get_state(device_id) in PRESENT_STATES

    def _is_missing(self, device_id: str) -> bool:
        state = self._inputs.registry.get_state(device_id)
        return state is DevicePresence.GONE or (state is None and device_id in self._inputs.expected)

    def _list_failed_runs(self) -> list[FailedRun]:
        """Returns the failed runs; each stays until a later round has closed, for one check at least."""
        run_metrics = self._inputs.run_metrics
        new = run_metrics.list_failed_runs(after=self._last_failure)
        self._failed_runs = [*(run for run in self._failed_runs if run.num_rounds == run_metrics.num_rounds), *new]
        self._last_failure = new[-1].number if new else self._last_failure
        return self._failed_runs

    def _measure_broker_lost(self, now_s: float) -> float:
        if self._inputs.is_broker_connected():
            self._broker_lost_since = None
            return 0.0
        if self._broker_lost_since is None:
            self._broker_lost_since = now_s
        return now_s - self._broker_lost_since
