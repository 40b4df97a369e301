"""What a board felt like during an assignment, on files that change while a fake clock runs."""

import pytest
from board_trees import FIRMWARE, plant, rails, zones

from edgefl.device.hardware.board_reader import PATH_CACHE_S
from edgefl.device.hardware.health_sampler import HealthSampler
from edgefl.device.hardware.link_quality import LinkQuality


class Board:
    """A tree of files, a clock, and a link."""

    def __init__(self, root):
        self.root, self.now_s, self.link = root, 100.0, LinkQuality()
        self.vitals = HealthSampler(root, clock=lambda: self.now_s, read_quality=lambda _: self.link)

    def is_at(self, celsius):
        plant(self.root, zones({"cpu-thermal": celsius}))

    def says(self, bits):
        plant(self.root, {FIRMWARE: f"{bits:x}\n"})

    def draws(self, watts):
        plant(self.root, rails("hwmon1", VDD_IN=int(1000 * watts)))

    def after(self, seconds):
        self.now_s += seconds
        self.vitals.sample()


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


def test_tells_the_highest_temperature_all_that_held_it_back_and_the_worst_of_the_link(board):
    board.vitals.start()
    for celsius, bits, signal, rate in ((60, 0, -50.0, 72e6), (83.2, 0x4, -81.0, 6e6), (70, 0x1, -60.0, 54e6)):
        board.is_at(celsius)
        board.says(bits)
        board.link = LinkQuality(signal_dbm=signal, link_bits_per_s=rate)
        board.after(1.0)
    board.says(0)
    assert board.vitals.stop() == {
        "max_temperature_c": 83.2, "throttled": "under-voltage,throttled", "signal_dbm": -81.0,
        "link_bits_per_s": 6e6,
    }  # fmt: skip


def test_a_board_that_says_nothing_tells_nothing_and_one_that_was_well_says_ok(board):
    for expected in ({}, {"throttled": "ok"}):
        board.vitals.start()
        board.vitals.sample()
        assert board.vitals.stop() == expected
        board.says(0)
        board.now_s += PATH_CACHE_S


def test_energy_is_power_over_time(board):
    board.vitals.start()
    board.draws(10)
    board.vitals.sample()
    board.draws(20)
    board.after(2.0)
    board.now_s += 1.0
    assert board.vitals.stop() == {"energy_j": pytest.approx(2 * 15 + 20)}


def test_looks_once_a_second_however_often_it_is_asked(board):
    board.is_at(50)
    board.vitals.start()
    board.vitals.sample()
    board.is_at(90)
    board.after(0.5)
    board.is_at(55)
    assert board.vitals.stop() == {"max_temperature_c": 55.0}


def test_the_next_assignment_begins_anew(board):
    board.is_at(90)
    board.draws(10)
    board.vitals.start()
    board.after(2.0)
    board.vitals.stop()
    board.is_at(40)
    board.vitals.start()
    board.vitals.sample()
    assert board.vitals.stop()["max_temperature_c"] == 40.0
