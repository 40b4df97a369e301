"""Textual application of `edgefl top`: four views, a filter, details, and stopping of runs.

All that comes from boards, users and the network is shown as `rich.text.Text` of escaped characters, never as markup.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from edgefl.cli.fleet.top import (
    INTERVAL_S,
    ApiClient,
    FleetPoller,
    FleetReader,
    FleetSnapshot,
    compute_seconds_left,
    draw_bar,
    draw_curve,
    format_duration,
    get_goal,
    list_facts,
    matches,
)
from edgefl.cli.output import format_value
from edgefl.cli.sources import make_path
from edgefl.client.fleet import TERMINAL_STATUSES
from edgefl.core.errors import EdgeflError
from edgefl.core.safe_text import escape_text

if TYPE_CHECKING:
    from edgefl.core.types import Json

VIEWS = ("fleet", "run", "events", "attention")
STYLES = {
    "online": "green", "running": "green", "finished": "green", "late": "yellow", "draining": "yellow",
    "waiting": "yellow", "paused": "yellow", "compiling": "cyan", "queued": "cyan", "stopping": "yellow",
    "offline": "dim", "stopped": "dim", "never seen": "dim", "gone": "bold red", "failed": "bold red",
    "interrupted": "bold red",
    "bad": "bold red", "warn": "yellow",
}  # fmt: skip
HOT_C = 80.0
ALARMS = ("gone", "failed", "rejected", "refused", "diverg", "lost", "problem")
COLUMNS = {
    "fleet": (("Board", 15), ("State", 10), ("Health", 13), ("Work", 13), ("Seen", 6), ("Problem", None)),
    "runs": (("Run", None), ("State", 11), ("Round", 10), ("Accuracy", 8), ("Submitted (UTC)", 19)),
    "attention": (("Board or run", 22), ("What", None)),
}  # fmt: skip
CURVE_LINES, MAX_SPANS = 4, 4


def make_text(value: object, style: str = "", *, max_chars: int | None = None) -> Text:
    """Returns a text without control characters and markup, cut to a width."""
    text = Text(escape_text(str(value)), style=style, no_wrap=True, end="")
    if max_chars is not None:
        text.truncate(max_chars, overflow="ellipsis")
    return text


class Question(ModalScreen[bool]):
    """A question that y answers with yes, and every other key with no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Static { width: 60; height: auto; border: round $warning; padding: 1 2; background: $surface; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(
            Text.assemble(escape_text(self._question), "\n\n", ("y", "bold"), " yes   ", ("n", "bold"), " no")
        )

    def on_key(self, event: Any) -> None:
        event.stop()
        self.dismiss(event.key == "y")


class Details(ModalScreen[None]):
    """What is known of a board or a run; loaded in a thread, since a board may answer slowly."""

    DEFAULT_CSS = """
    Details { align: center middle; }
    Details > VerticalScroll { width: 94%; height: 90%; border: round $accent; padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Close")]

    def __init__(self, title: str, load: Callable[[], Iterable[Text]]) -> None:
        super().__init__()
        self._title, self._load = title, load

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = make_text(self._title, max_chars=60)
            scroll.border_subtitle = "Esc closes"
            yield Static("Loading…")

    def on_mount(self) -> None:
        threading.Thread(target=self._show, daemon=True).start()

    def _show(self) -> None:
        try:
            text = Text("\n").join(self._load())
        except (EdgeflError, KeyError, TypeError, ValueError) as error:
            text = make_text(error, "yellow")
        text.no_wrap = False
        if self.is_attached:
            self.app.call_from_thread(self.query_one(Static).update, text)


class Rows(DataTable[Text]):
    """Table whose cells change in place, and which is only built anew when other rows come or their order changes.

    Args:
        columns: title and width of each; one without a width gets what is left.
        wraps: whether a row may have several lines.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details", key_display="⏎")]

    def __init__(self, columns: Sequence[tuple[str, int | None]], *, name: str, wraps: bool = False) -> None:
        super().__init__(id=name, cursor_type="row")
        self._titles, self._wraps, self._visible = columns, wraps, dict[str, list[Text]]()

    def on_mount(self) -> None:
        for title, width in self._titles:
            self.add_column(title, width=width or self._compute_rest(), key=title)

    def on_resize(self) -> None:
        for column, (_, width) in zip(self.ordered_columns, self._titles, strict=False):
            column.width = width or self._compute_rest()
        self.refresh(layout=True)

    def _compute_rest(self) -> int:
        taken = sum((width or 0) + 2 * self.cell_padding for _, width in self._titles)
        return max(8, (self.size.width or self.app.size.width) - taken - 1)

    def show(self, rows: dict[str, list[Text]]) -> None:
        """Shows rows by their key, in order; of the rows that stay, those in sight are brought up to date."""
        if list(rows) != list(self._visible):
            chosen = self.selected
            self.clear()
            for key, cells in rows.items():
                self.add_row(*cells, key=key, height=None if self._wraps else 1)
            if chosen in rows:
                self.move_cursor(row=list(rows).index(chosen), animate=False)
            self._visible = rows
            return
        first = max(0, int(self.scroll_y) - 1)
        for key in list(rows)[first : first + self.size.height + 1] if not self._wraps else rows:
            for (title, _), cell, previous in zip(self._titles, rows[key], self._visible[key], strict=True):
                if (cell.plain, cell.style) != (previous.plain, previous.style):
                    self.update_cell(key, title, cell)
            self._visible[key] = rows[key]

    @property
    def selected(self) -> str | None:
        """Key of the row under the cursor."""
        keys = list(self._visible)
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None


class TopApp(App[None]):
    """The terminal view of a fleet.

    Args:
        client: of the coordinator's API.
        address: of the coordinator, for people.
        interval_s: between two snapshots.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #head { height: 1; background: $primary-background; padding: 0 1; }
    #head.failed { background: $error; color: $text; text-style: bold; }
    #summary, #progress { height: auto; padding: 0 1; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.visible { display: block; }
    TabPane { padding: 0; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; }
    DataTable { height: 1fr; background: $background; overflow-x: hidden; }
    #runs { min-height: 3; }
    #log { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show('{view}')", "Views", key_display="1-4", show=number == 1)
            for number, view in enumerate(VIEWS, 1)
        ),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("p", "pause", "Pause/resume run"),
        Binding("s", "stop", "Stop run"),
        Binding("escape", "unfilter", "No filter", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, client: ApiClient, address: str, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self._client, self._address, self._filter = client, address, ""
        self.snapshot: FleetSnapshot | None = None
        self._reader = FleetReader(client)
        self._poller = FleetPoller(
            self._reader,
            lambda snapshot: self._call(self.update, snapshot),
            lambda error, since: self._call(self.fail, error, since),
            interval_s=interval_s,
        )

    def compose(self) -> ComposeResult:
        yield Static("connecting…", id="head")
        with TabbedContent(initial="fleet"):
            with TabPane("1 Fleet", id="fleet"):
                yield Static(id="summary")
                yield Rows(COLUMNS["fleet"], name="boards")
            with TabPane("2 Run", id="run"), Vertical():
                yield Static(id="progress")
                yield Rows(COLUMNS["runs"], name="runs")
            with TabPane("3 Events", id="events"), VerticalScroll(id="log"):
                yield Static(id="lines")
            with TabPane("4 Attention", id="attention"):
                yield Rows(COLUMNS["attention"], name="problems", wraps=True)
        yield Input(placeholder="show only lines with …", id="filter", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.title = "edgefl top"
        self.query_one("#boards").focus()
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.stop()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function in the application's thread; nothing where it ends."""
        if self.is_running:
            self.call_from_thread(function, *arguments)

    def update(self, snapshot: FleetSnapshot) -> None:
        """Shows a snapshot."""
        self.snapshot = snapshot
        online = sum(row["presence"] == "online" for row in snapshot.devices)
        role = snapshot.access.get("role") or "nobody"
        head = self.query_one("#head", Static)
        head.remove_class("failed")
        head.update(
            Text.assemble(
                ("edgefl top  ", "bold"), make_text(snapshot.access.get("fleet", ""), "bold cyan", max_chars=20),
                f"  {online} of {len(snapshot.devices)} boards online  ",
                make_text(self._address.removeprefix("https://"), "dim", max_chars=24), f"  as {role}  ",
                time.strftime("%H:%M:%S UTC", time.gmtime()),
            )
        )  # fmt: skip
        self._draw()

    def fail(self, error: Exception, since: float) -> None:
        """Says that no snapshot comes, and goes on showing the last one."""
        at = time.strftime("%H:%M:%S", time.gmtime(since))
        head = self.query_one("#head", Static)
        head.add_class("failed")
        address = self._address.removeprefix("https://")
        reason = str(error).partition("; the operator file")[0].removeprefix(f"{address} ")
        head.update(make_text(f"{address} not reachable since {at} UTC, retrying: {reason}"))

    def _draw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        self.query_one("#summary", Static).update(format_summary(snapshot.devices))
        self._show_rows("#boards", make_fleet_rows(snapshot.devices))
        width = max(40, self.size.width - 2)
        self.query_one("#progress", Static).update(format_run(snapshot, width))
        self._show_rows("#runs", make_run_rows(snapshot.runs))
        self._show_rows("#problems", make_attention_rows(snapshot.attention))
        count = len(snapshot.attention)
        self.query_one(TabbedContent).get_tab("attention").label = (
            f"4 Attention ({count})" if count else "4 Attention"
        )
        log = self.query_one("#log", VerticalScroll)
        is_at_end = log.scroll_y >= log.max_scroll_y - 1
        lines = [line for line in map(format_event, snapshot.events) if matches([line.plain], self._filter)]
        self.query_one("#lines", Static).update(Text("\n").join(lines) if lines else Text("No events.", "dim"))
        if is_at_end:
            log.scroll_end(animate=False)

    def _show_rows(self, name: str, rows: dict[str, list[Text]]) -> None:
        visible = {key: cells for key, cells in rows.items() if matches([cell.plain for cell in cells], self._filter)}
        self.query_one(name, Rows).show(visible)

    def on_resize(self) -> None:
        self._draw()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        table = event.data_table
        if table.id == "runs" and isinstance(table, Rows) and table.has_focus and table.selected is not None:
            self._reader.selected_run = table.selected
            self._poller.refresh()

    def on_data_table_row_selected(self) -> None:
        self.action_details()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value.strip()
        self._draw()

    def on_input_submitted(self) -> None:
        self._focus_view()

    def action_show(self, view: str) -> None:
        self.query_one(TabbedContent).active = view
        self._focus_view()

    def _focus_view(self) -> None:
        view = self.query_one(TabbedContent).active
        self.query_one({"fleet": "#boards", "run": "#runs", "events": "#log"}.get(view, "#problems")).focus()
        self.query_one("#filter").set_class(bool(self._filter), "visible")

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("visible")
        field.focus()

    def action_unfilter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._filter = ""
        self._focus_view()
        self._draw()

    def action_details(self) -> None:
        """Shows what is known of the row under the cursor."""
        view, key = self.query_one(TabbedContent).active, None
        if view != "events":
            name = {"fleet": "#boards", "run": "#runs"}.get(view, "#problems")
            key = self.query_one(name, Rows).selected
        if key is None or self.snapshot is None:
            return
        if view == "attention":
            row = self.snapshot.attention[int(key)]
            view, key = ("fleet", row.get("device_id")) if row.get("device_id") else ("run", row.get("run_id"))
        if key:
            load = self._read_board if view == "fleet" else self._read_run
            self.push_screen(Details(str(key), lambda name=str(key): load(name)))  # type: ignore[misc]

    def _read_board(self, device: str) -> Iterable[Text]:
        """Yields a board's facts and the end of its log, which comes from the board itself."""
        path = make_path("devices", device)
        yield from _format_facts(self._client.get(path))
        yield Text("\nits log, the newest last", "bold")
        try:
            rows = self._client.get(f"{path}/logs", {"since": time.time() - 86400})["rows"]
        except EdgeflError as error:
            yield make_text(error, "yellow")
            return
        for row in rows[-30:]:
            at = time.strftime("%H:%M:%S", time.gmtime(row["at"]))
            yield Text.assemble((f"{at} {row['level']!s:<8.8}", "dim"), make_text(row["message"]))

    def _read_run(self, run: str) -> Iterable[Text]:
        return _format_facts(self._client.get(make_path("runs", run)))

    def _find_run(self) -> Json | None:
        return None if self.snapshot is None else self.snapshot.run

    def _can_act(self) -> bool:
        """Returns whether this user may change runs; says which role is needed where not."""
        access = self.snapshot.access if self.snapshot is not None else {}
        if not access.get("acts"):
            role = escape_text(str(access.get("role") or "no role"))
            self._say(f"this needs the role operator; you have {role}", severity="warning")
            return False
        return True

    def _say(self, message: object, *, severity: Any = "information") -> None:
        self.notify(escape_text(str(message)), severity=severity, markup=False, timeout=6)

    def action_pause(self) -> None:
        """Stops the shown run where it is, or lets a stopped one go on from there."""
        run = self._find_run()
        if run is None or not self._can_act():
            return
        if run["status"] in {"stopped", "interrupted"}:
            self._post(run, "resume", "goes on")
        elif run["status"] in TERMINAL_STATUSES:
            self._say(f"{run['name']} is {run['status']}")
        else:
            self._post(run, "stop", "pauses after what is in flight; p lets it go on")

    def action_stop(self) -> None:
        """Ends the shown run, after a question."""
        run = self._find_run()
        if run is None or not self._can_act():
            return
        if run["status"] in TERMINAL_STATUSES:
            self._say(f"{run['name']} is {run['status']}")
            return

        def on_answer(is_yes: bool | None) -> None:
            if is_yes:
                self._post(run, "stop", "ends after what is in flight")

        question = f"Stop {run['name']} in round {run['rounds']}? Its model and its history stay."
        self.push_screen(Question(question), on_answer)

    def _post(self, run: Json, action: str, outcome: str) -> None:
        def post() -> None:
            try:
                self._client.post(f"{make_path('runs', run['run_id'])}/{action}")
            except EdgeflError as error:
                self._call(self._say, error)
            else:
                self._call(self._say, f"{run['name']} {outcome}")
            self._poller.refresh()

        threading.Thread(target=post, daemon=True).start()


def _format_facts(row: Json) -> Iterable[Text]:
    for name, value in list_facts(row):
        yield Text.assemble((f"{escape_text(name):<28} ", "cyan"), make_text(value))


def format_summary(devices: Sequence[Json]) -> Text:
    """Returns the number of boards in each state, with a bar."""
    if not devices:
        return Text("No board has joined yet. On this machine: edgefl coordinator token", "yellow")
    states = [row["presence"] for row in devices]
    counts = {state: states.count(state) for state in STYLES if state in states}
    bar = Text()
    for state, count in counts.items():
        bar.append("━" * max(1, round(40 * count / len(devices))), STYLES[state])
    working = sum("iteration" in row for row in devices)
    words = [Text.assemble((f"{count}", f"bold {STYLES[state]}"), f" {state}") for state, count in counts.items()]
    if working:
        words.append(Text(f"{working} at work", "cyan"))
    return Text.assemble(bar, "  ", Text(" · ").join(words))


def make_fleet_rows(devices: Sequence[Json]) -> dict[str, list[Text]]:
    """Returns the cells of each board."""
    return {row["device_id"]: _make_board_cells(row) for row in devices}


def _make_board_cells(row: Json) -> list[Text]:
    celsius, silent_s, throttled = row.get("temperature_c"), row.get("silent_s"), row.get("throttled")
    health = " ".join(word for word in ("" if celsius is None else f"{celsius:.0f} °C", throttled or "") if word)
    is_hot = celsius is not None and celsius >= HOT_C
    work = f"iteration {row['iteration']}" if "iteration" in row else ""
    return [
        make_text(row["device_id"], max_chars=15),
        make_text("drained" if row.get("drained") else row["presence"], STYLES.get(row["presence"], "")),
        make_text(health, "bold red" if is_hot else "yellow" if throttled else "", max_chars=13),
        make_text(work, "cyan", max_chars=13),
        make_text("" if silent_s is None else format_duration(silent_s), max_chars=6),
        make_text(row.get("problem") or row.get("cloned") or "", "bold red", max_chars=200),
    ]


def make_run_rows(runs: Sequence[Json]) -> dict[str, list[Text]]:
    """Returns the cells of each run."""
    return {
        row["run_id"]: [
            make_text(row["name"], max_chars=24),
            make_text(row["status"], STYLES.get(row["status"], "")),
            make_text(f"{row['rounds']} of {get_goal(row)}" if get_goal(row) else row["rounds"]),
            make_text("" if row.get("accuracy") is None else f"{100 * row['accuracy']:.1f} %"),
            make_text(format_value("submitted_at", row["submitted_at"]), "dim"),
        ]
        for row in runs
    }


def make_attention_rows(attention: Sequence[Json]) -> dict[str, list[Text]]:
    """Returns the cells of each problem; one row where there is none."""
    if not attention:
        return {"0": [Text("✓", "green"), Text("Nothing needs attention.", "green")]}
    return {str(number): _make_attention_cells(row) for number, row in enumerate(attention)}


def _make_attention_cells(row: Json) -> list[Text]:
    since = f", since {format_value('at', row['at'])} UTC" if row.get("at") else ""
    text = make_text(f"{row['text']}{since}", STYLES.get(row["level"], ""), max_chars=300)
    text.no_wrap = False
    return [make_text(row.get("device_id") or row.get("run_id") or "", "bold", max_chars=22), text]


def format_event(row: Json) -> Text:
    """Returns the line of an event."""
    kind = str(row["kind"])
    style = "bold red" if any(word in kind for word in ALARMS) else "cyan"
    subject = row.get("device_id") or row.get("run_id") or ""
    return Text.assemble(
        (f"{time.strftime('%H:%M:%S', time.gmtime(row['at']))} ", "dim"),
        make_text(f"{escape_text(kind):<18.18} ", style), make_text(f"{escape_text(subject):<16.16} ", "bold"),
        make_text(row.get("message") or "", max_chars=400),
    )  # fmt: skip


def format_run(snapshot: FleetSnapshot, width: int) -> Text:
    """Returns the course of the shown run: state, progress, curves, and how its devices spent the last rounds."""
    run = snapshot.run
    if run is None:
        return Text("No run yet. Begin with: edgefl quickstart", "yellow")
    status, reason = run["status"], run.get("reason")
    head = Text.assemble(
        make_text(run["name"], "bold", max_chars=width // 2), "  ", make_text(status, STYLES.get(status, "")), "  ",
        make_text(f"{run['task']} · {run['strategy']}", "dim", max_chars=width // 3),
    )  # fmt: skip
    lines = [head, _format_progress(run, snapshot.rounds, width)]
    if reason:
        style = (
            "bold red" if status in {"failed", "interrupted"} else "dim" if status in TERMINAL_STATUSES else "yellow"
        )
        reason_text = make_text(reason, style, max_chars=2 * width)
        reason_text.no_wrap = False
        lines.append(reason_text)
    if snapshot.rounds:
        lines += _format_curves(snapshot.rounds, width)
    lines += _format_devices(snapshot, run, width)
    return Text("\n").join(lines)


def _format_progress(run: Json, rounds: Sequence[Json], width: int) -> Text:
    goal, seconds_left = get_goal(run), compute_seconds_left(run, rounds)
    words = f" round {run['rounds']}" + (f" of {goal}" if goal else "")
    if rounds and rounds[-1].get("seconds") is not None:
        words += f" · {format_duration(rounds[-1]['seconds'])} each"
    if seconds_left is not None:
        words += f" · {format_duration(seconds_left)} left"
    full, empty = draw_bar(run["rounds"] / goal if goal else 0.0, max(10, width - len(words) - 2))
    return Text.assemble((full, "green"), (empty, "dim"), words)


def _format_curves(rounds: Sequence[Json], width: int) -> list[Text]:
    """Returns accuracy and loss beside each other."""
    half = (width - 3) // 2
    accuracies, losses = ([row[name] for row in rounds if row.get(name) is not None] for name in ("accuracy", "loss"))
    losses = losses or [row["train_loss"] for row in rounds if row.get("train_loss") is not None]
    titles = (
        f"accuracy {100 * accuracies[-1]:.2f} %, best {100 * max(accuracies):.2f} %"
        if accuracies
        else "no accuracy yet",
        f"loss {losses[-1]:.4g}" if losses else "no loss yet",
    )
    lines = [Text.assemble((f"{titles[0]:<{half}.{half}}   ", "bold"), (titles[1], "bold"))]
    curves = (draw_curve(accuracies, half, CURVE_LINES), draw_curve(losses, half, CURVE_LINES))
    lines += [Text.assemble((left, "green"), "   ", (right, "magenta")) for left, right in zip(*curves, strict=True)]
    return lines


def _format_devices(snapshot: FleetSnapshot, run: Json, width: int) -> list[Text]:
    """Returns who works now, and how the slowest of the last rounds spent their time."""
    working = [row for row in snapshot.devices if row.get("run") == run["run_id"] and "iteration" in row]
    lines = []
    if run["status"] not in TERMINAL_STATUSES:
        names = ", ".join(f"{row['device_id']} (iteration {row['iteration']})" for row in working[:3])
        more = f" and {len(working) - 3} more" if len(working) > 3 else ""
        lines.append(make_text(f"computing now: {names or 'nobody'}{more}", max_chars=width))
    newest = {row["device_id"]: row for row in snapshot.spans}
    slowest = sorted(newest.values(), key=lambda row: -_sum_seconds(row))[:MAX_SPANS]
    if not slowest:
        return lines
    lines.append(
        Text.assemble(
            f"{'last assignments':<18}", ("━ computing ", "green"), ("━ sending ", "yellow"), ("━ waiting", "blue")
        )
    )
    longest = max(map(_sum_seconds, slowest)) or 1.0
    room = max(10, width - 30)
    for row in slowest:
        line = Text(f"{make_text(row['device_id'], max_chars=17).plain:<18}")
        for name, style in (("compute_s", "green"), ("send_s", "yellow"), ("wait_s", "blue")):
            line.append("━" * round(room * (row[name] or 0.0) / longest), style)
        lines.append(line.append(f" {format_duration(_sum_seconds(row))}"))
    return lines


def _sum_seconds(row: Json) -> float:
    return sum(row[name] or 0.0 for name in ("compute_s", "send_s", "wait_s"))
