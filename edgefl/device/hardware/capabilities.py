"""Board capabilities, read from standard Linux files, with vendor tools as a fallback; the training accelerator.

All paths are relative to a root, so that a test can build any board. Unknown values are missing from the result.
Serial numbers are only returned as hashes, addresses not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgefl import DISTRIBUTION
from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import (
    BoardReader,
    RunProgram,
    find_paths,
    list_cgroups,
    list_supplies,
    no_program,
    parse_int,
    read_cuda_version,
    read_int,
    read_kilobytes,
    read_power_mode,
    read_strings,
    read_text,
    read_throttle_status,
    run_program,
    sanitise_text,
)

LIBRARIES = (DISTRIBUTION, "flwr", "numpy", "torch", "onnxruntime", "paho-mqtt", "cryptography", "scikit-learn")
JETPACK_VERSIONS = (
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
COMPUTE_CAPABILITIES = {"nvidia,tegra194": "7.2", "nvidia,tegra234": "8.7", "nvidia,tegra264": "11.0"}
# Features that decide which wheels run and how fast: LSE atomics, half precision, dot products, matrix and vector
# units.
ARM_ISA = frozenset({"atomics", "asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "neon"})
X86_ISA = frozenset({"avx", "avx2", "avx512f", "avx_vnni", "amx_tile", "fma"})
MAX_MEMORY_LIMIT_BYTES = 1 << 60
MAX_LISTED = 16
"""Maximum number of listed cards and links; no real board has more."""

SOC_NAMES = {
    "brcm,bcm2837": "BCM2837",
    "brcm,bcm2711": "BCM2711",
    "brcm,bcm2712": "BCM2712",
    "nvidia,tegra194": "Tegra194 (Xavier)",
    "nvidia,tegra234": "Tegra234 (Orin)",
    "nvidia,tegra264": "Tegra264 (Thor)",
}
ARM_CORE_NAMES = {
    "0xb76": "ARM1176",
    "0xc07": "Cortex-A7",
    "0xd03": "Cortex-A53",
    "0xd05": "Cortex-A55",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd42": "Cortex-A78AE",
    "0xd83": "Neoverse-V3AE",
}


def probe(root: Path = Path("/"), *, run: RunProgram = run_program) -> Json:
    """Returns flat board facts for the `capabilities` topic and `edgefl device probe`.

    Varying values belong to the heartbeat and `board_status`.
    """
    compatible = _read_property(root, "compatible")
    board = BoardReader(root, run=run)
    throttle_status = read_throttle_status(board)
    facts = {
        "model": _read_model(root),
        "compatible": compatible or None,
        "family": get_board_family(compatible),
        "soc": find_soc_name(root, compatible),
        "serial_hash": compute_board_hash(root),
        **_read_jetson(board, compatible),
        **_read_cpu(root),
        **_read_memory(root),
        "accelerators": _list_accelerators(root, compatible),
        **_list_software(root),
        "has_rtc": bool(find_paths(root, "sys/class/rtc/rtc*")),
        "clock_synchronised": (root / "run/systemd/timesync/synchronized").exists() or None,
        **_read_disk(root),
        "network": _list_network_links(root),
        "power_supplies": list_supplies(board),
        "throttled_since_boot": throttle_status.since_boot if throttle_status else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _read_model(root: Path) -> str | None:
    model = _read_property(root, "model")
    if model:
        return model[0]
    if match := re.search(r"^Model\s*:\s*(.+)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE):
        return sanitise_text(match[1])
    dmi = [sanitise_text(read_text(root / "sys/class/dmi/id" / name)) for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in dmi if part) or None


def get_board_family(compatible: Sequence[str]) -> str:
    """Returns the board family (raspberry-pi, jetson, another board, or pc) by its device tree."""
    for vendor, family in (("raspberrypi,", "raspberry-pi"), ("nvidia,", "jetson")):
        if any(name.startswith(vendor) for name in compatible):
            return family
    return "board" if compatible else "pc"


def compute_board_hash(root: Path = Path("/")) -> str | None:
    """Returns a board identifier, 16 hexadecimal digits: a hash of the serial number, else of the machine id."""
    serial = _read_property(root, "serial-number")
    identity = serial[0] if serial else read_text(root / "etc/machine-id")
    return hashlib.sha256(f"edgefl board {identity}".encode()).hexdigest()[:16] if identity else None


def _read_jetson(board: BoardReader, compatible: Sequence[str]) -> Json:
    if get_board_family(compatible) != "jetson":
        return {"cuda": read_cuda_version(board.root)}
    facts: Json = {"power_mode": read_power_mode(board), "cuda": read_cuda_version(board.root)}
    match = re.match(
        r"# R(\d{1,3}) \(release\), REVISION: ([\d.]{1,20})", read_text(board.root / "etc/nv_tegra_release") or ""
    )
    if not match:
        return facts
    l4t = f"{match[1]}.{match[2]}"
    jetpack_versions = (
        jetpack for prefix, jetpack in JETPACK_VERSIONS if l4t == prefix or l4t.startswith(f"{prefix}.")
    )
    return {
        **facts,
        "l4t": l4t,
        "jetpack": next(jetpack_versions, None),
        "compute_capability": next((COMPUTE_CAPABILITIES[c] for c in compatible if c in COMPUTE_CAPABILITIES), None),
    }


def _read_cpu(root: Path) -> Json:
    cpuinfo = read_text(root / "proc/cpuinfo") or ""
    features = re.search(r"^(?:Features|flags)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    isa = set(features[1].split()) if features else set()
    part = re.search(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", cpuinfo, re.MULTILINE)
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    max_khz = read_int(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    is_arm = bool(part)
    return {
        "architecture": platform.machine(),
        # ARM kernels name the core by its number; some name only the family beside it.
        "cpu": get_core_name(part[1]) if part else (sanitise_text(name[1]) if name else None),
        "cores": _count_cores(root, cpuinfo),
        "clusters": list_clusters(root, cpuinfo),
        "cpu_quota": _read_cpu_quota(root),
        "cpu_max_mhz": max_khz // 1000 if max_khz else None,
        "isa": sorted(isa & (ARM_ISA | X86_ISA)) or None,
        "atomics": "atomics" in isa if is_arm else None,
        "userland_bits": struct.calcsize("P") * 8,
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
    }


def _count_cores(root: Path, cpuinfo: str) -> int | None:
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None


def _read_cpu_quota(root: Path) -> float | None:
    """Returns the cgroup's CPU quota in cores; None without a limit."""
    quotas = []
    for folder in list_cgroups(root):
        parts = [parse_int(part) for part in (read_text(folder / "cpu.max") or "").split()]
        if len(parts) == 2 and parts[0] and parts[1] and min(parts[0], parts[1]) > 0:
            quotas.append(parts[0] / parts[1])
    return round(min(quotas), 2) if quotas else None


