"""Start options of a coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.core.config import AlertSettings, CoordinatorSettings

_DEFAULTS = CoordinatorSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options of `edgefl coordinator start`."""

    host: str = _DEFAULTS.host
    port: int = _DEFAULTS.port
    broker: str = _DEFAULTS.broker
    broker_port: int = _DEFAULTS.broker_port
    test_shards: Mapping[str, Path] = field(default_factory=dict)
    heartbeat_s: float = _DEFAULTS.heartbeat_s
    device_metrics: int = _DEFAULTS.device_metrics
    alerts: AlertSettings | None = None  # None for those of the directory
    keep_history_days: float | None = _DEFAULTS.keep_history_days

    @property
    def has_external_broker(self) -> bool:
        return self.broker.startswith("mqtts://")
