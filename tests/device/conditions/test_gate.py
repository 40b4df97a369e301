"""The decision whether a board may train, with a board's files and clocks that a test sets."""

import contextlib

import pytest
from board_trees import plant, rails, zones

from edgefl.core.allowance import Window
from edgefl.core.conditions import Blocker, Conditions, ConditionsEndedError
from edgefl.core.errors import StoreError
from edgefl.core.safe_parsing import format_toml
from edgefl.device.conditions.budgets import SAVE_INTERVAL_S, USAGE_FILE, BudgetUsage, Clocks
from edgefl.device.conditions.facts import FactReader
from edgefl.device.conditions.gate import (
    FIRST_STEP_S,
    HOLD_S,
    STEP_FILE,
    STEP_MARGIN,
    ConditionGate,
    clear_pause,
    save_conditions,
    save_pause,
)
from edgefl.device.hardware.board_reader import BoardReader

MIDNIGHT_S = 1_780_012_800.0 // 86_400 * 86_400
PROCESSOR = b'[conditions]\nzone = "UTC"\n[conditions.day]\nprocessor_s = 60\n'
NIGHT = b'[conditions]\nzone = "UTC"\nhours = ["22:00-06:00"]\n'


class Board:
    def __init__(self, root):
        self.root, self.folder = root / "board", root / "state"
        self.folder.mkdir()
        self.wall_s, self.up_s, self.boot_id = MIDNIGHT_S, 100.0, "first"
        self.start()

    @property
    def clocks(self):
        return Clocks(boot_id=self.boot_id, wall=lambda: self.wall_s, boot_time=lambda: self.up_s)

    def start(self, **options):
        self.gate = ConditionGate(
            self.folder, board=BoardReader(self.root, clock=lambda: self.up_s), clocks=self.clocks, **options
        )

    def wait(self, seconds):
        self.wall_s, self.up_s = self.wall_s + seconds, self.up_s + seconds

    def get_reason(self):
        blocker = self.gate.check()
        return "" if blocker is None else blocker.reason


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


def test_a_board_without_files_may_always_train_and_writes_nothing(board):
    with board.gate.work():
        assert board.gate.check() is None
        board.gate.require()
        board.gate.charge_traffic(10**12)
    assert list(board.folder.iterdir()) == []


def test_hours_are_read_anew_while_the_agent_runs(board):
    assert board.get_reason() == ""
    save_conditions(board.folder, NIGHT)
    board.wait(6 * 3600 - STEP_MARGIN * FIRST_STEP_S - 1)
    assert board.get_reason() == ""
    board.wait(1)
    assert board.gate.check() == Blocker(kind="hours", reason="its hours end", free_at_s=MIDNIGHT_S + 22 * 3600)
    board.wait(STEP_MARGIN * FIRST_STEP_S)
    blocker = board.gate.check()
    assert (blocker.reason, blocker.free_at_s) == ("outside its hours", MIDNIGHT_S + 22 * 3600)
    save_conditions(board.folder, None)
    assert board.get_reason() == ""


def test_a_damaged_file_lets_nothing_be_trained_and_says_so(board):
    (board.folder / "conditions.toml").write_text("[conditions]\nmin_batery = 1\n")
    assert "did you mean conditions.min_battery?" in board.get_reason()
    save_conditions(board.folder, b"[conditions]\n")
    assert board.get_reason() == ""


def test_work_under_way_is_ended_before_the_hours_are_over(board):
    save_conditions(board.folder, NIGHT)
    board.wait(6 * 3600 - STEP_MARGIN * FIRST_STEP_S - 0.4)
    with board.gate.work():
        board.gate.require()
        board.wait(0.4)
        board.gate.require()
        board.wait(30.0)
        with pytest.raises(ConditionsEndedError) as ended:
            board.gate.require()
    assert ended.value.blocker.kind == "hours"


