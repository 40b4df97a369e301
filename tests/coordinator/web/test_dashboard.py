from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from edgefl.coordinator.auth import register_error_handler
from edgefl.coordinator.runs.recovery import RESUMABLE_STATUSES
from edgefl.coordinator.web.dashboard import INDEX, PAGE_FOLDER, dashboard_router, load_assets

ASSETS = load_assets()


class Client:
    """Asks the page's routes as a browser would, without a socket."""

    def __init__(self) -> None:
        app = FastAPI()
        register_error_handler(app)
        app.include_router(dashboard_router())
        self._transport = httpx.ASGITransport(app)

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="https://edgefl") as client:
                return await client.get(path, headers=headers)

        return asyncio.run(ask())


@pytest.fixture
def client() -> Client:
    return Client()


def test_the_page_comes_under_a_policy_that_lets_nothing_inline_and_nothing_foreign_in(client: Client) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(ASSETS))
def test_every_file_is_served_with_its_type_and_not_sent_twice(client: Client, name: str) -> None:
    answer = client.get(f"/edgefl/page/{name}")
    assert answer.content == (PAGE_FOLDER / name).read_bytes()
    assert answer.headers["content-type"].startswith(
        {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}[
            Path(name).suffix
        ]
    )
    again = client.get(f"/edgefl/page/{name}", headers={"If-None-Match": f'"other", {answer.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(f"/edgefl/page/{name}", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2Fdashboard.py", "%2e%2e/api.py", "style.css.map"])
def test_nothing_else_of_the_package_is_served(client: Client, name: str) -> None:
    assert client.get(f"/edgefl/page/{name}").status_code == 404


def test_every_file_that_the_page_names_is_there_and_every_module_is_loaded_early() -> None:
    index = ASSETS[INDEX].body.decode()
    named = set(re.findall(r'(?:href|src)="/edgefl/page/([^"]+)"', index))
    assert named <= set(ASSETS)
    modules = {name for name in ASSETS if name.endswith(".js")}
    assert modules <= named, "a module that is not named in the page is only found after others were read"
    for name in modules:
        for imported in re.findall(r'from "\./([^"]+)"', ASSETS[name].body.decode()):
            assert imported in modules, f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(ASSETS))
def test_no_file_needs_another_network_or_makes_markup_of_text(name: str) -> None:
    text = ASSETS[name].body.decode().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*src=)|\sstyle=|\son\w+=", text)


def test_the_page_offers_to_resume_exactly_those_runs_that_can_be() -> None:
    line = re.search(r"const canResume = (\[[^\]]*\])", (PAGE_FOLDER / "run.js").read_text())
    assert line is not None
    assert set(json.loads(line[1])) == {str(status) for status in RESUMABLE_STATUSES}
