"""Traces: what holds when, and how long work takes that is throttled on its way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.schedule import render_fault_script
from hypothesis import given
from hypothesis import strategies as st

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import MAX_TOML_CHARS
from edgefl.core.types import Dataset, TrainConfig, derive_rng
from edgefl.simulation.faults import Fault, apply_faults, check_targets, load_faults
from edgefl.simulation.profiles import (
    MAX_PROFILE_CHARS,
    DeviceProfile,
    IterationCost,
    IterationTimes,
    SlowdownTrace,
    list_profile_names,
    load_catalogue,
    merge_absences,
    multiply_traces,
    parse_catalogue,
    value_at,
)
from edgefl.simulation.simulated_run import Workload, compute_reference_cost, make_cost_function
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

HOT = SlowdownTrace.from_steps([(10.0, 2.0), (20.0, 1.0)])


def test_a_value_holds_from_its_second_until_the_next() -> None:
    steps = ((1.0, 40.0), (5.0, 80.0))
    assert [value_at(steps, now_s) for now_s in (0.5, 1.0, 4.9, 5.0, 99.0)] == [None, 40.0, 40.0, 80.0, 80.0]


def test_throttled_seconds_count_half() -> None:
    assert HOT is not None
    assert HOT.compute_end_s(0.0, 10.0) == 10.0
    assert HOT.compute_end_s(0.0, 12.0) == 14.0, "the last 2 of 12 take 4"
    assert HOT.compute_end_s(0.0, 16.0) == 21.0, "10 + 5 at half speed, and 1 more after it"
    assert HOT.compute_work_s(0.0, 21.0) == pytest.approx(16.0)
    assert HOT.factor_at(15.0) == 2.0


@given(st.floats(0, 40), st.floats(0, 40))
def test_work_and_its_end_belong_together(start_s: float, work_s: float) -> None:
    assert HOT is not None
    assert HOT.compute_work_s(start_s, HOT.compute_end_s(start_s, work_s)) == pytest.approx(work_s, abs=1e-9)


def test_a_board_that_never_slows_down_needs_no_throttle() -> None:
    assert SlowdownTrace.from_steps([]) is None
    assert SlowdownTrace.from_steps([(0.0, 1.0), (5.0, 1.0)]) is None


def test_traces_multiply() -> None:
    assert multiply_traces([((0.0, 2.0),), ((5.0, 3.0), (9.0, 1.0))]) == ((0.0, 2.0), (5.0, 6.0), (9.0, 2.0))


def test_absences_that_overlap_are_one() -> None:
    assert merge_absences([(5.0, 9.0), (0.0, 1.0), (8.0, math.inf)]) == ((0.0, 1.0), (5.0, math.inf))


def test_a_pace_repeats_when_it_is_used_up() -> None:
    pace = IterationTimes.from_factors(1.0, np.array([1.0, 3.0]))
    assert [pace.compute_work_s(n) for n in (0, 1, 2, 3, 4)] == [0.0, 1.0, 4.0, 5.0, 8.0]
    assert [pace.count_iterations(work_s) for work_s in (0.5, 1.0, 3.9, 4.0, 5.0, 7.9)] == [0, 1, 1, 2, 3, 3]


def test_a_steady_pace_counts_iterations() -> None:
    assert IterationTimes.from_constant(0.5).compute_work_s(7) == 3.5
    assert IterationTimes.from_constant(0.5).count_iterations(3.6) == 7


@pytest.mark.parametrize(
    "plan",
    [
        TrainConfig(iterations=3, batch_size=4),
        TrainConfig(epochs=1.0, batch_size=4),
        TrainConfig(epochs=0.01, batch_size=4),
        TrainConfig(epochs=2.6, batch_size=7),
    ],
)
def test_the_simulator_counts_iterations_as_a_board_does(plan: TrainConfig) -> None:
    task = make_task("digits", {"model": "logistic"})
    data = Dataset(inputs=np.zeros((10, 8, 8), np.uint8), targets=np.zeros(10, np.int64))
    learner = task.learner()
    done = train(learner, data, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert plan.count_iterations(len(data)) == done.iterations


def test_seconds_alone_do_not_say_how_many_iterations() -> None:
    assert TrainConfig(seconds=3.0).count_iterations(10) is None


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


def test_a_file_of_long_traces_is_read_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text("#" * (MAX_TOML_CHARS + 1))
    load_catalogue([tmp_path / "long.toml"])
    (tmp_path / "long.toml").write_text("#" * (MAX_PROFILE_CHARS + 1))
    with pytest.raises(ConfigError, match=f"characters, at most {MAX_PROFILE_CHARS} are read"):
        load_catalogue([tmp_path / "long.toml"])


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