@pytest.mark.parametrize("content", [None, b"", b"nan", b"inf", b"-1e9", b"9e99", b"\xff"])
def test_a_restart_remembers_how_long_an_iteration_takes(board, content):
    save_conditions(board.folder, NIGHT)
    with board.gate.work():
        board.wait(400.0)
    assert board.get_reason() == ""
    if content is not None:
        (board.folder / STEP_FILE).write_bytes(content)
    board.start()
    first_s = 400.0 if content is None else FIRST_STEP_S
    board.wait(6 * 3600 - 400.0 - STEP_MARGIN * first_s - 1)
    assert board.get_reason() == ""
    board.wait(2)
    assert board.get_reason() == "its hours end"


def test_the_length_of_an_iteration_is_written_seldom(board):
    save_conditions(board.folder, NIGHT)
    written = []
    for seconds in (400.0, 450.0, 501.0, *[1.0] * 40):
        with board.gate.work():
            board.wait(seconds)
        if (content := (board.folder / STEP_FILE).read_text()) not in written:
            written.append(content)
    assert [float(content) for content in written] == pytest.approx(
        [400.0, 501.0, 501.0 * 0.95**14, 501.0 * 0.95**28], abs=1e-3
    )


def test_work_is_judged_anew_after_a_download_that_took_longer_than_the_hours(board):
    save_conditions(board.folder, NIGHT)
    board.wait(5 * 3600)
    assert board.gate.check() is None
    board.wait(3600)  # downloads
    with board.gate.work(), pytest.raises(ConditionsEndedError, match="outside its hours"):
        board.gate.require()


def test_a_network_that_is_forbidden_is_found_though_the_hours_are_over_too(board):
    board.wait(6 * 3600)
    for owners, runs in ((b'interfaces = ["none0"]', None), (b"", {"interfaces": ["none0"]})):
        save_conditions(board.folder, NIGHT + owners)
        with contextlib.suppress(ConditionsEndedError):
            board.gate.admit("r-1", runs)
        assert board.get_reason() == "outside its hours"
        with pytest.raises(ConditionsEndedError, match="not by none0") as refused:
            board.gate.require_network()
        assert refused.value.blocker.run == ("r-1" if runs else "")
    save_conditions(board.folder, NIGHT)
    board.gate.complete_run("r-1")
    board.gate.require_network()


ROUTE = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\n{}\t00000000\t0100A8C0\t3\t0\t0\t600\t00000000\n"
METERED, UNMETERED = ({"proc/net/route": ROUTE.format(name)} for name in ("wwan0", "eth0"))


def find_refused(*steps):
    refused = []
    for step in steps:
        try:
            step()
        except ConditionsEndedError:
            refused.append(step.__name__)
    return refused


@pytest.mark.parametrize("is_of_run", [False, True])
@pytest.mark.parametrize(
    ("unmetered", "kind", "refused"),
    [
        (True, "network", ["require", "require_network", "require_download", "charge"]),
        (("up",), "network", ["require", "require_network", "require_download", "charge"]),
        (("down",), "download", ["require_download"]),
        (("bases",), None, ["charge"]),
        (("down", "bases"), "download", ["require_download", "charge"]),
        ((), None, []),
    ],
)
def test_a_metered_link_keeps_away_what_the_owner_or_the_run_says_and_nothing_else(
    board, unmetered, kind, refused, is_of_run
):
    def charge():
        board.gate.charge_file(1)

    gate, conditions = board.gate, Conditions(unmetered=unmetered)
    plant(board.root, UNMETERED)
    if not is_of_run:
        save_conditions(board.folder, format_toml({"conditions": conditions.to_json()}).encode())
    gate.admit("r-1", conditions.to_json() if is_of_run else None)
    with gate.work():
        charge()
        plant(board.root, METERED)
        board.wait(1.0)
        found = gate.check()
        assert (found and found.kind) == kind
        assert find_refused(gate.require, gate.require_network, gate.require_download, charge) == refused
    blocker = (gate.find_run_blocker() if is_of_run else gate.find_owner_blocker()) if kind else None
    assert (blocker and blocker.kind) == kind


