"""`edgefl run`: submits, watches, stops and resumes runs; `edgefl export`: exports a run to other frameworks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
from click.shell_completion import CompletionItem

from edgefl.cli.output import (
    JSON_VERSION,
    FullHelpGroup,
    echo,
    format_bytes,
    format_option,
    format_value,
    print_json,
    print_rows,
    select_known_columns,
    silence_recorder,
)
from edgefl.cli.sources import (
    FILE_TYPE,
    FOLDER_TYPE,
    PATH_TYPE,
    allow_module_option,
    make_client,
    make_path,
    url_option,
)
from edgefl.client.fleet import RUN_COLUMNS as COLUMNS
from edgefl.client.fleet import TERMINAL_STATUSES, check_finished, follow_run
from edgefl.client.sources import resolve_source
from edgefl.core.errors import ConfigError, EdgeflError, RunFailedError, UsageError
from edgefl.core.safe_text import escape_text
from edgefl.engine.run_summary import DEVICE_METRIC_KEYS, format_accuracy, format_quality

if TYPE_CHECKING:
    from edgefl.core.config import RunConfig
    from edgefl.core.types import Json

QUEUE_COLUMNS = ("priority", "queue_position")
WAITING_STATUSES = frozenset({"waiting", "queued", "paused", "compiling"})
RESULT_FILE_MODE = 0o644
NUM_COMPLETED = 50
LINE_INTERVAL_S = 60.0
PLAN_COLUMNS = (
    "device_id", "takes_part", "backend", "examples", "iterations", "seconds", "codec", "bytes_up", "bytes_down",
    "measured_in", "reason",
)  # fmt: skip
_GOAL_FORMATS = {
    "rounds": "{} rounds", "updates": "{} updates", "seconds": "{} s", "bytes": "{} bytes", "accuracy": "accuracy {}",
    "until": "{}",
}  # fmt: skip
_OPTIONAL_PLAN_COLUMNS = ("backend", "codec", "measured_in", "reason")


def _complete_runs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the newest runs for the shell; none where no coordinator answers, since a shell shows no errors."""
    try:
        rows = make_client(None).get("/edgefl/v1/history/runs", {"limit": NUM_COMPLETED})["rows"]
    except EdgeflError:
        return []
    items = [("latest", "the newest")] + [(row["run_id"], f"{row['name']} {row['status']}") for row in rows]
    return [CompletionItem(run, help=escape_text(text)) for run, text in items if run.startswith(incomplete)]


run_argument = click.argument("run", default="latest", shell_complete=_complete_runs)


@click.group("run", cls=FullHelpGroup)
def command() -> None:
    """Submit, watch, stop and resume training runs."""


@command.command()
@click.argument("file", type=FILE_TYPE)
@click.option("--watch", "watches", is_flag=True, help="Stay and show how it goes.")
@click.option(
    "--wait",
    "waits",
    is_flag=True,
    help="Stay, and say only what it waits for; exit code 0 when it finished, else 41.",
)
@click.option(
    "--priority", type=int, default=0, show_default=True, help="Of the runs that wait the highest begins first."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say who would take part and what a round would cost; exit code 41 when it would not start now.",
)
@allow_module_option
@url_option
@format_option
def submit(  # noqa: PLR0913 the options of one command
    *, file: Path, watches: bool, waits: bool, priority: int, dry_run: bool, url: str | None, fmt: str
) -> None:
    """Queue the run that FILE (TOML) describes and print its id.

    --allow-module is for strategy.name = "auto", which is chosen here.
    """
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start

    if watches and waits:
        raise UsageError("--watch shows how the run goes and --wait only its end; give one of them")
    config = _settle_strategy(load_run(file), url).to_json()
    if dry_run:
        plan = _post_file(file, "/edgefl/v1/runs/plan", {"config": config}, url)
        print_plan(plan, fmt)
        if obstacle := plan.get("obstacle"):
            raise RunFailedError(f"this run would not start now: {obstacle}")
        return
    run = _post_file(file, "/edgefl/v1/runs", {"config": config, "priority": priority}, url)
    if run.get("state_bytes"):
        state_size = format_value("state_bytes", run["state_bytes"])
        echo(f"{run['strategy']} keeps {state_size} for {run['state_devices']} devices", err=True)
    for note in run.get("notes", ()):
        echo(note, err=True)
    if fmt == "table":
        echo(run["run_id"])
    else:
        print_rows([run], COLUMNS, fmt, kind="runs")
    if watches:
        _watch_run(run["run_id"], url)
    if waits:
        wait_for_run(run["run_id"], url)


