"""Runs that are submitted over HTTP, on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request

from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.runs import runs_router
from edgefl.coordinator.auth import register_error_handler
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.storage.repositories.records import RunStatus
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

    def __init__(self, store: Store) -> None:
        self.store, self.refused, self.num_wakes = store, "", 0

    def _wake(self) -> None:
        self.num_wakes += 1

    def _check(self, config: RunConfig) -> dict[str, Any]:
        if config.strategy.name == self.refused:
            raise ConfigError(f"no {self.refused} here")
        return {"notes": ["a note"]}

    def submit(self, tables: dict[str, Any], priority: int = 0) -> httpx.Response:
        scheduler = SimpleNamespace(wake=self._wake)
        context = SimpleNamespace(
            store=self.store,
            viewer=_admit,
            operator=_admit,
            check_run=self._check,
            clients=SimpleNamespace(run_scheduler=scheduler),
        )
        app = FastAPI()
        app.include_router(runs_router(cast("ApiContext", context)))
        register_error_handler(app)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://c") as client:
                return await client.post("/edgefl/v1/runs", json={"config": tables, "priority": priority})

        return asyncio.run(ask())


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Coordinator(store)


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
