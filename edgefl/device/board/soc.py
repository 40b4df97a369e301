"""Which chip a board has, and of what its processor is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgefl.device.board.board_files import below, number, plain, text
from edgefl.types import Json

SOCS = {
    "brcm,bcm2837": "BCM2837",
    "brcm,bcm2711": "BCM2711",
    "brcm,bcm2712": "BCM2712",
    "nvidia,tegra194": "Tegra194 (Xavier)",
    "nvidia,tegra234": "Tegra234 (Orin)",
    "nvidia,tegra264": "Tegra264 (Thor)",
}
ARM_CORES = {
    "0xb76": "ARM1176",
    "0xc07": "Cortex-A7",
    "0xd03": "Cortex-A53",
    "0xd05": "Cortex-A55",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd42": "Cortex-A78AE",
    "0xd83": "Neoverse-V3AE",
}


def soc_name(root: Path, compatible: Sequence[str]) -> str | None:
    """Returns the name of the chip; by convention the last compatible name is the chip's."""
    for name in compatible:
        if name in SOCS:
            return SOCS[name]
    if compatible:
        return compatible[-1].partition(",")[2].upper() or None
    return plain(text(root / "sys/devices/soc0/soc_id"))


def core_name(part: str) -> str:
    return ARM_CORES.get(part, part)


def clusters(root: Path, cpuinfo: str) -> list[Json] | None:
    """Returns the kinds of cores, fastest first, where there is more than one (big.LITTLE)."""
    parts = dict(_parts(cpuinfo))
    kinds: dict[tuple[str | None, int | None], int] = {}
    for folder in below(root, "sys/devices/system/cpu/cpu[0-9]*"):
        khz = number(folder / "cpufreq/cpuinfo_max_freq")
        kind = parts.get(folder.name[3:]), khz // 1000 if khz else None
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) < 2:
        return None
    ordered = sorted(kinds.items(), key=lambda item: -(item[0][1] or 0))
    return [
        {key: value for key, value in (("cpu", cpu), ("cores", cores), ("max_mhz", mhz)) if value is not None}
        for (cpu, mhz), cores in ordered
    ][:8]


def _parts(cpuinfo: str) -> Iterator[tuple[str, str]]:
    """Yields the number of each processor and what core it is."""
    for block in cpuinfo.split("\n\n"):
        who = re.search(r"^processor\s*:\s*(\d{1,4})$", block, re.MULTILINE)
        part = re.search(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", block, re.MULTILINE)
        if who and part:
            yield who[1], core_name(part[1])
