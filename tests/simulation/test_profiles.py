"""Profiles: those that ship, those from files, and what is wrong with a file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.errors import ConfigError
from edgefl.simulation.cost_model import Workload, compute_reference_cost, make_cost_function
from edgefl.simulation.faults import Fault, apply_faults, check_targets, load_faults, render_fault_script
from edgefl.simulation.profiles import (
    DeviceProfile,
    IterationCost,
    list_profile_names,
    load_catalogue,
    parse_catalogue,
)
from edgefl.tasks.registry import make_task

BOARDS = ("pi-zero-2w", "pi-3b-plus", "pi-4", "pi-5", "jetson-nano", "jetson-orin-nano")
NUMBERS = ("speed", "up_bytes_per_s", "down_bytes_per_s", "latency_s", "memory_bytes")


def parsed(**fields: Any) -> DeviceProfile:
    return parse_catalogue({"profile": {"mine": fields}}, "mine.toml").get("mine")


@pytest.mark.parametrize("name", BOARDS)
def test_every_number_of_a_built_in_board_says_where_it_is_from(name: str) -> None:
    sources = load_catalogue().get(name).sources
    assert set(NUMBERS) <= set(sources)
    assert all(text.partition(":")[2].strip() for text in sources.values())


def test_faster_boards_are_faster() -> None:
    catalogue = load_catalogue()
    assert sorted(BOARDS, key=lambda name: catalogue.get(name).speed) == [
        "pi-zero-2w", "pi-3b-plus", "jetson-nano", "pi-4", "pi-5", "jetson-orin-nano",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "count", "names"),
    [
        (["pi-5", "pi-4:2"], 7, ["pi-5", "pi-4", "pi-4", "pi-5", "pi-4", "pi-4", "pi-5"]),
        (["pi-4:99999999999999", "pi-5"], 3, ["pi-4"] * 3),
    ],
)
def test_profiles_are_given_round_and_round(specs: list[str], count: int, names: list[str]) -> None:
    assert [profile.name for profile in load_catalogue().assign_profiles(specs, count)] == names
    with pytest.raises(ConfigError, match=r"no profile 'pi4': did you mean pi-4\?"):
        load_catalogue().get("pi4")


def test_the_profile_s_own_measurement_goes_before_the_speed_and_the_reference_machine() -> None:
    board = parsed(speed=2, iterations={"digits": {"fixed_s": 1.0, "example_s": 0.5}})
    assert make_cost_function(board, workload(), IterationCost(fixed_s=9.0))(4) == 3.0
    assert make_cost_function(parsed(speed=0.5), workload(), IterationCost(fixed_s=3.0))(8) == 6.0


@pytest.mark.parametrize("spec", ["pi-4:0", "pi-4:x", "pi-4:", "pi-4:\u00b2"])
def test_a_count_must_be_a_number_above_zero(spec: str) -> None:
    with pytest.raises(ConfigError, match="count above 0"):
        load_catalogue().assign_profiles([spec], 3)


def test_a_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[profile.pi-4]\nspeed = 9\n[profile.shed]\noffline = [[5, 9], [8, inf]]\nthrottling = [[60, 2]]\n"
    )
    catalogue = load_catalogue([file])
    assert catalogue.get("pi-4").speed == 9.0
    assert catalogue.get("shed").offline == ((5.0, math.inf),)
    assert catalogue.get("shed").throttling == ((60.0, 2.0),)
    assert list_profile_names(file) == ["pi-4", "shed"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"jitter": 1e300}, r"profile\.mine: jitter must be .* at most 2, got 1e\+300"),
        ({"sped": 1}, r"profile\.mine: unknown key 'sped': did you mean speed\?"),
        ({"speed": 0}, "speed must be a number above 0, got 0"),
        ({"latency_s": -1}, "latency_s must be a number of 0 or more, got -1"),
        ({"mtbf_s": 60}, "mtbf_s and mttr_s go together"),
        ({"offline": [[9, 5]]}, "offline must be a number above 0, got 5"),
        ({"offline": [9]}, r"offline must be a list of pairs such as \[60, 2\], got 9"),
        ({"iterations": {"digits": {}}}, r"iterations\.digits must be seconds, or fixed_s and example_s"),
        ({"groups": "shed"}, "groups must be a list, got 'shed'"),
        ({"source": {"speed": "a guess"}}, "source.speed must begin with measured, vendor, estimated, got 'a guess'"),
    ],
)
def test_what_makes_no_sense_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**fields)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_catalogue([tmp_path / "none.toml"])
    (tmp_path / "broken.toml").write_text("[profile")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_catalogue([tmp_path / "broken.toml"])


def workload(iteration_s: float | None = None, task: str = "digits", **options: Any) -> Workload:
    shapes = make_task("digits", {}).shapes()
    return Workload(task=task, options=options, model_spec=shapes, iteration_s=iteration_s)


def test_the_run_file_s_seconds_go_before_the_table() -> None:
    assert compute_reference_cost(workload(0.25), load_catalogue()).compute_seconds(32) == 0.25
    assert (
        compute_reference_cost(workload(model="logistic"), load_catalogue())
        == load_catalogue().reference_costs["digits/logistic"]
    )


def test_an_unknown_task_is_estimated_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cost = compute_reference_cost(workload(task="mine:Task"), load_catalogue())
    assert cost.compute_seconds(64) > cost.compute_seconds(8) > 0
    assert "iteration_s" in caplog.text


def test_faults_become_part_of_those_they_hit(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(
        '[[fault]]\ndevice = "device-01"\nat_s = 5\nkind = "kill"\nfor_s = 3\n'
        '[[fault]]\ndevice = "device-*"\nat_s = 2\nkind = "slow"\nfactor = 4\nfor_s = 6\n'
    )
    faults = load_faults(file)
    hit, other = (apply_faults(name, parsed(throttling=[[0, 2]]), faults) for name in ("device-01", "board-1"))
    assert hit.offline == ((5.0, 8.0),)
    assert hit.throttling == ((0.0, 2.0), (2.0, 8.0), (8.0, 2.0))
    assert other == parsed(throttling=[[0, 2]])


def test_a_worse_network_becomes_slower_transfers() -> None:
    faults = [
        Fault(device="device-01", at_s=1.0, kind="loss", for_s=2.0, amount=0.2),
        Fault(device="device-01", at_s=4.0, kind="rate", for_s=2.0, amount=250_000.0),
        Fault(device="device-01", at_s=7.0, kind="cut", for_s=2.0),
        Fault(device="device-01", at_s=8.0, kind="delay", for_s=2.0, amount=0.3),
    ]
    hit = apply_faults("device-01", parsed(up_bytes_per_s=5e5, down_bytes_per_s=1e6), faults)
    assert hit.congestion == ((1.0, 1.25), (3.0, 1.0), (4.0, 4.0), (6.0, 1.0), (7.0, math.inf), (9.0, 1.0))
    assert hit.delays == ((8.0, 0.3), (10.0, 0.0))
    assert not hit.offline
    assert not hit.throttling


def test_what_never_comes_back_is_gone() -> None:
    faults = [Fault(device="device-01", at_s=5.0, kind=kind) for kind in ("cut", "freeze")]
    hit = apply_faults("device-01", parsed(), faults)
    assert hit == replace(parsed(), offline=((5.0, math.inf),))


def test_virtual_time_leaves_out_what_it_has_not() -> None:
    faults = [
        Fault(device="coordinator", at_s=1.0, kind="kill", for_s=2.0),
        Fault(device="device-01", at_s=1.0, kind="clock", amount=-3600.0),
    ]
    check_targets(faults, ["device-01"])
    assert apply_faults("device-01", parsed(), faults) == parsed()
    assert apply_faults("coordinator", parsed(), faults) == parsed()


def test_a_script_is_read_as_it_was_written(tmp_path: Path) -> None:
    faults = (
        Fault(device="device-*", at_s=0.1 + 0.2, kind="clock", for_s=1e-7, amount=-86_400.0),
        Fault(device="broker", at_s=12, kind="freeze", for_s=3.0),
        Fault(device="device-01", at_s=13.5, kind="slow", factor=4.0),
    )
    (tmp_path / "faults.toml").write_text(render_fault_script(faults))
    assert load_faults(tmp_path / "faults.toml") == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[fault]]\ndevice = "a"\nat_s = 1\nkind = "loss"\n', "fault.amount: 'loss' needs one"),
        ('[[fault]]\ndevice = "a"\nat_s = 1\nkind = "cut"\namount = 2.0\n', "fault.amount: 'cut' takes none"),
        (
            '[[fault]]\ndevice = "a"\nat_s = 1\nkind = "loss"\namount = 1.0\n',
            "of 'loss' it lies between 0 and 1, got 1",
        ),
        ('[[fault]]\ndevice = "a"\nat_s = -1\nkind = "kill"\n', r"fault\.at_s must be a number at least 0"),
        ('[[fault]]\ndevice = "a"\nat_s = 1\nkind = "burn"\n', "one of 'kill', 'freeze', 'slow'"),
        ("[fault]\n", r"must hold \[\[fault\]\] tables alone, got fault = \{\}"),
    ],
)
def test_a_fault_that_makes_no_sense_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_faults(tmp_path / "faults.toml")


def test_a_fault_that_hits_nobody_is_refused() -> None:
    fault = Fault(device="devise-*", at_s=1.0, kind="kill")
    with pytest.raises(ConfigError, match=r"'devise-\*' fits none of 2 devices"):
        check_targets([fault], ["device-01", "device-02"])
