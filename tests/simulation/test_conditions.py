"""Conditions of simulated boards; the check of what they did is arithmetic on the history, apart from the gate."""

import gc
import logging
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

import edgefl
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.device.conditions.gate import ConditionGate
from edgefl.simulation import simulated_run
from edgefl.simulation.history_recorder import SIMULATION_EPOCH

DAY_S, HOUR_S, ITERATION_S = 86_400.0, 3600.0, 120.0
LINKS = "up_bytes_per_s = 1e12\ndown_bytes_per_s = 1e12\njitter = 0.0\n"
OFFICE = f"""[profile.office]
{LINKS}
[profile.office.conditions]
hours = ["19:00-07:00"]
weekdays = ["mon", "tue"]
[profile.office.conditions.day]
processor_s = 7200
"""
CAR = f"""[profile.car]
{LINKS}
charging = [[0, 1], [25100, 0], [61210, 1], [111700, 0], [150030, 1]]
metered = [[0, 0], [25100, 1], [70000, 0], [111700, 1], [150030, 0]]
[profile.car.conditions]
charging = true
unmetered = true
[profile.car.conditions.day]
traffic_mb = 1.0
"""
CAR_SPANS = ((0, 25_100), (70_000, 111_700), (150_030, 3 * DAY_S))
OFFICE_SPANS = ((0, 0), (19 * HOUR_S, 31 * HOUR_S), (43 * HOUR_S, 55 * HOUR_S))  # from Monday 0 o'clock on

MODEL = {"model": "logistic"}


@pytest.fixture
def simulate(tmp_path):
    def run(
        profiles, names, *, days=3.0, conditions=None, simulation=None, model=MODEL, bookkeeping_only=False,
        compression=None, strategy=None, adapt=None,
        **run_section,
    ):  # fmt: skip
        path = tmp_path / "profiles.toml"
        path.write_text(profiles)
        config = {
            "run": {"task": "digits", "seconds": days * DAY_S, "seed": 3, "evaluate_on": "none", **run_section},
            "task": model,
            "strategy": strategy or {"iterations": 7},
            "devices": {"min": 1},
            "conditions": conditions or {},
            "compression": compression or {},
            "adapt": adapt or {},
            "simulation": {
                "profiles": names, "profile_file": str(path), "iteration_s": ITERATION_S, "workers": 0,
                **(simulation or {}),
            },
        }  # fmt: skip
        root = tmp_path / f"run-{len([*tmp_path.iterdir()])}"  # runs of one store follow each other in time
        return edgefl.simulate(config, devices=len(names), scheme="iid", root=root, bookkeeping_only=bookkeeping_only)

    return run


@pytest.fixture
def folders(monkeypatch):
    """Paths of the folders that simulations make for their boards."""
    found, make = [], simulated_run._make_memory_folder

    def record():
        made = make()
        found.append(Path(made.name))
        return made

    monkeypatch.setattr(simulated_run, "_make_memory_folder", record)
    return found


def list_works(result, device):
    """Returns begin and end of every work, in virtual seconds; links are so fast that all of it is training."""
    rows = [row for row in list_updates(result) if row["device_id"] == device]
    return [(row["dispatched_at"], row["ended_at"]) for row in rows if row["ended_at"] > row["dispatched_at"]]


def list_updates(result):
    times = ("dispatched_at", "ended_at")
    return [{**row, **{name: row[name] - SIMULATION_EPOCH for name in times}} for row in result.updates]


def count_outside_s(works, spans, overrun_s=0.0):
    """Returns the seconds of works outside the spans, and of the iteration under way at the end of one."""
    ends = [(start, end + overrun_s * (end > 0)) for start, end in spans]
    inside_s = sum(max(0.0, min(stop, end) - max(begin, start)) for begin, stop in works for start, end in ends)
    return sum(stop - begin for begin, stop in works) - inside_s


def sum_by_day(works):
    edges = [day * DAY_S for day in range(5)]
    return [sum(max(0.0, min(b, hi) - max(a, lo)) for a, b in works) for lo, hi in pairwise(edges)]


