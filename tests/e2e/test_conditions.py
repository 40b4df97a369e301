"""Boards that train only when they may, in a live fleet: a pause, hours, a kill; their work goes to others."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from edgefl.compression.codec_selection import CANDIDATES
from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, LocalFleet
from edgefl.tasks.adaptation.base_file import encode_base
from edgefl.tasks.registry import make_task

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
PAUSED = "device-01"


def make_fleet(tools: Any, root: Path) -> AbstractContextManager[LocalFleet]:
    return tools.fleet(root, tools.devices(2, "digits", tools.gated))


def get_blocked(fleet: LocalFleet, name: str = PAUSED) -> str | None:
    rows = fleet.make_client().get("/edgefl/v1/devices")["rows"]
    return next(row["blocked"] for row in rows if row["device_id"] == name)


@pytest.mark.parametrize("is_confined", [False, True])
def test_a_paused_board_hands_its_work_back_and_trains_nothing_even_if_killed_until_it_is_resumed(
    fleet: LocalFleet, tools: Any, is_confined: bool
) -> None:
    state = ("--state", fleet.root / PAUSED)
    confined = tools.gated_run(pace_s=0.05, rounds=10_000, min=1, iterations=20)
    long = {"task": "digits", "rounds": 10_000, "evaluate_on": "none"}
    built_in = parse_run({"run": long, "strategy": {"iterations": 1000}, "devices": {"min": 1}})
    run_id = fleet.submit(confined if is_confined else built_in)
    tools.eventually(lambda: tools.used(fleet, run_id, PAUSED), what="it trains")
    assert tools.typed("device", "pause", "1h", *state).code == 0
    assert "paused on the board" in tools.typed("device", "status", *state).out
    tools.eventually(lambda: (get_blocked(fleet) or "").startswith("paused on the board, free at"))
    tools.eventually(lambda: not fleet.make_client().get(f"/edgefl/v1/devices/{PAUSED}").get("run"), what="it ends")
    tools.wait_rounds(fleet, run_id, tools.run(fleet, run_id)["rounds"] + 2)
    num_used = len(tools.used(fleet, run_id, PAUSED))
    fleet.kill(PAUSED)
    fleet.start_device(PAUSED)
    fleet.wait_for_devices(2)
    tools.wait_rounds(fleet, run_id, tools.run(fleet, run_id)["rounds"] + 3)
    assert (get_blocked(fleet) or "").startswith("paused on the board")
    assert len(tools.used(fleet, run_id, PAUSED)) == num_used
    assert tools.typed("device", "resume", *state).out == f"{PAUSED} trains again\n"
    tools.eventually(lambda: len(tools.used(fleet, run_id, PAUSED)) > num_used, what="it trains again")
    outcomes = {row["outcome"] for row in fleet.list_history("updates", run=run_id, device=PAUSED)}
    assert outcomes <= {"used", "lost", "pending", None}
    assert get_blocked(fleet) is None
    tools.stop(fleet, run_id)


def test_a_board_whose_clock_goes_through_the_end_of_its_hours_trains_before_it_and_not_after_and_goes_on_next_day(
    tools: Any, tmp_path: Path
) -> None:
    shift, night = tmp_path / "shift", tmp_path / "night.toml"
    now_s = time.time()
    end_s = (now_s // 86_400 + 2) * 86_400 + 6 * 3600
    shift.write_text(str(end_s - 7200.0 - now_s))
    night.write_text('[conditions]\nzone = "UTC"\nhours = ["22:00-06:00"]\n')
    program = ("env", f"SHIFT_FILE={shift}", sys.executable, str(Path(__file__).parents[1] / "shifted_device.py"))
    devices = [replace(device, program=program) for device in tools.devices(1, "digits")]

    def list_finished_s() -> list[float]:
        return [row["received_at"] for row in fleet.list_history("updates", run=run_id) if row["outcome"] == "used"]

    with tools.fleet(tmp_path / "fleet", devices) as fleet:
        assert tools.typed("device", "set", "--conditions", night, "--state", fleet.root / PAUSED).code == 0
        run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 100_000, "evaluate_on": "none"}}))
        # So many that the longest step, at first FIRST_STEP_S, no longer keeps it from the next.
        tools.eventually(lambda: len(list_finished_s()) > 60, what="it trains within its hours")
        shift.write_text(str(end_s - 20.0 - time.time()))
        ended = "outside its hours, free at"
        tools.eventually(lambda: (get_blocked(fleet) or "").startswith(ended), what="its hours end", timeout_s=60.0)
        time.sleep(6.0)  # a heartbeat; and rows of the history may come later than what they tell of
        assert (get_blocked(fleet) or "").startswith(ended)
        before = list_finished_s()
        assert max(before) + float(shift.read_text()) < end_s + 5.0, "what is finished is sent afterwards"
        shift.write_text(str(end_s + 16 * 3600 + 1.0 - time.time()))
        tools.eventually(lambda: len(list_finished_s()) > len(before), what="it trains in the next night")
        tools.stop(fleet, run_id)


def test_a_run_outside_its_own_hours_waits_is_named_by_its_boards_and_keeps_no_other_run_from_them(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    plan, later = tmp_path / "run.toml", datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=3)
    hours = f"{later:%H}:00-{later:%H}:59"
    base = '[run]\ntask = "digits"\nrounds = 2\nevaluate_on = "none"\n'
    plan.write_text(f'{base}[conditions]\nzone = "UTC"\nhours = ["{hours}"]\n')
    ended = tools.as_operator(fleet, "run", "submit", plan, "--dry-run")
    assert (ended.code, "conditions of the run: 0 would be free now, 2 would not be free" in ended.out) == (41, True)
    assert f"not now by the run's [conditions]: outside its hours, free at {later:%Y-%m-%d %H}:00 UTC" in ended.out
    waiting = tools.as_operator(fleet, "run", "submit", plan).out.strip()
    free = f"by run {waiting}: outside its hours, free at {later:%Y-%m-%d %H}:00 UTC"
    for name in (PAUSED, "device-02"):
        tools.eventually(lambda name=name: get_blocked(fleet, name) == free, what="its boards name the run")
    assert tools.as_operator(fleet, "run", "stop", waiting).code == 0
    plan.write_text(f'{base}[conditions]\nhours = ["00:00-24:00"]\n')
    assert "2 would be free now\n" in tools.as_operator(fleet, "run", "submit", plan, "--dry-run").out
    run_id = tools.as_operator(fleet, "run", "submit", plan).out.strip()
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert {row["device_id"] for row in fleet.list_history("updates", run=run_id)} == {PAUSED, "device-02"}
    assert fleet.list_history("updates", run=waiting) == []
    tools.eventually(lambda: get_blocked(fleet) is None)


@pytest.fixture
def metered_fleet(tools: Any, tmp_path: Path) -> Any:
    """A fleet whose first board asks a stand-in of NetworkManager, which says what is in the file: it is metered."""
    said, program = tmp_path / "said", tmp_path / "bin" / "nmcli"
    said.write_text("yes")
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {said}\n")
    program.chmod(0o755)
    first, second = tools.devices(2, "digits")
    path = f"PATH={program.parent}:{os.environ['PATH']}"
    with tools.fleet(tmp_path / "fleet", [replace(first, program=("env", path, *EDGEFL_COMMAND)), second]) as fleet:
        yield fleet, said


def test_a_base_waits_for_an_unmetered_link_and_its_board_says_so(
    metered_fleet: Any, tools: Any, tmp_path: Path
) -> None:
    fleet, said = metered_fleet
    file, own = tmp_path / "metered.toml", tmp_path / "digits.safetensors"
    own.write_bytes(encode_base(make_task("digits", {}).init(99)))
    fleet.run_command("base", "add", str(own), "--name", "digits-base", "--dir", str(fleet.directory))
    file.write_text('[conditions]\nunmetered = ["bases"]\n')
    state = ("--state", fleet.root / PAUSED)
    assert "may not" not in tools.typed("device", "set", "--conditions", file, *state).out
    sections = {
        "devices": {"min": 1},
        "strategy": {"learning_rate": 0.01},
        "adapt": {"method": "lora", "rank": 2, "base": "digits-base"},
    }
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 10**5, "evaluate_on": "none"}, **sections}))
    waits = f"by run {run_id}: it waits with the base of the run, as its connection is metered"
    tools.eventually(lambda: get_blocked(fleet) == waits, what="its board says what it waits for")
    tools.wait_rounds(fleet, run_id, 3)
    assert not tools.used(fleet, run_id, PAUSED)
    assert not list((fleet.root / PAUSED).glob("bases/*"))
    said.write_text("no")
    tools.eventually(lambda: tools.used(fleet, run_id, PAUSED), 150.0, what="its base comes")
    said.write_text("yes")
    num_used = len(tools.used(fleet, run_id, PAUSED))
    tools.eventually(lambda: len(tools.used(fleet, run_id, PAUSED)) > num_used + 5, what="it goes on with its base")
    outcomes = {row["outcome"] for row in fleet.list_history("updates", run=run_id, device=PAUSED)}
    assert outcomes <= {"used", "lost", "pending", None}
    tools.stop(fleet, run_id)


@pytest.mark.parametrize("compression", [{"up": "auto"}, {"up": "ef|int8", "metered": CANDIDATES[-1]}])
def test_a_board_on_a_metered_link_sends_fewer_bytes_until_it_is_not_metered(
    metered_fleet: Any, tools: Any, tmp_path: Path, compression: dict[str, str]
) -> None:
    fleet, said = metered_fleet
    plan = tmp_path / "run.toml"
    table = "".join(f'{name} = "{codec}"\n' for name, codec in compression.items())
    plan.write_text(f'[run]\ntask = "digits"\nrounds = 100000\nevaluate_on = "none"\n[compression]\n{table}')
    rows = tools.as_operator(fleet, "run", "submit", plan, "--dry-run", "--format", "json").rows
    planned = {row["device_id"]: row["codec"] for row in rows}
    assert (planned[PAUSED], planned["device-02"] in CANDIDATES[:-1]) == (CANDIDATES[-1], True)
    run_id = tools.as_operator(fleet, "run", "submit", plan).out.strip()

    def list_codecs(name: str) -> list[str]:
        return [row["codec"] for row in tools.used(fleet, run_id, name)]

    tools.eventually(lambda: len(list_codecs(PAUSED)) >= 8)
    assert set(list_codecs(PAUSED)[2:]) == {CANDIDATES[-1]}
    if "metered" in compression:
        assert set(list_codecs("device-02")) == {compression["up"]}
    sizes = [{row["bytes_up"] for row in tools.used(fleet, run_id, name)[3:8]} for name in (PAUSED, "device-02")]
    assert max(sizes[0]) < min(sizes[1])
    said.write_text("no")
    tools.eventually(lambda: list_codecs(PAUSED)[-1] != CANDIDATES[-1], 90.0, what="it is not metered any more")
    tools.stop(fleet, run_id)


def test_a_board_outside_its_hours_is_not_chosen_and_a_dry_run_says_when_it_is_free(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    state, file, plan = ("--state", fleet.root / PAUSED), tmp_path / "night.toml", tmp_path / "run.toml"
    later = datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=3)
    file.write_text(f'[conditions]\nzone = "UTC"\nhours = ["{later:%H}:00-{later:%H}:59"]\n')
    plan.write_text('[run]\ntask = "digits"\nrounds = 2\nevaluate_on = "none"\n[devices]\nmin = 1\n')
    assert "may not" in tools.typed("device", "set", "--conditions", file, *state).out
    free = f"outside its hours, free at {later:%Y-%m-%d %H}:00 UTC"
    tools.eventually(lambda: get_blocked(fleet) == free)
    ended = tools.as_operator(fleet, "run", "submit", plan, "--dry-run", "--format", "json")
    row = next(row for row in ended.rows if row["device_id"] == PAUSED)
    assert (row["takes_part"], row["reason"]) == (False, f"it may not train now: {free}")
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2, "evaluate_on": "none"}}))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert {row["device_id"] for row in fleet.list_history("updates", run=run_id)} == {"device-02"}
    assert tools.typed("device", "set", "--conditions", "none", *state).code == 0
    tools.eventually(lambda: get_blocked(fleet) is None)


def test_a_run_waits_for_the_night_where_no_work_fits_into_the_rest_of_this_one_and_says_so(
    tools: Any, tmp_path: Path
) -> None:
    shift, night, plan = tmp_path / "shift", tmp_path / "night.toml", tmp_path / "run.toml"
    now_s = time.time()
    end_s = (now_s // 86_400 + 2) * 86_400 + 6 * 3600
    shift.write_text(str(end_s - 400.0 - now_s))
    night.write_text('[conditions]\nzone = "UTC"\nhours = ["22:00-06:00"]\n')
    plan.write_text('[run]\ntask = "digits"\nrounds = 2\nevaluate_on = "none"\n[strategy]\nseconds = 600.0\n')
    program = ("env", f"SHIFT_FILE={shift}", sys.executable, str(Path(__file__).parents[1] / "shifted_device.py"))
    devices = [replace(device, program=program) for device in tools.devices(1, "digits")]

    def get_allowance() -> str:
        rows = fleet.make_client().get("/edgefl/v1/devices")["rows"]
        return next(row["allowance"] for row in rows if row["device_id"] == PAUSED) or ""

    def list_short() -> list[str]:
        events = fleet.list_history("events", run=run_id)
        return [row["device_id"] for row in events if row["kind"] == "no-work-fits"]

    with tools.fleet(tmp_path / "fleet", devices) as fleet:
        assert tools.typed("device", "set", "--conditions", night, "--state", fleet.root / PAUSED).code == 0
        tools.eventually(lambda: "min of its hours" in get_allowance(), what="it reports its hours")
        ended = tools.as_operator(fleet, "run", "submit", plan, "--dry-run")
        assert (ended.code, "min, and one work may take 12.5 min, free at" in ended.out) == (41, True)
        run_id = tools.as_operator(fleet, "run", "submit", plan).out.strip()
        short = f"run {run_id}: its hours end in "
        tools.eventually(lambda: (get_blocked(fleet) or "").startswith(short), what="no work fits")
        tools.eventually(lambda: list_short() == [PAUSED], what="the history says so")
        assert fleet.list_history("updates", run=run_id) == []
        shift.write_text(str(end_s + 16 * 3600 + 1.0 - time.time()))
        device = f"/edgefl/v1/devices/{PAUSED}"
        tools.eventually(
            lambda: fleet.make_client().get(device).get("run") == run_id, what="it works in the next night"
        )
        assert "h of its hours" in get_allowance()
        assert get_blocked(fleet) is None
        tools.stop(fleet, run_id)
