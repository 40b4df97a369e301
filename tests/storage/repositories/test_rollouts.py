"""Deployments in the store: what is kept, found again, and superseded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgefl.core.errors import NotFoundError
from edgefl.storage.repositories.rollouts import DeploymentRecord, RolloutStage, RolloutStatus
from edgefl.storage.store import Store


def made(name: str, at: float, **changes: Any) -> DeploymentRecord:
    values: dict[str, Any] = {
        "run_id": "r", "model": name * 64, "task": "digits", "options": {"model": "mlp"}, "devices": None,
        "canary": 1, "canary_s": 60.0, "tolerance": 0.02, "min_accuracy": 0.0, "test_fraction": 0.1,
        "status": RolloutStatus.PREPARING,
    }  # fmt: skip
    return DeploymentRecord(deployment_id=f"2026-{name}", created_at=at, **{**values, **changes})


def stages(store: Store, name: str) -> dict[str, str]:
    return {row.device_id: str(row.state) for row in store.deployments.list_devices(f"2026-{name}")}


def test_what_was_kept_comes_back(store: Any) -> None:
    record = made("a", 1.0, devices=("pi-1",))
    store.deployments.add(record, ["pi-1"])
    assert store.deployments.get("2026-a") == replace(record, sequence=1)
    store.deployments.update("2026-a", status=RolloutStatus.CANARY, onnx_sha256="ff", bytes_file=7, canary_until=9.0)
    found = store.deployments.get("2026-a")
    assert (found.status, found.onnx_sha256, found.bytes_file) == (RolloutStatus.CANARY, "ff", 7)


def test_a_deployment_is_found_by_the_beginning_of_its_id_if_that_is_plain(store: Any) -> None:
    store.deployments.add(made("a", 1.0), [])
    assert store.deployments.get("20").deployment_id == "2026-a"
    store.deployments.add(made("b", 2.0), [])
    with pytest.raises(NotFoundError, match="several deployments begin with '2026-'"):
        store.deployments.get("2026-")
    with pytest.raises(NotFoundError, match="no deployment 'x%'"):
        store.deployments.get("x%")


def test_a_newer_deployment_supersedes_what_a_device_has_not_answered_and_only_that(store: Any) -> None:
    store.deployments.add(made("a", 1.0), ["pending", "notified", "runs", "other"])
    store.deployments.update_devices(
        "2026-a", {"notified": {"state": RolloutStage.NOTIFIED}, "runs": {"state": RolloutStage.RUNNING}}
    )
    store.deployments.add(made("b", 2.0), ["pending", "notified", "runs"])
    assert stages(store, "a") == {
        "pending": "superseded",
        "notified": "superseded",
        "runs": "running",
        "other": "pending",
    }
    assert set(stages(store, "b").values()) == {"pending"}
    assert [row.deployment_id for row in store.deployments.list_of_device("runs")] == ["2026-b", "2026-a"]


def test_open_are_those_that_go_on_and_those_that_a_device_still_owes_something(store: Any) -> None:
    for number, (name, status) in enumerate([("a", "done"), ("b", "failed"), ("c", "rolling"), ("d", "done")]):
        store.deployments.add(made(name, -3600.0 * number, status=RolloutStatus(status)), [name])
    store.deployments.update_devices("2026-b", {"b": {"state": RolloutStage.REVERTING}})
    store.deployments.update_devices("2026-d", {"d": {"state": RolloutStage.NOTIFIED}})
    assert [record.deployment_id for record in store.deployments.list_open()] == ["2026-b", "2026-c", "2026-d"]


def test_a_device_runs_the_model_of_the_newest_deployment_that_it_switched_to(store: Any) -> None:
    for number, name in enumerate("abc"):
        store.deployments.add(made(name, -3600.0 * number), ["pi"])  # the clock goes back by an hour
    for name, state in (("a", RolloutStage.RUNNING), ("b", RolloutStage.RUNNING), ("c", RolloutStage.REJECTED)):
        store.deployments.update_devices(f"2026-{name}", {"pi": {"state": state}})
    assert store.deployments.get_running() == {"pi": store.deployments.get("2026-b")}
    assert [record.deployment_id for record in store.deployments.list_newest()] == ["2026-c", "2026-b", "2026-a"]
    assert store.deployments.count_devices()["2026-c"] == {"rejected": 1}


def test_adding_a_device_twice_changes_nothing(store: Any) -> None:
    store.deployments.add(made("a", 1.0), ["pi"])
    store.deployments.update_devices("2026-a", {"pi": {"state": RolloutStage.RUNNING}})
    store.deployments.add_devices("2026-a", ["pi", "new"], RolloutStage.NOTIFIED)
    assert stages(store, "a") == {"pi": "running", "new": "notified"}
