"""Devices selected by utility: scores by hand, and who is asked over many rounds."""

import heapq
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
from edgefl.strategies.utility_selection import (
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
        "d": SelectionRecord(num_selected=1, last_round=5, utility=20.0, duration_s=15.0, silent_s=120.0),
    }
    stale = [math.sqrt(0.1 * math.log(8) / last) for last in (2, 8, 4, 5)]
    found = compute_scores(records, [*records], 1, settings=RULE, round_number=8)
    silent = (20 / 30 + stale[3]) * (10 / (120 / 3)) ** 2
    assert found == pytest.approx([(1 + stale[0]) * (10 / 20) ** 2, 1 + stale[1], 1 + stale[2], silent])
    later = compute_scores(records, ["d"], 1, settings=RULE, round_number=20)
    assert later == pytest.approx([(20 / 30 + math.sqrt(0.1 * math.log(20) / 5)) * (10 / 15) ** 2])
    fair = compute_scores(records, ["b", "a"], 1, settings=replace(RULE, fairness=0.25), round_number=8)
    assert fair == pytest.approx([0.75 * found[1], 0.75 * found[0] + 0.25 * (1 - 1 / 4)])
    unclipped = compute_scores(records, ["b"], 1, settings=replace(RULE, clip=1.0), round_number=8)
    assert unclipped == pytest.approx([40 / 900 + stale[1]])
    median = compute_scores(records, ["a"], 1, settings=replace(RULE, round_s=None, penalty=1.0), round_number=8)
    assert median == pytest.approx([(1 + stale[0]) * 15 / 20])


def test_new_devices_have_a_share_that_falls_and_what_is_missing_comes_from_the_others():
    records = {f"known-{number}": SelectionRecord(utility=1.0, duration_s=1.0) for number in range(50)}
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
    rounds, _ = play(fedavg(max_devices=2), names, 200, losses=losses, seconds={"pi-0": 40.0})
    counts = Counter(name for chosen in rounds for name in chosen)
    assert min(counts[name] for name in names[1:5]) > 2 * max(counts[name] for name in names[5:])
    assert counts["pi-0"] < min(counts[name] for name in names[1:5]) / 2
    assert all(len(set(chosen)) == 2 for chosen in rounds)
    assert len(counts) == len(names), "each was tried once"


@pytest.mark.parametrize("count", [2, 4])
def test_two_boards_that_claim_any_loss_together_are_asked_in_no_more_than_half_of_the_rounds(count):
    names = [f"pi-{number}" for number in range(20)]
    losses = {name: 1.0 + number / 40 for number, name in enumerate(names)} | {"pi-0": 1e300, "pi-1": 1e300}
    counts = Counter(
        name for chosen in play(fedavg(max_devices=count), names, 200, losses=losses)[0] for name in chosen
    )
    assert max(counts["pi-0"], counts["pi-1"]) < 100
    honest = [counts[name] for name in names[2:]]
    assert sum(honest[-4:]) > 2 * sum(honest[:4]), "of the others those with a high loss are still asked more often"


def test_a_loss_below_0_counts_as_none():
    _, state = play(fedavg(max_devices=2), ["a", "b"], 1, losses={"a": -5.0, "b": 0.5})
    assert {name: record.utility for name, record in state.selections.items()} == {"a": 0.0, "b": 5.0}


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


def test_with_fairness_boards_that_were_seldom_free_are_asked_more_often_and_with_1_first():
    records = {f"pi-{n}": SelectionRecord(num_selected=20, utility=10.0, duration_s=1.0) for n in range(8)}
    records["pi-8"] = SelectionRecord(num_selected=2, utility=0.1, duration_s=90.0)

    def is_asked(seed, fairness):
        settings = replace(ONLY_KNOWN, fairness=fairness)
        rng = derive_rng(seed)
        return "pi-8" in select_by_utility(records, [*records], 2, settings=settings, round_number=30, rng=rng)

    assert not any(is_asked(seed, 0.0) for seed in range(40))
    assert sum(is_asked(seed, 0.9) for seed in range(40)) > 20  # of 2 in 9
    assert all(is_asked(seed, 1.0) for seed in range(40))


