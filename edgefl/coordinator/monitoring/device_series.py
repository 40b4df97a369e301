"""The series of single devices in `/metrics`, written by hand: the library takes 40 ms for a thousand of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgefl.coordinator.fleet.presence import PRESENT
from edgefl.coordinator.fleet.roster import Roster
from edgefl.protocol import Heartbeat

PREFIX = "edgefl_device_"

_VITALS: Mapping[str, tuple[str, Callable[[Heartbeat], float | None]]] = {
    "temperature_celsius": ("Of its processor.", lambda h: h.temperature_c),
    "throttled": (
        "1 while the board is throttled.",
        lambda h: None if h.throttled is None else float(h.throttled != "ok"),
    ),
    "battery_ratio": ("Charge, 0 to 1.", lambda h: h.battery_fraction),
    "power_watts": ("What the board draws.", lambda h: h.power_w),
}


def device_series(roster: Roster, *, max_devices: int, now: float) -> str:
    """Returns the text of all series with the label `device`; nothing for a fleet of more than `max_devices`.

    Device ids need no escaping: they are slugs.

    Args:
        roster: the devices.
        max_devices: how many may have series.
        now: unix seconds.
    """
    rows = roster.facts()
    if len(rows) > max_devices:
        return ""
    heartbeats = roster.heartbeats()
    parts = [
        _family(
            "present", "1 while the device is there.", {r["device_id"]: int(r["presence"] in PRESENT) for r in rows}
        ),
        _family(
            "last_seen_timestamp_seconds",
            "Last sign of life.",
            {r["device_id"]: round(now - r["silent_s"], 1) for r in rows if r["silent_s"] is not None},
        ),
    ]
    for name, (text, read) in _VITALS.items():
        values = {device_id: read(heartbeat) for device_id, heartbeat in heartbeats.items()}
        parts.append(
            _family(name, text, {device_id: value for device_id, value in values.items() if value is not None})
        )
    return "".join(parts)


def _family(name: str, text: str, values: Mapping[str, float]) -> str:
    full = PREFIX + name
    lines = [f'{full}{{device="{device_id}"}} {value!r}\n' for device_id, value in values.items()]
    return f"# HELP {full} {text}\n# TYPE {full} gauge\n{''.join(lines)}" if lines else ""
