"""The model of a run with `[adapt]`: what of it travels each round, what a device gets once, and the whole of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgefl.core.clusters import is_stack, name_in_stack, split_stack
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.types import (
    Algorithm,
    Array,
    ModelSpec,
    Strategy,
    Task,
    TensorKind,
    Tensors,
    TrainConfig,
    derive_rng,
)
from edgefl.tasks.adaptation.adapted_task import AdaptedTask, select_fitting
from edgefl.tasks.adaptation.base_catalogue import compute_digest, find_base_file
from edgefl.tasks.adaptation.base_file import AdaptPlan, encode_base, load_base

PERSONAL_SETTINGS = ("personal_lambda", "personal_mixture")
"""Settings of a strategy that give each device a personal copy of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModel:
    """A model of which a part is trained.

    Attributes:
        task: trains that part.
        first: the tensors that are trained, as they are at first.
        plan: goes to devices with each instruction.
        base: what a device gets once, by name.
        path: of its file, where that is a pretrained base; None for one that is to be made.
    """

    task: AdaptedTask
    first: dict[str, Array]
    plan: AdaptPlan
    base: Mapping[str, Array] = field(repr=False)
    path: Path | None = None

    @property
    def base_bytes(self) -> int:
        """Size of the file that a device fetches."""
        return self.plan.num_bytes

    def encode_base(self) -> bytes:
        """Returns that file."""
        return encode_base(self.base)

    def merge(self, model: Tensors) -> dict[str, Array]:
        """Returns the whole model; tensors that stay on the devices are absent."""
        return self.task.merge(model)


def make_adapted_model(task: Task, config: RunConfig, whole: Mapping[str, Array], bases: Path | None) -> AdaptedModel:
    """Returns the model of a run file with `[adapt]`, which starts from a whole one or from a pretrained base.

    Args:
        task: with all tensors.
        config: the run file.
        whole: the first model without a base.
        bases: folder of the coordinator's bases; None where there is none.

    Raises:
        ConfigError: the section does not fit the task or the rest of the run file, or the base has not all of it.
        NotFoundError: there is no such base.
        DataError: its file is damaged.
    """
    if config.split.after is not None:
        raise ConfigError("adapt does not go with split.after, whose boards have no whole network; leave one out")
    parts, path = AdaptedTask(task, config.adapt).parts, None
    section = replace(config.adapt, base=None)  # what a base is called is the coordinator's affair
    if config.adapt.base is None:
        base = {name: whole[name] for name in parts.base_names}
        content = encode_base(base)
        plan = AdaptPlan(section, hashlib.sha256(content).hexdigest(), len(content))
    else:
        path = _find_file(config, bases)
        found = load_base(path, [spec.name for spec in task.shapes()])
        whole = {**whole, **select_fitting(task.shapes(), found)}
        base = {name: whole[name] for name in parts.base_names if name in found or name not in parts.frozen_names}
        plan = AdaptPlan(section, compute_digest(path), path.stat().st_size)
    adapted = AdaptedTask(task, config.adapt, base)
    first = adapted.start_from(whole, config.run.seed)
    return AdaptedModel(task=adapted, first=first, plan=plan, base=base, path=path)


def check_local_tensors(strategy: str, plan: object, shapes: ModelSpec) -> None:
    """Checks that a strategy can do with tensors which stay on the devices.

    Args:
        strategy: its name.
        plan: of the strategy; None where it has none.
        shapes: of the model on a device.

    Raises:
        ConfigError: it cannot.
    """
    local = next((spec.name for spec in shapes if not spec.shared), None)
    if local is None:
        return
    reasons = {
        "all who hold a block answer the same": strategy == "redundant",
        "the control variates are of all that is trained": getattr(plan, "algorithm", None) == Algorithm.SCAFFOLD,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"strategy {strategy} does not go with tensors that stay on the devices ({local}), since {found[0]}; "
            "take another, such as fedavg, or leave out adapt.local"
        )


def check_head_epochs(plan: object, shapes: ModelSpec, *, plans_iterations: bool) -> None:
    """Checks that tensors which stay on the devices can be trained before the others (FedRep).

    Args:
        plan: of the strategy; None where it has none.
        shapes: of the model on a device.
        plans_iterations: whether the strategy says how many iterations each device trains.

    Raises:
        ConfigError: none stay, or the strategy has no place for more iterations.
    """
    if not isinstance(plan, TrainConfig) or plan.head_epochs is None:
        return
    found = f"strategy.head_epochs = {plan.head_epochs:g}"
    is_shared = {spec.shared for spec in shapes if spec.kind == TensorKind.PARAMETER}
    if len(is_shared) < 2:
        raise ConfigError(
            f"{found} trains first what stays on the devices and then what travels, and of this model "
            f"{'nothing' if True in is_shared else 'all that is trained'} stays; name a part of it in adapt.local, "
            "or leave it out"
        )
    if plans_iterations:
        raise ConfigError(
            f"{found} does not go with esync or fltrust, which count on the iterations that they plan; "
            "take another strategy, such as fedavg, or leave it out"
        )


