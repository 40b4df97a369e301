"""What a strategy keeps for each device, before its run is let in."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl.coordinator.execution.fleet_view import EligibilityFilter, RunSpec
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.planning import (
    check_message_size,
    check_strategy_memory,
    check_trainers,
    compute_bytes_per_device,
)
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, TaskError
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

MODEL = {"w": np.zeros(250, np.float32), "n": np.array(1, np.int64)}
TWO_MODELS = SimpleNamespace(bytes_per_device=lambda model_bytes: 2 * model_bytes)


@pytest.fixture
def registry():
    made = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    for number, (name, role, groups, task) in enumerate(
        [
            ("a", "trainer", ("lab",), "digits"),
            ("b", "trainer", ("home",), "digits"),
            ("c", "trainer", ("lab",), "mnist"),
            ("judge", "evaluator", (), "digits"),
        ]
    ):
        made.add(name, node_id=number + 1, role=role, groups=groups, examples={task: 5})
    return made


def run(*, max_state_bytes=10_000, **devices):
    return parse_run({"run": {"task": "digits", "max_state_bytes": max_state_bytes}, "devices": devices})


def test_a_strategy_that_declares_nothing_keeps_nothing(registry):
    assert compute_bytes_per_device(make_strategy("fedavg", {}, RoundRules()), MODEL) == 0
    facts = check_strategy_memory(run(max_state_bytes=0), make_strategy("fedavg", {}, RoundRules()), MODEL, registry)
    assert facts == {"state_bytes": 0, "state_devices": 2}


@pytest.mark.parametrize(
    ("devices", "expected"), [({}, 2), ({"groups": ["lab"]}, 1), ({"names": ["b"]}, 1), ({"min": 4}, 4)]
)
def test_counted_are_the_trainers_that_the_run_means_or_that_it_waits_for(registry, devices, expected):
    facts = check_strategy_memory(run(**devices), TWO_MODELS, MODEL, registry)
    assert facts == {"state_devices": expected, "state_bytes": expected * 2 * 1008}


def test_a_run_that_needs_more_than_it_may_have_is_refused_with_both_numbers(registry):
    with pytest.raises(
        ConfigError, match=r"^fedavg keeps 4032 bytes for 2 devices, the run may have 4031 bytes: raise run"
    ):
        check_strategy_memory(run(max_state_bytes=4_031), TWO_MODELS, MODEL, registry)
    assert check_strategy_memory(run(max_state_bytes=4_032), TWO_MODELS, MODEL, registry)["state_bytes"] == 4_032


def test_large_numbers_are_said_in_units_too(registry):
    models = SimpleNamespace(bytes_per_device=lambda _model_bytes: 5 * 1024**3)
    with pytest.raises(ConfigError, match=r"keeps 10737418240 bytes \(10\.0 GiB\) for 2 devices"):
        check_strategy_memory(run(), models, MODEL, registry)


def test_a_run_whose_devices_could_not_send_each_other_a_whole_model_is_refused():
    large = {"w": np.zeros(5 * 1024**2, np.float32)}
    check_message_size(make_strategy("fedavg", {}, RoundRules()), large)
    check_message_size(make_strategy("dsgd", {"carrier": "relay"}, RoundRules()), large)
    check_message_size(make_strategy("dsgd", {"carrier": "peer"}, RoundRules()), MODEL)
    with pytest.raises(ConfigError, match=r"at most 16776192 bytes .*, this run's have 20971520 .*carrier = 'relay'"):
        check_message_size(make_strategy("dsgd", {"carrier": "peer"}, RoundRules()), large)
    half = {"w": large["w"][: 5 * 1024**2 // 2]}
    check_message_size(make_strategy("dsgd", {"carrier": "direct"}, RoundRules()), half)
    with pytest.raises(ConfigError, match="this run's have 20971520"):
        check_message_size(make_strategy("k-gt", {"carrier": "direct"}, RoundRules()), half)


def make_trainers(reasons: dict[str, str] | None = None, **boards: list[str] | None) -> DeviceRegistry:
    """Trainers by name, with these backends; None says nothing of them, as older agents do."""
    made = DeviceRegistry(PresenceTracker(), time.monotonic)
    for number, (name, backends) in enumerate(boards.items()):
        facts = {} if backends is None else {"backends": backends, "backend_reasons": reasons or {}}
        made.add(name, node_id=number, role="trainer", groups=(name[0],), examples={"mnist": 5}, facts=facts)
    return made


def config(**devices: Any) -> Any:
    return parse_run({"run": {"task": "mnist"}, "devices": devices})


def test_a_run_whose_trainers_all_lack_torch_is_refused_and_they_are_named() -> None:
    fleet = make_trainers(**{f"b{number}": ["numpy"] for number in range(7)})
    with pytest.raises(
        TaskError, match=r"no device can train task mnist: b0, b1, b2, b3, b4 and 2 more have no torch"
    ):
        check_trainers(config(), fleet, needs_torch=True)
    check_trainers(config(), fleet, needs_torch=False)


@pytest.mark.parametrize("other", [["numpy", "torch"], None])
def test_one_trainer_that_has_it_or_does_not_say_is_enough(other: list[str] | None) -> None:
    fleet = make_trainers(small=["numpy"], large=other)
    check_trainers(config(), fleet, needs_torch=True)
    with pytest.raises(TaskError, match="small have no torch"):
        check_trainers(config(groups=["s"]), fleet, needs_torch=True)


def test_a_fleet_that_is_still_empty_may_be_given_work() -> None:
    check_trainers(config(), make_trainers(), needs_torch=True)


@pytest.mark.parametrize(("needs_torch", "accepted"), [(True, ["large", "old"]), (False, ["small", "large", "old"])])
def test_boards_without_torch_take_part_only_where_none_is_needed(needs_torch: bool, accepted: list[str]) -> None:
    fleet = make_trainers(small=["numpy"], large=["numpy", "torch"], old=None)
    run = RunSpec(
        run_id="r", task="mnist", header={}, groups=(), names=(), join_at_start=False, encode=lambda *_: b"",
        decode=lambda _: {}, needs_torch=needs_torch,
    )  # fmt: skip
    participants = EligibilityFilter(run)
    assert [info.device_id for info in fleet.list_devices() if participants.is_eligible(info)] == accepted


def test_boards_that_say_why_they_cannot_are_quoted() -> None:
    zero = make_trainers({"torch": "its 437 MB of memory are too few for torch"}, zero=["numpy"])
    with pytest.raises(TaskError, match="no device can train task mnist: zero: its 437 MB of memory are too few"):
        check_trainers(config(), zero, needs_torch=True)
    check_trainers(config(), zero, needs_torch=False)


@pytest.mark.parametrize("needs_torch", [False, True])
def test_a_board_that_trains_with_nothing_trains_nothing(needs_torch: bool) -> None:
    old = make_trainers(dict.fromkeys(("numpy", "torch"), "its userland has 32 bits"), old=[])
    with pytest.raises(TaskError, match="old: its userland has 32 bits"):
        check_trainers(config(), old, needs_torch=needs_torch)
    run = RunSpec(
        run_id="r", task="mnist", header={}, groups=(), names=(), join_at_start=False, needs_torch=needs_torch,
        encode=lambda *_: b"", decode=lambda _: {},
    )  # fmt: skip
    info = old.get_device("old")
    assert info is not None
    assert not EligibilityFilter(run).is_eligible(info)
