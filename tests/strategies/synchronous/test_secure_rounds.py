"""Rounds with secure aggregation, with boards that keep to the protocol, drop out, or send anything."""

import dataclasses

import numpy as np
import pytest
from strategy_turns import update_of, view_of

from edgefl.core.config import SecureAggregationSection
from edgefl.core.errors import SecureAggregationError, StrategyError
from edgefl.core.secure_aggregation.messages import CERTIFICATE_BYTES
from edgefl.core.secure_aggregation.participant import ConsentRecorder, Participant
from edgefl.core.secure_aggregation.ring import encode_vector
from edgefl.core.types import EPSILON, SecureStep
from edgefl.simulation.secure_boards import SimulatedIdentity
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.secure_rounds import MAX_ATTEMPTS, SecureState, make_secure_rounds

NAMES = ("a", "b", "c", "d")
MODEL = {"w": np.zeros(2, np.float32), "count": np.zeros((), np.int64)}
UPDATES = {"a": [0.5, 0.25], "b": [0.1, -0.2], "c": [-0.3, 0.4], "d": [0.05, 0.0]}
EXAMPLES = {"a": 10, "b": 20, "c": 30, "d": 40}


def make_rounds(name="fedavg", graph="complete", **rules):
    section = SecureAggregationSection(enabled=True, threshold=0.6, graph=graph)
    return make_secure_rounds(make_strategy(name, {"iterations": 1}, RoundRules(**rules)), section)


class Fleet:
    """A strategy and its boards, step by step."""

    def __init__(self, strategy=None, names=NAMES):
        self.strategy, self.names = strategy or make_rounds(), list(names)
        self.state = self.strategy.init(MODEL)
        self.recorders = {name: ConsentRecorder() for name in names}
        self.boards = {name: Participant(SimulatedIdentity(name), self.recorders[name]) for name in names}
        self.log = []

    def assign(self, **view):
        # What a checkpoint keeps is all that the strategy has.
        self.state = decode_state(encode_state(self.state), SecureState)
        self.state, decision = self.strategy.assign(self.state, view_of(*self.names, **view))
        return decision.instructions

    def answer(self, order, change=lambda messages: messages):
        board, config, name = self.boards[order.device_id], order.plan.secure, order.device_id
        if config.step == SecureStep.UPDATE:
            board.accept_shares("run", config, order.plan.messages)
            update = {"w": np.array(UPDATES[name], np.float32), "count": np.zeros((), np.int64)}
            words = encode_vector(
                update,
                weight=EXAMPLES[name],
                max_weight=config.max_examples,
                clip=config.clip,
                num_members=config.num_members,
            )
            messages = board.mask("run", config, words)
        else:
            messages = board.answer("run", config, order.plan.messages)
        update = dataclasses.replace(update_of(order, {}), messages=change(messages))
        self.state = self.strategy.receive(self.state, update)
        return update

    def play(self, lost=(), until=None):
        """Plays steps until the round is ready, or before `until`; `lost` has (step, board) of the first attempt."""
        for _ in range(20):
            orders = self.assign()
            if not orders or orders[0].plan.secure.step == until:
                return orders
            self.play_orders(orders, lost)
        raise AssertionError("the round does not end")

    def play_orders(self, orders, lost=()):
        self.log.append((orders[0].plan.secure.step, sorted(order.device_id for order in orders)))
        for order in orders:
            if order.plan.secure.group != "v0-a1" or (order.plan.secure.step, order.device_id) not in lost:
                self.answer(order)

    def close(self):
        assert self.strategy.ready(self.state, view_of(*self.names))
        self.state = self.strategy.aggregate(self.state)
        return self.state


NUMBERED = [f"b{number:02}" for number in range(20)]


def make_large_fleet():
    """Returns 20 boards, each of which shares with few."""
    for number, name in enumerate(NUMBERED):
        UPDATES[name], EXAMPLES[name] = [0.01 * number, -0.02 * number], 10 + number
    return Fleet(make_rounds(graph="sparse"), NUMBERED)


def compute_mean(names, weights=EXAMPLES):
    total = sum(weights[name] for name in names)
    return np.sum([np.array(UPDATES[name]) * weights[name] / total for name in names], axis=0)


def test_a_round_moves_the_model_by_the_weighted_mean_in_five_steps_and_shows_no_update():
    fleet = Fleet()
    fleet.play()
    assert [step for step, _ in fleet.log] == list(SecureStep)
    state = fleet.close()
    np.testing.assert_allclose(state.model["w"], compute_mean(NAMES), atol=1e-6)
    assert (state.version, state.used) == (1, tuple(f"v0-a1-update-{name}" for name in NAMES))
    assert fleet.strategy.facts(state) == {"secure_boards": 4.0}
    assert state.model["count"] == 0
    fleet.play()
    assert fleet.close().version == 2


