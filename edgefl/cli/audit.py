"""`edgefl audit`: tries to refute what a run promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from edgefl.cli.experiments import (
    apply_options,
    check_options,
    data_options,
    history_option,
    list_shards,
    use_one_thread,
)
from edgefl.cli.output import FullHelpGroup, format_option, print_rows, silence_recorder
from edgefl.cli.run import RunProgressBar
from edgefl.cli.sources import NumberRange, allow_module_option
from edgefl.core.errors import UnsoundError, UsageError

if TYPE_CHECKING:
    from edgefl.core.config import PrivacyUnit, RunConfig
    from edgefl.simulation.backends.partitioned_data import FleetData

COLUMNS = (
    "unit", "shadows", "canaries", "included", "guesses", "correct", "auc", "epsilon_lower", "epsilon_promised",
    "delta", "confidence",
)  # fmt: skip
INVERSION_COLUMNS = ("settings", "seen_by", "boards", "examples", "trials", "error", "baseline", "recovered")
PROPERTY_COLUMNS = ("settings", "seen_by", "boards", "examples", "trials", "accuracy", "low", "high")
MAX_CANARIES = 100_000
DEFAULT_CANARIES, DEFAULT_CONFIDENCE = 100, 0.95
DEFAULT_SHARE = 0.5
DEFAULT_TRIALS = {"inversion": 10, "property": 100}
"""Boards that are attacked, by attack."""


@click.group("audit", cls=FullHelpGroup)
def command() -> None:
    """Try to refute what a run promises."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--attack",
    type=click.Choice(["canaries", "inversion", "property"]),
    default="canaries",
    show_default=True,
    help="Canaries in the run, gradient inversion of small updates, or inference of whether a board holds a class.",
)
@click.option(
    "--examples",
    type=click.IntRange(1, 1_000_000),
    help="Examples of a board [default: 1 with inversion, at most 8; the median of the fleet with property].",
)
@click.option(
    "--trials",
    type=click.IntRange(1, MAX_CANARIES),
    help="Boards that are attacked [default: 10 with inversion, 100 with property].",
)
@click.option(
    "--class",
    "class_number",
    type=click.IntRange(min=0),
    help="With property: the class that boards hold or do not [default: 0].",
)
@click.option(
    "--share",
    type=NumberRange(0, 1, min_open=True),
    help="With property: the class's share of a board that holds it [default: 0.5].",
)
@click.option(
    "--unit",
    type=click.Choice(["device", "example"]),
    help="What the canaries are [default: privacy.unit of the run file, else device].",
)
@click.option(
    "--canaries",
    "num_canaries",
    type=click.IntRange(8, MAX_CANARIES),
    help=f"How many may take part, each by the toss of a coin [default: {DEFAULT_CANARIES}].",
)
@click.option(
    "--confidence",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    help=f"Probability with which the bound holds, or of the interval [default: {DEFAULT_CONFIDENCE}].",
)
@click.option(
    "--shadows",
    type=click.IntRange(0, 1000),
    help="Attack by LiRA with so many shadow models, each a simulated run more [default: 0, which plants canaries].",
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
    attack: Literal["canaries", "inversion", "property"],
    examples: int | None,
    trials: int | None,
    class_number: int | None,
    share: float | None,
    unit: PrivacyUnit | None,
    num_canaries: int | None,
    confidence: float | None,
    shadows: int | None,
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

    With `--attack inversion` boards of a few examples train the first round, and their examples are reconstructed
    from what the coordinator sees, and from the model that it makes. With `--attack property` it is told from the
    same whether boards hold a class. Both do so for the run as it is, and without its protection. An attack that
    fails proves nothing.
    """
    use_one_thread()
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start
    from edgefl.simulation.simulated_run import default_root, prepare_simulation  # noqa: PLC0415 likewise

    _check_options(
        attack,
        {
            "canaries": {"--unit": unit, "--canaries": num_canaries, "--shadows": shadows, "--dir": root},
            "inversion": {"--examples": examples, "--trials": trials},
            "property": {
                "--examples": examples, "--trials": trials, "--class": class_number, "--share": share,
            },
        },
        confidence,
    )  # fmt: skip
    is_cut = devices is not None or data is not None or scheme is not None
    check_options(shards, is_cut=is_cut, has_test=test is not None, reference=False, trains=True)
    config, fleet_data = prepare_simulation(
        apply_options(load_run(file), test, seed, None),
        devices=list_shards(shards) or devices,
        data=data,
        scheme=scheme,
    )
    if attack == "inversion":
        _print_inversion(config, fleet_data, examples, trials, fmt)
        return
    if attack == "property":
        requested = (class_number or 0, DEFAULT_SHARE if share is None else share)
        _print_property(config, fleet_data, requested, examples, trials, confidence or DEFAULT_CONFIDENCE, fmt)
        return
    from edgefl.simulation.privacy_audit import audit_privacy  # noqa: PLC0415 likewise

    folder = (root or default_root()).expanduser().resolve()
    with silence_recorder(), RunProgressBar() as progress:
        audit = audit_privacy(
            config,
            fleet_data,
            folder,
            unit=unit,
            num_canaries=DEFAULT_CANARIES if num_canaries is None else num_canaries,
            confidence=confidence or DEFAULT_CONFIDENCE,
            shadows=shadows or 0,
            on_change=progress.update,
        )
    row = asdict(audit)
    row.pop("run_id")
    print_rows([row], COLUMNS, fmt, title=f"audit of {audit.unit}s, run {audit.run_id}", kind="audit")
    if audit.is_broken:
        raise UnsoundError(
            f"epsilon is at least {audit.epsilon_lower:.3g} with confidence {audit.confidence:g}, promised is "
            f"{audit.epsilon_promised:g}: the promise does not hold, or this is one of {1 - audit.confidence:.2g} of "
            "all audits that err; repeat it with another --seed"
        )


def _check_options(attack: str, options: Mapping[str, Mapping[str, Any]], confidence: float | None) -> None:
    """Raises a `UsageError` where an option is of another attack."""
    used = {name for of_attack in options.values() for name, value in of_attack.items() if value is not None}
    if foreign := sorted(used - options[attack].keys()):
        fits = [name for name, known in options.items() if foreign[0] in known]
        raise UsageError(f"{foreign[0]} goes with --attack {' or '.join(fits)}, got --attack {attack}")
    if confidence is not None and attack == "inversion":
        raise UsageError("--confidence goes with --attack canaries or property, got --attack inversion")


def _print_inversion(config: RunConfig, data: FleetData, examples: int | None, trials: int | None, fmt: str) -> None:
    from edgefl.simulation.attacks.gradient_inversion import audit_inversion  # noqa: PLC0415 fast start

    found = audit_inversion(
        config, data, num_examples=examples or 1, num_trials=trials or DEFAULT_TRIALS["inversion"]
    )
    title = "gradient inversion: error 0 is the example, 1 the mean of all"
    print_rows([asdict(audit) for audit in found], INVERSION_COLUMNS, fmt, title=title, kind="audit-inversion")


def _print_property(  # noqa: PLR0913, PLR0917 one per option
    config: RunConfig,
    data: FleetData,
    requested: tuple[int, float],
    examples: int | None,
    trials: int | None,
    confidence: float,
    fmt: str,
) -> None:
    from edgefl.simulation.attacks.property_inference import Property, audit_property  # noqa: PLC0415 fast start

    found = audit_property(
        config,
        data,
        Property(class_number=requested[0], share=requested[1]),
        num_examples=examples,
        num_trials=trials or DEFAULT_TRIALS["property"],
        confidence=confidence,
    )
    title = f"property inference: share {requested[1]:g} of class {requested[0]}, or none; guessing has 0.5"
    print_rows([asdict(audit) for audit in found], PROPERTY_COLUMNS, fmt, title=title, kind="audit-property")
