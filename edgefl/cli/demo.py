"""`edgefl demo`: a real run on this machine, from nothing to a table of rounds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.render import print_rows, select_known_columns
from edgefl.core.errors import DataError, UsageError
from edgefl.engine.run_summary import format_accuracy, select_device_metrics
from edgefl.storage.queries.columns import DEVICE_MODEL_COLUMNS

if TYPE_CHECKING:
    from edgefl.simulation.local_fleet import LocalFleet

DEFAULT_OUT = Path("demo-run")
DEFAULT_ROUNDS = 20
ROUND_COLUMNS = (
    "round", "num_updates", "accuracy", "node_accuracy", "worst_node_accuracy", "disagreement", "loss", "bytes_up",
    "bytes_down", "seconds",
)  # fmt: skip
MARKER_TEXT = "made by edgefl demo\n"


@click.command("demo")
@click.option("--task", default="digits", show_default=True, help="A task that can be cut into shards.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data set; digits needs none.")
@click.option("--devices", type=click.IntRange(1, 64), default=4, show_default=True, help="How many processes train.")
@click.option("--strategy", default="fedavg", show_default=True, help="Who trains, and how updates become a model.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=DEFAULT_ROUNDS,
    show_default=True,
    help="The demo ends after these.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="The same seed cuts and trains the same.")
@click.option(
    "--scheme", help="How the data is cut [default: digits dirichlet:0.5, motionsense natural, others iid]."
)
@click.option(
    "--broker",
    type=click.Choice(["auto", "mosquitto", "embedded"]),
    default="auto",
    show_default=True,
    help="auto takes mosquitto when it is installed.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_OUT,
    show_default=True,
    help="Folder for all of it; an earlier demo there is replaced.",
)
def command(  # noqa: PLR0913 one per option
    *,
    task: str,
    data: Path | None,
    devices: int,
    strategy: str,
    rounds: int,
    seed: int,
    scheme: str | None,
    broker: str,
    out: Path,
) -> None:
    """Run a coordinator and several devices on this machine: joined over TLS, with data of their own."""
    from edgefl.core.config import parse_run  # noqa: PLC0415 fast start
    from edgefl.simulation.local_fleet import LocalFleet  # noqa: PLC0415 likewise
    from edgefl.simulation.local_run import check_run, default_scheme, partition_devices  # noqa: PLC0415 likewise
    from edgefl.tasks.sharding.shard_creation import plan_shards  # noqa: PLC0415 likewise

    config = parse_run(
        {
            "run": {"task": task, "name": f"demo-{task}", "rounds": rounds, "seed": seed},
            "strategy": {"name": strategy},
            "devices": {"min": devices},
        }
    )
    check_run(config)
    scheme = scheme or default_scheme(task)
    plan_shards(task, scheme, devices, data, seed)  # invalid options are reported before an earlier demo is replaced
    _clear_folder(out)
    click.echo(f"cutting {task} into {devices} shards ({scheme}, seed {seed})")
    partition = partition_devices(task, scheme, devices, out / "shards", data, seed)
    click.echo(f"starting a coordinator and {devices} devices; their logs are in {out}")
    with LocalFleet(
        root=out.resolve(), devices=partition.devices, test_shards=partition.test_shards, broker=broker
    ) as fleet:
        run_id = fleet.submit(config)
        _watch_run(fleet, run_id)
        rows = fleet.list_history("rounds", run=run_id)  # in-flight updates at the end may complete one more
    for row in rows:
        row["seconds"] = row["closed_at"] - row["started_at"] if row["closed_at"] else None
        row.update(select_device_metrics(row))
    print_rows(rows, select_known_columns(rows, ROUND_COLUMNS, DEVICE_MODEL_COLUMNS), title=f"run {run_id}")
    if accuracies := [words for row in rows if (words := format_accuracy(row))]:
        click.echo(accuracies[-1])
    click.echo(f"database: {fleet.database}")
    click.echo(f"query it: edgefl history updates --dir {fleet.directory} --run {run_id}")


def _watch_run(fleet: LocalFleet, run_id: str) -> None:
    from edgefl.cli.run import RunProgressBar  # noqa: PLC0415 fast start

    with RunProgressBar() as progress:
        fleet.wait_for_run(run_id, on_change=progress.update)


def _clear_folder(out: Path) -> None:
    """Makes the folder anew; files not made by a demo are not touched."""
    marker = out / ".edgefl-demo"
    try:
        if out.exists() and any(out.iterdir()):
            if not marker.exists():
                raise UsageError(f"{out} exists and is not of an earlier demo; choose another --out")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        marker.write_text(MARKER_TEXT)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from None
