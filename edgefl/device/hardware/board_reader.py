"""Defensive reading of a board: files of /proc, /sys, the device tree and control groups, and vendors' programs.

Files may be missing, empty, damaged, huge, forbidden or asleep; then the result is None or empty. They lie below a
replaceable root. Programs have strict time limits.

With it are read the vendors' sensors: throttling of a Raspberry Pi, power, load and power mode of a Jetson, batteries
and supplies. Files come first. The fallback is the vendor's program: `nvpmodel -q` and one line of `tegrastats` of a
Jetson, and `vcgencmd` of a Raspberry Pi where its firmware device /dev/vcio can be opened (a hardened unit hides it);
where that fails too, the voltage monitor reports only under-voltage.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.system.processes import exit_with_parent

MAX_FILE_BYTES = 256 * 1024
MAX_TEXT_CHARS = 200
MAX_STRINGS = 16
MAX_DIGITS = 15
"""Maximum digits of a number; longer ones are implausible, and as kilobytes would not fit into 64 bits."""

MAX_OUTPUT_BYTES = 256 * 1024
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
"""Searched after PATH: units and logins of boards often lack the folders of the system's programs."""
RunProgram = Callable[[Sequence[str], float], str | None]
"""(arguments, seconds) -> the program's output; None where it is missing, failed or printed nothing in time."""
PATH_CACHE_S = 60.0
"""Interval of sensor searches: drivers may load late, and a search takes longer than all readings."""
OUTPUT_CACHE_S = 30.0
"""Minimum interval of program runs: heartbeats read the cached output."""

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


def read_text(path: Path) -> str | None:
    """Returns a file's text, stripped of blanks and NULs; None where empty."""
    try:
        # Opening a pipe in the place of a file would block.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES)
    except (OSError, ValueError):  # sysfs answers EAGAIN, EINVAL or ENODATA for a sensor that is asleep
        return None
    return raw.decode(errors="replace").strip("\0 \t\r\n") or None


def sanitise_text(value: str | None) -> str | None:
    """Returns the printable part of a text, truncated; None where empty."""
    printable = "".join(character for character in (value or "")[: 4 * MAX_TEXT_CHARS] if character.isprintable())
    return printable.strip()[:MAX_TEXT_CHARS] or None


def read_int(path: Path, *, base: int = 10) -> int | None:
    """Returns the integer in a file, or None."""
    return parse_int(read_text(path), base=base)


def parse_int(value: str | None, *, base: int = 10) -> int | None:
    """Returns the integer of a text, or None."""
    if value is None or not value.isascii() or len(value) > MAX_DIGITS:
        return None
    try:
        return int(value, base)
    except ValueError:
        return None


def read_strings(*paths: Path) -> list[str]:
    """Returns the NUL-terminated texts of a device-tree property, from the first file with any."""
    for path in paths:
        texts = [text for part in (read_text(path) or "").split("\0") if (text := sanitise_text(part))]
        if texts:
            return texts[:MAX_STRINGS]
    return []


def find_paths(root: Path, pattern: str) -> list[Path]:
    """Returns sorted matches of a pattern below a folder; unreadable folders are skipped."""
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def read_kilobytes(path: Path) -> dict[str, int]:
    """Returns the `Name:  123 kB` lines of a file of /proc, in kilobytes."""
    return dict(_parse_sizes(read_text(path) or ""))


def _parse_sizes(content: str) -> Iterator[tuple[str, int]]:
    for line in content.splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        size = parse_int(parts[0]) if len(parts) == 2 and parts[1] == "kB" else None
        if size is not None and size >= 0:
            yield name, size


def list_cgroups(root: Path) -> list[Path]:
    """Returns this process's cgroup (version 2) and its ancestors: the tightest limit of all holds."""
    match = re.search(r"^0::(/[\x20-\x7e]{0,500})$", read_text(root / "proc/self/cgroup") or "", re.MULTILINE)
    mount_point = root / "sys/fs/cgroup"
    cgroup = mount_point / match[1].lstrip("/") if match and ".." not in match[1] else mount_point
    return [cgroup, *[folder for folder in cgroup.parents if folder == mount_point or mount_point in folder.parents]]