def test_a_base_that_may_not_come_blocks_its_own_run_until_the_link_is_unmetered_for_a_while(board):
    reason = "it waits with the base of the run, as its connection is metered"
    waits = Blocker(kind="download", reason=reason, run="r-1")
    plant(board.root, METERED)
    save_conditions(board.folder, b'[conditions]\nunmetered = ["bases"]\n')
    board.gate.admit("r-1", None)
    with board.gate.work(), pytest.raises(ConditionsEndedError) as ended:
        board.gate.charge_file(1)
    assert (ended.value.blocker, board.gate.find_run_blocker()) == (waits, waits)
    board.gate.admit("r-2", None)  # its base is here
    assert (board.gate.check(), board.gate.find_run_blocker()) == (None, None)
    with pytest.raises(ConditionsEndedError, match="waits with the base"):
        board.gate.admit("r-1", None)
    plant(board.root, UNMETERED)
    board.wait(HOLD_S - 1)
    assert board.gate.find_run_blocker() == waits
    board.wait(1.0)
    board.gate.admit("r-1", None)
    with board.gate.work():
        board.gate.charge_file(1)
        plant(board.root, METERED)
        board.gate.require_base()  # looks every half a second
        board.wait(0.5)
        with pytest.raises(ConditionsEndedError):
            board.gate.require_base()
    board.gate.complete_run("r-1")
    assert board.gate.find_run_blocker() is None


def test_whether_the_connection_is_metered_is_told_while_a_run_asks(board):
    plant(board.root, METERED)
    assert board.gate.read_metered() is None
    board.gate.admit("r-1", None, asks_metered=True)
    board.gate.admit("r-2", None)
    assert board.gate.read_metered() is True
    plant(board.root, UNMETERED)
    assert board.gate.read_metered() is False
    board.gate.complete_run("r-1")
    assert board.gate.read_metered() is None


def test_a_base_is_not_fetched_beyond_the_hours(board):
    save_conditions(board.folder, NIGHT)
    board.gate.admit("r-1", None)
    with board.gate.work():
        board.gate.charge_file(1)
        board.wait(6 * 3600.0)
        with pytest.raises(ConditionsEndedError, match="outside its hours"):
            board.gate.require_base()


def test_the_runs_conditions_hold_in_its_work_beside_the_owners(board):
    run = {"zone": "UTC", "hours": ["01:00-02:00"]}
    night = Blocker(kind="hours", reason="outside its hours", free_at_s=MIDNIGHT_S + 3600, run="r-1")
    with pytest.raises(ConditionsEndedError) as ended:
        board.gate.admit("r-1", run)
    assert ended.value.blocker == board.gate.find_run_blocker() == night
    assert board.gate.check() is None, "another run may have its work"
    with board.gate.work():
        assert board.gate.check() == night
        board.wait(3600)
        assert board.get_reason() == ""
        board.gate.admit("r-1", run)
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\nhours = ["03:00-04:00"]\n')
    with board.gate.work():
        assert (board.get_reason(), board.gate.check().run) == ("outside its hours", ""), "the owner's"
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\nhours = ["00:00-24:00"]\n')
    board.wait(3600)
    with board.gate.work():
        assert board.gate.check().run == "r-1", "the run's, though the owner allows it"
    assert board.gate.find_owner_blocker() is None


def test_the_conditions_of_a_run_are_dropped_with_its_end_and_with_the_next_run(board):
    run = {"zone": "UTC", "hours": ["01:00-02:00"]}
    for drop in (lambda: board.gate.complete_run("r-1"), lambda: board.gate.admit("r-2", None)):
        with pytest.raises(ConditionsEndedError):
            board.gate.admit("r-1", run)
        board.gate.complete_run("another")
        assert board.gate.find_run_blocker() is not None
        drop()
        assert board.gate.find_run_blocker() is None


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({"zone": "Mars/Base"}, "conditions.zone must be an IANA time zone, got 'Mars/Base'"),
        ({"day": {"traffic_mb": 1}}, "unknown setting conditions.day"),
        ({"hours": ["22:00-06:00"] * 25}, "conditions.hours must be at most 24 spans"),
        ("always", "conditions must be a table"),
    ],
)
def test_conditions_of_a_run_that_make_no_sense_on_this_board_let_nothing_be_done_for_it(board, conditions, reason):
    with pytest.raises(ConditionsEndedError, match=f"its conditions cannot be kept here: {reason}") as ended:
        board.gate.admit("r-1", conditions)
    assert (ended.value.blocker.kind, ended.value.blocker.run) == ("file", "r-1")
    board.gate.admit("r-2", {})


