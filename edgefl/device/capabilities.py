"""What kind of board this is, read from files that every Linux has; no vendor's tool is run.

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
from pathlib import Path
from typing import Any

from edgefl.types import Json

LIBRARIES = ("edgefl", "flwr", "numpy", "torch", "onnxruntime", "paho-mqtt", "cryptography", "scikit-learn")
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
ARM_CORES = {
    "0xd03": "Cortex-A53",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd42": "Cortex-A78AE",
    "0xd83": "Neoverse-V3AE",
}
# What decides which wheels run and how fast: LSE atomics, half precision, dot products, matrix and vector units.
ARM_ISA = frozenset({"atomics", "asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "neon"})
X86_ISA = frozenset({"avx", "avx2", "avx512f", "avx_vnni", "amx_tile", "fma"})
UNLIMITED = 1 << 60


def probe(root: Path = Path("/")) -> Json:
    """Returns what can be known about this board, flat, for the `capabilities` topic and `edgefl device probe`."""
    compatible = _strings(root, "proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible")
    facts = {
        "model": _model(root),
        "compatible": compatible or None,
        "family": _family(compatible),
        "serial_hash": _serial_hash(root),
        **_jetson(root, compatible),
        **_cpu(root),
        **_memory(root),
        "accelerators": _accelerators(root, compatible),
        **_software(root),
        "has_rtc": any((root / "sys/class/rtc").glob("rtc*")),
        "clock_synchronised": (root / "run/systemd/timesync/synchronized").exists() or None,
        **_disk(root),
        "network": _network(root),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _model(root: Path) -> str | None:
    found = _strings(root, "proc/device-tree/model", "sys/firmware/devicetree/base/model")
    if found:
        return found[0]
    if match := re.search(r"^Model\s*:\s*(.+)$", _text(root, "proc/cpuinfo") or "", re.MULTILINE):
        return match[1].strip()
    dmi = [_text(root, f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in dmi if part) or None


def _family(compatible: list[str]) -> str:
    for vendor, family in (("raspberrypi,", "raspberry-pi"), ("nvidia,", "jetson")):
        if any(name.startswith(vendor) for name in compatible):
            return family
    return "board" if compatible else "pc"


def _serial_hash(root: Path) -> str | None:
    serial = _strings(root, "proc/device-tree/serial-number", "sys/firmware/devicetree/base/serial-number")
    identity = serial[0] if serial else _text(root, "etc/machine-id")
    return hashlib.sha256(f"edgefl board {identity}".encode()).hexdigest()[:16] if identity else None


def _jetson(root: Path, compatible: list[str]) -> Json:
    match = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", _text(root, "etc/nv_tegra_release") or "")
    if not match:
        return {}
    l4t = f"{match[1]}.{match[2]}"
    fits = (pack for prefix, pack in JETPACK if l4t == prefix or l4t.startswith(f"{prefix}."))
    return {
        "l4t": l4t,
        "jetpack": next(fits, None),
        "compute_capability": next((COMPUTE_CAPABILITY[c] for c in compatible if c in COMPUTE_CAPABILITY), None),
    }


def _cpu(root: Path) -> Json:
    text = _text(root, "proc/cpuinfo") or ""
    features = re.search(r"^(?:Features|flags)\s*:\s*(.*)$", text, re.MULTILINE)
    isa = set(features[1].split()) if features else set()
    part = re.search(r"^CPU part\s*:\s*(\S+)$", text, re.MULTILINE)
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    max_khz = _number(root, "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    is_arm = bool(part)
    return {
        "architecture": platform.machine(),
        "cpu": name[1] if name else (ARM_CORES.get(part[1], part[1]) if part else None),
        "cores": _cores(root, text),
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
    for folder in _cgroups(root):
        parts = (_read(folder / "cpu.max") or "").split()
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit() and int(parts[1]):
            quotas.append(int(parts[0]) / int(parts[1]))
    return round(min(quotas), 2) if quotas else None


def _memory(root: Path) -> Json:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root, "proc/meminfo") or "", re.MULTILINE)
    total = int(match[1]) * 1024 if match else None
    limits = [_read(folder / "memory.max") for folder in _cgroups(root)]
    limits.append(_text(root, "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    numbers = [int(limit) for limit in limits if limit and limit.isdigit() and int(limit) < UNLIMITED]
    usable = min([*numbers, *([total] if total else [])], default=None)
    # Raspberry Pi kernels may boot without the memory controller; limits in a unit file are then inert.
    controllers = (_text(root, "sys/fs/cgroup/cgroup.controllers") or "").split()
    return {
        "memory_bytes": usable,
        "memory_total_bytes": total,
        "memory_cgroup": "memory" in controllers if controllers else None,
    }


def _cgroups(root: Path) -> list[Path]:
    """This process's control group (version 2) and those around it: the tightest limit of all holds."""
    match = re.search(r"^0::(/.*)$", _text(root, "proc/self/cgroup") or "", re.MULTILINE)
    top = root / "sys/fs/cgroup"
    own = top / match[1].lstrip("/") if match and ".." not in match[1] else top
    return [own, *[folder for folder in own.parents if folder == top or top in folder.parents]]


def _accelerators(root: Path, compatible: list[str]) -> list[Json]:
    version = re.search(
        r"(?:Kernel Module|Module for \S+)\s+([\d.]+)", _text(root, "proc/driver/nvidia/version") or ""
    )
    driver = {"driver": version[1]} if version else {}
    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"^Model:\s*(.+)$", _read(card) or "", re.MULTILINE) for card in cards]
    found: list[Json] = [{"kind": "cuda", "name": m[1].strip() if m else "NVIDIA GPU", **driver} for m in models]
    tegra = next((name for name in compatible if name in COMPUTE_CAPABILITY), None)
    if tegra and not found:
        found.append({"kind": "cuda", "name": tegra.partition(",")[2], **driver})
    return found


def _software(root: Path) -> Json:
    libraries = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', _text(root, "etc/os-release") or "", re.MULTILINE)
    return {
        "python": platform.python_version(),
        "libraries": libraries,
        "os": release[1] if release else None,
        "kernel": _text(root, "proc/sys/kernel/osrelease"),
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
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or not (folder / "device").exists():
            continue
        speed = _read(folder / "speed")  # -1, or an error, when the link is down or wireless
        link: dict[str, Any] = {"name": folder.name, "state": _read(folder / "operstate")}
        link["wireless"] = (folder / "wireless").exists()
        link["speed_mbit"] = int(speed) if speed and speed.isdigit() else None
        links.append({key: value for key, value in link.items() if value is not None})
    return links


def _strings(root: Path, *names: str) -> list[str]:
    """The texts of a device-tree property: each ends with a NUL."""
    for name in names:
        if text := _text(root, name):
            return [part for part in text.split("\0") if part]
    return []


def _number(root: Path, name: str) -> int | None:
    text = _text(root, name)
    return int(text) if text and text.isdigit() else None


def _text(root: Path, name: str) -> str | None:
    return _read(root / name)


def _read(path: Path) -> str | None:
    # Files in sysfs may exist and still refuse to be read.
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
