"""Current board status for display; heartbeats contain a part of it."""

from __future__ import annotations

from edgefl.core.types import Json
from edgefl.device.hardware import jetson, power
from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.health import read_temperature_c
from edgefl.device.hardware.throttling import read_throttle_status


def read_board_status(board: BoardReader, *, is_jetson: bool) -> Json:
    """Returns temperature, throttling, GPU load, power and supply; unknown values are missing."""
    throttle_status = read_throttle_status(board)
    values = {
        "temperature_c": read_temperature_c(board),
        "throttled": throttle_status.now if throttle_status else None,
        "throttled_since_boot": throttle_status.since_boot if throttle_status else None,
        "power_w": jetson.read_power_w(board),
        **power.read_supply_status(board),
        **(jetson.read_jetson_status(board) if is_jetson else {}),
    }
    return {name: value for name, value in values.items() if value is not None}
