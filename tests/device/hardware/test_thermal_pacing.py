"""A board that is too hot rests between iterations: the rules on a fake clock, and a trainer that really waits."""

import time

import pytest
from board_trees import plant, zones
from digit_shards import digit_shard

from edgefl.compression.codec import make_codec
from edgefl.core.types import derive_rng
from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.health import read_temperature_c
from edgefl.device.hardware.thermal_pacing import HYSTERESIS_C, POLL_INTERVAL_S, READ_INTERVAL_S, ThermalPacer
from edgefl.device.training.trainer import DeviceTrainer, TrainingAbortedError
from edgefl.tasks.registry import make_task


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
