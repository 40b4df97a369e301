"""`edgefl demo`: the main job for real on this machine, from nothing to a table of rounds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.render import known_columns, print_rows
from edgefl.errors import DataError, UsageError
from edgefl.storage.columns import OF_NODES
from edgefl.summary import accuracy_in_words, node_figures

if TYPE_CHECKING:
    from edgefl.local_fleet import LocalFleet

DEFAULT_OUT = Path("demo-run")
DEFAULT_ROUNDS = 20
ROUND_COLUMNS = (
    "round", "num_updates", "accuracy", "node_accuracy", "worst_node_accuracy", "disagreement", "loss", "bytes_up",
    "bytes_down", "seconds",
)  # fmt: skip
MARK = "made by edgefl demo\n"


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
    from edgefl.config import parse_run  # noqa: PLC0415 fast start
    from edgefl.local_fleet import LocalFleet  # noqa: PLC0415 likewise
    from edgefl.local_run import check_here, cut_devices, default_scheme  # noqa: PLC0415 likewise
    from edgefl.tasks.cutting import plan_shards  # noqa: PLC0415 likewise

    config = parse_run(
        {
            "run": {"task": task, "name": f"demo-{task}", "rounds": rounds, "seed": seed},
            "strategy": {"name": strategy},
            "devices": {"min": devices},
        }
    )
    check_here(config)
    scheme = scheme or default_scheme(task)
    plan_shards(
        task, scheme, devices, data, seed
    )  # what is wrong with them is said before an earlier demo is replaced
    _clear(out)
    click.echo(f"cutting {task} into {devices} shards ({scheme}, seed {seed})")
    cut = cut_devices(task, scheme, devices, out / "shards", data, seed)
    click.echo(f"starting a coordinator and {devices} devices; their logs are in {out}")
    with LocalFleet(root=out.resolve(), devices=cut.devices, test_shards=cut.test_shards, broker=broker) as fleet:
        run_id = fleet.submit(config)
        _watch(fleet, run_id)
        rows = fleet.history("rounds", run=run_id)  # what is in flight at the end may make one more
    for row in rows:
        row["seconds"] = row["closed_at"] - row["started_at"] if row["closed_at"] else None
        row.update(node_figures(row))
    print_rows(rows, known_columns(rows, ROUND_COLUMNS, OF_NODES), title=f"run {run_id}")
    if told := [words for row in rows if (words := accuracy_in_words(row))]:
        click.echo(told[-1])
    click.echo(f"database: {fleet.database}")
    click.echo(f"query it: edgefl history updates --dir {fleet.directory} --run {run_id}")


def _watch(fleet: LocalFleet, run_id: str) -> None:
    from edgefl.cli.run import RunProgress  # noqa: PLC0415 fast start

    with RunProgress() as progress:
        fleet.wait_run(run_id, on_change=progress.show)


def _clear(out: Path) -> None:
    """Makes the folder anew; what a demo did not make is not touched."""
    mark = out / ".edgefl-demo"
    try:
        if out.exists() and any(out.iterdir()):
            if not mark.exists():
                raise UsageError(f"{out} exists and is not of an earlier demo; choose another --out")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        mark.write_text(MARK)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from None
