"""Why a round took so long, in a sentence, on a store as a run leaves it."""

import pytest

from edgefl.core.errors import NotFoundError
from edgefl.core.types import UpdateStatus
from edgefl.history.diagnosis import diagnose_round
from edgefl.storage.queries.history import get_round_details
from edgefl.storage.repositories.records import AssignmentRow, RunStatus, UpdateRow
from edgefl.storage.store import Store

USUAL = {"compute_s": 3.0, "send_s": 0.2, "iterations": 100, "bytes_up": 4_000_000, "bytes_down": 4_000_000}
AT = 1000.0
LOST = {"outcome": UpdateStatus.LOST, "reason": "gone"}


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        facts = {"name": "n", "task": "digits", "strategy": "fedavg", "config": {}, "seed": 7}
        opened.add_run(run_id="run-1", submitted_at=1.0, **facts)
        yield opened


@pytest.fixture
def told(store):
    """Writes a round of devices, each with its end in seconds after the round began and what else is not usual."""

    def write(devices, *, closed_s=None, number=17):
        store.open_round("run-1", number, started_at=AT)
        for name, (end_s, changes) in devices.items():
            values = {**USUAL, "outcome": UpdateStatus.USED, "applied_version": 16, "base_version": 16, **changes}
            asked_at = AT + values.pop("asked_s", 0.0)
            facts = {"assignment_id": name, "device_id": name, "round": number}
            store.record_assignments("run-1", [AssignmentRow(**facts, base_version=16, dispatched_at=asked_at)])
            if end_s is None:
                continue
            if values["outcome"] in {UpdateStatus.LOST, UpdateStatus.REJECTED, UpdateStatus.FAILED}:
                values = {key: values[key] for key in ("outcome", "reason", "base_version")}
            store.record_updates("run-1", [UpdateRow(**facts, ended_at=AT + end_s, **values)])
        ends = [end_s for end_s, _ in devices.values() if end_s is not None]
        if closed_s is not False:
            closed_s = closed_s if closed_s is not None else max(ends, default=0.0) + 0.1
            store.close_round("run-1", number, version=number, closed_at=AT + closed_s)
        return diagnose_round(get_round_details(store, "run-1", number))

    return write


OTHERS = {"a": (3.2, {}), "b": (3.2, {}), "c": (3.3, {})}
COMPUTED = {"compute_s": 44.0}
HOT = {**COMPUTED, "throttled": "throttled"}
SENT = {"send_s": 41.2}


@pytest.mark.parametrize(
    ("end_s", "changes", "cause", "words"),
    [
        (44.2, {**HOT, "max_temperature_c": 83.2}, "throttled", "waited 41 s for pi-07, throttled at 83 °C. It comp"),
        (44.2, {**COMPUTED, "throttled": "under-voltage"}, "throttled", "held back by under-voltage"),
        (44.2, {**HOT, "paced_s": 40.0}, "paced", "rested for 40 s of its time to stay below its temperature limit"),
        (44.2, {**COMPUTED, "paced_s": 1.0}, "slow", "the slowest to compute. It"),
        (44.2, {**COMPUTED, "iterations": 1500, "throttled": "ok"}, "iterations", "1500 local iterations"),
        (44.2, {**COMPUTED, "max_temperature_c": 81.0}, "slow", "the slowest to compute at 81 °C."),
        (44.2, {**COMPUTED, "max_temperature_c": 41.0}, "slow", "the slowest to compute. It"),
        (44.2, {**SENT, "signal_dbm": -82.0, "link_bits_per_s": 6.5e6}, "link", "(\N{MINUS SIGN}82 dBm, 6.5 Mbit/s)"),
        (44.2, {**SENT, "throttled": "throttled"}, "link", "whose 8 MB were 41 s on the way"),
        (44.2, {"asked_s": 41.0}, "dispatched-late", "was asked only 41 s after"),
        (30.0, LOST, "lost", "waited 27 s for pi-07, which was lost: gone."),
        (30.0, {"outcome": UpdateStatus.REJECTED, "reason": "a NaN in w"}, "rejected",
         "which was rejected: a NaN in w."),
    ],
)  # fmt: skip
def test_a_synchronous_round_names_whom_it_waited_for_and_why(told, end_s, changes, cause, words):
    answer = told({**OTHERS, "pi-07": (end_s, changes)})
    assert words in answer["sentence"]
    assert (answer["waited_for"], answer["cause"]) == ("pi-07", cause)


