"""Trees of files as boards have them, written from what their kernels show; values are of one moment of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cpuinfo(*cores: tuple[int, str, str]) -> str:
    """`(count, features, part)` for each kind of core."""
    numbered = [(features, part) for count, features, part in cores for _ in range(count)]
    return "".join(
        f"processor\t: {number}\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"
        for number, (features, part) in enumerate(numbered)
    )


def zones(celsius: Mapping[str, float]) -> dict[str, str]:
    """Thermal zones by type."""
    tree = {}
    for number, (kind, value) in enumerate(celsius.items()):
        tree[f"sys/class/thermal/thermal_zone{number}/type"] = f"{kind}\n"
        tree[f"sys/class/thermal/thermal_zone{number}/temp"] = f"{int(1000 * value)}\n"
    return tree


def rails(hwmon: str, **milliwatts: int) -> dict[str, str]:
    """An INA3221 whose channels show so much at 5 V."""
    tree = {f"sys/class/hwmon/{hwmon}/name": "ina3221\n"}
    for number, (label, value) in enumerate(milliwatts.items(), 1):
        tree[f"sys/class/hwmon/{hwmon}/in{number}_label"] = f"{label}\n"
        tree[f"sys/class/hwmon/{hwmon}/in{number}_input"] = "5000\n"
        tree[f"sys/class/hwmon/{hwmon}/curr{number}_input"] = f"{value // 5}\n"
    return tree


def frequencies(*khz: int) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq": f"{value}\n" for core, value in enumerate(khz)
    }


OLD, NEW = "fp asimd evtstrm crc32 cpuid", "fp asimd evtstrm aes atomics fphp asimdhp asimddp"
FIRMWARE = "sys/devices/platform/soc/soc:firmware/get_throttled"

PI_3 = {
    "proc/device-tree/model": "Raspberry Pi 3 Model B Plus Rev 1.3\0",
    "proc/device-tree/compatible": "raspberrypi,3-model-b-plus\0brcm,bcm2837\0",
    "proc/device-tree/serial-number": "00000000aabbccdd\0",
    "proc/cpuinfo": cpuinfo((4, OLD, "0xd03")),
    "proc/meminfo": "MemTotal:         943952 kB\nMemAvailable:     700000 kB\n",
    FIRMWARE: "50005\n",
    **frequencies(*[1400000] * 4),
    **zones({"cpu-thermal": 61.2}),
}
PI_4 = {
    "proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.5\0",
    "proc/device-tree/compatible": "raspberrypi,4-model-b\0brcm,bcm2711\0",
    "proc/device-tree/serial-number": "10000000deadbeef\0",
    "proc/cpuinfo": cpuinfo((4, OLD, "0xd08")),
    "proc/meminfo": "MemTotal:        3884340 kB\nMemAvailable:    3300000 kB\n",
    "sys/class/hwmon/hwmon1/name": "rpi_volt\n",
    "sys/class/hwmon/hwmon1/in0_lcrit_alarm": "0\n",
    **frequencies(*[1800000] * 4),
    **zones({"cpu-thermal": 48.7}),
}
PI_5 = {
    "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
    "proc/device-tree/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
    "proc/device-tree/serial-number": "1000000012345678\0",
    "proc/cpuinfo": cpuinfo((4, NEW, "0xd0b")),
    "proc/meminfo": "MemTotal:        8256624 kB\nMemAvailable:    7000000 kB\n",
    "sys/class/rtc/rtc0/name": "rpi-rtc\n",
    "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled": "e0000\n",
    "sys/class/power_supply/ups/type": "Battery\n",
    "sys/class/power_supply/ups/capacity": "88\n",
    "sys/class/power_supply/ups/status": "Discharging\n",
    "sys/class/power_supply/ac/type": "Mains\n",
    "sys/class/power_supply/ac/online": "0\n",
    **frequencies(*[2400000] * 4),
    **zones({"cpu-thermal": 55.0}),
}
ZERO_2_W = {
    "proc/device-tree/model": "Raspberry Pi Zero 2 W Rev 1.0\0",
    "proc/device-tree/compatible": "raspberrypi,model-zero-2-w\0brcm,bcm2837\0",
    "proc/device-tree/serial-number": "0000000011223344\0",
    "proc/cpuinfo": cpuinfo((4, OLD, "0xd03")),
    "proc/meminfo": "MemTotal:         426792 kB\nMemAvailable:     250000 kB\n",
    FIRMWARE: "0\n",
    **frequencies(*[1000000] * 4),
    **zones({"cpu-thermal": 44.0}),
}
ORIN_NANO = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
    "proc/device-tree/serial-number": "1421023012345\0",
    "proc/cpuinfo": cpuinfo((6, NEW, "0xd42")),
    "proc/meminfo": "MemTotal:        7802884 kB\nMemAvailable:    5000000 kB\n",
    "sys/class/devfreq/17000000.gpu/device/load": "431\n",
    **frequencies(*[1510400] * 6),
    **rails("hwmon1", VDD_IN=6500, VDD_CPU_GPU_CV=1500, VDD_SOC=1400),
    **zones({"cpu-thermal": 50.0, "gpu-thermal": 51.0, "tj-thermal": 52.5}),
}
ORIN_JETPACK_6 = {
    **ORIN_NANO,
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n",
    "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.6.11"}}\n',
    "var/lib/nvpmodel/status": "pmode:0001\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n",
}
ORIN_JETPACK_7 = {
    **ORIN_NANO,
    "etc/nv_tegra_release": "# R39 (release), REVISION: 2.0, GCID: 44000000, BOARD: generic, EABI: aarch64\n",
    "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.2.0"}}\n',
}
THOR = {
    "proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3971-0089+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0",
    "proc/cpuinfo": cpuinfo((14, f"{NEW} sve i8mm bf16", "0xd83")),
    "proc/meminfo": "MemTotal:      128780000 kB\nMemAvailable:  120000000 kB\n",
    "etc/nv_tegra_release": "# R38 (release), REVISION: 4.0, GCID: 43000000, BOARD: generic, EABI: aarch64\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.00  Release Build\n",
    **rails("hwmon2", VIN=45000, VDD_GPU=12000),
    **zones({"cpu-thermal": 45.0, "tj-thermal": 47.0}),
}
PC = {
    "sys/class/dmi/id/sys_vendor": "Dell Inc.\n",
    "sys/class/dmi/id/product_name": "Precision 3660\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i7\nflags\t\t: fpu avx avx2 fma\n\n",
    "proc/meminfo": "MemTotal:       32000000 kB\nMemAvailable:   30000000 kB\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA RTX A4000\n",
    **frequencies(*[5000000] * 8, *[3800000] * 4),
    **zones({"acpitz": 27.8, "x86_pkg_temp": 44.0}),
}
CONTAINER = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 fma\n\n",
    "proc/meminfo": "MemTotal:       32000000 kB\nMemAvailable:   30000000 kB\n",
}
"""A container without /sys and without a device tree."""
BOARDS: Mapping[str, Mapping[str, str]] = {
    "pi-3": PI_3, "pi-4": PI_4, "pi-5": PI_5, "zero-2-w": ZERO_2_W, "orin-jetpack-6": ORIN_JETPACK_6,
    "orin-jetpack-7": ORIN_JETPACK_7, "thor": THOR, "pc": PC, "container": CONTAINER,
}  # fmt: skip


def plant(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Writes a tree below a folder and returns that."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root