def test_power_that_a_run_asks_for_must_hold_for_a_while_and_the_owners_work_does_not_wait(board):
    plant(board.root, zones({"cpu-thermal": 61.0}))
    with pytest.raises(ConditionsEndedError, match="it is at 61 °C"):
        board.gate.admit("r-1", {"max_temperature_c": 60})
    plant(board.root, zones({"cpu-thermal": 59.0}))
    board.wait(HOLD_S - 1)
    assert board.gate.check() is None
    assert board.gate.find_run_blocker() is not None
    board.wait(1)
    board.gate.admit("r-1", {"max_temperature_c": 60})


def test_a_pause_holds_over_restarts_and_clock_jumps_and_ends_in_time(board):
    save_pause(board.folder, 7200.0, board.clocks)
    assert board.gate.check().free_at_s == MIDNIGHT_S + 7200
    board.wall_s += 86_400
    board.start()
    assert board.get_reason() == "paused on the board"
    board.wait(7199)
    assert board.get_reason() == "paused on the board"
    board.wait(1)
    assert board.get_reason() == ""


def test_after_a_reboot_the_clock_ends_a_pause(board):
    save_pause(board.folder, 7200.0, board.clocks)
    board.boot_id, board.up_s = "second", 1e6
    board.start()
    assert board.get_reason() == "paused on the board"
    board.wall_s += 7200
    assert board.get_reason() == ""


def test_a_pause_without_an_end_and_a_damaged_one_last_until_it_is_resumed(board):
    save_pause(board.folder, None, board.clocks)
    board.wait(1e8)
    assert board.get_reason() == "paused on the board"
    for content in ("", "{", '{"until_s": "x"}'):
        (board.folder / "pause.json").write_text(content)
        assert board.get_reason() == "paused on the board"
    assert clear_pause(board.folder)
    assert board.get_reason() == ""
    assert not clear_pause(board.folder)


def test_heat_that_flickers_blocks_until_it_is_cool_for_a_while(board):
    save_conditions(board.folder, b"[conditions]\nmax_temperature_c = 60\n")
    plant(board.root, zones({"cpu-thermal": 61.0}))
    assert board.get_reason() == "it is at 61 °C, it trains up to 60 °C"
    plant(board.root, zones({"cpu-thermal": 59.0}))
    board.wait(HOLD_S - 1)
    assert board.get_reason() != ""
    board.wait(1)
    assert board.get_reason() == ""


def test_a_transfer_that_does_not_fit_into_the_budget_does_not_begin(board):
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\n[conditions.day]\ntraffic_mb = 2\n')
    assert board.get_reason() == ""
    board.gate.charge_traffic(1_400_000)
    with pytest.raises(ConditionsEndedError, match="its 2 MB of this day are used up"):
        board.gate.charge_traffic(600_001)
    board.gate.charge_traffic(400_000)
    board.gate.charge_traffic(-100_000)
    board.gate.charge_traffic(100_000)
    board.start()
    assert "used up" in board.get_reason()
    board.wait(86_400)
    assert board.get_reason() == ""


WRITTEN = b'[conditions]\nzone = "UTC"\n[conditions.day]\nwritten_mb = 10\n'


