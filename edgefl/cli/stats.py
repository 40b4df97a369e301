"""`edgefl stats` and `edgefl data drift`: figures of the data on the boards, of which no example leaves them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.output import JSON_VERSION, echo, format_option, print_json, print_rows
from edgefl.cli.run import wait_for_run
from edgefl.cli.sources import FILE_TYPE, NumberRange, allow_module_option, make_client, make_path, url_option
from edgefl.core.errors import DataError, DriftError, NetworkError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json, Scalar

COLUMNS = ("name", "count", "missing", "mean", "std", "min", "5 %", "25 %", "50 %", "75 %", "95 %", "max", "boards")
DRIFT_COLUMNS = ("name", "num_reference", "num_newer", "psi", "ks", "mmd", "p")
QUANTILES = {"5 %": "0.05", "25 %": "0.25", "50 %": "0.5", "75 %": "0.75", "95 %": "0.95"}
"""Headings of quantiles, and their names in a result."""
MAX_SHOWN_ROWS = 50


@click.command("stats")
@click.argument("task")
@click.option("--columns", default="", help="Names, numbers and ranges such as 0-9, with commas [default: all].")
@click.option(
    "--min-group",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Least number of examples that anything a board says of values is about.",
)
@click.option("--cells", type=click.IntRange(min=2), default=256, show_default=True, help="Of each histogram.")
@click.option("--boards", type=click.IntRange(min=1), default=1, show_default=True, help="Least number to wait for.")
@click.option(
    "--shard",
    "shards",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Ask no fleet, but this file or folder as if it were a board's; may be repeated.",
)
@allow_module_option
@url_option
@format_option
def command(  # noqa: PLR0913 the options of one command
    *,
    task: str,
    columns: str,
    min_group: int,
    cells: int,
    boards: int,
    shards: tuple[Path, ...],
    url: str | None,
    fmt: str,
) -> None:
    """Print figures of TASK's columns and classes, of each board and in all, without any example.

    TASK is a task's name, or a run file (TOML) that has its options.

    Count, missing, mean, deviation, extremes, quantiles and histogram of each column. It is a run of two rounds, for
    which at least one board needs a shard for TASK.
    """
    options: dict[str, Any] = {"columns": columns, "min_group": min_group, "cells": cells}
    if shards and url is not None:
        raise UsageError("--shard asks no coordinator, so that --url means nothing; give one of them")
    name, settings = _read_task(task)
    if shards:
        result = _measure_shards(name, settings, options, shards)
    else:
        strategy = {"name": "statistics", **options}
        run = {"task": name, "name": f"{name}-statistics"}
        result = _run_at_coordinator(
            {"run": run, "task": settings, "strategy": strategy, "devices": {"min": boards}}, url
        )
    _print_result(result, fmt)


@click.command("drift")
@click.argument("task")
@click.option(
    "--reference", required=True, type=click.Path(path_type=Path, exists=True), help="File or folder: what was."
)
@click.option(
    "--data", "newer", required=True, type=click.Path(path_type=Path, exists=True), help="File or folder: what is."
)
@click.option(
    "--columns",
    default="",
    help="Names, numbers and ranges such as 0-9, with commas [default: all, and the classes].",
)
@click.option(
    "--bins",
    type=click.IntRange(2, 1000),
    default=10,
    show_default=True,
    help="Cells of equal share in the reference, for the index.",
)
@click.option(
    "--model",
    type=FILE_TYPE,
    help="A model of the task: what its last layer gets is compared, too, in a row features.",
)
@click.option(
    "--threshold",
    type=NumberRange(min=0, min_open=True),
    help="End with exit code 52 where an index is above it, such as 0.25.",
)
@allow_module_option
@format_option
def drift(  # noqa: PLR0913 the options of one command
    *,
    task: str,
    reference: Path,
    newer: Path,
    columns: str,
    bins: int,
    model: Path | None,
    threshold: float | None,
    fmt: str,
) -> None:
    """Compare newer data of TASK with a reference, column by column, on this machine.

    TASK is a task's name, or a run file (TOML) that has its options. psi is the population stability index, ks the
    Kolmogorov-Smirnov statistic. The classes are a row, too. In the last row, joint, mmd is the maximum mean
    discrepancy of all columns at once, p how often chance alone makes it as large.
    """
    from edgefl.tasks.datasets import drift as measures  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.central import read_own_data  # noqa: PLC0415 fast start
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    made = make_task(*_read_task(task))
    old, new = read_own_data(made, reference), read_own_data(made, newer)
    found = measures.measure_drift(made, old, new, columns=columns, bins=bins)
    joint = {measures.JOINT: measures.measure_joint_drift(made, old, new, columns=columns)}
    if model is not None:
        from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 likewise

        tensors = load_model_file(model)
        joint[measures.FEATURES] = measures.measure_feature_drift(made, tensors, old, new)
    title = f"{made.name}: {len(new)} examples against {len(old)}"
    rows = [
        {
            "name": column.name,
            "num_reference": column.num_reference,
            "num_newer": column.num_newer,
            "psi": column.psi,
            "ks": column.ks,
        }
        for column in found
    ]
    for name, one in joint.items():
        sizes = {"num_reference": one.num_reference, "num_newer": one.num_newer}
        rows.append({"name": name, **sizes, "mmd": one.mmd, "p": one.p_value})
    print_rows(rows, DRIFT_COLUMNS, fmt, title=title, kind="drift")
    if threshold is not None and (above := [column for column in found if column.psi > threshold]):
        raise DriftError(
            f"psi must be at most {threshold:g}, got {above[0].psi:.4g} of column {above[0].name}; "
            f"{len(above)} of {len(found)} columns are above"
        )


def _read_task(task: str) -> tuple[str, dict[str, Scalar]]:
    """Returns name and options of a task, of a run file those of the run's."""
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start

    if not task.endswith(".toml"):
        return task, {}
    config = load_run(Path(task))
    return config.run.task, dict(config.task)


