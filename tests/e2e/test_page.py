"""The page in a real browser, over a real fleet: a run from its file to its accuracy, a token, a rest, a phone."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from requirements import PARTS, needs

from edgefl.coordinator.enrolment.tokens import make_user
from edgefl.core.config import RunConfig, parse_run, parse_run_text
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.storage.queries.history import read_history
from edgefl.storage.repositories.records import EvaluationRow
from edgefl.storage.store import Store
from edgefl.system.api_client import load_operator_file

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
RUN_FILE = """[run]
task = "digits"
name = "from the page"
rounds = 12
[devices]
min = 2
"""
EVIL = "<img src=x onerror=document.title='broken'>"
EVIL_DEVICE = "<script>document.title='broken'</script>"
VIEWS = (
    "", "fleet", "runs", "runs/latest", "models", "devices/device-01", "start", "join", "audit",
    "compare/latest/latest", "runs/nonsense", "devices/nobody", "sign-in/refused",
)  # fmt: skip

pytestmark = [pytest.mark.extended, needs("chromium")]


@dataclass
class Screen:
    """One tab of its own session, and everything that its console complained of."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)

    def open(self, view: str = "") -> None:
        self.page.goto(f"{self.url}/#/{view}")
        self.page.wait_for_selector("main h1, main h2", state="attached")

    def sign_in(self, token: str) -> None:
        self.page.locator("#sign-in").click()  # the form of a run may have one, too
        self.page.get_by_label("Access token").fill(token)
        self.page.get_by_role("dialog").get_by_role("button", name="Sign in").click()
        self.page.get_by_role("button", name="Sign out").wait_for()


@dataclass
class House:
    """A fleet and a browser."""

    fleet: LocalFleet
    browser: Any
    open_contexts: list[Any] = field(default_factory=list)

    @property
    def token(self) -> str:
        return str(self.fleet.make_client().token)

    def screen(self, width: int = 1280, height: int = 800, port: int | None = None, **options: Any) -> Screen:
        context = self.browser.new_context(
            ignore_https_errors=True, viewport={"width": width, "height": height}, **options
        )
        self.open_contexts.append(context)
        screen = Screen(page=context.new_page(), url=f"https://127.0.0.1:{port or self.fleet.port}")
        screen.page.set_default_timeout(20_000)
        screen.page.on("console", lambda said: screen.complaints.append(said.text) if said.type == "error" else None)
        screen.page.on("pageerror", lambda error: screen.complaints.append(str(error)))
        return screen

    def open(self, view: str, **options: Any) -> Screen:
        """A screen that shows a view to the operator."""
        screen = self.screen(**options)
        screen.open(view)
        screen.sign_in(self.token)
        return screen


@pytest.fixture(scope="module")
def house(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 only where there is a browser

    root = tmp_path_factory.mktemp("page")
    with tools.fleet(root, tools.devices(2), scored=True) as fleet, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PARTS["chromium"].path(), args=list(ARGUMENTS))
        yield House(fleet, browser)
        browser.close()


@pytest.fixture
def screens(house: House) -> Iterator[House]:
    """The house; what a test opens is closed after it."""
    yield house
    while house.open_contexts:
        house.open_contexts.pop().close()


def run_of(name: str, rounds: int) -> RunConfig:
    return parse_run({"run": {"task": "digits", "name": name, "rounds": rounds}, "devices": {"min": 2}})