def compute_memory_left_bytes(root: Path) -> int | None:
    """Returns the bytes left in the tightest cgroup of this process; None without a limit.

    A unit whose child is killed out of memory may be stopped as a whole. Reclaimable page cache does not count as
    used.
    """
    remaining = []
    for folder in list_cgroups(root):
        limit_bytes, used_bytes = read_int(folder / "memory.max"), read_int(folder / "memory.current")
        if limit_bytes is not None and used_bytes is not None:
            match = re.search(r"^inactive_file (\d+)$", read_text(folder / "memory.stat") or "", re.MULTILINE)
            reclaimable = (parse_int(match[1]) or 0) if match else 0
            remaining.append(max(0, limit_bytes - max(0, used_bytes - reclaimable)))
    return min(remaining, default=None)


def run_program(arguments: Sequence[str], timeout_s: float) -> str | None:
    """Returns a program's output within the time limit, even if it never ends.

    One that ends by itself must succeed. It runs without shell and input, and its children end with it.
    """
    path = shutil.which(arguments[0]) or shutil.which(arguments[0], path=SYSTEM_PATH)
    if path is None:
        return None
    try:
        process = subprocess.Popen(
            [path, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, ValueError):
        return None
    with process:
        assert process.stdout is not None
        try:
            raw, has_ended = _read_until(process.stdout, time.monotonic() + timeout_s)
            if has_ended and _wait_for_exit_code(process) != 0:
                return None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    return raw.decode(errors="replace").strip() or None


def no_program(_arguments: Sequence[str], _timeout_s: float) -> str | None:
    """Runs nothing; for callers that only read files."""
    return None


def _wait_for_exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Returns the exit code of a program that has closed its output; None when it lingers."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def _read_until(stream: IO[bytes], deadline_s: float) -> tuple[bytes, bool]:
    """Returns the output in time, and whether the program closed it by then."""
    raw = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(raw) < MAX_OUTPUT_BYTES and (remaining_s := deadline_s - time.monotonic()) > 0:
            if not selector.select(remaining_s):
                break
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return raw, True
            raw += chunk
    return raw, False


class BoardReader:
    """Board reader that caches sensor paths for a minute and program outputs for half a minute."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        run: RunProgram = run_program,
    ) -> None:
        self.root, self._clock, self._run = root, clock, run
        self._path_cache: dict[str, tuple[float, list[Path]]] = {}
        self._output_cache: dict[tuple[str, ...], tuple[float, str | None]] = {}

    def find_paths(self, pattern: str) -> list[Path]:
        """Returns sorted matches below the root, cached for a minute."""
        now_s = self._clock()
        cached = self._path_cache.get(pattern)
        if cached is None or now_s - cached[0] >= PATH_CACHE_S:
            cached = self._path_cache[pattern] = now_s, find_paths(self.root, pattern)
        return cached[1]

    def get_program_output(self, arguments: Sequence[str], timeout_s: float) -> str | None:
        """Returns the output of a board program, cached for half a minute."""
        now_s, key = self._clock(), tuple(arguments)
        cached = self._output_cache.get(key)
        if cached is None or now_s - cached[0] >= OUTPUT_CACHE_S:
            cached = self._output_cache[key] = now_s, self._run(arguments, timeout_s)
        return cached[1]

    def list_hwmons(self, name: str) -> list[Path]:
        """Returns the folders of the hardware monitors of that name."""
        return [path for path in self.find_paths("sys/class/hwmon/*") if read_text(path / "name") == name]

    def read_rails(self) -> Iterator[tuple[str, float]]:
        """Yields label and power in watts of each rail of a Jetson."""
        for hwmon in self.list_hwmons("ina3221"):
            for label_path in find_paths(hwmon, "in?_label"):
                channel, label = label_path.name[2], read_text(label_path)
                millivolts, milliamperes = (
                    read_int(hwmon / f"in{channel}_input"),
                    read_int(hwmon / f"curr{channel}_input"),
                )
                if label and label != "NC" and millivolts is not None and milliamperes is not None:
                    yield label, millivolts * milliamperes / 1e6


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
