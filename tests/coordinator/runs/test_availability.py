"""Which boards would be free for a run: each is asked, in bounds."""

from edgefl.coordinator.runs.availability import ANSWER_S, ASKING_S, MAX_ASKED, MAX_AT_ONCE, ask_availability
from edgefl.core.errors import NetworkError

NIGHT = {"kind": "hours", "reason": "outside its hours", "run": "plan"}


def test_boards_that_are_free_are_blocked_and_do_not_answer_are_told_apart():
    def call(device_id, _kind, _argument, *, timeout_s):
        assert timeout_s == ANSWER_S
        if device_id == "silent":
            raise NetworkError("no answer")
        return {"blocked": NIGHT} if device_id == "late" else {}

    found = ask_availability(["free", "late", "silent"], {}, call, clock=lambda: 0.0)
    assert (found.free, found.unknown, found.unasked) == (("free",), ("silent",), ())
    assert found.blocked == {"late": "not now by the run's [conditions]: outside its hours"}
    assert found.list_warnings() == ["whether they would be free now is not known, as they did not answer: silent"]


def test_boards_that_are_too_many_are_not_said_to_be_silent():
    names = [f"pi-{number}" for number in range(MAX_ASKED + 7)]
    found = ask_availability(names, {}, lambda *_, **__: {}, clock=lambda: 0.0)
    assert (len(found.free), found.unknown, found.unasked) == (MAX_ASKED, (), tuple(names[MAX_ASKED:]))
    listed = f"{', '.join(names[MAX_ASKED : MAX_ASKED + 5])} and 2 more"
    expected = f"whether they would be free now is not known, as only {MAX_ASKED} were asked: {listed}"
    assert found.list_warnings() == [expected]
    assert found.to_json() == {"free": MAX_ASKED, "blocked": 0, "unknown": 7}


def test_one_deadline_holds_for_all_boards():
    now_s, waits_s = [0.0], []

    def call(_device_id, _kind, _argument, *, timeout_s):
        waits_s.append(timeout_s)
        now_s[0] += 2 * ASKING_S / MAX_AT_ONCE
        raise NetworkError("no answer")

    names = [f"pi-{number}" for number in range(3 * MAX_AT_ONCE)]
    found = ask_availability(names, {}, call, clock=lambda: now_s[0])
    assert len(waits_s) == len(found.unknown) < len(names)
    assert len(found.unknown) + len(found.unasked) == len(names)
    assert all(0 < wait_s <= ANSWER_S for wait_s in waits_s)