def sum_bytes_by_day(result):
    """Returns what updates cost, lost ones too: a board's work costs the model, and once it is trained the update."""
    rows = list_updates(result)
    used = next(row for row in rows if row["outcome"] == "used")
    return [
        sum(
            used["bytes_down"] + (used["bytes_up"] if row["outcome"] == "used" else 0)
            for row in rows
            if row["ended_at"] > row["dispatched_at"] and day <= row["ended_at"] / DAY_S < day + 1
        )
        for day in range(3)
    ]


def test_no_second_is_trained_outside_hours_and_no_budget_of_a_day_is_passed(simulate):
    result = simulate(OFFICE, ["office"])
    works = list_works(result, "device-01")
    assert works
    assert count_outside_s(works, OFFICE_SPANS) == pytest.approx(0.0, abs=1e-3)
    assert 0.7 * 7200 < max(sum_by_day(works)) <= 7200


def test_a_trace_ends_work_after_the_iteration_under_way_and_no_byte_is_sent_over_a_metered_link(simulate):
    result = simulate(CAR, ["car"])
    works = list_works(result, "device-01")
    assert works
    assert count_outside_s(works, CAR_SPANS, ITERATION_S) == pytest.approx(0.0, abs=1e-3)
    sent = [row for row in list_updates(result) if row["outcome"] == "used"]
    assert count_outside_s([(row["ended_at"] - 1, row["ended_at"]) for row in sent], CAR_SPANS) == 0
    assert 0.5e6 < max(sum_bytes_by_day(result)) <= 1e6


def test_nothing_is_trained_whose_update_would_not_fit_and_one_that_did_not_is_the_size_of_the_next(
    simulate, monkeypatch
):
    def spend(num_mb, down):
        profiles = OFFICE.replace("processor_s = 7200", f"traffic_mb = {num_mb}")
        return simulate(
            profiles, ["office"], model={}, task="mnist", bookkeeping_only=True, compression={"down": down}
        )  # a model of 1.69 MB

    assert sum_bytes_by_day(spend(10, "dense")) == [4 * 1_686_600] * 3  # two models and updates
    monkeypatch.setattr(ConditionGate, "find_allowance", lambda _: None)  # with the gate alone
    works = list_works(spend(1, "int8"), "device-01")  # 0.42 MB down, and 1.69 MB up that never fit
    assert len([begin for begin, end in works if end - begin > 1]) == 1


def test_an_update_is_not_sent_over_a_metered_link_though_the_cable_was_pulled_too(simulate):
    result = simulate(CAR.partition("[profile.car.conditions.day]")[0], ["car"], days=0.4)
    sent = [(row["ended_at"] - 1, row["ended_at"]) for row in list_updates(result) if row["outcome"] == "used"]
    assert len(sent) > 10
    assert count_outside_s(sent, CAR_SPANS) == 0


@pytest.mark.parametrize(("direction", "finishes"), [("down", True), ("up", False)])
def test_a_link_that_is_metered_in_one_direction_keeps_new_work_away_and_ends_it_only_where_nothing_may_go_up(
    simulate, direction, finishes
):
    metered = "metered = [[0, 0], [25100, 1], [70000, 0]]\n"
    result = simulate(
        f'[profile.car]\n{LINKS}{metered}[profile.car.conditions]\nunmetered = ["{direction}"]\n', ["car"], days=1.0
    )
    works = [row for row in list_updates(result) if row["ended_at"] > row["dispatched_at"]]
    assert not [row for row in works if 25_100 <= row["dispatched_at"] < 70_000]
    assert [row["outcome"] == "used" for row in works if row["dispatched_at"] < 25_100 < row["ended_at"]] == [
        finishes
    ]
    assert [row for row in works if row["dispatched_at"] > 70_000 and row["outcome"] == "used"]