def test_what_is_written_to_disk_counts_from_the_budget_on_and_ends_work_before_it_is_passed(board):
    def write(own, child=0):
        plant(board.root, {"proc/self/io": f"rchar: 7\nwrite_bytes: {own}\ncancelled_write_bytes: 5\n"})
        plant(board.root, {"proc/self/task/7/children": "8 ", "proc/8/io": f"write_bytes: {child}\n"})

    write(900_000_000)
    save_conditions(board.folder, WRITTEN)
    assert board.get_reason() == ""
    with board.gate.work():
        write(901_000_000, child=2_000_000)
        board.wait(1)
        board.gate.require()
    assert board.gate.describe_budgets() == {"written a day": "3 of 10 MB written"}
    write(902_000_000, child=2_000_000)  # between works, counted with the next
    with board.gate.work():
        pass
    assert board.gate.describe_budgets() == {"written a day": "4 of 10 MB written"}
    with pytest.raises(ConditionsEndedError, match="its 10 MB written of this day are used up"):
        board.gate.charge_file(6_500_000)
    board.gate.charge_file(1_500_000)
    write(903_500_000, child=2_000_000)  # the file that was charged
    with board.gate.work():
        pass
    assert board.gate.describe_budgets() == {"written a day": "5.5 of 10 MB written"}
    board.start()
    assert board.gate.describe_budgets() == {"written a day": "5.5 of 10 MB written"}
    with board.gate.work():
        write(908_000_000, child=2_000_000)
        board.wait(1)
        with pytest.raises(ConditionsEndedError, match="used up"):
            board.gate.require()


def test_a_base_from_a_stick_counts_as_written_and_a_metered_link_does_not_keep_it_away(board):
    plant(board.root, {**METERED, "proc/self/io": "write_bytes: 5\n", "proc/self/task/7/children": ""})
    budgets = b"[conditions.day]\nwritten_mb = 10\ntraffic_mb = 1\n"
    save_conditions(board.folder, b'[conditions]\nunmetered = ["bases"]\n' + budgets)
    with board.gate.work():
        board.gate.charge_copy(8_000_000)
        with pytest.raises(ConditionsEndedError, match="its 10 MB written of this day are used up"):
            board.gate.charge_copy(3_000_000)
        board.gate.charge_copy(1_000_000)
    assert board.gate.describe_budgets()["written a day"] == "9 of 10 MB written"


def test_what_was_written_before_a_budget_that_comes_within_a_work_does_not_count(board):
    plant(board.root, {"proc/self/io": "write_bytes: 900000000\n"})
    with board.gate.work():
        save_conditions(board.folder, WRITTEN)
        board.wait(1)
        board.gate.require()
    assert board.gate.describe_budgets() == {"written a day": "0 of 10 MB written"}


def test_where_the_kernel_does_not_count_what_is_written_a_budget_of_it_lets_nothing_be_trained(board):
    save_conditions(board.folder, WRITTEN)
    assert board.get_reason() == "its kernel does not count what is written"
    assert board.gate.list_unknown(board.gate.conditions) == ["written_mb: its kernel does not count what is written"]


def test_processor_seconds_of_a_work_are_charged_and_end_it(board):
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\n[conditions.day]\nprocessor_s = 60\n')
    ticks = 0

    def use(seconds):
        nonlocal ticks
        ticks += int(100 * seconds)
        plant(board.root, {"proc/self/stat": f"7 (edgefl) S 0 0 0 0 0 0 0 0 0 0 {ticks} 0 0 0 20"})
        board.wait(seconds)

    use(30.0)  # before the work: not its own
    used = 0.0
    with board.gate.work():
        while board.gate.check() is None:
            use(2.0)
            used += 2.0
    assert 50 <= used <= 60
    assert board.gate.describe_budgets() == {"processor a day": f"{used:g} of 60 processor seconds"}


@pytest.mark.extended
def test_a_step_ends_within_hours_and_budget_however_often_heartbeats_look_in_between(board):
    hours = b'hours = ["22:00-06:00"]\n'
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\n' + hours + b"[conditions.day]\nprocessor_s = 3030\n")
    ticks = 0

    def iterate():
        nonlocal ticks
        for _ in range(12):  # a minute, with heartbeats
            ticks += 500
            plant(board.root, {"proc/self/stat": f"7 (edgefl) S 0 0 0 0 0 0 0 0 0 0 {ticks} 0 0 0 20"})
            board.wait(5.0)
            board.gate.check()
        board.gate.require()

    def work():
        with board.gate.work():
            while True:
                iterate()

    with pytest.raises(ConditionsEndedError, match="used up"):
        work()
    assert 2800 < ticks / 100 <= 3030
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\n' + hours)
    board.wait(6 * 3600 - 605 - (board.wall_s - MIDNIGHT_S))
    with pytest.raises(ConditionsEndedError, match="its hours end"):
        work()
    assert 6 * 3600 - 76 < board.wall_s - MIDNIGHT_S <= 6 * 3600 - 15
    assert board.get_reason() in {"its hours end", "outside its hours"}  # nothing is begun that would not end in time


