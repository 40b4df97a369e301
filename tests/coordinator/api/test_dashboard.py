"""The page's part of the API, asked over TLS of a whole coordinator."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import re
import ssl
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from edgefl.coordinator.api import dashboard, feed
from edgefl.coordinator.api.dashboard import (
    INDEX,
    PAGE_FOLDER,
    cache_curves,
    load_assets,
    page_router,
)
from edgefl.coordinator.auth import register_error_handler
from edgefl.coordinator.directory import CoordinatorDirectory, StartOptions, add_access_tokens, init_directory
from edgefl.coordinator.enrolment.tokens import make_user
from edgefl.coordinator.runs.recovery import RESUMABLE_STATUSES
from edgefl.coordinator.service import Coordinator
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import JoinToken
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.schema import make_run_schema
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store

ALL_ADDRESSES = "0.0.0.0"
RUN_FILE = '[run]\ntask = "digits"\nrounds = 3\n[strategy]\nname = "fedavg"\n'
ACTIONS = ["run-files", "tokens", "devices/pi/drain", "devices/pi/resume", "runs", "runs/latest/stop"]


@dataclass
class Site:
    coordinator: Coordinator
    directory: CoordinatorDirectory
    operator: str
    viewer: str

    def connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.directory.ca_cert))
        return http.client.HTTPSConnection("127.0.0.1", self.directory.port, timeout=20, context=context)

    def ask(self, method: str, path: str, body: Any = None, token: str = "", **headers: str) -> tuple[int, Any]:
        connection = self.connect()
        sent = {**headers, **({"Authorization": f"Bearer {token}"} if token else {})}
        content = None if body is None else json.dumps(body)
        if content is not None:
            sent.setdefault("Content-Type", "application/json")
        connection.request(method, f"/edgefl/v1/{path}", content, sent)
        answer = connection.getresponse()
        value = json.loads(answer.read())
        connection.close()
        return answer.status, value

    def act(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.ask("POST", path, body or {}, self.operator)

    @property
    def store(self) -> Store:
        return self.coordinator._store


def _site(root: Path, host: str) -> Iterator[Site]:
    bare = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    directory, operator, viewer = add_access_tokens(bare)
    options = StartOptions(host=host, port=directory.port, broker="embedded", broker_port=find_free_port())
    with Coordinator(directory, options, build_run) as coordinator:
        waiting = threading.Thread(target=coordinator.wait)
        waiting.start()
        coordinator._registry.add("pi", node_id=5, role="trainer", groups=(), examples={"digits": 9})
        try:
            yield Site(coordinator, directory, operator, viewer)
        finally:
            coordinator.stop()
            waiting.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _site(tmp_path_factory.mktemp("loopback") / "c", "127.0.0.1")


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _site(tmp_path_factory.mktemp("open") / "c", ALL_ADDRESSES)


@pytest.mark.parametrize("path", ACTIONS)
def test_acting_needs_the_operator_s_token_on_loopback_too(site: Site, path: str) -> None:
    for token in ("", "wrong"):
        status, answer = site.ask("POST", path, {}, token)
        assert (status, answer["error"]) == (401, "not-allowed")
    status, answer = site.ask("POST", path, {}, site.viewer)
    assert (status, answer["error"]) == (403, "role")


@pytest.mark.parametrize("path", ["feed", "runs", "devices", "runs/latest/curve", "runs/latest/spans"])
def test_reading_beyond_loopback_needs_a_token(open_site: Site, path: str) -> None:
    for token in ("", "wrong"):
        assert open_site.ask("GET", path, None, token)[0] == 401
    if path != "feed":
        assert open_site.ask("GET", path, None, open_site.viewer)[0] in {200, 404}


def test_an_open_feed_ends_when_its_user_is_revoked(open_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(feed, "ACCESS_CHECK_S", 0.05)
    token = make_user(open_site.store, "ada", "viewer", ttl_s=None, now=time.time())
    connection = open_site.connect()
    connection.request("GET", "/edgefl/v1/feed", None, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    assert (answer.status, answer.readline()[:3]) == (200, b"id:")
    while answer.readline() != feed.KEEP_ALIVE_COMMENT.splitlines(keepends=True)[0]:
        pass
    open_site.store.revoke_user("ada", at=time.time())
    answer.read()  # until its end; the socket has a deadline
    connection.close()


def test_access_says_what_a_token_is_good_for_and_refuses_nobody(site: Site, open_site: Site) -> None:
    def rights(where: Site, token: str) -> tuple[bool, bool]:
        status, answer = where.ask("GET", "access", None, token)
        assert status == 200
        return answer["reads"], answer["acts"]

    for where, stranger_reads in ((site, True), (open_site, False)):
        assert rights(where, "") == rights(where, "wrong") == (stranger_reads, False)
        assert rights(where, where.viewer) == (True, False)
        assert rights(where, where.operator) == (True, True)
    assert "fleet" not in open_site.ask("GET", "access")[1], "strangers learn nothing"


def test_a_form_of_another_site_can_do_nothing(site: Site) -> None:
    """A form sends no token and, without asking first, no JSON; both are refused."""
    plain = {"Content-Type": "text/plain", "Origin": "https://elsewhere.example"}
    assert site.ask("POST", "tokens", {}, "", **plain)[0] == 401
    status, _ = site.ask("GET", "access", None, "", Origin="https://elsewhere.example")
    assert status == 200
    connection = site.connect()
    connection.request("OPTIONS", "/edgefl/v1/tokens", headers={"Origin": "https://elsewhere.example"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.getheader("Access-Control-Allow-Origin") is None


def test_a_pasted_run_file_is_checked_and_comes_back_as_what_a_run_is_submitted_with(site: Site) -> None:
    status, checked = site.act("run-files", {"toml": RUN_FILE})
    assert (status, checked["config"]["run"]["rounds"]) == (200, 3)
    status, run = site.act("runs", {"config": checked["config"]})
    assert (status, run["status"], run["name"]) == (200, "queued", "digits-fedavg")
    assert site.act(f"runs/{run['run_id']}/stop")[1]["status"] in {"stopped", "stopping"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run", "not TOML"),
        ('[run]\ntask = "digits"\nruonds = 3', "did you mean run.rounds"),
        ('[run]\ntask = "nonsense"', "nonsense"),
        ('[run]\ntask = "digits"\ninit = "m.safetensors"', "absolute path"),
        ('[run]\ntask = "subprocess:Popen"\n[task]\nargs = "touch x"', "of Python's own library"),
        ('[run]\ntask = "digits"\n[strategy]\nname = "numpy:load"', "the module numpy is not allowed here"),
        ('[run]\ntask = "mnist"\n[task]\nmodel = "torch.hub:load"', "the module torch.hub is not allowed here"),
        ('[run]\ntask = "digits"\n[strategy]\noptimizer = "os:system"', "the name of a local algorithm"),
        ('[run]\ntask = "digits"\n[compression]\nup = "os:system"', "unknown stage 'os'"),
        ('[run]\ntask = "digits"\n[strategy]\nlearning_rate = true', "must be a number at least 0, got true"),
        ("\x00", "not TOML"),
    ],
)
def test_what_is_wrong_with_a_pasted_run_file_is_one_line(site: Site, text: str, said: str) -> None:
    status, answer = site.act("run-files", {"toml": text})
    assert status == 400
    assert said in answer["message"]
    assert "\n" not in answer["message"]
    if not said.endswith(("TOML", "path")):
        config = {"config": tomllib.loads(text)}
        assert [site.act(route, config)[1]["message"] for route in ("runs", "runs/plan")] == [answer["message"]] * 2


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('[run]\ntask = "digits"\nrounds = 0\n[guard]\nfoo = 3', ["run.rounds", "guard.foo"]),
        ('[run]\ntask = "nonsense"', ["run.task"]),
        ('[run]\ntask = "digits"\n[strategy]\nname = "nonsense"', ["strategy.name"]),
        ('[run]\ntask = "digits"\n[strategy]\nmu = 1\nepochs = 0', ["strategy.mu", "strategy.epochs"]),
        ('[run]\ntask = "digits"\n[compression]\ndown = "nonsense"', ["compression.down"]),
        ('[run]\ntask = "digits"\n[compression]\nup = "nonsense"', ["compression.up"]),
        ("[run", [None]),
    ],
)  # fmt: skip
def test_every_fault_of_a_pasted_run_file_names_its_setting(
    site: Site, text: str, settings: list[str | None]
) -> None:
    faults = site.act("run-files", {"toml": text})[1]["faults"]
    assert sorted(map(str, (row["setting"] for row in faults))) == sorted(map(str, settings))
    assert all(row["message"] and "\n" not in row["message"] for row in faults)


def test_the_form_s_schema_is_that_of_the_command(site: Site) -> None:
    status, answer = site.ask("GET", "run-schema")
    assert (status, answer["schema"]) == (200, json.loads(json.dumps(make_run_schema())))


def test_a_token_made_here_is_good_and_comes_with_the_command_that_joins(site: Site) -> None:
    status, made = site.act("tokens", {"ttl": "30m", "uses": 3, "groups": ["north"], "role": "trainer"})
    assert status == 200
    token = JoinToken.parse(made["token"])
    assert (token.fleet, token.token_id, made["uses"], made["groups"]) == ("lab", made["token_id"], 3, ["north"])
    assert " edgefl device join 127.0.0.1:" in made["join"]
    assert made["token"] in made["join"]
    assert abs(made["expires_at"] - time.time() - 1800) < 60
    assert made["setup"] is None


def test_without_a_body_a_token_is_for_one_board_and_a_day(site: Site) -> None:
    status, made = site.act("tokens")
    assert (status, made["uses"], made["role"]) == (200, 1, "trainer")


@pytest.mark.parametrize(
    "terms", [{"ttl": "soon"}, {"uses": 0}, {"uses": 10**9}, {"role": "boss"}, {"groups": ["<b>"]}]
)
def test_terms_that_make_no_sense_make_no_token(site: Site, terms: Any) -> None:
    status, answer = site.act("tokens", terms)
    assert status == 400
    assert answer["message"]


def test_draining_is_told_in_the_list_and_undone_by_resuming(site: Site) -> None:
    assert site.act("devices/pi/drain")[1]["drained"] is True
    rows = site.coordinator._registry.list_status_rows()
    assert [row["drained"] for row in rows if row["device_id"] == "pi"] == [True]
    assert site.act("devices/pi/resume")[1]["drained"] is False
    assert site.act("devices/nobody/drain")[0] == 404


def test_curves_and_spans_of_a_run_without_rounds_are_empty_and_limits_are_checked(site: Site) -> None:
    site.store.add_run(run_id="bare", name="bare", task="t", strategy="s", config={}, seed=1, submitted_at=1.0)
    assert site.ask("GET", "runs/bare/curve")[1]["rows"] == []
    assert site.ask("GET", "runs/bare/spans")[1]["rows"] == []
    assert site.ask("GET", "runs/none/curve")[0] == 404
    for query in ("curve?points=1", "curve?points=100000", "spans?rounds=0", "spans?rounds=1000"):
        assert site.ask("GET", f"runs/bare/{query}")[0] == 422


def test_a_feed_begins_with_a_snapshot_goes_on_with_changes_and_ends_with_the_coordinator(tmp_path: Path) -> None:
    sites = _site(tmp_path / "c", "127.0.0.1")
    site = next(sites)
    connection = site.connect()
    connection.request("GET", "/edgefl/v1/feed")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert _message(answer)["devices"][0]["device_id"] == "pi"
    site.act("devices/pi/drain")
    news = _message(answer)
    assert news["devices"][0]["drained"] is True
    assert news["events"][-1]["kind"] == "drain-requested"
    began_s = time.monotonic()
    with pytest.raises(StopIteration):
        next(sites)
    assert answer.read().strip() == b""
    assert time.monotonic() - began_s < 4, "open feeds held up the end"
    connection.close()


def _message(answer: http.client.HTTPResponse) -> Any:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line
    return json.loads(line.removeprefix(b"data: "))


ASSETS = load_assets()
UPLOT = {
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
}
"""SHA-256 of `uPlot.min.css` and `uPlot.iife.min.js` of the npm package uplot 1.6.32."""


class Client:
    """Asks the page's routes as a browser would, without a socket."""

    def __init__(self) -> None:
        app = FastAPI()
        register_error_handler(app)
        app.include_router(page_router())
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
    whole = client.get(f"/edgefl/page/{name}", headers={"Accept-Encoding": "identity"})
    assert ("content-encoding" in whole.headers, whole.content) == (False, answer.content)
    assert int(answer.headers["content-length"]) < int(whole.headers["content-length"]), (
        "gzip, as the client takes it"
    )