def test_a_run_is_started_watched_and_read_on_the_page(screens: House) -> None:
    screen = screens.screen()
    screen.open("runs")
    page = screen.page
    screen.sign_in(screens.token)
    page.get_by_role("link", name="Start a run").click()
    page.get_by_label("Run file (TOML)").fill(RUN_FILE)
    page.get_by_text("It can be started: 2 devices take part.").wait_for()
    page.get_by_role("button", name="Start the run").click()
    page.get_by_role("heading", name="from the page finished").wait_for(timeout=60_000)
    page.locator("dt", has_text="Rounds").locator("+ dd", has_text="12 of 12").wait_for()
    (run,) = [
        row for row in screens.fleet.make_client().get("/edgefl/v1/runs")["rows"] if row["name"] == "from the page"
    ]
    assert page.locator("dt", has_text="Accuracy").locator("+ dd").inner_text() == f"{100 * run['accuracy']:.1f} %"
    assert run["accuracy"] > 0.8
    curve = page.get_by_role("img", name=re.compile("^Accuracy, accuracy by round"))
    assert f"newest {100 * run['accuracy']:.2f} %" in curve.get_attribute("aria-label")
    page.wait_for_function("() => document.querySelectorAll('.timeline rect.compute').length === 24")
    curve.focus()
    page.keyboard.press("End")
    page.get_by_text(f"round 12: global model {100 * run['accuracy']:.2f} %").wait_for()
    page.get_by_role("button", name="Time").click()
    page.get_by_role("img", name=re.compile("^Accuracy, accuracy by time")).wait_for()
    assert screen.complaints == []


def test_a_page_that_is_open_follows_a_run_without_asking_again(screens: House) -> None:
    screen = screens.screen()
    screen.open()
    screen.page.locator(".link.live").wait_for()
    asked: list[str] = []
    screen.page.on("request", lambda request: asked.append(request.url.partition("/edgefl/v1/")[2]))
    run_id = screens.fleet.submit(run_of("followed", 25))
    screen.page.get_by_role("heading", name=re.compile("followed finished")).wait_for(timeout=60_000)
    screen.page.get_by_text("25 of 25").wait_for()
    # One that is over before the page hears of it is the last one all the same.
    screens.fleet.submit(run_of("short", 1))
    screen.page.get_by_role("heading", name="Last run: short finished").wait_for(timeout=60_000)
    assert "feed" not in asked
    assert len([path for path in asked if run_id in path]) <= 5, (
        "its course is loaded at first and at the end, and told meanwhile"
    )


def test_nothing_is_done_without_a_role(screens: House) -> None:
    screen = screens.screen()
    screen.open("join")
    page = screen.page
    page.get_by_role("button", name="Make a token").click()
    page.get_by_role("dialog").get_by_text("This needs the role admin.").wait_for()
    page.get_by_label("Access token").fill("wrong")
    page.get_by_role("dialog").get_by_role("button", name="Sign in").click()
    page.get_by_text("the access token is wrong").wait_for()
    ask = """async ([path, token]) => (await fetch('/edgefl/v1/' + path, { method: 'POST',
        headers: { 'Content-Type': 'application/json', ...(token && { Authorization: 'Bearer ' + token }) },
        body: '{}' })).status"""
    for path in ("tokens", "runs", "run-files", "devices/device-01/drain", "runs/latest/stop"):
        assert [page.evaluate(ask, [path, token]) for token in ("", "wrong")] == [401, 401], path
    assert page.locator(".join-line").count() == 0


def test_the_audit_trail_names_people_as_text_and_a_revoked_one_is_signed_out(screens: House) -> None:
    with Store.open(screens.fleet.database) as store:
        token = make_user(store, "ada", "operator", ttl_s=None, now=time.time())
        for number in range(60):
            store.record_audit(actor=EVIL, source=EVIL, action=f"{EVIL} {number}", outcome=EVIL, at=float(number))
    screen = screens.screen()
    screen.open("devices/device-01")
    screen.sign_in(token)
    page = screen.page
    page.get_by_text("Signed in: ada, operator.").wait_for()
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("heading", name="device-01 draining").wait_for()
    page.get_by_role("button", name="Give it work again").click()
    page.get_by_role("heading", name="device-01 online").wait_for()
    page.get_by_role("link", name="Audit").click()
    page.get_by_role("row", name="ada (operator) POST devices/device-01/drain done").wait_for()
    page.get_by_text("50 rows, the newest.").wait_for()
    while page.get_by_role("button", name="Older").is_visible():
        page.get_by_role("button", name="Older").click()
        page.wait_for_function("() => !document.querySelector('main button:disabled')")
    page.get_by_text(re.compile("rows, back to the first")).wait_for()
    with Store.open(screens.fleet.database) as store:
        num_rows = len(read_history(store, "audit"))
        assert page.locator("tbody tr").count() == num_rows >= 63
        assert page.locator("tbody th").count() == num_rows, "each row once"
        assert page.locator("main img").count() == 0
        store.revoke_user("ada", at=time.time())
    assert page.evaluate("async () => (await fetch('/edgefl/v1/history/audit')).status") == 401
    page.get_by_role("link", name="Join").click()
    page.reload()
    page.get_by_role("button", name="Sign in").wait_for()


