"""`edgefl data`: cuts a central data set into shards, for experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.command_group import FullHelpGroup

if TYPE_CHECKING:
    from edgefl.tasks.sharding.shard_metadata import ShardMetadata

FORMAT_VERSION = 1
PIPE_WIDTH = 160


@click.group("data", cls=FullHelpGroup)
def command() -> None:
    """Cut a data set into shards for experiments. Real boards bring data of their own."""


@command.command("shard")
@click.argument("task")
@click.option(
    "--scheme",
    default="iid",
    show_default=True,
    help="natural, iid, by-class, sorted (contiguous equal parts of the rows by class), dirichlet:A, labels:K, "
    "shards:K (K such parts for each device, dealt at random), redundant:R (every subset of R devices shares a "
    "block) or duplicate:R (devices in groups of R with equal shards).",
)
@click.option("--devices", type=click.IntRange(min=1), default=4, show_default=True, help="Number of shards.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write into.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder of the data set; otherwise the folder of the task's name in $EDGEFL_DATA.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="The same seed cuts the same shards.")
@click.option("--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True)
def shard(  # noqa: PLR0913 one per option
    *, task: str, scheme: str, devices: int, out: Path, data: Path | None, seed: int, format_: str
) -> None:
    """Writes device-01.npz and so on and test.npz, each with a card, and prints the examples per class."""
    from edgefl.tasks.sharding.shard_creation import TEST_NAME, create_shards  # noqa: PLC0415 likewise
    from edgefl.tasks.sharding.shard_metadata import read_metadata  # noqa: PLC0415 NumPy only where it is used

    paths = [*create_shards(task, scheme, devices, out, data, seed), out / TEST_NAME]
    cards = [(path, read_metadata(path)) for path in paths]
    if format_ == "json":
        click.echo(
            json.dumps({"v": FORMAT_VERSION, "shards": [_make_row(path, card) for path, card in cards]}, indent=1)
        )
    else:
        _print_table(cards)


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


def _print_table(cards: list[tuple[Path, ShardMetadata]]) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 only a table needs it
    from rich.console import Console  # noqa: PLC0415 likewise
    from rich.table import Table  # noqa: PLC0415 likewise

    first = cards[0][1]
    classes = sorted({label for _, card in cards for label in card.counts})
    names = [first.labels[label] if label < len(first.labels) else str(label) for label in classes]
    has_groups = any(card.groups for _, card in cards)
    table = Table("shard", box=SIMPLE_HEAD, title=f"{first.task}: examples per class", title_justify="left")
    if has_groups:
        table.add_column("people")
    for header in ("examples", *names):
        table.add_column(header, justify="right")
    for path, card in cards:
        leading_cells = [path.stem, " ".join(card.groups)] if has_groups else [path.stem]
        table.add_row(*leading_cells, str(card.num_examples), *(str(card.counts.get(label, 0)) for label in classes))
    # A pipe or a file has no width limit, and there a shortened column would lose a number.
    console = Console() if Console().is_terminal else Console(width=PIPE_WIDTH)
    console.print(table)
