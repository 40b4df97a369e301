"""What a board answers when it is asked whether it would be free now for a run."""

import json

import pytest
from board_trees import plant, zones

from edgefl.core.conditions import Blocker
from edgefl.core.protocol import Command, CommandKind
from edgefl.device.conditions.facts import FactReader
from edgefl.device.conditions.run_conditions import publish_answer
from edgefl.device.hardware.board_reader import BoardReader

NOON_S = 1_780_012_800.0 // 86_400 * 86_400 + 43_200


def ask(root, argument, *, owner=None, sleep=lambda _seconds: None):
    replies = []
    text = argument if isinstance(argument, str) else json.dumps(argument)
    publish_answer(
        Command(id="q-1", kind=CommandKind.CONDITIONS, argument=text),
        find_owner_blocker=lambda: owner,
        publish=lambda reply: replies.append(reply) is None,
        facts=FactReader(BoardReader(root)),
        clock=lambda: NOON_S,
        sleep=sleep,
    ).join(10)
    (reply,) = replies
    assert reply.id == "q-1"
    return reply.content if reply.error is None else reply.error


def test_a_board_says_what_would_block_it_by_its_own_sensors_and_clock(tmp_path):
    plant(tmp_path, zones({"cpu-thermal": 61.0}))
    assert ask(tmp_path, {"conditions": {"max_temperature_c": 70}}) == {}
    assert ask(tmp_path, {"conditions": {"max_temperature_c": 60}}) == {
        "blocked": {"kind": "heat", "reason": "it is at 61 °C, it trains up to 60 °C", "run": "plan"}
    }
    blocked = ask(tmp_path, {"conditions": {"hours": ["13:00-14:00"], "zone": "UTC"}})["blocked"]
    assert (blocked["kind"], blocked["free_at_s"]) == ("hours", NOON_S + 3600)


@pytest.mark.parametrize(("interface", "is_metered"), [("wwan0", True), ("eth0", False), (None, None)])
def test_a_board_says_whether_its_connection_is_metered_only_where_it_is_asked(tmp_path, interface, is_metered):
    if interface:
        route = f"Iface\tDestination\tGateway\n{interface}\t00000000\t0100A8C0\t3\t0\t0\t600\t00000000\n"
        plant(tmp_path, {"proc/net/route": route})
    assert ask(tmp_path, {"conditions": {}}) == {}
    assert ask(tmp_path, {"conditions": {}, "metered": True}) == {"metered": is_metered}


def test_what_its_owner_says_comes_first_and_names_no_run(tmp_path):
    pause = Blocker(kind="pause", reason="paused on the board")
    assert ask(tmp_path, {"conditions": {}}, owner=pause) == {"blocked": pause.to_json()}


@pytest.mark.parametrize(("busy", "is_free"), [(20, True), (90, False)])
def test_the_load_is_that_between_two_readings(tmp_path, busy, is_free):
    def write(busy_ticks, idle_ticks):
        plant(tmp_path, {"proc/stat": f"cpu  {busy_ticks} 0 0 {idle_ticks} 0 0 0 0 0 0\n", "proc/self/stat": ""})

    write(1000, 1000)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        write(1000 + busy * 2, 1000 + (100 - busy) * 2)

    answer = ask(tmp_path, {"conditions": {"max_other_load": 0.5}}, sleep=sleep)
    assert (answer == {}) is is_free
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("{", "the question makes no sense"),
        ("[]", "the question makes no sense"),
        ({}, "the question makes no sense"),
        ({"conditions": 3}, "conditions must be a table, got 3"),
        ({"conditions": {"day": {}}}, "unknown setting conditions.day"),
        ({"conditions": {"min_battery": 7}}, "min_battery must be"),
    ],
)
def test_a_question_that_makes_no_sense_gets_one_line(tmp_path, argument, error):
    answer = ask(tmp_path, argument)
    assert isinstance(answer, str)
    assert error in answer
