"""What feeds a board: batteries and uninterruptible supplies that the kernel knows, such as UPS HATs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgefl.device.board.board import Board
from edgefl.device.board.board_files import number, plain, text
from edgefl.types import Json

CHARGED = ("Battery", "UPS")
OUTSIDE = ("Mains", "USB", "Wireless")
MAX_SUPPLIES = 8


def battery_fraction(board: Board) -> float | None:
    """Returns the charge of the board's own battery or UPS, not that of a mouse."""
    for supply in _charged(board):
        percent = number(supply / "capacity")
        if percent is not None:
            return min(1.0, max(0.0, percent / 100))
    return None


def supplies(board: Board) -> list[Json] | None:
    """Returns name and kind of what feeds the board; None where the kernel knows of nothing."""
    found = [{"name": plain(path.name), "kind": plain(text(path / "type"))} for path in _own(board)]
    return [entry for entry in found if entry["name"] and entry["kind"]][:MAX_SUPPLIES] or None


def condition(board: Board) -> Json:
    """Returns what changes: charge, what the battery does, and whether power comes from outside."""
    charged = next(_charged(board), None)
    online = [number(path / "online") for path in _own(board) if text(path / "type") in OUTSIDE]
    known = [value for value in online if value is not None]
    return {
        "battery_fraction": battery_fraction(board),
        "battery_status": plain(text(charged / "status")) if charged is not None else None,
        "on_mains": any(known) if known else None,
    }


def _own(board: Board) -> Iterator[Path]:
    return (path for path in board.paths("sys/class/power_supply/*") if text(path / "scope") != "Device")


def _charged(board: Board) -> Iterator[Path]:
    return (path for path in _own(board) if text(path / "type") in CHARGED)
