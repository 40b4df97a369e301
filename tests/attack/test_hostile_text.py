"""Hostile text in every field that a board, a user or a stranger fills, and what of it comes out again."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from requirements import PARTS, needs

from edgefl import __version__
from edgefl.coordinator.brokers.broker import make_client_context
from edgefl.core.protocol import JoinToken, Topic, topic
from edgefl.core.safe_text import is_safe_text
from edgefl.device.enrolment.certificates import create_key, create_signing_request, export_public_key
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.https_client import create_pinned_context

pytestmark = [pytest.mark.attack, pytest.mark.timeout(600)]
PACKAGE_ROOT = Path(__file__).parents[2]
LOUD = (sys.executable, "-m", "edgefl.cli.main", "-vv")
MARKS = (
    "\x1b]0;pwned\x07\x1b[2J", "x\nERROR edgefl: forged", "x\rERROR edgefl: forged", "\x9b31mred", "\x7f\x08\x08",
    "x\x85y", "\u202etxt.exe", "\u2066a\u2069", "a\u200bb\u200d", "\ufeffbom", "a\u2028b\u2029c", "\u3164",
    "t\U000e0041g", '=HYPERLINK("http://evil")', "+1+cmd|'/C calc'!A0", "-2+3", "@SUM(A1)", "\t=1+1",
    "<script>alert(1)</script>",
)  # fmt: skip
ALL = "|".join(MARKS)
FORMULA = re.compile(r"^\s*[=+\-@\uff1d\uff0b\uff0d\uff20](?!\d+(\.\d+)?([eE][+-]?\d+)?$)")
BOARD = "board"


class Attacker:
    """A stranger, a board that has joined, and a user; each sends what it likes."""

    def __init__(self, fleet: LocalFleet) -> None:
        self.fleet, self.num_sent = fleet, 0
        self.trust = create_pinned_context((fleet.directory / "ca.pem").read_bytes())
        self.token = JoinToken.parse(fleet.make_client().post("/edgefl/v1/tokens", {"uses": 100})["token"])
        self.terminal: list[str] = []

    def call(self, method: str, path: str, body: Any = None, *, is_operator: bool = False) -> tuple[int, Any]:
        """Sends a request, each from another address of this machine: those that fail too often are not read."""
        self.num_sent += 1
        source = f"127.0.{1 + self.num_sent // 200}.{1 + self.num_sent % 200}", 0
        headers = {"Content-Type": "application/json"}
        if is_operator:
            headers["Authorization"] = f"Bearer {self.fleet.make_client().token}"
        connection = HTTPSConnection(
            "127.0.0.1", self.fleet.port, context=self.trust, timeout=20, source_address=source
        )
        try:
            connection.request(method, path, None if body is None else json.dumps({"v": 1, **body}), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def join(self, **changes: Any) -> Any:
        key = create_key()
        body = {
            "token_id": self.token.token_id, "secret": self.token.secret, "name": "stranger", "role": "trainer",
            "csr": create_signing_request(key, "stranger").decode(), "public_key": export_public_key(key).decode(),
            "capabilities": {}, "version": __version__, **changes,
        }  # fmt: skip
        status, answer = self.call("POST", "/edgefl/v1/enroll", body)
        return status, answer, key

    def type(self, *words: str) -> str:
        """Runs a command of the fleet's operator and returns what it prints."""
        self.num_sent += 1
        process = self.fleet.start_command(words)
        output, _ = process.communicate(timeout=60)
        self.terminal.append(output.decode())
        return self.terminal[-1]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    environment = {"PYTHONPATH": str(PACKAGE_ROOT), "PYTHONUTF8": "1"}
    root = tmp_path_factory.mktemp("hostile")
    with LocalFleet(root=root, devices=[], environment=environment, program=LOUD, broker="embedded") as running:
        yield running


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, f"did not happen within 30 s: {what}"
        time.sleep(0.05)


def attack_joins(attacker: Attacker) -> None:
    """Requests of strangers, with the marks in each field of a join and in paths; then a board joins with facts."""
    for field in ("token_id", "secret", "name", "role", "csr", "public_key", "version"):
        attacker.join(**{field: ALL})
    for mark in MARKS:
        attacker.join(name=mark)
        attacker.join(version=mark)
        attacker.call("GET", f"/edgefl/v1/devices/{quote(mark)}")
        attacker.call("POST", f"/edgefl/v1/runs/{quote(mark, safe='')}/stop")
        attacker.call("POST", f"/{quote(mark, safe='')}", {"a": mark})


