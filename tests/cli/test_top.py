"""`edgefl top`: what it shows in a terminal of 80 by 24, of made answers and of a real coordinator."""

import asyncio
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from fcntl import ioctl

import pytest

from edgefl.cli.fleet.top import FleetReader, compute_seconds_left, draw_curve, format_duration
from edgefl.cli.fleet.top_app import Details, Rows, TopApp
from edgefl.core.errors import NetworkError, NotAllowedError
from edgefl.simulation.local_fleet import LocalFleet, partition_devices

NOW = 1_800_000_000.0
DEADLINE_S = 60.0


def make_device(name="pi-01", **facts):
    return {"device_id": name, "presence": "online", "silent_s": 1.2, "temperature_c": None, "problem": None, **facts}


def make_run(run_id="r1", **facts):
    return {
        "run_id": run_id, "name": f"run-{run_id}", "task": "digits", "strategy": "fedavg", "status": "running",
        "reason": None, "submitted_at": NOW, "rounds": 10, "accuracy": 0.91, "config": {"run": {"rounds": 30}},
        **facts,
    }  # fmt: skip


class FakeClient:
    """Answers as a coordinator would; `down` is the error that it raises in its place."""

    def __init__(self, devices=(), runs=(), events=(), acts=True):
        self.devices, self.runs, self.events, self.acts = list(devices), list(runs), list(events), acts
        self.down, self.paths, self.posted = None, [], []

    def get(self, path, params=None):
        self.paths.append(path)
        if self.down is not None:
            raise self.down
        if path.endswith("/access"):
            return {"fleet": "lab", "role": "operator" if self.acts else "viewer", "acts": self.acts}
        if path.endswith("/curve"):
            rounds = ({"round": n, "closed_at": NOW + 2 * n, "seconds": 2.0, "accuracy": n / 20, "loss": 1 / (n + 1)}
                      for n in range(10))  # fmt: skip
            return {"rows": list(rounds)}
        if path.endswith("/spans"):
            return {"rows": [{"device_id": "pi-01", "compute_s": 1.0, "send_s": 0.5, "wait_s": 0.25}]}
        if path.endswith("/logs"):
            return {"rows": [{"at": NOW, "level": "INFO", "message": "trained \x1b[31mwell"}]}
        rows = {"/edgefl/v1/devices": self.devices, "/edgefl/v1/history/runs": self.runs,
                "/edgefl/v1/history/events": self.events}.get(path)  # fmt: skip
        if rows is not None:
            return {"rows": rows[-(params or {}).get("limit", len(rows) + 1) :]}
        name = path.rpartition("/")[2]
        return next(row for row in [*self.runs, *self.devices] if name in (row.get("run_id"), row.get("device_id")))

    def post(self, path, body=None):
        self.posted.append(path)
        return {}


def look(client, script, size=(80, 24)):
    """Runs the application and a script of what its user does; returns the screen's lines after each step."""
    screens = []

    async def use():
        app = TopApp(client, "https://127.0.0.1:8000", interval_s=DEADLINE_S)
        async with app.run_test(size=size) as pilot:
            await wait_for(pilot, lambda: app.snapshot is not None or client.down)
            await pilot.pause()
            for step in script:
                await step(app, pilot)
                screens.append([*list_lines(app), *(note.message for note in app._notifications)])

    asyncio.run(use())
    return screens


def list_lines(app):
    return ["".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips()]


async def wait_for(pilot, is_true):
    ends_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < ends_s
        await pilot.pause(0.02)


async def refresh(app, pilot, is_true):
    """Has the next answers read at once, until they show."""
    app._poller.refresh()
    await wait_for(pilot, is_true)
    await pilot.pause()


def press(*keys):
    async def step(_app, pilot):
        await pilot.press(*keys)
        await pilot.pause()

    return step


def test_boards_with_problems_come_first_and_the_footer_names_the_keys():
    hot = make_device("pi-02", temperature_c=83.0, throttled="throttled", iteration=7, run="r1")
    ill = make_device("pi-09", problem="shard of cifar: No module named 'cifar'")
    away = make_device("pi-05", presence="offline", silent_s=None, last_seen_at=NOW)
    evaluator = make_device("coordinator-evaluator")
    (lines,) = look(FakeClient([make_device(), hot, away, evaluator, ill]), [press("1")])
    text = "\n".join(lines)
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    boards = [line.split()[0] for line in lines if " pi-0" in line]
    assert boards == ["pi-09", "pi-05", "pi-01", "pi-02"]
    assert "coordinator-evaluator" not in text
    assert "3 of 4 boards online" in text
    assert re.search(r"pi-02 +online +83 °C thrott… +iteration 7 +1.2 s", text)
    assert re.search(r"pi-09 .* shard of", text)
    for key in ("1-4 Views", "/ Filter", "⏎ Details", "p Pause", "s Stop", "q Quit"):
        assert key in lines[-1]


