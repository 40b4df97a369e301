"""The history over HTTP, on a real application in front of a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from edgefl.coordinator.api.history import MAX_ROWS, add_history_routes
from edgefl.coordinator.auth import register_error_handler
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


@pytest.fixture
def get(store: Store) -> Get:
    router, app = APIRouter(), FastAPI()
    add_history_routes(router, store, [])
    app.include_router(router)
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
