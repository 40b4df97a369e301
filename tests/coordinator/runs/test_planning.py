"""What a run would do, without doing it: over a real store and registry, with the parts that a run file makes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl.coordinator.execution.fleet_view import EligibilityFilter, RunSpec
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.planning import (
    RunValidator,
    check_members,
    check_message_size,
    check_root_shard,
    check_strategy_memory,
    check_trainers,
    compute_bytes_per_device,
    plan_run,
)
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, NetworkError, TaskError
from edgefl.core.protocol import EVALUATOR_NAME, Capabilities, StatusMessage
from edgefl.core.types import Json, UpdateStatus
from edgefl.engine.assembly.build import build_run
from edgefl.storage.repositories.records import UpdateRow
from edgefl.storage.store import Store
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def registry() -> DeviceRegistry:
    made = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    made.record_broker_link(connected=True)
    for node, (name, examples, state) in enumerate(
        [("pi-1", {"digits": 100}, "online"), ("pi-2", {"digits": 50}, "online"), ("pi-3", {}, "online"),
         ("pi-4", {"digits": 10}, "offline")]
    ):  # fmt: skip
        made.add(name, node_id=node, role="trainer", groups=("lab",) if node else (), examples=examples)
        made.record_status(name, StatusMessage(state=state, boot_id="b", session_no=1))
    made.add("judge", node_id=9, role="evaluator", groups=(), examples={"digits": 10})
    made.record_status("judge", StatusMessage(state="online", boot_id="b", session_no=1))
    return made


def plan(registry: DeviceRegistry, store: Store, **sections: Any) -> Json:
    config = parse_run({"run": {"task": "digits", "rounds": 2}, **sections})
    return plan_run(build_run(config, "plan"), registry, store)


def rows(told: Json) -> dict[str, Json]:
    return {row["device_id"]: row for row in told["rows"]}


def test_a_board_that_knows_no_slices_takes_no_part_where_updates_are_sent_in_parts(
    registry: DeviceRegistry, store: Store
) -> None:
    registry.record_capabilities("pi-2", Capabilities(facts={"slices": True}, shards={"digits": 50}))
    off = {"enabled": False}
    told = rows(plan(registry, store, strategy={"name": "redundant", "copies": "slices"}, guard=off))
    assert (told["pi-1"]["takes_part"], told["pi-2"]["takes_part"]) == (False, True)
    assert told["pi-1"]["reason"] == "its agent knows no slices of updates; update edgefl on it"
    assert rows(plan(registry, store, strategy={"name": "redundant"}, guard=off))["pi-1"]["takes_part"]
    masks: dict[str, Any] = {
        "secure_aggregation": {"enabled": True, "graph": "sparse"},
        "guard": {"enabled": False, "max_weight_ratio": 0},
        "devices": {"min": 3},
    }
    assert "knows no sparse graph of" in rows(plan(registry, store, **masks))["pi-2"]["reason"]
    registry.record_capabilities("pi-2", Capabilities(facts={"sparse_graph": True}, shards={"digits": 50}))
    assert "sparse graph" not in rows(plan(registry, store, **masks))["pi-2"]["reason"]


def test_a_dry_run_says_how_many_boards_would_be_free_now_by_the_conditions_of_the_run(
    registry: DeviceRegistry, store: Store
) -> None:
    told = plan(registry, store, conditions={"mains": True})
    assert {row["reason"] for row in told["rows"] if row["takes_part"]} == set()
    assert rows(told)["pi-1"]["reason"] == "its agent knows no [conditions] of a run; update edgefl on it"
    assert told["conditions"] == {"free": 0, "blocked": 0, "unknown": 0}
    for name in ("pi-1", "pi-2"):
        registry.record_capabilities(name, Capabilities(facts={"conditions": True}, shards={"digits": 50}))
    answers: dict[str, Json] = {}

    def call(device_id: str, kind: str, argument: Any, *, timeout_s: float | None = None) -> Json:
        assert (str(kind), argument, timeout_s) == ("conditions", {"conditions": {"mains": True}}, 5.0)
        if device_id not in answers:
            raise NetworkError("it did not answer")
        return answers[device_id]

    run = build_run(parse_run({"run": {"task": "digits"}, "conditions": {"mains": True}}), "plan")
    silent = plan_run(run, registry, store, call)
    assert silent["conditions"] == {"free": 0, "blocked": 0, "unknown": 2}
    assert "did not answer: pi-1, pi-2" in silent["warnings"][-1]
    assert (silent["obstacle"], silent["num_devices"]) == ("", 2)
    power = {"kind": "power", "reason": "it is not on external power", "run": "plan"}
    answers |= {"pi-1": {}, "pi-2": {"blocked": power}}
    told = plan_run(run, registry, store, call)
    assert told["conditions"] == {"free": 1, "blocked": 1, "unknown": 0}
    assert (rows(told)["pi-1"]["takes_part"], rows(told)["pi-1"]["reason"]) == (True, "")
    by_run = "not now by the run's [conditions]: it is not on external power"
    assert (rows(told)["pi-2"]["takes_part"], rows(told)["pi-2"]["reason"]) == (False, by_run)
    answers["pi-2"] = {"blocked": {"kind": "pause", "reason": "paused on the board"}}
    assert rows(plan_run(run, registry, store, call))["pi-2"]["reason"] == "it may not train now: paused on the board"
    answers["pi-2"] = {"blocked": "nonsense"}
    assert plan_run(run, registry, store, call)["conditions"] == {"free": 1, "blocked": 0, "unknown": 1}


def test_a_dry_run_leaves_out_boards_whose_hours_or_budgets_hold_no_work(
    registry: DeviceRegistry, store: Store
) -> None:
    facts = {"conditions": True, "steps_per_s": {"digits": 0.01}}
    registry.record_capabilities("pi-1", Capabilities(facts=facts, shards={"digits": 100}))
    registry.record_capabilities("pi-2", Capabilities(facts={"conditions": True}, shards={"digits": 50}))
    registry.record_allowance("pi-1", {"window": [1200, 50_000]})
    registry.record_allowance("pi-2", {"day": {"renews_s": 3600, "traffic": [100, 1_000_000, None]}})
    work = {"iterations": 10}
    told = rows(plan(registry, store, strategy=work))
    reason = told["pi-1"]["reason"]
    assert reason.startswith("its hours end in 20 min, and one work may take 20.8 min, free at 20")
    assert told["pi-2"]["reason"].startswith("it has 0.0001 of 1 MB of this day left, and one work may use ")
    assert rows(plan(registry, store, strategy={"iterations": 9}))["pi-1"]["takes_part"]
    whole = plan(registry, store, strategy=work)
    assert whole["obstacle"].startswith("it needs 1, and no devices can take part: pi-1: its hours end in 20 min")

    def call(_device_id: str, _kind: str, _argument: Any, *, timeout_s: float | None = None) -> Json:
        return {"allowance": {"run": "plan", "run_window": [60, None]}}

    config = parse_run(
        {"run": {"task": "digits"}, "strategy": {"iterations": 1}, "conditions": {"hours": ["0:00-9:00"]}}
    )
    told = rows(plan_run(build_run(config, "plan"), registry, store, call))
    assert told["pi-1"]["reason"] == "its hours end in 1 min, and one work may take 2.08 min"


def test_a_dry_run_says_which_codec_a_board_on_a_metered_connection_gets(
    registry: DeviceRegistry, store: Store
) -> None:
    registry.record_capabilities("pi-2", Capabilities(facts={"conditions": True}, shards={"digits": 50}))
    asked = []

    def call(device_id: str, _kind: str, argument: Any, *, timeout_s: float | None = None) -> Json:
        asked.append((device_id, argument, timeout_s))
        return {"metered": True}

    run = build_run(parse_run({"run": {"task": "digits"}, "compression": {"up": "fp16", "metered": "int8"}}), "plan")
    told = plan_run(run, registry, store, call)
    assert asked == [("pi-2", {"conditions": {}, "metered": True}, 5.0)]  # an older agent is not asked
    assert {name: rows(told)[name]["codec"] for name in ("pi-1", "pi-2")} == {"pi-1": "fp16", "pi-2": "int8"}
    assert rows(told)["pi-2"]["bytes_up"] < 0.6 * rows(told)["pi-1"]["bytes_up"]
    assert "conditions" not in told


def test_it_names_who_takes_part_and_why_others_do_not(registry: DeviceRegistry, store: Store) -> None:
    told = plan(registry, store)
    assert {name: row["reason"] for name, row in rows(told).items()} == {
        "pi-1": "",
        "pi-2": "",
        "pi-3": "it has no shard for task 'digits'",
        "pi-4": "it is offline",
    }
    assert (told["num_devices"], told["evaluators"], told["goal"]) == (2, ["judge"], {"rounds": 2})
    named = rows(plan(registry, store, devices={"names": ["pi-1", "judge", "pi-9"]}))
    assert named["pi-2"]["reason"] == "the run file names others"
    assert named["judge"]["reason"] == "it is an evaluator, and trains nothing"
    assert named["pi-9"]["reason"] == "there is no such device in the fleet"
    assert rows(plan(registry, store, devices={"groups": ["lab"]}))["pi-1"]["reason"] == "it is in none of the groups"
    without = plan(registry, store, devices={"exclude": ["pi-2", "judge"]})
    assert (rows(without)["pi-2"]["reason"], without["evaluators"]) == ("the run file excludes it", [])
    assert without["num_devices"] == 1


def test_a_drained_board_and_one_without_torch_are_said_to_be_so(registry: DeviceRegistry, store: Store) -> None:
    registry.set_drained("pi-2", drained=True)
    assert rows(plan(registry, store))["pi-2"]["reason"] == "it is draining"
    registry.record_capabilities(
        "pi-1", Capabilities(facts={"backends": ["numpy"]}, shards={"digits": 9, "digits-cnn": 9})
    )
    assert rows(plan(registry, store))["pi-1"]["takes_part"]
    needy = replace(build_run(parse_run({"run": {"task": "digits", "rounds": 2}}), "plan"), needs_torch=True)
    assert "it has no torch" in rows(plan_run(needy, registry, store))["pi-1"]["reason"]


def test_bytes_are_those_of_encoded_bodies(registry: DeviceRegistry, store: Store) -> None:
    dense = plan(registry, store)
    sparse = rows(plan(registry, store, compression={"up": "topk:0.01|int8", "down": "dense|fp16"}))["pi-1"]
    first = rows(dense)["pi-1"]
    assert dense["model_bytes"] < first["bytes_up"] == first["bytes_down"] < dense["model_bytes"] + 100
    assert (dense["bytes_up"], dense["bytes_down"]) == (2 * first["bytes_up"], 2 * first["bytes_down"])
    assert sparse["bytes_up"] < dense["model_bytes"] / 50
    assert dense["model_bytes"] / 2 < sparse["bytes_down"] < dense["model_bytes"] / 2 + 100


def test_seconds_follow_from_earlier_updates_and_are_unknown_without(registry: DeviceRegistry, store: Store) -> None:
    for run_id, task, strategy in (
        ("digits", "digits", "fedavg"), ("noop", "noop", "fedavg"), ("stats", "digits", "boosted-trees"),
    ):  # fmt: skip
        store.add_run(run_id=run_id, name="n", task=task, strategy=strategy, config={}, seed=7, submitted_at=1.0)
    for run_id, seconds in (("digits", 9.0), ("digits", 0.5), ("noop", 70.0), ("stats", 90.0)):
        store.record_updates(
            run_id,
            [
                UpdateRow(
                    assignment_id=f"{run_id}-{seconds}", device_id="pi-1", round=1, base_version=0, iterations=5,
                    compute_s=seconds, outcome=UpdateStatus.USED, received_at=1.0,
                )
            ],
        )  # fmt: skip
    told = plan(registry, store, strategy={"iterations": 20})
    assert rows(told)["pi-1"]["seconds"] == pytest.approx(2.0)
    assert rows(told)["pi-1"]["measured_in"] == "digits"
    assert (rows(told)["pi-2"].get("seconds"), told["seconds"]) == (None, None)


def test_seconds_follow_from_a_board_s_own_benchmark_until_there_is_an_update(
    registry: DeviceRegistry, store: Store
) -> None:
    for name, speeds in (("pi-1", {"digits": 40.0, "digits/logistic": 80.0}), ("pi-2", {"digits": "fast", "x": 1})):
        facts = {"backends": ["numpy"], "steps_per_s": speeds}
        registry.record_capabilities(name, Capabilities(facts=facts, shards={"digits": 50}))
    told = rows(plan(registry, store, strategy={"iterations": 20}))
    assert (told["pi-1"]["seconds"], told["pi-1"]["measured_in"]) == (pytest.approx(0.5), "benchmark")
    assert told["pi-2"].get("seconds") is None
    other = rows(plan(registry, store, strategy={"iterations": 20}, task={"model": "logistic"}))
    assert other["pi-1"]["seconds"] == pytest.approx(0.25)


def test_epochs_become_iterations_of_the_examples_that_are_trained_on(registry: DeviceRegistry, store: Store) -> None:
    told = rows(plan(registry, store, strategy={"epochs": 2.0, "batch_size": 8}))
    assert (told["pi-1"]["iterations"], told["pi-2"]["iterations"]) == (24, 12)


def test_a_run_that_would_wait_says_so(registry: DeviceRegistry, store: Store) -> None:
    told = plan(registry, store, devices={"min": 3})
    assert rows(told)["pi-1"]["reason"] == "the run would wait: it begins with 3 devices, 2 are there"
    assert told["num_devices"] == 0
    assert told["obstacle"] == (
        "it needs 3, and 2 devices can take part: pi-3: it has no shard for task 'digits'; pi-4: it is offline"
    )
    registry.record_capabilities(
        "pi-3", Capabilities(facts={"shard_errors": {"digits": "No module named 'cifar'"}}, shards={})
    )
    alone = plan(registry, store, devices={"names": ["pi-3"]})["obstacle"]
    assert alone.startswith("it needs 1, and no devices can take part: pi-1: the run file names others")
    assert "pi-3: it cannot read its shard for task 'digits': No module named 'cifar'" in alone
    assert plan(registry, store)["obstacle"] == ""


@pytest.mark.parametrize(
    ("section", "obstacle"),
    [
        ({"require": 3}, "it needs 3, and 2 devices can take part"),
        ({"require": 2}, ""),
        ({"require": "all", "names": ["pi-1", "pi-4"]}, "all are required, and some cannot take part"),
        ({"groups": ["nobody"]}, "it needs 1, and no devices can take part"),
    ],
)
def test_a_plan_says_why_a_run_would_not_start(
    registry: DeviceRegistry, store: Store, section: Any, obstacle: str
) -> None:
    assert plan(registry, store, devices=section)["obstacle"].partition(":")[0] == obstacle


@pytest.mark.parametrize(
    ("section", "evaluators", "warns"),
    [
        ({}, (), True),
        ({"rounds": 5}, (), False),
        ({"trust_single_evaluation": True}, (), False),
        ({}, ("judge-2",), True),
        ({}, ("judge-2", "judge-3"), False),
        ({"evaluate_on": "coordinator"}, ("judge-2", "judge-3"), True),
        ({}, (EVALUATOR_NAME,), False),
        ({"evaluate_on": "devices"}, (EVALUATOR_NAME, "judge-2", "judge-3"), True),
    ],
)
def test_a_goal_that_nobody_s_word_can_reach_is_warned_of(
    registry: DeviceRegistry, store: Store, section: dict[str, Any], evaluators: tuple[str, ...], warns: bool
) -> None:
    for node, name in enumerate(evaluators, 10):
        registry.add(name, node_id=node, role="evaluator", groups=(), examples={"digits": 10})
        registry.record_status(name, StatusMessage(state="online", boot_id="b", session_no=1))
    config = parse_run({"run": {"task": "digits", "accuracy": 0.9, **section}})
    told = plan_run(build_run(config, "plan"), registry, store)
    assert [line.startswith("accuracy is the only stop rule") for line in told["warnings"]] == [True] * warns


@pytest.mark.parametrize(
    ("strategy", "section", "needed"),
    [
        ({"name": "bulyan"}, {}, 7),
        ({"name": "krum", "num_rogues": 0}, {}, 3),
        ({"name": "coordinate-median", "num_rogues": 0}, {}, None),
        ({"name": "fedavg"}, {}, None),
        ({"name": "coordinate-median"}, {"min_updates": 1}, 3),
    ],
)
def test_a_robust_rule_that_gets_too_few_updates_is_warned_of(
    registry: DeviceRegistry, store: Store, strategy: dict[str, Any], section: dict[str, Any], needed: int | None
) -> None:
    warnings = plan(registry, store, strategy=strategy, run={"task": "digits", "rounds": 2, **section})["warnings"]
    count = section.get("min_updates", 2)
    expected = [] if needed is None else [f"the robust rule needs {needed} updates a round to hold against the "]
    assert [line[: len(expected[0])] for line in warnings] == expected
    assert all(f"and gets {count}: let more devices take part, or lower num_rogues" in line for line in warnings)


@pytest.mark.parametrize(
    ("strategy", "section", "rounds"),
    [
        ({"name": "asgd"}, {}, 36),
        ({"name": "asgd"}, {"updates_per_round": 6}, 12),
        ({"name": "asgd", "iterations": 1}, {}, None),
        ({"name": "dsgd"}, {}, None),
        ({"name": "fedavg"}, {}, None),
    ],
)
def test_a_run_whose_rounds_are_far_shorter_than_those_of_fedavg_is_told_how_many_are_as_much_work(
    registry: DeviceRegistry, store: Store, strategy: dict[str, Any], section: dict[str, Any], rounds: int | None
) -> None:
    sections = {"strategy": strategy, "run": {"task": "digits", "rounds": 2, **section}}
    warnings = plan(registry, store, **sections)["warnings"]
    count = 2 * section.get("updates_per_round", 2)
    line = (
        f"2 rounds of asgd are about {count} iterations on all devices together, one mini-batch each; fedavg would "
        f"take 72: run.rounds = {rounds} is as much work"
    )
    assert warnings == ([] if rounds is None else [line])
    told = RunValidator(build_run, registry, store).check(parse_run(sections))["notes"]
    assert bool(told) == (rounds is not None)


@pytest.mark.parametrize(
    ("blocks", "iterations", "rounds"), [({"pi-1": [0, 1], "pi-2": [1, 2]}, 6, 24), ({"pi-1": [0, 1, 2]}, 8, 18)]
)
def test_a_round_of_redundant_is_as_many_iterations_as_there_are_blocks_and_devices_without_any(
    registry: DeviceRegistry, store: Store, blocks: dict[str, list[int]], iterations: int, rounds: int
) -> None:
    for name, held in blocks.items():
        shards = registry.get_device(name).examples  # type: ignore[union-attr]
        registry.record_capabilities(name, Capabilities(facts={"blocks": {"digits": held}}, shards=shards))
    sections: dict[str, Any] = {"strategy": {"name": "redundant"}, "run": {"task": "digits", "rounds": 2}}
    line = (
        f"2 rounds of redundant are about {iterations} iterations on all devices together, one mini-batch each; "
        f"fedavg would take 72: run.rounds = {rounds} is as much work"
    )
    assert plan(registry, store, **sections)["warnings"] == [line]
    (note,) = RunValidator(build_run, registry, store).check(parse_run(sections))["notes"]
    assert f"about {iterations + 2} iterations" in note, "of pi-4 as well, which is away"


@pytest.mark.parametrize(
    ("adapt", "counted"),
    [
        ({"method": "head"}, "2 frozen tensors, such as fc1.bias"),
        ({"frozen": ["fc1.weight"]}, "1 frozen tensors, such as fc1.weight"),
        ({"local": ["fc2.*"]}, None),
        ({}, None),
    ],
)
def test_a_base_that_nobody_has_trained_is_warned_of(
    registry: DeviceRegistry, store: Store, adapt: dict[str, Any], counted: str | None
) -> None:
    warnings = plan(registry, store, adapt=adapt)["warnings"]
    assert [line.partition(", stay ")[0] for line in warnings] == ([] if counted is None else [counted])


def test_those_who_are_not_drawn_first_are_told(registry: DeviceRegistry, store: Store) -> None:
    told = plan(registry, store, devices={"count": 1})
    assert sorted(row["reason"] for row in told["rows"] if row["takes_part"]) == [
        "",
        "it is not asked in the first round",
    ]
    assert any("later rounds" in line for line in told["assumed"])


def test_nodes_of_a_graph_send_to_each_neighbour(registry: DeviceRegistry, store: Store) -> None:
    told = rows(plan(registry, store, strategy={"name": "dsgd"}))["pi-1"]
    assert told["bytes_up"] < told["bytes_down"] + 100


def test_planning_changes_nothing(registry: DeviceRegistry, store: Store) -> None:
    assert plan(registry, store) == plan(registry, store)
    assert store.list_runs() == []


@pytest.fixture
def trainer_registry() -> DeviceRegistry:
    made = DeviceRegistry(PresenceTracker(), lambda: 0.0)
    made.record_broker_link(connected=True)
    made.add("pi", node_id=1, role="trainer", groups=(), examples={"digits": 9})
    made.record_status("pi", StatusMessage(state="online", boot_id="b", session_no=1))
    return made


def run_file(**sections: Any) -> Any:
    return parse_run({"run": {"task": "digits", "rounds": 2}, **sections})


def test_a_run_that_can_work_is_planned_with_what_was_said_at_its_check(
    trainer_registry: DeviceRegistry, store: Store
) -> None:
    vetting = RunValidator(build_run, trainer_registry, store)
    told = vetting.check(run_file())
    assert "state_bytes" in told
    plan = vetting.plan(run_file())
    assert told.items() <= plan.items()
    assert [row["device_id"] for row in plan["rows"] if row["takes_part"]] == ["pi"]


def test_a_run_whose_state_is_too_large_is_not_planned_either(trainer_registry: DeviceRegistry, store: Store) -> None:
    vetting = RunValidator(build_run, trainer_registry, store)
    greedy = parse_run({"run": {"task": "digits", "max_state_bytes": 1}, "strategy": {"name": "dc-asgd"}})
    for look in (vetting.check, vetting.plan):
        with pytest.raises(ConfigError, match="max_state_bytes"):
            look(greedy)


def test_a_run_that_nobody_can_train_is_not_planned_either(trainer_registry: DeviceRegistry, store: Store) -> None:
    trainer_registry.record_capabilities("pi", Capabilities(facts={"backends": ["numpy"]}, shards={"digits": 9}))
    vetting = RunValidator(
        lambda config, run_id: replace(build_run(config, run_id), needs_torch=True), trainer_registry, store
    )
    for look in (vetting.check, vetting.plan):
        with pytest.raises(TaskError, match="have no torch"):
            look(run_file())


MODEL = {"w": np.zeros(250, np.float32), "n": np.array(1, np.int64)}
TWO_MODELS = SimpleNamespace(bytes_per_device=lambda model_bytes: 2 * model_bytes)


@pytest.fixture
def members():
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


def test_a_run_that_trains_at_the_coordinator_too_is_refused_where_that_has_no_data_of_the_task(members):
    strategy = make_strategy("fltrust", {}, RoundRules())
    members.add(EVALUATOR_NAME, node_id=8, role="evaluator", groups=(), examples={"mnist": 10})
    with pytest.raises(ConfigError, match=r"which has none of digits: start it with .* --test-shard digits=FILE"):
        check_root_shard(run(), strategy, members)
    check_root_shard(run(), make_strategy("fedavg", {}, RoundRules()), members)
    members.add(EVALUATOR_NAME, node_id=8, role="evaluator", groups=(), examples={"digits": 10})
    check_root_shard(run(), strategy, members)


def test_a_strategy_that_declares_nothing_keeps_nothing(members):
    assert compute_bytes_per_device(make_strategy("fedavg", {}, RoundRules()), MODEL) == 0
    facts = check_strategy_memory(run(max_state_bytes=0), make_strategy("fedavg", {}, RoundRules()), MODEL, members)
    assert facts == {"state_bytes": 0, "state_devices": 2}


@pytest.mark.parametrize(
    ("devices", "expected"), [({}, 2), ({"groups": ["lab"]}, 1), ({"names": ["b"]}, 1), ({"min": 4}, 4)]
)
def test_counted_are_the_trainers_that_the_run_means_or_that_it_waits_for(members, devices, expected):
    facts = check_strategy_memory(run(**devices), TWO_MODELS, MODEL, members)
    assert facts == {"state_devices": expected, "state_bytes": expected * 2 * 1008}


def test_a_run_that_needs_more_than_it_may_have_is_refused_with_both_numbers(members):
    with pytest.raises(
        ConfigError, match=r"^fedavg keeps 4032 bytes for 2 devices, the run may have 4031 bytes: raise run"
    ):
        check_strategy_memory(run(max_state_bytes=4_031), TWO_MODELS, MODEL, members)
    assert check_strategy_memory(run(max_state_bytes=4_032), TWO_MODELS, MODEL, members)["state_bytes"] == 4_032


def test_large_numbers_are_said_in_units_too(members):
    models = SimpleNamespace(bytes_per_device=lambda _model_bytes: 5 * 1024**3)
    with pytest.raises(ConfigError, match=r"keeps 10737418240 bytes \(10\.0 GiB\) for 2 devices"):
        check_strategy_memory(run(), models, MODEL, members)


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
    with pytest.raises(TaskError, match="small have no torch"):
        check_trainers(config(), make_trainers(small=["numpy"]), needs_torch=True)


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


def test_members_of_a_collective_have_an_address_of_their_own_and_a_task_that_is_not_confined(
    registry: DeviceRegistry, tmp_path: Path
) -> None:
    tables = {"guard": {"enabled": False, "max_weight_ratio": 0}}
    aggregation = {"collective": "ring"}
    run = build_run(parse_run({"run": {"task": "digits"}, "aggregation": aggregation, **tables}), "check")
    with pytest.raises(ConfigError, match="says where pi-1 listens"):
        check_members(run, registry)
    with pytest.raises(
        ConfigError, match="must be 'coordinator' for task digits, got 'ring': pi-1 trains it confined"
    ):
        check_members(replace(run, is_built_in=False), registry)
    for name in ("pi-1", "pi-2", "pi-3", "pi-4"):
        registry.record_capabilities(name, Capabilities(facts={"peer_address": "h:1"}, shards={"digits": 10}))
    with pytest.raises(ConfigError, match="pi-1 and pi-2 both listen at h:1; let one join with another port"):
        check_members(run, registry)
    (tmp_path / "hosts.json").write_text(
        json.dumps({"hosts": [{"name": f"pi-{n}", "addr": "h", "port": n} for n in range(1, 5)]})
    )
    aggregation["hosts"] = str(tmp_path / "hosts.json")
    check_members(
        build_run(parse_run({"run": {"task": "digits"}, "aggregation": aggregation, **tables}), "check"), registry
    )


def test_a_device_that_confines_is_no_member_of_a_collective(registry: DeviceRegistry) -> None:
    tables = {"guard": {"enabled": False, "max_weight_ratio": 0}, "aggregation": {"collective": "ring"}}
    run = build_run(parse_run({"run": {"task": "digits"}, **tables}), "check")
    foreign = replace(run, is_built_in=False)

    def report(name: str, confinement: object) -> None:
        facts = {"peer_address": f"{name}:1", "confinement": confinement}
        registry.record_capabilities(name, Capabilities(facts=facts, shards={"digits": 10}))

    for name in ("pi-1", "pi-2", "pi-3", "pi-4"):
        report(name, {"policy": "never", "gaps": []})
    check_members(foreign, registry)
    for confinement in ({"policy": "auto"}, {}, "never"):
        report("pi-3", confinement)
        check_members(run, registry)
        with pytest.raises(ConfigError, match="pi-3 trains it confined, and so sends no chunks"):
            check_members(foreign, registry)
    report("pi-3", {"policy": "always"})
    with pytest.raises(ConfigError, match="pi-3 trains it confined"):
        check_members(run, registry)


def test_a_plan_counts_the_batches_of_a_split_network(trainer_registry: DeviceRegistry, store: Store) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    trainer_registry.record_capabilities("pi", Capabilities(facts={}, shards={"mnist": 100}))
    sections = {"run": {"task": "mnist", "rounds": 2}, "strategy": {"iterations": 10, "batch_size": 8}}
    validator = RunValidator(build_run, trainer_registry, store)
    (whole,) = validator.plan(parse_run(sections))["rows"]
    (split,) = validator.plan(parse_run({**sections, "split": {"after": "pool2", "up": "fp16"}}))["rows"]
    values = 10 * 8 * 64 * 7 * 7
    front = 4 * (32 * 10 + 64 * (32 * 9 + 1))
    assert split["bytes_up"] == pytest.approx(2 * values + front, rel=0.01)
    assert split["bytes_down"] == pytest.approx(4 * values + front, rel=0.01)
    assert whole["bytes_up"] == pytest.approx(4 * 421_642, rel=0.01)
