"""Alerts: the monitor that evaluates their rules, and passes what starts and ends to webhook and services."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from edgefl.coordinator.fleet.membership import get_signed_state, list_old_signatures
from edgefl.coordinator.fleet.presence import PRESENT_STATES, DevicePresence
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.alert_rules import (
    COORDINATOR,
    Alert,
    AlertKey,
    Readings,
    evaluate_rules,
    list_notices,
    update_alerts,
)
from edgefl.coordinator.monitoring.alert_senders import QueuedSender, WebhookConfig, send_alert
from edgefl.coordinator.monitoring.notifications import AlertGroup, Message, load_services
from edgefl.coordinator.runs.run_metrics import EndedRun, RunMetrics
from edgefl.core.claims import format_drift, parse_drift
from edgefl.core.config import AlertSettings
from edgefl.core.protocol import EVALUATOR_NAME, Heartbeat
from edgefl.core.types import Json
from edgefl.storage.repositories.records import RunStatus

log = logging.getLogger(__name__)


class AlertMonitor:
    """Evaluates the alert rules from `start` to `stop`, in a thread, and sends changes to webhook and services.

    Args:
        settings: whom it tells, and when.
        fleet: its name.
        registry: of the devices.
        run_metrics: of the runs.
        directory: of the coordinator, on the monitored disk.
        is_broker_connected: whether the MQTT client is connected.
        expiries: certificate -> its end, in Unix seconds.
        expected: devices that were not offline when the coordinator last stopped.
        clock: Unix seconds, for the alerts.
        monotonic: seconds, for durations.

    Raises:
        ConfigError: an address of a service is none, or cannot be read.
        MissingPackageError: there are addresses, and no apprise.
    """

    def __init__(  # noqa: PLR0913 one keyword per source
        self,
        settings: AlertSettings,
        *,
        fleet: str,
        registry: DeviceRegistry,
        run_metrics: RunMetrics,
        directory: Path,
        is_broker_connected: Callable[[], bool],
        expiries: Mapping[str, float],
        expected: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._fleet, self._registry, self._run_metrics = settings, fleet, registry, run_metrics
        self._directory, self._is_broker_connected = directory, is_broker_connected
        self._expiries, self._expected = expiries, frozenset(expected)
        self._clock, self._monotonic = clock, monotonic
        self._webhook = make_webhook_sender(settings)
        self._services = [QueuedSender[Message](each.label, each.send) for each in load_services(settings.notify)]
        self._group = AlertGroup(settings, fleet)
        self._active: dict[AlertKey, Alert] = {}
        self._gone_since: dict[str, float] = {}
        self._throttled_since: dict[str, float] = {}
        self._broker_lost_since: float | None = None
        self._failed_runs: list[EndedRun] = []
        self._last_end = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> None:
        for sender in self._list_senders():
            sender.start()
        self._thread.start()

    def stop(self) -> None:
        """Checks once more, so that the cause of a stop is reported too, and ends all threads."""
        self._stopping.set()
        self._thread.join()
        self._check()
        self._send_group(self._group.close(self._clock()))
        for sender in self._list_senders():
            sender.request_stop()
        for sender in self._list_senders():
            sender.stop()

    def _list_senders(self) -> list[QueuedSender[Any]]:
        return [*([self._webhook] if self._webhook else []), *self._services]

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.check_s):
            self._check()

    def _check(self) -> None:
        try:
            now, now_s, ended_runs = self._clock(), self._monotonic(), self._list_ended_runs()
            conditions = evaluate_rules(self._collect_readings(ended_runs, now, now_s), self._settings, self._active)
            changes = update_alerts(self._active, conditions, now)
            finished = [run for run in ended_runs if run.status is RunStatus.FINISHED]
            for alert in [*changes, *list_notices(finished, self._settings, now)]:
                body = alert.to_json(self._fleet)
                log.log(logging.INFO if alert.is_notice else logging.WARNING, "%s", body["text"])
                if self._webhook is not None:
                    self._webhook.send(body)
                self._group.add(alert, now_s)
            self._send_group(self._group.poll(now, now_s))
        except Exception:  # the boundary of the thread: one failed check must not stop the next
            log.exception("the alerts could not be looked at")

    def _send_group(self, message: Message | None) -> None:
        if message is not None:
            for service in self._services:
                service.send(message)

    def _collect_readings(self, ended_runs: Iterable[EndedRun], now: float, now_s: float) -> Readings:
        heartbeats = {
            device_id: heartbeat
            for device_id, heartbeat in self._registry.list_heartbeats().items()
            # The coordinator's own evaluator is on the coordinator's machine.
            if device_id != EVALUATOR_NAME and self._is_present(device_id)
        }
        free = {
            name: heartbeat.disk_free_bytes
            for name, heartbeat in heartbeats.items()
            if heartbeat.disk_free_bytes is not None
        }
        with contextlib.suppress(OSError):
            free[COORDINATOR] = shutil.disk_usage(self._directory).free
        facts = {info.device_id: info.capabilities for info in self._registry.list_devices()}
        return Readings(
            gone_s=self._measure_gone(now_s),
            runs=self._run_metrics.list_active_runs(),
            failed=self._update_failed_runs(ended_runs),
            throttled=self._measure_throttled(heartbeats, now_s),
            drift=_list_drifts(facts),
            disk_free_bytes=free,
            broker_lost_s=self._measure_broker_lost(now_s),
            certificate_left_s={name: ends_at - now for name, ends_at in self._expiries.items()},
            old_signatures=list_old_signatures(_list_signed_states(facts), now),
        )

    def _measure_gone(self, now_s: float) -> dict[str, float]:
        """Returns the seconds that each device has been gone, as seen since the coordinator's start."""
        gone = {info.device_id for info in self._registry.list_devices() if self._is_missing(info.device_id)}
        self._gone_since = {device_id: self._gone_since.get(device_id, now_s) for device_id in sorted(gone)}
        return {device_id: now_s - since for device_id, since in self._gone_since.items()}

    def _measure_throttled(self, heartbeats: Mapping[str, Heartbeat], now_s: float) -> dict[str, tuple[float, str]]:
        """Returns the seconds that each board has been throttled without a break, and how it is now."""
        how = {
            name: heartbeat.throttled
            for name, heartbeat in heartbeats.items()
            if heartbeat.throttled not in {None, "ok"}
        }
        self._throttled_since = {name: self._throttled_since.get(name, now_s) for name in how}
        return {name: (now_s - self._throttled_since[name], words or "") for name, words in how.items()}

    def _is_present(self, device_id: str) -> bool:
        return self._registry.get_state(device_id) in PRESENT_STATES

    def _is_missing(self, device_id: str) -> bool:
        state = self._registry.get_state(device_id)
        return state is DevicePresence.GONE or (state is None and device_id in self._expected)

    def _list_ended_runs(self) -> list[EndedRun]:
        """Returns the runs that have failed or finished since the last call."""
        ended_runs = self._run_metrics.list_ended_runs(after=self._last_end)
        self._last_end = ended_runs[-1].number if ended_runs else self._last_end
        return ended_runs

    def _update_failed_runs(self, ended_runs: Iterable[EndedRun]) -> list[EndedRun]:
        """Returns the failed runs; each stays until a later round has closed, for one check at least."""
        num_rounds = self._run_metrics.num_rounds
        new = [run for run in ended_runs if run.status is RunStatus.FAILED]
        self._failed_runs = [*(run for run in self._failed_runs if run.num_rounds == num_rounds), *new]
        return self._failed_runs

    def _measure_broker_lost(self, now_s: float) -> float:
        if self._is_broker_connected():
            self._broker_lost_since = None
            return 0.0
        if self._broker_lost_since is None:
            self._broker_lost_since = now_s
        return now_s - self._broker_lost_since


def make_webhook_sender(settings: AlertSettings) -> QueuedSender[Json] | None:
    """Returns the sender to the webhook, not yet started; None where there is none."""
    if settings.webhook is None:
        return None
    config = WebhookConfig(url=settings.webhook, secret=settings.secret)
    return QueuedSender[Json](config.host, partial(send_alert, config))


def _list_signed_states(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Json]:
    return {name: state for name, reported in facts.items() if (state := get_signed_state(reported)) is not None}


def _list_drifts(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the devices whose newest data is far from its reference, and which data that is."""
    drifts = {
        name: {task: claim for task, claim in parse_drift(reported).items() if claim.is_large}
        for name, reported in facts.items()
    }
    return {name: text for name, claims in drifts.items() if (text := format_drift(claims)) is not None}