def test_the_run_view_has_its_curves_its_time_left_and_what_it_waits_for():
    waiting = make_run(status="waiting", reason="waits for 8 more boards: 2 of 10 are ready")
    working = make_device(run="r1", iteration=7)
    running, stalled = (
        "\n".join(look(FakeClient([working], [run]), [press("2")])[0]) for run in (make_run(), waiting)
    )
    assert "round 10 of 30 · 2 s each · 40 s left" in running
    assert "accuracy 45.00 %, best 45.00 %" in running
    assert "█" in running
    assert "computing now: pi-01 (iteration 7)" in running
    assert re.search(r"pi-01 +━+ 1.8 s", running)
    assert "waits for 8 more boards: 2 of 10 are ready" in stalled
    assert "left" not in stalled


def test_the_filter_keeps_the_lines_that_have_a_text_and_escape_gives_all_back():
    events = [{"at": NOW, "kind": "device-online", "device_id": "pi-01", "run_id": None, "message": "hello"}]
    client = FakeClient([make_device(f"pi-{n:02d}") for n in range(1, 4)], events=events)
    filtered, elsewhere, whole = look(client, [press("slash", *"PI-03", "enter"), press("3"), press("1", "escape")])
    assert [line.split()[0] for line in filtered if " pi-0" in line] == ["pi-03"]
    assert "No events." in "\n".join(elsewhere)
    assert len([line for line in whole if " pi-0" in line]) == 3


def test_what_boards_and_users_write_is_shown_as_text_and_never_obeyed():
    device = make_device("[red]x[/]\x1b[2J", problem="[link=evil]\x07\u202e")
    event = {"at": NOW, "kind": "k\x1b[2J", "device_id": "[b]d", "run_id": None, "message": "[blink]\x1b]0;t\x07"}
    run = make_run(name="[red]\x1b[1m", status="failed", reason="\x1b[5m[bold]")
    screens = look(
        FakeClient([device], [run], [event]), [press("1"), press("2"), press("3"), press("4"), press("enter")]
    )
    for lines in screens:
        assert not re.search("[\x00-\x1f\x7f\u202e]", "".join(lines))
    fleet, course, events, problems, _ = ("\n".join(lines) for lines in screens)
    assert "[red]x[/]\\x1b[" in fleet
    assert "[red]\\x1b[1m" in course
    assert "\\x1b[5m[bold]" in course
    assert "[blink]\\x1b]0;t\\x07" in events
    assert "[link=evil]\\x07\\u202e" in problems


def test_an_absent_coordinator_is_said_with_its_time_and_the_view_goes_on_when_it_is_back():
    client = FakeClient([make_device()])

    async def go_away(app, pilot):
        client.down = NetworkError("127.0.0.1:8000 cannot be reached: Connection refused; the operator file is x")
        await refresh(app, pilot, lambda: app.query_one("#head").has_class("failed"))

    async def come_back(app, pilot):
        client.down, client.devices = None, [make_device("pi-77")]
        await refresh(app, pilot, lambda: not app.query_one("#head").has_class("failed"))

    away, back = look(client, [go_away, come_back])
    assert re.search(
        r"127\.0\.0\.1:8000 not reachable since \d\d:\d\d:\d\d UTC, retrying: cannot be reached", away[0]
    )
    assert any("pi-01" in line for line in away), "what was seen last stays"
    assert any("pi-77" in line for line in back)


def test_a_run_is_paused_resumed_and_after_a_yes_stopped():
    client = FakeClient([make_device()], [make_run()])

    async def end(app, pilot):
        client.runs = [make_run(status="stopped")]
        await refresh(app, pilot, lambda: app.snapshot.run["status"] == "stopped")

    async def wait_for_posts(_app, pilot):
        await wait_for(pilot, lambda: len(client.posted) == 3)

    script = [press("2", "p"), press("s"), press("n"), press("s", "y"), end, press("p"), press("s"), wait_for_posts]
    _, asked, *_ = look(client, script)
    assert re.search(
        r"Stop run-r1 in round 10\?[ │\n]+Its model|Stop run-r1 in round 10\? Its model", "\n".join(asked)
    )
    stop, resume = "/edgefl/v1/runs/r1/stop", "/edgefl/v1/runs/r1/resume"
    assert client.posted == [stop, stop, resume], (
        "paused; not stopped by a no; stopped; resumed; over, nothing to stop"
    )


def test_a_viewer_looks_and_is_told_which_role_an_action_needs():
    client = FakeClient([make_device()], [make_run()], acts=False)
    paused, stopped = look(client, [press("2", "p"), press("s")])
    said = "this needs the role operator; you have viewer"
    assert (paused.count(said), stopped.count(said)) == (1, 2)
    assert client.posted == []


def test_enter_shows_what_is_known_of_a_board_with_the_end_of_its_log():
    client = FakeClient([make_device(capabilities={"cores": 4})])

    async def open_details(app, pilot):
        await pilot.press("enter")
        await wait_for(pilot, lambda: isinstance(app.screen, Details))
        await wait_for(pilot, lambda: any("trained" in line for line in list_lines(app)))

    opened, closed = look(client, [open_details, press("escape")])
    text = "\n".join(opened)
    assert re.search(r"capabilities\.cores +4", text)
    assert "trained \\x1b[31mwell" in text
    assert "Board" in "\n".join(closed)


