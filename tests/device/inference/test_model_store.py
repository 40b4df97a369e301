"""The note that says which model a board runs: whole at any time, and with a way back."""

import logging

import pytest

from edgefl.device.inference.model_store import (
    DeployedModel,
    DeploymentState,
    ModelStore,
    report_to_json,
)
from edgefl.device.rollouts.client import RolloutReport


def deployed(name):
    return DeployedModel(deployment=f"d-{name}", sha256=name * 64, model=name * 8, task="digits", accuracy=0.5)


def report(name, state="running"):
    return RolloutReport(id=f"d-{name}", state=state, accuracy=0.5)


@pytest.fixture
def store(tmp_path):
    store = ModelStore(tmp_path)
    store.save(DeploymentState())
    return store


def test_a_board_without_a_note_has_no_model(tmp_path):
    assert ModelStore(tmp_path).load() == DeploymentState()
    assert report_to_json(DeploymentState()) is None


def test_the_model_before_is_kept_for_the_way_back(store):
    note = DeploymentState()
    for name in "abc":
        note = store.activate(note, deployed(name), report(name))
    assert store.load() == note
    assert (note.current, note.former) == (deployed("c"), deployed("b"))
    back = store.roll_back(note, report("c", "reverted"))
    assert (store.load(), back.current, back.former) == (back, deployed("b"), None)
    assert store.roll_back(back, report("b", "reverted")).current is None


def test_a_model_that_is_deployed_twice_does_not_push_out_the_one_before(store):
    note = store.activate(DeploymentState(), deployed("a"), report("a"))
    note = store.activate(note, deployed("b"), report("b"))
    again = store.activate(note, deployed("b"), report("b"))
    assert (again.current, again.former) == (deployed("b"), deployed("a"))


def test_a_damaged_note_counts_as_none_and_is_told(store, caplog):
    for content in (b"{", b"[]", b'{"v": 2}', b'{"v": 1, "current": {"model": "x"}}', b"\xff"):
        store.state_path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert store.load() == DeploymentState()
        assert "damaged" in caplog.text, content
        caplog.clear()


def test_a_heartbeat_says_what_became_of_the_last_deployment_and_what_runs():
    told = report_to_json(
        DeploymentState(current=deployed("a"), report=RolloutReport(id="d-b", state="rejected", reason="worse"))
    )
    assert told == {"id": "d-b", "state": "rejected", "reason": "worse", "runs": "d-a"}
    assert report_to_json(DeploymentState(report=RolloutReport(id="d", state="fetching"))) == {
        "id": "d",
        "state": "fetching",
        "runs": None,
    }
