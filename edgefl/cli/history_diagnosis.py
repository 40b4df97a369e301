"""`edgefl history why`: diagnosis of a round's duration."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgefl.cli.history_source import find_history_source
from edgefl.cli.source_options import source_options


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
    diagnosis = find_history_source(directory, url).explain_round(run, round_number)
    if fmt == "json":
        click.echo(json.dumps(diagnosis, indent=2, ensure_ascii=False))
    else:
        click.echo("".join(character if character.isprintable() else "\ufffd" for character in diagnosis["sentence"]))
