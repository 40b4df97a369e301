"""`edgefl export`: exports a run to other frameworks."""

from __future__ import annotations

from pathlib import Path

import click

from edgefl.cli.command_group import FullHelpGroup


@click.group("export", cls=FullHelpGroup)
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
    from edgefl.core.config import load_run  # noqa: PLC0415 likewise
    from edgefl.engine.build import build_run  # noqa: PLC0415 likewise
    from edgefl.flower.app_export import export_flower_app  # noqa: PLC0415 fast start
    from edgefl.simulation.local_run import default_scheme  # noqa: PLC0415 likewise
    from edgefl.tasks.sharding.partitioning import parse_scheme  # noqa: PLC0415 likewise

    config = load_run(file)
    build_run(config, "check")
    partition_scheme = scheme or config.simulation.scheme or default_scheme(config.run.task)
    parse_scheme(partition_scheme)
    for path in export_flower_app(config, out, scheme=partition_scheme):
        click.echo(path)
