"""Jetson-specific values: power mode, GPU load, power, and installed CUDA version.

Files come first; `nvpmodel -q` and one line of `tegrastats` are the fallback.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.sysfs import read_int, read_text, sanitise_text

TEGRASTATS_S = 2.5
"""The first line comes after one interval, of a second."""
NVPMODEL_S = 3.0
TOTAL_POWER_RAILS = ("VDD_IN", "VIN")
"""Rails that carry all the others: Orin Nano and NX, Thor. Where there is none, the rails add up."""
MAX_PLAUSIBLE_W = 1000.0
GPU_DEVICES = ("sys/class/devfreq/*.gpu", "sys/class/devfreq/*.gv11b", "sys/class/devfreq/gpu-gpc-*")


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