def let_board_in(attacker: Attacker) -> tuple[Path, Path]:
    facts = {"model": ALL, ALL: ALL, "os": MARKS[0], "list": list(MARKS), "deep": {mark: mark for mark in MARKS}}
    capabilities = {"facts": facts, "shards": {ALL: 3, **dict.fromkeys(MARKS, 5)}}
    status, answer, key = attacker.join(name=BOARD, capabilities=capabilities)
    assert status == 200, answer
    folder = attacker.fleet.root / BOARD
    folder.mkdir()
    (folder / "key.pem").write_bytes(key)
    (folder / "cert.pem").write_text(json.loads(answer)["certificate"])
    return folder / "cert.pem", folder / "key.pem"


def attack_mqtt(attacker: Attacker, cert: Path, key: Path) -> None:
    """Every message of a board, with the marks in each of its texts."""
    fleet, is_in = attacker.fleet, []
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=BOARD)
    client.tls_set_context(make_client_context(TlsFiles(ca=fleet.directory / "ca.pem", cert=cert, key=key)))
    client.on_connect = lambda _c, _d, _f, reason, _p: is_in.append(reason)
    client.connect("127.0.0.1", fleet.broker_port)
    client.loop_start()
    wait_for(lambda: is_in, "the board to be let in")
    heartbeat = {"v": 1, "seq": 1, "session_no": 1, "uptime_s": 1.0, "temperature_c": 50.0, "boot_id": "b"}
    messages: list[tuple[Topic, Any]] = [
        (Topic.STATUS, {"v": 1, "state": "online", "boot_id": "b", "session_no": 1, "version": ALL, "board": ALL}),
        (Topic.CAPABILITIES, {"v": 1, "facts": {"model": ALL, ALL: [ALL], "shard_errors": {ALL: ALL}},
                              "shards": {ALL: 4}}),
        (Topic.HEARTBEAT, {**heartbeat, "throttled": ALL, "run": ALL}),
    ]  # fmt: skip
    for number, mark in enumerate(MARKS, 2):
        report = {"id": mark, "state": mark, "reason": mark, "version": mark}
        messages += [
            (Topic.STATUS, {"v": 1, "state": mark, "boot_id": mark, "session_no": number, "version": mark}),
            (Topic.HEARTBEAT, {**heartbeat, "seq": number, "throttled": mark, "run": mark, "assignment": mark,
                               "holding": [mark], "model": mark, "deployment": report, "installation": report}),
            (Topic.PROGRESS, {"v": 1, "assignment": mark, "iteration": 1, "seconds_per_iteration": 1.0}),
            (Topic.ANSWER, {"v": 1, "id": mark, "error": mark, "content": {mark: mark}}),
            (Topic.CAPABILITIES, {"v": 1, "facts": {"os": mark, "shard_errors": {mark: mark}}, "shards": {mark: 2}}),
        ]  # fmt: skip
    for kind, value in messages:
        attacker.num_sent += 1
        client.publish(topic("fleet", BOARD, kind), json.dumps(value), qos=1).wait_for_publish(20)
    for mark in MARKS:
        attacker.num_sent += 1
        client.publish(topic("fleet", BOARD, Topic.HEARTBEAT), mark.encode(errors="replace"), qos=1)
    wait_for(lambda: len(fleet.list_history("heartbeats")) >= len(MARKS), "the heartbeats to be kept")
    client.disconnect()
    client.loop_stop()


def attack_as_user(attacker: Attacker, tmp_path: Path) -> None:
    """Run files, roll-outs, tokens and questions of a user who may act."""
    for mark in (*MARKS, ALL):
        for section in ({"run": {"task": "noop", "name": mark}}, {"run": {"task": mark}}, {mark: {mark: mark}},
                        {"run": {"task": "noop"}, "strategy": {"name": mark}},
                        {"run": {"task": "noop", "rounds": 1}, "compression": {"up": mark}}):  # fmt: skip
            attacker.call("POST", "/edgefl/v1/runs", {"config": section}, is_operator=True)
        attacker.call("POST", "/edgefl/v1/run-files", {"toml": mark}, is_operator=True)
        for kind in ("deployments", "installations"):
            body = {"model": mark, "bundle": mark, "devices": [mark], "sha256": mark}
            attacker.call("POST", f"/edgefl/v1/{kind}", body, is_operator=True)
            attacker.call("POST", f"/edgefl/v1/{kind}/{quote(mark, safe='')}/stop", is_operator=True)
        body = {"groups": [mark], "role": mark, "ttl": mark}
        attacker.call("POST", "/edgefl/v1/tokens", body, is_operator=True)
        attacker.call("GET", f"/edgefl/v1/history/updates?run={quote(mark)}&device={quote(mark)}", is_operator=True)
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\ntask = "noop"\nname = {json.dumps(ALL)}\n')
    attacker.type("run", "submit", str(file))
    attacker.type("devices", "show", ALL.replace("/", ""))
    attacker.type("run", "show", ALL.replace("/", ""))
    attacker.type("device", "join", "--token", ALL)
    good = tmp_path / "good.toml"
    good.write_text('[run]\ntask = "noop"\nname = "Läufe 7"\nrounds = 1\n')
    attacker.type("run", "submit", str(good))


