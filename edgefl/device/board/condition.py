"""How the board is at this moment, as far as somebody who looks at it wants to know; heartbeats tell a part of it."""

from __future__ import annotations

from edgefl.device.board import jetson, supplies
from edgefl.device.board.board import Board
from edgefl.device.board.throttling import throttling
from edgefl.device.board.vitals import temperature_c
from edgefl.types import Json


def condition(board: Board, *, is_jetson: bool) -> Json:
    """Returns temperature, throttling, GPU load, power and supply; what the board does not say is missing."""
    held = throttling(board)
    told = {
        "temperature_c": temperature_c(board),
        "throttled": held.now if held else None,
        "throttled_since_boot": held.since_boot if held else None,
        "power_w": jetson.power_w(board),
        **supplies.condition(board),
        **(jetson.condition(board) if is_jetson else {}),
    }
    return {name: value for name, value in told.items() if value is not None}
