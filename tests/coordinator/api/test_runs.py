"""Runs that are submitted over HTTP, on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request

from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.runs import history_router, runs_router
from edgefl.coordinator.auth import register_error_handler
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.types import DeviceInfo, UpdateStatus
from edgefl.storage.checkpoints import load_model_file, save_model
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import AssignmentRow, RunStatus, SavedModelRow, UpdateRow
from edgefl.storage.store import Store

TABLES = {
    "run": {"task": "table", "name": "house"},
    "task": {"columns": "heat,damp", "target": "load", "normalise": "fleet"},
    "strategy": {"name": "fedavg"},
}


def _admit(_request: Request) -> None:
    """Admits everybody."""


class Coordinator:
    """The routes of runs on a store; `refused` are strategies that this fleet cannot follow."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.refused, self.num_wakes = store, "", 0
        boards = [DeviceInfo(device_id=name, tasks=("digits",), examples={"digits": 9}) for name in ("a", "b")]
        self.registry, self.folder = SimpleNamespace(list_devices=lambda: boards), folder

    def _wake(self) -> None:
        self.num_wakes += 1

    def _check(self, config: RunConfig) -> dict[str, Any]:
        if config.strategy.name == self.refused:
            raise ConfigError(f"no {self.refused} here")
        return {"notes": ["a note"]}

    def submit(self, tables: dict[str, Any], priority: int = 0) -> httpx.Response:
        return self.ask("POST", "/edgefl/v1/runs", {"config": tables, "priority": priority})

    def forget(self, run: str, devices: list[str], **options: Any) -> httpx.Response:
        return self.ask("POST", f"/edgefl/v1/runs/{run}/forget", {"devices": devices, **options})

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        scheduler = SimpleNamespace(wake=self._wake)
        context = SimpleNamespace(
            store=self.store,
            registry=self.registry,
            directory=SimpleNamespace(models=self.folder / "models"),
            viewer=_admit,
            operator=_admit,
            check_run=self._check,
            clients=SimpleNamespace(run_scheduler=scheduler),
        )
        app = FastAPI()
        app.include_router(runs_router(cast("ApiContext", context)))
        app.include_router(history_router(cast("ApiContext", context)))
        register_error_handler(app)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://c") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(ask())


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Coordinator(store, tmp_path)


def test_a_run_that_should_find_scales_stands_behind_the_one_that_finds_them(coordinator: Coordinator) -> None:
    answer = coordinator.submit(TABLES, priority=3).json()
    first, second = coordinator.store.list_queued_runs()
    assert (first.name, first.strategy, first.priority) == ("house-scales", "column-scales", 3)
    assert (second.run_id, second.name, second.priority) == (answer["run_id"], "house", 3)
    assert second.config["task"]["normalise"] == f"run:{first.run_id}"
    assert answer["notes"] == [
        "a note",
        f"run {first.run_id} first asks the boards for mean and deviation of each column",
    ]
    assert coordinator.num_wakes >= 1


def test_a_run_that_names_an_earlier_one_asks_nobody(coordinator: Coordinator) -> None:
    coordinator.submit(TABLES)
    first = coordinator.store.list_queued_runs()[0]
    named = {**TABLES, "task": {**TABLES["task"], "normalise": "run:house-scales"}}
    answer = coordinator.submit(named).json()
    assert len(coordinator.store.list_queued_runs()) == 3
    assert answer["config"]["task"]["normalise"] == f"run:{first.run_id}"


def test_scales_that_will_not_be_there_are_refused_when_the_run_is_submitted(coordinator: Coordinator) -> None:
    coordinator.submit(TABLES)
    first = coordinator.store.list_queued_runs()[0]
    named = {**TABLES, "task": {**TABLES["task"], "normalise": f"run:{first.run_id}"}}
    later = coordinator.submit(named, priority=5).json()
    assert "comes later: its priority must be at least 5, got 0" in later["message"]
    coordinator.store.set_run_status(first.run_id, RunStatus.STOPPED, at=1.0)
    stopped = coordinator.submit(named).json()
    assert 'has found no means and scales, it is stopped; give normalise = "fleet"' in stopped["message"]
    assert len(coordinator.store.list_queued_runs()) == 1


def test_neither_is_queued_where_this_fleet_cannot_be_asked(coordinator: Coordinator) -> None:
    coordinator.refused = "column-scales"
    assert coordinator.submit(TABLES).json()["message"] == "no column-scales here"
    assert coordinator.store.list_queued_runs() == []


MODEL = np.zeros((64, 10), dtype=np.float32)


