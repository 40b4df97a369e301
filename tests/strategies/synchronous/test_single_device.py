import numpy as np
from paced_fleet import Board, PacedFleet, run, trained

from edgefl.strategies.registry import make_strategy
from edgefl.strategies.synchronous.strategy import RoundRules

BOARDS = {"b": Board(1.0, target=2.0, num_examples=7), "a": Board(1.0, target=4.0, num_examples=3), "c": Board(1.0)}


def local(**options):
    return make_strategy("local", {"iterations": 3, "learning_rate": 0.3, **options}, RoundRules(min_devices=2))


def test_the_first_by_name_trains_alone_exactly_as_it_would_without_a_fleet():
    fleet = PacedFleet(dict(BOARDS))
    state = run(fleet, local(), rounds=4)
    assert {order.device_id for order in fleet.assignments()} == {"a"}
    alone = np.zeros(2)
    for _ in range(4):
        alone = alone + (trained(alone, 4.0, 0.3, 3) - alone)
    assert state.model["w"].tobytes() == alone.tobytes()


def test_the_named_device_trains_and_the_others_rest():
    fleet = PacedFleet(dict(BOARDS))
    run(fleet, local(device="b"), rounds=2)
    assert {order.device_id for order in fleet.assignments()} == {"b"}


def test_a_device_that_is_lost_in_a_round_does_not_end_the_run():
    fleet = PacedFleet(dict(BOARDS))
    fleet.at(1.0, lambda: fleet.leave("b"))
    fleet.at(30.0, lambda: fleet.join("b"))
    state = run(fleet, local(device="b"), rounds=2)
    assert state.version == 2
    assert {order.device_id for order in fleet.assignments()} == {"b"}


def test_a_device_that_joins_later_under_an_earlier_name_does_not_take_over():
    fleet = PacedFleet(dict(BOARDS))
    fleet.leave("a")
    fleet.at(1.0, lambda: fleet.join("a"))
    run(fleet, local(), rounds=3)
    assert {order.device_id for order in fleet.assignments()} == {"b"}
