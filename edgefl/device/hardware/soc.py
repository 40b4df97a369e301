"""SoC name and CPU cores of a board."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgefl.core.types import Json
from edgefl.device.hardware.sysfs import find_paths, read_int, read_text, sanitise_text

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
