"""The history over HTTP, on a real application in front of a real store."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import APIRouter, FastAPI, Request

from edgefl.coordinator.api.access import Authenticator
from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.runs import CHUNK_BYTES, MAX_ROWS, history_router
from edgefl.coordinator.auth import AccessCheck, register_error_handler
from edgefl.coordinator.directory import add_access_tokens, init_directory
from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.core.config import ModelsSection
from edgefl.storage.queries import history
from edgefl.storage.store import Store

Get = Callable[..., httpx.Response]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        opened.add_run(run_id="run-1", name="n", task="t", strategy="s", config={}, seed=7, submitted_at=1.0)
        opened.open_round("run-1", 1, started_at=10.0)
        opened.close_round("run-1", 1, version=1, closed_at=12.0)
        for number in range(12):
            opened.record_event("note", str(number), at=float(number), run_id="run-1")
        yield opened


def _admit(_request: Request) -> None:
    """Admits everybody."""


def make_router(store: Store, models: Path, *, viewer: AccessCheck) -> APIRouter:
    context = SimpleNamespace(store=store, directory=SimpleNamespace(models=models), viewer=viewer)
    return history_router(cast("ApiContext", context))


@pytest.fixture
def get(store: Store) -> Get:
    app = FastAPI()
    app.include_router(make_router(store, Path(), viewer=_admit))
    register_error_handler(app)

    async def ask(kind: str, params: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://c") as client:
            return await client.get(f"/edgefl/v1/history/{kind}", params=params)

    return lambda kind, **params: asyncio.run(ask(kind, params))


def test_pages_follow_each_other_to_the_end(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PAGE_ROWS", 5)
    told, after, sizes = [], "", []
    while after is not None:
        page = get("events", after=after).json()
        told += [row["message"] for row in page["rows"]]
        sizes.append(len(page["rows"]))
        after = page["next"]
    assert told == [str(number) for number in range(12)]
    assert sizes == [5, 5, 2]


def test_the_newest_rows_come_without_a_place(get: Get) -> None:
    answer = get("events", limit=2).json()
    assert (answer["v"], answer["kind"], [row["message"] for row in answer["rows"]]) == (1, "events", ["10", "11"])


def test_several_conditions_hold_together(get: Get) -> None:
    rows = get("events", where=["at>3", "at<6"]).json()["rows"]
    assert [row["message"] for row in rows] == ["4", "5"]


def test_why_answers_with_sentence_and_facts(get: Get) -> None:
    answer = get("why", run="latest", round=1).json()
    assert (answer["v"], answer["run_id"], answer["seconds"]) == (1, "run-1", 2.0)
    assert answer["sentence"] == "Round 1 took 2.0 s and got no update."
    assert get("why", run="latest").json() == answer, "the round that took longest"


@pytest.mark.parametrize(
    ("kind", "params", "status", "words"),
    [
        ("events", {"where": "nonsense=1"}, 400, "cannot be chosen by"),
        ("events", {"after": "here"}, 400, "a place in the history"),
        ("events", {"limit": MAX_ROWS + 1}, 400, "one answer holds"),
        ("events", {"since": "nan"}, 400, "since must be a time"),
        ("events", {"by": "day"}, 400, "can be by"),
        ("nonsense", {}, 400, "history has no"),
        ("why", {"run": "run-1", "round": 5}, 404, "has no round 5"),
        ("why", {"run": "nothing"}, 404, "no run 'nothing'"),
    ],
)
def test_bad_questions_are_named(get: Get, kind: str, params: dict[str, Any], status: int, words: str) -> None:
    answer = get(kind, **params)
    assert (answer.status_code, words in answer.json()["message"]) == (status, True)


BIG = CHUNK_BYTES // 4 + 1000


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "c" / "models"


@pytest.fixture
def ask(tmp_path: Path, models: Path) -> Iterator[Callable[..., httpx.Response]]:
    """GETs a path as `operator`, `viewer` or somebody else, from a coordinator beyond loopback with one model."""
    directory, operator, viewer = add_access_tokens(init_directory(tmp_path / "c", hosts=["127.0.0.1"]))
    tokens = {"operator": operator, "viewer": viewer, "nobody": "wrong"}
    with Store.open(directory.database) as store:
        store.add_run(
            run_id="run-1", name="first", task="digits", strategy="fedavg", config={}, seed=7, submitted_at=1.0
        )
        keeper = ModelRetention(models, store, "run-1", ModelsSection())
        keeper.finish(4, 4, 40, {"w": np.arange(BIG, dtype=np.float32)})
        app = FastAPI()
        register_error_handler(app)
        app.include_router(
            make_router(store, models, viewer=Authenticator(directory, store, listen_host="0.0.0.0").require_viewer)
        )

        async def get(path: str, token: str) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://c") as client:
                return await client.get(path, headers={"Authorization": f"Bearer {token}"})

        yield lambda path, who="viewer": asyncio.run(get(f"/edgefl/v1/models{path}", tokens[who]))


@pytest.mark.parametrize("who", ["viewer", "operator"])
def test_viewers_and_operators_read_everything(ask: Any, who: str) -> None:
    listed = ask("", who).json()
    assert (listed["v"], [row["round"] for row in listed["rows"]]) == (1, [4])
    shown = ask("/first:latest", who).json()
    assert shown == {"v": 1, **listed["rows"][0]}
    assert ask("/latest?run=first", who).json() == shown
    body = ask(f"/{shown['sha256']}/file", who)
    assert body.headers["content-length"] == str(shown["bytes_file"])
    assert body.headers["etag"] == f'"{shown["sha256"]}"'
    assert hashlib.sha256(body.content).hexdigest() == shown["sha256"]


@pytest.mark.parametrize("path", ["", "/latest", "/latest/file"])
def test_nobody_else_reads_anything(ask: Any, path: str) -> None:
    answer = ask(path, "nobody")
    assert (answer.status_code, answer.json()["error"]) == (401, "not-allowed")


@pytest.mark.parametrize("path", ["?run=none", "/beef", "/beef/file", "/first:9", "/latest?run=none"])
def test_what_is_not_there_is_not_found(ask: Any, path: str) -> None:
    answer = ask(path)
    assert (answer.status_code, answer.json()["error"]) == (404, "not-found")


def test_a_file_that_was_taken_away_is_named(ask: Any, models: Path) -> None:
    (path,) = models.iterdir()
    path.unlink()
    answer = ask("/latest/file")
    assert answer.status_code == 404
    assert f"the file of model {path.stem[:12]} is missing" in answer.json()["message"]