def test_a_token_is_shown_once_with_its_command_or_with_one_line_where_boards_can_download_edgefl(
    screens: House,
) -> None:
    screen = screens.open("join")
    page = screen.page
    page.get_by_label("How many boards").fill("3")
    page.get_by_role("button", name="Make a token").click()
    assert " edgefl device join 127.0.0.1:" in page.get_by_label("The command that joins").inner_text()
    with Store.open(screens.fleet.database, read_only=True) as store:
        assert 3 in {token.uses_left for token in store.list_tokens()}
    for name in ("setup.sh", "setup.tar"):
        (screens.fleet.directory / name).write_bytes(b"")
    page.get_by_role("button", name="Make a token").click()
    line = page.get_by_label("The line that installs and joins")
    line.wait_for()
    assert "/edgefl/v1/setup/setup.sh | sudo" in line.inner_text()
    page.get_by_role("button", name="Copy the line").wait_for()
    assert not page.get_by_label("The command that joins").is_visible()
    assert screen.complaints == []


def test_a_device_is_drained_and_given_work_again(screens: House) -> None:
    screen = screens.open("devices/device-02")
    page = screen.page
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("heading", name="device-02 draining").wait_for()
    assert screens.fleet.get_presence()["device-02"] == "draining"
    run_id = screens.fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}}))
    screens.fleet.wait_for_run(run_id)
    assert {row["device_id"] for row in screens.fleet.list_history("updates", run=run_id)} == {"device-01"}
    page.get_by_role("button", name="Give it work again").click()
    page.get_by_role("heading", name="device-02 online").wait_for()
    assert screens.fleet.get_presence()["device-02"] == "online"
    assert screen.complaints == []


def test_a_run_is_stopped_after_a_question(screens: House) -> None:
    run_id = screens.fleet.submit(run_of("endless", 1_000_000))
    screen = screens.open(f"runs/{run_id}")
    page = screen.page
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Stop the run").click()
    page.get_by_role("heading", name="endless stopped").wait_for(timeout=30_000)
    assert screens.fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["status"] == "stopped"


def test_runs_are_compared_and_one_is_repeated_and_its_model_taken_home(screens: House, tmp_path: Path) -> None:
    runs = [screens.fleet.submit(run_of(name, rounds)) for name, rounds in (("first", 3), ("second", 4))]
    for run_id in runs:
        screens.fleet.wait_for_run(run_id)
    measured = [
        EvaluationRow(
            assignment_id=f"own{round_}", round=round_, version=round_, device_id="device-01", source="device",
            loss=1.0, accuracy=0.5, num_examples=10, at=1.0, metrics={"f1": 0.25 * round_},
        )
        for round_ in (1, 2)
    ]  # fmt: skip
    with Store.open(screens.fleet.database) as store:
        store.record_evaluations(runs[1], measured)
    screen = screens.open("runs")
    page = screen.page
    compare = page.get_by_role("button", name="Compare")
    assert compare.is_disabled()
    for run_id in runs:
        page.get_by_role("checkbox", name=f"Choose {run_id}").check()
    compare.click()
    settings = page.get_by_role("table", name="Settings that differ")
    settings.get_by_role("row", name="run.rounds 3 4").wait_for()
    assert settings.locator("tbody tr").count() == 1, "they differ in nothing else"
    page.get_by_role("img", name=re.compile("^Loss.*first: newest .*; second: newest")).wait_for()

    page.get_by_role("link", name="second").first.click()
    page.get_by_role("row", name=re.compile("device-01 4 of 4 50 %")).wait_for()
    page.get_by_role("img", name="f1, f1 by round. f1: newest 0.5, from 0.25 to 0.5").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the best model").click()
    download.value.save_as(tmp_path / "model")
    digests = {row["sha256"] for row in screens.fleet.make_client().get(f"/edgefl/v1/models?run={runs[1]}")["rows"]}
    assert hashlib.sha256((tmp_path / "model").read_bytes()).hexdigest() in digests
    page.get_by_role("button", name="Run again with changes").first.click()
    run_file = page.get_by_label("Run file (TOML)")
    assert parse_run_text(run_file.input_value()) == run_of("second", 4)
    run_file.fill(run_file.input_value().replace("rounds = 4", "rounds = 0"))
    page.get_by_text("It must be a whole number at least 1").wait_for()
    assert [text for text in screen.complaints if "400" not in text] == []


