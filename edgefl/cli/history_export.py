"""`edgefl history export`: the history as files."""

from __future__ import annotations

from pathlib import Path

import click

from edgefl.cli.history_source import find_history_source
from edgefl.cli.source_options import source_options


@click.command(name="export")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--run", metavar="RUN", help="A run's id or the beginning of it, its name, or `latest`; default: all runs."
)
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@source_options
def export(*, folder: Path, run: str | None, force: bool, directory: Path | None, url: str | None) -> None:
    """Write the history into DIR: per run a JSON summary and CSV files of its rounds and of each device."""
    from edgefl.history.export import export_history  # noqa: PLC0415 fast start

    run_ids = export_history(find_history_source(directory, url).read_pages, folder, run=run, replace=force)
    click.echo(f"wrote {len(run_ids)} run{'' if len(run_ids) == 1 else 's'} to {folder}")
