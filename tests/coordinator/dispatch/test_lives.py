from edgefl.coordinator.dispatch.lives import Lives, wire_id
from edgefl.storage.rewinding import REMEMBERED


def test_an_id_that_is_given_again_in_another_life_is_another_one_and_what_was_given_keeps_its_name():
    first = Lives("r")
    assert first.given("v0-a1-pi") == first.known("v0-a1-pi") == wire_id("r", "v0-a1-pi") == "r/v0-a1-pi"
    lives = Lives("r", 2, {"n3-pi": 0, "n5-pi": 1, "n7-pi": 1})
    assert [lives.known(f"n{number}-pi") for number in (3, 5, 7)] == ["r/n3-pi", "r/1/n5-pi", "r/1/n7-pi"]
    assert lives.given("n5-pi") == lives.known("n5-pi") == "r/2/n5-pi"
    assert lives.told() == {1: ["n7-pi"], 2: ["n5-pi"]}, "what is written down brings each name back"


def test_a_long_run_remembers_its_newest_assignments_alone():
    lives = Lives("r", 2, {"a0": 1})
    for number in range(REMEMBERED + 5):
        lives.given(f"a{number}")
    assert (lives.known(f"a{REMEMBERED + 4}"), lives.known("a0")) == (f"r/2/a{REMEMBERED + 4}", "r/1/a0")
    told = lives.told()
    assert (list(told), len(told[2]), told[2][-1]) == ([2], REMEMBERED, f"a{REMEMBERED + 4}")
