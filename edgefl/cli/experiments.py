"""Experiments on one machine: `edgefl simulate` in virtual time, `demo` with real processes, `data` to cut shards."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.output import (
    FullHelpGroup,
    Function,
    format_option,
    make_broker_option,
    print_rows,
    select_known_columns,
    silence_recorder,
)
from edgefl.cli.run import RunProgressBar
from edgefl.cli.sources import FOLDER_TYPE, NumberRange, allow_module_option
from edgefl.cli.stats import drift
from edgefl.core.errors import DataError, UsageError
from edgefl.core.types import DEMO_MARKER
from edgefl.engine.run_summary import RunResult, format_accuracy, format_quality, select_device_metrics
from edgefl.storage.queries.columns import DEVICE_MODEL_COLUMNS

if TYPE_CHECKING:
    from edgefl.core.config import RunConfig
    from edgefl.core.types import Json, Scalar
    from edgefl.tasks.datasets.shards import ShardMetadata

ROUND_COLUMNS = (
    "round", "num_updates", "accuracy", "node_accuracy", "worst_node_accuracy", "disagreement", "loss", "metrics",
    "bytes_up", "bytes_down", "seconds", "ended_s",
)  # fmt: skip
OPTIONAL_COLUMNS = DEVICE_MODEL_COLUMNS | {"accuracy", "metrics"}
"""Columns of rounds that a table has only where known: values have no accuracy, and few tasks declare metrics."""
PROFILE_COLUMNS = (
    "name", "model", "speed", "up_bytes_per_s", "down_bytes_per_s", "latency_s", "memory_bytes", "source",
)  # fmt: skip
MAX_SHOWN_ROUNDS = 50
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
DEFAULT_OUT = Path("demo-run")
DEFAULT_SEED = 7
DEFAULT_ROUNDS = 20
MARKER_TEXT = "made by edgefl demo\n"
FORMAT_VERSION = 1


test_option = click.option(
    "--test",
    type=click.Path(path_type=Path),
    help="Test data for a task of your own, or one like table, in place of a part of the data: a path that it reads.",
)


_DATA_OPTIONS = (
    click.option(
        "--data",
        type=click.Path(path_type=Path),
        help="Folder of the data set, or the path that a task of your own reads; digits needs none.",
    ),
    click.option(
        "--shards",
        multiple=True,
        type=click.Path(path_type=Path),
        help="Data of your own in place of a cut data set: an entry of a folder, or a file, is one device's; "
        "repeatable.",
    ),
    click.option(
        "--scheme", help="How the data is cut [default: digits dirichlet:0.5, motionsense natural, others iid]."
    ),
    test_option,
)
profile_option = click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME[:COUNT]|FILE.toml",
    help="Kind of board; may be repeated, and is given round and round.",
)
history_option = click.option(
    "--dir",
    "root",
    type=FOLDER_TYPE,
    help="Where the history is kept [default: ~/.local/share/edgefl/simulations].",
)
_FLEET_OPTIONS = (
    click.option("--devices", type=click.IntRange(1, 1_000_000), help="How many devices [default: the run file's]."),
    profile_option,
    history_option,
    click.option("--bookkeeping-only", is_flag=True, help="Train nothing: times, bytes and schedules alone."),
    *_DATA_OPTIONS,
    click.option("--faults", type=click.Path(path_type=Path), help="A fault script."),
    click.option(
        "--accelerator", metavar="cpu|cuda|cuda:N", help="What trains, such as a GPU [default: the run file's]."
    ),
    click.option(
        "--engine",
        type=click.Choice(["process", "ray"]),
        help="Where it trains: in processes of this machine, or on a Ray cluster [default: the run file's].",
    ),
    click.option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster, of which this machine is a node; without it, one is started here for the run alone.",
    ),
    click.option(
        "--worker-gpus",
        type=NumberRange(0, 64),
        help="GPUs of each worker on Ray, such as 0.25 where four share one.",
    ),
)


PLACE_OPTIONS = ("accelerator", "engine", "address", "worker_gpus")
"""Those of `fleet_options` that say where it trains."""


def fleet_options(function: Function) -> Function:
    """Adds the options of a virtual fleet: its devices, their data, what trains, and the folder of the history."""
    return _add_options(_FLEET_OPTIONS, function)


def data_options(function: Function) -> Function:
    """Adds the options of the data of a virtual fleet: cut, or shards of one's own."""
    return _add_options(_DATA_OPTIONS, function)