def read_outputs(attacker: Attacker, tmp_path: Path) -> dict[str, str]:
    """Everything that shows what was sent: log, terminal in each format, exported files, metrics."""
    fleet = attacker.fleet
    texts = {"log": (fleet.root / "coordinator.log").read_bytes().decode("utf-8", "replace")}
    commands = [["devices", "list"], ["devices", "show", BOARD], ["run", "list"], ["run", "show", "latest"],
                ["doctor"], *(["history", kind] for kind in ("events", "devices", "heartbeats", "runs"))]  # fmt: skip
    for words in commands:
        for style in ("table", "json", "csv"):
            texts[f"{' '.join(words)} {style}"] = attacker.type(*words, "--format", style)
    attacker.type("history", "export", str(tmp_path / "export"))
    for path in (tmp_path / "export").rglob("*.*"):
        texts[f"export {path.name}"] = path.read_bytes().decode("utf-8", "replace")
    status, metrics = attacker.call("GET", "/metrics", is_operator=True)
    assert status == 200
    return texts | {"metrics": metrics.decode(), "errors of commands": "\n".join(attacker.terminal)}


def find_unsafe(name: str, text: str) -> list[str]:
    lines = text.split("\n")
    found = [f"{name}: {line!a:.120}" for line in lines if not is_safe_text(line)]
    if "csv" in name:
        cells = [cell for row in csv.reader(lines) for cell in row]
        found += [f"{name}: the cell {cell!a:.80}" for cell in cells if FORMULA.match(cell)]
    if name == "log":
        found += [f"a forged line: {line:.80}" for line in lines if line.startswith("ERROR edgefl: forged")]
    return found


@needs("chromium")
def test_nothing_that_strangers_boards_or_users_write_is_shown_raw(
    fleet: LocalFleet, tmp_path: Path, attack_table: Any
) -> None:
    attacker = Attacker(fleet)
    attack_joins(attacker)
    attack_mqtt(attacker, *let_board_in(attacker))
    attack_as_user(attacker, tmp_path)
    texts = read_outputs(attacker, tmp_path) | read_page(fleet)
    assert r"\x1b" in texts["log"], "the marks reached the log"
    assert r"\u202e" in texts["history heartbeats table"] + texts["devices show board table"]
    assert r"\u{202e}" in texts["page devices/board"], "the marks reached the page"
    assert "Traceback" not in texts["log"]
    found = [line for name, text in texts.items() for line in find_unsafe(name, text)]
    attack_table.add(
        "control characters, formula cells, bidirectional marks in every name",
        "none raw in log, CSV, terminal, page",
        f"{len(found)} raw in {sum(map(len, texts.values())):,} characters of {len(texts)} outputs; "
        f"{attacker.num_sent} requests, messages and commands with {len(MARKS)} marks",
    )
    assert found == [], "\n".join(found[:20])


def read_page(fleet: LocalFleet) -> dict[str, str]:
    """The text, titles and labels of each view."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 only where there is a browser

    script = """() => [document.title, ...[...document.querySelectorAll('*')].flatMap((e) =>
        [...[...e.attributes].map((a) => a.value), ...[...e.childNodes].map((n) => n.nodeValue ?? '')])
        ].join('\\n')"""
    texts = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PARTS["chromium"].path(), args=["--no-sandbox"])
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(20_000)
        alerts: list[str] = []
        page.on("dialog", lambda dialog: alerts.append(dialog.message) or dialog.dismiss())
        for view in ("", "fleet", f"devices/{BOARD}", "runs", f"devices/{quote(MARKS[6])}"):
            page.goto(f"https://127.0.0.1:{fleet.port}/#/{view}")
            page.reload()
            page.wait_for_selector("main h1, main h2, main .error", state="attached")
            page.wait_for_function("document.getElementById('link').textContent === 'live'")
            if view == f"devices/{BOARD}":
                page.wait_for_function(r"document.body.innerText.includes('\\u{202e}')")
            texts[f"page {view}"] = page.evaluate(script).replace("\xa0", " ")  # its own, in empty cells
        browser.close()
    assert alerts == []
    return texts
