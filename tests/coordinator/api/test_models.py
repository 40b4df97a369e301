"""The routes of kept models, called as a client would, with the coordinator's own guard before them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from edgefl.coordinator.api.models import CHUNK_BYTES, model_router
from edgefl.coordinator.auth import register_error_handler, require_viewer
from edgefl.coordinator.directory import add_access_tokens, init_directory
from edgefl.coordinator.runs.model_retention import ModelRetention
from edgefl.core.config import ModelsSection
from edgefl.storage.store import Store

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
            model_router(store=store, folder=models, viewer=require_viewer(directory, listen_host="0.0.0.0"))
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