def test_a_model_is_rolled_out_and_back_after_questions_and_a_viewer_only_looks(screens: House) -> None:
    runs = [screens.fleet.submit(run_of(name, rounds)) for name, rounds in (("older", 3), ("newer", 5))]
    models = []
    for run_id in runs:
        screens.fleet.wait_for_run(run_id)
        rows = screens.fleet.make_client().get(f"/edgefl/v1/models?run={run_id}")["rows"]
        models.append(next(row["sha256"][:12] for row in rows if row["latest"]))
    screen = screens.screen()
    screen.open("models")
    page = screen.page
    rollouts = page.get_by_role("region", name="Roll-outs").get_by_role("listitem")
    dialog = page.get_by_role("dialog")

    def ask_to_roll_out(model: str) -> None:
        page.get_by_role("button", name=f"Roll out {model}").first.click()

    with Store.open(screens.fleet.database) as store:
        viewer = make_user(store, "vera", "viewer", ttl_s=None, now=time.time())
    screen.sign_in(viewer)
    ask_to_roll_out(models[0])
    dialog.get_by_text("This needs the role operator; you have the role viewer.").wait_for()
    dialog.get_by_label("Access token").fill(screens.token)
    dialog.get_by_role("button", name="Sign in").click()
    assert rollouts.count() == 0

    ask_to_roll_out(models[0])
    dialog.get_by_text("2 boards; those that join later too.").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    ask_to_roll_out(models[0])
    dialog.get_by_role("button", name="Roll out").click()
    rollouts.filter(has_text="2 running").get_by_text("done").wait_for(timeout=60_000)
    page.get_by_text("2 of 2 boards run one.").wait_for()

    ask_to_roll_out(models[1])
    dialog.get_by_label("To").select_option("board device-01")
    dialog.get_by_label("Worse by at most").fill("1")
    dialog.get_by_role("button", name="Roll out").click()
    newest = rollouts.first
    newest.filter(has_text="to 1 chosen: 1 running").get_by_text("done").wait_for(timeout=60_000)
    newest.get_by_text("Each board").click()
    newest.get_by_role("row", name=re.compile("device-01 running")).wait_for()

    page.get_by_role("button", name=f"Roll back to {models[0]}").click()
    dialog.get_by_text("1 boards get the model of before").wait_for()
    dialog.get_by_role("button", name="Roll back").click()
    page.wait_for_function("() => document.querySelectorAll('.rollout').length === 3")
    newest.filter(has_text=models[0]).get_by_text("done").wait_for(timeout=60_000)
    page.get_by_role("row", name=re.compile(f"{models[0]}.*2 boards")).first.wait_for()
    assert screen.complaints == []


