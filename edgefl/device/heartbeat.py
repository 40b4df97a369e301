"""Beats every few seconds in a thread of its own, so that a board is heard while it trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.device.board.vitals import VitalSigns
from edgefl.protocol import HEARTBEAT_JITTER, HEARTBEAT_S, Heartbeat
from edgefl.types import Json, derived_rng

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the device is at. `holding` are the assignments whose finished updates it still keeps."""

    run: str | None = None
    assignment: str | None = None
    iteration: int | None = None
    holding: tuple[str, ...] = ()
    clock_skew_s: float | None = None
    model: str | None = None
    deployment: Json | None = None
    installation: Json | None = None


class Heart:
    """Publishes a heartbeat every `interval_s`, give or take the jitter, from `start` to `stop`.

    Args:
        publish: sends one heartbeat, such as `Link.publish_heartbeat`, which also fills in the session number.
        vitals: reads the board, such as `Vitals.read`.
        activity: says what the device is at; must not wait for the trainer.
        seed: spreads the beats of a fleet; the device id will do.
    """

    def __init__(
        self,
        publish: Callable[[Heartbeat], bool],
        vitals: Callable[[], VitalSigns],
        activity: Callable[[], Activity] = Activity,
        *,
        interval_s: float = HEARTBEAT_S,
        seed: str = "",
    ) -> None:
        self._publish = publish
        self._vitals = vitals
        self._activity = activity
        self._interval_s = interval_s
        self._rng = derived_rng("heartbeat", seed)
        self._seq = 0
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None

    def beat_now(self) -> None:
        """Brings the next heartbeat forward, after a connect for instance."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._beat()
            jitter = self._rng.uniform(-HEARTBEAT_JITTER, HEARTBEAT_JITTER)
            self._wake.wait(self._interval_s * (1 + jitter))
            self._wake.clear()

    def _beat(self) -> None:
        try:
            self._publish(self._heartbeat())
        except Exception:
            # The boundary of the thread: a reading that fails must not make the whole board look dead.
            log.exception("a heartbeat was lost")

    def _heartbeat(self) -> Heartbeat:
        self._seq += 1
        signs, activity = self._vitals(), self._activity()
        return Heartbeat(
            seq=self._seq,
            session_no=0,
            uptime_s=signs.uptime_s,
            clock_skew_s=activity.clock_skew_s,
            temperature_c=signs.temperature_c,
            throttled=signs.throttled,
            cpu_fraction=signs.cpu_fraction,
            memory_fraction=signs.memory_fraction,
            memory_bytes=signs.memory_bytes,
            disk_free_bytes=signs.disk_free_bytes,
            battery_fraction=signs.battery_fraction,
            power_w=signs.power_w,
            run=activity.run,
            assignment=activity.assignment,
            iteration=activity.iteration,
            holding=list(activity.holding),
            model=activity.model,
            deployment=activity.deployment,
            installation=activity.installation,
        )