@command.command("flower-app")
@click.argument("app", type=PATH_TYPE)
@click.option(
    "--run-config", default="", metavar="PAIRS", help="Other values of its run configuration: 'key=1 name=\"a\"'."
)
@click.option(
    "--min", "num_boards", type=click.IntRange(1), default=2, show_default=True, help="Boards that it begins with."
)
@click.option("--group", "groups", multiple=True, help="Only boards of this group; may be repeated.")
@click.option("--name", help="Of the run [default: the app's].")
@click.option("--codec", default="", help="Of what boards change in the app's arrays, such as int8 [default: none].")
@click.option("--down", default="", help="Codec of the arrays that boards are sent, such as fp16 [default: none].")
@click.option("--seed", type=click.IntRange(0), help="Of the ServerApp's random generators [default: 7].")
@click.option("--watch", "watches", is_flag=True, help="Stay and show how it goes.")
@url_option
def submit_flower_app(  # noqa: PLR0913 the options of one command
    *,
    app: Path,
    run_config: str,
    num_boards: int,
    groups: tuple[str, ...],
    name: str | None,
    codec: str,
    down: str,
    seed: int | None,
    watches: bool,
    url: str | None,
) -> None:
    """Queue a run of a Flower app, a folder or a .fab, whose pack is on the boards, and print its id."""
    from edgefl.flower.app_bundle import open_app  # noqa: PLC0415 fast start
    from edgefl.flower.app_job import make_app_run  # noqa: PLC0415 likewise

    with open_app(app) as opened:
        config = make_app_run(
            opened, run_config, name=name, num_boards=num_boards, groups=groups, codec=codec, down=down, seed=seed
        )
    run = make_client(url).post("/edgefl/v1/runs", {"config": config.to_json(), "priority": 0})
    echo(run["run_id"])
    if watches:
        _watch_run(run["run_id"], url)


def _settle_strategy(config: RunConfig, url: str | None) -> RunConfig:
    """Returns the settings without `auto`, having said what an advice chose in its place and why."""
    from edgefl.core.config import AUTO_STRATEGY  # noqa: PLC0415 fast start

    if config.strategy.name != AUTO_STRATEGY:
        return config
    from edgefl.client.advice import settle_strategy  # noqa: PLC0415 fast start

    with silence_recorder():
        choice = settle_strategy(config, resolve_source(None, url))
    for reason in choice.reasons:
        echo(reason, err=True)
    return choice.config


def _post_file(file: Path, path: str, body: Json, url: str | None) -> Json:
    """Returns the coordinator's answer; what it says of settings gets the file's name and their lines."""
    from edgefl.core.config import add_lines  # noqa: PLC0415 fast start

    try:
        return make_client(url).post(path, body)
    except ConfigError as error:
        raise ConfigError(f"{file}: {add_lines(str(error), file.read_text(encoding='utf-8'))}") from None


@command.command("list")
@url_option
@format_option
def list_(*, url: str | None, fmt: str) -> None:
    """List the runs, oldest first; those that wait with their place in the queue."""
    rows = make_client(url).get("/edgefl/v1/runs")["rows"]
    columns = (*COLUMNS, *QUEUE_COLUMNS)
    visible_columns = select_known_columns(rows, columns, ("queue_position",)) if fmt == "table" else columns
    if fmt == "table" and not any(row.get("priority") for row in rows):
        visible_columns = [name for name in visible_columns if name != "priority"]
    print_rows(rows, visible_columns, fmt, kind="runs")


@command.command()
@run_argument
@url_option
@format_option
def show(*, run: str, url: str | None, fmt: str) -> None:
    """Show a run and its settings; RUN is an id, the beginning of one, a name, or `latest`, which is the default."""
    run_row = make_client(url).get(make_path("runs", run))
    columns = (
        *COLUMNS,
        "priority",
        "resumes",
        *(name for name in ("metrics", *DEVICE_METRIC_KEYS) if run_row.get(name) is not None),
    )
    if fmt != "table":
        print_rows([run_row], (*columns, "config"), fmt, kind="runs")
        return
    settings = [
        {"setting": f"{section}.{name}", "value": format_value(name, value)}
        for section, table in run_row["config"].items()
        for name, value in table.items()
    ]
    facts = [{"setting": name, "value": format_value(name, run_row[name])} for name in columns]
    print_rows([*facts, *settings], ("setting", "value"), fmt)
    if words := format_accuracy(run_row):
        echo(words)


@command.command()
@run_argument
@url_option
def watch(*, run: str, url: str | None) -> None:
    """Show how RUN (default: the newest) goes until it is over; exit code 41 when it failed or was interrupted."""
    _watch_run(run, url)


@command.command()
@run_argument
@url_option
def stop(*, run: str, url: str | None) -> None:
    """End RUN (default: the newest) after what is in flight; its model and history stay."""
    run_row = make_client(url).post(f"{make_path('runs', run)}/stop")
    echo(f"{run_row['run_id']} {run_row['status']}")