def test_boards_weigh_alike_where_the_strategy_says_so_and_the_server_optimiser_moves_the_model():
    fleet = Fleet(make_rounds("ssgd", server=ServerOptimizer(kind="none", learning_rate=2.0)))
    fleet.play()
    expected = 2 * compute_mean(NAMES, dict.fromkeys(NAMES, 1))
    np.testing.assert_allclose(fleet.close().model["w"], expected, atol=1e-6)


@pytest.mark.parametrize("step", list(SecureStep))
def test_a_board_that_is_lost_at_any_step_is_left_out_or_does_not_matter(step):
    fleet = Fleet()
    fleet.play(lost={(step, "b")})
    in_sum = NAMES if step in {SecureStep.CONSENT, SecureStep.UNMASK} else ("a", "c", "d")
    np.testing.assert_allclose(fleet.close().model["w"], compute_mean(in_sum), atol=1e-6)


@pytest.mark.parametrize("step", list(SecureStep))
def test_boards_of_a_sparse_graph_that_are_lost_at_any_step_are_left_out_or_do_not_matter(step):
    fleet = make_large_fleet()
    orders = fleet.play(lost={(step, "b03"), (step, "b07")}, until=SecureStep.UPDATE)
    if orders:
        assert {len(order.plan.messages) for order in orders} != {len(orders)}
        assert all(len(found) < 15 for found in fleet.state.secure.shares.values())
        fleet.play_orders(orders, {(step, "b03"), (step, "b07")})
    fleet.play(lost={(step, "b03"), (step, "b07")})
    lost = set() if step in {SecureStep.CONSENT, SecureStep.UNMASK} else {"b03", "b07"}
    np.testing.assert_allclose(
        fleet.close().model["w"], compute_mean([name for name in NUMBERED if name not in lost]), atol=1e-6
    )


@pytest.mark.parametrize("change", [lambda found: found[0].body[:-64], lambda found: found[0].body + bytes(200)])
def test_a_vector_of_a_sparse_graph_without_one_signature_is_left_out(change):
    fleet = make_large_fleet()
    for order in fleet.play(until=SecureStep.UPDATE):
        is_other = order.device_id == "b03"
        fleet.answer(
            order, lambda found, is_other=is_other: reshape(lambda _: change(found))(found) if is_other else found
        )
    fleet.play()
    expected = compute_mean([name for name in NUMBERED if name != "b03"])
    np.testing.assert_allclose(fleet.close().model["w"], expected, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_shares_for_another_number_of_boards_than_the_graph_s_are_left_out(count):
    fleet = make_large_fleet()
    for order in fleet.play(until=SecureStep.SHARES):
        fleet.answer(order, lambda found, name=order.device_id: found[count:] if name == "b03" else found)
    assert {order.device_id for order in fleet.assign()} == {*NUMBERED} - {"b03"}


def test_too_few_boards_before_a_consent_make_another_attempt_with_new_keys():
    fleet = Fleet()
    fleet.play(lost={(SecureStep.UPDATE, "b"), (SecureStep.UPDATE, "c")})
    state = fleet.close()
    assert {name.split("-")[1] for name in state.used} == {"a2"}
    np.testing.assert_allclose(state.model["w"], compute_mean(NAMES), atol=1e-6)


@pytest.mark.parametrize("step", [SecureStep.CONSENT, SecureStep.UNMASK])
def test_too_few_boards_after_a_consent_close_the_version_without_a_step(step):
    fleet = Fleet()
    fleet.play(lost={(step, "b"), (step, "c")})
    state = fleet.close()
    assert (state.version, state.used, state.num_opened) == (1, (), 0)
    assert not state.model["w"].any()
    fleet.play()
    np.testing.assert_allclose(fleet.close().model["w"], compute_mean(NAMES), atol=1e-6)


def test_a_wrong_share_closes_the_version_without_a_step():
    fleet = Fleet()
    for order in fleet.play(until=SecureStep.UNMASK):
        fleet.answer(order, lambda found: (dataclasses.replace(found[0], body=found[0].body[:-1] + b"\0"),))
    fleet.play()
    state = fleet.close()
    assert (state.version, state.used) == (1, ())
    assert not state.model["w"].any()


def test_a_resumed_run_asks_for_new_keys_and_never_opens_a_second_sum_of_a_version():
    fleet = Fleet()
    fleet.play(until=SecureStep.UPDATE)
    fleet.state = fleet.strategy.resumed(fleet.state)
    fleet.play()
    fleet.close()
    fleet.play(until=SecureStep.UNMASK)
    fleet.state = fleet.strategy.resumed(fleet.state)
    assert fleet.close().used == ()
    # A checkpoint from before the consent: the boards themselves refuse.
    fleet.play(until=SecureStep.UPDATE)
    older = encode_state(fleet.state)
    fleet.play(until=SecureStep.UNMASK)
    fleet.state = fleet.strategy.resumed(decode_state(older, SecureState))
    fleet.play()
    state = fleet.close()
    assert (state.version, state.used) == (3, ())
    fleet.play()
    assert len(fleet.close().used) == 4


def test_answers_that_are_late_repeated_another_board_s_or_malformed_change_nothing():
    fleet = Fleet()
    orders = {order.device_id: order for order in fleet.play(until=SecureStep.UPDATE)}
    first = fleet.answer(orders["a"])
    total = fleet.state.secure.total.copy()
    for update in (
        first,
        dataclasses.replace(first, device_id="b", assignment_id=orders["b"].assignment_id, messages=()),
        dataclasses.replace(first, device_id="c", assignment_id=orders["d"].assignment_id),
        dataclasses.replace(first, assignment_id="v0-a0-update-a"),
        dataclasses.replace(
            first,
            device_id="d",
            assignment_id=orders["d"].assignment_id,
            messages=(dataclasses.replace(first.messages[0], body=b"short"),),
        ),
    ):
        fleet.state = fleet.strategy.receive(fleet.state, update)
    assert (fleet.state.secure.total == total).all()
    assert list(fleet.state.secure.survivors) == ["a"]


def reshape(change):
    return lambda found: tuple(dataclasses.replace(message, body=change(message.body)) for message in found)


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (SecureStep.KEYS, lambda body: body + bytes(16 * CERTIFICATE_BYTES)),
        (SecureStep.KEYS, lambda _: b"keys"),
        (SecureStep.KEYS, lambda body: bytes(32) + body[32:]),
        (SecureStep.KEYS, lambda body: body[:64] + body[32:64] + body[96:]),
        (SecureStep.SHARES, lambda body: body + b"\0"),
        (SecureStep.CONSENT, lambda _: b""),
        (SecureStep.CONSENT, lambda body: body + bytes(200)),
        (SecureStep.UNMASK, lambda body: body + b"\0"),
    ],
)
def test_a_board_whose_message_cannot_be_one_is_left_out_and_the_others_go_on(step, change):
    fleet = Fleet()
    for order in fleet.play(until=step):
        fleet.answer(order, reshape(change) if order.device_id == "b" else tuple)
    for order in fleet.assign():
        assert order.device_id != "b"
        fleet.answer(order)
    if step != SecureStep.UNMASK:
        fleet.play()
    in_sum = NAMES if step in {SecureStep.CONSENT, SecureStep.UNMASK} else ("a", "c", "d")
    np.testing.assert_allclose(fleet.close().model["w"], compute_mean(in_sum), atol=1e-6)


