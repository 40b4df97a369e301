"""When something is wrong, and since when: pure rules over readings, and a book of alerts that start and end."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgefl.config import AlertSettings
from edgefl.coordinator.runs.run_meter import ActiveRun, FailedRun
from edgefl.types import Json

DAY_S = 86_400.0
DISK_SLACK = 1.1
"""Room must be this many times the limit again before the alert ends: a disk at its edge would ring all day."""
FORMAT = 1

DEVICE_GONE = "device-gone"
RUN_STALLED = "run-stalled"
RUN_FAILED = "run-failed"
DISK_LOW = "disk-low"
BROKER_LOST = "broker-lost"
CERTIFICATE_ENDS = "certificate-ends"
TEST = "test"

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What the rules look at.

    Attributes:
        gone_s: device -> for how long it has been gone; devices that said goodbye are not in it.
        run: the run that is being driven.
        failed: runs that failed, and no round of another has closed since.
        disk_free_bytes: room by place: `coordinator` or a device.
        broker_lost_s: for how long the broker has not been reached; 0 while it is.
        certificate_left_s: certificate -> seconds until it ends.
    """

    gone_s: Mapping[str, float] = field(default_factory=dict)
    run: ActiveRun | None = None
    failed: Sequence[FailedRun] = ()
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    broker_lost_s: float = 0.0
    certificate_left_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that is wrong now; kind and subject are its identity."""

    kind: str
    subject: str
    message: str

    @property
    def key(self) -> Key:
        return self.kind, self.subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition with its start and, once it is over, its end, in unix seconds. `alert_id` is that of both."""

    alert_id: str
    condition: Condition
    started_at: float
    ended_at: float | None = None

    def body(self, fleet: str) -> Json:
        """Returns what the webhook gets; chat services show `text` and pass over the rest."""
        condition, state = self.condition, "started" if self.ended_at is None else "ended"
        mark = "ALERT" if self.ended_at is None else "OVER"
        return {
            "v": FORMAT,
            "id": self.alert_id,
            "fleet": fleet,
            "alert": condition.kind,
            "subject": condition.subject,
            "state": state,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "message": condition.message,
            "text": f"[{fleet}] {mark} {condition.kind} {condition.subject}: {condition.message}",
        }


def conditions(readings: Readings, settings: AlertSettings, active: Collection[Key] = ()) -> list[Condition]:
    """Returns all that is wrong; `active` are the alerts that have started and not ended."""
    return [
        *_gone(readings.gone_s, settings),
        *_stalled(readings.run, settings),
        *_failed(readings.failed),
        *_low(readings.disk_free_bytes, settings, active),
        *_lost(readings.broker_lost_s, settings),
        *_ending(readings.certificate_left_s, settings),
    ]


class AlertBook:
    """Knows which alerts are active; a condition that goes on starts one alert, and its end ends it."""

    def __init__(self) -> None:
        self._active: dict[Key, Alert] = {}

    @property
    def active(self) -> Collection[Key]:
        return self._active.keys()

    def update(self, now_wrong: Iterable[Condition], now: float) -> list[Alert]:
        """Returns the alerts that started or ended with these conditions."""
        wrong = {condition.key: condition for condition in now_wrong}
        ended = [replace(alert, ended_at=now) for key, alert in self._active.items() if key not in wrong]
        started = [
            Alert(alert_id=uuid.uuid4().hex, condition=condition, started_at=now)
            for key, condition in wrong.items()
            if key not in self._active
        ]
        for alert in ended:
            del self._active[alert.condition.key]
        self._active |= {alert.condition.key: alert for alert in started}
        return [*ended, *started]


def _gone(gone_s: Mapping[str, float], settings: AlertSettings) -> Iterator[Condition]:
    for device_id, seconds in gone_s.items():
        if seconds >= settings.device_gone_s:
            yield Condition(kind=DEVICE_GONE, subject=device_id, message=f"gone for {in_words(seconds)}")


def _stalled(run: ActiveRun | None, settings: AlertSettings) -> Iterator[Condition]:
    if run is None:
        return
    limit_s = max(settings.run_stalled_s, settings.run_stalled_factor * (run.usual_s or 0.0))
    if run.quiet_s >= limit_s:
        usual = "" if run.usual_s is None else f"; a round usually takes {in_words(run.usual_s)}"
        told = f"no round has closed for {in_words(run.quiet_s)}{usual}; the last was round {run.round}"
        yield Condition(kind=RUN_STALLED, subject=run.run_id, message=told)


def _failed(failed: Sequence[FailedRun]) -> Iterator[Condition]:
    for run in failed:
        yield Condition(kind=RUN_FAILED, subject=run.run_id, message=run.reason)


def _low(free: Mapping[str, int], settings: AlertSettings, active: Collection[Key]) -> Iterator[Condition]:
    for place, num_bytes in free.items():
        slack = DISK_SLACK if (DISK_LOW, place) in active else 1.0
        if num_bytes < slack * settings.disk_free_bytes:
            told = f"{num_bytes / 1e6:.0f} MB are free, {settings.disk_free_bytes / 1e6:.0f} MB should be"
            yield Condition(kind=DISK_LOW, subject=place, message=told)


def _lost(lost_s: float, settings: AlertSettings) -> Iterator[Condition]:
    if lost_s > 0 and lost_s >= settings.broker_lost_s:
        yield Condition(kind=BROKER_LOST, subject="broker", message=f"not reached for {in_words(lost_s)}")


def _ending(left_s: Mapping[str, float], settings: AlertSettings) -> Iterator[Condition]:
    for name, seconds in left_s.items():
        if seconds < settings.certificate_days * DAY_S:
            told = f"ends in {seconds / DAY_S:.0f} days" if seconds > 0 else "has ended"
            yield Condition(kind=CERTIFICATE_ENDS, subject=name, message=f"the {name} certificate {told}")


def in_words(seconds: float) -> str:
    """Returns a time as a person says it."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
