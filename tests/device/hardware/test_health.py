"""The readings on trees of files as boards have them; those of whole boards are in `test_capabilities`."""

import os
import time

import pytest
from board_trees import FIRMWARE, plant, rails, zones
from digit_shards import digit_shard

from edgefl.compression.codec import make_codec
from edgefl.core.types import derive_rng
from edgefl.device.hardware.board_reader import PATH_CACHE_S, BoardReader, read_battery_fraction, read_power_w
from edgefl.device.hardware.health import (
    HYSTERESIS_C,
    POLL_INTERVAL_S,
    READ_INTERVAL_S,
    HealthReader,
    HealthSampler,
    LinkQuality,
    ThermalPacer,
    read_available_memory_bytes,
    read_link_quality,
    read_memory_fraction,
    read_process_memory_bytes,
    read_temperature_c,
    read_throttled,
    read_wireless_bits_per_s,
)
from edgefl.device.training.trainer import DeviceTrainer, TrainingAbortedError
from edgefl.tasks.registry import make_task

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


class Hot:
    """A board whose temperature follows from the time that has passed."""

    def __init__(self, *celsius, limit=80.0):
        self.celsius, self.limit, self.now_s, self.looks = list(celsius), limit, 0.0, 0
        self.pacer = ThermalPacer(lambda: self.limit, self.read, clock=lambda: self.now_s, sleep=self.sleep)

    def read(self):
        self.looks += 1
        return self.celsius.pop(0) if len(self.celsius) > 1 else self.celsius[0]

    def sleep(self, seconds):
        self.now_s += seconds

    def rest(self, is_over=lambda: False):
        self.pacer.wait_until_cool(is_over)
        return self.pacer.get_metrics()


@pytest.mark.parametrize(
    ("celsius", "limit", "rests_s"),
    [
        ([80.0], 80.0, 0),
        ([80.5, 79.0, 75.1, 80.0 - HYSTERESIS_C, 60.0], 80.0, 3),
        ([90.0, 90.0, None], 80.0, 2),  # a sensor that falls asleep
        ([120.0], None, None),
        ([None], 80.0, None),
    ],
)
def test_a_board_rests_until_it_is_some_degrees_cooler_than_its_limit(celsius, limit, rests_s):
    board = Hot(*celsius, limit=limit)
    told = board.rest()
    assert told == (
        {} if rests_s is None else {"paced_s": pytest.approx(rests_s * READ_INTERVAL_S, abs=3 * POLL_INTERVAL_S)}
    )
    assert board.now_s == told.get("paced_s", 0)
    assert board.celsius == celsius[-1:], "it looked on after it was cool"


def test_rests_add_up_within_an_assignment_and_the_next_begins_anew():
    board = Hot(90.0, 70.0, 90.0, 70.0)
    board.rest()
    board.sleep(5.0)
    assert board.rest()["paced_s"] == pytest.approx(2 * READ_INTERVAL_S, abs=2 * POLL_INTERVAL_S)
    board.pacer.start()
    assert board.pacer.get_metrics() == {}


def test_looks_once_a_second_however_many_iterations_there_are():
    board = Hot(50.0)
    for _ in range(100):
        board.rest()
        board.sleep(0.01)
    assert board.looks == 1


def test_a_rest_ends_within_a_nap_of_being_told():
    board = Hot(90.0)
    board.rest(lambda: board.now_s >= 7.0)
    assert 7.0 <= board.now_s <= 7.0 + POLL_INTERVAL_S


def test_a_new_limit_holds_from_the_next_assignment_on():
    board = Hot(70.0)
    board.rest()
    board.limit = 60.0
    board.sleep(2.0)
    assert board.rest() == {"paced_s": 0.0}
    board.pacer.start()
    board.rest(lambda: board.now_s > 10)
    assert board.pacer.get_metrics()["paced_s"] > 5


