"""What a board felt like during an assignment, on files that change while a fake clock runs."""

import pytest
from board_trees import FIRMWARE, plant, rails, zones

from edgefl.device.hardware.board_reader import PATH_CACHE_S
from edgefl.device.hardware.health_sampler import (
    HealthSampler,
    LinkQuality,
    read_link_quality,
    read_wireless_bits_per_s,
)


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
