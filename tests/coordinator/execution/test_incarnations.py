from edgefl.coordinator.execution.incarnations import RunIncarnations, format_wire_id
from edgefl.storage.rollback import MAX_INCARNATION_ROWS


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