def _run_at_coordinator(config: Json, url: str | None) -> Json:
    from edgefl.core.safe_parsing import parse_json  # noqa: PLC0415 fast start

    client = make_client(url)
    run_id = client.post("/edgefl/v1/runs", {"config": config, "priority": 0})["run_id"]
    echo(f"run {run_id}", err=True)
    wait_for_run(run_id, url)
    body = io.BytesIO()
    client.download(f"{make_path('runs', run_id)}/result", body)
    try:
        result: Json = parse_json(body.getvalue())
    except ValueError as error:
        raise NetworkError(f"the coordinator's result of run {run_id} is no JSON: {error}") from None
    return result


def _measure_shards(name: str, settings: Mapping[str, Scalar], options: Json, paths: tuple[Path, ...]) -> Json:
    """Returns what boards with these shards would say, named by their paths."""
    from edgefl.core.analyses import BoardSums, get_num_rounds  # noqa: PLC0415 fast start
    from edgefl.tasks.analyses.analysis import read_result  # noqa: PLC0415 likewise
    from edgefl.tasks.analyses.registry import make_analysis  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.central import read_own_data  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.shards import drop_unlabelled  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    task = make_task(name, settings)
    analysis = make_analysis(task, "statistics", options)
    model = analysis.make_model()
    data = {str(path): drop_unlabelled(read_own_data(task, path)) for path in paths}
    for _ in range(get_num_rounds("statistics") or 1):
        request = analysis.make_request(model)
        boards = (BoardSums(device_id=path, sums=analysis.measure(request, part)) for path, part in data.items())
        model = analysis.solve(model, boards)
    return read_result(model)


def _print_result(result: Json, fmt: str) -> None:
    if fmt == "json":
        print_json({**result, "v": JSON_VERSION, "kind": "statistics"})
        return
    if not result["rows"]:
        raise DataError(
            f"no board has {result['min_group']} examples or more of task {result['task']}; nothing is told"
        )
    rows = [_format_column(column) for column in result["columns"]]
    if fmt == "csv":
        print_rows(rows, COLUMNS, fmt, kind="statistics")
        return
    print_rows(rows[:MAX_SHOWN_ROWS], COLUMNS, fmt, title=f"{result['task']}: {result['rows']} examples")
    if len(rows) > MAX_SHOWN_ROWS:
        echo(f"{len(rows) - MAX_SHOWN_ROWS} more columns: --format json, or name some with --columns")
    if "classes" in result:
        total = {"board": "all", "rows": result["rows"], **result["classes"]}
        boards = [{"board": one["device_id"], "rows": one["rows"], **one["classes"]} for one in result["boards"]]
        print_rows([total, *boards[:MAX_SHOWN_ROWS]], tuple(total), fmt, title="classes")


def _format_column(column: Json) -> Json:
    quantiles = column.get("quantiles", {})
    return {
        **{name: column.get(name) for name in COLUMNS},
        **{heading: quantiles.get(name) for heading, name in QUANTILES.items()},
    }
