"""What holds a Raspberry Pi back, now and since it was switched on: the bits that its firmware keeps.

The kernel shows them in a file. Where it does not, `vcgencmd` is asked, if the firmware's door /dev/vcio can be
opened at all (a hardened unit hides it); where that fails too, the voltage monitor tells of under-voltage alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from edgefl.device.board.board import Board
from edgefl.device.board.board_files import number

NOT_THROTTLED = "ok"
# The bits of the firmware's get_throttled that speak of now; 16 to 19 say the same of the time since it started.
THROTTLED_BITS = {0: "under-voltage", 1: "frequency-capped", 2: "throttled", 3: "soft-temperature-limit"}
SINCE_BOOT = 16
ALL_BITS = 0xFFFFF
VCGENCMD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttling:
    """`ok`, or what holds the board back (comma-separated); `since_boot` is None where only now is told."""

    now: str
    since_boot: str | None = None


def throttling(board: Board) -> Throttling | None:
    """Returns what holds the board back; None when it does not say."""
    bits = _bits_of_the_kernel(board)
    if bits is None:
        bits = _bits_of_vcgencmd(board)
    if bits is not None:
        return Throttling(now=_words(bits), since_boot=_words(bits >> SINCE_BOOT))
    for hwmon in board.hwmons("rpi_volt"):
        alarm = number(hwmon / "in0_lcrit_alarm")
        if alarm is not None:
            return Throttling(now=THROTTLED_BITS[0] if alarm else NOT_THROTTLED)
    return None


def _words(bits: int) -> str:
    return ",".join(name for bit, name in THROTTLED_BITS.items() if bits >> bit & 1) or NOT_THROTTLED


def _bits_of_the_kernel(board: Board) -> int | None:
    for path in board.paths("sys/devices/platform/soc*/**/get_throttled"):
        bits = _plausible(number(path, base=16))
        if bits is not None:
            return bits
    return None


def _bits_of_vcgencmd(board: Board) -> int | None:
    if not _can_open(board):
        return None
    told = board.program_output(["vcgencmd", "get_throttled"], VCGENCMD_S)
    match = re.fullmatch(r"throttled=0x([0-9a-fA-F]{1,8})", told or "")
    return _plausible(int(match[1], 16)) if match else None


def _can_open(board: Board) -> bool:
    try:
        os.close(os.open(board.root / "dev/vcio", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _plausible(bits: int | None) -> int | None:
    return bits if bits is not None and 0 <= bits <= ALL_BITS else None
