"""What a Jetson says beside what every board does: power mode, load of the GPU, power, and the CUDA on its disk.

Files come first. `nvpmodel -q` and one line of `tegrastats` are asked only for what no file told.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from edgefl.device.board.board import Board
from edgefl.device.board.board_files import number, plain, text
from edgefl.types import Json
from edgefl.untrusted import parse_json

TEGRASTATS_S = 2.5
"""The first line comes after one interval, of a second."""
NVPMODEL_S = 3.0
WHOLE_BOARD = ("VDD_IN", "VIN")
"""Rails that carry all the others: Orin Nano and NX, Thor. Where there is none, the rails add up."""
MAX_PLAUSIBLE_W = 1000.0
GPU_DEVICES = ("sys/class/devfreq/*.gpu", "sys/class/devfreq/*.gv11b", "sys/class/devfreq/gpu-gpc-*")


def power_mode(board: Board) -> str | None:
    """Returns the power mode of `nvpmodel` by name where its table is there, else by number."""
    match = re.search(r"pmode:(\d{1,4})", text(board.root / "var/lib/nvpmodel/status") or "")
    if match:
        return _mode_name(board.root, int(match[1])) or f"mode {int(match[1])}"
    told = board.program_output(["nvpmodel", "-q"], NVPMODEL_S)
    match = re.search(r"^NV Power Mode:\s*(\S+)", told or "", re.MULTILINE)
    return plain(match[1]) if match else None


def cuda_version(root: Path) -> str | None:
    """Returns the version of the CUDA tool kit on the disk."""
    told = text(root / "usr/local/cuda/version.json")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return plain(str(parse_json(told or "")["cuda"]["version"]))
    match = re.match(r"CUDA Version ([\d.]{1,20})", text(root / "usr/local/cuda/version.txt") or "")
    return match[1] if match else None


def gpu_load(board: Board) -> float | None:
    """Returns how busy the GPU is, in 0-1."""
    for pattern in GPU_DEVICES:
        for folder in board.paths(pattern):
            for path in (folder / "device/load", folder / "load"):
                permille = number(path)
                if permille is not None and 0 <= permille <= 1000:
                    return permille / 1000
    match = re.search(r"GR3D_FREQ (\d{1,3})%", _tegrastats(board) or "")
    return min(1.0, int(match[1]) / 100) if match else None


def power_w(board: Board) -> float | None:
    """Returns what the board draws; None where no monitor tells."""
    rails = dict(board.rails())
    for name in WHOLE_BOARD:
        if name in rails:
            return _plausible(rails[name])
    return _plausible(sum(rails.values())) if rails else None


def power_of_tegrastats(board: Board) -> float | None:
    """Returns what the board draws by `tegrastats`, for one whose monitors are not shown as files."""
    match = re.search(r"\b(?:VDD_IN|VIN) (\d{1,7})mW/", _tegrastats(board) or "")
    return _plausible(int(match[1]) / 1000) if match else None


def condition(board: Board) -> Json:
    """Returns what changes from moment to moment, for a look at the board; too slow for a heartbeat."""
    watts = power_w(board)
    return {"gpu_load": gpu_load(board), "power_w": power_of_tegrastats(board) if watts is None else watts}


def _tegrastats(board: Board) -> str | None:
    told = board.program_output(["tegrastats", "--interval", "1000"], TEGRASTATS_S)
    return told.splitlines()[0] if told else None


def _mode_name(root: Path, mode: int) -> str | None:
    for found in re.finditer(
        r"<\s*POWER_MODEL\s+ID=(\d{1,4})\s+NAME=(\S+)\s*>", text(root / "etc/nvpmodel.conf") or ""
    ):
        if int(found[1]) == mode:
            return plain(found[2])
    return None


def _plausible(watts: float) -> float | None:
    return watts if 0 <= watts <= MAX_PLAUSIBLE_W else None