@command.command()
@run_argument
@url_option
def resume(*, run: str, url: str | None) -> None:
    """Let RUN (default: the newest), which was interrupted or stopped, go on from its newest checkpoint."""
    run_row = make_client(url).post(f"{make_path('runs', run)}/resume")
    echo(f"{run_row['run_id']} {run_row['status']}")


@command.command()
@run_argument
@click.option("--device", "devices", multiple=True, required=True, help="Left out; may be repeated.")
@click.option(
    "--since", help="Its data from then on is meant: an age (2h, 7d) or an ISO date and time [default: all]."
)
@click.option(
    "--keep-device", is_flag=True, help="It takes part again: what is to be forgotten was removed from its shard."
)
@click.option("--watch", "watches", is_flag=True, help="Stay and show how it goes.")
@url_option
def forget(
    *, run: str, devices: tuple[str, ...], since: str | None, keep_device: bool, watches: bool, url: str | None
) -> None:
    """Queue a run that replaces RUN (default: the newest) without the data of a device, and print its id.

    It starts from the newest kept model from before the device's first assignment, with the rounds that are left;
    where none is kept, from where RUN did. All other settings are those of RUN, whose own models stay.
    """
    from edgefl.cli.history import parse_time  # noqa: PLC0415 fast start

    at = None if since is None else parse_time(since, now=time.time())
    body = {"devices": list(devices), "since": at, "keep_devices": keep_device}
    made = make_client(url).post(f"{make_path('runs', run)}/forget", body)
    for note in made.get("notes", ()):
        echo(note, err=True)
    echo(made["run_id"])
    if watches:
        _watch_run(made["run_id"], url)


@command.command()
@run_argument
@click.option("--out", type=FILE_TYPE, help="A file for it [default: standard output].")
@url_option
def result(*, run: str, out: Path | None, url: str | None) -> None:
    """Download the result of RUN (default: the newest), which is a job or an analysis that has finished."""
    from edgefl.system.atomic_files import make_store_error, open_atomic  # noqa: PLC0415 fast start

    path = f"{make_path('runs', run)}/result"
    if out is None:
        make_client(url).download(path, click.get_binary_stream("stdout"))
        return
    try:
        with open_atomic(out, mode=RESULT_FILE_MODE) as file:
            make_client(url).download(path, file)
    except OSError as error:
        raise make_store_error(out, error) from None
    echo(f"{out}: {format_bytes(out.stat().st_size)}")


@command.command()
def schema() -> None:
    """Print the JSON schema of run files, with which editors complete and check them."""
    from edgefl.engine.assembly.schema import make_run_schema  # noqa: PLC0415 fast start

    echo(json.dumps(make_run_schema(), indent=2))


def wait_for_run(run_id: str, url: str | None) -> None:
    """Waits until a run has finished; tolerates short absences of the coordinator.

    Raises:
        RunFailedError: it ended otherwise.
    """
    printed, row = "", {}
    for row in follow_run(make_client(url), run_id, is_known=True):
        if printed != (printed := _format_wait(row)) and printed:
            echo(printed, err=True)
    check_finished(row)


def _watch_run(run: str, url: str | None) -> None:
    run_row: Json = {}
    with RunProgressBar() as progress:
        for run_row in follow_run(make_client(url), run):
            progress.update(run_row)
    if words := format_accuracy(run_row):
        echo(words, err=True)
    if run_row["status"] != "stopped":
        check_finished(run_row)


