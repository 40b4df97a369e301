"""Alerts: rules over readings, pure, the monitor that evaluates them, and their delivery to a webhook.

The URL is a secret for many services: only its host is ever logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import shutil
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgefl import __version__
from edgefl.coordinator.fleet.membership import get_signed_state, list_old_signatures
from edgefl.coordinator.fleet.presence import PRESENT_STATES, DevicePresence
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.run_metrics import ActiveRun, FailedRun, RunMetrics
from edgefl.core.config import AlertSettings
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.safe_text import escape_values
from edgefl.core.types import Json
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 1.0, 300.0
MAX_QUEUED = 1000
FLUSH_TIMEOUT_S = 3.0
"""How long `stop` tries to deliver queued alerts."""
SIGNATURE_HEADER = "X-Edgefl-Signature"
_TRANSIENT_STATUSES = frozenset({408, 425, 429})

DAY_S = 86_400.0
DISK_HYSTERESIS = 1.1
"""Free space must be this many times the limit before the alert ends, so that it does not flap."""
FORMAT_VERSION = 1

DEVICE_GONE = "device-gone"
RUN_STALLED = "run-stalled"
RUN_FAILED = "run-failed"
DISK_LOW = "disk-low"
BROKER_LOST = "broker-lost"
CERTIFICATE_ENDS = "certificate-ends"
SIGNATURES_OLD = "signatures-old"
TEST_ALERT = "test"

AlertKey = tuple[str, str]
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """URL of the webhook; with a secret every body is signed."""

    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "?"


class WebhookRejectedError(NetworkError):
    """Raised when the webhook permanently rejects a message."""


def send_alert(config: WebhookConfig, body: Json, *, timeout_s: float = TIMEOUT_S) -> None:
    """Sends one message.

    Raises:
        WebhookRejectedError: a permanent error, such as 404.
        NetworkError: no answer, or a temporary error.
    """
    # Chat services show the texts as they come: a board's name or reason must not reorder or forge a line there.
    content = json.dumps(escape_values(body), ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"edgefl/{__version__}"}
    if config.secret is not None:
        headers[SIGNATURE_HEADER] = compute_signature(config.secret, content)
    request = urllib.request.Request(config.url, data=content, headers=headers, method="POST")  # noqa: S310 http or https
    try:
        with _make_opener().open(request, timeout=timeout_s) as response:
            response.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        is_temporary = error.code >= 500 or error.code in _TRANSIENT_STATUSES
        raise (NetworkError if is_temporary else WebhookRejectedError)(
            f"{config.host} answered {error.code}"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NetworkError(f"{config.host} cannot be reached: {reason}") from None


def compute_signature(secret: str, content: bytes) -> str:
    """Returns the header's value: `sha256=` and the HMAC of the body in hexadecimal."""
    return "sha256=" + hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()


