"""What a device says of its board is taken where it makes sense; what a node sends along must be its own."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.coordinator.execution.headers import (
    RunIncarnations,
    format_wire_id,
    parse_peer_messages,
    parse_update_metrics,
)
from edgefl.core.types import (
    GossipConfig,
    Json,
    PeerLinkConfig,
    PeerMessage,
    TrainConfig,
    TrainInstruction,
    UpdateMetrics,
)
from edgefl.storage.rollback import MAX_INCARNATION_ROWS
from edgefl.strategies.peer_algorithms.gossip_node import encode_messages


def test_an_id_that_is_given_again_in_another_life_is_another_one_and_what_was_given_keeps_its_name():
    first = RunIncarnations("r")
    assert (
        first.assign_wire_id("v0-a1-pi")
        == first.get_wire_id("v0-a1-pi")
        == format_wire_id("r", "v0-a1-pi")
        == "r/v0-a1-pi"
    )
    lives = RunIncarnations("r", 2, {"n3-pi": 0, "n5-pi": 1, "n7-pi": 1})
    assert [lives.get_wire_id(f"n{number}-pi") for number in (3, 5, 7)] == ["r/n3-pi", "r/1/n5-pi", "r/1/n7-pi"]
    assert lives.assign_wire_id("n5-pi") == lives.get_wire_id("n5-pi") == "r/2/n5-pi"
    assert lives.to_dict() == {1: ["n7-pi"], 2: ["n5-pi"]}, "what is written down brings each name back"


def test_a_long_run_remembers_its_newest_assignments_alone():
    lives = RunIncarnations("r", 2, {"a0": 1})
    for number in range(MAX_INCARNATION_ROWS + 5):
        lives.assign_wire_id(f"a{number}")
    assert (lives.get_wire_id(f"a{MAX_INCARNATION_ROWS + 4}"), lives.get_wire_id("a0")) == (
        f"r/2/a{MAX_INCARNATION_ROWS + 4}",
        "r/1/a0",
    )
    told = lives.to_dict()
    assert (list(told), len(told[2]), told[2][-1]) == ([2], MAX_INCARNATION_ROWS, f"a{MAX_INCARNATION_ROWS + 4}")


SOUND = {"iterations": 3, "num_examples": 9, "loss": 0.5, "compute_s": 1.0}


def metrics(**told: Any) -> UpdateMetrics:
    return parse_update_metrics({**SOUND, **told}, turnaround_s=3.0, bytes_up=1, bytes_down=2)


def test_health_values_become_metrics() -> None:
    told = {"max_temperature_c": 83.2, "throttled": "under-voltage,throttled", "signal_dbm": -81, "energy_j": 7.5}
    made = metrics(health={**told, "link_bits_per_s": 6.5e6, "paced_s": 0.4})
    assert made.paced_s == 0.4
    assert made.max_temperature_c == 83.2
    assert made.throttled == "under-voltage,throttled"
    assert (made.signal_dbm, made.link_bits_per_s, made.energy_j) == (-81.0, 6.5e6, 7.5)


def test_the_version_of_a_board_s_shard_is_kept_where_it_makes_sense() -> None:
    made = metrics(shard={"version": 255, "num_examples": 40})
    assert (made.shard_version, made.shard_examples) == ("0000000000ff", 40)
    wrong = ({"version": 2**48, "num_examples": 1}, {"version": 1}, {"version": "a", "num_examples": 1}, 7, None)
    for shard in (*wrong, {"version": True, "num_examples": 1}, {"version": 1, "num_examples": -1}):
        assert metrics(shard=shard) == metrics()


@pytest.mark.parametrize(
    "health",
    [
        None, 7, "hot", [], {},
        {"max_temperature_c": "hot", "throttled": 4, "signal_dbm": None, "energy_j": [1]},
        {"max_temperature_c": 9e9, "signal_dbm": 40.0, "link_bits_per_s": -1.0, "energy_j": -5.0, "paced_s": -1},
        {"max_temperature_c": float("nan"), "energy_j": float("inf")},
        {"throttled": "x" * 200}, {"throttled": "<b>bold</b>"}, {"throttled": "ok\n"},
    ],
)  # fmt: skip
def test_health_values_that_make_no_sense_are_not_known_and_cost_nothing(health: object) -> None:
    made = metrics(health=health)
    assert made == metrics()
    assert (made.iterations, made.throttled, made.max_temperature_c) == (3, None, None)


def order(node: GossipConfig | None) -> TrainInstruction:
    plan = TrainConfig(iterations=1, batch_size=1, learning_rate=0.1, node=node)
    return TrainInstruction(assignment_id="a-1", device_id="pi-1", base_version=0, plan=plan)


def node(*, reports: bool = False) -> GossipConfig:
    side = PeerLinkConfig(neighbour="pi-2", sign=1, degree=1, weight=0.5, period=1)
    return GossipConfig(method="ecl-isvr", edges=(side,), learning_rate=0.1, period=1, reports=reports)


def answer(*edges: tuple[str, str], rest: bytes = b"") -> tuple[Json, bytes]:
    told, body = encode_messages([PeerMessage(edge=edge, step=1, body=b"edge") for edge in edges], rest)
    return {"messages": told}, body


def test_a_node_s_messages_stand_before_its_model() -> None:
    messages, rest = parse_peer_messages(order(node(reports=True)), *answer(("pi-1", "pi-2"), rest=b"model"))
    assert ([message.edge for message in messages], rest) == ([("pi-1", "pi-2")], b"model")


def test_the_body_of_a_device_that_is_no_node_is_left_as_it_is() -> None:
    assert parse_peer_messages(order(None), *answer(("pi-1", "pi-2"), rest=b"model")) == ((), b"edgemodel")


@pytest.mark.parametrize("edge", [("pi-1", "pi-3"), ("pi-2", "pi-1"), ("pi-3", "pi-2")], ids=" - ".join)
def test_a_message_along_another_s_edge_is_refused(edge: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{edge[0]} - {edge[1]}, which is no edge of its own"):
        parse_peer_messages(order(node()), *answer(("pi-1", "pi-2"), edge))


def test_a_model_comes_where_it_was_asked_for_and_only_there() -> None:
    with pytest.raises(ValueError, match="it holds no model"):
        parse_peer_messages(order(node(reports=True)), *answer(("pi-1", "pi-2")))
    with pytest.raises(ValueError, match="more than messages"):
        parse_peer_messages(order(node()), *answer(("pi-1", "pi-2"), rest=b"model"))


def test_the_boards_behind_a_gateway_are_bounded_and_what_makes_no_sense_is_left_out():
    share = {"board": "pi-1", "num_examples": 3, "loss": None, "compute_s": 0.5}
    bad = [
        {"board": ""}, {"board": "x" * 64}, {"board": 7}, {"num_examples": -1}, {"num_examples": True},
        {"num_examples": 2.0}, {"num_examples": 2**60}, {"compute_s": None}, {"compute_s": -1.0},
        {"compute_s": float("inf")},
    ]  # fmt: skip
    rows = [share, "text", None, *({**share, **change} for change in bad)]
    assert list(metrics(site=rows).boards) == [share]
    assert len(metrics(site=[share] * 300).boards) == 256
    assert metrics(site=[{**share, "board": "a\x1b[2J", "loss": "x"}]).boards[0]["loss"] is None
    assert "\x1b" not in metrics(site=[{**share, "board": "a\x1b[2J"}]).boards[0]["board"]
    for nothing in (None, {}, "pi-1", 3):
        assert list(metrics(site=nothing).boards) == []
