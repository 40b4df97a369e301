from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from edgefl.device.board.capabilities import probe
from edgefl.protocol import MAX_JSON_BYTES

PI_5: Mapping[str, str] = {
    "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
    "proc/device-tree/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
    "proc/device-tree/serial-number": "1000000012345678\0",
    "proc/cpuinfo": "".join(
        f"processor\t: {core}\nFeatures\t: fp asimd evtstrm aes atomics fphp asimdhp asimddp\nCPU part\t: 0xd0b\n\n"
        for core in range(4)
    ),
    "proc/meminfo": "MemTotal:        8256624 kB\nMemFree: 1 kB\n",
    "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nNAME="Debian"\n',
    "proc/sys/kernel/osrelease": "6.12.47+rpt-rpi-2712\n",
    "sys/class/rtc/rtc0/name": "rpi-rtc\n",
    "run/systemd/timesync/synchronized": "",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "2400000\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/speed": "1000\n",
    "sys/class/net/eth0/device/x": "",
    "sys/class/net/wlan0/operstate": "down\n",
    "sys/class/net/wlan0/wireless/x": "",
    "sys/class/net/wlan0/device/x": "",
    "sys/class/net/docker0/operstate": "down\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids\n",
}
ORIN_NANO: Mapping[str, str] = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n",
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
    "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd atomics\nCPU part\t: 0xd42\n",
}
PC_IN_A_CONTAINER: Mapping[str, str] = {
    "sys/class/dmi/id/sys_vendor": "Dell Inc.\n",
    "sys/class/dmi/id/product_name": "Precision 3660\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i7\nflags\t\t: fpu avx avx2 fma\n",
    "proc/meminfo": "MemTotal:       32000000 kB\n",
    "proc/self/cgroup": "0::/system.slice/edgefl.service\n",
    "sys/fs/cgroup/system.slice/edgefl.service/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/edgefl.service/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/system.slice/memory.max": "536870912\n",
    "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA RTX A4000\nGPU UUID: GPU-secret\n",
}


def _board(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_raspberry_pi_is_known(tmp_path: Path) -> None:
    facts = probe(_board(tmp_path, PI_5))
    assert facts["model"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert facts["compatible"] == ["raspberrypi,5-model-b", "brcm,bcm2712"]
    assert (facts["family"], facts["cpu"], facts["cores"]) == ("raspberry-pi", "Cortex-A76", 4)
    assert facts["atomics"] is True
    assert facts["isa"] == ["asimd", "asimddp", "asimdhp", "atomics", "fphp"]
    assert facts["memory_bytes"] == 8256624 * 1024
    assert facts["memory_cgroup"] is False
    assert facts["cpu_max_mhz"] == 2400
    assert (facts["has_rtc"], facts["clock_synchronised"]) == (True, True)
    assert facts["os"] == "Debian GNU/Linux 13 (trixie)"
    assert facts["accelerators"] == []


def test_links_with_hardware_are_listed_without_addresses(tmp_path: Path) -> None:
    assert probe(_board(tmp_path, PI_5))["network"] == [
        {"name": "eth0", "state": "up", "wireless": False, "speed_mbit": 1000},
        {"name": "wlan0", "state": "down", "wireless": True},
    ]


def test_the_serial_number_never_leaves_the_board(tmp_path: Path) -> None:
    facts = probe(_board(tmp_path, PI_5))
    assert "12345678" not in json.dumps(facts)
    assert len(facts["serial_hash"]) == 16


def test_the_serial_hash_tells_boards_apart_and_stays(tmp_path: Path) -> None:
    first = probe(_board(tmp_path / "a", PI_5))["serial_hash"]
    second = probe(_board(tmp_path / "b", {**PI_5, "proc/device-tree/serial-number": "2\0"}))["serial_hash"]
    assert first == probe(tmp_path / "a")["serial_hash"] != second


def test_an_orin_says_jetpack_and_its_gpu(tmp_path: Path) -> None:
    facts = probe(_board(tmp_path, ORIN_NANO))
    assert (facts["family"], facts["l4t"], facts["jetpack"]) == ("jetson", "36.4.3", "6.2")
    assert facts["compute_capability"] == "8.7"
    assert facts["accelerators"] == [{"kind": "cuda", "name": "tegra234"}]
    assert "0123456789abcdef" not in json.dumps(facts)


@pytest.mark.parametrize(
    ("release", "jetpack"), [("4.0", "6.1"), ("4.3", "6.2"), ("4.4", "6.2.1"), ("3.0", "6.0"), ("5.0", "6.2.2")]
)
def test_l4t_releases_are_named(tmp_path: Path, release: str, jetpack: str) -> None:
    files = {**ORIN_NANO, "etc/nv_tegra_release": f"# R36 (release), REVISION: {release}, GCID: 1\n"}
    assert probe(_board(tmp_path, files))["jetpack"] == jetpack


def test_the_tightest_limit_around_a_process_counts(tmp_path: Path) -> None:
    facts = probe(_board(tmp_path, PC_IN_A_CONTAINER))
    assert facts["memory_bytes"] == 512 * 1024 * 1024
    assert facts["memory_total_bytes"] == 32000000 * 1024
    assert facts["cpu_quota"] == 1.5


def test_a_pc_s_card_and_driver_are_found_without_vendor_tools(tmp_path: Path) -> None:
    facts = probe(_board(tmp_path, PC_IN_A_CONTAINER))
    assert (facts["model"], facts["family"]) == ("Dell Inc. Precision 3660", "pc")
    assert facts["accelerators"] == [{"kind": "cuda", "name": "NVIDIA RTX A4000", "driver": "570.86.15"}]
    assert "atomics" not in facts
    assert "GPU-secret" not in json.dumps(facts)


def test_an_empty_machine_says_what_python_knows(tmp_path: Path) -> None:
    facts = probe(tmp_path)
    assert facts["userland_bits"] in (32, 64)
    assert facts["libraries"]["numpy"]
    assert "model" not in facts
    assert None not in facts.values()


def test_this_machine_fits_into_a_join(tmp_path: Path) -> None:
    facts = probe()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
    assert len(json.dumps(facts)) < MAX_JSON_BYTES // 4