def close_round(strategy, state, names, silent, *, now_s, lasts_s=1.0):
    """The state after a round that some answered at once, and whom it asked."""
    state, decision = strategy.assign(state, view_of(*names, now_s=now_s))
    for order in decision.instructions:
        if order.device_id not in silent:
            update = update_of(order, {"w": [1.0]}, num_examples=10, loss=1.0)
            state = strategy.receive(state, replace(update, received_s=now_s + 1.0))
    busy = {order.device_id: [order.assignment_id] for order in decision.instructions if order.device_id in silent}
    state, _ = strategy.assign(state, view_of(*names, busy=busy, now_s=now_s + lasts_s))
    return strategy.aggregate(state), [order.device_id for order in decision.instructions]


@pytest.mark.parametrize("missed_round", [0, 12])
@pytest.mark.parametrize("fairness", [0.0, 0.3])
def test_a_board_that_missed_a_round_rests_for_as_long_and_comes_back(fairness, missed_round):
    strategy, names = fedavg(replace(RULE, fairness=fairness), max_devices=3), [f"pi-{number}" for number in range(6)]
    state, rounds, missed = strategy.init({"w": np.zeros(1)}), [], None
    for number in range(80):
        is_missed = missed is None and number >= missed_round
        state, asked = close_round(
            strategy, state, names, {"pi-0"} if is_missed else (), now_s=100.0 * number, lasts_s=90.0
        )
        if is_missed and "pi-0" in asked:
            missed = number
            assert state.selections["pi-0"].silent_s == 90.0
            assert state.selections["pi-0"].utility == (10.0 if missed_round else 0.0)
        rounds.append("pi-0" in asked)
    assert missed is not None
    assert sum(rounds[missed + 1 : missed + 4]) <= 1, "90 s are those of some rounds of 10 s"
    assert sum(rounds[missed + 10 :]) > (60 - missed) / 5


def test_where_min_updates_closes_rounds_the_boards_that_were_not_needed_are_asked_again():
    paces = {f"pi-{number}": 1.0 + number for number in range(12)}
    fleet = PacedFleet({name: Board(pace) for name, pace in paces.items()})
    run(fleet, fedavg(replace(RULE, penalty=0.0), max_devices=4, min_updates=2), rounds=120)
    counts = Counter(order.device_id for order in fleet.assignments())
    late = Counter(order.device_id for order in fleet.assignments() if order.base_version > 60)
    assert len(late) == len(paces)
    assert max(counts.values()) < 4 * min(counts.values())


def test_a_board_that_answers_when_it_is_asked_again_is_not_silent():
    strategy = fedavg(max_devices=2)
    state, decision = strategy.assign(strategy.init({"w": np.zeros(1)}), view_of("a", "b"))
    state, again = strategy.assign(state, view_of("a", "b", now_s=7.0))
    assert len(decision.instructions) == len(again.instructions) == 2, "all lost what they were asked for"
    for order in again.instructions:
        update = update_of(order, {"w": [1.0]}, num_examples=10, loss=2.0)
        state = strategy.receive(state, replace(update, received_s=10.0))
    state = strategy.aggregate(state)
    assert state.silent == set()
    for record in state.selections.values():
        assert record == SelectionRecord(num_selected=1, last_round=1, utility=20.0, duration_s=3.0)


def test_the_duration_is_the_coordinator_s_and_the_rounds_of_a_real_loop_have_it():
    paces = {"a": 1.0, "b": 3.0, "c": 2.0}
    fleet = PacedFleet({name: Board(pace) for name, pace in paces.items()})
    state = run(fleet, strategy := fedavg(max_devices=2), rounds=6)
    assert strategy.rules.selection is RULE
    per_round = Counter(order.base_version for order in fleet.assignments())
    assert set(per_round.values()) == {2}
    assert {name: record.duration_s for name, record in state.selections.items()} == pytest.approx(paces)


def test_a_coordinator_that_is_killed_at_any_moment_selects_the_same_devices():
    names = [f"pi-{number}" for number in range(12)]
    losses = {name: 1.0 + number for number, name in enumerate(names)}
    seconds = {name: 5.0 * number for number, name in enumerate(names)}
    whole, state = play(fedavg(max_devices=3), names, 30, losses=losses, seconds=seconds)
    assert state.selections["pi-11"].duration_s == 55.0
    kills = derive_rng(3)

    def save(state):
        """The state that the next coordinator has: that of the newest aggregation, or of a moment in a round."""
        state = decode_state(encode_state(state), type(state))
        if not state.open and kills.random() < 0.5:  # killed in the middle of the round that is asked for now
            strategy = fedavg(max_devices=3)
            state, decision = strategy.assign(state, view_of(*names))
            state = strategy.receive(state, update_of(decision.instructions[0], {"w": [1.0]}, loss=9.0))
            state = strategy.resumed(decode_state(encode_state(state), type(state)))
        return state

    killed, last = play(fedavg(max_devices=3), names, 30, losses=losses, seconds=seconds, save=save)
    assert killed == whole
    assert last.selections == state.selections