def test_the_keys_of_another_board_are_left_out():
    fleet, copies = Fleet(), []
    for order in fleet.assign():
        fleet.answer(
            order,
            lambda found, order=order: (
                copies.append(found[0].body)
                or reshape(lambda body, order=order: copies[0] if order.device_id == "b" else body)(found)
            ),
        )
    assert {order.device_id for order in fleet.assign()} == {"a", "c", "d"}


def test_no_more_boards_are_asked_than_an_attempt_may_have():
    assert len(Fleet(names=[f"b{number}" for number in range(1001)]).assign()) == 1000


def test_what_boards_have_spent_of_their_examples_privacy_counts_whatever_they_answer():
    fleet = Fleet()
    update = update_of(fleet.assign()[0], {})
    late = dataclasses.replace(
        update, assignment_id="x", metrics=dataclasses.replace(update.metrics, extra={EPSILON: 3.0})
    )
    fleet.state = fleet.strategy.receive(fleet.state, late)
    assert fleet.state.epsilon == 3.0


def test_a_step_waits_for_boards_that_are_busy_with_it_until_the_time_out():
    fleet = Fleet(make_rounds(round_timeout_s=10.0))
    orders = fleet.assign()
    busy = {orders[0].device_id: (orders[0].assignment_id,)}
    for order in orders[1:]:
        fleet.answer(order)
    assert fleet.assign(busy=busy, now_s=5.0) == ()
    assert {order.device_id for order in fleet.assign(busy=busy, now_s=11.0)} == {"b", "c", "d"}


def test_a_run_whose_boards_never_answer_ends_with_a_line():
    fleet = Fleet()
    for _ in range(MAX_ATTEMPTS):
        assert len(fleet.assign()) == 4
    with pytest.raises(StrategyError, match=f"too few boards were left in {MAX_ATTEMPTS} attempts"):
        fleet.assign()


def test_two_boards_are_never_asked():
    fleet = Fleet(names=("a", "b"))
    assert fleet.assign() == ()
    with pytest.raises(StrategyError, match="at least 3 boards"):
        Fleet(make_rounds(max_devices=2)).assign()


def test_a_run_that_is_over_begins_no_attempt():
    fleet = Fleet()
    fleet.state = fleet.strategy.finish(fleet.state)
    assert fleet.assign() == ()


def test_a_board_refuses_survivors_that_the_coordinator_changes_between_two_steps():
    fleet = Fleet()
    (order, *_) = fleet.play(until=SecureStep.UNMASK)
    config = dataclasses.replace(order.plan.secure, survivors=("a", "b", "c"))
    lie = dataclasses.replace(order, plan=dataclasses.replace(order.plan, secure=config))
    with pytest.raises(SecureAggregationError, match="has not consented"):
        fleet.answer(lie)
