"""Budgets of a board whose process is killed, which reboots, and whose clock is set."""

import json

import pytest

from edgefl.core.conditions import Budget, Conditions, parse_conditions
from edgefl.core.errors import StoreError
from edgefl.core.types import derive_rng
from edgefl.device.conditions.budgets import USAGE_FILE, BudgetUsage, Clocks

DAY_S = 86_400.0
START_S = 1_780_000_000.0 // DAY_S * DAY_S  # midnight UTC
PROCESSOR = Conditions(zone="UTC", day=Budget(processor_s=100.0), month=Budget(processor_s=1000.0))


class Board:
    """A board's clocks, which a test sets, and its usage, as a process has it."""

    def __init__(self, folder):
        self.folder, self.wall_s, self.up_s, self.boots = folder, START_S, 50.0, 0
        self.true_s = START_S
        self.start()

    def start(self):
        clocks = Clocks(boot_id=f"boot-{self.boots}", wall=lambda: self.wall_s, boot_time=lambda: self.up_s)
        self.usage = BudgetUsage(self.folder, clocks)

    def reboot(self, wall_s=None):
        self.boots, self.up_s = self.boots + 1, 10.0
        self.wall_s = self.wall_s if wall_s is None else wall_s
        self.start()

    def wait(self, seconds):
        self.wall_s, self.up_s, self.true_s = self.wall_s + seconds, self.up_s + seconds, self.true_s + seconds

    def is_free(self, conditions=PROCESSOR):
        return self.usage.find_blocker(conditions) is None


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


def use_all(board, step=2.0):
    """Works until the budget of the day has no room; returns the processor seconds used."""
    used = 0.0
    board.usage.charge(PROCESSOR, {"processor": 0.0})
    while board.is_free():
        used += step
        board.usage.charge(PROCESSOR, {"processor": step})
    return used


def test_work_ends_before_a_budget_is_passed_and_goes_on_the_next_day(board):
    assert 90 < use_all(board) <= 100
    blocker = board.usage.find_blocker(PROCESSOR)
    assert blocker.reason == "its 100 processor seconds of this day are used up"
    assert blocker.free_at_s == START_S + DAY_S
    board.wait(DAY_S - 1)
    assert not board.is_free()
    board.wait(1)
    assert board.is_free()


def test_a_month_ends_what_its_days_would_allow(board):
    total = 0.0
    board.wait(4 * DAY_S)  # the first of June
    for _ in range(20):
        total += use_all(board)
        board.wait(DAY_S)
    assert 900 < total <= 1000


def test_what_was_charged_ahead_comes_back_at_the_end_of_a_work(board):
    board.usage.charge(PROCESSOR, {"processor": 3.0})
    saved = json.loads((board.folder / USAGE_FILE).read_text())["used"]["day"]["processor"]
    assert saved > 3.0
    board.usage.settle(PROCESSOR)
    assert json.loads((board.folder / USAGE_FILE).read_text())["used"]["day"]["processor"] == 3.0


def test_a_clock_that_is_set_gives_no_new_budget(board):
    use_all(board)
    for shift in (DAY_S, -2 * DAY_S, 400 * DAY_S, -400 * DAY_S):
        board.wall_s += shift
        assert not board.is_free()
        board.start()  # the agent alone starts anew, in the same boot
        assert not board.is_free()
    board.reboot(START_S - 30 * DAY_S)  # no clock battery
    assert not board.is_free()
    board.wait(DAY_S - 1)
    assert not board.is_free()
    board.wait(1)
    assert board.is_free()


def test_a_zone_where_it_is_still_yesterday_gives_no_new_budget(board):
    use_all(board)
    west = Conditions(zone="Pacific/Honolulu", day=PROCESSOR.day)
    assert not board.is_free(west)
    board.wait(DAY_S + 9 * 3600)
    assert not board.is_free(west)
    board.wait(3600)
    assert board.is_free(west)


def test_a_clock_that_is_set_after_a_reboot_before_anything_is_used_gives_no_new_budget(board):
    use_all(board)
    board.reboot()
    board.usage.keep_time()
    board.wall_s += 13 * DAY_S
    board.start()  # the agent is killed before it saves anything else
    assert not board.is_free()


def test_a_clock_that_was_late_is_caught_up_with_where_the_coordinator_agrees(board):
    use_all(board)
    board.reboot()
    board.wall_s += 3 * DAY_S  # network time arrives
    board.usage.set_forward(skew_s=-3 * DAY_S)
    assert not board.is_free()
    board.usage.set_forward(skew_s=1.0)
    assert board.is_free()


