"""Redundant shards: P-T2 and P-T9 of Parallel-SGD, on boards with a pace."""

from dataclasses import fields, make_dataclass

import numpy as np
import pytest
from paced_fleet import Board, PacedFleet, run, trained

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.types import TrainInstruction
from edgefl.engine.progress import StoppingCriteria
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.participation import DeviceSelection, RunParticipationPolicy
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.round_state import RoundState
from edgefl.strategies.update_guard import UpdateGuard
from edgefl.tasks.datasets.partitioning import list_duplicate_holders, list_subset_holders

TASK = "digits"


def fleet_of(holders, *, paces=None, exchange_s=0.0):
    """Boards d0, d1, … of which `holders[b]` hold block b; a block's optimum is its number."""
    names = sorted({device for held in holders for device in held})
    boards = {}
    for number in names:
        blocks = tuple(block for block, held in enumerate(holders) if number in held)
        boards[f"d{number}"] = Board((paces or {}).get(number, 1.0), exchange_s, blocks=blocks)
    return PacedFleet(boards, task=TASK)


def redundant(rules=None, **options):
    rules = {"task": TASK, **(rules or {})}
    return make_strategy("redundant", {"learning_rate": 0.25, **options}, RoundRules(**rules))


def by_hand(num_blocks, num_rounds, blocks=None, rates=None):
    """The mean over all blocks, whoever computed them."""
    model = np.zeros(2)
    for rate in rates or [0.25] * num_rounds:
        moves = [trained(model, float(block), rate, 1) - model for block in (blocks or range(num_blocks))]
        model = model + sum(moves[1:], moves[0]) / len(moves)
    return model.tobytes()


def train_orders(fleet):
    return [order for order in fleet.journal.orders if isinstance(order, TrainInstruction)]


def blocks_used(fleet):
    return [sorted(int(name.rpartition("-b")[2]) for name in names) for names in fleet.journal.aggregates]


@pytest.mark.parametrize(
    "holders", [list_duplicate_holders(4, 2), list_subset_holders(5, 3), list_duplicate_holders(3, 1)], ids=len
)
def test_every_block_counts_once_a_round_however_many_hold_it(holders):
    fleet = fleet_of(holders)
    state = run(fleet, redundant(), rounds=4)
    assert blocks_used(fleet) == [list(range(len(holders)))] * 4
    assert state.model["w"].tobytes() == by_hand(len(holders), 4)


@pytest.mark.parametrize("lost", [(0, 1), (0, 3), (2, 3)])
def test_r_minus_one_lost_devices_change_not_a_bit(lost):
    holders = list_subset_holders(4, 3)
    fleet = fleet_of(holders, paces={0: 0.7, 1: 1.0, 2: 1.3, 3: 2.2})
    for moment, number in zip((1.5, 4.1), lost, strict=True):
        fleet.at(moment, lambda number=number: fleet.leave(f"d{number}"))
    state = run(fleet, redundant(), rounds=6)
    assert state.model["w"].tobytes() == by_hand(len(holders), 6)


def test_a_scaled_rate_goes_by_blocks_a_device_and_falls_at_the_end_and_no_lost_device_changes_it():
    fleet = fleet_of(list_subset_holders(6, 3), paces={0: 0.7, 1: 1.0, 2: 1.3, 3: 2.2})  # 20 blocks
    for moment, number in ((9.0, 0), (25.0, 3)):
        fleet.at(moment, lambda number=number: fleet.leave(f"d{number}"))
    state = run(fleet, redundant({"rounds": 10}, scale_rate=True), rounds=10)
    rates = [0.25 * (20 / 6) ** 0.5 * factor for factor in (1, 1, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3)]
    for order in train_orders(fleet):
        assert order.plan.learning_rate == pytest.approx(rates[order.base_version])
    assert state.model["w"] == pytest.approx(np.frombuffer(by_hand(20, 10, rates=rates)))


