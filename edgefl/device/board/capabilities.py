"""What kind of board this is, read from files that every Linux has; a vendor's tool is asked for what none told.

All paths hang off a root, so that a test can build any board. What a board does not say is missing from the result.
Serial numbers leave it only as hashes, addresses not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgefl import DISTRIBUTION
from edgefl.device.board.board import Board
from edgefl.device.board.board_files import below, kilobytes, number, plain, strings, text, whole
from edgefl.device.board.cgroups import cgroups
from edgefl.device.board.jetson import cuda_version, power_mode
from edgefl.device.board.programs import RunProgram, run_program
from edgefl.device.board.soc import clusters, core_name, soc_name
from edgefl.device.board.supplies import supplies
from edgefl.device.board.throttling import throttling
from edgefl.types import Json

LIBRARIES = (DISTRIBUTION, "flwr", "numpy", "torch", "onnxruntime", "paho-mqtt", "cryptography", "scikit-learn")
JETPACK = (
    ("36.3", "6.0"),
    ("36.4.0", "6.1"),
    ("36.4.3", "6.2"),
    ("36.4", "6.2.1"),
    ("36.5", "6.2.2"),
    ("38.2", "7.0"),
    ("38.4", "7.1"),
    ("39.2", "7.2"),
)
"""L4T prefix and JetPack: the first that fits."""
COMPUTE_CAPABILITY = {"nvidia,tegra194": "7.2", "nvidia,tegra234": "8.7", "nvidia,tegra264": "11.0"}
# What decides which wheels run and how fast: LSE atomics, half precision, dot products, matrix and vector units.
ARM_ISA = frozenset({"atomics", "asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "neon"})
X86_ISA = frozenset({"avx", "avx2", "avx512f", "avx_vnni", "amx_tile", "fma"})
UNLIMITED = 1 << 60
MAX_LISTED = 16
"""Cards and links beyond this many are no board's."""


