"""`edgefl export`: takes a run elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from edgefl.cli.listing import ListedGroup


@click.group("export", cls=ListedGroup)
def command() -> None:
    """Take a run elsewhere."""


@command.command("flower-app")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="A new folder for the app."
)
@click.option("--scheme", help="How nodes without a shard cut the task's data set [default: the task's own way].")
def flower_app(*, file: Path, out: Path, scheme: str | None) -> None:
    """Write the run of FILE (TOML) as a Flower app: strategy and task run with plain `flwr run`."""
    from edgefl.adapters.flower_app import write_flower_app  # noqa: PLC0415 fast start
    from edgefl.assembly import assemble  # noqa: PLC0415 likewise
    from edgefl.config import load_run  # noqa: PLC0415 likewise
    from edgefl.local_run import default_scheme  # noqa: PLC0415 likewise
    from edgefl.tasks.sharding import parse_scheme  # noqa: PLC0415 likewise

    config = load_run(file)
    assemble(config, "check")
    chosen = scheme or config.simulation.scheme or default_scheme(config.run.task)
    parse_scheme(chosen)
    for path in write_flower_app(config, out, scheme=chosen):
        click.echo(path)