def test_form_and_run_file_follow_each_other_and_every_fault_stands_at_its_field(screens: House) -> None:
    screen = screens.open("start")
    page = screen.page
    text = page.get_by_label("Run file (TOML)")
    text.fill('# why\n[run]\ntask = "digits"  # small\nrounds = 1_0\n[devices]\nmin = 2\n')
    rounds = page.get_by_label("Rounds", exact=True)
    assert rounds.input_value() == "1_0"
    rounds.fill("4")
    page.get_by_label("Groups").fill("north, south")
    page.get_by_label("Strategy", exact=True).select_option("fedprox")
    page.get_by_label("Mu", exact=True).fill("0.5")
    assert text.input_value() == (
        '# why\n[run]\ntask = "digits"  # small\nrounds = 4\n[devices]\nmin = 2\n'
        'groups = ["north", "south"]\n\n[strategy]\nname = "fedprox"\nmu = 0.5\n'
    )
    page.get_by_text("It would wait: it needs 2, and no devices can take part").wait_for()
    page.get_by_role("row", name="device-01 no it is in none of the groups").wait_for()

    page.get_by_label("Groups").fill("")
    page.get_by_label("Strategy", exact=True).select_option("fedavg")
    page.get_by_text("Left out, since fedavg does not have it: mu.").wait_for()
    assert "mu =" not in text.input_value()
    assert "groups" not in text.input_value()
    page.get_by_text("It can be started: 2 devices take part.").wait_for()

    rounds.fill("0")
    page.get_by_text("Guard", exact=True).click()
    page.get_by_label("Norm ratio").fill("wide")
    page.get_by_text("2 settings are wrong.").wait_for()
    page.get_by_text("Guard", exact=True).click()  # closed: a fault opens it again
    page.get_by_role("button", name="Check").click()
    for entry, said in ((rounds, "at least 1, got 0"), (page.get_by_label("Norm ratio"), "got 'wide'")):
        page.wait_for_function("field => field.getAttribute('aria-invalid') === 'true'", arg=entry.element_handle())
        described = entry.get_attribute("aria-describedby").split()[-1]
        assert said in page.locator(f"#{described}").inner_text()
    text.fill("[run")
    page.get_by_text("The form does not follow this text, line 1: expected ]").wait_for()
    assert rounds.is_disabled()
    page.get_by_text("the run file is not TOML").wait_for()
    assert [said for said in screen.complaints if "400" not in said] == []


def test_several_devices_are_drained_at_once_and_none_is_removed_without_a_question(screens: House) -> None:
    screen = screens.open("fleet")
    page = screen.page
    for name in ("device-01", "device-02"):
        page.get_by_role("checkbox", name=f"Choose {name}").check()
    assert page.get_by_role("checkbox").count() == 2, "the coordinator's evaluator is no board"
    page.get_by_text("2 boards, and the coordinator's own evaluator").wait_for()
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_text("device-01, device-02 must join again").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Drain").click()
    for name in ("device-01", "device-02"):
        page.get_by_role("row", name=re.compile(f"{name} draining")).wait_for()
        page.get_by_role("checkbox", name=f"Choose {name}").check()
    page.get_by_role("button", name="Give it work again").click()
    for name in ("device-01", "device-02"):
        page.get_by_role("row", name=re.compile(f"{name} online")).wait_for()
    assert {"device-01", "device-02"} <= set(screens.fleet.get_presence())
    assert screen.complaints == []


def test_a_board_that_leaves_needs_attention_until_it_is_back(screens: House) -> None:
    screen = screens.screen()
    screen.open()
    attention = screen.page.get_by_role("region", name="Attention")
    attention.get_by_text("Nothing needs attention.").wait_for()
    screens.fleet.terminate("device-02")
    attention.get_by_text(re.compile("device-02 offline since")).wait_for()
    screen.page.locator(".tile", has_text="Boards online").get_by_text(re.compile("^1 of 2")).wait_for()
    screens.fleet.start_device("device-02")
    attention.get_by_text("Nothing needs attention.").wait_for(timeout=40_000)
    assert screen.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(screens: House, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="needs axe-playwright-python: pip install -e '.[dev]' -c constraints.txt",
    ).Axe()
    screen = screens.open("", color_scheme=scheme)
    found = {}
    for view in VIEWS:
        screen.open(view)
        screen.page.wait_for_function("() => !document.querySelector('main').innerText.includes('Loading')")
        faults = axe.run(screen.page).response["violations"]
        found |= {f"{view}: {fault['id']}": fault["nodes"][0]["html"] for fault in faults}
    assert found == {}