def _add_options(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


@click.command("simulate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@fleet_options
@click.option("--seed", type=click.IntRange(min=0), help="In place of the run file's.")
@click.option(
    "--workers", type=click.IntRange(0, 256), help="Processes that train; 0 for this one [default: measured]."
)
@click.option(
    "--reference", is_flag=True, help="Also train one device on all of the data, as a line to compare with."
)
@click.option(
    "--list-profiles", is_flag=True, help="Print the profiles that there are, and where their numbers are from."
)
@allow_module_option
@format_option
def simulate(  # noqa: PLR0913 one per option
    *,
    file: Path | None,
    devices: int | None,
    profiles: tuple[str, ...],
    root: Path | None,
    bookkeeping_only: bool,
    data: Path | None,
    shards: tuple[Path, ...],
    scheme: str | None,
    test: Path | None,
    seed: int | None,
    faults: Path | None,
    reference: bool,
    list_profiles: bool,
    fmt: str,
    **places: Any,
) -> None:
    """Run FILE.toml on a virtual fleet: the same loop, strategies and training, in virtual time."""
    if list_profiles:
        _print_profiles(profiles, fmt)
        return
    if file is None:
        raise UsageError("a simulation needs a run file: edgefl simulate FILE.toml")
    use_one_thread()
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start
    from edgefl.simulation.advice.automatic import settle_simulation  # noqa: PLC0415 likewise
    from edgefl.simulation.simulated_run import make_reference, read_scales  # noqa: PLC0415 likewise
    from edgefl.simulation.simulated_run import simulate as run_simulation  # noqa: PLC0415 likewise

    config = apply_options(load_run(file), test, seed, faults, **places)
    is_cut = devices is not None or data is not None or scheme is not None
    check_options(shards, is_cut=is_cut, has_test=test is not None, reference=reference, trains=not bookkeeping_only)
    with silence_recorder():
        choice = settle_simulation(
            config, clock=time.perf_counter, devices=list_shards(shards) or devices, profiles=profiles, data=data,
            scheme=scheme, trains=not bookkeeping_only,
        )  # fmt: skip
    config = choice.config
    for reason in choice.reasons:
        click.echo(reason, err=True)
    with silence_recorder(), RunProgressBar() as progress:
        result = run_simulation(
            config,
            devices=list_shards(shards) or devices,
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
    columns = select_known_columns(rows, ROUND_COLUMNS, OPTIONAL_COLUMNS if fmt == "table" else DEVICE_MODEL_COLUMNS)
    print_rows(rows, columns, fmt, title=f"run {result.run_id} ({result.reason})", kind="rounds")
    if fmt == "table":
        if words := format_accuracy(result.metrics):
            click.echo(words)
        if result.result is not None:
            click.echo(f"result: {result.result}")
        click.echo(f"virtual time: {result.metrics['seconds']:.1f} s; database: {result.root / 'edgefl.db'}")
        click.echo(f"query it: edgefl history updates --dir {result.root} --run {result.run_id}")
    if reference:
        with silence_recorder(), RunProgressBar() as progress:
            alone = run_simulation(
                make_reference(read_scales(config, result)),
                profiles=profiles,
                data=data,
                root=root,
                on_change=progress.update,
            )
        click.echo(_format_reference(result, alone), err=fmt != "table")


def check_options(shards: Sequence[Path], *, is_cut: bool, has_test: bool, reference: bool, trains: bool) -> None:
    if shards and is_cut:
        raise UsageError("--shards says who has what; --devices, --data and --scheme are for a data set that is cut")
    if has_test and not trains:
        raise UsageError("--test is what models are evaluated on; --bookkeeping-only has none")
    if reference and (shards or not trains):
        raise UsageError("--reference trains on a data set that is cut; it goes without --shards, --bookkeeping-only")


def _format_reference(result: RunResult, alone: RunResult) -> str:
    title = "reference, one device with all of the data"
    if alone.result is not None:
        return f"{title}: result {alone.result}"
    quantity = "loss" if alone.metrics.get("accuracy") is None else "accuracy"
    return (
        f"the fleet: {format_quality(result.metrics) or 'no evaluation'}\n"
        f"{title}: {format_quality(alone.metrics) or 'no evaluation'}\n"
        f"both: edgefl history plot {quantity} --dir {alone.root} --run {result.run_id} --reference {alone.run_id}"
    )


def list_shards(paths: Sequence[Path]) -> list[Path]:
    """Returns one shard per device: files, and the entries of folders by name, without cards and a test shard.

    Raises:
        DataError: there is no such path, or a folder without entries.
    """
    from edgefl.tasks.datasets.central import TEST_NAME  # noqa: PLC0415 fast start

    shards = []
    for path in paths:
        if not path.exists():
            raise DataError(f"there is no {path}; --shards takes a folder with one entry per device, or single files")
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [
            entry
            for entry in entries
            if not entry.name.startswith(".") and entry.suffix != ".json" and entry.name != TEST_NAME
        ]
        if not found:
            raise DataError(f"folder {path} holds no shard; it should have one file or folder per device")
        shards += found
    return shards


def apply_options(
    config: RunConfig,
    test: Path | None,
    seed: int | None,
    faults: Path | None,
    **places: Any,
) -> RunConfig:
    """Returns the run file with the command-line options applied; `places` are `PLACE_OPTIONS`, None for absent."""
    section = config.simulation
    simulation = replace(
        section,
        test=section.test if test is None else str(test),
        faults=section.faults if faults is None else str(faults.absolute()),
        **{name: value for name, value in places.items() if value is not None},
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


def use_one_thread() -> None:
    """Limits BLAS to one thread, for equal bits here and in a worker process."""
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))


run_file_option = click.option(
    "--run-file",
    type=click.Path(path_type=Path),
    help="Run file whose [task] says what is read, such as columns; a task like table needs it.",
)


@click.command("demo")
@click.option("--task", help="A task that can be cut into shards [default: the run file's, else digits].")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data set; digits needs none.")
@click.option("--devices", type=click.IntRange(1, 64), default=4, show_default=True, help="How many processes train.")
@click.option("--strategy", help="Who trains, and how updates become a model [default: the run file's, else fedavg].")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help=f"The demo ends after these [default: the run file's, else {DEFAULT_ROUNDS}].",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="The same seed cuts and trains the same [default: the run file's, else 7].",
)
@click.option(
    "--scheme", help="How the data is cut [default: digits dirichlet:0.5, motionsense natural, others iid]."
)
@test_option
@make_broker_option("--broker")
@click.option(
    "--out",
    type=FOLDER_TYPE,
    default=DEFAULT_OUT,
    show_default=True,
    help="Folder for all of it; an earlier demo there is replaced.",
)
@click.option(
    "--run-file", type=click.Path(path_type=Path), help="Run file to demonstrate; the other options go before it."
)
@allow_module_option
def demo(  # noqa: PLR0913 one per option
    *,
    task: str | None,
    data: Path | None,
    devices: int,
    strategy: str | None,
    rounds: int | None,
    seed: int | None,
    scheme: str | None,
    test: Path | None,
    broker: str,
    out: Path,
    run_file: Path | None,
) -> None:
    """Run a coordinator and several devices on this machine: joined over TLS, with data of their own."""
    from edgefl.simulation.local_fleet import (  # noqa: PLC0415 fast start
        LocalFleet,
        check_run,
        default_scheme,
        partition_devices,
    )
    from edgefl.tasks.datasets.central import plan_shards  # noqa: PLC0415 likewise

    config = make_demo_run(run_file, task=task, strategy=strategy, rounds=rounds, seed=seed, devices=devices)
    task, options, seed = config.run.task, config.task, config.run.seed
    check_run(config)
    scheme = scheme or default_scheme(task)
    # Errors come before an earlier demo is replaced.
    plan_shards(task, scheme, devices, data, seed, options=options, test=test)
    clear_folder(out)
    click.echo(f"cutting {task} into {devices} shards ({scheme}, seed {seed})")
    specs, test_shards = partition_devices(
        task, scheme, devices, out / "shards", data, seed, options=options, test=test
    )
    click.echo(f"starting a coordinator and {devices} devices; their logs are in {out}")
    with LocalFleet(root=out.resolve(), devices=specs, test_shards=test_shards, broker=broker) as fleet:
        run_id = fleet.submit(config)
        with RunProgressBar() as progress:
            fleet.wait_for_run(run_id, on_change=progress.update)
        rows = fleet.list_history("rounds", run=run_id)  # in-flight updates at the end may complete one more
    for row in rows:
        row["seconds"] = row["closed_at"] - row["started_at"] if row["closed_at"] else None
        row.update(select_device_metrics(row))
    print_rows(rows, select_known_columns(rows, ROUND_COLUMNS[:-1], OPTIONAL_COLUMNS), title=f"run {run_id}")
    if accuracies := [words for row in rows if (words := format_accuracy(row))]:
        click.echo(accuracies[-1])
    click.echo(f"database: {fleet.database}")
    click.echo(f"query it: edgefl history updates --dir {fleet.directory} --run {run_id}")


def make_demo_run(
    run_file: Path | None,
    *,
    task: str | None,
    strategy: str | None,
    rounds: int | None,
    seed: int | None,
    devices: int,
) -> RunConfig:
    """Returns a run of these options, and of a run file where they say nothing; no device that it names is here."""
    from edgefl.core.config import load_run, parse_run  # noqa: PLC0415 fast start

    name, _ = _read_task(run_file, task)
    overrides: dict[str, Any] = {
        key: value for key, value in (("rounds", rounds), ("seed", seed)) if value is not None
    }
    if run_file is None:
        config = parse_run({"run": {"task": name, "rounds": DEFAULT_ROUNDS, "seed": DEFAULT_SEED, **overrides}})
    else:
        config = load_run(run_file)
    return replace(
        config,
        run=replace(config.run, name=config.run.name or f"demo-{name}", **overrides),
        strategy=replace(config.strategy, name=strategy, options={}) if strategy else config.strategy,
        devices=replace(config.devices, min=devices, names=(), groups=()),
        aggregation=replace(config.aggregation, hosts=None),
    )


def _read_task(run_file: Path | None, task: str | None) -> tuple[str, Mapping[str, Scalar]]:
    """Returns a task's name and its options in a run file."""
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start

    if run_file is None:
        return task or "digits", {}
    config = load_run(run_file)
    if task not in {None, config.run.task}:
        raise UsageError(
            f"{run_file} is about the task {config.run.task}, the command about {task}; give one of them"
        )
    return config.run.task, config.task


def clear_folder(out: Path) -> None:
    """Makes the folder anew; files not made by a demo are not touched."""
    marker = out / DEMO_MARKER
    try:
        if out.exists() and any(out.iterdir()):
            if not marker.exists():
                raise UsageError(f"{out} exists and is not of an earlier demo; choose another --out")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        marker.write_text(MARKER_TEXT)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from None


@click.group("data", cls=FullHelpGroup)
def data() -> None:
    """Cut a data set into shards for experiments, or compare data. Real boards bring data of their own."""


@data.command("shard")
@click.argument("task")
@click.option(
    "--scheme",
    default="iid",
    show_default=True,
    help="natural, iid, contiguous (equal parts of the rows as they are), by-class, sorted (such parts of the rows "
    "by class), disorder:F (sorted, but for the fraction F of the rows, which is dealt at random), dirichlet:A, "
    "labels:K (K classes at random), classes:K (K in a row, the next device's K/2 further), "
    "shards:K (K such parts for each device, dealt at random), power:P (device i gets a share in proportion to i "
    "to the power P), redundant:R (every subset of R devices shares a "
    "block) or duplicate:R (devices in groups of R with equal shards). A scheme and a bar before the last two "
    "cut the blocks: 'sorted|redundant:2'. Partitioners of flwr-datasets by name: DirichletPartitioner:0.5.",
)
@click.option("--devices", type=click.IntRange(min=1), default=4, show_default=True, help="Number of shards.")
@click.option("--out", type=FOLDER_TYPE, required=True, help="Folder to write into.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder of the data set, or the path that a task of your own reads; otherwise the folder of the task's name "
    "in $EDGEFL_DATA.",
)
@test_option
@click.option("--seed", type=int, default=7, show_default=True, help="The same seed cuts the same shards.")
@run_file_option
@allow_module_option
@click.option("--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True)
def shard(  # noqa: PLR0913 one per option
    *,
    task: str,
    scheme: str,
    devices: int,
    out: Path,
    data: Path | None,
    test: Path | None,
    seed: int,
    run_file: Path | None,
    format_: str,
) -> None:
    """Writes device-01.npz and so on and test.npz, each with a card, and prints the examples per class."""
    from edgefl.tasks.datasets.central import TEST_NAME, create_shards  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.shards import read_metadata  # noqa: PLC0415 NumPy only where it is used

    task, options = _read_task(run_file, task)
    paths = create_shards(task, scheme, devices, out, data, seed, options=options, test=test)
    paths.append(out / TEST_NAME)
    cards = [(path, read_metadata(path)) for path in paths]
    if format_ == "json":
        click.echo(
            json.dumps({"v": FORMAT_VERSION, "shards": [_make_row(path, card) for path, card in cards]}, indent=1)
        )
    else:
        _print_cards(cards)


data.add_command(drift)


def _make_row(path: Path, card: ShardMetadata) -> dict[str, object]:
    return {
        "shard": path.stem,
        "path": str(path),
        "task": card.task,
        "scheme": card.scheme,
        "num_examples": card.num_examples,
        "counts": {str(label): count for label, count in card.counts.items()},
        "groups": list(card.groups),
        "blocks": sorted(card.blocks),
        "sha256": card.sha256,
    }


def _print_cards(cards: list[tuple[Path, ShardMetadata]]) -> None:
    first = cards[0][1]
    classes = sorted({label for _, card in cards for label in card.counts})
    names = {label: first.labels[label] if label < len(first.labels) else str(label) for label in classes}
    rows: list[dict[str, object]] = [
        {
            "shard": path.stem,
            "people": " ".join(card.groups),
            "examples": card.num_examples,
            **{name: card.counts.get(label, 0) for label, name in names.items()},
        }
        for path, card in cards
    ]
    columns = select_known_columns(rows, ("shard", "people", "examples", *names.values()), ("people",))
    print_rows(rows, columns, title=f"{first.task}: examples{' per class' if names else ''}")
