from edgefl.coordinator.dispatch.lives import Lives, wire_id
from edgefl.storage.rewinding import REMEMBERED


def test_the_first_life_of_a_run_has_plain_ids():
    lives = Lives("r")
    assert lives.given("v0-a1-pi") == lives.known("v0-a1-pi") == wire_id("r", "v0-a1-pi") == "r/v0-a1-pi"


def test_an_id_that_is_given_again_is_another_one_for_devices():
    lives = Lives("r", 1)
    assert lives.known("n5-pi") == "r/n5-pi", "what was given before keeps its name"
    assert lives.given("n5-pi") == "r/1/n5-pi"
    assert lives.known("n5-pi") == "r/1/n5-pi"


def test_an_update_of_an_earlier_life_is_settled_under_the_name_that_it_had():
    lives = Lives("r", 2, {"n7-pi": 1})
    assert [lives.known(name) for name in ("n3-pi", "n7-pi")] == ["r/n3-pi", "r/1/n7-pi"]


def test_a_long_run_remembers_its_newest_assignments_alone() -> None:
    lives = Lives("r", 2, {"a0": 1})
    for number in range(REMEMBERED + 5):
        lives.given(f"a{number}")
    assert len(lives._given) == REMEMBERED
    assert lives.known(f"a{REMEMBERED + 4}") == f"r/2/a{REMEMBERED + 4}"
    assert lives.known("a0") == "r/1/a0"
    told = lives.told()
    assert (list(told), len(told[2]), told[2][-1]) == ([2], REMEMBERED, f"a{REMEMBERED + 4}")


def test_what_is_written_down_of_lives_brings_each_name_back() -> None:
    lives = Lives("r", 2, {"n3-pi": 0, "n5-pi": 1, "n7-pi": 1})
    lives.given("n5-pi")
    assert lives.told() == {1: ["n7-pi"], 2: ["n5-pi"]}
