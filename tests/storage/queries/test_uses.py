"""Where a device's data went, by the history."""

import pytest

from edgefl.core.errors import NotFoundError
from edgefl.core.types import UpdateStatus
from edgefl.storage.queries.uses import SCALES_TAKEN, find_run_use, list_device_uses, read_progress
from edgefl.storage.repositories.records import RunStatus, SavedModelRow, UpdateRow
from edgefl.storage.repositories.rollouts import DeploymentRecord, RolloutStatus

BOARD = "pi-7"
HASHES = {version: f"{version:x}" * 64 for version in range(1, 9)}


def keep(store, run_id, *versions, sha256s=HASHES):
    for version in versions:
        row = SavedModelRow(
            version=version, round=version, last_record=0, sha256=sha256s[version], bytes_file=9, at=1.0
        )
        store.record_saved_model(run_id, row)


def deploy(store, deployment_id, run_id, model):
    record = DeploymentRecord(
        deployment_id=deployment_id, run_id=run_id, model=model, task="digits", options={}, devices=None,
        tolerance=0.0, min_accuracy=0.0, test_fraction=0.1, canary=0, canary_s=0.0, created_at=1.0,
        status=RolloutStatus.DONE,
    )  # fmt: skip
    store.deployments.add(record, [])


def use_of(store, run_id, **times):
    return find_run_use(store, BOARD, run_id, **times)


@pytest.fixture
def trained(store):
    """A run whose board came in round 3 of 4; models of all its rounds are kept."""
    store.submit("run-1")
    for number in (1, 2, 3, 4):
        store.record_round("run-1", number, ["a", BOARD] if number >= 3 else ["a"], at=1000.0 * number)
    keep(store, "run-1", 1, 2, 3, 4)
    return store


def test_models_from_the_device_s_first_assignment_on_have_something_of_it_and_earlier_ones_have_not(trained):
    use = use_of(trained, "run-1")
    assert (use.clean_version, use.first_round, use.last_round, use.num_used) == (2, 3, 4, 2)
    assert [model["version"] for model in use.models] == [3, 4]
    assert use.first_at == 3000.0
    assert read_progress(trained, "run-1", trained.list_saved_models("run-1")[2])[:2] == (2, 1003.0)


def test_an_assignment_that_was_lost_counts_for_what_is_clean(trained):
    row = UpdateRow(
        assignment_id="early", device_id=BOARD, round=2, base_version=1, outcome=UpdateStatus.LOST, received_at=2000.0
    )
    trained.record_updates("run-1", [row])
    use = use_of(trained, "run-1")
    assert (use.clean_version, use.num_assignments, use.num_used) == (1, 3, 2)


def test_data_of_a_time_was_used_by_work_that_ended_later_until_it_was_removed(trained):
    trained.record_updates("run-1", [
        UpdateRow(
            assignment_id=f"run-1-{number}-{BOARD}", device_id=BOARD, round=number, base_version=number - 1,
            received_at=1000.0 * number + 2, ended_at=1000.0 * number + 2,
            metrics={"shard_version": f"{number}", "shard_examples": 10 + number},
        )
        for number in (3, 4)
    ])  # fmt: skip
    whole = list_device_uses(trained, BOARD)[0]
    assert whole.shards == [
        {"version": "3", "examples": 13, "first_round": 3, "last_round": 3},
        {"version": "4", "examples": 14, "first_round": 4, "last_round": 4},
    ]
    assert use_of(trained, "run-1", since=3500.0).clean_version == 3
    (early,) = list_device_uses(trained, BOARD, until=3500.0)
    assert (early.first_round, early.last_round) == (3, 3)
    assert use_of(trained, "run-1", since=5000.0) is None


def test_a_run_that_begins_with_such_a_model_has_it_too_and_one_with_a_clean_model_has_not(trained):
    trained.submit("heir", config={"run": {"init": f"/models/{HASHES[3]}.safetensors"}})
    trained.submit("grandchild", config={"run": {"init": "/m/" + "9" * 64 + ".safetensors"}})
    trained.submit("clean", config={"run": {"init": f"/models/{HASHES[2]}.safetensors", "replaces": "run-1"}})
    keep(trained, "heir", 1, sha256s={1: "9" * 64})
    uses = {use.run_id: use for use in list_device_uses(trained, BOARD)}
    assert set(uses) == {"run-1", "heir", "grandchild"}
    assert (uses["heir"].inherited_model, uses["grandchild"].inherited_model) == ("run-1", "heir")
    assert [model["version"] for model in uses["heir"].models] == [1]
    assert uses["run-1"].replaced_by == ["clean"]


def test_a_run_with_the_device_s_means_and_scales_has_something_of_it(trained):
    trained.submit("later")
    trained.submit("asking", config={"run": {}, "task": {"normalise": "run:run-1"}})
    trained.record_event(SCALES_TAKEN, "takes", at=1.0, run_id="later", data={"run_id": "run-1"})
    uses = {use.run_id: use.scales_run for use in list_device_uses(trained, BOARD)}
    assert uses == {"run-1": None, "later": "run-1", "asking": "run-1"}


def test_where_updates_are_pruned_no_model_counts_as_clean(trained):
    trained.set_run_status("run-1", RunStatus.FINISHED, at=5000.0)
    trained.prune_history(9e9)
    use = use_of(trained, "run-1", since=8000.0)
    assert (use.clean_version, use.num_used, use.first_round) == (None, 2, None)
    assert len(use.models) == 4


def test_a_board_behind_a_gateway_is_found_by_the_updates_of_its_site(trained):
    boards = [{"board": "shed-1", "num_examples": 5, "loss": None, "compute_s": 1.0}]
    row = UpdateRow(
        assignment_id=f"run-1-3-{BOARD}", device_id=BOARD, round=3, base_version=2, received_at=1.0,
        metrics={"boards": boards, "note": "shed-2"},
    )  # fmt: skip
    trained.record_updates("run-1", [row])
    (use,) = list_device_uses(trained, "shed-1")
    assert (use.gateways, use.clean_version, use.num_assignments) == ([BOARD], 2, 1)
    with pytest.raises(NotFoundError, match="no run has had a device 'shed-2'"):
        list_device_uses(trained, "shed-2")


def test_a_device_that_did_nothing_has_no_uses_and_one_that_never_was_is_refused(trained):
    trained.make_token()
    trained.join("idle")
    assert list_device_uses(trained, "idle") == []
    with pytest.raises(NotFoundError, match="history devices"):
        list_device_uses(trained, "p%")


def test_deployments_of_models_with_something_of_the_device_are_listed(trained):
    deploy(trained, "d-clean", "run-1", HASHES[2])
    deploy(trained, "d-used", "run-1", HASHES[4])
    deploy(trained, "d-gone", "run-1", "f" * 64)
    (use,) = list_device_uses(trained, BOARD)
    assert [one["deployment_id"] for one in use.deployments] == ["d-used", "d-gone"]
