"""`edgefl history why`: why a round took as long as it did."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgefl.cli.history_source import source_of
from edgefl.cli.whence import source_options


@click.command(name="why")
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
def why(*, run: str, round_number: int | None, directory: Path | None, url: str | None, fmt: str) -> None:
    """Say whom ROUND of RUN waited for, how long, and why.

    RUN is an id, a name or `latest`; without ROUND it is the one that took longest.
    """
    told = source_of(directory, url).why(run, round_number)
    if fmt == "json":
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        click.echo("".join(letter if letter.isprintable() else "\ufffd" for letter in told["sentence"]))