def test_a_device_that_took_over_from_a_lost_one_and_one_that_was_late_are_named(told):
    sentence = told({**OTHERS, "gone": (20.0, LOST), "pi-07": (24.0, {"asked_s": 20.0})})["sentence"]
    assert "waited 21 s for pi-07, which took over from gone." in sentence
    assert sentence.endswith("gone was lost: gone.")
    late = {"pi-09": (60.0, {"outcome": UpdateStatus.LATE, "applied_version": None})}
    assert told({**OTHERS, **late}, closed_s=3.4, number=18)["sentence"].endswith("pi-09 was late.")


def test_those_that_came_as_late_are_named_too_and_no_more_than_three(told):
    slow = {f"s{number}": (43.0 + number, {"compute_s": 43.0}) for number in range(5)}
    usual = {f"a{number}": (3.0, {}) for number in range(9)}
    assert "for s4, s0 and 3 more, the slowest to compute" in told({**usual, **slow})["sentence"]


def test_a_round_of_one_device_was_all_its_own_and_those_that_came_together_were_not_waited_for(told):
    assert "for pi-07, the only one that was asked." in told({"pi-07": (3.2, {})})["sentence"]
    answer = told(OTHERS, number=18)
    assert answer["sentence"].startswith("Round 18 waited for nobody in particular: 3 updates of 3 devices")
    assert (answer["waited_for"], answer["waited_s"], answer["cause"]) == (None, None, None)


def test_a_round_that_takes_updates_as_they_come_waited_for_nobody_and_names_the_stalest(told):
    devices = {
        "a": (1.0, {"applied_version": 16, "staleness": 0}),
        "b": (9.0, {"applied_version": 17, "staleness": 1}),
        "slow": (12.0, {"applied_version": 18, "base_version": 11, "staleness": 7}),
    }
    sentence = told(devices)["sentence"]
    assert sentence.startswith("Round 17 waited for nobody: it took 3 updates")
    assert sentence.endswith("of slow, was 7 versions behind.")


def test_an_open_round_says_who_is_missing_and_one_without_any_update_says_so(told, store):
    sentence = told({**OTHERS, "pi-07": (None, {})}, closed_s=False)["sentence"]
    assert sentence == "Round 17 is not closed yet: it waits for pi-07."
    assert told({}, closed_s=5.0, number=18)["sentence"] == "Round 18 took 5.0 s and got no update."
    lost = told({"a": (30.0, LOST), "b": (30.0, LOST)}, number=19)["sentence"]
    assert lost.endswith("a and b were lost: gone.")
    with pytest.raises(NotFoundError, match="run-1 has no round 3; it has 19 so far"):
        get_round_details(store, "run-1", 3)


def test_the_facts_have_every_device_with_its_seconds_and_outlive_the_updates(told, store):
    answer = told({**OTHERS, "pi-07": (44.2, {**COMPUTED, "max_temperature_c": 83.2})})
    assert [row["device_id"] for row in answer["devices"]] == ["a", "b", "c", "pi-07"]
    last = answer["devices"][-1]
    assert (last["compute_s"], last["send_s"], last["max_temperature_c"]) == (44.0, 0.2, 83.2)
    assert (answer["run_id"], answer["round"], answer["seconds"]) == ("run-1", 17, pytest.approx(44.3))
    store.set_run_status("run-1", RunStatus.FINISHED, at=2000.0)
    store.prune_history(3000.0)
    sentence = diagnose_round(get_round_details(store, "run-1", 17))["sentence"]
    assert "not kept any more" in sentence
    assert sentence.endswith("waited 41 s for pi-07.")
