"""Power supplies of a board: batteries and UPS (such as UPS HATs) known to the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.sysfs import read_int, read_text, sanitise_text

BATTERY_TYPES = ("Battery", "UPS")
EXTERNAL_TYPES = ("Mains", "USB", "Wireless")
MAX_SUPPLIES = 8


def read_battery_fraction(board: BoardReader) -> float | None:
    """Returns the charge of the board's own battery or UPS, not of peripherals."""
    for supply in _find_batteries(board):
        percent = read_int(supply / "capacity")
        if percent is not None:
            return min(1.0, max(0.0, percent / 100))
    return None


def list_supplies(board: BoardReader) -> list[Json] | None:
    """Returns name and kind of the power supplies; None without any."""
    supplies = [
        {"name": sanitise_text(path.name), "kind": sanitise_text(read_text(path / "type"))}
        for path in _find_supplies(board)
    ]
    return [entry for entry in supplies if entry["name"] and entry["kind"]][:MAX_SUPPLIES] or None


def read_supply_status(board: BoardReader) -> Json:
    """Returns varying values: charge, battery status, and whether external power is present."""
    battery = next(_find_batteries(board), None)
    online = [
        read_int(path / "online") for path in _find_supplies(board) if read_text(path / "type") in EXTERNAL_TYPES
    ]
    online_values = [value for value in online if value is not None]
    return {
        "battery_fraction": read_battery_fraction(board),
        "battery_status": sanitise_text(read_text(battery / "status")) if battery is not None else None,
        "on_mains": any(online_values) if online_values else None,
    }


def _find_supplies(board: BoardReader) -> Iterator[Path]:
    return (path for path in board.find_paths("sys/class/power_supply/*") if read_text(path / "scope") != "Device")


def _find_batteries(board: BoardReader) -> Iterator[Path]:
    return (path for path in _find_supplies(board) if read_text(path / "type") in BATTERY_TYPES)
