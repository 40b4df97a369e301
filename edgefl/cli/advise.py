"""`edgefl advise`: what settings of a run would come to, before any board is asked."""

from __future__ import annotations

import math

import click

from edgefl.cli.output import FullHelpGroup, format_option, print_rows
from edgefl.cli.sources import NumberRange

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
@click.option("--boards", type=click.IntRange(1, 10_000_000), required=True, help="Boards that are expected.")
@click.option(
    "--sampling",
    type=NumberRange(0, 1, min_open=True),
    help="Probability that a board takes part in a round [default: all, without amplification].",
)
@click.option("--weights", type=click.IntRange(1), help="Of the model, for the length of the noise.")
@format_option
def privacy(  # noqa: PLR0913 the options of one command
    *, epsilon: float, delta: float, rounds: int, boards: int, sampling: float | None, weights: int | None, fmt: str
) -> None:
    """Print the noise that a privacy budget needs, and what is spent on the way.

    `noise` is the setting of `[privacy]`; `noise_of_mean` is the standard deviation of the noise in each weight of a
    round's mean, in units of the clip, and `norm_of_noise` the length of all of it: a run learns little where that is
    well above 1.
    """
    from edgefl.engine.privacy_accounting import compute_epsilon, find_noise  # noqa: PLC0415 fast start

    noise = find_noise(epsilon, delta, sampling, rounds)
    of_mean = noise / (boards * (sampling or 1.0))
    rows = [
        {
            "rounds": number,
            "noise": noise,
            "epsilon": compute_epsilon(noise, delta, sampling, number, 0),
            "noise_of_mean": of_mean,
            "norm_of_noise": None if weights is None else of_mean * math.sqrt(weights),
        }
        for number in dict.fromkeys(max(1, round(share * rounds)) for share in ROUNDS_SHARES)
    ]
    print_rows(rows, COLUMNS, fmt, kind="privacy")
