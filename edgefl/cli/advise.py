"""`edgefl advise`: which settings suit a run, and what they would come to, before any board is asked."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.experiments import (
    apply_options,
    check_options,
    data_options,
    list_shards,
    profile_option,
    use_one_thread,
)
from edgefl.cli.output import (
    JSON_VERSION,
    FullHelpGroup,
    echo,
    format_option,
    print_json,
    print_rows,
    silence_recorder,
)
from edgefl.cli.sources import FILE_TYPE, FOLDER_TYPE, NumberRange, allow_module_option, source_options
from edgefl.core.errors import RunFailedError, UsageError

if TYPE_CHECKING:
    from edgefl.client.sources import Source
    from edgefl.core.config import Quantity
    from edgefl.simulation.advice.advice import Advice
    from edgefl.simulation.sweep import SweepOutcome
    from edgefl.strategies.correlated_noise import ParticipationLimits

log = logging.getLogger(__name__)

COLUMNS = ("rounds", "noise", "epsilon", "noise_of_mean", "norm_of_noise")
ROUNDS_SHARES = (0.1, 0.25, 0.5, 1.0)
"""Parts of the rounds for which a row says what is spent by then."""


@click.group("advise", cls=FullHelpGroup)
def command() -> None:
    """Say which settings suit a run and its boards, and what they come to, before any board is asked."""


def _parse_budgets(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[Quantity, float]:
    """Returns most seconds, bytes or joules, by quantity."""
    from edgefl.simulation.advice.advice import QUANTITIES  # noqa: PLC0415 fast start

    budgets: dict[Quantity, float] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not separator or name not in QUANTITIES or not 0 < number < math.inf:
            raise UsageError(
                f"--budget must be time, bytes or energy, =, and a number above 0, such as time=600, got "
                f"{text!r:.100}"
            )
        if name in budgets:
            raise UsageError(f"--budget {name} is given twice; give it once")
        budgets[name] = number
    return budgets


@command.command("run")
@click.argument("file", type=FILE_TYPE)
@click.option(
    "--goal", help="What to reach, such as 'accuracy >= 0.9' [default: the run file's, else what it comes to]."
)
@click.option(
    "--minimise",
    type=click.Choice(["time", "bytes", "energy"]),
    help="What counts [default: the run file's strategy.minimise, else time].",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    callback=_parse_budgets,
    metavar="time=S|bytes=N|energy=J",
    help="Most that the run may take; may be repeated.",
)
@click.option(
    "--measured", is_flag=True, help="For the boards of the fleet, as its history measured them; see --url and --dir."
)
@click.option("--devices", type=click.IntRange(1, 10_000), help="How many boards [default: the run file's].")
@profile_option
@data_options
@click.option("--seconds", type=NumberRange(1, 86_400), default=60, show_default=True, help="That it may take.")
@click.option(
    "--jobs", "num_jobs", type=click.IntRange(1, 256), help="Simulations side by side [default: one for each core]."
)
@click.option("--write", "out", type=FILE_TYPE, help="Write the recommended run file, with the reasons.")
@click.option("--force", is_flag=True, help="Replace the file of --write.")
@click.option(
    "--simulations",
    "root",
    type=FOLDER_TYPE,
    help="Where simulated runs are kept; the same ones are not run again "
    "[default: ~/.local/share/edgefl/simulations/advice].",
)
@source_options
@allow_module_option
@format_option
def advise_run(  # noqa: PLR0913 the options of one command
    *,
    file: Path,
    measured: bool,
    shards: tuple[Path, ...],
    test: Path | None,
    out: Path | None,
    force: bool,
    root: Path | None,
    source: Source,
    fmt: str,
    **options: Any,
) -> None:
    """Say which strategy, codec and local work suit the run of FILE (TOML) and its boards, and why.

    All combinations are ranked by arithmetic and the best dozen simulated, with real training on data of this
    machine. Nothing is fetched from the boards. Exit code 41 where no candidate reaches the goal.
    """
    if out is not None and out.exists() and not force:
        raise UsageError(f"--write {out} exists; name another file, or add --force")
    if measured and (shards or options["devices"] is not None or options["profiles"]):
        raise UsageError("--measured says which boards there are; --devices, --profile and --shards describe others")
    is_cut = any(options[name] is not None for name in ("devices", "data", "scheme"))
    check_options(shards, is_cut=is_cut, has_test=test is not None, reference=False, trains=True)
    use_one_thread()
    from edgefl.client.advice import advise  # noqa: PLC0415 fast start
    from edgefl.core.config import load_run  # noqa: PLC0415 likewise

    config = apply_options(load_run(file), test, None, None)
    devices = list_shards(shards) or options.pop("devices")
    options.pop("devices", None)
    with silence_recorder():
        advice = advise(config, source if measured else None, devices=devices, root=root, on_end=_log_end, **options)
    _print_advice(advice, fmt)
    if advice.best is None:
        raise RunFailedError("no candidate reached the goal within the budgets")
    if out is not None:
        _write_run_file(advice, file, out)


def _log_end(outcome: SweepOutcome) -> None:
    log.info("%s, %s: %s", outcome.run.config.strategy.name, outcome.run.config.compression.up, outcome.reason)


def _print_advice(advice: Advice, fmt: str) -> None:
    from edgefl.simulation.advice.explanation import COLUMNS, make_report  # noqa: PLC0415 fast start

    report = make_report(advice)
    if fmt == "json":
        print_json({**report, "v": JSON_VERSION, "kind": "advice"})
        return
    hidden = {"joules"} if all(row["joules"] is None for row in report["rows"]) else set()
    columns = [name for name in COLUMNS if name not in hidden]
    title = f"{len(advice.fleet.names)} boards, {report['goal']}, least {report['minimise']} first"
    print_rows(report["rows"], columns, fmt, title=title, kind="advice")
    if fmt != "table":
        return
    for line in report["sentences"]:
        echo(line)
    for line in report["limits"]:
        echo(f"not tried: {line}" if line in advice.left_out else f"note: {line}")


def _write_run_file(advice: Advice, file: Path, out: Path) -> None:
    from edgefl.core.config import load_run  # noqa: PLC0415 fast start
    from edgefl.simulation.advice.explanation import format_run_file  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import make_store_error, write_atomic  # noqa: PLC0415 likewise

    text = format_run_file(advice, load_run(file), stamp=f"edgefl advise run {file.name}")
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise make_store_error(out, error) from None
    echo(f"written: {out}; start it: edgefl run submit {out}", err=True)


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
@click.option(
    "--separation",
    type=click.IntRange(1, 1_000_000),
    help="With dp-ftrl: rounds from one participation of a board to its next; a round has one in so many boards.",
)
@click.option(
    "--participations",
    type=click.IntRange(1, 1_000_000),
    help="With dp-ftrl: most of a board [default: as the separation allows].",
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
    separation: int | None,
    participations: int | None,
    examples: int | None,
    batch: int | None,
    steps: int | None,
    weights: int | None,
    fmt: str,
) -> None:
    """Print the noise that a privacy budget needs, and what is spent on the way.

    `noise` is the setting of `[privacy]`; `noise_of_mean` is the standard deviation of the noise in each weight of a
    round's mean, in units of the clip, and `norm_of_noise` the length of all of it: a run learns little where that is
    well above 1. With `--unit example` both are of a step's mean gradient. With `--separation` the noise of rounds is
    correlated, and both are of independent noise that would leave as much on the sum of the rounds.
    """
    needed: dict[str, dict[str, int | None]] = {
        "device": {"--boards": boards},
        "example": {"--examples": examples, "--batch": batch},
    }
    foreign: dict[str, dict[str, float | None]] = {
        "device": {"--examples": examples, "--batch": batch, "--steps": steps},
        "example": {
            "--boards": boards,
            "--sampling": sampling,
            "--separation": separation,
            "--participations": participations,
        },
    }
    if missing := [name for name, value in needed[unit].items() if value is None]:
        raise UsageError(f"{missing[0]} is missing: it is needed with --unit {unit}")
    if unfit := [name for name, value in foreign[unit].items() if value is not None]:
        raise UsageError(f"{unfit[0]} means nothing with --unit {unit}; leave it out")
    if separation is None and participations is not None:
        raise UsageError("--participations means nothing without --separation; leave it out")
    if separation is not None and sampling is not None:
        raise UsageError("--sampling means nothing with --separation; leave it out")
    remaining: Callable[[int], float] = lambda _: 1.0  # noqa: E731 a round's own noise
    if unit == "example":
        assert examples is not None
        assert batch is not None
        noise, compute = _advise_examples(
            epsilon, delta, min(1.0, batch / examples), rounds, steps or -(-examples // batch)
        )
        of_mean = noise / batch
    elif separation is not None:
        assert boards is not None
        noise, compute, remaining = _advise_correlated(
            epsilon, delta, rounds, _make_limits(separation, participations, boards, rounds), weights or 1
        )
        of_mean = noise / (boards // separation)
    else:
        assert boards is not None
        noise, compute = _advise_devices(epsilon, delta, sampling, rounds)
        of_mean = noise / (boards * (sampling or 1.0))
    rows = [
        {
            "rounds": number,
            "noise": noise,
            "epsilon": compute(number),
            "noise_of_mean": of_mean * remaining(number),
            "norm_of_noise": None if weights is None else of_mean * remaining(number) * math.sqrt(weights),
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


def _make_limits(separation: int, participations: int | None, boards: int, rounds: int) -> ParticipationLimits:
    """Returns the limits of participation; a round has one in `separation` boards.

    Raises:
        UsageError: no run can keep them.
    """
    from edgefl.strategies.correlated_noise import ParticipationLimits  # noqa: PLC0415 fast start

    limits = ParticipationLimits(separation=separation, participations=participations)
    names = ("--boards", "--separation", "--participations")
    if faults := limits.list_faults(boards=boards, count=max(1, boards // separation), rounds=rounds, names=names):
        raise UsageError("; ".join(faults))
    return limits


def _advise_correlated(
    epsilon: float, delta: float, rounds: int, limits: ParticipationLimits, weights: int
) -> tuple[float, Callable[[int], float], Callable[[int], float]]:
    """Returns as `_advise_devices`, and the share of the noise that is left on the sum of some rounds."""
    from edgefl.engine.privacy_accounting import compute_gaussian_epsilon, find_gaussian_noise  # noqa: PLC0415 fast start
    from edgefl.strategies.correlated_noise import compute_prefix_deviations  # noqa: PLC0415 likewise

    bands = limits.choose_bands(rounds, weights)

    def compute_sensitivity(number: int) -> float:
        return limits.compute_sensitivity(bands, (number,))

    noise = find_gaussian_noise(epsilon, delta) * compute_sensitivity(rounds)
    return (
        noise,
        lambda number: compute_gaussian_epsilon(noise / compute_sensitivity(number), delta),
        lambda number: float(compute_prefix_deviations(bands, number)[-1]) / math.sqrt(number),
    )


def _advise_examples(
    epsilon: float, delta: float, sampling: float, rounds: int, steps: int
) -> tuple[float, Callable[[int], float]]:
    """Returns what a board finds with so many steps in a round; otherwise as `_advise_devices`."""
    from edgefl.core.renyi_accounting import compute_divergences, compute_epsilon, find_noise  # noqa: PLC0415 fast start

    noise = find_noise(epsilon, delta, sampling, steps * rounds)
    return noise, lambda number: compute_epsilon(compute_divergences(sampling, noise, steps * number), delta)