class Oven:
    """A trainer on a board whose only sensor is a file."""

    def __init__(self, root, limit_c):
        shard = digit_shard(root / "shard.npz", 64)
        self.root, self.at_nap = root, lambda: None
        self.board = BoardReader(root)
        self.trainer = DeviceTrainer(
            device_id="pi", role="trainer", shards=lambda: {"digits": str(shard)}, accelerator="cpu", threads=1,
            state_dir=root, on_progress=lambda *_: None,
            thermal_pacer=ThermalPacer(lambda: limit_c, self._read_c, sleep=self._nap),
        )  # fmt: skip

    def _read_c(self):
        return read_temperature_c(self.board)

    def _nap(self, seconds):
        self.at_nap()
        time.sleep(seconds)

    def is_at(self, celsius):
        plant(self.root, zones({"cpu-thermal": celsius}))

    def train(self, **plan):
        task = make_task("digits")
        header = {
            "v": 2, "run": "r", "task": "digits", "options": {}, "seed": 7, "test_fraction": 0.25, "version": 0,
            "assignment": "r/a-1", "codec": "dense", "used_assignments": [],
            "plan": {"algorithm": "sgd", "batch_size": 16, "learning_rate": 0.5, **plan},
        }  # fmt: skip
        body = make_codec("dense", task.shapes()).encode(task.init(1), derive_rng(0))
        return self.trainer.train(header, body)[0]


@pytest.fixture
def oven(tmp_path):
    made = Oven(tmp_path, 80.0)
    made.is_at(90.0)
    return made


def test_an_update_tells_how_long_its_board_rested_and_that_is_part_of_its_computing(oven):
    oven.at_nap = lambda: oven.is_at(60.0)
    metrics = oven.train(iterations=3)["metrics"]
    assert metrics["iterations"] == 3
    assert READ_INTERVAL_S <= metrics["health"]["paced_s"] <= metrics["compute_s"]


def test_the_last_iteration_is_not_rested_after(oven):
    metrics = oven.train(iterations=1)["metrics"]
    assert (metrics["iterations"], metrics.get("health")) == (1, None)


def test_the_seconds_of_a_budget_run_while_the_board_rests(oven):
    metrics = oven.train(seconds=0.3)["metrics"]
    assert metrics["iterations"] == 1
    assert metrics["health"]["paced_s"] > 0.2


def test_a_resting_board_that_is_recalled_sends_what_it_has_and_one_that_is_stopped_leaves(oven):
    oven.at_nap = lambda: oven.trainer.finish_early("r/a-1")
    assert oven.train(iterations=1000)["metrics"]["iterations"] < 1000
    oven.at_nap = oven.trainer.abort
    with pytest.raises(TrainingAbortedError):
        oven.train(iterations=1000)


class Board:
    """A tree of files, a clock, and a link."""

    def __init__(self, root):
        self.root, self.now_s, self.link = root, 100.0, LinkQuality()
        self.health = HealthSampler(root, clock=lambda: self.now_s, read_quality=lambda _: self.link)

    def is_at(self, celsius):
        plant(self.root, zones({"cpu-thermal": celsius}))

    def says(self, bits):
        plant(self.root, {FIRMWARE: f"{bits:x}\n"})

    def draws(self, watts):
        plant(self.root, rails("hwmon1", VDD_IN=int(1000 * watts)))

    def after(self, seconds):
        self.now_s += seconds
        self.health.sample()


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


def test_tells_the_highest_temperature_all_that_held_it_back_and_the_worst_of_the_link(board):
    board.health.start()
    for celsius, bits, signal, rate in ((60, 0, -50.0, 72e6), (83.2, 0x4, -81.0, 6e6), (70, 0x1, -60.0, 54e6)):
        board.is_at(celsius)
        board.says(bits)
        board.link = LinkQuality(signal_dbm=signal, link_bits_per_s=rate)
        board.after(1.0)
    board.says(0)
    assert board.health.stop() == {
        "max_temperature_c": 83.2, "throttled": "under-voltage,throttled", "signal_dbm": -81.0,
        "link_bits_per_s": 6e6,
    }  # fmt: skip


