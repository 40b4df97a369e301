"""The readings on trees of files as boards have them."""

from __future__ import annotations

import os

import pytest

from edgefl.device.board.board import LOOK_AGAIN_S, Board
from edgefl.device.board.jetson import power_w
from edgefl.device.board.supplies import battery_fraction
from edgefl.device.board.vitals import (
    Vitals,
    memory_available_bytes,
    memory_bytes,
    memory_fraction,
    temperature_c,
    throttled,
)


@pytest.fixture
def board(tmp_path):
    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def thermal(number, kind, millidegrees):
    zone = f"sys/class/thermal/thermal_zone{number}"
    return {f"{zone}/type": f"{kind}\n", f"{zone}/temp": f"{millidegrees}\n"}


def test_a_board_that_says_nothing_gives_none_for_everything(tmp_path):
    signs = Vitals(tmp_path / "missing", root=tmp_path).read()
    assert signs.uptime_s == 0.0
    assert [
        signs.temperature_c,
        signs.throttled,
        signs.cpu_fraction,
        signs.memory_fraction,
        signs.memory_bytes,
        signs.disk_free_bytes,
        signs.battery_fraction,
        signs.power_w,
    ] == [None] * 8


def test_a_raspberry_pi_tells_the_temperature_of_its_processor(board):
    root = board({**thermal(0, "cpu-thermal", 48312), **thermal(1, "rp1_adc", 61000)})
    assert temperature_c(Board(root)) == 48.312


def test_a_jetson_tells_its_junction_and_skips_zones_that_are_asleep(board):
    root = board(
        {**thermal(0, "gpu-thermal", -256000), **thermal(1, "cv0-thermal", ""), **thermal(2, "tj-thermal", 52500)}
    )
    assert temperature_c(Board(root)) == 52.5


def test_an_unknown_board_tells_its_hottest_zone(board):
    assert temperature_c(Board(board({**thermal(0, "a", 40000), **thermal(1, "b", 45000)}))) == 45.0


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        ("0", "ok"),
        ("50000", "ok"),
        ("1", "under-voltage"),
        ("d000e", "frequency-capped,throttled,soft-temperature-limit"),
    ],
)
def test_the_firmware_of_a_raspberry_pi_tells_what_holds_it_back_now(board, bits, said):
    root = board({"sys/devices/platform/soc/soc:firmware/get_throttled": f"{bits}\n"})
    assert throttled(Board(root)) == said


@pytest.mark.parametrize(("alarm", "said"), [("0", "ok"), ("1", "under-voltage")])
def test_the_voltage_monitor_tells_it_where_the_firmware_does_not(board, alarm, said):
    hwmon = "sys/class/hwmon/hwmon2"
    assert throttled(Board(board({f"{hwmon}/name": "rpi_volt\n", f"{hwmon}/in0_lcrit_alarm": f"{alarm}\n"}))) == said


def test_the_load_is_the_difference_of_two_readings(board):
    root = board({"proc/stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1\n"})
    vitals = Vitals(root, root=root)
    board({"proc/stat": "cpu  130 0 120 740 110 0 0 0 0 0\n"})
    assert vitals.read().cpu_fraction == 0.5
    assert vitals.read().cpu_fraction is None  # no time has passed


def test_the_memory_in_use_is_what_cannot_be_had(board):
    root = board({"proc/meminfo": "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  250 kB\n"})
    assert memory_fraction(root) == 0.75


