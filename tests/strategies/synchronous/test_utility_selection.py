"""Devices selected by utility: scores by hand, and who is asked over many rounds."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run
from strategy_turns import update_of, view_of

from edgefl.core.config import SelectionSection, parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.types import derive_rng
from edgefl.engine.assembly.build import build_run
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.utility_selection import (
    MAX_UTILITY,
    SelectionRecord,
    compute_scores,
    select_by_utility,
)

RULE = SelectionSection(rule="utility", round_s=10.0)
ONLY_KNOWN = replace(RULE, exploration=0.0, min_exploration=0.0)


def fedavg(settings=RULE, **rules):
    return make_strategy("fedavg", {"iterations": 1, "learning_rate": 0.5}, RoundRules(selection=settings, **rules))


def play(strategy, devices, num_rounds, *, losses=None, seconds=None, examples=None, save=lambda state: state):
    """Who was asked in each round, of devices that answer with these losses and after so many seconds."""
    state, rounds, now_s = strategy.init({"w": np.zeros(1)}), [], 0.0
    for _ in range(num_rounds):
        state, decision = strategy.assign(save(state), view_of(*devices, now_s=now_s))
        rounds.append([order.device_id for order in decision.instructions])
        for order in decision.instructions:
            name = order.device_id
            loss, duration_s = (losses or {}).get(name, 1.0), (seconds or {}).get(name, 1.0)
            if loss is not None:
                update = update_of(order, {"w": [1.0]}, num_examples=(examples or {}).get(name, 10), loss=loss)
                state = strategy.receive(save(state), replace(update, received_s=now_s + duration_s))
        state, now_s = strategy.aggregate(state), now_s + 100.0
    return rounds, state


def test_a_score_is_that_of_the_paper():
    records = {
        "a": SelectionRecord(num_selected=1, last_round=2, utility=30.0, duration_s=20.0),
        "b": SelectionRecord(num_selected=4, last_round=8, utility=40.0, duration_s=5.0),
        "c": SelectionRecord(num_selected=2, last_round=4, utility=900.0),
    }
    stale = [math.sqrt(0.1 * math.log(8) / last) for last in (2, 8, 4)]
    found = compute_scores(records, ["a", "b", "c"], settings=RULE, round_number=8)
    assert found == pytest.approx([(30 / 40 + stale[0]) * (10 / 20) ** 2, 1 + stale[1], 1 + stale[2]])
    fair = compute_scores(records, ["b", "a"], settings=replace(RULE, fairness=0.25), round_number=8)
    assert fair == pytest.approx([0.75 * found[1], 0.75 * found[0] + 0.25 * (1 - 1 / 4)])
    unclipped = compute_scores(records, ["b"], settings=replace(RULE, clip=1.0), round_number=8)
    assert unclipped == pytest.approx([40 / 900 + stale[1]])
    median = compute_scores(records, ["a"], settings=replace(RULE, round_s=None, penalty=1.0), round_number=8)
    assert median == pytest.approx([(30 / 40 + stale[0]) * 12.5 / 20])


def test_new_devices_have_a_share_that_falls_and_what_is_missing_comes_from_the_others():
    records = {f"known-{number}": SelectionRecord(utility=1.0) for number in range(50)}
    available = [*records, *(f"new-{number}" for number in range(50))]

    def count_new(round_number, names=available, **options):
        settings = replace(RULE, **options)
        choices = (
            select_by_utility(
                records, names, 10, settings=settings, round_number=round_number, rng=derive_rng(seed, round_number)
            )
            for seed in range(200)
        )
        return np.mean([sum(name.startswith("new") for name in chosen) for chosen in choices])

    assert count_new(1) == pytest.approx(9.0, abs=0.1)
    assert count_new(36) == pytest.approx(10 * 0.9 * 0.98**35, abs=0.1)
    assert count_new(500) == pytest.approx(2.0, abs=0.1)
    assert count_new(1, exploration=0.25) == pytest.approx(2.5, abs=0.15)
    assert count_new(1, [*available[:3], *available[50:]], exploration=0.0, min_exploration=0.0) == 7
    assert count_new(1, [*available[:50], available[50]], exploration=1.0) == 1


def test_devices_with_a_high_loss_are_asked_more_often_and_slow_ones_less():
    names = [f"pi-{number}" for number in range(20)]
    losses = {name: 4.0 if number < 5 else 1.0 for number, name in enumerate(names)}
    rounds, _ = play(fedavg(max_devices=4), names, 100, losses=losses, seconds={"pi-0": 40.0})
    counts = Counter(name for chosen in rounds for name in chosen)
    assert min(counts[name] for name in names[1:5]) > 2 * max(counts[name] for name in names[5:])
    assert counts["pi-0"] < min(counts[name] for name in names[1:5]) / 2
    assert all(len(set(chosen)) == 4 for chosen in rounds)
    assert len(counts) == len(names), "each was tried once"


@pytest.mark.parametrize(
    "claim", [{"losses": 1e300}, {"losses": math.inf}, {"losses": math.nan}, {"examples": 10**15}]
)
def test_a_claim_without_measure_wins_no_more_than_the_second_largest_one(claim):
    names = [f"pi-{number}" for number in range(20)]
    losses = {name: 1.0 + number / 40 for number, name in enumerate(names)}
    honest = Counter(name for chosen in play(fedavg(max_devices=4), names, 100, losses=losses)[0] for name in chosen)
    told = {"losses": {**losses, "pi-0": claim.get("losses", 1.0)}, "examples": {"pi-0": claim.get("examples", 10)}}
    rounds, state = play(fedavg(max_devices=4), names, 100, **told)
    counts = Counter(name for chosen in rounds for name in chosen)
    assert counts["pi-0"] <= 1.2 * max(honest.values())
    assert sum(counts[name] for name in names[1:]) >= 300
    assert all(0 <= record.utility <= MAX_UTILITY for record in state.selections.values())
    encode_state(state)


def test_with_fairness_boards_that_were_seldom_free_are_asked_first_when_they_are():
    records = {f"pi-{number}": SelectionRecord(num_selected=20, utility=10.0) for number in range(8)}
    records["pi-8"] = SelectionRecord(num_selected=2, utility=0.1)

    def is_asked(seed, fairness):
        settings = replace(ONLY_KNOWN, fairness=fairness)
        rng = derive_rng(seed)
        return "pi-8" in select_by_utility(records, [*records], 2, settings=settings, round_number=30, rng=rng)

    assert not any(is_asked(seed, 0.0) for seed in range(40))
    assert sum(is_asked(seed, 0.9) for seed in range(40)) > 20  # of 2 in 9


def test_a_device_that_does_not_answer_has_no_utility_until_it_does():
    strategy = fedavg(ONLY_KNOWN, max_devices=2)
    _, state = play(strategy, ["a", "b"], 1)
    assert {name: record.utility for name, record in state.selections.items()} == {"a": 10.0, "b": 10.0}
    state, decision = strategy.assign(state, view_of("a", "b"))
    order = next(order for order in decision.instructions if order.device_id == "a")
    state = strategy.aggregate(strategy.receive(state, update_of(order, {"w": [1.0]}, num_examples=10, loss=2.0)))
    assert {name: record.utility for name, record in state.selections.items()} == {"a": 20.0, "b": 0.0}


def test_the_duration_is_the_coordinator_s_and_the_rounds_of_a_real_loop_have_it():
    fleet = PacedFleet({name: Board(pace) for name, pace in {"a": 1.0, "b": 3.0, "c": 2.0}.items()})
    run(fleet, strategy := fedavg(max_devices=2), rounds=6)
    assert strategy.rules.selection is RULE
    per_round = Counter(order.base_version for order in fleet.assignments())
    assert set(per_round.values()) == {2}


def test_a_coordinator_that_is_killed_at_any_moment_selects_the_same_devices():
    names = [f"pi-{number}" for number in range(12)]
    losses = {name: 1.0 + number for number, name in enumerate(names)}
    seconds = {name: 5.0 * number for number, name in enumerate(names)}
    whole, state = play(fedavg(max_devices=3), names, 30, losses=losses, seconds=seconds)
    assert state.selections["pi-11"].duration_s == 55.0

    def save(state):
        return decode_state(encode_state(state), type(state))

    killed, _ = play(fedavg(max_devices=3), names, 30, losses=losses, seconds=seconds, save=save)
    assert killed == whole


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"devices": {}}, "needs devices.count or devices.fraction"),
        ({"selection": {"fairness": 0.5}}, "selection.fairness means nothing without"),
        (
            {"selection": {"rule": "utility", "clip": 2}},
            "selection.clip must be a number at least 0 and at most 1, got 2",
        ),
        ({"strategy": {"name": "fedbuff"}}, "rounds of one update a device, such as fedavg; fedbuff is none"),
        ({"strategy": {"name": "redundant"}}, "redundant is none"),
        ({"strategy": {"name": "statistics"}}, "selection means nothing for the analysis statistics"),
        (
            {"privacy": {"unit": "device", "epsilon": 8.0, "delta": 1e-5}, "guard": {"enabled": False}},
            "selection.rule must be 'uniform' with privacy.unit",
        ),
    ],
)
def test_where_it_means_nothing_it_is_refused(sections, line):
    tables = {"run": {"task": "digits"}, "devices": {"count": 3}, "selection": {"rule": "utility"}, **sections}
    with pytest.raises(ConfigError, match=line):
        build_run(parse_run(tables), "r")


def test_a_run_file_comes_back_as_it_was_and_others_have_no_table():
    tables = {"run": {"task": "digits"}, "devices": {"count": 3}, "selection": {"rule": "utility", "fairness": 0.5}}
    config = parse_run(tables)
    assert parse_run(config.to_json()) == config
    assert build_run(config, "r").strategy.rules.selection == config.selection
    assert "selection" not in parse_run({"run": {"task": "digits"}}).to_json()
    assert build_run(parse_run({"run": {"task": "digits"}}), "r").strategy.rules.selection is None