@pytest.mark.parametrize("name", ["none.js", "..%2Fdashboard.py", "%2e%2e/api.py", "style.css.map"])
def test_nothing_else_of_the_package_is_served(client: Client, name: str) -> None:
    assert client.get(f"/edgefl/page/{name}").status_code == 404


def test_the_chart_library_is_that_of_its_release_to_the_byte_with_its_licence_beside_it() -> None:
    assert {name: hashlib.sha256(ASSETS[name].body).hexdigest() for name in UPLOT} == UPLOT
    assert b"uPlot (v1.6.32)" in ASSETS["uplot.js"].body
    assert "The MIT License" in (PAGE_FOLDER / "uplot.LICENSE").read_text()


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
    text = text.replace("https://github.com/leeoniya/uPlot", "")  # its name, in a comment
    assert not re.search(r"https?://|\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*src=)|\sstyle=|\son\w+=", text)


def test_the_page_offers_to_resume_exactly_those_runs_that_can_be() -> None:
    line = re.search(r"const canResume = (\[[^\]]*\])", (PAGE_FOLDER / "run.js").read_text())
    assert line is not None
    assert set(json.loads(line[1])) == {str(status) for status in RESUMABLE_STATUSES}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        opened.add_run(run_id="r", name="n", task="t", strategy="s", config={}, seed=1, submitted_at=0.0)
        close_round(opened, 1)
        yield opened


