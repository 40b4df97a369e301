"""Who changed what: every action with a token that counts is a row, whatever came of it."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from edgefl.coordinator.audit import record_actions
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


def call(store, *requests, actor="operator ab"):
    """Sends (method, path) to an application that answers with the status in the path."""
    app = FastAPI()

    @app.api_route("/edgefl/v1/{path:path}", methods=["GET", "POST"])
    def answer(path: str) -> JSONResponse:
        return JSONResponse({}, status_code=int(path[-3:]) if path[-3:].isdigit() else 200)

    def find_actor(request):
        return request.headers.get("authorization")

    async def send():
        recorded = record_actions(app, store, find_actor=find_actor, clock=lambda: 7.0)
        transport = httpx.ASGITransport(app=recorded)
        async with httpx.AsyncClient(transport=transport, base_url="https://c") as client:
            for method, path in requests:
                await client.request(method, f"/edgefl/v1/{path}", headers={"authorization": actor} if actor else {})

    asyncio.run(send())


def list_rows(store):
    return [(row["actor"], row["action"], row["outcome"]) for row in read_history(store, "audit")]


def test_actions_are_recorded_with_their_outcome_and_reads_are_not(store):
    call(store, ("GET", "runs"), ("POST", "runs"), ("POST", "runs/404"), ("POST", "runs/503"))
    assert list_rows(store) == [
        ("operator ab", "POST runs", "done"),
        ("operator ab", "POST runs/404", "refused (404)"),
        ("operator ab", "POST runs/503", "failed (503)"),
    ]


def test_a_request_without_a_token_that_counts_fills_no_row(store):
    call(store, ("POST", "runs"), actor=None)
    assert list_rows(store) == []


def test_the_action_is_stored_as_visible_characters_and_bounded(store):
    call(store, ("POST", "devices/%1b%E2%80%AE" + "x" * 500))
    ((_, action, _),) = list_rows(store)
    assert action.startswith(r"POST devices/\x1b\u202e")
    assert len(action) < 120
