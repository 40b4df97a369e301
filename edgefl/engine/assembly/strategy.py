"""Makes the strategy of a run, with the settings that its task recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.compression.codec import make_codec
from edgefl.core.config import (
    RunConfig,
)
from edgefl.core.errors import ConfigError
from edgefl.core.types import (
    ModelSpec,
    Scalar,
    Strategy,
    Task,
    TensorKind,
    TrainConfig,
)
from edgefl.engine.assembly.privacy import make_example_privacy, make_private_mean
from edgefl.flower.strategy_options import is_flower_strategy
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.registry import (
    BUILT_IN_STRATEGIES,
    find_strategy,
    get_settings,
    make_strategy,
)
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.collective_rounds import make_rules
from edgefl.strategies.synchronous.redundant_shards import RedundantShards
from edgefl.strategies.synchronous.secure_rounds import make_secure_rounds
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, format_slice_codec
from edgefl.strategies.validated_strategy import ValidatedStrategy, make_validated_strategy


def make_run_strategy(task: Task, config: RunConfig, rules: RoundRules) -> Strategy[Any]:
    """Returns the strategy of the run file; a user's or Flower's is validated against the contract."""
    name, options = config.strategy.name, config.strategy.options
    defaults = list_recommended(task, name)
    if name in BUILT_IN_STRATEGIES:
        if "learning_rate" not in options:
            defaults.update(find_strategy(name).without_rate)
        strategy = make_strategy(name, {**_select_known(defaults, get_settings(name)), **options}, rules)
        if config.secure_aggregation.enabled and isinstance(strategy, SynchronousStrategy):
            return make_secure_rounds(strategy, config.secure_aggregation)
        return strategy
    from edgefl.storage.state_serialisation import encode_state  # noqa: PLC0415 a device that assembles needs no store

    if is_flower_strategy(name):
        from edgefl.flower.strategy import get_flower_settings, make_flower_strategy  # noqa: PLC0415 Flower is slow

        settings = {**_select_known(defaults, get_flower_settings(name)), **options}
        return make_validated_strategy(name, lambda: make_flower_strategy(name, settings, rules), pack=encode_state)
    return make_validated_strategy(
        name,
        lambda: make_strategy(name, {**_select_known(defaults, get_settings(name)), **options}, rules),
        pack=encode_state,
    )


def list_recommended(task: Task, name: str) -> dict[str, Any]:
    """Returns the settings that a task recommends, with the learning rate that suits the strategy."""
    recommended = dict(getattr(task, "defaults", {}))
    if "learning_rate" in recommended and name in BUILT_IN_STRATEGIES:
        recommended["learning_rate"] *= find_strategy(name).rate_share
    return recommended


def _select_known(recommended: Mapping[str, Scalar], settings: Mapping[str, Any]) -> dict[str, Scalar]:
    """Returns those of a task's recommended settings that the strategy has."""
    return {name: value for name, value in recommended.items() if name in settings}


def get_plan(strategy: Strategy[Any]) -> Any:
    """Returns the plan of a strategy, None where it has none."""
    return getattr(get_inner_strategy(strategy), "plan", None)


def get_inner_strategy(strategy: Strategy[Any]) -> Strategy[Any]:
    """Returns a strategy without the checks that a user's or Flower's is wrapped in."""
    return strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy


def check_slices(config: RunConfig, strategy: Strategy[Any], shapes: ModelSpec) -> None:
    """Checks that nothing needs whole updates where devices send parts of them.

    Raises:
        ConfigError, CodecError: a setting does; there is no such codec of a part.
    """
    if not (isinstance(strategy, RedundantShards) and strategy.sends_slices):
        return
    how, guard = "strategy.copies = 'slices'", config.guard
    if guard.enabled or guard.max_norm is not None:
        raise ConfigError(
            f"guard.enabled must be false with {how}, and guard.max_norm left out: parts of updates are no measure "
            "of one another"
        )
    if config.split.after is not None:
        raise ConfigError(f"split.after must be left out with {how}, got {config.split.after!r}")
    make_codec(format_slice_codec(strategy.rules.codec, 1, 2), shapes)


def permits_partial_sums(config: RunConfig) -> bool:
    """Returns whether a site gateway may answer with the mean of its boards' updates in this run.

    Its strategy says so, and nothing in the run file needs the update of each board.
    """
    return (
        find_strategy(config.strategy.name).permits_partial_sums
        if config.strategy.name in BUILT_IN_STRATEGIES
        else False
    ) and not (
        config.privacy.unit is not None
        or config.secure_aggregation.enabled
        or config.guard.max_norm is not None
        or config.aggregation.is_collective
        or config.split.after is not None
        or config.selection.rule == "utility"
        or config.strategy.options.get("seconds") is not None
    )


def get_batch_size(strategy: Strategy[Any], config: RunConfig) -> int:
    """Returns the examples of a local iteration, of which run.epochs is counted."""
    inner = get_inner_strategy(strategy)
    plan = getattr(inner, "plan", None)
    if isinstance(plan, TrainConfig):
        return plan.batch_size
    batch_size = config.strategy.options.get("batch_size")
    return batch_size if isinstance(batch_size, int) and batch_size >= 1 else TrainConfig().batch_size


def get_versions_per_round(strategy: Strategy[Any], config: RunConfig) -> int | None:
    """Returns the versions per round; None for the number of devices in the first dispatch."""
    count = strategy.versions_per_round
    return count if count is not None else config.run.updates_per_round


def make_round_rules(config: RunConfig, shapes: ModelSpec, codec: str) -> RoundRules:
    server, devices = config.server, config.devices
    # A round of few boards spends as much as one of all.
    is_full = config.privacy.mechanism == "dp-ftrl" and devices.min == 1
    return RoundRules(
        privacy=make_private_mean(config, shapes) if config.privacy.unit == "device" else None,
        example_privacy=make_example_privacy(config, shapes) if config.privacy.unit == "example" else None,
        min_devices=devices.count or devices.min if is_full else devices.min,
        max_devices=devices.count,
        fraction=config.devices.fraction,
        min_updates=config.run.min_updates,
        deadline_s=config.run.deadline_s,
        round_timeout_s=config.run.round_timeout_s,
        on_timeout=config.run.on_timeout,
        updates_per_round=config.run.updates_per_round,
        rounds=config.run.rounds,
        codec=codec,
        task=config.run.task,
        test_fraction=config.run.local_test_fraction,
        collective=make_rules(config.aggregation),
        selection=config.selection if config.selection.rule == "utility" else None,
        server=ServerOptimizer(
            kind=server.optimizer,
            learning_rate=server.learning_rate,
            beta1=server.beta1,
            beta2=server.beta2,
            epsilon=server.epsilon,
            buffers=frozenset(spec.name for spec in shapes if spec.kind == TensorKind.BUFFER),
        ),
        seed=config.run.seed,
    )
