"""Throttling of a Raspberry Pi, now and since boot, from its firmware's status bits.

The kernel exports them in a file. Otherwise `vcgencmd` is run, if the firmware device /dev/vcio can be opened (a
hardened unit hides it); where that fails too, the voltage monitor reports only under-voltage.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.sysfs import read_int

NOT_THROTTLED = "ok"
# Bits of the firmware's get_throttled for the present; 16 to 19 are the same for the time since boot.
THROTTLED_BITS = {0: "under-voltage", 1: "frequency-capped", 2: "throttled", 3: "soft-temperature-limit"}
SINCE_BOOT_SHIFT = 16
ALL_BITS = 0xFFFFF
VCGENCMD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleStatus:
    """Throttle status: `ok` or the reasons (comma-separated); `since_boot` is None when unknown."""

    now: str
    since_boot: str | None = None


def read_throttle_status(board: BoardReader) -> ThrottleStatus | None:
    """Returns the throttle status; None when unknown."""
    bits = _read_kernel_bits(board)
    if bits is None:
        bits = _read_vcgencmd_bits(board)
    if bits is not None:
        return ThrottleStatus(now=_format_bits(bits), since_boot=_format_bits(bits >> SINCE_BOOT_SHIFT))
    for hwmon in board.list_hwmons("rpi_volt"):
        is_alarm = read_int(hwmon / "in0_lcrit_alarm")
        if is_alarm is not None:
            return ThrottleStatus(now=THROTTLED_BITS[0] if is_alarm else NOT_THROTTLED)
    return None


def _format_bits(bits: int) -> str:
    return ",".join(name for bit, name in THROTTLED_BITS.items() if bits >> bit & 1) or NOT_THROTTLED


def _read_kernel_bits(board: BoardReader) -> int | None:
    for path in board.find_paths("sys/devices/platform/soc*/**/get_throttled"):
        bits = _validate_bits(read_int(path, base=16))
        if bits is not None:
            return bits
    return None


def _read_vcgencmd_bits(board: BoardReader) -> int | None:
    if not _can_open_vcio(board):
        return None
    output = board.get_program_output(["vcgencmd", "get_throttled"], VCGENCMD_S)
    match = re.fullmatch(r"throttled=0x([0-9a-fA-F]{1,8})", output or "")
    return _validate_bits(int(match[1], 16)) if match else None


def _can_open_vcio(board: BoardReader) -> bool:
    try:
        os.close(os.open(board.root / "dev/vcio", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _validate_bits(bits: int | None) -> int | None:
    return bits if bits is not None and 0 <= bits <= ALL_BITS else None
