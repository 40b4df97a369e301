"""What a strategy keeps for each device, before its run is let in."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.strategy_memory import (
    check_message_size,
    check_strategy_memory,
    compute_bytes_per_device,
)
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.synchronous.strategy import RoundRules

MODEL = {"w": np.zeros(250, np.float32), "n": np.array(1, np.int64)}
TWO_MODELS = SimpleNamespace(bytes_per_device=lambda model_bytes: 2 * model_bytes)


@pytest.fixture
def roster():
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


def test_a_strategy_that_declares_nothing_keeps_nothing(roster):
    assert compute_bytes_per_device(SimpleNamespace(), MODEL) == 0
    facts = check_strategy_memory(run(max_state_bytes=0), SimpleNamespace(), MODEL, roster)
    assert facts == {"state_bytes": 0, "state_devices": 2}


@pytest.mark.parametrize(
    ("devices", "expected"), [({}, 2), ({"groups": ["lab"]}, 1), ({"names": ["b"]}, 1), ({"min": 4}, 4)]
)
def test_counted_are_the_trainers_that_the_run_means_or_that_it_waits_for(roster, devices, expected):
    facts = check_strategy_memory(run(**devices), TWO_MODELS, MODEL, roster)
    assert facts == {"state_devices": expected, "state_bytes": expected * 2 * 1008}


def test_a_run_that_needs_more_than_it_may_have_is_refused_with_both_numbers(roster):
    with pytest.raises(
        ConfigError, match=r"^fedavg keeps 4032 bytes for 2 devices, the run may have 4031 bytes: raise run"
    ):
        check_strategy_memory(run(max_state_bytes=4_031), TWO_MODELS, MODEL, roster)
    assert check_strategy_memory(run(max_state_bytes=4_032), TWO_MODELS, MODEL, roster)["state_bytes"] == 4_032


def test_large_numbers_are_said_in_units_too(roster):
    models = SimpleNamespace(bytes_per_device=lambda _model_bytes: 5 * 1024**3)
    with pytest.raises(ConfigError, match=r"keeps 10737418240 bytes \(10\.0 GiB\) for 2 devices"):
        check_strategy_memory(run(), models, MODEL, roster)


def test_a_run_whose_devices_could_not_send_each_other_a_whole_model_is_refused():
    large = {"w": np.zeros(5 * 1024**2, np.float32)}
    check_message_size(SimpleNamespace(), large)
    check_message_size(make_strategy("dsgd", {"carrier": "relay"}, RoundRules()), large)
    check_message_size(make_strategy("dsgd", {"carrier": "peer"}, RoundRules()), MODEL)
    with pytest.raises(ConfigError, match=r"at most 16776192 bytes .*, this run's have 20971520 .*carrier = 'relay'"):
        check_message_size(make_strategy("dsgd", {"carrier": "peer"}, RoundRules()), large)
    half = {"w": large["w"][: 5 * 1024**2 // 2]}
    check_message_size(make_strategy("dsgd", {"carrier": "direct"}, RoundRules()), half)
    with pytest.raises(ConfigError, match="this run's have 20971520"):
        check_message_size(make_strategy("k-gt", {"carrier": "direct"}, RoundRules()), half)
