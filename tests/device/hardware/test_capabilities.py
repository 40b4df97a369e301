"""What every board of the list says of itself and of its moment, on trees of files as they have them."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from board_trees import BOARDS, PC, plant
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.protocol import MAX_JSON_BYTES
from edgefl.device.hardware.board_reader import BoardReader, no_program
from edgefl.device.hardware.capabilities import probe, select_accelerator
from edgefl.device.hardware.health import HealthReader, read_available_memory_bytes, read_board_status

FACTS: dict[str, dict[str, Any]] = {
    "pi-3": {"family": "raspberry-pi", "soc": "BCM2837", "cpu": "Cortex-A53", "atomics": False,
             "throttled_since_boot": "under-voltage,throttled"},
    "pi-4": {"family": "raspberry-pi", "soc": "BCM2711", "cpu": "Cortex-A72", "cpu_max_mhz": 1800},
    "pi-5": {"family": "raspberry-pi", "soc": "BCM2712", "cpu": "Cortex-A76", "atomics": True, "cores": 4,
             "model": "Raspberry Pi 5 Model B Rev 1.0", "compatible": ["raspberrypi,5-model-b", "brcm,bcm2712"],
             "isa": ["asimd", "asimddp", "asimdhp", "atomics", "fphp"], "has_rtc": True, "accelerators": [],
             "throttled_since_boot": "frequency-capped,throttled,soft-temperature-limit",
             "power_supplies": [{"name": "ac", "kind": "Mains"}, {"name": "ups", "kind": "Battery"}]},
    "zero-2-w": {"family": "raspberry-pi", "soc": "BCM2837", "memory_bytes": 426792 * 1024,
                 "throttled_since_boot": "ok"},
    "orin-jetpack-6": {"family": "jetson", "soc": "Tegra234 (Orin)", "l4t": "36.4.3", "jetpack": "6.2",
                       "cuda": "12.6.11", "power_mode": "25W", "compute_capability": "8.7", "cores": 6,
                       "accelerators": [{"kind": "cuda", "name": "tegra234"}]},
    "orin-jetpack-7": {"family": "jetson", "soc": "Tegra234 (Orin)", "jetpack": "7.2", "cuda": "13.2.0"},
    "thor": {"family": "jetson", "soc": "Tegra264 (Thor)", "jetpack": "7.1", "compute_capability": "11.0",
             "cores": 14, "accelerators": [{"kind": "cuda", "name": "tegra264", "driver": "580.00"}]},
    "pc": {"family": "pc", "model": "Dell Inc. Precision 3660", "atomics": None,
           "accelerators": [{"kind": "cuda", "name": "NVIDIA RTX A4000", "driver": "570.86.15"}],
           "clusters": [{"cores": 8, "max_mhz": 5000}, {"cores": 4, "max_mhz": 3800}]},
    "container": {"family": "pc", "cpu": "AMD EPYC", "memory_bytes": 32000000 * 1024, "network": []},
}  # fmt: skip
MOMENT: dict[str, dict[str, Any]] = {
    "pi-3": {"temperature_c": 61.2, "throttled": "under-voltage,throttled",
             "throttled_since_boot": "under-voltage,throttled"},
    "pi-4": {"temperature_c": 48.7, "throttled": "ok"},
    "pi-5": {"temperature_c": 55.0, "throttled": "ok", "battery_fraction": 0.88, "battery_status": "Discharging",
             "on_mains": False, "throttled_since_boot": "frequency-capped,throttled,soft-temperature-limit"},
    "zero-2-w": {"temperature_c": 44.0, "throttled": "ok", "throttled_since_boot": "ok"},
    "orin-jetpack-6": {"temperature_c": 50.0, "gpu_load": 0.431, "power_w": 6.5},
    "orin-jetpack-7": {"temperature_c": 50.0, "gpu_load": 0.431, "power_w": 6.5},
    "thor": {"temperature_c": 45.0, "power_w": 45.0},
    "pc": {"temperature_c": 44.0},
    "container": {},
}  # fmt: skip
CHANGES_BY_ITSELF = {"temperature_c", "throttled", "gpu_load", "power_w", "battery_fraction"}


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_a_board_says_what_it_is_and_apart_from_that_how_it_is(tmp_path, name):
    root = plant(tmp_path, BOARDS[name])
    facts = probe(root, run=no_program)
    assert {key: facts.get(key) for key in FACTS[name]} == FACTS[name]
    assert None not in facts.values()
    assert not CHANGES_BY_ITSELF & facts.keys(), "a coordinator keeps these"
    is_jetson = FACTS[name]["family"] == "jetson"
    assert read_board_status(BoardReader(root, run=no_program), is_jetson=is_jetson) == pytest.approx(MOMENT[name])


def link(name, state, kind=""):
    folder = f"sys/class/net/{name}"
    return {f"{folder}/operstate": f"{state}\n", **({f"{folder}/device/x": ""} if kind else {}),
            **({f"{folder}/wireless/x": ""} if kind == "wireless" else {})}  # fmt: skip


def l4t(revision):
    return {"etc/nv_tegra_release": f"# R36 (release), REVISION: {revision}, GCID: 1\n"}


GROUP = "sys/fs/cgroup/system.slice/edgefl.service"
CONTAINED = {
    "proc/self/cgroup": "0::/system.slice/edgefl.service\n",
    f"{GROUP}/memory.max": "max\n",
    f"{GROUP}/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/system.slice/memory.max": "536870912\n",
    "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
}
LINKS = {
    **link("eth0", "up", "wired"), "sys/class/net/eth0/speed": "1000\n", **link("wlan0", "down", "wireless"),
    **link("docker0", "down"), **link("lo", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("pi-5", LINKS, {"network": [{"name": "eth0", "state": "up", "wireless": False, "speed_mbit": 1000},
                                     {"name": "wlan0", "state": "down", "wireless": True}]}),
        ("pi-5", {"etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nNAME="Debian"\n',
                  "run/systemd/timesync/synchronized": "",
                  "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids\n"},
         {"os": "Debian GNU/Linux 13 (trixie)", "clock_synchronised": True, "memory_cgroup": False}),
        *[("orin-jetpack-6", l4t(revision), {"jetpack": jetpack})
          for revision, jetpack in (("4.0", "6.1"), ("4.4", "6.2.1"), ("3.0", "6.0"), ("5.0", "6.2.2"))],
        ("pc", CONTAINED, {"memory_bytes": 1 << 29, "memory_total_bytes": 32000000 * 1024, "cpu_quota": 1.5}),
        ("container", {"proc/device-tree/model": "Pi\x1b[2J\x07 5\0", "proc/device-tree/compatible": "a,\x1bb\0"},
         {"model": "Pi[2J 5", "compatible": ["a,b"]}),
    ],
)  # fmt: skip
def test_more_files_tell_more(tmp_path, name, files, expected):
    facts = probe(plant(tmp_path, {**BOARDS[name], **files}), run=no_program)
    assert {key: facts.get(key) for key in expected} == expected


def test_serial_numbers_tell_boards_apart_and_never_leave_them(tmp_path):
    orin = {name: body for name, body in BOARDS["orin-jetpack-6"].items() if "serial" not in name}
    card = "proc/driver/nvidia/gpus/0000:01:00.0/information"
    secrets = {
        "12345678": BOARDS["pi-5"],
        "0123456789abcdef": {**orin, "etc/machine-id": "0123456789abcdef0123456789abcdef\n"},
        "GPU-secret": {**PC, card: f"{PC[card]}GPU UUID: GPU-secret\n", "etc/machine-id": "fe\n"},
    }
    hashes = set()
    for secret, files in secrets.items():
        facts = probe(plant(tmp_path / secret, files), run=no_program)
        assert secret not in json.dumps(facts)
        assert len(facts["serial_hash"]) == 16
        assert facts["serial_hash"] == probe(tmp_path / secret, run=no_program)["serial_hash"]
        hashes.add(facts["serial_hash"])
    assert len(hashes) == 3


def test_this_machine_and_an_empty_one_say_what_python_knows(tmp_path):
    facts, nothing = probe(), probe(tmp_path)
    assert min(facts["cores"], facts["memory_bytes"]) > 0
    assert nothing["userland_bits"] in (32, 64)
    assert nothing["libraries"]["numpy"]
    assert "model" not in nothing
    assert None not in nothing.values()
    assert [select_accelerator(wish) for wish in ("cpu", "cuda")] == ["cpu", "cuda"]
    has_gpu = any(fact.get("kind") == "cuda" for fact in facts.get("accelerators", ()))
    assert has_gpu or select_accelerator("auto") == "cpu"


TREES = [BOARDS[name] for name in sorted(BOARDS)]
NAMES = sorted({name for tree in TREES for name in tree} | {
    "proc/self/cgroup", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory.stat", "sys/fs/cgroup/cpu.max", "proc/stat", "proc/uptime", "dev/vcio",
    "sys/class/net/eth0/speed", "sys/class/net/eth0/operstate", "sys/class/net/eth0/device/x", "etc/machine-id",
    "etc/os-release", "proc/self/smaps_rollup", "proc/self/status", "sys/devices/soc0/soc_id",
    "usr/local/cuda/version.txt", "sys/fs/cgroup/memory/memory.limit_in_bytes",
})  # fmt: skip
# Damage that only looks like what is expected, beside bytes that never do.
HALVES = st.sampled_from(
    ["²³".encode(), b"9" * 400, b"-1", b"0x", b"pmode:\xff", b'{"cuda": []}', b"[" * 5000, b"nvidia,\0nvidia,",
     b"MemTotal: -5 kB", b"cpu  1 2 3 \xd9\xa3 5 6", b"1e999", b"nan", b"0::/../../x\0y", b"max max", b"1 0", b"\n"]
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=300) | HALVES, min_size=1), st.binary(max_size=200))
def test_whatever_the_files_hold_nothing_is_raised_and_all_fits_into_a_message(files, said):
    with tempfile.TemporaryDirectory() as folder:
        root = plant(Path(folder), {**PC, **files})
        told = said.decode(errors="replace")
        facts = probe(root, run=lambda *_: told)
        moment = read_board_status(BoardReader(root, run=lambda *_: told), is_jetson=True)
        signs = HealthReader(root, root=root).read()
        free = read_available_memory_bytes(root)
    assert len(json.dumps([facts, moment], allow_nan=False)) < MAX_JSON_BYTES // 4
    assert signs["uptime_s"] >= 0
    assert free is None or free >= 0


def test_a_folder_or_a_pipe_in_the_place_of_a_file_says_nothing(tmp_path):
    (tmp_path / "proc/meminfo").mkdir(parents=True)
    os.mkfifo(tmp_path / "proc/cpuinfo")
    facts = probe(tmp_path, run=no_program)
    assert not {"memory_bytes", "cpu"} & facts.keys()
