"""Looks at the fleet every few seconds, in a thread of its own, and hands alerts that start or end to the webhook."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgefl.config import AlertSettings
from edgefl.coordinator.fleet.presence import PRESENT, DeviceState
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.monitoring.alerts import AlertBook, Readings, conditions
from edgefl.coordinator.monitoring.webhook import Hook, WebhookSender
from edgefl.coordinator.runs.run_meter import FailedRun, RunMeter
from edgefl.protocol import EVALUATOR_NAME

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSources:
    """What is looked at.

    Attributes:
        fleet: its name.
        roster: the devices.
        meter: the runs.
        directory: of the coordinator; its disk is meant.
        is_broker_connected: whether the bus is up.
        expiries: certificate -> when it ends, in unix seconds.
        expected: devices that had said no goodbye when the coordinator last heard of them.
    """

    fleet: str
    roster: Roster
    meter: RunMeter
    directory: Path
    is_broker_connected: Callable[[], bool]
    expiries: Mapping[str, float]
    expected: frozenset[str] = frozenset()


class AlertWatch:
    """Runs from `start` to `stop`.

    Args:
        sources: what is looked at.
        settings: its webhook must be set.
        clock: unix seconds, for what is told.
        monotonic: for how long something lasts.
    """

    def __init__(
        self,
        sources: AlertSources,
        settings: AlertSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._settings = sources, settings
        self._clock, self._monotonic = clock, monotonic
        self._sender = WebhookSender(Hook(url=settings.webhook or "", secret=settings.secret))
        self._book = AlertBook()
        self._gone_since: dict[str, float] = {}
        self._lost_since: float | None = None
        self._failed: list[FailedRun] = []
        self._last_failure = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)

    def start(self) -> None:
        self._sender.start()
        self._thread.start()

    def stop(self) -> None:
        """Looks once more, so that the reason for an end is told too, and ends both threads."""
        self._stopping.set()
        self._thread.join()
        self._look()
        self._sender.stop()

    def _work(self) -> None:
        while not self._stopping.wait(self._settings.check_s):
            self._look()

    def _look(self) -> None:
        try:
            wrong = conditions(self._readings(), self._settings, self._book.active)
            for alert in self._book.update(wrong, self._clock()):
                body = alert.body(self._sources.fleet)
                log.warning("%s", body["text"])
                self._sender.send(body)
        except Exception:  # the boundary of the thread: what is wrong with one look must not silence the next
            log.exception("the alerts could not be looked at")

    def _readings(self) -> Readings:
        sources, now_s, now = self._sources, self._monotonic(), self._clock()
        free = {
            device_id: heartbeat.disk_free_bytes
            for device_id, heartbeat in sources.roster.heartbeats().items()
            # The coordinator's own evaluator has its disk.
            if heartbeat.disk_free_bytes is not None and device_id != EVALUATOR_NAME and self._is_there(device_id)
        }
        with contextlib.suppress(OSError):
            free[COORDINATOR] = shutil.disk_usage(sources.directory).free
        return Readings(
            gone_s=self._gone(now_s),
            run=sources.meter.active(),
            failed=self._failures(),
            disk_free_bytes=free,
            broker_lost_s=self._lost(now_s),
            certificate_left_s={name: at - now for name, at in sources.expiries.items()},
        )

    def _gone(self, now_s: float) -> dict[str, float]:
        """Returns for how long we have seen each device gone: presence counts from before the coordinator's start."""
        gone = {info.device_id for info in self._sources.roster.known() if self._is_missing(info.device_id)}
        self._gone_since = {device_id: self._gone_since.get(device_id, now_s) for device_id in sorted(gone)}
        return {device_id: now_s - since for device_id, since in self._gone_since.items()}

    def _is_there(self, device_id: str) -> bool:
        return self._sources.roster.state(device_id) in PRESENT

    def _is_missing(self, device_id: str) -> bool:
        state = self._sources.roster.state(device_id)
        return state is DeviceState.GONE or (state is None and device_id in self._sources.expected)

    def _failures(self) -> list[FailedRun]:
        """Returns the failed runs; each stays until a round of a later run has closed, but for one look at least."""
        meter = self._sources.meter
        new = meter.failed(after=self._last_failure)
        self._failed = [*(run for run in self._failed if run.num_rounds == meter.num_rounds), *new]
        self._last_failure = new[-1].number if new else self._last_failure
        return self._failed

    def _lost(self, now_s: float) -> float:
        if self._sources.is_broker_connected():
            self._lost_since = None
            return 0.0
        if self._lost_since is None:
            self._lost_since = now_s
        return now_s - self._lost_since