def test_a_base_waits_for_an_unmetered_link_while_boards_that_have_it_go_on(simulate):
    link = '[profile.{0}]\n{1}metered = {2}\n[profile.{0}.conditions]\nunmetered = ["bases"]\n'
    profiles = link.format("late", LINKS, "[[0, 1], [50000, 0], [60000, 1]]")
    profiles += link.format("early", LINKS, "[[0, 0], [1000, 1]]")
    result = simulate(profiles, ["late", "early"], days=1.0, model={}, adapt={"method": "lora", "rank": 2})
    late, early = list_works(result, "device-01"), list_works(result, "device-02")
    assert 50_000 <= late[0][0] < 50_000 + 2000
    assert late[-1][1] > 80_000
    assert (early[0][0], early[-1][1] > 80_000) == (0.0, True)
    downs = [
        row["bytes_down"] for row in list_updates(result) if row["device_id"] == "device-01" and row["bytes_down"]
    ]
    assert downs[0] > 2 * downs[1] == 2 * downs[-1]


def test_the_check_finds_boards_that_are_always_free(simulate):
    result = simulate(f"[profile.office]\n{LINKS}", ["office"])
    works = list_works(result, "device-01")
    assert count_outside_s(works, OFFICE_SPANS) > DAY_S
    assert max(sum_by_day(works)) > 7200


def test_the_conditions_of_the_run_hold_beside_the_boards_own_in_utc_whatever_the_offset_of_its_start(simulate):
    result = simulate(
        OFFICE + f"[profile.free]\n{LINKS}", ["office", "free"],
        conditions={"hours": ["06:00-20:00"]}, simulation={"starts_at": "2026-01-05T01:00+01:00"},
    )  # fmt: skip
    mornings = [(day * DAY_S + 6 * HOUR_S, day * DAY_S + 7 * HOUR_S) for day in range(3)]
    both = [*mornings, *((day * DAY_S + 19 * HOUR_S, day * DAY_S + 20 * HOUR_S) for day in range(2))]
    office, free = list_works(result, "device-01"), list_works(result, "device-02")
    assert office
    assert count_outside_s(office, both) < 1e-3
    days = [(day * DAY_S + 6 * HOUR_S, day * DAY_S + 20 * HOUR_S) for day in range(3)]
    assert free
    assert count_outside_s(free, days) < 1e-3


def test_a_run_that_ends_while_boards_work_leaves_nothing_behind(simulate, folders, caplog):
    simulate(OFFICE, ["office", "office"], days=19.1 / 24)
    assert "cannot be kept" not in caplog.text
    gc.collect()
    assert "cannot be kept" not in caplog.text
    assert folders
    assert not [path for path in folders if path.exists()]


def test_boards_without_conditions_have_no_folder_and_one_is_made_elsewhere_where_memory_has_no_room(
    simulate, folders, monkeypatch
):
    simulate(f"[profile.office]\n{LINKS}", ["office"], days=0.1)
    assert folders == []
    make = tempfile.TemporaryDirectory

    def make_without_memory(**options):
        if options.get("dir") == "/dev/shm":
            raise OSError(28, "no space left on device")
        return make(**options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", make_without_memory)
    assert list_works(simulate(OFFICE, ["office"], days=0.9), "device-01")
    assert len(folders) == 1


def test_a_round_waits_for_the_night(simulate):
    result = simulate(OFFICE, ["office", "office"], days=40, rounds=1, seconds=None)
    assert result.status == "finished"
    assert min(row["dispatched_at"] for row in list_updates(result)) == pytest.approx(19 * HOUR_S, abs=31.0)


def test_a_run_that_no_board_is_ever_free_for_fails_and_says_why(simulate, caplog):
    caplog.set_level(logging.ERROR)
    never = f"[profile.hot]\n{LINKS}temperature_c = [[0, 90]]\n[profile.hot.conditions]\nmax_temperature_c = 60\n"
    with pytest.raises(RunFailedError, match=r"62 virtual days: .* it is at 90 °C, it trains up to 60 °C"):
        simulate(never, ["hot"], rounds=1, seconds=None)


@pytest.mark.timeout(60)
def test_a_run_of_which_no_work_ever_fits_into_the_hours_ends(simulate):
    hour = f'[profile.hour]\n{LINKS}[profile.hour.conditions]\nhours = ["22:00-23:00"]\n'
    with pytest.raises(RunFailedError, match=r"hours and budgets .*hold no work"):
        simulate(hour, ["hour"], rounds=1, seconds=None, strategy={"seconds": 7200})


@pytest.mark.timeout(60)
def test_a_run_whose_boards_stay_away_ends(simulate):
    with pytest.raises(RunFailedError, match=r"nothing happens any more at .* 0 of 1 devices are there"):
        simulate(
            OFFICE.replace("[profile.office]\n", "[profile.office]\noffline = [[86400, inf]]\n"), ["office"],
            rounds=10_000, seconds=None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "conditions", "message"),
    [
        ("[profile.a.conditions]\nmax_temperature_c = 60\n", {}, "max_temperature_c: it has no temperature sensor"),
        ("[profile.a.conditions.day]\nenergy_j = 60\n", {}, "energy_j: it has no power sensor"),
        ("", {"max_temperature_c": 60}, "max_temperature_c: it has no temperature sensor"),
        ("", {"interfaces": ["eth0"]}, "have no network interfaces"),
        ('[profile.a.conditions]\nhour = ["1:00-2:00"]\n', {}, "conditions.hour"),
    ],
)
def test_conditions_that_could_never_hold_are_refused(simulate, profile, conditions, message):
    with pytest.raises(ConfigError, match=message):
        simulate(f"[profile.a]\n{LINKS}{profile}", ["a"], conditions=conditions)


