"""`edgefl sweep`: a run file on a virtual fleet with every combination of settings, and with several seeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.experiments import (
    PLACE_OPTIONS,
    apply_options,
    check_options,
    fleet_options,
    list_shards,
    use_one_thread,
)
from edgefl.cli.output import format_option, format_value, print_rows, select_known_columns, silence_recorder
from edgefl.cli.sources import allow_module_option
from edgefl.core.errors import RunFailedError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json
    from edgefl.simulation.sweep import SweepMetric, SweepOutcome

log = logging.getLogger(__name__)

MAX_SEEDS = 1000
MAX_TRIALS = 10_000
DEFAULT_TRIALS = 20
COUNT_COLUMNS = ("runs", "failed", "stopped", "no_value")
"""The last two where there are such runs."""


@click.command("sweep")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SETTING=VALUE,VALUE",
    help="Values of a setting of the run file, such as strategy.learning_rate=0.01,0.1; may be repeated, and every "
    "combination is run. With --search a range too, such as 0.01..0.5 or 0.01..0.5:log.",
)
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, MAX_SEEDS),
    default=1,
    show_default=True,
    help="Runs of each combination: with the run file's seed, and those that follow it.",
)
@click.option(
    "--jobs",
    "num_jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="How many run side by side, each in a process of its own.",
)
@click.option(
    "--search",
    "searcher",
    type=click.Choice(["random", "optuna"]),
    help="Propose --trials combinations in place of all: at random, or by Optuna from what the earlier ones came to.",
)
@click.option(
    "--trials",
    "num_trials",
    type=click.IntRange(1, MAX_TRIALS),
    help=f"Combinations that --search proposes. [default: {DEFAULT_TRIALS}]",
)
@click.option(
    "--early-stop",
    metavar="asha[:ETA[:FIRST]]",
    help="End runs that are behind: after FIRST rounds [1], and each ETA [3] times further, the best 1/ETA of the "
    "runs with one seed that came so far go on.",
)
@click.option("--retry-failed", is_flag=True, help="Run those once more that failed before.")
@fleet_options
@allow_module_option
@format_option
def command(  # noqa: PLR0913 one per option
    *,
    file: Path,
    settings: tuple[str, ...],
    num_seeds: int,
    num_jobs: int,
    searcher: str | None,
    num_trials: int | None,
    early_stop: str | None,
    retry_failed: bool,
    shards: tuple[Path, ...],
    root: Path | None,
    test: Path | None,
    faults: Path | None,
    fmt: str,
    **fleet: Any,
) -> None:
    """Simulate FILE.toml with every combination of settings and seeds, or search for the best, and compare them.

    Stopped and started again with the same words, it goes on: what the history has to its end is not run again.
    """
    use_one_thread()
    from edgefl.simulation.search.early_stopping import parse_early_stop  # noqa: PLC0415 likewise
    from edgefl.simulation.simulated_run import default_root  # noqa: PLC0415 fast start
    from edgefl.simulation.sweep import (  # noqa: PLC0415 likewise
        SweepPlan,
        parse_values,
        plan_sweep,
        run_sweep,
    )
    from edgefl.simulation.trials import Search, run_search  # noqa: PLC0415 likewise

    if num_trials is not None and searcher is None:
        raise UsageError("--trials needs --search random or --search optuna")
    rungs = None if early_stop is None else parse_early_stop(early_stop)

    places = {name: fleet.pop(name) for name in PLACE_OPTIONS}
    is_cut = any(fleet[name] is not None for name in ("devices", "data", "scheme"))
    trains = not fleet["bookkeeping_only"]
    check_options(shards, is_cut=is_cut, has_test=test is not None, reference=False, trains=trains)
    if rungs is not None and not trains:
        raise UsageError("--early-stop compares the quality of models, of which --bookkeeping-only trains none")
    values = parse_values(settings, allow_ranges=searcher is not None)
    plan_options: Json = {
        **fleet,
        "devices": list_shards(shards) or fleet["devices"],
        "apply_options": lambda config: apply_options(config, test, None, faults, **places),
    }
    simulate_all: Callable[..., list[SweepOutcome]]
    if searcher is None:
        runs = plan_sweep(file, values, num_seeds, **plan_options)
        simulate_all, num_runs = partial(run_sweep, runs), len(runs)
    else:
        plan = SweepPlan(file, num_seeds, **plan_options)
        search = Search(space=values, searcher=searcher, num_trials=num_trials or DEFAULT_TRIALS)
        search.check(plan)
        simulate_all, num_runs = partial(run_search, plan, search), search.num_trials * num_seeds
    folder = (root or default_root()).expanduser().resolve()
    num_ended = 0

    def log_end(outcome: SweepOutcome) -> None:
        nonlocal num_ended
        num_ended += 1
        log.log(
            logging.INFO if outcome.is_finished or outcome.is_stopped else logging.WARNING,
            "%d of %d: %s %s: %s", num_ended, num_runs, outcome.run.config.run.name,
            "finished" if outcome.is_finished else "stopped" if outcome.is_stopped else "failed", outcome.reason,
        )  # fmt: skip

    try:
        with silence_recorder():
            outcomes = simulate_all(
                folder, num_jobs=num_jobs, retry_failed=retry_failed, on_end=log_end, early_stop=rungs
            )
    except KeyboardInterrupt:
        click.echo(f"stopped after {num_ended} of {num_runs} runs; the same command goes on there", err=True)
        raise
    _print_results(outcomes, folder, fmt)


def _print_results(outcomes: Sequence[SweepOutcome], folder: Path, fmt: str) -> None:
    from edgefl.simulation.sweep import (  # noqa: PLC0415 fast start
        SUM_COLUMNS,
        select_metric,
        shorten_settings,
        summarise,
    )

    metric = select_metric(outcomes)
    spread = f"{metric.name}_spread"
    others = (metric.name, *(() if fmt == "table" else (spread,)), *COUNT_COLUMNS, *SUM_COLUMNS)
    names = shorten_settings([*outcomes[0].run.values], others)
    rows = [_make_row(row, metric, names, fmt) for row in summarise(outcomes, metric)]
    columns = dict.fromkeys((*names.values(), *others))
    title = f"{len(outcomes)} runs, by {metric.name}, {'highest' if metric.is_max else 'lowest'} first"
    print_rows(rows, select_known_columns(rows, [*columns], {"no_value", "stopped"}), fmt, title=title, kind="sweep")
    if all(not (outcome.is_finished or outcome.is_stopped) for outcome in outcomes):
        raise RunFailedError(f"all {len(outcomes)} runs failed; the last: {outcomes[-1].reason}")
    if fmt == "table":
        click.echo(f"database: {folder / 'edgefl.db'}")
        pattern = f"{str(outcomes[0].run.config.run.name).partition('=')[0]}=*"
        click.echo(f"draw it: edgefl history plot --dir {folder} --run '{pattern}' --spread --out sweep.png")


def _make_row(row: Json, metric: SweepMetric, names: dict[str, str], fmt: str) -> Json:
    from edgefl.simulation.sweep import format_setting_value  # noqa: PLC0415 fast start

    values = {names[setting]: format_setting_value(value) for setting, value in row["values"].items()}
    if fmt == "json":
        values = {names[setting]: value for setting, value in row["values"].items()}
    sums = {name: value for name, value in row.items() if name not in {"values", "mean", "spread"}}
    mean, spread = row["mean"], row["spread"]
    if fmt == "table":
        text = format_value(metric.name, mean)
        quality: Json = {metric.name: text if spread is None else f"{text} ± {format_value(metric.name, spread)}"}
    else:
        quality = {metric.name: mean, f"{metric.name}_spread": spread}
    counts = {"runs": row["num_runs"], "failed": row["num_failed"], "stopped": row["num_stopped"] or None}
    counts["no_value"] = row["num_unknown"] or None
    return {**values, **sums, **counts, **quality}
