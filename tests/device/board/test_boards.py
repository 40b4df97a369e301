"""What every board of the list says of itself and of its moment, on trees of files as they have them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from board_trees import BOARDS, PC, plant
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.device.board.board import Board
from edgefl.device.board.capabilities import probe
from edgefl.device.board.condition import condition
from edgefl.device.board.programs import no_program
from edgefl.device.board.vitals import Vitals, memory_available_bytes
from edgefl.protocol import MAX_JSON_BYTES

FACTS: dict[str, dict[str, Any]] = {
    "pi-3": {"family": "raspberry-pi", "soc": "BCM2837", "cpu": "Cortex-A53", "atomics": False,
             "throttled_since_boot": "under-voltage,throttled"},
    "pi-4": {"family": "raspberry-pi", "soc": "BCM2711", "cpu": "Cortex-A72", "cpu_max_mhz": 1800},
    "pi-5": {"family": "raspberry-pi", "soc": "BCM2712", "cpu": "Cortex-A76", "atomics": True,
             "throttled_since_boot": "frequency-capped,throttled,soft-temperature-limit",
             "power_supplies": [{"name": "ac", "kind": "Mains"}, {"name": "ups", "kind": "Battery"}]},
    "zero-2-w": {"family": "raspberry-pi", "soc": "BCM2837", "memory_bytes": 426792 * 1024,
                 "throttled_since_boot": "ok"},
    "orin-jetpack-6": {"family": "jetson", "soc": "Tegra234 (Orin)", "jetpack": "6.2", "cuda": "12.6.11",
                       "power_mode": "25W", "compute_capability": "8.7", "cores": 6},
    "orin-jetpack-7": {"family": "jetson", "soc": "Tegra234 (Orin)", "jetpack": "7.2", "cuda": "13.2.0"},
    "thor": {"family": "jetson", "soc": "Tegra264 (Thor)", "jetpack": "7.1", "compute_capability": "11.0",
             "cores": 14, "accelerators": [{"kind": "cuda", "name": "tegra264", "driver": "580.00"}]},
    "pc": {"family": "pc", "model": "Dell Inc. Precision 3660",
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


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_a_board_says_what_it_is(tmp_path: Path, name: str) -> None:
    facts = probe(plant(tmp_path, BOARDS[name]), run=no_program)
    assert {key: facts.get(key) for key in FACTS[name]} == FACTS[name]
    assert None not in facts.values()


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_a_board_says_how_it_is(tmp_path: Path, name: str) -> None:
    board = Board(plant(tmp_path, BOARDS[name]), run=no_program)
    is_jetson = FACTS[name]["family"] == "jetson"
    assert condition(board, is_jetson=is_jetson) == pytest.approx(MOMENT[name])


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_what_changes_by_itself_is_not_among_the_facts_that_a_coordinator_keeps(tmp_path: Path, name: str) -> None:
    facts = probe(plant(tmp_path, BOARDS[name]), run=no_program)
    assert not {"temperature_c", "throttled", "gpu_load", "power_w", "battery_fraction"} & facts.keys()


def test_no_board_is_left_untold() -> None:
    assert FACTS.keys() == MOMENT.keys() == BOARDS.keys()


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


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=300) | HALVES, min_size=1), st.binary(max_size=200))
def test_whatever_the_files_hold_nothing_is_raised_and_all_fits_into_a_message(
    files: dict[str, bytes], said: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = plant(Path(folder), {**PC, **files})
        told = said.decode(errors="replace")
        facts = probe(root, run=lambda *_: told)
        moment = condition(Board(root, run=lambda *_: told), is_jetson=True)
        signs = Vitals(root, root=root).read()
        free = memory_available_bytes(root)
    assert len(json.dumps([facts, moment], allow_nan=False)) < MAX_JSON_BYTES // 4
    assert signs.uptime_s >= 0
    assert free is None or free >= 0


def test_a_folder_or_a_pipe_in_the_place_of_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/meminfo").mkdir(parents=True)
    os.mkfifo(tmp_path / "proc/cpuinfo")
    facts = probe(tmp_path, run=no_program)
    assert not {"memory_bytes", "cpu"} & facts.keys()


def test_what_a_board_says_can_be_shown_on_a_terminal(tmp_path: Path) -> None:
    root = plant(
        tmp_path, {"proc/device-tree/model": "Pi\x1b[2J\x07 5\0", "proc/device-tree/compatible": "a,\x1bb\0"}
    )
    facts = probe(root, run=no_program)
    assert (facts["model"], facts["compatible"]) == ("Pi[2J 5", ["a,b"])