WITHOUT_ROUNDS = ["fedbuff", "fedasync", "asgd", "adacomp", "bounded"]


def without_rounds(name="fedasync", settings=RULE, **rules):
    options = {"iterations": 1} if name.startswith("fed") else {"staleness": 50} if name == "bounded" else {}
    return make_strategy(name, {**options, "learning_rate": 0.5}, RoundRules(selection=settings, **rules))


def keep_busy(
    strategy,
    names,
    num_assignments,
    *,
    losses=None,
    seconds=None,
    since_s=None,
    failing=None,
    save=lambda state: state,
):
    """Who was asked, in order, of devices that answer after so many seconds; and the state when all are asked.

    `since_s` says from when on a device is there; `failing` after how long one is lost, of assignments 100 to 199.
    """
    state, asked, at_work, now_s, most_busy = strategy.init({"w": np.zeros(1)}), [], [], 0.0, 0
    while len(asked) < num_assignments:
        busy = {order.device_id: [order.assignment_id] for _, _, order, _ in at_work}
        present = [name for name in names if (since_s or {}).get(name, 0.0) <= now_s]
        state, decision = strategy.assign(save(state), view_of(*present, busy=busy, now_s=now_s))
        for order in decision.instructions:
            asked.append(order.device_id)
            fails_s = (failing or {}).get(order.device_id) if 100 < len(asked) <= 200 else None
            lasts_s = (seconds or {}).get(order.device_id, 1.0) if fails_s is None else fails_s
            heapq.heappush(at_work, (now_s + lasts_s, len(asked), order, fails_s is None))
        most_busy = max(most_busy, len(at_work))
        now_s, _, order, is_answered = heapq.heappop(at_work)
        if is_answered:
            loss = (losses or {}).get(order.device_id, 1.0)
            update = replace(update_of(order, {"w": [0.01]}, num_examples=10, loss=loss), received_s=now_s)
            state = strategy.receive(save(state), update)
        while strategy.ready(state, view_of()):
            state = strategy.aggregate(state)
    assert most_busy <= strategy.rules.max_devices
    return asked, state


@pytest.mark.parametrize("name", WITHOUT_ROUNDS)
def test_without_rounds_the_board_that_is_next_has_a_high_loss_and_is_not_slow(name):
    names = [f"pi-{number:02}" for number in range(20)]
    losses = {name: 4.0 if number < 5 else 1.0 for number, name in enumerate(names)}
    asked, state = keep_busy(without_rounds(name, max_devices=2), names, 400, losses=losses, seconds={"pi-00": 40.0})
    counts = Counter(asked)
    assert min(counts[name] for name in names[1:5]) > 2 * max(counts[name] for name in names[5:])
    assert counts["pi-00"] < min(counts[name] for name in names[1:5]) / 2
    assert set(counts) == set(names), "each was tried once"
    assert state.selections["pi-01"].duration_s == 1.0
    assert state.selections["pi-00"].duration_s == 40.0


def test_without_rounds_as_many_assignments_as_at_first_are_one():
    names = [f"pi-{number:03}" for number in range(400)]
    settings = replace(RULE, exploration_decay=0.9, min_exploration=0.0)
    asked, state = keep_busy(without_rounds(settings=settings, max_devices=10), names, 300)
    # Of 10 each the first is new, then 0.9 * 0.9 ** n; at once for each assignment, hardly 10 would be.
    assert len(set(asked)) == pytest.approx(10 + 10 * sum(0.9 * 0.9**n for n in range(1, 30)), abs=15)
    assert max(record.last_round for record in state.selections.values()) == 30
    assert Counter(asked) == {name: record.num_selected for name, record in state.selections.items()}
    in_chunks, _ = keep_busy(without_rounds(settings=settings, max_devices=10, updates_per_round=100), names, 300)
    assert len(set(in_chunks)) > 200


