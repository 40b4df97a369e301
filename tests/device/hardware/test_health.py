"""The readings on trees of files as boards have them; those of whole boards are in `test_capabilities`."""

import os

import pytest
from board_trees import FIRMWARE, plant, rails, zones

from edgefl.device.hardware.board_reader import PATH_CACHE_S, BoardReader
from edgefl.device.hardware.board_sensors import read_battery_fraction, read_power_w
from edgefl.device.hardware.health import (
    HealthReader,
    read_available_memory_bytes,
    read_memory_fraction,
    read_process_memory_bytes,
    read_temperature_c,
    read_throttled,
)

HWMON = "sys/class/hwmon/hwmon2"
SUPPLY = "sys/class/power_supply"
MOUSE = {
    f"{SUPPLY}/AC/type": "Mains\n", f"{SUPPLY}/AC/capacity": "1\n", f"{SUPPLY}/mouse/type": "Battery\n",
    f"{SUPPLY}/mouse/scope": "Device\n", f"{SUPPLY}/mouse/capacity": "2\n", f"{SUPPLY}/ups/type": "Battery\n",
    f"{SUPPLY}/ups/capacity": "83\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "files", "expected"),
    [
        (read_temperature_c, zones({"rp1_adc": 61.0, "cpu-thermal": 48.312}), 48.312),
        (read_temperature_c, zones({"cpu-thermal": -256.0, "tj-thermal": 52.5, "cv0-thermal": 60.0}), 52.5),
        (read_temperature_c, zones({"a": 40.0, "b": 45.0}), 45.0),
        (read_throttled, {FIRMWARE: "0\n"}, "ok"),
        (read_throttled, {FIRMWARE: "50000\n"}, "ok"),
        (read_throttled, {FIRMWARE: "d000e\n"}, "frequency-capped,throttled,soft-temperature-limit"),
        (read_throttled, {f"{HWMON}/name": "rpi_volt\n", f"{HWMON}/in0_lcrit_alarm": "1\n"}, "under-voltage"),
        (read_battery_fraction, MOUSE, 0.83),
        (read_power_w, rails("hwmon1", VDD_GPU_SOC=3800, NC=17100) | rails("hwmon2", VIN_SYS_5V0=2000), 5.8),
    ],
)
def test_a_sensor_is_read_as_its_maker_means_it(tmp_path, read, files, expected):
    told = read(BoardReader(plant(tmp_path, files)))
    assert told == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(
    ("read", "files", "expected"),
    [
        (read_memory_fraction, {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 250 kB\n"}, 0.75),
        (
            read_process_memory_bytes,
            {"proc/self/smaps_rollup": "00-ff ---p 00 00:00 0 [rollup]\nRss: 99 kB\nPss: 42 kB\n"},
            43008,
        ),
        (read_process_memory_bytes, {"proc/self/status": "Name: python\nVmRSS:\t  99 kB\n"}, 101376),
    ],
)
def test_memory_is_read_as_the_kernel_means_it(tmp_path, read, files, expected):
    assert read(plant(tmp_path, files)) == expected


def test_a_board_that_says_nothing_or_nonsense_gives_none_for_everything(tmp_path):
    for root in (
        tmp_path / "empty",
        plant(tmp_path / "damaged", {"proc/stat": "cpu x y\n", "proc/uptime": "soon\n",
                                     "proc/meminfo": "MemTotal: many kB\n"}),
    ):  # fmt: skip
        found = HealthReader(tmp_path / "missing", root=root).read()
        assert (found.pop("uptime_s"), set(found.values())) == (0.0, {None})


def test_the_load_is_the_difference_of_two_readings(tmp_path):
    root = plant(tmp_path, {"proc/stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1\n"})
    vitals = HealthReader(root, root=root)
    plant(root, {"proc/stat": "cpu  130 0 120 740 110 0 0 0 0 0\n"})
    assert vitals.read()["cpu_fraction"] == 0.5
    assert vitals.read()["cpu_fraction"] is None  # no time has passed


def test_a_process_may_take_what_the_tightest_group_around_it_leaves(tmp_path):
    own, around = "sys/fs/cgroup/system.slice/edgefl-device.service", "sys/fs/cgroup/system.slice"
    begin = {
        "proc/meminfo": "MemAvailable: 1000000 kB\n",
        "proc/self/cgroup": "0::/system.slice/edgefl-device.service\n",
    }
    for files, expected in (
        (begin, 1000000 * 1024),
        # How much of it is used is not told.
        ({f"{own}/memory.max": "max\n", f"{own}/memory.current": "5000\n", f"{around}/memory.max": "400000000\n"},
         1000000 * 1024),
        ({f"{around}/memory.current": "300000000\n"}, 100_000_000),
        ({f"{around}/memory.stat": "anon 1\ninactive_file 50000000\nactive_file 7\n"}, 150_000_000),
        ({f"{own}/memory.max": "4000\n"}, 0),
    ):  # fmt: skip
        assert read_available_memory_bytes(plant(tmp_path, files)) == expected


def test_this_machine_can_be_read(tmp_path):
    signs = HealthReader(tmp_path).read()
    assert signs["uptime_s"] > 0
    assert 0 < signs["memory_fraction"] < 1
    assert 1_000_000 < signs["memory_bytes"] < 100_000_000_000
    disk = os.statvfs(tmp_path)
    assert signs["disk_free_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.1)


def test_sensors_are_searched_for_once_a_minute_and_read_each_time(tmp_path):
    now_s = 100.0
    found = BoardReader(tmp_path, clock=lambda: now_s)
    assert read_temperature_c(found) is None
    plant(tmp_path, zones({"cpu-thermal": 40.0}))
    now_s += PATH_CACHE_S - 1
    assert read_temperature_c(found) is None
    now_s += 1
    assert read_temperature_c(found) == 40.0
    plant(tmp_path, zones({"cpu-thermal": 50.0}))
    assert read_temperature_c(found) == 50.0, "a reading is of now"
