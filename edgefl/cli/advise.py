"""`edgefl advise`: what settings of a run would come to, before any board is asked."""

from __future__ import annotations

import math
from collections.abc import Callable

import click

from edgefl.cli.output import FullHelpGroup, format_option, print_rows
from edgefl.cli.sources import NumberRange
from edgefl.core.errors import UsageError

COLUMNS = ("rounds", "noise", "epsilon", "noise_of_mean", "norm_of_noise")
ROUNDS_SHARES = (0.1, 0.25, 0.5, 1.0)
"""Parts of the rounds for which a row says what is spent by then."""


@click.group("advise", cls=FullHelpGroup)
def command() -> None:
    """Say what settings come to, before any board is asked."""


@command.command()
@click.option("--epsilon", type=NumberRange(0, 1000, min_open=True), required=True, help="Budget of the run.")
@click.option("--delta", type=NumberRange(0, 1, min_open=True, max_open=True), required=True, help="Its delta.")
@click.option("--rounds", type=click.IntRange(1, 1_000_000), required=True, help="Rounds of the run.")
@click.option(
    "--unit",
    type=click.Choice(["device", "example"]),
    default="device",
    show_default=True,
    help="Whose data is private.",
)
@click.option("--boards", type=click.IntRange(1, 10_000_000), help="Boards that are expected; needed with device.")
@click.option(
    "--sampling",
    type=NumberRange(0, 1, min_open=True),
    help="Probability that a board takes part in a round [default: all, without amplification].",
)
@click.option("--examples", type=click.IntRange(1, 1_000_000_000), help="On a board; needed with example.")
@click.option("--batch", type=click.IntRange(1, 1_000_000), help="Batch size; needed with example.")
@click.option("--steps", type=click.IntRange(1, 1_000_000), help="Of a board in a round [default: an epoch].")
@click.option("--weights", type=click.IntRange(1), help="Of the model, for the length of the noise.")
@format_option
def privacy(  # noqa: PLR0913 the options of one command
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    unit: str,
    boards: int | None,
    sampling: float | None,
    examples: int | None,
    batch: int | None,
    steps: int | None,
    weights: int | None,
    fmt: str,
) -> None:
    """Print the noise that a privacy budget needs, and what is spent on the way.

    `noise` is the setting of `[privacy]`; `noise_of_mean` is the standard deviation of the noise in each weight of a
    round's mean, in units of the clip, and `norm_of_noise` the length of all of it: a run learns little where that is
    well above 1. With `--unit example` both are of a step's mean gradient.
    """
    needed: dict[str, dict[str, int | None]] = {
        "device": {"--boards": boards},
        "example": {"--examples": examples, "--batch": batch},
    }
    foreign: dict[str, dict[str, float | None]] = {
        "device": {"--examples": examples, "--batch": batch, "--steps": steps},
        "example": {"--boards": boards, "--sampling": sampling},
    }
    if missing := [name for name, value in needed[unit].items() if value is None]:
        raise UsageError(f"{missing[0]} is missing: it is needed with --unit {unit}")
    if unfit := [name for name, value in foreign[unit].items() if value is not None]:
        raise UsageError(f"{unfit[0]} means nothing with --unit {unit}; leave it out")
    if unit == "example":
        assert examples is not None
        assert batch is not None
        noise, compute = _advise_examples(
            epsilon, delta, min(1.0, batch / examples), rounds, steps or -(-examples // batch)
        )
        of_mean = noise / batch
    else:
        assert boards is not None
        noise, compute = _advise_devices(epsilon, delta, sampling, rounds)
        of_mean = noise / (boards * (sampling or 1.0))
    rows = [
        {
            "rounds": number,
            "noise": noise,
            "epsilon": compute(number),
            "noise_of_mean": of_mean,
            "norm_of_noise": None if weights is None else of_mean * math.sqrt(weights),
        }
        for number in dict.fromkeys(max(1, round(share * rounds)) for share in ROUNDS_SHARES)
    ]
    print_rows(rows, COLUMNS, fmt, kind="privacy")


def _advise_devices(
    epsilon: float, delta: float, sampling: float | None, rounds: int
) -> tuple[float, Callable[[int], float]]:
    """Returns the noise for a budget, and what some rounds spend with it."""
    from edgefl.engine.privacy_accounting import compute_epsilon, find_noise  # noqa: PLC0415 fast start

    noise = find_noise(epsilon, delta, sampling, rounds)
    return noise, lambda number: compute_epsilon(noise, delta, sampling, number, 0)


def _advise_examples(
    epsilon: float, delta: float, sampling: float, rounds: int, steps: int
) -> tuple[float, Callable[[int], float]]:
    """Returns what a board finds with so many steps in a round; otherwise as `_advise_devices`."""
    from edgefl.core.renyi_accounting import compute_divergences, compute_epsilon, find_noise  # noqa: PLC0415 fast start

    noise = find_noise(epsilon, delta, sampling, steps * rounds)
    return noise, lambda number: compute_epsilon(compute_divergences(sampling, noise, steps * number), delta)