def test_what_is_called_like_markup_stays_text_and_what_a_device_says_of_itself_does_too(screens: House) -> None:
    with Store.open(screens.fleet.database) as store:
        store.add_run(
            run_id="z-evil", name=EVIL, task=EVIL, strategy=EVIL, config={"run": {"name": EVIL}}, seed=1,
            submitted_at=1.0,
        )  # fmt: skip
        store.set_run_status("z-evil", store.get_run("z-evil").status.FAILED, at=2.0, reason=EVIL)
        store.record_event("device-gone", EVIL, at=9e9, device_id=EVIL_DEVICE)
        told, shards = (
            store.get_all_capabilities()["device-01"].facts,
            dict(store.get_all_capabilities()["device-01"].shards),
        )
        store.record_capabilities("device-01", {**told, "model": EVIL, EVIL: "javascript:alert(1)"}, shards, at=9e9)
        store.record_event(
            "request-rejected", f"mqtt from {EVIL}: PUBLISH to {EVIL!r}", at=9e9, device_id="device-01"
        )
    screen = screens.screen()
    page = screen.page
    try:
        for view in ("", "runs", "runs/z-evil", "devices/device-01"):
            screen.open(view)
            if view.startswith("devices"):
                page.locator("summary", has_text="Capabilities").click()
                page.get_by_role("cell", name="<img src=x").wait_for()
                page.get_by_text("mqtt from <img src=x").first.wait_for()
            page.get_by_text("<img src=x").first.wait_for()
            assert page.locator("main img, main script, main a[href^='javascript']").count() == 0
        screen.open()
        page.get_by_text(EVIL_DEVICE).first.wait_for()
        assert "broken" not in page.title()
    finally:
        with Store.open(screens.fleet.database) as store, store.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM events WHERE at > 8e9")
            connection.exec_driver_sql("DELETE FROM capabilities WHERE at > 8e9")
    assert screen.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_view_without_scrolling_sideways_and_readable(screens: House, scheme: str) -> None:
    if not screens.fleet.make_client().get("/edgefl/v1/runs")["rows"]:  # views of a run need one
        screens.fleet.wait_for_run(screens.fleet.submit(run_of("on a phone", 2)))
    screen = screens.open("", width=360, height=740, color_scheme=scheme)
    for view in VIEWS:
        screen.open(view)
        screen.page.wait_for_function("() => !document.querySelector('main').innerText.includes('Loading')")
        width, low = screen.page.evaluate(f"[document.documentElement.scrollWidth, ({LOW_CONTRAST})()]")
        assert width <= 360, view
        assert low == [], view
    assert [text for text in screen.complaints if "404" not in text] == []