def test_a_scaled_rate_is_bounded_and_a_device_without_more_blocks_than_others_keeps_the_rate():
    for holders, factor in ((list_subset_holders(10, 4), 2.5), (list_duplicate_holders(4, 2), 1.0)):
        fleet = fleet_of(holders)
        run(fleet, redundant(scale_rate=True), rounds=1)
        assert {order.plan.learning_rate for order in train_orders(fleet)} == {0.25 * factor}


def test_a_state_that_did_not_count_holders_resumes_with_the_rate_of_its_open_round_and_scales_the_next():
    names = [item.name for item in fields(RoundState) if item.name != "num_holders"]
    kept = [(item.name, item.type, item) for item in fields(RoundState) if item.name in names]
    former = make_dataclass("RoundState", kept, namespace={"__module__": RoundState.__module__})
    strategy, view = redundant(scale_rate=True), fleet_of(list_subset_holders(6, 3)).view()
    state, _ = strategy.assign(strategy.init({"w": np.zeros(2)}), view)
    content = encode_state(former(**{name: getattr(state, name) for name in names}))
    resumed = decode_state(content, type(strategy.init({"w": np.zeros(2)})))
    assert strategy.make_plans(resumed, strategy.plan, ["d0"], view)["d0"].learning_rate == 0.25
    _, decision = strategy.assign(strategy.resumed(resumed), view)
    assert {order.plan.learning_rate for order in decision.instructions} == {0.25 * (20 / 6) ** 0.5}


def test_a_slow_holder_costs_no_time_when_another_has_its_blocks():
    fleet = fleet_of(list_duplicate_holders(4, 2), paces={0: 1.0, 1: 50.0, 2: 1.0, 3: 50.0})
    run(fleet, redundant(), rounds=3)
    closing = [at for at, update in fleet.arrived if update.device_id == "d2"]
    assert closing[:3] == [1.0, 2.0, 3.0]


def test_a_copy_is_recalled_when_another_has_come_while_the_round_goes_on():
    fleet = fleet_of(list_duplicate_holders(4, 2), paces={0: 1.0, 1: 0.11, 2: 1.0, 3: 1.0})
    run(fleet, redundant(iterations=10), rounds=1)
    assert fleet.recalls()[0] == (pytest.approx(1.1), "d0")
    assert {update.device_id: update.metrics.iterations for _, update in fleet.arrived}["d0"] == 2


def test_when_all_holders_of_a_block_are_gone_the_round_goes_on_without_it():
    fleet = fleet_of(list_duplicate_holders(4, 2))
    fleet.at(2.5, lambda: fleet.leave("d0") + fleet.leave("d1"))
    run(fleet, redundant(), rounds=5)
    assert blocks_used(fleet) == [[0, 1], [0, 1], [1], [1], [1]]


def test_with_a_barrier_a_block_that_nobody_has_ends_the_run_after_twice_the_limit_and_is_named():
    fleet = fleet_of(list_duplicate_holders(4, 2))
    fleet.at(2.5, lambda: fleet.leave("d0") + fleet.leave("d1"))
    with pytest.raises(
        StrategyError, match=r"round 3 waited 20 s for block 0 of d0 or d1: round_timeout_s = 10 passed twice"
    ):
        run(fleet, redundant({"round_timeout_s": 10.0, "on_timeout": "none"}), rounds=5)
    assert fleet.now_s == pytest.approx(22.0)


def test_with_a_barrier_a_holder_that_comes_back_in_time_is_asked_again():
    fleet = fleet_of(list_duplicate_holders(4, 2))
    fleet.at(2.5, lambda: fleet.leave("d0") + fleet.leave("d1"))
    fleet.at(9.0, lambda: fleet.join("d1"))
    state = run(fleet, redundant({"round_timeout_s": 10.0, "on_timeout": "none"}), rounds=4)
    assert blocks_used(fleet) == [[0, 1]] * 4
    assert state.model["w"].tobytes() == by_hand(2, 4)