class RunProgressBar:
    """A bar on a terminal, elsewhere one line a minute and one at the end; both on stderr."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 only needed to watch
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 likewise

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: Any = None
        self._printed_s, self._reason = 0.0, ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:  # without a bar, stopping it would print an empty line
            self._bar.stop()

    def update(self, run: Json) -> None:
        """Shows the newest state of the run."""
        goal = run["config"].get("run", {}).get("rounds")
        text = escape_text(_format_line(run, goal))
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task(text, total=goal)
            self._bar.update(self._task, description=text, completed=run["rounds"])
        elif (
            run["status"] in TERMINAL_STATUSES
            or _get_reason(run) != self._reason
            or time.monotonic() - self._printed_s >= LINE_INTERVAL_S
        ):
            self._printed_s, self._reason = time.monotonic(), _get_reason(run)
            echo(text, err=True)


def _get_reason(run: Json) -> str:
    """Returns what is said of a run that is not over; empty if nothing is."""
    return "" if run["status"] in TERMINAL_STATUSES else run.get("reason") or ""


def _format_wait(run: Json) -> str:
    """Returns what a run waits for; empty if it does not wait."""
    return f"{run['name']}: {run['reason']}" if run["status"] in WAITING_STATUSES and run["reason"] else ""


def _format_line(run: Json, goal: int | None) -> str:
    if words := _format_wait(run):
        return words
    if "parts_done" in run:
        parts = run["config"]["job"]["parts"]
        of_text = "" if parts == "boards" else f" of {parts}"
        return f"{run['name']} {run['status']}: {run['parts_done']}{of_text} parts done{_format_reason(run)}"
    quality = format_quality({"accuracy": run["accuracy"], **(run.get("metrics") or {})})
    goal_text = f" of {goal}" if goal else ""
    progress = f"{run['name']} {run['status']}: round {run['rounds']}{goal_text}"
    return (f"{progress}, {quality}" if quality else progress) + _format_reason(run)


def _format_reason(run: Json) -> str:
    reason = _get_reason(run)
    return reason and f"; {reason}"


def print_plan(plan: Json, fmt: str) -> None:
    """Prints a plan: for people with sums and assumptions; as JSON complete; as CSV its rows."""
    if fmt == "json":
        print_json({**plan, "v": JSON_VERSION, "kind": "plan"})
        return
    if fmt == "csv":
        print_rows(plan["rows"], PLAN_COLUMNS, fmt)
        return
    goal = " or ".join(
        _GOAL_FORMATS.get(name, f"{name} {{}}").format(f"{value:g}") for name, value in plan["goal"].items()
    )
    echo(
        f"{plan['task']} with {plan['strategy']} until {goal}; "
        f"a model of {format_value('bytes_', plan['model_bytes'])}"
    )
    print_rows(plan["rows"], select_known_columns(plan["rows"], PLAN_COLUMNS, _OPTIONAL_PLAN_COLUMNS))
    seconds = "not known" if plan["seconds"] is None else f"{format_value('', plan['seconds'])} s"
    devices = "1 device" if plan["num_devices"] == 1 else f"{plan['num_devices']} devices"
    echo(
        f"a round: {devices}, {format_value('bytes_', plan['bytes_up'])} up, "
        f"{format_value('bytes_', plan['bytes_down'])} down, computing {seconds}"
    )
    if counts := plan.get("conditions"):
        parts = [f"{counts['blocked']} would not be free", f"{counts['unknown']} did not say"]
        others = ", ".join(part for part in parts if not part.startswith("0 "))
        echo(f"conditions of the run: {counts['free']} would be free now" + (f", {others}" if others else ""))
    if plan.get("base_bytes"):
        echo(f"a device fetches a base of {format_value('bytes_', plan['base_bytes'])} once, unless it has it")
    for line in plan["assumed"]:
        echo(f"assumed: {line}")
    for line in plan["warnings"]:
        echo(f"warning: {line}")


@click.group("export", cls=FullHelpGroup)
def export() -> None:
    """Take a run elsewhere."""


@export.command("flower-app")
@click.argument("file", type=FILE_TYPE)
@click.option("--out", required=True, type=FOLDER_TYPE, help="A new folder for the app.")
@click.option("--scheme", help="How nodes without a shard cut the task's data set [default: the task's own way].")
@allow_module_option
def flower_app(*, file: Path, out: Path, scheme: str | None) -> None:
    """Write the run of FILE (TOML) as a Flower app: strategy and task run with plain `flwr run`."""
    from edgefl.core.config import load_run  # noqa: PLC0415 likewise
    from edgefl.engine.assembly.build import build_run  # noqa: PLC0415 likewise
    from edgefl.flower.app_export import export_flower_app  # noqa: PLC0415 fast start
    from edgefl.simulation.local_fleet import default_scheme  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.partitioning import parse_scheme  # noqa: PLC0415 likewise

    config = load_run(file)
    if config.adapt.is_used:
        raise ConfigError("adapt: a Flower app sends whole models; leave it out")
    if config.privacy.unit == "example":
        raise ConfigError('privacy.unit = "example": nodes of a Flower app keep no account; leave it out')
    if config.conditions.to_json():
        raise ConfigError("conditions: nodes of a Flower app know none; leave it out")
    if config.compression.metered is not None:
        raise ConfigError("compression.metered: nodes of a Flower app do not say whether they are; leave it out")
    built = build_run(config, "check")
    if built.has_personal:
        raise ConfigError(
            "strategy.personal_lambda and personal_mixture: a Flower app keeps no copies on its nodes; leave them out"
        )
    if "consistency_weight" in config.strategy.options:
        raise ConfigError(
            "strategy.consistency_weight: nodes of a Flower app have no examples without a label; leave it out"
        )
    if built.cluster_shapes:
        raise ConfigError(f"{config.strategy.name}: a Flower app has one model, and this run one for each cluster")
    if built.strategy.root_examples:
        raise ConfigError(f"{config.strategy.name} trains on examples of the coordinator, and a Flower app has none")
    partition_scheme = scheme or config.simulation.scheme or default_scheme(config.run.task)
    parse_scheme(partition_scheme)
    for path in export_flower_app(config, out, scheme=partition_scheme):
        click.echo(path)