def probe(root: Path = Path("/"), *, run: RunProgram = run_program) -> Json:
    """Returns what can be known about this board, flat, for the `capabilities` topic and `edgefl device probe`.

    What changes from moment to moment is left to the heartbeat and to `condition`.
    """
    compatible = _property(root, "compatible")
    board = Board(root, run=run)
    held = throttling(board)
    facts = {
        "model": _model(root),
        "compatible": compatible or None,
        "family": family(compatible),
        "soc": soc_name(root, compatible),
        "serial_hash": board_hash(root),
        **_jetson(board, compatible),
        **_cpu(root),
        **_memory(root),
        "accelerators": _accelerators(root, compatible),
        **_software(root),
        "has_rtc": bool(below(root, "sys/class/rtc/rtc*")),
        "clock_synchronised": (root / "run/systemd/timesync/synchronized").exists() or None,
        **_disk(root),
        "network": _network(root),
        "power_supplies": supplies(board),
        "throttled_since_boot": held.since_boot if held else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _model(root: Path) -> str | None:
    found = _property(root, "model")
    if found:
        return found[0]
    if match := re.search(r"^Model\s*:\s*(.+)$", text(root / "proc/cpuinfo") or "", re.MULTILINE):
        return plain(match[1])
    dmi = [plain(text(root / "sys/class/dmi/id" / name)) for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in dmi if part) or None


def family(compatible: Sequence[str]) -> str:
    """Returns raspberry-pi, jetson, another board, or a pc, by the names in its device tree."""
    for vendor, family in (("raspberrypi,", "raspberry-pi"), ("nvidia,", "jetson")):
        if any(name.startswith(vendor) for name in compatible):
            return family
    return "board" if compatible else "pc"


def board_hash(root: Path = Path("/")) -> str | None:
    """Returns what tells boards apart, 16 hexadecimal digits: a hash of the serial number, else of the machine id."""
    serial = _property(root, "serial-number")
    identity = serial[0] if serial else text(root / "etc/machine-id")
    return hashlib.sha256(f"edgefl board {identity}".encode()).hexdigest()[:16] if identity else None


def _jetson(board: Board, compatible: Sequence[str]) -> Json:
    if family(compatible) != "jetson":
        return {"cuda": cuda_version(board.root)}
    own: Json = {"power_mode": power_mode(board), "cuda": cuda_version(board.root)}
    match = re.match(
        r"# R(\d{1,3}) \(release\), REVISION: ([\d.]{1,20})", text(board.root / "etc/nv_tegra_release") or ""
    )
    if not match:
        return own
    l4t = f"{match[1]}.{match[2]}"
    fits = (pack for prefix, pack in JETPACK if l4t == prefix or l4t.startswith(f"{prefix}."))
    return {
        **own,
        "l4t": l4t,
        "jetpack": next(fits, None),
        "compute_capability": next((COMPUTE_CAPABILITY[c] for c in compatible if c in COMPUTE_CAPABILITY), None),
    }


def _cpu(root: Path) -> Json:
    cpuinfo = text(root / "proc/cpuinfo") or ""
    features = re.search(r"^(?:Features|flags)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    isa = set(features[1].split()) if features else set()
    part = re.search(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", cpuinfo, re.MULTILINE)
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    max_khz = number(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    is_arm = bool(part)
    return {
        "architecture": platform.machine(),
        # ARM kernels name the core by its number; some name only the family beside it.
        "cpu": core_name(part[1]) if part else (plain(name[1]) if name else None),
        "cores": _cores(root, cpuinfo),
        "clusters": clusters(root, cpuinfo),
        "cpu_quota": _cpu_quota(root),
        "cpu_max_mhz": max_khz // 1000 if max_khz else None,
        "isa": sorted(isa & (ARM_ISA | X86_ISA)) or None,
        "atomics": "atomics" in isa if is_arm else None,
        "userland_bits": struct.calcsize("P") * 8,
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
    }


def _cores(root: Path, cpuinfo: str) -> int | None:
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None


def _cpu_quota(root: Path) -> float | None:
    """The cores' worth of time that the control group grants; None without a limit."""
    quotas = []
    for folder in cgroups(root):
        parts = [whole(part) for part in (text(folder / "cpu.max") or "").split()]
        if len(parts) == 2 and parts[0] and parts[1] and min(parts[0], parts[1]) > 0:
            quotas.append(parts[0] / parts[1])
    return round(min(quotas), 2) if quotas else None


def _memory(root: Path) -> Json:
    kilo = kilobytes(root / "proc/meminfo").get("MemTotal")
    total = kilo * 1024 if kilo else None
    limits = [number(folder / "memory.max") for folder in cgroups(root)]
    limits.append(number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    numbers = [limit for limit in limits if limit is not None and 0 < limit < UNLIMITED]
    usable = min([*numbers, *([total] if total else [])], default=None)
    # Raspberry Pi kernels may boot without the memory controller; limits in a unit file are then inert.
    controllers = (text(root / "sys/fs/cgroup/cgroup.controllers") or "").split()
    return {
        "memory_bytes": usable,
        "memory_total_bytes": total,
        "memory_cgroup": "memory" in controllers if controllers else None,
    }


def _accelerators(root: Path, compatible: Sequence[str]) -> list[Json]:
    version = re.search(
        r"(?:Kernel Module|Module for \S+)\s+([\d.]{1,30})", text(root / "proc/driver/nvidia/version") or ""
    )
    driver = {"driver": version[1]} if version else {}
    cards = below(root, "proc/driver/nvidia/gpus/*/information")[:MAX_LISTED]
    models = [re.search(r"^Model:\s*(.+)$", text(card) or "", re.MULTILINE) for card in cards]
    names = [(plain(match[1]) if match else None) or "NVIDIA GPU" for match in models]
    found: list[Json] = [{"kind": "cuda", "name": name, **driver} for name in names]
    tegra = next((name for name in compatible if name in COMPUTE_CAPABILITY), None)
    if tegra and not found:
        found.append({"kind": "cuda", "name": tegra.partition(",")[2], **driver})
    return found


def _software(root: Path) -> Json:
    libraries = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', text(root / "etc/os-release") or "", re.MULTILINE)
    return {
        "python": platform.python_version(),
        "libraries": libraries,
        "os": plain(release[1]) if release else None,
        "kernel": plain(text(root / "proc/sys/kernel/osrelease")),
    }


def _disk(root: Path) -> Json:
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return {}
    return {"disk_total_bytes": usage.total, "disk_free_bytes": usage.free}


def _network(root: Path) -> list[Json]:
    """Name, state, speed and kind of every link that has hardware; no addresses."""
    links: list[Json] = []
    for folder in below(root, "sys/class/net/*")[: 4 * MAX_LISTED]:
        if folder.name == "lo" or not (folder / "device").exists():
            continue
        speed = number(folder / "speed")  # -1, or an error, when the link is down or wireless
        link: dict[str, Any] = {"name": plain(folder.name), "state": plain(text(folder / "operstate"))}
        link["wireless"] = (folder / "wireless").exists()
        link["speed_mbit"] = speed if speed is not None and speed > 0 else None
        links.append({key: value for key, value in link.items() if value is not None})
    return links[:MAX_LISTED]


def _property(root: Path, name: str) -> list[str]:
    """The texts of a device-tree property, wherever the tree hangs."""
    return strings(root / "proc/device-tree" / name, root / "sys/firmware/devicetree/base" / name)