def test_energy_that_is_not_known_is_said_before_a_budget_of_it_is_taken(board):
    conditions = Conditions(max_temperature_c=60.0)
    assert board.gate.list_unknown(conditions) == ["max_temperature_c: it has no temperature sensor"]
    plant(board.root, zones({"cpu-thermal": 59.0}))
    board.wait(100)
    assert board.gate.list_unknown(conditions) == []


def test_a_ledger_that_cannot_be_written_lets_nothing_be_trained(board, full_card):
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\n[conditions.day]\nprocessor_s = 60\n')
    with full_card():
        with board.gate.work():
            pass
        assert "its budgets cannot be kept" in board.get_reason()
    assert board.get_reason() == ""


@pytest.mark.parametrize("is_working", [True, False])
def test_a_board_that_could_not_write_its_budgets_trains_again_once_it_can(board, full_card, is_working):
    save_conditions(board.folder, PROCESSOR)
    with board.gate.work() if is_working else contextlib.nullcontext():
        assert board.get_reason() == ""
        board.wait(2 * SAVE_INTERVAL_S)
        with full_card():
            assert "its budgets cannot be kept" in board.get_reason()
        assert board.get_reason() == ""
    save_conditions(board.folder, None)
    assert board.get_reason() == ""


def test_budgets_that_can_be_written_again_excuse_no_damaged_file(board, full_card):
    save_conditions(board.folder, PROCESSOR)
    assert board.get_reason() == ""
    (board.folder / "conditions.toml").write_text("[conditions]\nmin_batery = 1\n")
    with board.gate.work():
        assert "min_batery" in board.get_reason()
        with full_card():
            board.wait(2 * SAVE_INTERVAL_S)
            assert "min_batery" in board.get_reason()
    assert "min_batery" in board.get_reason()


def test_a_budget_of_energy_lets_nothing_be_trained_while_the_power_is_not_known(board):
    save_conditions(board.folder, b"[conditions.day]\nenergy_j = 1000\n")
    assert board.get_reason() == "its power is not known, so its energy cannot be counted"
    plant(board.root, rails("hwmon1", VDD_IN=5000))
    board.wait(100)
    assert board.get_reason() == ""


def test_a_process_beside_the_agent_writes_no_budgets(board):
    save_conditions(board.folder, PROCESSOR)
    for content in (None, b"{"):
        if content is not None:
            (board.folder / USAGE_FILE).write_bytes(content)
        board.start(is_agent=False)
        board.gate.check()
        board.wait(2 * SAVE_INTERVAL_S)
        board.gate.check()
        board.gate.describe_budgets()
        assert (board.folder / USAGE_FILE).exists() == (content is not None)
    assert (board.folder / USAGE_FILE).read_bytes() == b"{"


def test_network_time_that_arrives_after_the_connection_ends_a_day_of_budgets_and_a_set_clock_does_not(board):
    save_conditions(board.folder, PROCESSOR)
    board.gate.observe_skew(3 * 86_400.0)  # before any budget was read
    with board.gate.work():
        plant(board.root, {"proc/self/stat": f"7 (edgefl) S 0 0 0 0 0 0 0 0 0 0 {100 * 60} 0 0 0 20"})
        assert "used up" in board.get_reason()
    board.wall_s += 30 * 86_400
    assert "used up" in board.get_reason()
    board.wall_s -= 27 * 86_400
    assert board.get_reason() == ""


def test_budgets_that_cannot_be_read_after_a_work_leave_its_hours_in_what_is_reported(board, monkeypatch):
    save_conditions(board.folder, NIGHT + b"[conditions.day]\nprocessor_s = 60\n")
    board.gate.check()
    assert board.gate.find_allowance().budgets

    def fail(*_args):
        raise StoreError("the card is full")

    monkeypatch.setattr(BudgetUsage, "list_left", fail)
    allowance = board.gate.find_allowance()
    assert (allowance.budgets, allowance.window.ends_s) == ((), 6 * 3600)


