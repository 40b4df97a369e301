"""Options common to several commands of `edgefl device`."""

from __future__ import annotations

from pathlib import Path

import click

state_option = click.option(
    "--state",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    help="State directory [default: ~/.local/share/edgefl/device].",
)
