"""Heartbeat publisher with its own thread, so that a training board stays visible."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from edgefl.core.protocol import HEARTBEAT_JITTER, HEARTBEAT_S, Heartbeat
from edgefl.core.types import Json, derive_rng
from edgefl.device.hardware.health import HealthReading

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """Current activity of the device; it still keeps the finished updates of the assignments `holding`."""

    run: str | None = None
    assignment: str | None = None
    iteration: int | None = None
    holding: list[str] = field(default_factory=list)
    clock_skew_s: float | None = None
    model: str | None = None
    deployment: Json | None = None
    installation: Json | None = None


class HeartbeatPublisher:
    """Publisher of a heartbeat every `interval_s`, with jitter, from `start` to `stop`.

    Args:
        publish: sends one heartbeat, such as `MqttConnection.publish_heartbeat`, which also fills in the session
            number.
        read_health: reads the board, such as `HealthReader.read`.
        get_activity: returns the current activity; must not wait for the trainer.
        seed: of the jitter that spreads a fleet's heartbeats, such as the device id.
    """

    def __init__(
        self,
        publish: Callable[[Heartbeat], bool],
        read_health: Callable[[], HealthReading],
        get_activity: Callable[[], DeviceActivity] = DeviceActivity,
        *,
        interval_s: float = HEARTBEAT_S,
        seed: str = "",
    ) -> None:
        self._publish = publish
        self._read_health = read_health
        self._get_activity = get_activity
        self._interval_s = interval_s
        self._rng = derive_rng("heartbeat", seed)
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

    def publish_now(self) -> None:
        """Publishes the next heartbeat at once, after a connect for instance."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._publish_once()
            jitter = self._rng.uniform(-HEARTBEAT_JITTER, HEARTBEAT_JITTER)
            self._wake.wait(self._interval_s * (1 + jitter))
            self._wake.clear()

    def _publish_once(self) -> None:
        try:
            self._publish(self._make_heartbeat())
        except Exception:
            # The boundary of the thread: a failed reading must not make the whole board look dead.
            log.exception("a heartbeat was lost")

    def _make_heartbeat(self) -> Heartbeat:
        self._seq += 1
        return Heartbeat(seq=self._seq, session_no=0, **asdict(self._read_health()), **asdict(self._get_activity()))
