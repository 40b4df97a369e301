"""The words of conditions, and what they mean by the clock of a zone."""

from datetime import UTC, datetime

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgefl.core.conditions import (
    WEEKDAYS,
    BoardFacts,
    Budget,
    Conditions,
    Switch,
    find_blocker,
    find_close_s,
    find_next_open_s,
    find_period_end_s,
    find_zone,
    format_blocker,
    is_open,
    parse_blocker,
    parse_conditions,
)
from edgefl.core.errors import ConfigError


def at(text):
    """Unix seconds of a UTC time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_limit_of_zero_is_shown():
    text = "[conditions]\nmin_battery = 0\nmax_other_load = 0.0\n"
    assert parse_conditions(text).to_json() == {"min_battery": 0, "max_other_load": 0}


def test_a_file_says_what_it_means():
    conditions = parse_conditions(
        '[conditions]\nzone = "Europe/Oslo"\nhours = ["22:00-06:00"]\nweekdays = ["mon"]\nmin_battery = 0.5\n'
        "[conditions.day]\ntraffic_mb = 20\n[conditions.month]\nprocessor_s = 3600\nenergy_j = 1e6\n"
    )
    assert conditions.budgets == {"day": {"traffic": 20e6}, "month": {"processor": 3600, "energy": 1e6}}
    assert Conditions(**{**conditions.to_json(), "day": Budget(traffic_mb=20), "hours": ("22:00-06:00",),
                         "weekdays": ("mon",), "month": conditions.month}) == conditions  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[conditons]", r"unknown table 'conditons' \(did you mean conditions\?\)"),
        ("", r"there is no table \[conditions\]"),
        ("[conditions]\nmin_batery = 0.5", r"min_batery: did you mean conditions.min_battery\?"),
        ("[conditions]\nmin_battery = 50", "min_battery must be .*1.*, got 50"),
        ('[conditions]\nzone = "Europe/Olso"', r"got 'Europe/Olso' \(did you mean Europe/Oslo\?\)"),
        ('[conditions]\nzone = "../../etc/passwd"', "must be an IANA time zone"),
        ('[conditions]\nzone = "Europe"', "must be an IANA time zone"),
        ('[conditions]\nhours = ["22-06"]', "must be spans such as '22:00-06:00', got '22-06'"),
        ('[conditions]\nhours = ["24:00-06:00"]', "must be spans"),
        ('[conditions]\nhours = ["22:00-24:01"]', "must be spans"),
        ('[conditions]\nhours = ["06:00-06:00"]', "an empty span; 00:00-24:00 is a whole day"),
        (
            '[conditions]\nweekdays = ["mon", "mon", "mon", "mon", "mon", "mon", "mon", "mon"]',
            "at most 7 days, got 8",
        ),
        ('[conditions]\nzone = "Mars"\nhours = ["1"]\nweekdays = ["x"]', "zone must .*hours must .*weekdays must"),
        ('[conditions]\nweekdays = ["Monday"]', r"got 'Monday' \(did you mean mon\?\)"),
        ('[conditions]\ninterfaces = ["eth 0"]', "names of interfaces"),
        (
            '[conditions]\nunmetered = ["up", "base"]',
            r"true, false or a list of down, up, bases, got \['up', 'base'\]",
        ),
        ('[conditions]\nunmetered = ["up", "up", "up", "up"]', "unmetered must be true, false or a list"),
        ('[conditions]\nunmetered = "up"', "unmetered must be true or false or a list of texts, got 'up'"),
        ("[conditions.day]\ntraffic_mb = 0", "traffic_mb must be"),
        ("[conditions.day]\ntraffic_mb = nan", "traffic_mb must be"),
        ("[conditions", "cannot be read"),
    ],
)
def test_a_wrong_file_gets_one_line_that_says_what_is_right(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_conditions(text)


@pytest.mark.parametrize(
    ("hours", "weekdays", "moment", "expected"),
    [
        # Sundays: on 2026-03-29 Oslo goes from 02:00 (+1) to 03:00 (+2), on 2026-10-25 from 03:00 (+2) to 02:00.
        (("02:00-03:00",), (), "2026-03-29T01:30:00", False),
        (("02:00-03:00",), (), "2026-10-25T00:30:00", True),
        (("02:00-03:00",), (), "2026-10-25T01:30:00", True),
        (("02:00-03:00",), (), "2026-10-25T02:00:00", False),
        (("22:00-06:00",), ("sat",), "2026-03-28T20:59:59", False),
        (("22:00-06:00",), ("sat",), "2026-03-28T21:00:00", True),
        (("22:00-06:00",), ("sat",), "2026-03-29T03:59:59", True),
        (("22:00-06:00",), ("sat",), "2026-03-29T04:00:00", False),
        (("22:00-06:00",), ("sat",), "2026-03-29T21:00:00", False),
        (("22:00-06:00",), ("sat",), "2026-03-28T03:00:00", False),
        (("20:00-24:00",), (), "2026-01-10T22:59:59", True),
        (("20:00-24:00",), (), "2026-01-10T23:00:00", False),
        ((), ("sun",), "2026-01-10T23:00:00", True),
        ((), ("sun",), "2026-01-10T22:59:59", False),
    ],
)
def test_a_span_is_one_of_local_time_and_belongs_to_the_day_on_which_it_begins(hours, weekdays, moment, expected):
    conditions = Conditions(zone="Europe/Oslo", hours=hours, weekdays=weekdays)
    assert is_open(conditions, at(moment)) is expected


SPANS = st.tuples(st.integers(0, 23), st.sampled_from([0, 30]), st.integers(0, 23), st.sampled_from([0, 15]))


@settings(deadline=None)
@given(
    spans=st.lists(SPANS, min_size=1, max_size=2),
    weekdays=st.sets(st.sampled_from(WEEKDAYS), max_size=2),
    zone=st.sampled_from(["Europe/Oslo", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
    day=st.sampled_from(["2026-03-28", "2026-10-24", "2026-10-31", "2026-03-07", "2026-04-04", "2026-06-01"]),
    step=st.integers(0, 287),
)
def test_no_moment_before_the_next_opening_is_open(spans, weekdays, zone, day, step):
    hours = tuple(f"{a:02}:{b:02}-{c:02}:{d:02}" for a, b, c, d in spans if (a, b) != (c, d))
    conditions = Conditions(zone=zone, hours=hours, weekdays=tuple(sorted(weekdays)))
    now_s = int(at(f"{day}T00:00:00")) + 300 * step
    assume(not is_open(conditions, now_s))
    expected = next((s for s in range(now_s + 300, now_s + 9 * 86_400, 300) if is_open(conditions, s)), None)
    assert find_next_open_s(conditions, now_s) == expected


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({"mains": True}, {}, ""),
        ({"mains": True}, {"on_mains": False}, "not on external power"),
        ({"mains": True}, {"battery_status": "Discharging", "battery_fraction": 0.9}, "not on external power"),
        ({"mains": True}, {"battery_status": "Full", "battery_fraction": 1.0}, ""),
        ({"mains": True}, {"battery_fraction": 1.0}, "not on external power"),
        ({"charging": True}, {"battery_status": "Discharging"}, "not being charged"),
        ({"charging": True}, {"battery_status": "Charging"}, ""),
        ({"min_battery": 0.6}, {"on_mains": False, "battery_fraction": 0.6}, ""),
        (
            {"min_battery": 0.6},
            {"on_mains": False, "battery_fraction": 0.59},
            "battery is at 59%, it trains from 60%",
        ),
        ({"min_battery": 0.6}, {"on_mains": True, "battery_fraction": 0.1}, ""),
        ({"min_battery": 0.6}, {"on_mains": False}, "battery is at an unknown value"),
        ({"max_temperature_c": 60}, {"temperature_c": 60.0}, ""),
        ({"max_temperature_c": 60}, {"temperature_c": 61.0}, "it is at 61 °C"),
        ({"max_temperature_c": 60}, {}, "it is at an unknown value"),
        ({"max_other_load": 0.25}, {"other_load": 0.25}, ""),
        ({"max_other_load": 0.25}, {"other_load": 0.26}, "other processes keep 26%"),
        ({"interfaces": ("eth0",)}, {"interface": "wwan0"}, "connected by wwan0, not by eth0"),
        ({"interfaces": ("eth0",)}, {"interface": ""}, "connected by nothing"),
        ({"unmetered": True}, {"is_metered": True}, "metered"),
        ({"unmetered": True}, {}, "not known to be unmetered"),
        ({"unmetered": True}, {"is_metered": False}, ""),
        ({"unmetered": ("bases",)}, {"is_metered": True}, ""),
    ],
)
def test_every_condition_holds_up_to_its_bound_and_never_for_what_is_unknown(settings, facts, reason):
    blocker = find_blocker(Conditions(**settings), BoardFacts(**facts), 0.0)
    assert (blocker is None) if not reason else (blocker is not None and reason in blocker.reason)


def test_a_blocker_from_elsewhere_is_bounded():
    assert parse_blocker({"reason": 3}) is None
    assert parse_blocker(None) is None
    wild = parse_blocker({"reason": "a\x1b[31m" + "b" * 1000, "free_at_s": 1e300, "kind": "x" * 99})
    assert wild is not None
    assert len(wild.reason) == 200
    assert "\x1b" not in wild.reason
    assert wild.free_at_s is None
    known = parse_blocker({"kind": "hours", "reason": "outside its hours", "free_at_s": at("2026-01-02T03:04:00")})
    assert known is not None
    assert format_blocker(known) == "outside its hours, free at 2026-01-02 03:04 UTC"
    assert (known.run, "run" in known.to_json(), wild.run) == ("", False, "")
    of_run = parse_blocker({"kind": "power", "reason": "no", "run": "r-1\x1b" + "x" * 1000})
    assert of_run is not None
    assert (len(of_run.run), of_run.run[:4], of_run.to_json()["run"]) == (120, "r-1x", of_run.run)
    assert format_blocker(of_run).startswith("by run r-1xxx")
    unknown = parse_blocker({"reason": "no", "run": 3})
    assert unknown is not None
    assert unknown.run == ""


def test_a_day_ends_at_midnight_of_its_zone_and_a_month_with_its_last_day():
    zone = find_zone("Europe/Oslo")
    assert find_period_end_s("day", at("2026-03-29T12:00:00"), zone) == at("2026-03-29T22:00:00")
    assert find_period_end_s("month", at("2026-12-31T22:59:00"), zone) == at("2026-12-31T23:00:00")


@pytest.mark.parametrize(
    ("hours", "weekdays", "now", "ends"),
    [
        (("22:00-06:00",), (), "2026-11-30T23:00", "2026-12-01T06:00"),
        (("22:00-06:00",), (), "2026-12-01T05:59:59", "2026-12-01T06:00"),
        (("22:00-24:00", "00:00-03:10"), (), "2026-11-30T23:00", "2026-12-01T03:10"),
        (("22:00-24:00",), (), "2026-11-30T23:00", "2026-12-01T00:00"),
        (("08:00-12:00", "11:00-14:20"), (), "2026-11-30T09:00", "2026-11-30T14:20"),
        (("22:00-06:00",), ("mon",), "2026-11-30T23:00", "2026-12-01T06:00"),
        ((), ("mon", "tue"), "2026-11-30T23:00", "2026-12-02T00:00"),
        (("00:00-24:00",), (), "2026-11-30T23:00", None),
        ((), (), "2026-11-30T23:00", None),
    ],
)
def test_hours_that_hold_end_at_the_end_of_the_last_span_that_touches_them(hours, weekdays, now, ends):
    found = find_close_s(Conditions(zone="UTC", hours=hours, weekdays=weekdays), at(now))
    assert found == (None if ends is None else at(ends))


@pytest.mark.parametrize(("day", "end_s"), [("2026-03-29", 7 * 3600), ("2026-10-25", 9 * 3600)])
def test_an_hour_more_or_less_of_a_change_of_the_clock_counts_in_what_is_left(day, end_s):
    conditions = Conditions(zone="Europe/Oslo", hours=("22:00-06:00",))
    begin = datetime.fromisoformat(f"{day}T00:00").replace(tzinfo=find_zone("Europe/Oslo")).timestamp() - 2 * 3600
    assert find_close_s(conditions, begin) == begin + end_s


def test_a_gpio_line_of_thousands_of_digits_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="the offset or name of a line"):
        Switch(gpio="/dev/gpiochip0:" + "1" * 5000)