@pytest.fixture
def fleet(coordinator: Coordinator, tmp_path: Path) -> Coordinator:
    """A run of four rounds, in the third of which `b` came; the models of rounds 1, 2 and 4 are kept."""
    store = coordinator.store
    config = parse_run({"run": {"task": "digits", "name": "old", "rounds": 4}, "devices": {"min": 2}})
    names = {"name": "old", "task": "digits", "strategy": "fedavg", "config": config.to_json(), "seed": 7}
    store.add_run(run_id="run-1", submitted_at=1.0, **names)
    for number in (1, 2, 3, 4):
        boards = ("a", "b") if number >= 3 else ("a",)
        fields = [{"assignment_id": f"{number}-{name}", "device_id": name} for name in boards]
        common = {"round": number, "base_version": number - 1}
        store.open_round("run-1", number, started_at=number)
        store.record_assignments("run-1", [AssignmentRow(**one, **common, dispatched_at=number) for one in fields])
        outcome = {"outcome": UpdateStatus.USED, "received_at": number + 0.5, "ended_at": number + 0.5}
        store.record_updates("run-1", [UpdateRow(**one, **common, **outcome) for one in fields])
        store.close_round("run-1", number, version=number, closed_at=number + 1)
        if number == 3:
            continue
        sha256, _ = save_model(tmp_path / "models", {"weights": MODEL + number})
        row = SavedModelRow(version=number, round=number, last_record=0, sha256=sha256, bytes_file=9, at=1.0)
        store.record_saved_model("run-1", row)
    store.set_run_status("run-1", RunStatus.FINISHED, at=9.0)
    return coordinator


def test_a_run_is_made_anew_from_the_last_model_without_the_board_and_history_says_so(fleet: Coordinator) -> None:
    answer = fleet.forget("run-1", ["b"]).json()
    run = answer["config"]["run"]
    assert load_model_file(run["init"])["weights"][0, 0] == 2
    assert (run["rounds"], run["replaces"], answer["name"]) == (2, "run-1", "old")
    assert answer["config"]["devices"]["exclude"] == ["b"]
    assert "it starts from the model of round 2, which is from before" in answer["notes"]
    assert "devices.min is 1 in place of 2: no more boards are left" in answer["notes"]
    (event,) = read_history(fleet.store, "events", run="run-1")
    assert (event["kind"], event["data"]["run_id"]) == ("run-replaced", answer["run_id"])
    assert event["message"] == f"run {answer['run_id']} replaces it, without b"
    uses = fleet.ask("GET", "/edgefl/v1/history/uses?device=b").json()["rows"]
    assert [(use["run_id"], use["replaced_by"]) for use in uses] == [("run-1", [answer["run_id"]])]
    again = fleet.forget("run-1", ["b", "b"], keep_devices=True).json()["config"]["devices"]
    assert "exclude" not in again


def test_a_board_of_the_first_round_or_a_lost_file_leaves_nothing_to_start_from(fleet: Coordinator) -> None:
    first = fleet.forget("run-1", ["a"]).json()
    assert ("init" in first["config"]["run"], first["config"]["run"]["rounds"]) == (False, 4)
    assert any("models.keep_every = 1" in note for note in first["notes"])
    for path in (fleet.folder / "models").iterdir():
        path.unlink()
    assert "init" not in fleet.forget("run-1", ["b"]).json()["config"]["run"]


def test_what_cannot_be_forgotten_is_refused_in_one_line_and_queues_nothing(fleet: Coordinator) -> None:
    store = fleet.store
    assert "took no part in run run-1 since then" in fleet.forget("run-1", ["b"], since=50.0).text
    assert "no run has had a device 'pi-9'" in fleet.forget("run-1", ["pi-9"]).text
    assert "no other board of the fleet" in fleet.forget("run-1", ["a", "b"]).text
    store.set_run_status("run-1", RunStatus.RUNNING, at=10.0)
    assert "run run-1 is running; it must be over: edgefl run stop run-1" in fleet.forget("run-1", ["b"]).text
    fleet.refused = "fedavg"
    store.set_run_status("run-1", RunStatus.FINISHED, at=11.0)
    assert fleet.forget("run-1", ["b"]).status_code == 400
    assert store.list_queued_runs() == []
    assert read_history(store, "events", run="run-1") == []


def test_a_run_that_began_with_a_model_of_the_board_is_made_anew_after_that_one(fleet: Coordinator) -> None:
    store, newest = fleet.store, fleet.store.list_saved_models("run-1")[0].sha256
    config = parse_run({"run": {"task": "digits", "init": f"/m/{newest}.safetensors"}}).to_json()
    store.add_run(run_id="heir", name="h", task="digits", strategy="fedavg", config=config, seed=1, submitted_at=2.0)
    store.set_run_status("heir", RunStatus.FINISHED, at=9.0)
    refused = fleet.forget("heir", ["b"]).text
    assert "began with a model of run run-1" in refused
    assert "run.init = the new model" in refused
