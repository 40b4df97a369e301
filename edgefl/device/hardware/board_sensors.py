"""Vendors' sensors: throttling of a Raspberry Pi, power, load and power mode of a Jetson, batteries and supplies.

Files come first. The fallback is the vendor's program: `nvpmodel -q` and one line of `tegrastats` of a Jetson, and
`vcgencmd` of a Raspberry Pi where its firmware device /dev/vcio can be opened (a hardened unit hides it); where that
fails too, the voltage monitor reports only under-voltage.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import BoardReader, read_int, read_text, sanitise_text

NOT_THROTTLED = "ok"
# Bits of the firmware's get_throttled for the present; 16 to 19 are the same for the time since boot.
THROTTLED_BITS = {0: "under-voltage", 1: "frequency-capped", 2: "throttled", 3: "soft-temperature-limit"}
SINCE_BOOT_SHIFT = 16
ALL_BITS = 0xFFFFF
VCGENCMD_S = 2.0

TEGRASTATS_S = 2.5
"""The first line comes after one interval, of a second."""
NVPMODEL_S = 3.0
TOTAL_POWER_RAILS = ("VDD_IN", "VIN")
"""Rails that carry all the others: Orin Nano and NX, Thor. Where there is none, the rails add up."""
MAX_PLAUSIBLE_W = 1000.0
GPU_DEVICES = ("sys/class/devfreq/*.gpu", "sys/class/devfreq/*.gv11b", "sys/class/devfreq/gpu-gpc-*")
BATTERY_TYPES = ("Battery", "UPS")
EXTERNAL_TYPES = ("Mains", "USB", "Wireless")
MAX_SUPPLIES = 8


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


def read_power_mode(board: BoardReader) -> str | None:
    """Returns the power mode of `nvpmodel` by name where its table exists, else by number."""
    match = re.search(r"pmode:(\d{1,4})", read_text(board.root / "var/lib/nvpmodel/status") or "")
    if match:
        return _find_mode_name(board.root, int(match[1])) or f"mode {int(match[1])}"
    output = board.get_program_output(["nvpmodel", "-q"], NVPMODEL_S)
    match = re.search(r"^NV Power Mode:\s*(\S+)", output or "", re.MULTILINE)
    return sanitise_text(match[1]) if match else None


def read_cuda_version(root: Path) -> str | None:
    """Returns the version of the installed CUDA toolkit."""
    version_json = read_text(root / "usr/local/cuda/version.json")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return sanitise_text(str(parse_json(version_json or "")["cuda"]["version"]))
    match = re.match(r"CUDA Version ([\d.]{1,20})", read_text(root / "usr/local/cuda/version.txt") or "")
    return match[1] if match else None


def read_gpu_load(board: BoardReader) -> float | None:
    """Returns the GPU load, in 0-1."""
    for pattern in GPU_DEVICES:
        for folder in board.find_paths(pattern):
            for path in (folder / "device/load", folder / "load"):
                permille = read_int(path)
                if permille is not None and 0 <= permille <= 1000:
                    return permille / 1000
    match = re.search(r"GR3D_FREQ (\d{1,3})%", _read_tegrastats(board) or "")
    return min(1.0, int(match[1]) / 100) if match else None


def read_power_w(board: BoardReader) -> float | None:
    """Returns the board's power in watts; None without a monitor."""
    rails = dict(board.read_rails())
    for name in TOTAL_POWER_RAILS:
        if name in rails:
            return _validate_power(rails[name])
    return _validate_power(sum(rails.values())) if rails else None


def read_tegrastats_power_w(board: BoardReader) -> float | None:
    """Returns the board's power in watts by `tegrastats`, for boards without monitor files."""
    match = re.search(r"\b(?:VDD_IN|VIN) (\d{1,7})mW/", _read_tegrastats(board) or "")
    return _validate_power(int(match[1]) / 1000) if match else None


def read_jetson_status(board: BoardReader) -> Json:
    """Returns varying values for the board status; too slow for a heartbeat."""
    watts = read_power_w(board)
    return {"gpu_load": read_gpu_load(board), "power_w": read_tegrastats_power_w(board) if watts is None else watts}


def _read_tegrastats(board: BoardReader) -> str | None:
    output = board.get_program_output(["tegrastats", "--interval", "1000"], TEGRASTATS_S)
    return output.splitlines()[0] if output else None


def _find_mode_name(root: Path, mode: int) -> str | None:
    for match in re.finditer(
        r"<\s*POWER_MODEL\s+ID=(\d{1,4})\s+NAME=(\S+)\s*>", read_text(root / "etc/nvpmodel.conf") or ""
    ):
        if int(match[1]) == mode:
            return sanitise_text(match[2])
    return None


def _validate_power(watts: float) -> float | None:
    return watts if 0 <= watts <= MAX_PLAUSIBLE_W else None


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