def test_a_board_that_says_nothing_tells_nothing_and_one_that_was_well_says_ok(board):
    for expected in ({}, {"throttled": "ok"}):
        board.health.start()
        board.health.sample()
        assert board.health.stop() == expected
        board.says(0)
        board.now_s += PATH_CACHE_S


def test_energy_is_power_over_time(board):
    board.health.start()
    board.draws(10)
    board.health.sample()
    board.draws(20)
    board.after(2.0)
    board.now_s += 1.0
    assert board.health.stop() == {"energy_j": pytest.approx(2 * 15 + 20)}


def test_looks_once_a_second_however_often_it_is_asked(board):
    board.is_at(50)
    board.health.start()
    board.health.sample()
    board.is_at(90)
    board.after(0.5)
    board.is_at(55)
    assert board.health.stop() == {"max_temperature_c": 55.0}


def test_the_next_assignment_begins_anew(board):
    board.is_at(90)
    board.draws(10)
    board.health.start()
    board.after(2.0)
    board.health.stop()
    board.is_at(40)
    board.health.start()
    board.health.sample()
    assert board.health.stop()["max_temperature_c"] == 40.0


def routes(*interfaces, **metrics):
    """Default routes by these interfaces, and one to a network by usb0."""
    lines = ["Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask", route("usb0", 0, "0001A8C0")]
    lines += [route(name, metric) for name, metric in {**dict.fromkeys(interfaces, 0), **metrics}.items()]
    return {"proc/net/route": "\n".join(lines) + "\n"}


def route(interface, metric, destination="00000000"):
    return f"{interface}\t{destination}\t0101A8C0\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0"


def wireless(line):
    head = "Inter-| sta-|   Quality        |   Discarded\n face | tus | link level noise |  nwid  crypt\n"
    return {"proc/net/wireless": f"{head}{line}\n"}


def speed(interface, said, state="up"):
    folder = f"sys/class/net/{interface}"
    return {f"{folder}/speed": f"{said}\n", f"{folder}/operstate": f"{state}\n"}


GOOD = wireless(" wlan0: 0000   58.  -52.  -256        0      0      0      0      6")
UNSIGNED = wireless(" wlan0: 0000   58.  204.  0.        0      0      0      0      6")
IS_WIRELESS = {"sys/class/net/wlan0/wireless/x": ""}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (routes("wlan0") | GOOD, LinkQuality(signal_dbm=-52.0, link_bits_per_s=65e6)),
        (routes("wlan0") | UNSIGNED, LinkQuality(signal_dbm=-52.0, link_bits_per_s=65e6)),
        (routes("eth0") | speed("eth0", "1000"), LinkQuality(link_bits_per_s=1e9)),
        (routes(wlan0=600, eth0=100) | GOOD | speed("eth0", "100"), LinkQuality(link_bits_per_s=1e8)),
        (speed("eth0", "", "down") | speed("lo", "1") | speed("eth1", "10"), LinkQuality(link_bits_per_s=1e7)),
        *[(routes("eth0") | speed("eth0", said), LinkQuality()) for said in ("-1", "", "much", "0")],
        *[(routes("wlan0") | wireless(line) | IS_WIRELESS, LinkQuality(link_bits_per_s=65e6))
          for line in (" wlan0: 0000", " wlan0: 0000 58. much 0", " wlan0: 0000 58. -256. 0", "wlan1: 0 1 -2")],
        ({}, LinkQuality()),
    ],
)  # fmt: skip
def test_a_link_tells_what_its_files_and_the_kernel_know(tmp_path, files, expected):
    assert read_link_quality(plant(tmp_path, files), {"wlan0": 65e6}.__getitem__) == expected


def test_the_kernel_knows_no_wi_fi_rate_of_what_is_no_wi_fi():
    assert read_wireless_bits_per_s("lo") is None
    assert read_wireless_bits_per_s("no-such-interface-at-all") is None
