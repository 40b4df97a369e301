"""`edgefl provision wheels`: a device's wheels, for a site without internet."""

from __future__ import annotations

from pathlib import Path

import click

from edgefl.provision.wheel_locks import WHEEL_PLATFORMS


@click.command("wheels")
@click.option("--board", "name", type=click.Choice(list(WHEEL_PLATFORMS)), required=True, help="Whose lock.")
@click.option(
    "--out", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to fill."
)
@click.option("--with-torch", is_flag=True, help="Also what training with torch needs.")
@click.option(
    "--edgefl-wheel",
    "own_wheel",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="edgefl's own wheel [default: built from this checkout].",
)
def command(*, name: str, folder: Path, with_torch: bool, own_wheel: Path | None) -> None:
    """Download the wheels of a board's lock, checked by their hashes, and add edgefl's own."""
    from edgefl.provision.wheel_locks import get_platform, load_lock_text, parse_lock  # noqa: PLC0415 fast start
    from edgefl.provision.wheelhouse import fill_wheelhouse  # noqa: PLC0415 likewise

    family = get_platform(name)
    lock = parse_lock(load_lock_text(family, "train" if with_torch else ""))
    wheels = fill_wheelhouse(folder, family, lock, own_wheel=own_wheel)
    megabytes = sum(path.stat().st_size for path in wheels) / 1e6
    click.echo(f"{len(wheels)} wheels for {name} in {folder} ({megabytes:.0f} MB)")
