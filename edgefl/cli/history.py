"""`edgefl history`: queries, diagnosis, export and figures, from the coordinator or straight from its store."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from edgefl.cli.output import (
    FullHelpGroup,
    format_option,
    format_value,
    print_json,
    print_pages,
    print_rows,
    select_known_columns,
)
from edgefl.cli.sources import NumberRange, send_files, source_options, to_option
from edgefl.client.sources import Source
from edgefl.core.errors import NetworkError, StoreError, UsageError
from edgefl.core.types import Json
from edgefl.engine.run_summary import select_device_metrics
from edgefl.history import AXES, FILE_SUFFIXES, PLOT_KINDS, check_matplotlib
from edgefl.storage.queries.columns import (
    AGGREGATE_KINDS,
    COLUMNS,
    DEVICE_MODEL_COLUMNS,
    GROUPINGS,
    SELF_ORDERED_KINDS,
    get_columns,
)
from edgefl.system.object_storage import ObjectAddress

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 100
USE_COLUMNS = (
    "run_id", "name", "status", "gateways", "inherited_model", "scales_run", "first_round", "last_round",
    "num_assignments", "num_used", "first_at", "last_at", "clean_version", "shards",
    "models", "deployments", "replaced_by",
)  # fmt: skip
MAX_SHARDS = 3

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_KIND_HELP = {
    "runs": "One row a run: how it ended, what became of its assignments, what it cost.",
    "accuracy": "How good the model of a run was, by round, time and bytes; the newest run if none is named.",
    "slow": "The slowest rounds, whom each waited for, and what that device was at.",
    "stale": "Who was stale: by device, day or run.",
    "dropouts": "Who was lost, late, rejected or failed: by device, day or run.",
    "traffic": "Bytes up and down: by device, day or run.",
    "energy": "What the boards took, where they tell: by device, day or run.",
    "rounds": "One row a round: version, updates, loss, accuracy and who measured it, bytes.",
    "updates": "One row an assignment: staleness, examples, seconds, bytes, loss, outcome.",
    "devices": "One row a device: presence, and what it computed and sent.",
    "heartbeats": "What the boards felt like; five-minute rows after a day.",
    "events": "Joins, losses, refusals, restarts.",
    "audit": "Who changed what, from where, when, and what came of it.",
    "evaluations": "One row an evaluation, by coordinator, evaluator or device; and whose model it is.",
}
# A table fits on a screen; json and csv give every column of `COLUMNS`, but those of nodes only where there are any.
_TABLE_COLUMNS = {
    "runs": ("run_id", "name", "status", "rounds", "accuracy", "seconds", "num_used", "num_late", "num_lost",
             "num_rejected", "num_failed", "bytes_up", "bytes_down"),
    "accuracy": ("run_id", "round", "at_s", "bytes_up", "bytes_down", "accuracy", "loss", "train_loss", "source",
                 "node_accuracy", "worst_node_accuracy"),
    "slow": ("run_id", "round", "seconds", "waited_for", "waited_s", "outcome", "iterations", "compute_s", "paced_s",
             "send_s", "max_temperature_c", "throttled", "signal_dbm", "link_bits_per_s"),
    **{kind: COLUMNS[kind] for kind in sorted(AGGREGATE_KINDS)},
    "rounds": ("run_id", "round", "version", "closed_at", "num_devices", "num_updates", "train_loss", "loss",
               "accuracy", "source", "metrics", "node_accuracy", "worst_node_accuracy", "disagreement", "bytes_up",
               "bytes_down"),
    "updates": ("run_id", "round", "device_id", "outcome", "staleness", "iterations", "num_examples", "loss",
                "compute_s", "paced_s", "send_s", "wait_s", "bytes_up", "bytes_down"),
    "devices": ("device_id", "role", "groups", "presence", "last_seen_at", "examples", "num_used", "compute_s",
                "send_s", "wait_s", "bytes_up", "bytes_down"),
    "heartbeats": ("device_id", "at", "uptime_s", "temperature_c", "throttled", "cpu_fraction", "memory_fraction",
                   "memory_bytes", "disk_free_bytes", "run", "iteration"),
    "events": ("at", "kind", "run_id", "device_id", "message"),
    "audit": ("at", "actor", "source", "action", "outcome"),
    "evaluations": ("run_id", "round", "version", "device_id", "source", "subject", "loss", "accuracy",
                    "num_examples", "metrics", "at"),
}  # fmt: skip
_OPTIONAL_COLUMNS = frozenset({"metrics", "paced_s"})
"""Columns that a table shows only where known: few devices have a temperature limit, few tasks metrics."""
_JOULE_COLUMNS = frozenset({"predicted_j", "joules", "joules_error"})
_DERIVED_COLUMNS = {"rounds": ("disagreement",)}
_KINDS_HELP = "\b\n" + "\n".join(f"{name:15}{text}" for name, text in PLOT_KINDS.items())

run_option = click.option(
    "--run", metavar="RUN", help="A run's id or the beginning of it, its name, or `latest`; default: all runs."
)


@click.group(name="history", cls=FullHelpGroup)
def command() -> None:
    """Ask what happened: runs, rounds, updates, devices, who was slow, stale or lost, bytes, energy."""


@command.command()
@click.argument("run")
@click.argument("round_number", metavar="[ROUND]", required=False, type=click.IntRange(min=0))
@source_options
@click.option(
    "--format",
    "fmt",
    type=click.Choice(("table", "json")),
    default="table",
    show_default=True,
    help="A sentence for people, or the facts behind it for programs.",
)
def why(*, run: str, round_number: int | None, source: Source, fmt: str) -> None:
    """Say whom ROUND of RUN waited for, how long, and why.

    RUN is an id, a name or `latest`; without ROUND it is the one that took longest.
    """
    diagnosis = source.explain_round(run, round_number)
    if fmt == "json":
        print_json(diagnosis)
    else:
        longest = "" if round_number else f"The longest round of {diagnosis['run_name']}. "
        click.echo(format_value("", longest + diagnosis["sentence"]))


@command.command("advice")
@source_options
@format_option
def advice_(*, source: Source, fmt: str) -> None:
    """Compare what `edgefl advise run` predicted of runs with what became of them.

    An error of 0.1 says that the run took a tenth more than predicted. From three finished runs of a task on, their
    medians correct the next advice.
    """
    from edgefl.client.advice import ERROR_COLUMNS, read_errors  # noqa: PLC0415 fast start

    rows = read_errors(source)
    print_rows(rows, select_known_columns(rows, ERROR_COLUMNS, _JOULE_COLUMNS), fmt, kind="advice-errors")


@command.command()
@click.argument("device", metavar="DEVICE")
@click.option(
    "--since", help="Data from then on: an age (2h, 7d) or an ISO date and time; earlier work had none of it."
)
@click.option("--until", help="The data was removed from the board then; later work had none of it.")
@source_options
@format_option
def uses(*, device: str, since: str | None, until: str | None, source: Source, fmt: str) -> None:
    """List the runs that used data of DEVICE, and the kept models and deployments that come of it.

    A run that began with a model of such a run, or with its means and scales, is there too. DEVICE may be a board
    behind a site gateway. Files of `edgefl model export` are not followed.
    """
    now = datetime.now(tz=UTC).timestamp()
    times = [None if text is None else parse_time(text, now=now) for text in (since, until)]
    rows = source.list_device_uses(device, *times)
    if fmt == "table":
        rows = [_shorten_use(row) for row in rows]
    print_rows(rows, select_known_columns(rows, USE_COLUMNS, frozenset(USE_COLUMNS[3:])), fmt, kind="uses")


def _shorten_use(row: Json) -> Json:
    """Returns what a table shows of a use."""
    models = [f"{model['sha256'][:12]} (round {model['round']})" for model in row["models"]]
    deployments = [f"{one['deployment_id']} ({one['status']})" for one in row["deployments"]]
    newest = row["shards"][-MAX_SHARDS:]
    shards = [
        f"{one['version']}: {one['examples']} in rounds {one['first_round']}-{one['last_round']}" for one in newest
    ]
    if left := len(row["shards"]) - len(newest):
        shards.insert(0, f"{left} more")
    lists = {"shards": shards, "models": models, "deployments": deployments}
    lists |= {name: row[name] for name in ("gateways", "replaced_by")}
    return {**row, **{name: value or None for name, value in lists.items()}}


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@run_option
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@click.option(
    "--format",
    "fmt",
    type=click.Choice(("csv", "parquet")),
    default="csv",
    show_default=True,
    help="Of the files; Parquet has the updates of a run in one.",
)
@to_option
@source_options
def export(
    *, folder: Path, run: str | None, force: bool, fmt: str, address: ObjectAddress | None, source: Source
) -> None:
    """Write the history into DIR: per run a JSON summary, and files of its rounds and of what each device did."""
    from edgefl.history.export import export_history  # noqa: PLC0415 fast start

    run_ids = export_history(source.read_pages, folder, run=run, replace=force, suffix=f".{fmt}")
    click.echo(f"wrote {len(run_ids)} run{'' if len(run_ids) == 1 else 's'} to {folder}")
    if address is not None:
        send_files(folder, address, replace=force)


@command.command(help=f"Draw KIND, or accuracy and loss on one sheet, into a PNG, PDF or SVG file.\n\n{_KINDS_HELP}")
@click.argument("kind", required=False, metavar="[KIND]", type=click.Choice(tuple(PLOT_KINDS)))
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="RUN",
    help="A run's id or the beginning of it, its name, a pattern of names such as 'digits-*', or `latest`; several "
    "share a sheet [default: latest].",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="FILE.png, .pdf or .svg.")
@click.option("--x", "axis", type=click.Choice(AXES), help="One axis for a curve [default: all, beside each other].")
@click.option(
    "--rounds",
    metavar="FIRST:LAST",
    help="These rounds alone, such as 10:40 or 90: [default: all; timeline: the newest 20].",
)
@click.option("--title", default="", help="Above the sheet.")
@click.option(
    "--spread", is_flag=True, help="Runs that differ in their seed alone as one curve, their mean, and a band."
)
@click.option(
    "--reference",
    "references",
    multiple=True,
    metavar="RUN",
    help="A run whose newest value alone is drawn, as a dotted line, such as one of `simulate --reference`.",
)
@source_options
def plot(  # noqa: PLR0913 the options of one command
    *,
    kind: str | None,
    runs: tuple[str, ...],
    out: Path,
    axis: str | None,
    rounds: str | None,
    title: str,
    spread: bool,
    references: tuple[str, ...],
    source: Source,
) -> None:
    ending = out.suffix.lower()
    if ending not in FILE_SUFFIXES:
        raise UsageError(f"--out must end with {', '.join(FILE_SUFFIXES)}, got {out}")
    if not out.parent.is_dir():
        raise UsageError(f"--out lies in {out.parent}, which is no directory; make it first")
    check_matplotlib()
    from edgefl.history.figures import render_figure  # noqa: PLC0415 matplotlib is slow to load
    from edgefl.history.plot_style import encode_figure  # noqa: PLC0415 likewise
    from edgefl.history.series import parse_round_range  # noqa: PLC0415 numpy is slow to load

    round_range = None if rounds is None else parse_round_range(rounds)
    chosen = runs or ("latest",)
    figure = render_figure(
        source,
        kind,
        chosen,
        rounds=round_range,
        axis=axis,
        title=title,
        spread=spread,
        references=references,
    )
    content = encode_figure(figure, ending)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    click.echo(f"{kind or 'accuracy and loss'} of {', '.join(chosen)}: {out}")


@command.command()
@click.option("--tensorboard", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="A log folder.")
@click.option(
    "--mlflow", metavar="URL", help="A server, such as http://127.0.0.1:5000, or another address of MLflow."
)
@click.option("--otlp", metavar="URL", help="A collector of OpenTelemetry, such as http://127.0.0.1:4318.")
@click.option("--experiment", default="edgefl", show_default=True, help="Of MLflow, made where it is missing.")
@run_option
@click.option("--follow", is_flag=True, help="Go on until all runs have ended; with no --run, until interrupted.")
@click.option(
    "--interval-s", type=NumberRange(0.2, 3600), default=5.0, show_default=True, help="Seconds between looks."
)
@source_options
def track(  # noqa: PLR0913 the options of one command
    *,
    tensorboard: Path | None,
    mlflow: str | None,
    otlp: str | None,
    experiment: str,
    run: str | None,
    follow: bool,
    interval_s: float,
    source: Source,
) -> None:
    """Copy runs into TensorBoard or MLflow, or rounds as traces to OpenTelemetry.

    TensorBoard and MLflow get settings, metrics of each round, and figures of the boards by group.

    Killed and started again, it goes on where it was: nothing is lost or there twice.
    """
    if tensorboard is None and mlflow is None and otlp is None:
        raise UsageError("name where to: --tensorboard DIR, --mlflow URL, --otlp URL, or several")
    from edgefl.history.traces import OtlpTracker, default_memory_folder  # noqa: PLC0415 fast start
    from edgefl.history.tracking import (  # noqa: PLC0415 fast start
        HistoryTracking,
        MlflowTracker,
        TensorBoardTracker,
        Tracker,
    )

    trackers: list[Tracker] = []
    if tensorboard is not None:
        trackers.append(TensorBoardTracker(tensorboard))
    if mlflow is not None:
        trackers.append(MlflowTracker(mlflow, experiment))
    if otlp is not None:
        trackers.append(OtlpTracker(otlp, source, default_memory_folder()))
    # Which run is the latest, or the newest of a name, is decided once.
    tracking = HistoryTracking(source, trackers, None if run is None else source.find_run(run).run_id)
    num_rounds = tracking.update()
    while follow and not (run and tracking.is_over):
        time.sleep(interval_s)
        try:
            num_rounds += tracking.update()
        except (NetworkError, StoreError) as error:  # the coordinator or the tracker comes back
            log.warning("%s; trying again in %g s", error, interval_s)
    click.echo(f"tracked {num_rounds} round{'' if num_rounds == 1 else 's'}")


def parse_time(text: str, *, now: float) -> float:
    """Returns unix seconds for an age (`90s`, `30m`, `2h`, `7d`, `2w`) or an ISO time (default UTC).

    Raises:
        UsageError: it is neither.
    """
    if match := _AGE.match(text.strip()):
        return now - float(match[1]) * _UNIT_S[match[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"a time is an age such as 2h or 7d, or a date such as 2026-01-31T18:00, got {text!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _print_table(source: Source, kind: str, filters: dict[str, Any]) -> None:
    limit = filters["limit"] or DEFAULT_LIMIT
    # One extra row, to detect that the output is cut.
    rows = source.read_newest(kind, {**filters, "limit": limit + 1})
    if len(rows) > limit:
        is_newest = kind not in SELF_ORDERED_KINDS or filters.get("by") in GROUPINGS[1:]
        end, rows = ("newest", rows[-limit:]) if is_newest else ("first", rows[:limit])
        click.echo(f"only the {end} {limit} rows are shown; --limit N shows more", err=True)
    rows = [{**row, **select_device_metrics(row)} for row in rows]
    selected = get_columns(kind, filters.get("by") or GROUPINGS[0])
    names = [name for name in _TABLE_COLUMNS[kind] if kind not in AGGREGATE_KINDS or name in selected]
    print_rows(rows, select_known_columns(rows, names, DEVICE_MODEL_COLUMNS | _OPTIONAL_COLUMNS), "table", kind=kind)


def _print_all(source: Source, kind: str, filters: dict[str, Any], fmt: str) -> None:
    if filters["limit"]:
        pages: Iterator[list[Json]] = iter([source.read_newest(kind, filters)])
    else:
        pages = source.read_pages(kind, filters)
    pages = ([{**row, **select_device_metrics(row)} for row in page] for page in pages)
    first, second = next(pages, []), next(pages, None)
    names = (*get_columns(kind, filters.get("by") or GROUPINGS[0]), *_DERIVED_COLUMNS.get(kind, ()))
    # A long history is printed as it comes: later rows may be of nodes.
    names = names if second is not None else tuple(select_known_columns(first, names, DEVICE_MODEL_COLUMNS))
    print_pages(itertools.chain([first], [second] if second is not None else [], pages), names, fmt, kind=kind)


def _add_command(kind: str) -> None:
    @run_option
    @click.option("--device", help="One device; default: all.")
    @click.option("--since", help="From then on: an age (2h, 7d) or an ISO date and time; sums go by whole days.")
    @click.option("--until", help="Before then.")
    @click.option(
        "--where",
        multiple=True,
        help="Rows that hold to a condition on a column: staleness>3, outcome=lost, reason~disk, accuracy!=null.",
    )
    @click.option(
        "--limit",
        type=click.IntRange(min=1),
        help=f"Newest rows [default: {DEFAULT_LIMIT} in a table, all in json and csv].",
    )
    @source_options
    @format_option
    def show(*, since: str | None, until: str | None, source: Source, fmt: str, **filters: Any) -> None:
        now = datetime.now(tz=UTC).timestamp()
        filters["since"] = None if since is None else parse_time(since, now=now)
        filters["until"] = None if until is None else parse_time(until, now=now)
        if fmt == "table":
            _print_table(source, kind, filters)
        else:
            _print_all(source, kind, filters, fmt)

    if kind in AGGREGATE_KINDS:
        show = click.option(
            "--by", type=click.Choice(GROUPINGS), default=GROUPINGS[0], show_default=True, help="What to sum by."
        )(show)
    command.command(kind, help=_KIND_HELP[kind])(show)


for _kind in COLUMNS:
    _add_command(_kind)