def _read_memory(root: Path) -> Json:
    kilo = read_kilobytes(root / "proc/meminfo").get("MemTotal")
    total = kilo * 1024 if kilo else None
    limits = [read_int(folder / "memory.max") for folder in list_cgroups(root)]
    limits.append(read_int(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    numbers = [limit for limit in limits if limit is not None and 0 < limit < MAX_MEMORY_LIMIT_BYTES]
    usable = min([*numbers, *([total] if total else [])], default=None)
    # Raspberry Pi kernels may boot without the memory controller; limits in a unit file are then inert.
    controllers = (read_text(root / "sys/fs/cgroup/cgroup.controllers") or "").split()
    return {
        "memory_bytes": usable,
        "memory_total_bytes": total,
        "memory_cgroup": "memory" in controllers if controllers else None,
    }


def _list_accelerators(root: Path, compatible: Sequence[str]) -> list[Json]:
    version = re.search(
        r"(?:Kernel Module|Module for \S+)\s+([\d.]{1,30})", read_text(root / "proc/driver/nvidia/version") or ""
    )
    driver = {"driver": version[1]} if version else {}
    cards = find_paths(root, "proc/driver/nvidia/gpus/*/information")[:MAX_LISTED]
    models = [re.search(r"^Model:\s*(.+)$", read_text(card) or "", re.MULTILINE) for card in cards]
    names = [(sanitise_text(match[1]) if match else None) or "NVIDIA GPU" for match in models]
    accelerators: list[Json] = [{"kind": "cuda", "name": name, **driver} for name in names]
    tegra = next((name for name in compatible if name in COMPUTE_CAPABILITIES), None)
    if tegra and not accelerators:
        accelerators.append({"kind": "cuda", "name": tegra.partition(",")[2], **driver})
    return accelerators


def _list_software(root: Path) -> Json:
    libraries = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', read_text(root / "etc/os-release") or "", re.MULTILINE)
    return {
        "python": platform.python_version(),
        "libraries": libraries,
        "os": sanitise_text(release[1]) if release else None,
        "kernel": sanitise_text(read_text(root / "proc/sys/kernel/osrelease")),
    }


def _read_disk(root: Path) -> Json:
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return {}
    return {"disk_total_bytes": usage.total, "disk_free_bytes": usage.free}


def _list_network_links(root: Path) -> list[Json]:
    """Returns name, state, speed and kind of every hardware link; no addresses."""
    links: list[Json] = []
    for folder in find_paths(root, "sys/class/net/*")[: 4 * MAX_LISTED]:
        if folder.name == "lo" or not (folder / "device").exists():
            continue
        speed = read_int(folder / "speed")  # -1, or an error, when the link is down or wireless
        link: dict[str, Any] = {
            "name": sanitise_text(folder.name),
            "state": sanitise_text(read_text(folder / "operstate")),
        }
        link["wireless"] = (folder / "wireless").exists()
        link["speed_mbit"] = speed if speed is not None and speed > 0 else None
        links.append({key: value for key, value in link.items() if value is not None})
    return links[:MAX_LISTED]


def _read_property(root: Path, name: str) -> list[str]:
    """Returns the texts of a device-tree property, wherever the tree is mounted."""
    return read_strings(root / "proc/device-tree" / name, root / "sys/firmware/devicetree/base" / name)


def find_soc_name(root: Path, compatible: Sequence[str]) -> str | None:
    """Returns the name of the chip; by convention the last compatible name is the chip's."""
    for name in compatible:
        if name in SOC_NAMES:
            return SOC_NAMES[name]
    if compatible:
        return compatible[-1].partition(",")[2].upper() or None
    return sanitise_text(read_text(root / "sys/devices/soc0/soc_id"))


def get_core_name(part: str) -> str:
    return ARM_CORE_NAMES.get(part, part)


def list_clusters(root: Path, cpuinfo: str) -> list[Json] | None:
    """Returns the kinds of cores, fastest first, where there is more than one (big.LITTLE)."""
    parts = dict(_parse_core_names(cpuinfo))
    kinds: dict[tuple[str | None, int | None], int] = {}
    for folder in find_paths(root, "sys/devices/system/cpu/cpu[0-9]*"):
        khz = read_int(folder / "cpufreq/cpuinfo_max_freq")
        kind = parts.get(folder.name[3:]), khz // 1000 if khz else None
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) < 2:
        return None
    clusters = sorted(kinds.items(), key=lambda item: -(item[0][1] or 0))
    return [
        {key: value for key, value in (("cpu", cpu), ("cores", cores), ("max_mhz", mhz)) if value is not None}
        for (cpu, mhz), cores in clusters
    ][:8]


def _parse_core_names(cpuinfo: str) -> Iterator[tuple[str, str]]:
    """Yields the number and core name of each processor."""
    for block in cpuinfo.split("\n\n"):
        processor = re.search(r"^processor\s*:\s*(\d{1,4})$", block, re.MULTILINE)
        part = re.search(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", block, re.MULTILINE)
        if processor and part:
            yield processor[1], get_core_name(part[1])


def select_accelerator(requested: str) -> str:
    """Returns cpu or cuda; `auto` selects the GPU when torch is installed and finds one."""
    if requested != "auto":
        return requested
    if importlib.util.find_spec("torch") is None or not _has_nvidia_gpu():
        return "cpu"
    import torch  # noqa: PLC0415 only where there is a GPU: it costs a small board 200 MB

    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_nvidia_gpu() -> bool:
    return any(fact.get("kind") == "cuda" for fact in probe(run=no_program).get("accelerators", ()))
