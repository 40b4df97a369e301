"""Run files with `[strategy] name = "auto"`: the advice is asked for, and what it chose is put in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from edgefl.core.config import AUTO_STRATEGY, Quantity, RunConfig, StrategySection
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.simulation.advice.advice import Advice, Request, advise, describe_fleet
from edgefl.simulation.advice.boards import MeasuredBoard
from edgefl.simulation.advice.explanation import explain
from edgefl.simulation.simulated_run import ADVICE_FOLDER, count_cores, default_root

AUTO_SECONDS = 50.0
"""Of real time for the advice; with the reading of history and data before it, it stays below a minute."""
MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A run file with what an advice chose in place of `auto`, and why, a sentence each."""

    config: RunConfig
    reasons: Sequence[str]


def make_base(config: RunConfig) -> tuple[RunConfig, Quantity]:
    """Returns a run file with the default strategy in place of `auto`, and what is to be minimised.

    The other options of `[strategy]` are those of the default strategy; candidates keep the ones that they know.

    Raises:
        ConfigError: `strategy.minimise` is neither time, bytes nor energy.
    """
    if config.strategy.name != AUTO_STRATEGY:
        return config, "time"
    options = dict(config.strategy.options)
    value = options.pop("minimise", "time")
    for quantity in get_args(Quantity):
        if value == quantity:
            return replace(config, strategy=StrategySection(options=options)), quantity
    raise ConfigError(f"strategy.minimise must be one of {', '.join(get_args(Quantity))}, got {value!r:.40}")


def choose_settings(  # noqa: PLR0913 those of `describe_fleet`
    config: RunConfig,
    folder: Path,
    *,
    clock: Callable[[], float],
    seconds: float = AUTO_SECONDS,
    measured: Sequence[MeasuredBoard] = (),
    corrections: Mapping[str, float] | None = None,
    devices: int | Sequence[Path] | None = None,
    profiles: Sequence[str] = (),
    data: Path | None = None,
    scheme: str | None = None,
) -> Choice:
    """Returns a run file with the strategy, codec and local work that an advice chose in place of `auto`.

    Its goal is the run file's own, else what the default strategy comes to with these settings.

    Args:
        config: the run file.
        folder: of proxy shards and of simulated runs, which are kept.
        clock: seconds of real time, monotone.
        seconds: that all of it may take.
        measured: boards by their history; none for those of `devices` and `profiles`.
        corrections: factors by which earlier advice was wrong.
        devices: as of `simulate`, where none is measured.
        profiles: likewise.
        data: as of `simulate`.
        scheme: likewise.

    Raises:
        RunFailedError: no candidate reached the goal within the budgets and the time.
        EdgeflError: something in the run file makes no sense, or data is missing.
    """
    started_s = clock()
    base, minimise = make_base(config)
    fleet = describe_fleet(
        base, folder, measured=measured, devices=devices, profiles=profiles, data=data, scheme=scheme
    )
    left_s = max(MIN_SECONDS, seconds - (clock() - started_s))
    request = Request(minimise=minimise, seconds=left_s, num_jobs=count_cores())
    try:
        found = advise(fleet, request, folder, clock=clock, corrections=corrections)
    except RunFailedError as error:
        raise RunFailedError(f"strategy.name = {AUTO_STRATEGY!r}: {error}") from None
    if found.best is None:
        raise RunFailedError(
            f"strategy.name = {AUTO_STRATEGY!r}: {explain(found)[0].rstrip('.')}; name a strategy, or give edgefl "
            "advise run more --seconds"
        )
    return Choice(config=found.make_run(base), reasons=_give_reasons(found))


def settle_simulation(  # noqa: PLR0913 those of `simulate`
    config: RunConfig,
    *,
    clock: Callable[[], float],
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
    trains: bool = True,
) -> Choice:
    """Returns the settings with what an advice for the simulated boards chose in place of `auto`, and the reasons.

    Settings that name a strategy come back as they are, without reasons. `clock` gives seconds of real
    time; `trains` is whether the simulation trains; the rest is as of `simulate`.

    Raises:
        ConfigError: nothing is trained, so that no advice can be made.
        RunFailedError: no candidate reached the goal.
        EdgeflError: as `simulate`.
    """
    if config.strategy.name != AUTO_STRATEGY:
        return Choice(config=config, reasons=())
    if not trains:
        raise ConfigError(
            f"strategy.name = {AUTO_STRATEGY!r} is chosen by training, and this simulation trains nothing: name a "
            "strategy"
        )
    return choose_settings(
        config,
        default_root() / ADVICE_FOLDER,
        clock=clock,
        devices=devices if devices is None or isinstance(devices, int) else [Path(path) for path in devices],
        profiles=profiles,
        data=None if data is None else Path(data),
        scheme=scheme,
    )


def _give_reasons(found: Advice) -> list[str]:
    assert found.best is not None
    return [f"strategy.name = {AUTO_STRATEGY!r} is {found.best.candidate}", *explain(found)]