def count_lost(result):
    return sum(row["outcome"] == "lost" for row in result.updates)


def test_a_board_starts_no_work_that_its_hours_or_budgets_do_not_hold_once_it_is_measured(simulate, monkeypatch):
    planned = simulate(OFFICE, ["office"])
    assert count_lost(planned) == 0
    assert sum(sum_by_day(list_works(planned, "device-01"))) > 0
    monkeypatch.setattr(ConditionGate, "find_allowance", lambda _: None)  # as an older release
    blind = simulate(OFFICE, ["office"])
    assert count_lost(blind) >= 2
    used = [sum(row["outcome"] == "used" for row in result.updates) for result in (planned, blind)]
    assert used[0] >= 0.8 * used[1]


def test_a_round_waits_for_the_night_where_the_rest_of_this_one_holds_no_work(simulate):
    profiles = OFFICE.split("[profile.office.conditions.day]", maxsplit=1)[0]
    result = simulate(profiles, ["office"], days=2.0, strategy={"iterations": 180})  # 6 of 12 hours
    works = list_works(result, "device-01")
    assert count_lost(result) == 0
    assert [round(start / HOUR_S) for start, _ in works] == [19, 43], "after each the rest of the night is too short"
    assert count_outside_s(works, OFFICE_SPANS) == pytest.approx(0.0, abs=1e-3)


def test_a_budget_of_bytes_that_no_longer_holds_model_and_update_keeps_a_board_out_until_the_next_day(simulate):
    profiles = OFFICE.replace("processor_s = 7200", "traffic_mb = 1.0")
    result = simulate(profiles, ["office"], strategy={"iterations": 2}, model={"model": "mlp"})
    assert result.updates
    assert count_lost(result) == 0
    assert max(sum_bytes_by_day(result)) <= 1e6


def test_esync_gives_a_board_as_many_iterations_as_its_hours_hold_and_never_loses_them(simulate, monkeypatch):
    hours = '[profile.fast.conditions]\nhours = ["19:00-07:00"]\n'
    fast = f"[profile.fast]\n{LINKS}speed = 100.0\n{hours}"
    slow = f"[profile.slow]\n{LINKS}\n"

    def run():
        return simulate(
            fast + slow, ["fast", "slow"], days=2.0, strategy={"name": "esync"}, simulation={"iteration_s": 7200.0}
        )

    planned = run()
    counts = [row["iterations"] for row in planned.updates if row["device_id"] == "device-01"]
    assert count_lost(planned) == 0
    assert max(counts) > 10
    assert 1 < min(counts[1:]) < max(counts), "the last of a night is cut"
    monkeypatch.setattr(ConditionGate, "find_allowance", lambda _: None)
    assert count_lost(run()) >= 1