def test_a_refusal_by_the_coordinator_is_shown_as_it_is():
    client = FakeClient([make_device()], [make_run()])

    def refuse(_path, _body=None):
        raise NotAllowedError("the access token of ada is revoked")

    client.post = refuse

    async def wait_for_answer(app, pilot):
        await pilot.press("2", "p")
        await wait_for(pilot, lambda: app._notifications)

    (lines,) = look(client, [wait_for_answer])
    assert "the access token of ada is revoked" in lines


def test_a_thousand_boards_of_which_few_change_are_redrawn_cell_by_cell(monkeypatch):
    devices = [make_device(f"pi-{n:04d}") for n in range(1000)]
    client, built, changed = FakeClient(devices), [], []
    add, update = Rows.add_row, Rows.update_cell
    monkeypatch.setattr(Rows, "add_row", lambda self, *a, **k: (built.append(1), add(self, *a, **k))[1])
    monkeypatch.setattr(Rows, "update_cell", lambda self, *a, **k: (changed.append(a[0]), update(self, *a, **k))[1])

    async def heat(app, pilot):
        built.clear()
        client.devices = [{**row, "temperature_c": 60.0} for row in devices]
        await refresh(app, pilot, lambda: any("60 °C" in line for line in list_lines(app)))

    (lines,) = look(client, [heat])
    assert "1000 of 1000 boards online" in lines[0]
    assert not built
    assert 10 < len(set(changed)) < 40, "those in sight"


def test_a_snapshot_asks_for_as_much_of_a_long_history_as_of_a_short_one():
    client = FakeClient(runs=[make_run(f"r{n}", status="finished") for n in range(100)])
    reader = FleetReader(client)
    snapshot = reader.read()
    first = len(client.paths)
    assert len(snapshot.runs) == 20
    assert first < 10
    reader.read()
    assert len(client.paths) - first == first - 2, "the curves of a run that stands still are not asked for again"


def test_a_curve_is_as_wide_and_high_as_it_should_be_and_its_ends_are_right():
    assert draw_curve([0.0, 1.0], 4, 2) == ["  ██", "▁▁██"]
    assert draw_curve([], 3, 2) == ["   ", "   "]
    assert draw_curve([5.0] * 9, 3, 1) == ["▁▁▁"]
    assert [format_duration(s) for s in (0.123, 42, 60, 3725, 90000)] == [
        "0.12 s",
        "42 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert compute_seconds_left(make_run(config={"run": {}}), [{"round": 0, "closed_at": 1.0}] * 2) is None


def test_without_a_terminal_it_says_what_to_use_in_its_place(refused, monkeypatch):
    refused(["top"], 2, "edgefl devices list, edgefl run watch")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    refused(["top"], 2, "TERM must not be dumb")


def test_without_textual_it_names_the_extra(refused, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "edgefl.cli.fleet.top_app")
    monkeypatch.setitem(sys.modules, "textual.app", None)
    refused(["top"], 8, "edgefl-fleet[coordinator]")


class Terminal:
    """A program in a terminal of 80 by 24."""

    def __init__(self, words, environment):
        self._end, other = pty.openpty()
        ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self.seen = ""

    def wait_for(self, pattern):
        ends_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.seen):
            assert time.monotonic() < ends_s, self.seen[-3000:]
            self._read()

    def _read(self):
        if select.select([self._end], [], [], 0.2)[0]:
            self.seen += os.read(self._end, 65536).decode(errors="replace")

    def write(self, keys):
        self.seen = ""
        os.write(self._end, keys.encode())

    def close(self):
        ends_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < ends_s:
            with suppress(OSError):  # the last program of the terminal has ended
                self._read()
        self.process.kill()
        os.close(self._end)
        return self.process.wait()


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_terminal_shows_a_real_fleet_and_survives_its_coordinator_s_restart(tmp_path):
    devices, test_shards = partition_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    with LocalFleet(root=tmp_path, devices=devices, test_shards=test_shards) as fleet:
        environment = {**os.environ, "XDG_CONFIG_HOME": str(fleet.root / "config"), "TERM": "xterm-256color"}
        environment["COLORTERM"] = "truecolor"
        words = [sys.executable, "-m", "edgefl", "top"]
        for variables, has_colours in (({"NO_COLOR": "1"}, False), ({}, True)):
            terminal = Terminal(words, environment | variables)
            try:
                terminal.wait_for("device-02")
                colours = re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", terminal.seen)
                assert len(colours) > 10
                assert any(len(set(parts)) > 1 for parts in colours) is has_colours, "else greys alone"
                if has_colours:
                    terminal.write("2")
                    terminal.wait_for("No run yet")
                    fleet.make_client().post("/edgefl/v1/runs", {"config": {"run": {"task": "digits", "rounds": 3}}})
                    terminal.wait_for("finished")
                    fleet.kill("coordinator")
                    terminal.wait_for("not reachable since")
                    terminal.seen = ""
                    fleet.start_coordinator()
                    terminal.wait_for("edgefl top")
            finally:
                terminal.write("q")
                assert terminal.close() == 0