def test_two_hundred_kills_reboots_and_clock_jumps_never_pass_the_budget_of_a_true_day(board):
    rng, used_by_day = derive_rng(5), {}
    conditions = Conditions(zone="UTC", day=Budget(processor_s=500.0))
    for _ in range(200):
        for _ in range(int(rng.integers(10, 60))):
            board.usage.charge(conditions, {"processor": 0.0})
            if board.is_free(conditions):
                step = float(rng.uniform(0.1, 2.0))
                board.wait(step)
                day = int((board.true_s - START_S) // DAY_S)
                used_by_day[day] = used_by_day.get(day, 0.0) + step  # used, whether or not it is charged below
                if rng.random() < 0.8:
                    board.usage.charge(conditions, {"processor": step})
                else:
                    board.start()  # killed before
                    break
        board.wait(float(rng.uniform(0, 7200)))
        match rng.integers(4):
            case 0:
                board.wall_s += float(rng.uniform(-30, 30)) * DAY_S
            case 1:
                board.reboot(board.true_s - float(rng.uniform(0, 30)) * DAY_S)
            case 2:
                board.start()
            case _:
                pass
    assert len(used_by_day) > 5
    assert 100 < max(used_by_day.values()) <= 500


def test_a_kill_just_after_midnight_keeps_what_was_used_since(board):
    board.wait(DAY_S - 1)
    board.usage.charge(PROCESSOR, {"processor": 1.0})
    board.wait(2)
    assert board.is_free()
    board.start()
    used = json.loads((board.folder / USAGE_FILE).read_text())
    assert used["period"]["day"] == board.usage._period["day"]
    assert used["used"]["day"]["processor"] >= 2.0


def test_traffic_is_charged_whole_before_it_begins(board):
    conditions = parse_conditions("[conditions.day]\ntraffic_mb = 4")
    assert board.usage.find_blocker(conditions, needed={"traffic": 4e6}) is None
    board.usage.charge(conditions, {"traffic": 3e6})
    board.start()
    assert board.usage.find_blocker(conditions, needed={"traffic": 1_000_001}) is not None
    assert board.usage.find_blocker(conditions, needed={"traffic": 1_000_000}) is None
    assert board.usage.describe(conditions) == {"traffic a day": "3 of 4 MB"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"used": {}}', b'{"v": 1, "used": {"day": {"traffic": -1}}}']
)
def test_a_damaged_ledger_counts_as_used_up_until_the_next_day(board, content):
    conditions = Conditions(zone="UTC", day=Budget(processor_s=100.0))
    (board.folder / USAGE_FILE).write_bytes(content)
    board.start()
    assert "was damaged" in board.usage.find_blocker(conditions).reason
    board.start()
    assert not board.is_free(conditions)
    board.wait(DAY_S)
    assert board.is_free(conditions)


def test_a_full_card_is_said_until_the_use_is_on_disk(board, full_card):
    board.usage.charge(PROCESSOR, {"processor": 0.0})
    with full_card():
        with pytest.raises(StoreError):
            board.usage.charge(PROCESSOR, {"processor": 20.0})
        for call in (
            lambda: board.usage.charge(PROCESSOR, {"processor": 0.0}),
            lambda: board.usage.find_blocker(PROCESSOR),
            lambda: board.usage.settle(PROCESSOR),
        ):
            with pytest.raises(StoreError):
                call()
    assert board.is_free()
    board.start()  # killed
    assert board.usage.describe(PROCESSOR)["processor a day"].startswith("2")
    board.usage.charge(PROCESSOR, {"processor": 80.0})
    assert not board.is_free()


def test_the_file_of_an_agent_that_counted_fewer_kinds_is_read_as_it_is(board):
    board.usage.charge(PROCESSOR, {"processor": 3.0})
    board.usage.settle(PROCESSOR)
    value = json.loads((board.folder / USAGE_FILE).read_text())
    for amounts in (value["margins"], *value["used"].values()):
        amounts.pop("written", None)
    (board.folder / USAGE_FILE).write_text(json.dumps(value))
    board.start()
    assert board.usage.describe(PROCESSOR)["processor a day"] == "3 of 100 processor seconds"


@pytest.mark.parametrize(("kind", "margin"), [("processor", 5.0), ("energy", 50.0), ("traffic", 0.0)])
def test_what_is_left_never_goes_below_nothing_and_is_that_of_the_next_month_after_its_end(board, kind, margin):
    limits = {"processor": "processor_s", "energy": "energy_j", "traffic": "traffic_mb"}
    conditions = Conditions(zone="UTC", month=Budget(**{limits[kind]: 1000.0}))
    limit = conditions.budgets["month"][kind]
    for _ in range(75):
        board.usage.charge(conditions, {kind: 0.01 * limit})
    (left,) = board.usage.list_left(conditions, {})
    assert (left.kind, left.period, left.left) == (kind, "month", pytest.approx(0.25 * limit - margin))
    board.usage.charge(conditions, {kind: limit})
    (left,) = board.usage.list_left(conditions, {kind: 2.0})
    assert (left.left, left.limit, left.per_s) == (0.0, limit, 2.0)
    board.wait(left.renews_s - 1.0)
    assert board.usage.list_left(conditions, {})[0].left == 0.0
    assert board.usage.list_left(conditions, {})[0].renews_s == pytest.approx(1.0)
    board.wait(1.0)
    (left,) = board.usage.list_left(conditions, {})
    assert left.left > 0.5 * limit
    assert left.renews_s > 27 * DAY_S


def test_a_clock_that_is_set_forward_leaves_no_more_of_a_budget(board):
    board.usage.charge(PROCESSOR, {"processor": 60.0})
    before = board.usage.list_left(PROCESSOR, {})
    board.wall_s += 5 * DAY_S
    assert board.usage.list_left(PROCESSOR, {}) == before
