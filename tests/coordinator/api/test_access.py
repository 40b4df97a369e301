"""Who calls, by token or session, what each role may, and what the audit trail keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from edgefl.coordinator.api.access import (
    MAX_SESSIONS,
    MAX_SESSIONS_PER_USER,
    SESSION_S,
    Authenticator,
    Sessions,
    record_actions,
)
from edgefl.coordinator.auth import register_error_handler
from edgefl.coordinator.directory import add_access_tokens, init_directory
from edgefl.coordinator.enrolment.tokens import make_user
from edgefl.core.errors import NameTakenError, NotFoundError, StoreError, UsageError
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store

DAY_S = 86400.0
ROLES = ("viewer", "operator", "admin")
COOKIE = "__Host-edgefl-8000"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class House:
    """An application with a route for each role, its store, and what it rejected."""

    root: Path
    store: Store
    host: str = "0.0.0.0"
    clock: Clock = field(default_factory=Clock)
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        bare = init_directory(self.root, hosts=["127.0.0.1"], port=8000)
        self.directory, self.operator, self.viewer = add_access_tokens(bare)
        self.auth = Authenticator(
            self.directory,
            self.store,
            listen_host=self.host,
            record_rejection=lambda kind, _source, detail: self.rejected.append((kind, detail)),
            clock=self.clock,
        )
        app = FastAPI()
        register_error_handler(app)
        for role in ROLES:
            check = Depends(getattr(self.auth, f"require_{role}"))
            app.add_api_route(f"/edgefl/v1/{role}", lambda: {"v": 1}, methods=["GET", "POST"], dependencies=[check])

        @app.post("/edgefl/v1/session")
        def sign_in(request: Request, response: Response) -> dict[str, str]:
            return {"user": self.auth.sign_in(request, response).name}

        @app.delete("/edgefl/v1/session")
        def sign_out(request: Request, response: Response) -> None:
            self.auth.end_session(request, response)

        self.app = record_actions(app, self.store, find_actor=self.auth.find_actor, clock=self.clock)

    def make_user(self, name: str, role: str, ttl_s: float | None = None) -> str:
        return make_user(self.store, name, role, ttl_s=ttl_s, now=self.clock.now)

    def ask(self, method: str, path: str, token: str | None = None, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app=self.app), base_url="https://c:8000"
            ) as it:
                bearer = {} if token is None else {"Authorization": f"Bearer {token}"}
                return await it.request(method, f"/edgefl/v1/{path}", headers={**bearer, **headers})

        return asyncio.run(send())

    def statuses(self, token: str | None, method: str = "GET", **headers: str) -> list[int]:
        return [self.ask(method, role, token, **headers).status_code for role in ROLES]

    def sign_in(self, token: str) -> dict[str, str]:
        """Returns the headers that the page sends with a change."""
        answer = self.ask("POST", "session", token)
        assert answer.status_code == 200, answer.text
        secret = answer.cookies[COOKIE]
        session = self.auth.sessions.find(secret)
        assert session is not None
        headers = {"Cookie": f"{COOKIE}={secret}", "Origin": "https://c:8000", "X-Edgefl-Csrf": session.csrf_token}
        return dict(headers)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield House(tmp_path / "c", store)


@pytest.mark.parametrize(
    ("role", "expected"),
    [("viewer", [200, 403, 403]), ("operator", [200, 200, 403]), ("admin", [200, 200, 200])],
)
def test_a_role_may_what_it_may_and_no_more(house: House, role: str, expected: list[int]) -> None:
    token = house.make_user("ada", role)
    session = house.sign_in(token)
    for method in ("GET", "POST"):
        assert house.statuses(token, method) == expected
        assert house.statuses(None, method, **session) == expected
    refused = [detail for kind, detail in house.rejected if kind == "access token"]
    assert len(refused) == 4 * expected.count(403)
    assert all(f"ada ({role}) came" in detail for detail in refused)
    answers = [house.ask("GET", needed, token) for needed in ROLES]
    assert [answer.json() for answer in answers if answer.status_code == 403] == [
        {"v": 1, "error": "role", "message": f"this needs the role {needed}; ada has the role {role}"}
        for needed in ("operator or a higher one", "admin")[expected.count(200) - 1 :]
    ]
    assert not any("www-authenticate" in answer.headers for answer in answers), "no other credentials are asked for"


def test_the_two_tokens_of_init_are_an_admin_and_a_viewer(house: House) -> None:
    assert house.statuses(house.operator, "POST") == [200, 200, 200]
    assert house.statuses(house.viewer) == [200, 403, 403]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic eDp5", "Bearer wrong", "Bearer \xff"])
def test_everybody_else_is_refused(house: House, header: str) -> None:
    assert house.statuses(None) == [401, 401, 401]
    assert house.statuses(None, Authorization=header.encode("latin-1")) == [401, 401, 401]  # type: ignore[arg-type]


def test_a_stored_hash_is_no_token(house: House) -> None:
    assert house.statuses(house.directory.operator_sha256[0]) == [401, 401, 401]
    house.sign_in(house.operator)
    (hashed,) = house.auth.sessions._sessions
    assert house.statuses(None, Cookie=f"{COOKIE}={hashed}") == [401, 401, 401]


def test_on_loopback_everybody_reads_and_nobody_changes(tmp_path: Path) -> None:
    with Store.open(tmp_path / "edgefl.db") as store:
        assert House(tmp_path / "c", store, host="127.0.0.1").statuses(None) == [200, 401, 401]


def test_a_revoked_or_expired_user_is_refused_at_once_with_token_and_session(house: House) -> None:
    tokens = {name: house.make_user(name, "admin", ttl_s=ttl_s) for name, ttl_s in (("ada", None), ("bob", DAY_S))}
    sessions = {name: house.sign_in(token) for name, token in tokens.items()}
    with Store.open(house.store.database.location) as other_process:
        other_process.revoke_user("ada", at=house.clock.now)
    assert house.statuses(tokens["ada"]) == [401, 401, 401] == house.statuses(None, "POST", **sessions["ada"])
    assert house.statuses(tokens["bob"]) == [200, 200, 200] == house.statuses(None, "POST", **sessions["bob"])
    house.clock.now += DAY_S
    assert house.statuses(tokens["bob"]) == [401, 401, 401] == house.statuses(None, **house_session(sessions["bob"]))
    messages = [house.ask("GET", "viewer", token).json()["message"] for token in tokens.values()]
    assert messages == ["the access token of ada is revoked", "the access token of bob is expired"]


def house_session(headers: dict[str, str]) -> dict[str, str]:
    return {"Cookie": headers["Cookie"]}


def test_a_name_given_anew_is_another_user(house: House) -> None:
    former = house.make_user("ada", "admin")
    with pytest.raises(NameTakenError, match="'ada' already"):
        house.make_user("ada", "viewer")
    response = Response()
    by_openid = _request("GET")
    identity = house.auth.find_identity(_request("GET", former))
    assert identity is not None
    house.auth.start_session(by_openid, response, identity)
    cookie = {"Cookie": response.headers.getlist("set-cookie")[-1].partition(";")[0]}
    assert house.statuses(None, **cookie) == [200, 200, 200]
    house.store.revoke_user("ada", at=house.clock.now)
    with pytest.raises(NotFoundError, match="no active user 'ada'"):
        house.store.revoke_user("ada", at=house.clock.now)
    house.clock.now += 1
    later = house.make_user("ada", "viewer")
    assert house.statuses(former) == [401, 401, 401] == house.statuses(None, **cookie)
    assert house.statuses(later) == [200, 403, 403]


def _request(method: str, token: str | None = None) -> Request:
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    return Request({"type": "http", "method": method, "path": "/x", "headers": headers, "query_string": b""})


@pytest.mark.parametrize(
    ("name", "role"), [("Ada", "viewer"), ("", "viewer"), ("a b@c", "viewer"), ("@", "viewer"), ("ada", "root")]
)
def test_a_user_has_a_name_and_a_role_that_there_are(house: House, name: str, role: str) -> None:
    with pytest.raises(UsageError):
        house.make_user(name, role)
    assert house.store.list_users() == []


def test_the_cookie_of_a_session_is_for_this_page_alone_and_sign_out_ends_it(house: House) -> None:
    answer = house.ask("POST", "session", house.make_user("ada", "operator"))
    set_cookie = answer.headers.get_list("set-cookie")[-1]
    assert set_cookie.startswith(f"{COOKIE}=")
    assert {part.strip().lower() for part in set_cookie.split(";")[1:]} == {
        "httponly", "secure", "samesite=strict", "path=/", f"max-age={int(SESSION_S)}",
    }  # fmt: skip
    cookie = {"Cookie": set_cookie.partition(";")[0]}
    assert house.statuses(None, **cookie) == [200, 200, 403]
    house.ask("DELETE", "session", **cookie)
    assert house.statuses(None, **cookie) == [401, 401, 401]


@pytest.mark.parametrize(
    "change",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://c:8000"},
        {"Origin": "https://c"},
        {"Origin": "null"},
        {"Origin": ""},
        {"X-Edgefl-Csrf": ""},
        {"X-Edgefl-Csrf": "guessed"},
        {"X-Edgefl-Csrf": "\xff"},
    ],
)
def test_a_change_by_session_needs_the_page_s_origin_and_its_csrf_token(house: House, change: dict[str, str]) -> None:
    headers = house.sign_in(house.make_user("ada", "admin"))
    assert house.ask("POST", "operator", **headers).status_code == 200
    sent = {name: value.encode("latin-1") for name, value in {**headers, **change}.items()}
    assert house.statuses(None, "POST", **sent) == [401, 401, 401]  # type: ignore[arg-type]
    assert house.rejected[-1] == ("cross-site request", "/edgefl/v1/admin: with the session of ada")
    assert list_rows(house.store) == [("ada (admin)", f"POST {path}", "done") for path in ("session", "operator")]


def test_a_wrong_token_is_not_saved_by_a_session_and_guesses_are_slowed_down(house: House) -> None:
    headers = house.sign_in(house.make_user("ada", "admin"))
    statuses = [house.ask("POST", "session", "guess", **headers).status_code for _ in range(12)]
    assert statuses == 10 * [401] + 2 * [429]


def test_sessions_are_bounded_in_number_and_time() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    first = sessions.start("ada")[0]
    mine = [sessions.start("bob")[0] for _ in range(MAX_SESSIONS_PER_USER + 3)]
    assert [sessions.find(secret) is not None for secret in mine] == 3 * [False] + MAX_SESSIONS_PER_USER * [True]
    assert sessions.find(first) is not None
    others = [sessions.start(f"user-{number}")[0] for number in range(MAX_SESSIONS)]
    assert len(sessions._sessions) == MAX_SESSIONS
    assert sessions.find(first) is None
    clock.now += SESSION_S - 1
    assert sessions.find(others[-1]) is not None
    clock.now += 1
    assert sessions.find(others[-1]) is None
    assert sessions.find(others[-1]) is None


def test_a_store_that_cannot_be_read_is_503_and_no_crash(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise StoreError("store is damaged")

    token = house.make_user("ada", "admin")
    monkeypatch.setattr(house.store, "find_user", fail)
    assert house.statuses(token, "POST") == [503, 503, 503]
    assert not house.auth.can_act(_request("POST", token))
    assert house.statuses(house.operator, "POST") == [200, 200, 200], "it is in the settings, not in the store"


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