def test_without_rounds_two_boards_that_claim_any_loss_are_not_always_at_work():
    names = [f"pi-{number:02}" for number in range(20)]
    losses = {name: 1.0 + number / 40 for number, name in enumerate(names)} | {"pi-00": 1e300, "pi-01": 1e300}
    counts = Counter(keep_busy(without_rounds(max_devices=4), names, 800, losses=losses)[0])
    assert max(counts["pi-00"], counts["pi-01"]) < 800 / 4 / 2, "of the time that one place has"


def test_without_rounds_and_with_fairness_a_board_that_was_away_is_next_until_it_was_asked_as_often():
    names, away = [f"pi-{number}" for number in range(4)], {"pi-3": 20.5}
    fair = replace(ONLY_KNOWN, fairness=1.0, exploration=1.0, min_exploration=1.0)
    asked, _ = keep_busy(without_rounds(settings=fair, max_devices=1), names, 60, since_s=away)
    assert "pi-3" not in asked[:21]
    assert asked[21:28] == ["pi-3"] * 7
    counts = Counter(asked)
    assert max(counts.values()) - min(counts.values()) <= 1
    alike, _ = keep_busy(without_rounds(settings=None, max_devices=1), names, 60, since_s=away)
    assert asked != alike


def test_without_rounds_a_board_that_fails_rests_and_keeps_its_utility():
    names = [f"pi-{number}" for number in range(6)]
    losses = {name: 4.0 if name == "pi-0" else 1.0 for name in names}
    often, state = keep_busy(without_rounds(max_devices=2), names, 200, losses=losses)
    assert state.selections["pi-0"].silent_s == 0.0
    seldom, state = keep_busy(without_rounds(max_devices=2), names, 200, losses=losses, failing={"pi-0": 90.0})
    assert seldom[:100] == often[:100]
    assert 0 < Counter(seldom[100:])["pi-0"] < Counter(often[100:])["pi-0"] / 3
    assert state.selections["pi-0"].silent_s == 90.0
    assert state.selections["pi-0"].utility == 40.0
    later, state = keep_busy(without_rounds(max_devices=2), names, 500, losses=losses, failing={"pi-0": 90.0})
    assert later[:200] == seldom
    assert Counter(later[-100:])["pi-0"] > 10, "it is back"
    assert state.selections["pi-0"].silent_s == 0.0


@pytest.mark.parametrize("name", WITHOUT_ROUNDS)
def test_without_rounds_a_coordinator_that_is_killed_at_any_moment_selects_the_same_devices(name):
    names = [f"pi-{number:02}" for number in range(12)]
    losses = {name: 1.0 + number for number, name in enumerate(names)}
    seconds = {name: 1.0 + number % 4 for number, name in enumerate(names)}
    given = {"losses": losses, "seconds": seconds}
    whole, state = keep_busy(without_rounds(name, max_devices=3), names, 60, **given)
    killed, last = keep_busy(
        without_rounds(name, max_devices=3), names, 60, **given,
        save=lambda state: decode_state(encode_state(state), type(state)),
    )  # fmt: skip
    assert killed == whole
    assert last.selections == state.selections
    # What was at work is lost, and the next ones are asked by what is known of all.
    strategy, choices = without_rounds(name, ONLY_KNOWN, max_devices=3), set()
    for _ in range(2):
        copy = strategy.resumed(decode_state(encode_state(last), type(last)))
        copy, decision = strategy.assign(copy, view_of(*names, now_s=1.0))
        choices.add(tuple(order.device_id for order in decision.instructions))
        assert all(copy.selections[name].num_selected >= last.selections[name].num_selected for name in whole)
    assert len(choices) == 1
    chosen = choices.pop()
    assert len(chosen) == 3
    assert min(losses[name] for name in chosen) > 5.0, "of those with a high loss"


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"devices": {}}, "needs devices.count or devices.fraction"),
        ({"selection": {"fairness": 0.5}}, "selection.fairness means nothing without"),
        (
            {"selection": {"rule": "utility", "clip": 2}},
            "selection.clip must be a number at least 0 and at most 1, got 2",
        ),
        ({"strategy": {"name": "redundant"}}, "one update at a time, such as fedavg or fedbuff; redundant does not"),
        ({"strategy": {"name": "d2"}}, "d2 does not"),
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