def test_a_process_may_take_what_the_tightest_group_around_it_leaves(board):
    group = "sys/fs/cgroup/system.slice/edgefl-device.service"
    files = {
        "proc/meminfo": "MemAvailable: 1000000 kB\n",
        "proc/self/cgroup": "0::/system.slice/edgefl-device.service\n",
    }
    assert memory_available_bytes(board(files)) == 1000000 * 1024
    board({f"{group}/memory.max": "max\n", f"{group}/memory.current": "5000\n"})
    limits = {"sys/fs/cgroup/system.slice/memory.max": "400000000\n"}
    assert memory_available_bytes(board(limits)) == 1000000 * 1024, "how much of it is used is not told"
    root = board({"sys/fs/cgroup/system.slice/memory.current": "300000000\n"})
    assert memory_available_bytes(root) == 100_000_000
    board({"sys/fs/cgroup/system.slice/memory.stat": "anon 1\ninactive_file 50000000\nactive_file 7\n"})
    assert memory_available_bytes(root) == 150_000_000
    board({f"{group}/memory.max": "4000\n"})
    assert memory_available_bytes(root) == 0


def test_a_process_counts_its_share_of_shared_pages(board):
    root = board({"proc/self/smaps_rollup": "00-ff ---p 00 00:00 0 [rollup]\nRss: 99 kB\nPss: 42 kB\n"})
    assert memory_bytes(root) == 42 * 1024


def test_a_kernel_without_pss_gives_the_resident_size(board):
    assert memory_bytes(board({"proc/self/status": "Name: python\nVmRSS:\t  99 kB\n"})) == 99 * 1024


def test_the_battery_is_the_boards_and_not_that_of_a_mouse(board):
    supply = "sys/class/power_supply"
    root = board(
        {
            f"{supply}/AC/type": "Mains\n",
            f"{supply}/AC/capacity": "1\n",
            f"{supply}/mouse/type": "Battery\n",
            f"{supply}/mouse/scope": "Device\n",
            f"{supply}/mouse/capacity": "2\n",
            f"{supply}/ups/type": "Battery\n",
            f"{supply}/ups/capacity": "83\n",
        }
    )
    assert battery_fraction(Board(root)) == 0.83


def rail(hwmon, number, label, millivolts, milliamperes):
    base = f"sys/class/hwmon/{hwmon}"
    return {
        f"{base}/name": "ina3221\n",
        f"{base}/in{number}_label": f"{label}\n",
        f"{base}/in{number}_input": f"{millivolts}\n",
        f"{base}/curr{number}_input": f"{milliamperes}\n",
    }


def test_an_orin_nano_draws_what_its_input_rail_says(board):
    root = board({**rail("hwmon1", 1, "VDD_IN", 5000, 1200), **rail("hwmon1", 2, "VDD_SOC", 5000, 300)})
    assert power_w(Board(root)) == pytest.approx(6.0)


def test_an_agx_draws_the_sum_of_its_rails(board):
    root = board(
        {
            **rail("hwmon1", 1, "VDD_GPU_SOC", 19000, 200),
            **rail("hwmon1", 2, "NC", 19000, 900),
            **rail("hwmon2", 1, "VIN_SYS_5V0", 5000, 400),
        }
    )
    assert power_w(Board(root)) == pytest.approx(5.8)


def test_a_damaged_reading_is_none(board):
    root = board({"proc/stat": "cpu x y\n", "proc/uptime": "soon\n", "proc/meminfo": "MemTotal: many kB\n"})
    signs = Vitals(root, root=root).read()
    assert (signs.uptime_s, signs.cpu_fraction, signs.memory_fraction) == (0.0, None, None)


def test_this_machine_can_be_read(tmp_path):
    signs = Vitals(tmp_path).read()
    assert signs.uptime_s > 0
    assert 0 < signs.memory_fraction < 1
    assert 1_000_000 < signs.memory_bytes < 100_000_000_000
    disk = os.statvfs(tmp_path)
    assert signs.disk_free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.1)


def test_sensors_are_searched_for_once_a_minute_and_read_each_time(board):
    now_s = 100.0
    found = Board(board({}), clock=lambda: now_s)
    assert temperature_c(found) is None
    board(thermal(0, "cpu-thermal", 40000))
    now_s += LOOK_AGAIN_S - 1
    assert temperature_c(found) is None
    now_s += 1
    assert temperature_c(found) == 40.0
    board(thermal(0, "cpu-thermal", 50000))
    assert temperature_c(found) == 50.0, "a reading is of now"
