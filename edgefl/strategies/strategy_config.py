"""Settings that strategies share: local training, the schedule of its learning rate, and the rules of a round.

Schedules are one line of text: `constant`, `step:N:F` (times F every N rounds), `exponential:F` (times F every
round), `inverse-sqrt` (over the square root of the round), `cosine:N` (down to zero in N rounds), `linear:N`
(likewise, in a straight line), `linear:N:F` (constant until the last part F of N rounds, at most 1, and in a straight
line to zero over that).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from edgefl.core.config import SelectionSection, TimeoutPolicy
from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.extensions import format_name
from edgefl.core.settings import check_settings
from edgefl.core.types import Algorithm, ExamplePrivacy, Precision, TrainConfig
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.private_mean import PrivateMean

T = TypeVar("T")

_ALGORITHM_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}")
"""Names of entry points; a `module:Class` is never looked for on a board."""
CONSTANT = "constant"
MAX_WAIT_S = 60.0
"""Upper bound on the sleep between two `assign` calls; every event wakes the loop anyway."""
TICK_S = 1e-6
"""Times closer than this are equal: a sum of floats may miss the exact wake-up time."""
MIN_USED_IDS = 2
"""Number of newest used updates that a device is always told of: a board whose card lost the last minutes learns from
them that it did. Error feedback relies on it."""


_TRAIN_FIELDS = {item.name: item for item in fields(TrainConfig)}

SCHEDULES = (CONSTANT, "step:N:F", "exponential:F", "inverse-sqrt", "cosine:N", "linear:N", "linear:N:F")

LearningRateSchedule = Callable[[int], float]
"""Number of closed rounds -> factor of the learning rate, 1 at first."""


def _copy_field(name: str, **changes: Any) -> Any:
    """Returns a dataclass field with the default and the bounds that `TrainConfig` has."""
    return field(**{"default": _TRAIN_FIELDS[name].default, "metadata": _TRAIN_FIELDS[name].metadata, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """Settings of local training; strategies inherit them and add their own.

    Attributes:
        learning_rate: of the local optimiser, in the first round.
        schedule: of the learning rate by round; see `parse_schedule`.
        epochs: passes over the shard; `iterations`, when set, replaces them, and so does `seconds`.
        iterations: local steps of an assignment, in place of `epochs`.
        seconds: how long an assignment trains, in place of `epochs`.
        batch_size: examples of a step.
        momentum: share of the last step that the next one keeps.
        weight_decay: share of the weights that every step subtracts, before the learning rate.
        micro_batch_size: examples whose gradients are computed at once, at most; those of a batch's parts add up
            (gradient accumulation), in less memory. None takes whole batches.
        max_gradient_norm: a batch's gradient is clipped to this norm, over all tensors; None clips nothing.
        precision: of what a network of torch computes while it trains, `bfloat16` or `float16` (mixed precision, the
            latter with a scaled loss); weights and gradients are float32. None is float32, as are boards without
            torch.
        head_epochs: passes that train only the tensors that stay on the device, before those that train only the
            others (FedRep); None trains all together (FedPer).
        personal_lambda: λ of Ditto: each device trains as much again a copy v of the model that stays there, held to
            the model w that it received by λ/2·|v - w|²; None trains no copy.
        personal_mixture: a of APFL at first: each device trains as much again a copy v that stays there, so that the
            mixture a·v + (1 - a)·w with the model is good; a adapts on each device. None trains no copy.
        consistency_weight: λ of FixMatch: examples without a label are trained on, too, for what the model says of
            them, in another view; needs `unlabelled` in `[task]`. None leaves them out.
        consistency_threshold: least probability with which it must say so.
        optimizer: a local algorithm, built in (`types.Algorithm`) or installed on the boards.
        keep_optimizer: moments of the optimiser persist from one assignment to the next.
    """

    learning_rate: float = _copy_field("learning_rate")
    schedule: str = CONSTANT
    epochs: float = _copy_field("epochs", default=1.0)
    iterations: int | None = _copy_field("iterations")
    seconds: float | None = _copy_field("seconds")
    batch_size: int = _copy_field("batch_size")
    optimizer: str = Algorithm.SGD
    momentum: float = _copy_field("momentum")
    weight_decay: float = _copy_field("weight_decay")
    micro_batch_size: int | None = _copy_field("micro_batch_size")
    max_gradient_norm: float | None = _copy_field("max_gradient_norm")
    precision: Precision | None = None
    head_epochs: float | None = _copy_field("head_epochs")
    personal_lambda: float | None = _copy_field("personal_lambda")
    personal_mixture: float | None = _copy_field("personal_mixture")
    consistency_weight: float | None = _copy_field("consistency_weight")
    consistency_threshold: float = _copy_field("consistency_threshold", default=0.95)
    keep_optimizer: bool = False

    summary: ClassVar[str] = ""
    """One line for `edgefl strategies`; without it, the first paragraph of the strategy's module."""
    rate_share: ClassVar[float] = 1.0
    """Part of the task's recommended learning rate that is the default."""
    permits_partial_sums: ClassVar[bool] = False
    """Whether the mean of a site's updates, weighted by their examples, may take the place of the updates."""
    without_rate: ClassVar[Mapping[str, Any]] = {}
    """Settings that are the default where the run file gives no `learning_rate`."""

    def plan(self) -> TrainConfig:
        """Returns the plan of the first round.

        Raises:
            ConfigError: an invalid setting.
        """
        check_settings(self, "strategy")
        values = {name: getattr(self, name) for name in _SHARED_FIELDS}
        if self.iterations is not None or self.seconds is not None:
            values["epochs"] = None
        if self.consistency_weight is None:  # boards of an older release need not know what is not used
            values["consistency_threshold"] = None
        plan = TrainConfig(algorithm=self.optimizer, keeps_state=self.keep_optimizer, **values)
        check_plan(plan)
        return plan

    def make_schedule(self) -> LearningRateSchedule:
        """Returns the schedule: closed rounds -> factor of the learning rate."""
        return parse_schedule(self.schedule)

    def make(self, strategy_class: Callable[..., T], rules: RoundRules, **settings: Any) -> T:
        """Returns a strategy with this plan and schedule.

        Raises:
            ConfigError: an invalid setting.
        """
        return strategy_class(
            **{
                "plan": make_private_plan(self.plan(), rules),
                "lr_schedule": self.make_schedule(),
                "rules": rules,
                **settings,
            }
        )