class WebhookSender:
    """Delivers messages in order, in a thread of its own, and retries; `num_queued` are not delivered yet."""

    def __init__(self, config: WebhookConfig, *, initial_backoff_s: float = INITIAL_BACKOFF_S) -> None:
        self._config, self._backoff = config, Backoff(initial_s=initial_backoff_s, max_s=MAX_BACKOFF_S)
        self._queue: deque[Json] = deque()
        self._changed = threading.Condition()
        self._stop_deadline_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, body: Json) -> None:
        """Queues a message; drops the oldest beyond `MAX_QUEUED`."""
        with self._changed:
            if len(self._queue) >= MAX_QUEUED:
                self._queue.popleft()
                log.warning("an alert for %s is dropped: %d wait already", self._config.host, MAX_QUEUED)
            self._queue.append(body)
            self._changed.notify_all()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def stop(self) -> None:
        """Ends the thread; queued messages are tried once."""
        with self._changed:
            self._stop_deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
            self._changed.notify_all()
        self._thread.join(FLUSH_TIMEOUT_S + TIMEOUT_S)

    def _run(self) -> None:
        while (body := self._wait_next()) is not None:
            if self._deliver(body):
                with self._changed:
                    if self._queue and self._queue[0] is body:
                        self._queue.popleft()
                self._backoff.reset()
            elif self._stop_deadline_s is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._stop_deadline_s is not None, self._backoff.next_s())
            else:
                log.warning("%d alerts never reached %s", len(self._queue), self._config.host)
                return

    def _wait_next(self) -> Json | None:
        """Returns the oldest message; None when the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stop_deadline_s is not None)
            is_late = self._stop_deadline_s is not None and time.monotonic() > self._stop_deadline_s
            return self._queue[0] if self._queue and not is_late else None

    def _deliver(self, body: Json) -> bool:
        """Sends a message; returns whether it is done, delivered or rejected."""
        timeout_s = TIMEOUT_S
        if self._stop_deadline_s is not None:
            timeout_s = max(0.1, self._stop_deadline_s - time.monotonic())
        try:
            send_alert(self._config, body, timeout_s=timeout_s)
        except WebhookRejectedError as error:
            log.warning("the webhook does not take an alert: %s", error)
        except NetworkError as error:
            log.warning("an alert is tried again: %s", error)
            return False
        except Exception:  # the boundary of the thread: the next alert must still be sent
            log.exception("an alert could not be sent")
        return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: a redirected POST would become a GET without its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _make_opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Inputs of the rules.

    Attributes:
        gone_s: device -> seconds that it has been gone; without offline devices.
        run: the active run.
        failed: failed runs since the last closed round of any run.
        disk_free_bytes: free space by place: `coordinator` or a device.
        broker_lost_s: seconds since the broker was lost; 0 while connected.
        certificate_left_s: certificate -> seconds until it ends.
        old_signatures: device whose signatures end soon, or whose list of signers lags -> why.
    """

    gone_s: Mapping[str, float] = field(default_factory=dict)
    run: ActiveRun | None = None
    failed: Sequence[FailedRun] = ()
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    broker_lost_s: float = 0.0
    certificate_left_s: Mapping[str, float] = field(default_factory=dict)
    old_signatures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition to alert about; kind and subject are its identity.

    Once it is active it has an `alert_id` and its start, once it is over its end, in Unix seconds.
    """

    kind: str
    subject: str
    message: str
    alert_id: str = ""
    started_at: float = 0.0
    ended_at: float | None = None

    @property
    def key(self) -> AlertKey:
        return self.kind, self.subject

    def to_json(self, fleet: str) -> Json:
        """Returns the body for the webhook; chat services show `text` and ignore the rest."""
        state = "started" if self.ended_at is None else "ended"
        label = "ALERT" if self.ended_at is None else "OVER"
        return {
            "v": FORMAT_VERSION,
            "id": self.alert_id,
            "fleet": fleet,
            "alert": self.kind,
            "subject": self.subject,
            "state": state,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "message": self.message,
            "text": f"[{fleet}] {label} {self.kind} {self.subject}: {self.message}",
        }


def evaluate_rules(readings: Readings, settings: AlertSettings, active: Collection[AlertKey] = ()) -> list[Alert]:
    """Returns the conditions that hold; `active` are the alerts that have started and not ended."""
    return [
        *_check_gone(readings.gone_s, settings),
        *_check_stalled(readings.run, settings),
        *_check_failed(readings.failed),
        *_check_disk(readings.disk_free_bytes, settings, active),
        *_check_broker(readings.broker_lost_s, settings),
        *_check_certificates(readings.certificate_left_s, settings),
        *(Alert(kind=SIGNATURES_OLD, subject=name, message=why) for name, why in readings.old_signatures.items()),
    ]


def update_alerts(active: dict[AlertKey, Alert], conditions: Iterable[Alert], now: float) -> list[Alert]:
    """Returns the alerts that these conditions start, and the `active` ones that end without them; updates those."""
    by_key = {condition.key: condition for condition in conditions}
    ended = [replace(alert, ended_at=now) for key, alert in active.items() if key not in by_key]
    started = [
        replace(condition, alert_id=uuid.uuid4().hex, started_at=now)
        for key, condition in by_key.items()
        if key not in active
    ]
    for alert in ended:
        del active[alert.key]
    active |= {alert.key: alert for alert in started}
    return [*ended, *started]


def _check_gone(gone_s: Mapping[str, float], settings: AlertSettings) -> Iterator[Alert]:
    for device_id, seconds in gone_s.items():
        if seconds >= settings.device_gone_s:
            yield Alert(kind=DEVICE_GONE, subject=device_id, message=f"gone for {format_duration(seconds)}")


def _check_stalled(run: ActiveRun | None, settings: AlertSettings) -> Iterator[Alert]:
    if run is None:
        return
    limit_s = max(settings.run_stalled_s, settings.run_stalled_factor * (run.typical_round_s or 0.0))
    if run.since_last_round_s >= limit_s:
        typical = (
            "" if run.typical_round_s is None else f"; a round usually takes {format_duration(run.typical_round_s)}"
        )
        waited = format_duration(run.since_last_round_s)
        message = f"no round has closed for {waited}{typical}; the last was round {run.round}"
        yield Alert(kind=RUN_STALLED, subject=run.run_id, message=message)


def _check_failed(failed: Sequence[FailedRun]) -> Iterator[Alert]:
    for run in failed:
        yield Alert(kind=RUN_FAILED, subject=run.run_id, message=run.reason)


def _check_disk(free: Mapping[str, int], settings: AlertSettings, active: Collection[AlertKey]) -> Iterator[Alert]:
    for place, num_bytes in free.items():
        slack = DISK_HYSTERESIS if (DISK_LOW, place) in active else 1.0
        if num_bytes < slack * settings.disk_free_bytes:
            message = f"{num_bytes / 1e6:.0f} MB are free, {settings.disk_free_bytes / 1e6:.0f} MB should be"
            yield Alert(kind=DISK_LOW, subject=place, message=message)


def _check_broker(lost_s: float, settings: AlertSettings) -> Iterator[Alert]:
    if lost_s > 0 and lost_s >= settings.broker_lost_s:
        yield Alert(kind=BROKER_LOST, subject="broker", message=f"not reached for {format_duration(lost_s)}")


def _check_certificates(left_s: Mapping[str, float], settings: AlertSettings) -> Iterator[Alert]:
    for name, seconds in left_s.items():
        if seconds < settings.certificate_days * DAY_S:
            remaining = f"ends in {seconds / DAY_S:.0f} days" if seconds > 0 else "has ended"
            yield Alert(kind=CERTIFICATE_ENDS, subject=name, message=f"the {name} certificate {remaining}")


def format_duration(seconds: float) -> str:
    """Returns a duration for people."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class AlertMonitor:
    """Evaluates the alert rules from `start` to `stop`, in a thread, and sends changes to the webhook.

    Args:
        settings: its webhook must be set.
        fleet: its name.
        registry: of the devices.
        run_metrics: of the runs.
        directory: of the coordinator, on the monitored disk.
        is_broker_connected: whether the MQTT client is connected.
        expiries: certificate -> its end, in Unix seconds.
        expected: devices that were not offline when the coordinator last stopped.
        clock: Unix seconds, for the alerts.
        monotonic: seconds, for durations.
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
        self._sender = WebhookSender(WebhookConfig(url=settings.webhook or "", secret=settings.secret))
        self._active: dict[AlertKey, Alert] = {}
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
            conditions = evaluate_rules(self._collect_readings(), self._settings, self._active)
            for alert in update_alerts(self._active, conditions, self._clock()):
                body = alert.to_json(self._fleet)
                log.warning("%s", body["text"])
                self._sender.send(body)
        except Exception:  # the boundary of the thread: one failed check must not stop the next
            log.exception("the alerts could not be looked at")

    def _collect_readings(self) -> Readings:
        now_s, now = self._monotonic(), self._clock()
        free = {
            device_id: heartbeat.disk_free_bytes
            for device_id, heartbeat in self._registry.list_heartbeats().items()
            # The coordinator's own evaluator is on the coordinator's disk.
            if heartbeat.disk_free_bytes is not None and device_id != EVALUATOR_NAME and self._is_present(device_id)
        }
        with contextlib.suppress(OSError):
            free[COORDINATOR] = shutil.disk_usage(self._directory).free
        return Readings(
            gone_s=self._measure_gone(now_s),
            run=self._run_metrics.get_active_run(),
            failed=self._list_failed_runs(),
            disk_free_bytes=free,
            broker_lost_s=self._measure_broker_lost(now_s),
            certificate_left_s={name: ends_at - now for name, ends_at in self._expiries.items()},
            old_signatures=list_old_signatures(self._list_signed_states(), now),
        )

    def _list_signed_states(self) -> dict[str, Json]:
        devices = {info.device_id: info.capabilities for info in self._registry.list_devices()}
        return {name: state for name, facts in devices.items() if (state := get_signed_state(facts)) is not None}

    def _measure_gone(self, now_s: float) -> dict[str, float]:
        """Returns the seconds that each device has been gone, as seen since the coordinator's start."""
        gone = {info.device_id for info in self._registry.list_devices() if self._is_missing(info.device_id)}
        self._gone_since = {device_id: self._gone_since.get(device_id, now_s) for device_id in sorted(gone)}
        return {device_id: now_s - since for device_id, since in self._gone_since.items()}

    def _is_present(self, device_id: str) -> bool:
        return self._registry.get_state(device_id) in PRESENT_STATES

    def _is_missing(self, device_id: str) -> bool:
        state = self._registry.get_state(device_id)
        return state is DevicePresence.GONE or (state is None and device_id in self._expected)

    def _list_failed_runs(self) -> list[FailedRun]:
        """Returns the failed runs; each stays until a later round has closed, for one check at least."""
        run_metrics = self._run_metrics
        new = run_metrics.list_failed_runs(after=self._last_failure)
        self._failed_runs = [*(run for run in self._failed_runs if run.num_rounds == run_metrics.num_rounds), *new]
        self._last_failure = new[-1].number if new else self._last_failure
        return self._failed_runs

    def _measure_broker_lost(self, now_s: float) -> float:
        if self._is_broker_connected():
            self._broker_lost_since = None
            return 0.0
        if self._broker_lost_since is None:
            self._broker_lost_since = now_s
        return now_s - self._broker_lost_since
