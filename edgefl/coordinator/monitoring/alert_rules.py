"""Rules of alerts over readings, pure: which conditions hold, which alerts start and end."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgefl.coordinator.runs.run_metrics import ActiveRun, EndedRun
from edgefl.core.config import AlertKind, AlertSettings
from edgefl.core.safe_text import escape_start
from edgefl.core.types import Json
from edgefl.engine.progress import is_goal_reason

DAY_S = 86_400.0
DISK_HYSTERESIS = 1.1
"""Free space must be this many times the limit before the alert ends, so that it does not flap."""
ACCURACY_HYSTERESIS = 0.5
"""The accuracy must be back within this part of the drop before the alert ends."""
FORMAT_VERSION = 1
MAX_MESSAGE_CHARS = 500
"""Of one alert, whatever a board or a run said."""
COORDINATOR = "coordinator"
_LABELS = {"started": "ALERT", "ended": "OVER", "notice": "NOTICE"}

AlertKey = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Inputs of the rules.

    Attributes:
        gone_s: device -> seconds that it has been gone; without offline devices.
        runs: the active runs.
        failed: failed runs since the last closed round of any run.
        throttled: throttled board -> seconds that it has been so, and how.
        drift: device whose newest data is far from its reference -> which.
        disk_free_bytes: free space by place: `coordinator` or a device.
        broker_lost_s: seconds since the broker was lost; 0 while connected.
        certificate_left_s: certificate -> seconds until it ends.
        old_signatures: device whose signatures end soon, or whose list of signers lags -> why.
    """

    gone_s: Mapping[str, float] = field(default_factory=dict)
    runs: Sequence[ActiveRun] = ()
    failed: Sequence[EndedRun] = ()
    throttled: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    drift: Mapping[str, str] = field(default_factory=dict)
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    broker_lost_s: float = 0.0
    certificate_left_s: Mapping[str, float] = field(default_factory=dict)
    old_signatures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition to alert about; kind and subject are its identity.

    Once it is active it has an `alert_id` and its start, once it is over its end, in Unix seconds. A notice tells
    what happened and does not end. The message is one line, cut at `MAX_MESSAGE_CHARS`.
    """

    kind: AlertKind
    subject: str
    message: str
    alert_id: str = ""
    started_at: float = 0.0
    ended_at: float | None = None
    is_notice: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", escape_start(self.message, MAX_MESSAGE_CHARS))

    @property
    def key(self) -> AlertKey:
        return self.kind, self.subject

    @property
    def state(self) -> str:
        if self.is_notice:
            return "notice"
        return "started" if self.ended_at is None else "ended"

    @property
    def headline(self) -> str:
        """State, kind and subject, for people."""
        return f"{_LABELS[self.state]} {self.kind} {self.subject}"

    def to_json(self, fleet: str) -> Json:
        """Returns the body for the webhook; chat services show `text` and ignore the rest."""
        return {
            "v": FORMAT_VERSION,
            "id": self.alert_id,
            "fleet": fleet,
            "alert": self.kind,
            "subject": self.subject,
            "state": self.state,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "message": self.message,
            "text": f"[{fleet}] {self.headline}: {self.message}",
        }


def evaluate_rules(readings: Readings, settings: AlertSettings, active: Collection[AlertKey] = ()) -> list[Alert]:
    """Returns the conditions that hold and are not muted; `active` are the alerts that have started and not ended."""
    conditions = [
        *_check_gone(readings.gone_s, settings),
        *(alert for run in readings.runs for alert in _check_run(run, settings, active)),
        *_check_failed(readings.failed),
        *_check_throttled(readings.throttled, settings),
        *_check_disk(readings.disk_free_bytes, settings, active),
        *_check_broker(readings.broker_lost_s, settings),
        *_check_certificates(readings.certificate_left_s, settings),
        *(Alert(kind=AlertKind.DATA_DRIFTED, subject=name, message=what) for name, what in readings.drift.items()),
        *(
            Alert(kind=AlertKind.SIGNATURES_OLD, subject=name, message=why)
            for name, why in readings.old_signatures.items()
        ),
    ]
    return [condition for condition in conditions if condition.kind not in settings.muted]


def list_notices(finished: Iterable[EndedRun], settings: AlertSettings, now: float) -> list[Alert]:
    """Returns what is told of the runs that have just finished."""
    notices = []
    for run in finished:
        kind = AlertKind.GOAL_REACHED if is_goal_reason(run.reason) else AlertKind.RUN_FINISHED
        accuracy = "" if run.accuracy is None else f"; its accuracy is {run.accuracy:.4g}"
        if kind not in settings.muted:
            notices.append(
                Alert(
                    kind=kind,
                    subject=run.run_id,
                    message=f"{run.reason}{accuracy}",
                    alert_id=uuid.uuid4().hex,
                    started_at=now,
                    ended_at=now,
                    is_notice=True,
                )
            )
    return notices


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
            yield Alert(kind=AlertKind.DEVICE_GONE, subject=device_id, message=f"gone for {format_duration(seconds)}")


def _check_run(run: ActiveRun, settings: AlertSettings, active: Collection[AlertKey]) -> Iterator[Alert]:
    limit_s = max(settings.run_stalled_s, settings.run_stalled_factor * (run.typical_round_s or 0.0))
    if run.since_last_round_s >= limit_s:
        typical = (
            "" if run.typical_round_s is None else f"; a round usually takes {format_duration(run.typical_round_s)}"
        )
        waited = format_duration(run.since_last_round_s)
        message = f"no round has closed for {waited}{typical}; the last was round {run.round}"
        yield Alert(kind=AlertKind.RUN_STALLED, subject=run.run_id, message=message)
    if run.accuracy is not None and run.best_accuracy is not None:
        is_active = (AlertKind.ACCURACY_FELL, run.run_id) in active
        # Written so that an accuracy that is no number any more has fallen too.
        if not run.best_accuracy - run.accuracy <= settings.accuracy_drop * (ACCURACY_HYSTERESIS if is_active else 1):
            message = f"accuracy {run.accuracy:.4g} in round {run.round}, the best was {run.best_accuracy:.4g}"
            yield Alert(kind=AlertKind.ACCURACY_FELL, subject=run.run_id, message=message)
    for device_id, (count, reason) in run.rejections.items():
        if count >= settings.rejected_updates:
            message = f"{count} updates in a row were rejected in run {run.run_id}: {reason}"
            yield Alert(kind=AlertKind.UPDATES_REJECTED, subject=device_id, message=message)


def _check_failed(failed: Sequence[EndedRun]) -> Iterator[Alert]:
    for run in failed:
        yield Alert(kind=AlertKind.RUN_FAILED, subject=run.run_id, message=run.reason)


def _check_throttled(throttled: Mapping[str, tuple[float, str]], settings: AlertSettings) -> Iterator[Alert]:
    for device_id, (seconds, how) in throttled.items():
        if seconds >= settings.throttled_s:
            message = f"throttled for {format_duration(seconds)}: {how.replace(',', ', ')}"
            yield Alert(kind=AlertKind.THROTTLED, subject=device_id, message=message)


def _check_disk(free: Mapping[str, int], settings: AlertSettings, active: Collection[AlertKey]) -> Iterator[Alert]:
    for place, num_bytes in free.items():
        slack = DISK_HYSTERESIS if (AlertKind.DISK_LOW, place) in active else 1.0
        if num_bytes < slack * settings.disk_free_bytes:
            message = f"{num_bytes / 1e6:.0f} MB are free, {settings.disk_free_bytes / 1e6:.0f} MB should be"
            yield Alert(kind=AlertKind.DISK_LOW, subject=place, message=message)


def _check_broker(lost_s: float, settings: AlertSettings) -> Iterator[Alert]:
    if lost_s > 0 and lost_s >= settings.broker_lost_s:
        yield Alert(
            kind=AlertKind.BROKER_LOST, subject="broker", message=f"not reached for {format_duration(lost_s)}"
        )


def _check_certificates(left_s: Mapping[str, float], settings: AlertSettings) -> Iterator[Alert]:
    for name, seconds in left_s.items():
        if seconds < settings.certificate_days * DAY_S:
            remaining = f"ends in {seconds / DAY_S:.0f} days" if seconds > 0 else "has ended"
            yield Alert(kind=AlertKind.CERTIFICATE_ENDS, subject=name, message=f"the {name} certificate {remaining}")


def format_duration(seconds: float) -> str:
    """Returns a duration for people."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
