"""Makes the rules of a run: goal, evaluation, participation, divergence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.codec_selection import CodecSelector
from edgefl.core.clusters import find_cluster_fault
from edgefl.core.config import (
    EvaluateOn,
    RunConfig,
)
from edgefl.core.errors import ConfigError
from edgefl.core.extensions import format_name
from edgefl.core.metrics import Metric, MetricSet
from edgefl.core.protocol import get_speed_name
from edgefl.core.types import (
    ModelSpec,
    Strategy,
    Task,
    TrainConfig,
)
from edgefl.engine.assembly.privacy import get_private_mean
from edgefl.engine.assembly.strategy import get_batch_size, get_inner_strategy, get_plan, list_recommended
from edgefl.engine.divergence import DivergenceRule, make_advice
from edgefl.engine.progress import EpochSize, MetricGoal, StoppingCriteria
from edgefl.flower.strategy_options import is_flower_strategy
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy
from edgefl.strategies.participation import DeviceSelection, RunParticipationPolicy, WorkPlanner
from edgefl.strategies.synchronous.esync import ESync
from edgefl.strategies.synchronous.redundant_shards import RedundantShards
from edgefl.strategies.synchronous.scaffold import Scaffold
from edgefl.strategies.synchronous.signsgd import SignSGD, compute_default_step
from edgefl.strategies.synchronous.strategy import SynchronousStrategy
from edgefl.strategies.update_guard import (
    MIN_DIRECTION_PEERS,
    UpdateGuard,
)
from edgefl.tasks.registry import BUILT_IN


def choose_evaluation(
    config: RunConfig, shapes: ModelSpec, *, has_personal: bool, num_clusters: int = 0
) -> EvaluateOn:
    """Returns where models are evaluated: on the devices where a part of the model, or a copy, is only there.

    Raises:
        ConfigError: the run file asks for an evaluator, whose part of the model would be untrained, or who has no
            examples that say which of several models is its own.
    """
    evaluate_on = config.run.evaluate_on
    if num_clusters and evaluate_on not in {"auto", "devices", "none"}:
        raise ConfigError(
            f"run.evaluate_on must be auto, devices or none with {num_clusters} cluster models, of which each device "
            f"takes its own, got {evaluate_on!r}"
        )
    if num_clusters:
        return "devices" if evaluate_on == "auto" else evaluate_on
    local = "personal copies" if has_personal else next((spec.name for spec in shapes if not spec.shared), None)
    if local is None or evaluate_on in {"devices", "none"}:
        return evaluate_on
    if evaluate_on != "auto":
        raise ConfigError(
            f"run.evaluate_on must be auto, devices or none where tensors stay on the devices ({local}), which "
            f"nobody else has trained, got {evaluate_on!r}"
        )
    return "devices"


def make_goal(strategy: Strategy[Any], config: RunConfig, metrics: MetricSet) -> StoppingCriteria:
    until = None if config.run.until is None else parse_metric_goal(config.run.until, metrics.metrics)
    accuracy = config.run.accuracy
    if until is not None and until.name == "accuracy" and "accuracy" not in metrics.metrics:
        if accuracy is not None:
            raise ConfigError(
                f"run.until = {config.run.until!r} and run.accuracy = {accuracy:g} are one rule; give one"
            )
        accuracy, until = until.limit, None
    privacy = get_private_mean(strategy)
    return StoppingCriteria(
        rounds=config.run.rounds,
        epochs=config.run.epochs,
        epoch=EpochSize(
            task=config.run.task,
            batch_size=get_batch_size(strategy, config),
            test_fraction=config.run.local_test_fraction,
        ),
        updates=config.run.updates,
        seconds=config.run.seconds,
        bytes=config.run.bytes,
        accuracy=accuracy,
        until=until,
        accuracy_window=config.run.accuracy_window,
        trust_single_evaluation=config.run.trust_single_evaluation,
        is_budget_spent=None if privacy is None else lambda version: not privacy.can_release(version + 1),
    )


def parse_metric_goal(text: str, metrics: Mapping[str, Metric]) -> MetricGoal:
    """Returns the goal that `run.until` states, of a metric that the task declares or of the accuracy.

    Raises:
        ConfigError: it is no comparison, of an unknown metric, or against the metric's direction.
    """
    found = re.fullmatch(r"\s*([^\s<>=]{1,200})\s*(<=|>=)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]{1,3})?)\s*", text)
    try:
        name, sign, limit = ("", "", math.nan) if found is None else (found[1], found[2], float(found[3]))
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(
            f"run.until must be a metric, <= or >=, and a number, such as 'rmse <= 14.5', got {text!r:.100}"
        )
    if name != "accuracy" and name not in metrics:
        known = ", ".join(dict.fromkeys([*metrics, "accuracy"]))
        raise ConfigError(f"run.until: the task declares no metric {format_name(name)}, only {known}")
    is_max = name not in metrics or metrics[name].direction == "max"
    if (sign == ">=") != is_max:
        raise ConfigError(f"run.until: {name} gets better as it {'rises' if is_max else 'falls'}, got {sign}")
    if name == "accuracy" and not 0 < limit <= 1:
        raise ConfigError(f"run.until: an accuracy must lie above 0 and at most at 1, got {limit:g}")
    return MetricGoal(name=name, limit=limit, is_max=is_max)


def make_policy(
    config: RunConfig,
    shapes: ModelSpec,
    codec_policy: CodecSelector | None,
    strategy: Strategy[Any],
    *,
    num_clusters: int = 0,
) -> RunParticipationPolicy:
    """Returns the rules for devices and their updates, which have tensors of these shapes."""
    guard = config.guard
    inner = get_inner_strategy(strategy)
    has_rounds = isinstance(inner, SynchronousStrategy)
    # In rounds the first one is judged when it is complete, otherwise as soon as there are enough to judge by.
    hold_updates = config.run.min_updates if has_rounds else MIN_DIRECTION_PEERS + 1
    return RunParticipationPolicy(
        selection=make_selection(config),
        guard=UpdateGuard(
            has_full_models=strategy.has_nodes,
            has_collective=config.aggregation.is_collective or config.secure_aggregation.enabled,
            shapes=shapes,
            max_norm=guard.max_norm,
            norm_ratio=guard.norm_ratio if guard.enabled else None,
            # Devices of different clusters move models of their own, and a device may take another one.
            min_cosine=guard.min_cosine if guard.enabled and not num_clusters else None,
            # With Scaffold updates follow from the variates as well.
            compares_responses=not isinstance(inner, Scaffold) and not num_clusters,
            refusals_before_quarantine=guard.refusals_before_quarantine,
            hold_updates=hold_updates,
            find_fault=lambda tensors: find_cluster_fault(tensors, num_clusters),
        ),
        codec_policy=codec_policy,
    )


def make_planner(
    config: RunConfig, strategy: Strategy[Any], *, down: tuple[str, ModelSpec], up: tuple[str, ModelSpec]
) -> WorkPlanner | None:
    """Returns what foresees the works of a run; None for nodes of a graph, which train between their works, too.

    Args:
        config: of the run.
        strategy: of the run.
        down: codec and tensors of a whole model.
        up: codec and tensors of an update.
    """
    if strategy.has_nodes:
        return None
    task, plan = config.run.task, get_plan(strategy)

    @cache
    def count_bytes() -> tuple[float, float]:  # drawn and encoded once, where a board has a budget of traffic
        return compute_expected_bytes(*down), compute_expected_bytes(*up)

    return WorkPlanner(
        plan=plan if isinstance(plan, TrainConfig) else None,
        task=task,
        test_fraction=config.run.local_test_fraction,
        speed_name=get_speed_name(task, config.task.get("model")),
        can_shorten=isinstance(get_inner_strategy(strategy), ESync),
        count_bytes=count_bytes,
    )


def make_selection(config: RunConfig) -> DeviceSelection:
    devices = config.devices
    return DeviceSelection(
        min_memory_bytes=devices.min_memory_bytes,
        needs_accelerator=devices.accelerator,
        max_temperature_c=devices.max_temperature_c,
        min_battery=devices.min_battery,
        unhealthy_policy=devices.unhealthy_policy,
    )


def check_selection(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Checks that a run that selects devices by utility has one update of a device at a time.

    Raises:
        ConfigError: it has not.
    """
    inner = get_inner_strategy(strategy)
    is_selecting = isinstance(inner, SynchronousStrategy | AsynchronousStrategy)
    is_selecting &= not isinstance(inner, RedundantShards)
    is_selecting &= not is_flower_strategy(config.strategy.name)  # which selects by itself
    if config.selection.rule == "utility" and not is_selecting:
        raise ConfigError(
            'selection.rule = "utility" is for strategies that ask a device for one update at a time, such as fedavg '
            f"or fedbuff; {config.strategy.name} does not"
        )