def close_round(store: Store, number: int) -> None:
    store.open_round("r", number, started_at=float(number), num_devices=1)
    store.close_round("r", number, version=number, closed_at=number + 0.5)


def test_the_curve_of_a_run_that_goes_on_is_read_anew(store: Store) -> None:
    get_curve = cache_curves(store)
    assert get_curve("r", 100)[0] == 1
    close_round(store, 2)
    assert get_curve("r", 100)[0] == 2


def test_the_curve_of_a_run_that_is_over_is_kept_until_it_ends_a_second_time(store: Store) -> None:
    get_curve = cache_curves(store)
    store.set_run_status("r", RunStatus.STOPPED, at=9.0)
    assert get_curve("r", 100) is get_curve("r", 100)
    store.set_run_status("r", RunStatus.RUNNING, at=10.0)
    close_round(store, 2)
    assert get_curve("r", 100)[0] == 2
    store.set_run_status("r", RunStatus.FINISHED, at=11.0)
    assert get_curve("r", 100)[0] == 2


def test_only_so_many_curves_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_CACHED_CURVES", 2)
    get_curve = cache_curves(store)
    store.set_run_status("r", RunStatus.STOPPED, at=9.0)
    oldest, newer = get_curve("r", 10), get_curve("r", 20)
    get_curve("r", 30)
    assert get_curve("r", 20) is newer
    assert get_curve("r", 10) is not oldest


def test_a_run_that_is_none_has_no_curve(store: Store) -> None:
    with pytest.raises(NotFoundError):
        cache_curves(store)("none", 10)
