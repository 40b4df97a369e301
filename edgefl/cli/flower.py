"""`edgefl flower`: what of a Flower app runs on the boards of a fleet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgefl.cli.output import FullHelpGroup, echo, format_option, print_rows
from edgefl.cli.sources import FOLDER_TYPE
from edgefl.core.errors import UnsoundError

FINDING_COLUMNS = ("verdict", "where", "what")


@click.group("flower", cls=FullHelpGroup)
def command() -> None:
    """Bring a Flower app to the boards as it is."""


@command.command()
@click.argument("folder", type=FOLDER_TYPE)
@format_option
def check(*, folder: Path, fmt: str) -> None:
    """Say what of the Flower app in FOLDER works, without running any of it; exit code 50 where it would not run."""
    from edgefl.flower.app_check import check_app  # noqa: PLC0415 fast start
    from edgefl.flower.app_folder import read_app  # noqa: PLC0415 likewise

    findings = check_app(read_app(folder))
    print_rows([asdict(finding) for finding in findings], FINDING_COLUMNS, fmt, kind="findings")
    if faults := [finding for finding in findings if finding.verdict == "fails"]:
        raise UnsoundError(f"{folder} would not run: {faults[0].where}: {faults[0].what}")


@command.command()
@click.argument("folder", type=FOLDER_TYPE)
@click.option("--out", type=FOLDER_TYPE, default=Path("dist"), show_default=True, help="Folder for the wheel.")
def pack(*, folder: Path, out: Path) -> None:
    """Make a wheel of the Flower app in FOLDER, to sign as a pack and to install beside the coordinator."""
    from edgefl.flower.app_folder import read_app  # noqa: PLC0415 likewise
    from edgefl.flower.app_job import get_job_name  # noqa: PLC0415 likewise
    from edgefl.flower.app_pack import write_app_wheel  # noqa: PLC0415 likewise

    app = read_app(folder)
    path = write_app_wheel(app, out)
    echo(str(path))
    echo(
        f"sign it: edgefl signing sign {path} --kind pack --version {app.version} --out {app.name}.bundle; "
        f"boards install it (edgefl devices install), and join in: edgefl device shard add {get_job_name(app)} PATH",
        err=True,
    )