# Every text against the ground that it stands on, by the rule of WCAG 2.1 for AA.
LOW_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255).map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 200) return colour;
    }
    return rgba(getComputedStyle(document.documentElement).backgroundColor);
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join('');
    if (!text || !element.getClientRects().length || element.closest('.unseen, .skip, option, noscript')) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(element.namespaceURI.endsWith('svg') ? style.fill : style.color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""  # noqa: E501 one program


def test_the_keyboard_reaches_everything_that_can_be_clicked(screens: House) -> None:
    screen = screens.screen()
    screen.open("fleet")
    page = screen.page
    page.get_by_role("link", name="device-02").wait_for()
    wanted = page.evaluate(
        "[...document.querySelectorAll('a[href], button, input')].filter(e => e.getClientRects().length).length"
    )
    reached, outlines = set(), set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        place, outline = page.evaluate(
            "[[...document.querySelectorAll('*')].indexOf(document.activeElement),"
            " document.activeElement === document.body ? 'nowhere' : "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(place)
        outlines.add(outline)
    assert len(reached) >= wanted
    assert "none" not in outlines, "the focus can be seen everywhere"
    clickable = page.evaluate("[...document.querySelectorAll('[onclick]')].length")
    assert clickable == 0
    heading = page.get_by_role("button", name="Examples")
    heading.focus()
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort='descending']").inner_text().startswith("Examples")
    assert page.get_by_role("button", name="Temp.").count() == 0, "nobody here has a sensor"


def test_keys_alone_skip_ask_zoom_and_hear_what_a_run_does(screens: House) -> None:
    screen = screens.screen()
    screen.open("fleet")
    page, press = screen.page, screen.page.keyboard.press
    page.get_by_role("link", name="device-02").wait_for()
    press("Tab")
    assert page.get_by_role("link", name="Skip to the content").bounding_box()["x"] >= 0
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.get_by_role("heading", level=1).inner_text() == "Fleet", "it is no address of a view"

    page.get_by_role("button", name="Sign in").focus()
    press("Enter")
    page.get_by_role("dialog", name="Sign in").wait_for()
    places = set()
    for _ in range(8):
        press("Tab")
        places.add(page.evaluate("document.activeElement.closest('dialog, header, main')?.localName"))
    assert "dialog" in places
    assert places.isdisjoint({"header", "main"}), "it keeps the focus"
    press("Escape")
    assert page.get_by_role("dialog").count() == 0
    assert page.evaluate("document.activeElement.id") == "sign-in", "it has the focus again"

    screen.sign_in(screens.token)
    run_id = screens.fleet.submit(run_of("by keys", 1_000_000))
    page.locator("#told", has_text="by keys running").wait_for(state="attached")
    page.evaluate(f"location.hash = '#/runs/{run_id}'")
    page.wait_for_function("() => Number(document.querySelector('figure')?.dataset.points) >= 9")
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.focus()
    press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Cancel", "no key ends a run by accident"
    press("Shift+Tab")
    press("Enter")
    page.locator("#told", has_text="by keys stopped").wait_for(state="attached", timeout=30_000)

    curve = page.get_by_role("img", name=re.compile("^Accuracy, accuracy by round"))
    reading = page.locator("figure", has=curve).locator(".reading")
    curve.focus()
    press("Home")
    reading.get_by_text("round 1: global model").wait_for()
    press("+")
    reading.get_by_text(re.compile("shown: 1 to ")).wait_for()
    press("Escape")
    reading.get_by_text(re.compile("^round 1: global model [0-9.]+ %$")).wait_for()
    assert screen.complaints == []


def test_the_page_comes_back_after_its_coordinator(screens: House) -> None:
    screen = screens.screen()
    screen.open("fleet")
    screen.page.locator(".link.live").wait_for()
    screens.fleet.terminate("coordinator")
    screen.page.locator(".link.reconnecting").wait_for()
    screens.fleet.start_coordinator()
    screen.page.locator(".link.live").wait_for(timeout=40_000)
    screens.fleet.wait_for_devices(2)
    screen.page.get_by_role("row", name=re.compile("device-01 online")).wait_for(timeout=30_000)


def test_beyond_loopback_the_page_asks_for_a_token_before_it_shows_anything(
    screens: House, tools: Any, tmp_path: Path
) -> None:
    root = tmp_path / "c"
    fleet = LocalFleet(root=root, devices=())
    where = ("--dir", str(fleet.directory))
    assert (
        tools.as_operator(fleet, "coordinator", "init", *where, "--host", "127.0.0.1", "--port", fleet.port).code == 0
    )
    known = load_operator_file(root / "config" / "edgefl" / "operator.toml")
    process = fleet.start_command(
        ["coordinator", "start", *where, "--host", "0.0.0.0", "--broker-port", str(fleet.broker_port)],
        stdout=subprocess.DEVNULL,
    )
    try:
        fleet._wait_until(fleet._is_answering, "the coordinator to answer")
        screen = screens.screen(port=fleet.port)
        screen.open("fleet")
        screen.page.get_by_text("Who reads this fleet has to sign in.").wait_for()
        screen.page.get_by_role("main").get_by_role("button", name="Sign in").click()
        screen.page.get_by_label("Access token").fill(known.viewer_token)
        screen.page.get_by_role("dialog").get_by_role("button", name="Sign in").click()
        screen.page.get_by_text("No device has joined yet.").wait_for()
        screen.open()
        screen.page.get_by_role("heading", name="Three steps to your first model").wait_for()
        screen.page.get_by_text("Waiting for the first board…").wait_for()
        screen.page.evaluate("location.hash = '#/join'")
        screen.page.get_by_role("button", name="Make a token").click()
        screen.page.get_by_text("This needs the role admin; you have the role viewer.").wait_for()
        kept = "JSON.stringify([Object.keys(localStorage), Object.keys(sessionStorage), document.cookie])"
        assert json.loads(screen.page.evaluate(kept)) == [[], [], ""], "no script can take the session away"
        screen.page.reload()
        screen.page.get_by_role("button", name="Sign out").wait_for()
    finally:
        process.terminate()
        process.wait()