def test_asking_again_asks_a_holder_that_came_while_the_others_hang():
    fleet = fleet_of(list_duplicate_holders(2, 2))
    fleet.leave("d1")
    fleet.boards["d0"].answers = False
    fleet.at(4.0, lambda: fleet.join("d1"))
    run(fleet, redundant({"round_timeout_s": 5.0, "on_timeout": "reassign"}), rounds=1)
    assert fleet.journal.aggregates == [("v0-a2-d1-b0",)]
    assert fleet.arrived[0][0] == 6.0


def test_a_holder_that_fails_again_and_again_does_not_keep_the_round_open():
    fleet = fleet_of(list_duplicate_holders(2, 1))
    ended = fleet.answer
    fleet.answer = lambda name, work: [fleet.lose(name, work, "failed")] if name == "d0" else ended(name, work)
    run(fleet, redundant(), rounds=2)
    assert blocks_used(fleet) == [[1], [1]]
    asked = [order for order in fleet.assignments() if order.device_id == "d0" and order.base_version == 0]
    assert 2 <= len(asked) <= 5


def test_devices_without_blocks_take_part_with_their_whole_shard():
    fleet = fleet_of(list_duplicate_holders(2, 2))
    fleet.boards["whole"], fleet.queues["whole"] = Board(1.0, target=4.0), []
    fleet.join("whole")
    state = run(fleet, redundant(), rounds=1)
    assert {order.block for order in fleet.assignments()} == {0, None}
    assert state.model["w"].tolist() == [0.25 * (0 + 4) / 2] * 2


def test_blocks_weigh_alike_or_by_their_examples():
    for weights, expected in (("uniform", 0.5), ("samples", 0.25)):
        fleet = fleet_of(list_duplicate_holders(2, 1))
        fleet.boards["d0"].num_examples, fleet.boards["d1"].num_examples = 30, 10
        state = run(fleet, redundant(weights=weights), rounds=1)
        assert state.model["w"].tolist() == [0.25 * expected] * 2


def sliced(rules=None, **options):
    return redundant(rules, copies="slices", **options)


def codecs_of(fleet, block, version=0):
    return sorted(
        (order.device_id, order.codec)
        for order in fleet.assignments()
        if (order.block, order.base_version) == (block, version)
    )


@pytest.mark.parametrize("holders", [list_duplicate_holders(4, 2), list_subset_holders(5, 3)], ids=len)
def test_each_holder_sends_a_part_of_its_own_and_together_they_are_the_mean_over_blocks(holders):
    fleet = fleet_of(holders, paces={0: 0.7, 1: 1.3})
    state = run(fleet, sliced({"codec": "dense|fp16; w = dense"}), rounds=3)
    for block, held in enumerate(holders):
        stages = [f"slice:{part}:{len(held)}" for part in range(1, len(held) + 1)]
        parts = [f"{stage}|fp16; w = {stage}" for stage in stages]
        assert sorted(codec for _, codec in codecs_of(fleet, block)) == parts
        assert [name for name, _ in codecs_of(fleet, block)] == [f"d{number}" for number in held]
    assert len(fleet.assignments()) == 3 * sum(map(len, holders)), "nothing is sent twice"
    expected = np.frombuffer(by_hand(len(holders), 3))
    np.testing.assert_allclose(state.model["w"], expected, rtol=1e-6)


def test_holders_that_are_away_have_no_part_and_those_lost_at_work_are_stood_in_for():
    fleet = fleet_of([(0, 1, 2), (3, 4, 5)], paces={1: 9.0, 4: 9.0, 5: 9.0})
    fleet.leave("d2")
    fleet.at(2.0, lambda: fleet.leave("d1") + fleet.leave("d4") + fleet.leave("d5"))
    state = run(fleet, sliced(), rounds=1)
    assert codecs_of(fleet, 0) == [("d0", "slice:1:2"), ("d0", "slice:2:2"), ("d1", "slice:2:2")]
    assert [update.device_id for _, update in fleet.arrived] == ["d0", "d3", "d0", "d3", "d3"]
    np.testing.assert_allclose(state.model["w"], np.frombuffer(by_hand(2, 1)), rtol=1e-6)


