"""Replacement of a run by one without some devices: the same settings, from a model that has nothing of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from edgefl.core.config import AdaptSection, DevicesSection, RunConfig, RunSection
from edgefl.core.errors import ConfigError, UsageError
from edgefl.engine.assembly.normalisation import ask_scales_again


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanModel:
    """A kept model without the devices: where its file is, and what its run had spent by then.

    `seconds` are since the run's first round began, `bytes` in both directions.
    """

    path: str
    rounds: int
    updates: int = 0
    seconds: float = 0.0
    bytes: int = 0


def make_replacement(
    config: RunConfig,
    run_id: str,
    devices: Collection[str],
    *,
    model: CleanModel | None = None,
    keep_devices: bool = False,
    has_their_scales: bool = False,
) -> tuple[RunConfig, list[str]]:
    """Returns the run file of a run that replaces one, and notes on what is not as it was.

    Args:
        config: of the run that is replaced.
        run_id: its id.
        devices: that are left out.
        model: to start from; None to start where the replaced run did.
        keep_devices: they take part again, having removed from their shards what is to be forgotten.
        has_their_scales: the run's means and scales are of these devices, too: the fleet is asked for others.

    Raises:
        UsageError: it is a job, or no other device is left.
    """
    if config.job.name:
        raise UsageError(f"run {run_id} is a job, which keeps no model: submit it again with devices.exclude")
    if has_their_scales and model is not None:
        raise ConfigError("a model is of its means and scales: a run with others starts without it")
    made = replace(
        ask_scales_again(config) if has_their_scales else config,
        run=replace(_shorten(config.run, model), replaces=run_id),
        devices=config.devices if keep_devices else _exclude(config.devices, devices, run_id),
        adapt=config.adapt if model is None else _drop_base(config.adapt),
    )
    return made, _list_notes(config, run_id, model)


def require_boards(config: RunConfig, num_boards: int) -> tuple[RunConfig, list[str]]:
    """Returns a run that asks for no more boards than there are, and notes on what that changes.

    Raises:
        UsageError: there is none.
    """
    devices, run = config.devices, config.run
    if num_boards < 1:
        raise UsageError(f"no other board of the fleet has data of task {run.task} that this run may use")
    needed = {
        "devices.min": devices.min,
        "devices.count": devices.count,
        "devices.require": devices.require if isinstance(devices.require, int) else None,
        "run.min_updates": run.min_updates,
    }
    lowered = {name: num_boards for name, value in needed.items() if value is not None and value > num_boards}
    made = replace(
        config,
        run=replace(run, min_updates=lowered.get("run.min_updates", run.min_updates)),
        devices=replace(
            devices,
            min=lowered.get("devices.min", devices.min),
            count=lowered.get("devices.count", devices.count),
            require=lowered.get("devices.require", devices.require),
        ),
    )
    return made, [f"{name} is {num_boards} in place of {needed[name]}: no more boards are left" for name in lowered]


def _exclude(section: DevicesSection, devices: Collection[str], run_id: str) -> DevicesSection:
    names = tuple(name for name in section.names if name not in devices)
    if section.names and not names:
        raise UsageError(f"run {run_id} names no other device in devices.names: nobody would be left")
    return replace(section, names=names, exclude=tuple(dict.fromkeys([*section.exclude, *sorted(devices)])))


def _shorten(run: RunSection, model: CleanModel | None) -> RunSection:
    """Returns the stop rules less what the model's run had spent; at least one round, update, second and byte."""
    if model is None:
        return run
    return replace(
        run,
        init=model.path,
        rounds=None if run.rounds is None else max(1, run.rounds - model.rounds),
        updates=None if run.updates is None else max(1, run.updates - model.updates),
        seconds=None if run.seconds is None else max(1.0, run.seconds - model.seconds),
        bytes=None if run.bytes is None else max(1, run.bytes - model.bytes),
    )


def _drop_base(section: AdaptSection) -> AdaptSection:
    """Returns the section without its base: a kept model is whole, and has it."""
    return replace(section, base=None)


def _list_notes(config: RunConfig, run_id: str, model: CleanModel | None) -> list[str]:
    notes = []
    if config.privacy.unit is not None:
        notes.append(
            f"its privacy budget is its own: what run {run_id} has spent of the other boards adds up with it"
        )
    if model is None:
        return notes
    notes.append("optimisers, schedules and all else that a strategy keeps beside the model begin anew")
    if config.run.epochs is not None:
        notes.append(f"run.epochs is the whole {config.run.epochs:g}: what the kept model had of them is not known")
    return notes