def check_metered_codec(config: RunConfig, strategy: Strategy[Any], up: str) -> None:
    """Checks that devices may send by different codecs where the run names one for metered connections.

    Raises:
        ConfigError: they may not.
    """
    metered, inner = config.compression.metered, get_inner_strategy(strategy)
    if metered is None:
        return
    reasons = {
        "nodes of a graph need one codec for every edge": strategy.has_nodes,
        "its bodies do not add up": config.aggregation.is_collective,
        "only whole numbers of equal size add up under masks": config.secure_aggregation.enabled,
        "it goes by what devices report, which has no noise": config.privacy.unit == "device",
        "a network that is cut has one codec": config.split.after is not None,
        "all copies of a block must be the same": isinstance(inner, RedundantShards),
        "the strategy has a codec of its own": getattr(getattr(inner, "rules", None), "codec", None) != up,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"compression.metered must be left out with strategy {config.strategy.name}, got {metered!r:.80}: "
                f"{reason}"
            )


def check_consistency(config: RunConfig, plan: object) -> None:
    """Checks that examples without a label are read where they are trained on, and trained on where they are read.

    Raises:
        ConfigError: it is but one of the two; a task of one's own may read them without being told.
    """
    if config.run.task not in BUILT_IN or not isinstance(plan, TrainConfig):
        return
    is_read, is_trained = bool(config.task.get("unlabelled")), plan.consistency_weight is not None
    if is_trained and not is_read:
        raise ConfigError(
            "strategy.consistency_weight is for examples without a label, which only the tasks pictures and audio "
            f"read, with task.unlabelled = true; task {config.run.task} reads none here; set both or neither"
        )
    if is_read and not is_trained:
        raise ConfigError(
            "task.unlabelled reads examples without a label, which only strategy.consistency_weight trains on; "
            "set both or neither"
        )


def make_divergence_rule(task: Task, config: RunConfig, strategy: Strategy[Any]) -> DivergenceRule:
    """Returns the rule of the run file, with advice that fits its strategy and task."""
    inner = get_inner_strategy(strategy)
    plan, name = get_plan(strategy), "learning_rate"
    rate = plan.learning_rate if isinstance(plan, TrainConfig) else None
    usual = list_recommended(task, config.strategy.name).get("learning_rate", TrainConfig().learning_rate)
    if isinstance(inner, SignSGD):
        name, rate, usual = "step", inner.step, compute_default_step(config.run.rounds)
    # A task's own loss has another scale than log C.
    labels: Sequence[str] = getattr(task, "labels", ()) if getattr(task, "loss", None) is None else ()
    return DivergenceRule(
        action=config.run.on_divergence,
        untrained_loss=math.log(len(labels)) if len(labels) > 1 else None,
        **make_advice(name, rate, float(usual), getattr(inner, "step_scale", None)),
    )