def test_a_part_that_hangs_is_asked_of_one_other_holder_after_the_time_out():
    fleet = fleet_of([(0, 1, 2)])
    fleet.boards["d1"].answers = False
    state = run(fleet, sliced({"round_timeout_s": 5.0, "on_timeout": "reassign"}), rounds=1)
    assert [(update.device_id, at) for at, update in fleet.arrived] == [("d0", 1.0), ("d2", 1.0), ("d0", 6.0)]
    np.testing.assert_allclose(state.model["w"], np.frombuffer(by_hand(1, 1)), rtol=1e-6)


def hang(fleet):
    fleet.boards["d1"].answers = False


def die(fleet):
    hang(fleet)
    fleet.at(1.5, lambda: fleet.leave("d0") + fleet.leave("d1"))


def fail(fleet):
    ended, lost = fleet.answer, (0, "slice:2:2")
    fleet.answer = lambda name, work: (
        [fleet.lose(name, work, "failed")] if (work.order.block, work.order.codec) == lost else ended(name, work)
    )


def die_in_the_drain(fleet):
    hang(fleet)
    fleet.at(4.0, lambda: fleet.leave("d1"))


@pytest.mark.parametrize(
    ("lose_part", "rules", "goal"),
    [
        (hang, {"round_timeout_s": 5.0, "on_timeout": "aggregate"}, {"rounds": 1}),
        (die, {}, {"rounds": 1}),
        (die, {"round_timeout_s": 5.0, "on_timeout": "aggregate"}, {"rounds": 1}),
        (fail, {}, {"rounds": 1}),
        (die_in_the_drain, {}, {"rounds": 9, "seconds": 3.0}),
    ],
)
@pytest.mark.parametrize("others", [(), ((2,),), ((2, 3), (4, 5, 6))], ids=len)
def test_however_a_round_closes_entries_of_a_lost_part_move_by_the_mean_of_the_other_blocks(
    others, lose_part, rules, goal
):
    fleet = fleet_of([(0, 1), *others])
    lose_part(fleet)
    state = run(fleet, sliced(rules), goal=StoppingCriteria(**goal), start=9.0, size=12)
    assert len(fleet.journal.aggregates) == 1
    came = [name for name in fleet.journal.aggregates[0] if "-b0-" in name]
    assert [name.rpartition("-")[2] for name in came] == ["p1"]
    moves = [0.25 * (block - 9.0) for block in range(1 + len(others))]
    expected = [9.0 + np.mean(moves)] * 6 + [9.0 + (np.mean(moves[1:]) if others else 0.0)] * 6
    np.testing.assert_allclose(state.model["w"], expected, rtol=1e-6)


def fail_once(fleet, codec):
    ended, lost = fleet.answer, []

    def answer(name, work):
        if work.order.codec != codec or lost:
            return ended(name, work)
        lost.append(fleet.lose(name, work, "failed"))
        for other in fleet.queues[name][:1]:
            fleet.begin(name, other)
        return lost[:]

    fleet.answer = answer


def test_no_two_assignments_have_an_id_when_a_part_fails_that_the_same_attempt_asks_for_once_more():
    fleet = fleet_of([(0, 1, 2, 3)])
    fleet.at(0.5, lambda: [event for name in ("d1", "d2", "d3") for event in fleet.leave(name)])
    fail_once(fleet, "slice:2:4")
    state = run(fleet, sliced(), rounds=1, start=9.0, size=8)
    asked = [order.assignment_id for order in fleet.assignments() if order.device_id == "d0"]
    assert asked == [
        f"v0-{name}" for name in ("a1-d0-b0-p1", "a2-d0-b0-p2", "a2-d0-b0-p3", "a3-d0-b0-p2", "a4-d0-b0-p4")
    ]
    np.testing.assert_allclose(state.model["w"], [9.0 - 0.25 * 9.0] * 8, rtol=1e-6)