def test_a_board_without_hours_and_budgets_reports_no_allowance(board):
    assert board.gate.find_allowance() is None
    save_conditions(board.folder, b"[conditions]\nunmetered = true\n")
    board.gate.check()
    assert board.gate.find_allowance() is None


def test_the_hours_left_follow_the_clock_wherever_it_jumps_and_the_file(board):
    save_conditions(board.folder, NIGHT)
    board.gate.check()
    assert board.gate.find_allowance().window == Window(ends_s=6 * 3600, reopens_s=22 * 3600)
    board.wait(3600)
    assert board.gate.find_allowance().window == Window(ends_s=5 * 3600, reopens_s=21 * 3600)
    board.wall_s += 22 * 3600  # it is set, to 23 o'clock
    assert board.gate.find_allowance().window == Window(ends_s=7 * 3600, reopens_s=23 * 3600)
    board.wall_s -= 23 * 3600  # and back to the midnight before
    assert board.gate.find_allowance().window.ends_s == 6 * 3600
    board.wait(7 * 3600)
    assert board.gate.find_allowance().window == Window(ends_s=0.0, reopens_s=15 * 3600)
    board.wait(-7 * 3600)
    save_conditions(board.folder, NIGHT.replace(b"06:00", b"04:00"))
    board.gate.check()
    assert board.gate.find_allowance().window.ends_s == 4 * 3600
    save_conditions(board.folder, b'[conditions]\nzone = "UTC"\nhours = ["00:00-24:00"]\n')
    board.gate.check()
    assert board.gate.find_allowance() is None, "hours that never end"


def test_the_hours_of_the_admitted_run_are_reported_beside_the_owners(board):
    save_conditions(board.folder, NIGHT)
    board.gate.check()
    board.gate.admit("r-1", {"zone": "UTC", "hours": ["00:00-02:00"]})
    allowance = board.gate.find_allowance()
    assert (allowance.window.ends_s, allowance.run, allowance.run_window.ends_s) == (6 * 3600, "r-1", 2 * 3600)
    board.gate.admit("r-2", None)
    assert (board.gate.find_allowance().run, board.gate.find_allowance().run_window) == ("", None)


def test_what_is_left_of_budgets_has_the_reserve_of_a_step_taken_off_and_the_use_of_a_second_is_learnt(board):
    save_conditions(board.folder, PROCESSOR.replace(b"60", b"600") + b"traffic_mb = 5\n")
    board.gate = ConditionGate(board.folder, clocks=board.clocks, facts=(facts := CountedFacts()))
    assert board.gate.check() is None
    left = {budget.kind: budget for budget in board.gate.find_allowance().budgets}
    assert (left["processor"].left, left["processor"].limit, left["processor"].per_s) == (595.0, 600.0, None)
    assert (left["traffic"].left, left["traffic"].renews_s) == (5e6, 86_400.0)
    with board.gate.work():
        for _ in range(10):
            board.wait(10.0)
            facts.processor_s += 30.0
            board.gate.require()
    for _ in range(10):
        board.gate.charge_traffic(400_000)
    left = {budget.kind: budget for budget in board.gate.find_allowance().budgets}
    assert (left["processor"].left, left["processor"].per_s) == (600.0 - 300.0 - 0.95 * 60.0, 3.0)
    assert (left["traffic"].left, left["traffic"].per_s) == (1e6, None)
    board.gate.charge_traffic(250_000)
    left = {budget.kind: budget.left for budget in board.gate.find_allowance().budgets}
    assert left["traffic"] == 0.0, "less than two of the largest transfers, so it trains nothing"
    board.wait(86_400.0 - 100.0)
    assert {budget.left for budget in board.gate.find_allowance().budgets} == {543.0, 5e6}, "of the next day"


class CountedFacts(FactReader):
    """Facts of a board whose processor time a test sets."""

    processor_s = 0.0

    def read_processor_s(self):
        return self.processor_s