def check_personal(strategy: Strategy[Any], config: RunConfig, shapes: ModelSpec, *, plans_iterations: bool) -> bool:
    """Returns whether devices have personal copies of the model (Ditto, APFL).

    Args:
        strategy: of the run.
        config: the run file.
        shapes: of the model on a device.
        plans_iterations: whether the strategy says how many iterations each device trains.

    Raises:
        ConfigError: they do, and something in the run file does not go with it.
    """
    chosen = {name: value for name, value in config.strategy.options.items() if name in PERSONAL_SETTINGS}
    if not chosen:
        return False
    unfit = {
        "nodes of a graph, which have models of their own": strategy.has_nodes,
        "esync or fltrust, which count on the iterations that they plan": plans_iterations,
        "redundant, where all who hold a block answer the same": config.strategy.name == "redundant",
        "split.after, whose boards have no whole network": config.split.after is not None,
        "aggregation.collective": config.aggregation.is_collective,
        "adapt.method = 'lora', whose factors are no tensors of a model that is kept": config.adapt.method == "lora",
        "tensors that stay on the devices beside it": any(not spec.shared for spec in shapes),
    }
    if found := [name for name, is_set in unfit.items() if is_set]:
        name, value = next(iter(chosen.items()))
        raise ConfigError(f"strategy.{name} = {value} does not go with {found[0]}; leave one of them out")
    return True


def check_clusters(strategy: Strategy[Any], config: RunConfig, shapes: ModelSpec, *, has_residuals: bool) -> int:
    """Returns how many cluster models a run has (IFCA); 0 where it has one model.

    Args:
        strategy: of the run.
        config: the run file.
        shapes: of the model on a device.
        has_residuals: whether what a codec leaves out stays on the device.

    Raises:
        ConfigError: it has several, and something in the run file does not go with it.
    """
    num_clusters = int(getattr(strategy, "num_clusters", 0))
    chosen = [name for name in PERSONAL_SETTINGS if name in config.strategy.options]
    unfit = {
        "split.after, whose boards have no whole network": config.split.after is not None,
        "aggregation.collective": config.aggregation.is_collective,
        "[adapt]": config.adapt.is_used,
        "tensors that stay on the devices": any(not spec.shared for spec in shapes),
        "strategy.keep_optimizer, as a device may take another model": config.strategy.options.get("keep_optimizer"),
        "ef in compression.up, as a device may take another model": has_residuals,
        f"strategy.{''.join(chosen[:1])}": bool(chosen),
    }
    if num_clusters and (found := [name for name, is_set in unfit.items() if is_set]):
        raise ConfigError(
            f"strategy.name = {config.strategy.name!r} does not go with {found[0]}; leave one of them out"
        )
    return num_clusters


def make_first_models(task: Task, config: RunConfig, first: dict[str, Array], num_clusters: int) -> dict[str, Array]:
    """Returns the stack of a run with clusters; `first` itself where there are none, or `run.init` has the stack.

    Without `run.init` the first model is that of the run's seed, and the others are from seeds that follow from it.

    Raises:
        ConfigError: `run.init` has not as many models as the run.
    """
    if config.run.init is not None:
        check_num_models(first, num_clusters)
    if config.run.init is not None or not num_clusters:
        return first
    seed = config.run.seed
    seeds = [int(derive_rng(seed, "cluster", cluster).integers(2**31)) for cluster in range(1, num_clusters)]
    shapes = task.shapes()
    return {
        name_in_stack(cluster, spec.name): model[spec.name].astype(spec.dtype)
        for cluster, model in enumerate(task.init(each) for each in (seed, *seeds))
        for spec in shapes
    }


def check_num_models(kept: Tensors, num_clusters: int) -> None:
    """Raises a `ConfigError` where `run.init` has not a model for each cluster, or one without clusters."""
    found = len(split_stack(kept)) if is_stack(kept) else 0
    if found != num_clusters:
        raise ConfigError(
            f"run.init must be a file with {_count_models(num_clusters)}, as this run has; it has "
            f"{_count_models(found)}"
        )


def _count_models(num_clusters: int) -> str:
    return f"{num_clusters} models, one for each cluster" if num_clusters else "one model"


def _find_file(config: RunConfig, bases: Path | None) -> Path:
    if config.run.init is not None:
        raise ConfigError("adapt.base and run.init both say where the model starts; give one of them")
    assert config.adapt.base is not None
    return find_base_file(config.adapt.base, bases)
