"""`edgefl device shard export` and `import`: examples to label elsewhere, and the labels that come back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.device_join import find_shard_folder
from edgefl.cli.output import echo
from edgefl.cli.sources import state_option, window_option
from edgefl.core.errors import UsageError

if TYPE_CHECKING:
    from edgefl.device.collect.label_transfer import Style

STYLES = ("label-studio", "csv", "yolo")


@click.command("export")
@click.argument("place", metavar="TASK|FOLDER")
@click.argument("target", type=click.Path(path_type=Path), metavar="NEW_FOLDER")
@click.option("--format", "style", type=click.Choice(STYLES), default=STYLES[0], show_default=True)
@click.option("--label", "labels", multiple=True, help="A label to choose from; may be repeated.")
@click.option("--url", help="What stands before a file's name [default: /data/local-files/?d=NEW_FOLDER/files/].")
@click.option("--unlabelled", is_flag=True, help="Without the files that have a class.")
@window_option
@state_option
def export(  # noqa: PLR0913 the options of one command
    *,
    place: str,
    target: Path,
    style: Style,
    labels: tuple[str, ...],
    url: str | None,
    unlabelled: bool,
    window: float,
    root: Path | None,
) -> None:
    """Write what a collector keeps into NEW_FOLDER, with a list of it, to be labelled elsewhere."""
    from edgefl.device.collect.label_queue import open_target  # noqa: PLC0415 fast start
    from edgefl.device.collect.label_transfer import MAX_WINDOWS, NAMES, export_examples  # noqa: PLC0415 likewise

    check_labels(labels)
    shard = open_target(find_shard_folder(place, root), window, max_examples=MAX_WINDOWS)
    list_name, files_name = NAMES[style]
    url = f"/data/local-files/?d={target.resolve().name}/{files_name}/" if url is None else url
    count = export_examples(shard, target, style, labels=labels, url=url, is_all=not unlabelled)
    echo(f"wrote {count} examples; {target / list_name} lists them")


@click.command("import")
@click.argument("place", metavar="TASK|FOLDER")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--label", "labels", multiple=True, help="A label that is new to this shard; may be repeated.")
@click.option(
    "--column", default="label", show_default=True, help="Column of the labels in CSV and JSON-MIN: their control."
)
@state_option
def import_(place: str, path: Path, labels: tuple[str, ...], column: str, root: Path | None) -> None:
    """Give examples the labels in FILE: Label Studio's JSON, JSON-MIN or CSV, or a folder of YOLO's txt files."""
    from edgefl.device.collect.label_transfer import import_labels  # noqa: PLC0415 fast start

    check_labels(labels)
    folder = find_shard_folder(place, root)
    counts = import_labels(folder, path, labels, column)
    echo(f"{folder}: {counts.labelled} examples have the labels of {path}")
    if counts.unclear:
        echo(f"{counts.unclear} examples have several labels at one time, and were left as they are")
    if counts.gone:
        echo(f"{counts.gone} examples are not there any more: forgotten, or too old")


def check_labels(labels: tuple[str, ...]) -> None:
    """Checks the labels of a command line; raises a `UsageError` where one is none."""
    from edgefl.device.collect.settings import is_label  # noqa: PLC0415 fast start

    if wrong := [text for text in labels if not is_label(text)]:
        raise UsageError(f"--label must be visible, without a slash and no dot in front; got {wrong[0]!r:.80}")