_SHARED_FIELDS = tuple(item.name for item in fields(StrategyConfig) if item.name in _TRAIN_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStepConfig(StrategyConfig):
    """Settings of devices that send every step; `iterations` = 0 leaves it to `epochs`, `seconds` replace it."""

    iterations: int | None = field(default=1, metadata={"at_least": 0})

    def plan(self) -> TrainConfig:
        takes_more = self.iterations == 0 or self.seconds is not None
        return StrategyConfig.plan(replace(self, iterations=None) if takes_more else self)


def make_private_plan(plan: TrainConfig, rules: RoundRules) -> TrainConfig:
    """Returns a plan with the private gradients of a run's rules; itself where they have none.

    Raises:
        ConfigError: it does not go with them.
    """
    if rules.example_privacy is None:
        return plan
    privacy = replace(rules.example_privacy, optimizer=plan.algorithm)
    private = replace(plan, algorithm=Algorithm.DP_SGD, privacy=privacy)
    private.check("strategy")
    return private


def check_plan(plan: TrainConfig) -> None:
    """Checks a plan before the run begins, as every device would.

    Raises:
        ConfigError: an invalid number or name, or two budgets.
    """
    if _ALGORITHM_NAME.fullmatch(plan.algorithm) is None:
        raise ConfigError(
            f"strategy.optimizer must be the name of a local algorithm, built in or installed on the boards, such as "
            f"sgd; got {format_name(plan.algorithm)}"
        )
    if plan.iterations is not None and plan.seconds is not None:
        raise ConfigError("strategy.iterations and strategy.seconds are two budgets; give one of them")
    plan.check("strategy")


def parse_schedule(spec: str) -> LearningRateSchedule:
    """Returns the schedule of a line of text.

    An unbounded one raises a StrategyError when its factor overflows.

    Raises:
        ConfigError: no such schedule, or an invalid number.
    """
    name, *numbers = spec.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ConfigError(f"strategy.schedule: the numbers of {spec!r} must be finite and above 0")
    match name, values:
        case "constant", []:
            return lambda _: 1.0
        case "step", [every, factor]:
            return lambda done: _compute_power(spec, factor, done // every, done)
        case "exponential", [factor]:
            return lambda done: _compute_power(spec, factor, done, done)
        case "inverse-sqrt", []:
            return lambda done: 1.0 / math.sqrt(done + 1)
        case "cosine", [length]:
            return lambda done: 0.5 * (1.0 + math.cos(math.pi * min(1.0, done / length)))
        case "linear", [length, *parts] if len(parts) <= 1 and sum(parts) <= 1:
            part = parts[0] if parts else 1.0
            return lambda done: min(1.0, max(0.0, 1.0 - done / length) / part)
    raise ConfigError(f"strategy.schedule must be one of {', '.join(SCHEDULES)}, got {spec!r}")


def _compute_power(spec: str, factor: float, exponent: float, closed_rounds: int) -> float:
    """Returns the power, or raises when it overflows."""
    try:
        power = math.pow(factor, exponent)
    except OverflowError:
        power = math.inf
    if math.isinf(power):
        raise StrategyError(
            f"strategy.schedule {spec!r} is too large for a number after {closed_rounds} closed rounds; "
            "take a smaller factor"
        )
    return power


def compute_rate_factor(schedule: float, halvings: Sequence[int], version: int) -> float:
    """Returns the factor of the learning rate of work that begins at `version`.

    Args:
        schedule: factor of the schedule.
        halvings: versions from which on the learning rate is half of what it was.
        version: of the model.
    """
    return schedule * 0.5 ** sum(start <= version for start in halvings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRules:
    """Rules of `[aggregation]` where devices add up their updates themselves.

    Attributes:
        collective: `ring`, `butterfly`, `binary-blocks` or `auto`.
        reductions: all-reduces in a round.
        hosts: listening addresses by a file, of devices that do not report theirs.
    """

    collective: str
    reductions: int = 1
    hosts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """Round rules of a run file.

    Attributes:
        min_devices: idle devices needed to open the first round; later ones continue with those that are left. Of a
            private run, the idle and busy ones that every round needs.
        max_devices: maximum of asked devices, None for all; drawn anew each round.
        fraction: likewise, as a fraction of the idle ones, rounded up.
        min_updates: k of n: the round closes when k updates are in, or with fewer when no device is left to ask; None
            waits for all live devices.
        deadline_s: an assignment that takes longer is given up; None for never.
        round_timeout_s: time that a round waits for the asked devices; then `on_timeout` applies once, and after the
            same time again the run ends and names the missing ones. None waits without end.
        on_timeout: aggregate the received updates (k of n), reassign the work of the missing devices, or do nothing.
        codec: spec of the codec for updates.
        task: the task's name, under which devices list the blocks of their shards.
        test_fraction: of its examples that a device does not train on.
        updates_per_round: updates per round of an asynchronous run, by which learning rates change; None for the
            number of devices in the first dispatch.
        rounds: number of rounds of the run; None where another criterion ends it.
        collective: how devices add up their updates; None where the coordinator does.
        server: optimiser from the mean displacement to the model's step.
        privacy: how the mean is made differentially private; None for the mean as it is.
        example_privacy: how devices make the gradients of their examples private, but for the optimiser; None for
            the gradients as they are.
        selection: how devices are selected by utility; None for all alike.
        seed: of the selection of devices.
    """

    min_devices: int = 1
    max_devices: int | None = None
    fraction: float | None = None
    min_updates: int | None = None
    deadline_s: float | None = None
    round_timeout_s: float | None = None
    on_timeout: TimeoutPolicy = "aggregate"
    codec: str | None = None
    task: str = ""
    test_fraction: float = 0.0
    updates_per_round: int | None = None
    rounds: int | None = None
    collective: CollectiveRules | None = None
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    privacy: PrivateMean | None = None
    example_privacy: ExamplePrivacy | None = None
    selection: SelectionSection | None = None
    seed: int = 0
