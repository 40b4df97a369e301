"""Alert rules over readings, pure, and a tracker of active alerts."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgefl.coordinator.runs.run_metrics import ActiveRun, FailedRun
from edgefl.core.config import AlertSettings
from edgefl.core.types import Json

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
TEST_ALERT = "test"

AlertKey = tuple[str, str]


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
    """

    gone_s: Mapping[str, float] = field(default_factory=dict)
    run: ActiveRun | None = None
    failed: Sequence[FailedRun] = ()
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    broker_lost_s: float = 0.0
    certificate_left_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCondition:
    """A condition to alert about; kind and subject are its identity."""

    kind: str
    subject: str
    message: str

    @property
    def key(self) -> AlertKey:
        return self.kind, self.subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition with its start and, once it is over, its end, in Unix seconds; both have one `alert_id`."""

    alert_id: str
    condition: AlertCondition
    started_at: float
    ended_at: float | None = None

    def to_json(self, fleet: str) -> Json:
        """Returns the body for the webhook; chat services show `text` and ignore the rest."""
        condition, state = self.condition, "started" if self.ended_at is None else "ended"
        label = "ALERT" if self.ended_at is None else "OVER"
        return {
            "v": FORMAT_VERSION,
            "id": self.alert_id,
            "fleet": fleet,
            "alert": condition.kind,
            "subject": condition.subject,
            "state": state,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "message": condition.message,
            "text": f"[{fleet}] {label} {condition.kind} {condition.subject}: {condition.message}",
        }


def evaluate_rules(
    readings: Readings, settings: AlertSettings, active: Collection[AlertKey] = ()
) -> list[AlertCondition]:
    """Returns the conditions that hold; `active` are the alerts that have started and not ended."""
    return [
        *_check_gone(readings.gone_s, settings),
        *_check_stalled(readings.run, settings),
        *_check_failed(readings.failed),
        *_check_disk(readings.disk_free_bytes, settings, active),
        *_check_broker(readings.broker_lost_s, settings),
        *_check_certificates(readings.certificate_left_s, settings),
    ]


class AlertTracker:
    """Tracks active alerts: a condition starts one alert, and its end ends it."""

    def __init__(self) -> None:
        self._active: dict[AlertKey, Alert] = {}

    @property
    def active(self) -> Collection[AlertKey]:
        return self._active.keys()

    def update(self, conditions: Iterable[AlertCondition], now: float) -> list[Alert]:
        """Returns the alerts that started or ended with these conditions."""
        by_key = {condition.key: condition for condition in conditions}
        ended = [replace(alert, ended_at=now) for key, alert in self._active.items() if key not in by_key]
        started = [
            Alert(alert_id=uuid.uuid4().hex, condition=condition, started_at=now)
            for key, condition in by_key.items()
            if key not in self._active
        ]
        for alert in ended:
            del self._active[alert.condition.key]
        self._active |= {alert.condition.key: alert for alert in started}
        return [*ended, *started]


def _check_gone(gone_s: Mapping[str, float], settings: AlertSettings) -> Iterator[AlertCondition]:
    for device_id, seconds in gone_s.items():
        if seconds >= settings.device_gone_s:
            yield AlertCondition(kind=DEVICE_GONE, subject=device_id, message=f"gone for {format_duration(seconds)}")


def _check_stalled(run: ActiveRun | None, settings: AlertSettings) -> Iterator[AlertCondition]:
    if run is None:
        return
    limit_s = max(settings.run_stalled_s, settings.run_stalled_factor * (run.typical_round_s or 0.0))
    if run.since_last_round_s >= limit_s:
        typical = (
            "" if run.typical_round_s is None else f"; a round usually takes {format_duration(run.typical_round_s)}"
        )
        waited = format_duration(run.since_last_round_s)
        message = f"no round has closed for {waited}{typical}; the last was round {run.round}"
        yield AlertCondition(kind=RUN_STALLED, subject=run.run_id, message=message)


def _check_failed(failed: Sequence[FailedRun]) -> Iterator[AlertCondition]:
    for run in failed:
        yield AlertCondition(kind=RUN_FAILED, subject=run.run_id, message=run.reason)


def _check_disk(
    free: Mapping[str, int], settings: AlertSettings, active: Collection[AlertKey]
) -> Iterator[AlertCondition]:
    for place, num_bytes in free.items():
        slack = DISK_HYSTERESIS if (DISK_LOW, place) in active else 1.0
        if num_bytes < slack * settings.disk_free_bytes:
            message = f"{num_bytes / 1e6:.0f} MB are free, {settings.disk_free_bytes / 1e6:.0f} MB should be"
            yield AlertCondition(kind=DISK_LOW, subject=place, message=message)


def _check_broker(lost_s: float, settings: AlertSettings) -> Iterator[AlertCondition]:
    if lost_s > 0 and lost_s >= settings.broker_lost_s:
        yield AlertCondition(kind=BROKER_LOST, subject="broker", message=f"not reached for {format_duration(lost_s)}")


def _check_certificates(left_s: Mapping[str, float], settings: AlertSettings) -> Iterator[AlertCondition]:
    for name, seconds in left_s.items():
        if seconds < settings.certificate_days * DAY_S:
            remaining = f"ends in {seconds / DAY_S:.0f} days" if seconds > 0 else "has ended"
            yield AlertCondition(kind=CERTIFICATE_ENDS, subject=name, message=f"the {name} certificate {remaining}")


def format_duration(seconds: float) -> str:
    """Returns a duration for people."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