def test_no_two_assignments_have_an_id_when_a_block_is_asked_again_of_a_holder_that_was_full():
    fleet = fleet_of([(0,), (0,)], paces={0: 7.0})
    with pytest.raises(StrategyError, match="round 1 waited 10 s for block 1 of d0"):
        run(fleet, redundant({"round_timeout_s": 5.0, "on_timeout": "reassign"}), rounds=1)
    assert [order.assignment_id for order in fleet.assignments()] == ["v0-a1-d0-b0", "v0-a1-d0-b1", "v0-a2-d0-b1"]


def test_a_part_that_nobody_has_is_named():
    fleet = fleet_of([(0, 1)])
    fleet.at(0.5, lambda: fleet.leave("d0") + fleet.leave("d1"))
    with pytest.raises(
        StrategyError, match=r"waited 20 s for part 1 of 2 of block 0 of d0, part 2 of 2 of block 0 of d1"
    ):
        run(fleet, sliced({"round_timeout_s": 10.0, "on_timeout": "none"}), rounds=1)


@pytest.mark.parametrize(("weights", "expected"), [("uniform", 0.5), ("samples", 0.25)])
def test_a_block_in_parts_weighs_as_much_as_a_whole_one(weights, expected):
    fleet = fleet_of([(0, 1), (2,)])
    for name, num_examples in (("d0", 30), ("d1", 30), ("d2", 10)):
        fleet.boards[name].num_examples = num_examples
    state = run(fleet, sliced(weights=weights), rounds=1)
    np.testing.assert_allclose(state.model["w"], [0.25 * expected] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "rules", "message"),
    [
        ({"keep_optimizer": True}, {}, r"strategy\.keep_optimizer: with it the copies of a block differ"),
        ({"seconds": 3.0}, {}, r"strategy\.seconds: a budget in seconds makes the copies of a block differ"),
        ({}, {"codec": " ef | fp16"}, r"compression\.up = ' ef \| fp16': error feedback .* as in auto:fp16,int8"),
        ({}, {"codec": "ef; *.bias = fp16"}, "error feedback makes the copies"),
        ({}, {"min_updates": 2}, r"run\.min_updates: redundant waits for every block"),
    ],
)
def test_what_would_make_copies_differ_is_refused(options, rules, message):
    with pytest.raises(ConfigError, match=message):
        redundant(rules, **options)


class Distrust(UpdateGuard):
    """Flags d0 with its first update."""

    def rejection_reason(self, update):
        if update.device_id != "d0":
            return None
        self.state.quarantined.add("d0")
        return "no update of d0 is let in"


def test_a_holder_that_is_flagged_is_not_asked_for_its_other_blocks():
    fleet = fleet_of(list_subset_holders(4, 3), paces={0: 0.3})
    gate = RunParticipationPolicy(guard=Distrust())
    state = run(fleet, redundant(), gate=gate, rounds=3)
    assert blocks_used(fleet) == [[0, 1, 2, 3]] * 3
    assert state.model["w"].tobytes() == by_hand(4, 3)
    asked = [
        (at, order.block)
        for at, order in fleet.given
        if isinstance(order, TrainInstruction) and order.device_id == "d0"
    ]
    assert [at for at, _ in asked] == [0.0, 0.0]  # both before its first answer


def test_a_holder_that_rests_is_asked_for_no_more_blocks_until_it_is_well():
    fleet = fleet_of(list_subset_holders(4, 3))
    fleet.at(1.5, lambda: fleet.resting.add("d0") or [])
    fleet.at(9.5, lambda: fleet.resting.discard("d0") or [])
    state = run(
        fleet, redundant(), gate=RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="rest")), rounds=20
    )
    assert state.model["w"].tobytes() == by_hand(4, 20)
    asked = [at for at, order in fleet.given if isinstance(order, TrainInstruction) and order.device_id == "d0"]
    assert not [at for at in asked if 1.5 < at < 9.5]
    assert max(asked) > 9.5
