"""`edgefl simulate`: a run on a simulated fleet, in virtual time."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.render import format_option, print_rows, select_known_columns
from edgefl.core.errors import UsageError
from edgefl.engine.run_summary import format_accuracy, select_device_metrics
from edgefl.storage.queries.columns import DEVICE_MODEL_COLUMNS

if TYPE_CHECKING:
    from edgefl.core.config import RunConfig
    from edgefl.core.types import Json

ROUND_COLUMNS = (
    "round", "num_updates", "accuracy", "node_accuracy", "worst_node_accuracy", "disagreement", "loss", "bytes_up",
    "bytes_down", "seconds", "ended_s",
)  # fmt: skip
PROFILE_COLUMNS = (
    "name", "model", "speed", "up_bytes_per_s", "down_bytes_per_s", "latency_s", "memory_bytes", "source",
)  # fmt: skip
MAX_SHOWN_ROUNDS = 50
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.command("simulate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--devices", type=click.IntRange(1, 1_000_000), help="How many devices [default: the run file's].")
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME[:COUNT]|FILE.toml",
    help="Kind of board; may be repeated, and is given round and round.",
)
@click.option(
    "--dir",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the history is kept [default: ~/.local/share/edgefl/simulations].",
)
@click.option("--bookkeeping-only", is_flag=True, help="Train nothing: times, bytes and schedules alone.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data set; digits needs none.")
@click.option(
    "--scheme", help="How the data is cut [default: digits dirichlet:0.5, motionsense natural, others iid]."
)
@click.option("--seed", type=click.IntRange(min=0), help="In place of the run file's.")
@click.option("--faults", type=click.Path(path_type=Path), help="A fault script.")
@click.option(
    "--workers", type=click.IntRange(0, 256), help="Processes that train; 0 for this one [default: measured]."
)
@click.option(
    "--list-profiles", is_flag=True, help="Print the profiles that there are, and where their numbers are from."
)
@format_option
def command(  # noqa: PLR0913 one per option
    *,
    file: Path | None,
    devices: int | None,
    profiles: tuple[str, ...],
    root: Path | None,
    bookkeeping_only: bool,
    data: Path | None,
    scheme: str | None,
    seed: int | None,
    faults: Path | None,
    workers: int | None,
    list_profiles: bool,
    fmt: str,
) -> None:
    """Run FILE.toml on a virtual fleet: the same loop, strategies and training, in virtual time."""
    if list_profiles:
        _print_profiles(profiles, fmt)
        return
    if file is None:
        raise UsageError("a simulation needs a run file: edgefl simulate FILE.toml")
    _use_one_thread()
    from edgefl.cli.run import RunProgressBar  # noqa: PLC0415 fast start
    from edgefl.core.config import load_run  # noqa: PLC0415 likewise
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 likewise

    config = _apply_options(load_run(file), seed, faults, workers)
    with _silence_recorder(), RunProgressBar() as progress:
        result = simulate(
            config,
            devices=devices,
            profiles=profiles,
            data=data,
            scheme=scheme,
            root=root,
            bookkeeping_only=bookkeeping_only,
            on_change=progress.update,
        )
    rows = _add_times(result.rounds)
    if fmt == "table" and len(rows) > MAX_SHOWN_ROUNDS:
        click.echo(f"only the newest {MAX_SHOWN_ROUNDS} of {len(rows)} rounds are shown", err=True)
        rows = rows[-MAX_SHOWN_ROUNDS:]
    columns = select_known_columns(rows, ROUND_COLUMNS, DEVICE_MODEL_COLUMNS)
    print_rows(rows, columns, fmt, title=f"run {result.run_id} ({result.reason})", kind="rounds")
    if fmt == "table":
        if words := format_accuracy(result.metrics):
            click.echo(words)
        click.echo(f"virtual time: {result.metrics['seconds']:.1f} s; database: {result.root / 'edgefl.db'}")
        click.echo(f"query it: edgefl history updates --dir {result.root} --run {result.run_id}")


@contextlib.contextmanager
def _silence_recorder() -> Iterator[None]:
    """Keeps lost instructions and evaluations off stderr: they are rows, thousands in simulated fleets."""
    log = logging.getLogger("edgefl.coordinator.runs.history_recorder")
    original_level = log.level
    if logging.getLogger().level > logging.DEBUG:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(original_level)


def _apply_options(config: RunConfig, seed: int | None, faults: Path | None, workers: int | None) -> RunConfig:
    """Returns the run file with the command-line options applied."""
    section = config.simulation
    simulation = replace(
        section,
        faults=section.faults if faults is None else str(faults.absolute()),
        workers=section.workers if workers is None else workers,
    )
    return replace(
        config, simulation=simulation, run=replace(config.run, seed=config.run.seed if seed is None else seed)
    )


def _add_times(rounds: Sequence[Json]) -> list[Json]:
    """Returns rounds with their virtual seconds, and their end since the start of the first."""
    start = rounds[0]["started_at"] if rounds else 0.0
    closed = [row for row in rounds if row["closed_at"] is not None]
    return [
        {
            **row,
            **select_device_metrics(row),
            "seconds": row["closed_at"] - row["started_at"],
            "ended_s": row["closed_at"] - start,
        }
        for row in closed
    ]


def _print_profiles(paths: Sequence[str], fmt: str) -> None:
    from edgefl.simulation.profiles import load_catalogue  # noqa: PLC0415 fast start

    catalogue = load_catalogue([path for path in paths if path.endswith(".toml")])
    rows = [
        {
            **{name: getattr(profile, name) for name in PROFILE_COLUMNS if name != "source"},
            "source": dict(profile.sources) if fmt != "table" else _format_sources(profile.sources),
        }
        for profile in catalogue.profiles.values()
    ]
    print_rows(rows, PROFILE_COLUMNS, fmt, kind="profiles")


def _format_sources(sources: Mapping[str, str]) -> str:
    """Returns the origin of the profiles' numbers: measured, vendor or estimated."""
    kinds: dict[str, list[str]] = {}
    for name, text in sources.items():
        kinds.setdefault(text.partition(":")[0], []).append(name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def _use_one_thread() -> None:
    """Limits BLAS to one thread, for equal bits here and in a worker process."""
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
