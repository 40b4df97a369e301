"""`edgefl base`: pretrained bases and compiled tasks on the coordinator's machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.output import SHORT_HASH_DIGITS, FullHelpGroup, format_bytes, format_option, print_rows
from edgefl.cli.sources import FileOrObjectType, dir_option, fetched_file

if TYPE_CHECKING:
    from edgefl.system.object_storage import ObjectAddress
    from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue

COMPILED_SUFFIX = ".compiled"
COLUMNS = ("name", "sha256", "num_tensors", "num_parameters", "bytes_file")


@click.group("base", cls=FullHelpGroup)
def command() -> None:
    """Bring pretrained bases and compiled tasks to the coordinator, on its machine; boards fetch each once.

    A run file names one: `base` in `[adapt]`, `compiled` in `[run]`.
    """


class _WeightsType(FileOrObjectType):
    """As its base class, or pretrained weights, as a text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_name = isinstance(value, str) and value.startswith(("torchvision:", "timm:", "hf:"))
        return value if is_name else super().convert(value, param, ctx)


@contextmanager
def _fetched_weights(name: str, path: Path) -> Iterator[Path]:
    """Yields a file of pretrained weights, and removes it afterwards; raises as `fetch_weights`."""
    from edgefl.system.atomic_files import make_private_directory  # noqa: PLC0415 fast start
    from edgefl.tasks.adaptation.pretrained_weights import fetch_weights  # noqa: PLC0415 likewise

    make_private_directory(path.parent)
    try:
        fetch_weights(name, path)
        yield path
    finally:
        path.unlink(missing_ok=True)


@command.command()
@click.argument("file", type=_WeightsType())
@click.option("--name", help="What run files call it: letters, digits and dashes [default: its SHA-256 alone].")
@click.option("--sha256", metavar="HEX", help="It must have this SHA-256.")
@dir_option
def add(*, file: Path | ObjectAddress | str, name: str | None, sha256: str | None, root: Path) -> None:
    """Copy FILE (safetensors) into the coordinator's directory, named by its SHA-256.

    FILE may be s3://BUCKET/KEY, which is fetched, on from where an earlier try broke off; or pretrained weights:
    torchvision:NAME, timm:NAME or hf:OWNER/REPOSITORY, by those libraries, where there is a network.
    """
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.tasks.adaptation.base_file import MAX_BASE_BYTES  # noqa: PLC0415 likewise

    folder = load_directory(root).bases
    fetch_name = f".fetched-{hashlib.sha256(str(file).encode()).hexdigest()[:SHORT_HASH_DIGITS]}"
    with (
        _fetched_weights(file, folder / fetch_name)
        if isinstance(file, str)
        else fetched_file(file, folder, fetch_name, max_bytes=MAX_BASE_BYTES, sha256=sha256)
    ) as path:
        base = _open_catalogue(root).add(path, name, sha256=sha256)
    click.echo(
        f"{base.name or 'base'} is {base.sha256}: {base.num_tensors} tensors, {base.num_parameters} numbers, "
        f"{format_bytes(base.bytes_file)}"
    )
    is_compiled = not isinstance(file, str) and file.name.endswith(COMPILED_SUFFIX)
    setting, table = ("compiled", "run") if is_compiled else ("base", "adapt")
    click.echo(f'next: {setting} = "{base.name or base.sha256[:SHORT_HASH_DIGITS]}" in [{table}] of a run file')


@command.command("list")
@dir_option
@format_option
def list_(*, root: Path, fmt: str) -> None:
    """List the bases that are there; one without a name is what a run has made of its first model."""
    rows = [asdict(base) for base in _open_catalogue(root).list_bases()]
    if fmt == "table":
        rows = [{**row, "sha256": row["sha256"][:SHORT_HASH_DIGITS]} for row in rows]
    print_rows(rows, COLUMNS, fmt, kind="bases")


@command.command()
@click.argument("base")
@dir_option
def remove(*, base: str, root: Path) -> None:
    """Remove BASE, a name or a SHA-256. Boards keep what they have; a run that needs it cannot go on."""
    click.echo(f"removed {_open_catalogue(root).remove(base)}")


@command.command()
@click.argument("base")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True))
@dir_option
def copy(*, base: str, folder: Path, root: Path) -> None:
    """Copy BASE, a name or a SHA-256, into FOLDER, such as a USB stick, for boards that should not fetch it."""
    path = _open_catalogue(root).copy(base, folder)
    click.echo(f"{path} has {format_bytes(path.stat().st_size)}")
    click.echo("next, on each board, with the path that the folder has there: edgefl device set --base-source FOLDER")


def _open_catalogue(root: Path) -> BaseCatalogue:
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue  # noqa: PLC0415 likewise

    return BaseCatalogue(load_directory(root).bases)
