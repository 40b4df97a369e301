"""`edgefl flower`: what of a Flower app runs on the boards of a fleet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgefl.cli.output import FullHelpGroup, format_option, print_rows
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
