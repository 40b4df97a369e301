"""`edgefl audit`: tries to refute what a run promises."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.experiments import (
    apply_options,
    check_options,
    data_options,
    history_option,
    list_shards,
    silence_recorder,
    use_one_thread,
)
from edgefl.cli.output import FullHelpGroup, format_option, print_rows
from edgefl.cli.run import RunProgressBar
from edgefl.cli.sources import NumberRange, allow_module_option
from edgefl.core.errors import UnsoundError

if TYPE_CHECKING:
    from edgefl.core.config import PrivacyUnit

COLUMNS = (
    "unit", "shadows", "canaries", "included", "guesses", "correct", "auc", "epsilon_lower", "epsilon_promised",
    "delta", "confidence",
)  # fmt: skip
MAX_CANARIES = 100_000


@click.group("audit", cls=FullHelpGroup)
def command() -> None:
    """Try to refute what a run promises."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--unit",
    type=click.Choice(["device", "example"]),
    help="What the canaries are [default: privacy.unit of the run file, else device].",
)
@click.option(
    "--canaries",
    "num_canaries",
    type=click.IntRange(8, MAX_CANARIES),
    default=100,
    show_default=True,
    help="How many may take part, each by the toss of a coin.",
)
@click.option(
    "--confidence",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Probability with which the bound holds.",
)
@click.option(
    "--shadows",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="Attack by LiRA with so many shadow models, each a simulated run more; 0 plants canaries.",
)
@click.option(
    "--devices",
    type=click.IntRange(1, 1_000_000),
    help="How many devices, beside canaries [default: the run file's].",
)
@data_options
@click.option("--seed", type=click.IntRange(min=0), help="In place of the run file's.")
@history_option
@allow_module_option
@format_option
def privacy(  # noqa: PLR0913 one per option
    *,
    file: Path,
    unit: PrivacyUnit | None,
    num_canaries: int,
    confidence: float,
    shadows: int,
    devices: int | None,
    data: Path | None,
    shards: tuple[Path, ...],
    scheme: str | None,
    test: Path | None,
    seed: int | None,
    root: Path | None,
    fmt: str,
) -> None:
    """Simulate FILE.toml with canaries, and print the least epsilon that their traces in the model prove.

    A canary takes part or not by the toss of a coin, and is guessed from the first and the last model. With
    `--shadows` canaries are examples as they are, guessed by how confident shadow models were with and without
    them. Whoever is right more often than the promised epsilon allows has refuted it; then the exit code is 50. A
    bound below the promise proves nothing more than that these canaries did not show a fault.
    """
    use_one_thread()
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start
    from edgefl.simulation.privacy_audit import audit_privacy  # noqa: PLC0415 likewise
    from edgefl.simulation.simulated_run import default_root, prepare_simulation  # noqa: PLC0415 likewise

    is_cut = devices is not None or data is not None or scheme is not None
    check_options(shards, is_cut=is_cut, has_test=test is not None, reference=False, trains=True)
    config, fleet_data = prepare_simulation(
        apply_options(load_run(file), test, seed, None),
        devices=list_shards(shards) or devices,
        data=data,
        scheme=scheme,
    )
    folder = (root or default_root()).expanduser().resolve()
    with silence_recorder(), RunProgressBar() as progress:
        audit = audit_privacy(
            config,
            fleet_data,
            folder,
            unit=unit,
            num_canaries=num_canaries,
            confidence=confidence,
            shadows=shadows,
            on_change=progress.update,
        )
    row = asdict(audit)
    row.pop("run_id")
    print_rows([row], COLUMNS, fmt, title=f"audit of {audit.unit}s, run {audit.run_id}", kind="audit")
    if audit.is_broken:
        raise UnsoundError(
            f"epsilon is at least {audit.epsilon_lower:.3g} with confidence {confidence:g}, promised is "
            f"{audit.epsilon_promised:g}: the promise does not hold, or this is one of {1 - confidence:.2g} of all "
            "audits that err; repeat it with another --seed"
        )
