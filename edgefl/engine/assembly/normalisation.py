"""Normalisation of a fleet's inputs: settings that stand for mean and deviation of each column over all boards.

`[task] normalise = "fleet"` asks the boards before the first round, in a run of its own; `"run:ID"` takes what an
earlier one found. Where the run begins, its settings have the numbers in their place, as `means` and `scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgefl.core.analyses import has_result
from edgefl.core.config import MAX_NAME_CHARS, RunConfig, RunSection, StrategySection
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.core.types import Json, Scalar
from edgefl.tasks.configured.options import (
    FLEET,
    MAX_COLUMNS,
    NORMALISE,
    NORMALISED_TASKS,
    OF_RUN,
    check_normalise,
    split_names,
)

MEANS, SCALES = "means", "scales"
SCALES_ANALYSIS = "column-scales"
"""Strategy of the run that asks the boards."""
_SUFFIX = "-scales"


def should_find_scales(config: RunConfig) -> bool:
    """Returns whether a run needs the fleet's means and scales: an analysis of the columns as they are does not."""
    is_asked_for = config.run.task in NORMALISED_TASKS and bool(config.task.get(NORMALISE))
    strategy = {"name": config.strategy.name, **config.strategy.options}
    return is_asked_for and not config.job.name and not has_result({"strategy": strategy})


def find_named_run(config: RunConfig) -> str | None:
    """Returns the run whose means and scales a run takes; None where it asks the boards itself.

    Raises:
        ConfigError: the setting is none of its values.
    """
    value = str(config.task[NORMALISE])
    check_normalise(value)
    return value.removeprefix(OF_RUN) if value != FLEET else None


def make_scales_run(config: RunConfig) -> RunConfig:
    """Returns the run that asks the same boards for their sums, of the examples that they train on."""
    run, devices = config.run, config.devices
    name = run.name or f"{run.task}-{config.strategy.name}"
    return RunConfig(
        run=RunSection(
            task=run.task,
            name=f"{name[: MAX_NAME_CHARS - len(_SUFFIX)]}{_SUFFIX}",
            seed=run.seed,
            deadline_s=run.deadline_s,
            local_test_fraction=run.local_test_fraction,
        ),
        task=_remove(config.task),
        strategy=StrategySection(name=SCALES_ANALYSIS, options={}),
        devices=replace(devices, count=None, fraction=None),
        guard=config.guard,
        conditions=config.conditions,
        simulation=replace(config.simulation, faults=None),
    )


def name_scales_run(config: RunConfig, run_id: str) -> RunConfig:
    """Returns a run's settings with the run that finds its means and scales."""
    return replace(config, task={**config.task, NORMALISE: f"{OF_RUN}{run_id}"})


def ask_scales_again(config: RunConfig) -> RunConfig:
    """Returns a run's settings without the numbers that were found: the boards that are left are asked for others."""
    return replace(config, task={**_remove(config.task), NORMALISE: FLEET})


def check_same_columns(config: RunConfig, asked: Mapping[str, Mapping[str, Scalar]]) -> None:
    """Checks that a run asked for the scales of another one's columns.

    Args:
        config: of the run that needs them.
        asked: tables of the run that found them.

    Raises:
        ConfigError: it did not.
    """
    strategy, task = asked.get("strategy", {}).get("name"), asked.get("run", {}).get("task")
    if strategy != SCALES_ANALYSIS or task != config.run.task:
        raise ConfigError(
            f"task.{NORMALISE} must name a run of {SCALES_ANALYSIS} on task {config.run.task}, got one of "
            f"{strategy!s:.40} on {task!s:.40}"
        )
    columns = asked.get("task", {}).get("columns", "")
    if _split_columns(config.run.task, columns) != _split_columns(config.run.task, config.task.get("columns", "")):
        raise ConfigError(
            f"task.{NORMALISE} must name a run about the same columns, {config.task.get('columns')!s:.80}, got one "
            f"about {columns!s:.80}"
        )


def apply_scales(config: RunConfig, result: Json) -> RunConfig:
    """Returns a run's settings with the numbers of a result in place of `normalise`.

    Raises:
        RunFailedError: no board told anything.
    """
    if not result.get("columns"):
        raise RunFailedError(
            f"task.{NORMALISE}: no board has told anything: each had fewer than {result.get('min_group')} examples; "
            f'{NORMALISE} = "{OF_RUN}ID" takes what a run of {SCALES_ANALYSIS} with a smaller min_group has found'
        )
    # Nine digits are all that a float of single precision has.
    numbers = {
        option: ",".join(f"{column[name]:.9g}" for column in result["columns"])
        for option, name in ((MEANS, "mean"), (SCALES, "scale"))
    }
    return replace(config, task={**_remove(config.task), **numbers})


def _split_columns(task: str, columns: Any) -> tuple[str, ...]:
    return split_names(task, "columns", columns, at_most=MAX_COLUMNS)


def _remove(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in options.items() if name not in {NORMALISE, MEANS, SCALES}}
