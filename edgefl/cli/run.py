"""`edgefl run`: submit a run file, watch it, stop it, take it up again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from edgefl.cli.listing import ListedGroup
from edgefl.cli.render import format_option, human, known_columns, print_rows
from edgefl.errors import NetworkError, RunFailedError, UsageError
from edgefl.summary import NODE_FIGURES, accuracy_in_words

if TYPE_CHECKING:
    from edgefl.types import Json

WAITED = ("priority", "queue_position")
COLUMNS = ("run_id", "name", "task", "strategy", "status", "rounds", "accuracy", "submitted_at", "reason")
FINAL = frozenset({"finished", "stopped", "failed", "interrupted"})
POLL_S = 0.5
LINE_EVERY_S = 60.0
PATIENCE_S = 60.0

url_option = click.option("--url", metavar="URL", help="The coordinator [default: the one in operator.toml].")


@click.group("run", cls=ListedGroup)
def command() -> None:
    """Submit, watch, stop and resume training runs."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--watch", "watches", is_flag=True, help="Stay and show how it goes.")
@click.option("--wait", "waits", is_flag=True, help="Stay silently; exit code 0 when it finished, else 41.")
@click.option(
    "--priority", type=int, default=0, show_default=True, help="Of the runs that wait the highest begins first."
)
@click.option("--dry-run", is_flag=True, help="Only say who would take part, and what a round would cost.")
@url_option
@format_option
def submit(  # noqa: PLR0913 the options of one command
    *, file: Path, watches: bool, waits: bool, priority: int, dry_run: bool, url: str | None, fmt: str
) -> None:
    """Queue the run that FILE (TOML) describes and print its id."""
    from edgefl.config import load_run  # noqa: PLC0415 fast start

    if watches and waits:
        raise UsageError("--watch shows how the run goes and --wait says nothing; give one of them")
    config = load_run(file).to_json()
    if dry_run:
        from edgefl.cli.plan import print_plan  # noqa: PLC0415 fast start

        print_plan(_operator(url).post("/edgefl/v1/runs/plan", {"config": config}), fmt)
        return
    run = _operator(url).post("/edgefl/v1/runs", {"config": config, "priority": priority})
    if run.get("state_bytes"):
        kept = human("state_bytes", run["state_bytes"])
        click.echo(f"{run['strategy']} keeps {kept} for {run['state_devices']} devices", err=True)
    if fmt == "table":
        click.echo(run["run_id"])
    else:
        print_rows([run], COLUMNS, fmt, kind="runs")
    if watches:
        _watch(run["run_id"], url)
    if waits:
        _wait(run["run_id"], url)


@command.command("list")
@url_option
@format_option
def list_(*, url: str | None, fmt: str) -> None:
    """List the runs, oldest first; those that wait with their place in the queue."""
    rows = _operator(url).get("/edgefl/v1/runs")["rows"]
    columns = (*COLUMNS, *WAITED)
    shown = known_columns(rows, columns, ("queue_position",)) if fmt == "table" else columns
    if fmt == "table" and not any(row.get("priority") for row in rows):
        shown = [name for name in shown if name != "priority"]
    print_rows(rows, shown, fmt, kind="runs")


@command.command()
@click.argument("run")
@url_option
@format_option
def show(*, run: str, url: str | None, fmt: str) -> None:
    """Show one run and its settings; RUN is an id, the beginning of one, a name, or `latest`."""
    found = _operator(url).get(_path(run))
    columns = (*COLUMNS, "priority", "resumes", *(name for name in NODE_FIGURES if name in found))
    if fmt != "table":
        print_rows([found], (*columns, "config"), fmt, kind="runs")
        return
    settings = [
        {"setting": f"{section}.{name}", "value": human(name, value)}
        for section, table in found["config"].items()
        for name, value in table.items()
    ]
    facts = [{"setting": name, "value": human(name, found[name])} for name in columns]
    print_rows([*facts, *settings], ("setting", "value"), fmt)
    if words := accuracy_in_words(found):
        click.echo(words)


@command.command()
@click.argument("run", default="latest")
@url_option
def watch(*, run: str, url: str | None) -> None:
    """Show how RUN (default: the newest) goes until it is over; exit code 41 when it failed or was interrupted."""
    _watch(run, url)


@command.command()
@click.argument("run", default="latest")
@url_option
def stop(*, run: str, url: str | None) -> None:
    """End RUN (default: the newest) after what is in flight; its model and history stay."""
    found = _operator(url).post(f"{_path(run)}/stop")
    click.echo(f"{found['run_id']} {found['status']}")


@command.command()
@click.argument("run", default="latest")
@url_option
def resume(*, run: str, url: str | None) -> None:
    """Let RUN (default: the newest), which was interrupted or stopped, go on from its newest checkpoint."""
    found = _operator(url).post(f"{_path(run)}/resume")
    click.echo(f"{found['run_id']} {found['status']}")


def _wait(run_id: str, url: str | None) -> None:
    """Returns once a run has finished; a coordinator that is away for a moment is waited for.

    Raises:
        RunFailedError: it ended otherwise.
    """
    operator, path, heard_s = _operator(url), _path(run_id), time.monotonic()
    found: Json = {"status": ""}
    while found["status"] not in FINAL:
        try:
            found, heard_s = operator.get(path), time.monotonic()
        except NetworkError:
            if time.monotonic() - heard_s > PATIENCE_S:
                raise
        time.sleep(POLL_S)
    if found["status"] != "finished":
        raise RunFailedError(f"run {found['run_id']} {found['status']}: {found['reason']}")


def _watch(run: str, url: str | None) -> None:
    operator = _operator(url)
    found = operator.get(_path(run))
    with RunProgress() as progress:
        while True:
            progress.show(found)
            if found["status"] in FINAL:
                break
            time.sleep(POLL_S)
            found = operator.get(_path(found["run_id"]))
    if words := accuracy_in_words(found):
        click.echo(words, err=True)
    if found["status"] in {"failed", "interrupted"}:
        raise RunFailedError(f"run {found['run_id']} {found['status']}: {found['reason']}")


class RunProgress:
    """A bar on a terminal, elsewhere one line a minute and one at the end; both on stderr."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 only those who watch need it
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 likewise

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self._console, transient=True
        )
        self._task: Any = None
        self._said_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:  # elsewhere stopping would print an empty line
            self._bar.stop()

    def show(self, run: Json) -> None:
        """Takes the newest state of the run."""
        goal = run["config"].get("run", {}).get("rounds")
        text = _line(run, goal)
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task(text, total=goal)
            self._bar.update(self._task, description=text, completed=run["rounds"])
        elif run["status"] in FINAL or time.monotonic() - self._said_s >= LINE_EVERY_S:
            self._said_s = time.monotonic()
            click.echo(text, err=True)


def _line(run: Json, goal: int | None) -> str:
    accuracy = "" if run["accuracy"] is None else f", accuracy {run['accuracy']:.4f}"
    of = f" of {goal}" if goal else ""
    return f"{run['name']} {run['status']}: round {run['rounds']}{of}{accuracy}"


def _operator(url: str | None) -> Any:
    from edgefl.client import Operator  # noqa: PLC0415 fast start

    return Operator.from_options(url)


def _path(run: str) -> str:
    from edgefl.client import named_path  # noqa: PLC0415 fast start

    return named_path("runs", run)
