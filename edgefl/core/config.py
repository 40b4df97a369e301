"""Every setting and its default, once: TOML in, frozen dataclasses out; see `core.settings` for the bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from edgefl.core.analyses import get_num_rounds
from edgefl.core.conditions import RunConditions
from edgefl.core.errors import ConfigError
from edgefl.core.presets import PresetName, expand_preset
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.safe_text import is_safe_text
from edgefl.core.settings import (
    REST,
    SECRET,
    BrokerSection,
    Faults,
    find_similar,
    from_mapping,
    list_options,
    suggest_name,
)
from edgefl.core.types import ACCELERATOR_PATTERN, APP_JOB_PREFIX, BASE_SUFFIX, Json, Scalar

EvaluateOn = Literal["auto", "coordinator", "devices", "evaluator", "none"]
Backend = Literal["auto", "onnx", "torch", "numpy"]
JoinPolicy = Literal["anytime", "start"]
RequirePolicy = Literal["any", "all"]
TimeoutPolicy = Literal["aggregate", "reassign", "none"]
ResidualPolicy = Literal["periodic", "durable"]
UnhealthyPolicy = Literal["smaller", "rest", "ignore"]
DivergenceAction = Literal["warn", "halve", "stop"]
SelectionRule = Literal["uniform", "utility"]
CollectiveName = Literal["coordinator", "ring", "butterfly", "binary-blocks", "auto"]
LabelsOn = Literal["coordinator", "device"]
PrivacyUnit = Literal["device", "example"]
SecureGraph = Literal["complete", "sparse"]
MIN_SPARSE_THRESHOLD = 0.525
"""Below, no more corrupted boards are borne than the share that boards insist on."""
PrivacyMechanism = Literal["gaussian", "dp-ftrl"]
AdaptMethod = Literal["none", "head", "bitfit", "lora"]
ServerOptimizerName = Literal["none", "momentum", "adagrad", "adam", "yogi"]
Quantity = Literal["time", "bytes", "energy"]

DEFAULT_ROUNDS = 10
DEFAULT_RANK = 8
DEFAULT_STATE_BYTES = 8 * 1024**3
MAX_NAME_CHARS = 120
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):[0-9]{1,5}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}", re.ASCII)
_RUN_NAME = re.compile(r"[^\W_][\w .,:+#=@()~-]*")
MAX_SEED = 2**63 - 1
AUTO_STRATEGY = "auto"
"""Name in `[strategy]` in whose place an advice puts another before the run is submitted."""
JOB_STRATEGY = "job"
"""What a run of a job has in place of a strategy's name."""
JOB_RUN_SETTINGS = frozenset({"name", "seconds", "bytes", "max_state_bytes"})
"""Settings of `[run]` that count in a job."""
APP_RUN_SETTINGS = JOB_RUN_SETTINGS | {"seed"}
"""Those that count in a Flower app, whose ServerApp is seeded."""
_TRAINING_DEVICE_SETTINGS = frozenset({"count", "fraction"})
_HEADER = re.compile(r"\s*\[\s*([\w.-]+)\s*\]")
_KEY = re.compile(r"""\s*([\w.-]+|"[^"\n]*"|'[^'\n]*')\s*=""")
_SETTING = re.compile(r"(?<![\w.'\"/-])[A-Za-z_][\w-]*(?:\.[\w-]+)*(?=:| must| is missing| cannot)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """`[run]`: what is trained, and when it ends: whichever of the seven stop rules is reached first.

    A run without a stop rule (`rounds`, `epochs`, `updates`, `seconds`, `bytes`, `accuracy`, `until`) ends after 10
    rounds.

    Attributes:
        task: a built-in task such as `digits`, one of an installed package, or `module:Class` of an allowed module.
        name: shown in lists and on the page; None takes task and strategy.
        rounds: stop rule: closed rounds.
        epochs: stop rule: passes over the data of all devices, each device's weighted by its examples.
        updates: stop rule: updates that went into a model.
        seconds: stop rule: seconds since the first assignment.
        bytes: stop rule: bytes that crossed the network in both directions.
        accuracy: stop rule: the mean accuracy of the last `accuracy_window` evaluated versions, a fraction.
        until: stop rule: a metric that the task declares and what it must reach, such as `rmse <= 14.5`; likewise a
            mean.
        accuracy_window: how many evaluations that mean is over.
        trust_single_evaluation: whether one or two devices that evaluate may stop the run, say which model is best
            and pass a deployment; else that takes the coordinator's own test data, or the median of three devices.
        seed: of weights, selection and the order of examples; the same seed gives the same simulated run.
        evaluate_every: rounds from one evaluation to the next.
        evaluate_on: where models are evaluated; auto takes the coordinator, else evaluators, else the devices.
        init: a safetensors file to start from.
        replaces: id of the run that this one is made from without some devices, as `edgefl run forget` writes it.
        backend: what boards train a model of torch with: `torch`, `onnx` (all by the compiled task), or `numpy`,
            which refuses a model that needs torch; `auto` takes torch where a board has it, and elsewhere the
            compiled task, which the coordinator makes when the run starts.
        compiled: a compiled task that the coordinator has, by name or SHA-256 (`edgefl base add FILE`); None for one
            that it makes itself where `backend` asks for it.
        deadline_s: an assignment that takes longer is given up.
        min_updates: closes a synchronous round with so many; None waits for all that were asked and are still there.
        round_timeout_s: bounds that wait; then `on_timeout` applies once, and after the same time again the run ends.
        on_timeout: aggregates the updates that are in, reassigns the work to other devices, or does nothing.
        updates_per_round: updates that make a round of an asynchronous run's history; None: devices asked first.
        max_state_bytes: most memory that a strategy may keep for all devices, or the run is refused.
        local_test_fraction: of each device's shard that is kept for testing.
        on_divergence: what follows when the loss diverges, oscillates or stands still: `warn` says so and what would
            help, `halve` also halves the learning rate from then on, `stop` also ends the run.
    """

    task: str
    name: str | None = None
    rounds: int | None = field(default=None, metadata={"at_least": 1})
    epochs: float | None = field(default=None, metadata={"above": 0})
    updates: int | None = field(default=None, metadata={"at_least": 1})
    seconds: float | None = field(default=None, metadata={"above": 0})
    bytes: int | None = field(default=None, metadata={"at_least": 1})
    accuracy: float | None = field(default=None, metadata={"above": 0, "at_most": 1})
    until: str | None = None
    accuracy_window: int = field(default=1, metadata={"at_least": 1, "at_most": 100})
    trust_single_evaluation: bool = False
    seed: int = field(default=7, metadata={"at_least": 0, "at_most": MAX_SEED})
    evaluate_every: int = field(default=1, metadata={"at_least": 1})
    evaluate_on: EvaluateOn = "auto"
    init: str | None = None
    replaces: str | None = None
    backend: Backend = "auto"
    compiled: str | None = None
    deadline_s: float | None = field(default=None, metadata={"above": 0})
    min_updates: int | None = field(default=None, metadata={"at_least": 1})
    round_timeout_s: float | None = field(default=None, metadata={"above": 0})
    on_timeout: TimeoutPolicy = "aggregate"
    updates_per_round: int | None = field(default=None, metadata={"at_least": 1})
    max_state_bytes: int = field(default=DEFAULT_STATE_BYTES, metadata={"at_least": 0})
    local_test_fraction: float = field(default=0.1, metadata={"at_least": 0, "below": 1})
    on_divergence: DivergenceAction = "warn"

    def __post_init__(self) -> None:
        rules = (self.rounds, self.epochs, self.updates, self.seconds, self.bytes, self.accuracy, self.until)
        if all(rule is None for rule in rules):
            object.__setattr__(self, "rounds", DEFAULT_ROUNDS)
        if self.replaces is not None and not _RUN_ID.fullmatch(self.replaces):
            raise ConfigError(f"run.replaces must be the id of a run, got {self.replaces[:40]!a}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySection:
    """`[strategy]`: its name, and options that the strategy checks itself.

    Attributes:
        name: of the strategy; with `auto` an advice chooses strategy, codec and local work before the run is
            submitted, and the option `minimise` says whether for time, bytes or energy.
        preset: `paper` stands for the settings of the strategy's paper, also of the other tables; `atomo` and
            `parallel-sgd` for those of these systems. The run file's own take precedence.
        options: all other keys.
    """

    name: str = "fedavg"
    preset: PresetName | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict, metadata={REST: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSection:
    """`[compression]`: the codecs of updates and of the model.

    `[compression.layers]` gives tensors of updates whose names match a pattern a codec of their own, such as
    `"*.bias" = "dense"`; the first pattern that matches counts, and `up` is for tensors that match none.

    Attributes:
        up: codec of updates; `auto` or `auto:SPEC,SPEC,...` lets the coordinator pick one for each device.
        down: codec of the model.
        metered: codec of updates of devices whose connection is metered; without one `up`, and with `auto` the
            smallest of its codecs that is worth it.
        layers: patterns of tensor names, each with its codec.
        residuals: when what a codec left out, and kept moments of an optimiser, go to the board's card: every five
            minutes and at stop, or with `durable` after every assignment, which wears the card.
    """

    up: str = "dense"
    down: str = "dense"
    metered: str | None = None
    layers: Mapping[str, Scalar] = field(default_factory=dict)
    residuals: ResidualPolicy = "periodic"

    def __post_init__(self) -> None:
        for pattern, spec in self.layers.items():
            if not isinstance(spec, str):
                raise ConfigError(f"compression.layers.{pattern} must be a codec such as 'dense', got {spec!r}")
            if not pattern.strip() or any(mark in pattern for mark in ";=") or ";" in spec:
                raise ConfigError(
                    f"compression.layers: {pattern!r} = {spec!r} must be a pattern of tensor names and one codec,"
                    " without = or ; in them: ? matches any character"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSection:
    """`[devices]`: which devices take part.

    A board that is throttled, hotter than `max_temperature_c` or on less battery than `min_battery` is unhealthy.

    Attributes:
        groups: devices of these groups; none means all that have a shard of the task.
        names: these devices; none likewise.
        exclude: not these devices, whatever names and groups say; no evaluator of the name either.
        min: the first round waits for so many idle devices; later the run goes on with those that are left. With
            `privacy.mechanism = "dp-ftrl"` each round waits for so many that may take part, 1 meaning `count`.
        count: devices asked in a round; None asks all.
        fraction: of the idle devices that are asked in a round, in place of `count`.
        min_memory_bytes: boards with less memory are left out.
        accelerator: leave out boards without an accelerator.
        max_temperature_c: a hotter board is unhealthy.
        min_battery: a board with less charge is unhealthy, a fraction.
        unhealthy_policy: such a board gets half of its budget, no work, or is treated like any other.
        join: whether devices that become ready after the start are admitted.
        require: devices that must be ready before the first round, a number or all that are eligible, or the run
            fails; any begins with those that are ready.
        ready_s: how long a device may take to get ready.
        wait_s: how long the run waits for devices while none has work; then it fails, or is interrupted if it has
            begun. None waits for ever.
    """

    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min: int = field(default=1, metadata={"at_least": 1})
    count: int | None = field(default=None, metadata={"at_least": 1})
    fraction: float | None = field(default=None, metadata={"above": 0, "at_most": 1})
    min_memory_bytes: int | None = field(default=None, metadata={"at_least": 0})
    accelerator: bool = False
    max_temperature_c: float = field(default=80.0, metadata={"above": 0})
    min_battery: float = field(default=0.2, metadata={"at_least": 0, "at_most": 1})
    unhealthy_policy: UnhealthyPolicy = "smaller"
    join: JoinPolicy = "anytime"
    require: int | RequirePolicy = field(default="any", metadata={"at_least": 1})
    ready_s: float = field(default=30.0, metadata={"above": 0, "at_most": 3600})
    wait_s: float | None = field(default=None, metadata={"above": 0})

    def __post_init__(self) -> None:
        if self.count is not None and self.fraction is not None:
            raise ConfigError("devices.count and devices.fraction both say how many are asked; give one of them")
        if both := sorted({*self.names} & {*self.exclude}):
            raise ConfigError(f"devices.names and devices.exclude both have {both[0]!r:.80}; leave it out of one")
        if self.count is not None and self.count < self.min:
            raise ConfigError(f"devices.count must be at least devices.min = {self.min}, got {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    """`[server]`: the coordinator's own optimiser, which takes the mean displacement for a gradient.

    Attributes:
        optimizer: its name; none adds the displacement as it is.
        learning_rate: what the displacement is multiplied with.
        beta1: decay of the momentum.
        beta2: decay of the second moments (adam, yogi).
        epsilon: added to their root, so that nothing is divided by zero.
    """

    optimizer: ServerOptimizerName = "none"
    learning_rate: float = field(default=1.0, metadata={"above": 0})
    beta1: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    beta2: float = field(default=0.99, metadata={"at_least": 0, "below": 1})
    epsilon: float = field(default=1e-3, metadata={"above": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationSection:
    """`[aggregation]`: who adds up the updates of a round: the coordinator, or the devices among themselves.

    Attributes:
        collective: `coordinator`, or the all-reduce by which the devices of a round add up their updates over direct
            connections; auto takes the one that is soonest for their number and the model's size.
        reductions: trainings of each device in a round, with an all-reduce after each; the coordinator gets the model
            after the last one.
        hosts: path of a `hosts.json` with the devices' listening addresses; without it they report them.
    """

    collective: CollectiveName = "coordinator"
    reductions: int = field(default=1, metadata={"at_least": 1, "at_most": 10_000})
    hosts: str | None = None

    @property
    def is_collective(self) -> bool:
        """Whether the devices add up the updates among themselves."""
        return self.collective != "coordinator"

    def __post_init__(self) -> None:
        if not self.is_collective and self.reductions != 1:
            raise ConfigError(
                f"aggregation.reductions must be 1 where the coordinator adds up updates, got {self.reductions}; "
                "set aggregation.collective, or more run.rounds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSection:
    """`[guard]`: which updates are refused or clipped. A NaN, an infinity or a wrong shape is always refused.

    Attributes:
        enabled: whether updates are compared with those of other devices, by the next two settings.
        norm_ratio: most ratio of an update's norm to the median of the other devices'; a longer one is clipped.
        min_cosine: least cosine of what a device's newest updates add up to with that of the others; below it a
            device is clipped to their median, and refused where they agree.
        max_norm: most Euclidean norm of an update, which is refused above it; None for no bound.
        refusals_before_quarantine: a device that is refused so many times in a row is not asked again in this run.
        max_weight_ratio: most examples that a device weighs as, as a multiple of the median of the run's devices; 0
            for no bound.
    """

    enabled: bool = True
    norm_ratio: float = field(default=4.0, metadata={"above": 1})
    min_cosine: float = field(default=-0.3, metadata={"at_least": -1, "below": 1})
    max_norm: float | None = field(default=None, metadata={"above": 0})
    refusals_before_quarantine: int = field(default=3, metadata={"at_least": 1})
    max_weight_ratio: float = field(default=2.0, metadata={"at_least": 0})


_OF_DEVICES = {"first_clip", "quantile", "sampling", "boards", "mechanism", "separation", "participations"}
"""Settings of `[privacy]` that mean nothing where examples are private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySection:
    """`[privacy]`: differential privacy of each device, or of each example, in the models; without `unit`, none.

    Attributes:
        unit: whose data is protected: all that one device holds, or an example, against the coordinator as well.
        epsilon: the budget ε of the run, which ends before it would be passed; of examples the budget of each board,
            which takes no further part.
        delta: δ, well below one over the number of devices, or of a board's examples.
        clip: most Euclidean norm of an update, to which a longer one is shortened; `adaptive` follows a quantile of
            the updates' norms. Of examples the most norm of the gradient of one.
        first_clip: with `adaptive`, the norm in the first round.
        quantile: with `adaptive`, the share of updates that are shorter than the norm.
        noise: the noise multiplier, standard deviation over norm; None for the least with which `run.rounds` rounds
            fit into the budget, which of examples each board finds for itself.
        sampling: each idle device takes part in a round with this probability, by itself and in secret; None asks as
            `[devices]` says, and counts as if every device was in every round.
        boards: how many devices are expected; the sum of a round is divided by this (times `sampling`), whoever
            answers. None for `devices.count`.
        mechanism: of devices, how the noise of rounds goes together: `gaussian` draws it anew in each, `dp-ftrl`
            correlates it, so that sums over rounds have little, and bounds how often a device takes part.
        separation: with `dp-ftrl`, least rounds from one participation of a device to its next.
        participations: with `dp-ftrl`, most of a device in the run; None for as many as separation and `run.rounds`
            allow, and two more.
    """

    unit: PrivacyUnit | None = None
    epsilon: float | None = field(default=None, metadata={"above": 0, "at_most": 1000})
    delta: float | None = field(default=None, metadata={"above": 0, "below": 1})
    clip: float | Literal["adaptive"] = field(default="adaptive", metadata={"above": 0, "at_most": 1e9})
    first_clip: float = field(default=0.1, metadata={"above": 0, "at_most": 1e9})
    quantile: float = field(default=0.5, metadata={"above": 0, "below": 1})
    noise: float | None = field(default=None, metadata={"above": 0, "at_most": 1e6})
    sampling: float | None = field(default=None, metadata={"above": 0, "at_most": 1})
    boards: int | None = field(default=None, metadata={"at_least": 1, "at_most": 10_000_000})
    mechanism: PrivacyMechanism = "gaussian"
    separation: int | None = field(default=None, metadata={"at_least": 1, "at_most": 1_000_000})
    participations: int | None = field(default=None, metadata={"at_least": 1, "at_most": 1_000_000})

    def __post_init__(self) -> None:
        if self.unit is None:
            if any(getattr(self, item.name) != item.default for item in fields(self)):
                raise ConfigError('privacy.unit is missing: set unit = "device" or "example", or leave the table out')
            return
        for name in ("epsilon", "delta"):
            if getattr(self, name) is None:
                raise ConfigError(f'privacy.{name} is missing: it is needed with unit = "{self.unit}"')
        if self.unit == "example":
            self._check_example()
        elif self.mechanism == "dp-ftrl":
            self._check_correlated()
        elif found := [name for name in ("separation", "participations") if getattr(self, name) is not None]:
            raise ConfigError(
                f'privacy.{found[0]} must be left out with mechanism = "gaussian", got {getattr(self, found[0])}: it '
                'counts each board in every round; take mechanism = "dp-ftrl"'
            )

    def _check_correlated(self) -> None:
        faults = Faults()
        if self.sampling is not None:
            faults.messages.append(
                f'privacy.sampling must be left out with mechanism = "dp-ftrl", got {self.sampling:g}: limits of '
                "participation take its place"
            )
        if self.clip == "adaptive":
            faults.messages.append(
                'privacy.clip must be a number with mechanism = "dp-ftrl": noise of several rounds has one scale'
            )
        if self.separation is None:
            faults.messages.append(
                'privacy.separation is missing: with mechanism = "dp-ftrl" it is the least rounds from one '
                "participation of a board to its next"
            )
        faults.check()

    def _check_example(self) -> None:
        if self.clip == "adaptive":
            raise ConfigError(
                'privacy.clip must be a number with unit = "example": most norm of an example\'s gradient'
            )
        for item in fields(self):
            if item.name in _OF_DEVICES and ((found := getattr(self, item.name)) != item.default):
                raise ConfigError(
                    f'privacy.{item.name} must be left out with unit = "example", got {found}: it is of devices'
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregationSection:
    """`[secure_aggregation]`: the coordinator learns the sum of a round's updates, and no single one.

    Attributes:
        enabled: whether boards mask their updates.
        threshold: share of a round's boards that must be left at every step; with fewer nothing is opened.
        clip: largest magnitude of an entry of an update, to which boards clip it.
        max_examples: most examples that a board weighs as in the mean.
        graph: `complete` shares secrets and masks with all boards of a round, `sparse` with as few as protect.
        corrupted: with `sparse`, share of a round's boards that may work with the coordinator.
        dropped: with `sparse`, share of a round's boards that may drop out at random so that the sum is still opened.
    """

    enabled: bool = False
    threshold: float = field(default=0.67, metadata={"at_least": 0.5, "at_most": 1})
    clip: float = field(default=1.0, metadata={"above": 0, "at_most": 1e6})
    max_examples: int = field(default=1000, metadata={"at_least": 1, "at_most": 1_000_000})
    graph: SecureGraph = "complete"
    corrupted: float = field(default=0.1, metadata={"at_least": 0.05, "below": 1})
    dropped: float = field(default=0.1, metadata={"at_least": 0, "at_most": 0.5})

    def __post_init__(self) -> None:
        if not self.enabled and any(getattr(self, item.name) != item.default for item in fields(self)):
            raise ConfigError("secure_aggregation.enabled must be true, or the table left out")
        if self.graph == "sparse":
            self._check_sparse()
            return
        for item in fields(self):
            if item.name in {"corrupted", "dropped"} and (found := getattr(self, item.name)) != item.default:
                raise ConfigError(f'secure_aggregation.{item.name} is of graph = "sparse": leave it out, got {found}')

    def _check_sparse(self) -> None:
        if self.threshold < MIN_SPARSE_THRESHOLD:
            raise ConfigError(
                f'secure_aggregation.graph = "sparse" needs a threshold of at least {MIN_SPARSE_THRESHOLD}, got '
                f"{self.threshold}"
            )
        # With as many corrupted boards two sums of a round could each have enough.
        if self.corrupted > (most := 2 * self.threshold - 1) + 1e-9:
            raise ConfigError(
                f"secure_aggregation.corrupted must be at most {most:.2g} with threshold = {self.threshold}, got "
                f"{self.corrupted}"
            )
        if self.dropped >= 1 - self.threshold:  # more than the threshold's share must be left
            raise ConfigError(
                f"secure_aggregation.dropped must be less than {1 - self.threshold:.2g} with threshold = "
                f"{self.threshold}, got {self.dropped}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """`[models]`: which models of a live run stay, and what becomes of the last one, which always stays.

    Attributes:
        keep_last: of the evaluated ones, so many of the newest.
        keep_best: and the best by accuracy, or by the first metric that the task declares.
        keep_every: and one of every so many rounds; 0 for none.
        auto_deploy: whether the last one goes to the devices when the run has finished.
        canary: how many devices get it first.
    """

    keep_last: int = field(default=3, metadata={"at_least": 1})
    keep_best: bool = True
    keep_every: int = field(default=0, metadata={"at_least": 0})
    auto_deploy: bool = False
    canary: int = field(default=0, metadata={"at_least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSection:
    """`[split]`: where the network is cut, if it is. The boards train the layers before, the coordinator those after.

    Attributes:
        after: name of the module of the task's torch network after which it is cut; None trains all of it on boards.
        labels: who has the labels: the coordinator, to which they travel with the activations, or the device, which
            gets the network's outputs and computes the loss.
        up: codec of the activations.
        down: codec of their gradients.
    """

    after: str | None = None
    labels: LabelsOn = "coordinator"
    up: str = "dense"
    down: str = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptSection:
    """`[adapt]`: which tensors of the model are trained, and which of those travel; without it, all.

    Patterns are of tensor names, such as `backbone.*`. What is frozen is not trained, and is sent to a device once.

    Attributes:
        method: freezes all but the last layer (`head`), the biases (`bitfit`) or adapters of low rank (`lora`); none
            freezes what `frozen` names.
        frozen: patterns of tensors that stay as they are at first.
        local: patterns of tensors that each device trains and keeps; they are never sent.
        shared: patterns of tensors that are trained and sent even where `method` or `frozen` freezes them.
        base: a pretrained base: its name or SHA-256, as `edgefl base add` printed it, or the path of a safetensors
            file. It has all frozen tensors; trained ones start as there where they fit. None takes the first model.
        rank: of an adapter (lora).
        alpha: what an adapter's product is multiplied with is alpha/rank (lora); None for rank.
        targets: patterns of the matrices and convolutions that get an adapter (lora); none for all.
    """

    method: AdaptMethod = "none"
    frozen: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    base: str | None = None
    rank: int = field(default=DEFAULT_RANK, metadata={"at_least": 1, "at_most": 1024})
    alpha: float | None = field(default=None, metadata={"above": 0, "at_most": 1e6})
    targets: tuple[str, ...] = ()

    @property
    def is_used(self) -> bool:
        """Whether anything is frozen or stays on the devices."""
        return self.method != "none" or bool(self.frozen or self.local)

    def __post_init__(self) -> None:
        if self.method != "none" and self.frozen:
            raise ConfigError(
                f"adapt.frozen means nothing with adapt.method = {self.method!r}, which freezes all that it does not "
                "train; leave it out, or name in adapt.shared what is to be trained"
            )
        if self.method != "lora" and (self.targets or self.alpha is not None or self.rank != DEFAULT_RANK):
            raise ConfigError("adapt.rank, alpha and targets are of adapt.method = 'lora'; leave them out")
        if self.base is not None and not self.is_used:
            raise ConfigError("adapt.base means nothing where nothing is frozen; to start from a model, set run.init")
        if self.method == "none" and self.shared and not self.frozen:
            raise ConfigError("adapt.shared means nothing where nothing is frozen; set adapt.method or adapt.frozen")


INDIFFERENT_SETTINGS = ("workers", "engine", "address", "worker_gpus")
"""Settings of `[simulation]` that change no result: where it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSection:
    """`[simulation]`: the virtual fleet of `edgefl simulate`; a live run does not look at it.

    Attributes:
        devices: how many.
        profiles: who they are: `NAME` or `NAME:COUNT`, built in or read from `profile_file`; given round and round
            until there are enough.
        profile_file: more profiles, as `edgefl device probe --profile` writes them.
        scheme: how the data is cut; None for the task's own way.
        data: folder of the data set.
        test: path of test data that a task of one's own, or a configured one, reads, in place of a part of `data`.
        iteration_s: seconds of an iteration of this task on the reference machine, where no profile says it.
        jitter: standard deviation of the logarithm of a device's speed from one iteration to the next.
        server_up_bytes_per_s, server_down_bytes_per_s: what the coordinator's own link carries, shared by all; None
            for no limit.
        detect_s: how long it takes to notice that a device is gone.
        evaluation_s: how long an evaluation takes; it keeps no device from work.
        faults: file of a fault script.
        examples: of each device where nothing is trained and so no data is cut.
        workers: processes that train; 0 trains in this one, None measures what is faster.
        accelerator: what they train on: cpu, cuda, or cuda:N. On a GPU the same run may differ in the last bits.
        engine: where they are: processes of this machine, or actors of a Ray cluster.
        address: HOST:PORT of the Ray cluster; None starts one on this machine for the run alone.
        worker_gpus: GPUs of one worker on Ray, such as 0.25 where four share one.
        starts_at: when the run begins, such as 2026-01-05T18:00+01:00; without an offset in UTC. Only `[conditions]`
            look at it; their hours are in their own `zone`, without one in UTC, whatever the offset here.
    """

    devices: int = field(default=10, metadata={"at_least": 1})
    profiles: tuple[str, ...] = ("pi-4",)
    profile_file: str | None = None
    scheme: str | None = None
    data: str | None = None
    test: str | None = None
    iteration_s: float | None = field(default=None, metadata={"above": 0, "at_most": 1e6})
    jitter: float = field(default=0.05, metadata={"at_least": 0, "at_most": 2})
    server_up_bytes_per_s: float | None = field(default=None, metadata={"at_least": 1})
    server_down_bytes_per_s: float | None = field(default=None, metadata={"at_least": 1})
    detect_s: float = field(default=15.0, metadata={"at_least": 0})
    evaluation_s: float = field(default=0.0, metadata={"at_least": 0})
    faults: str | None = None
    examples: int = field(default=500, metadata={"at_least": 1})
    workers: int | None = field(default=None, metadata={"at_least": 0, "at_most": 256})
    accelerator: str = "cpu"
    engine: Literal["process", "ray"] = "process"
    address: str | None = None
    worker_gpus: float = field(default=0.0, metadata={"at_least": 0, "at_most": 64})
    starts_at: str = "2026-01-05T00:00"

    def __post_init__(self) -> None:
        if not ACCELERATOR_PATTERN.fullmatch(self.accelerator):
            raise ConfigError(f"simulation.accelerator must be cpu, cuda or cuda:N, got {self.accelerator!r}")
        self._check_engine()
        try:
            is_valid = 1970 < self.start.year < 9000
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError(
                "simulation.starts_at must be a time such as 2026-01-05T18:00 or 2026-01-05T18:00+01:00, "
                f"got {self.starts_at!r:.60}"
            )

    def _check_engine(self) -> None:
        if self.engine == "process":
            for name in ("address", "worker_gpus"):
                if getattr(self, name):
                    raise ConfigError(f'simulation.{name} is for engine = "ray", got {getattr(self, name)!r:.60}')
            return
        if self.workers == 0:
            raise ConfigError('simulation.workers must be at least 1 with engine = "ray", got 0')
        if self.address is not None and not _HOST_AND_PORT.fullmatch(self.address):
            raise ConfigError(
                f"simulation.address must be HOST:PORT of a Ray cluster of which this machine is a node, "
                f"such as 127.0.0.1:6379, got {self.address!r:.60}"
            )
        if ":" in self.accelerator:
            raise ConfigError(
                f"simulation.accelerator must be cpu or cuda on Ray, which says which GPU, got {self.accelerator!r}"
            )
        if (self.accelerator == "cuda") != (self.worker_gpus > 0):
            raise ConfigError(
                f"simulation.worker_gpus must be above 0 on Ray with accelerator cuda, such as 0.25 where four "
                f"workers share a GPU, and 0 without; got {self.worker_gpus:g} with {self.accelerator}"
            )

    @property
    def start(self) -> datetime:
        """Returns `starts_at` as a time with its zone."""
        moment = datetime.fromisoformat(self.starts_at)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    """`[job]`: a computation in parts on boards, in place of a training; see `edgefl.Job`.

    Such a run file has `[run]` without a task, of which `name`, `seconds`, `bytes` and `max_state_bytes` count,
    for a Flower app also `seed`, and `[devices]` without `count` and `fraction`.

    Attributes:
        name: a job of an installed package, or `module:Class` of an allowed module; empty for a training.
        parts: how many parts it has, which any board may do; `boards` for one on each board, about its own files.
        deadline_s: a part that takes longer is ended, and tried again.
        max_tries: the run fails when a part was tried so often, whatever the reasons.
        max_failures: a board whose parts failed so many times in a row gets no more of them.
        skip_missing_s: how long the run waits for a board that is away and has not done its own part (`boards`), or
            gets no more of them, before it ends without that part; None waits for ever, and fails in the second case.
        max_part_bytes: most bytes of the input of a part, and of its result.
        max_result_bytes: most bytes of the combined result.
        options: all other keys, of the job itself.
    """

    name: str = ""
    parts: int | Literal["boards"] = field(default="boards", metadata={"at_least": 1, "at_most": 100_000})
    deadline_s: float = field(default=600.0, metadata={"above": 0, "at_most": 604_800})
    max_tries: int = field(default=10, metadata={"at_least": 1, "at_most": 1000})
    max_failures: int = field(default=3, metadata={"at_least": 1, "at_most": 1000})
    skip_missing_s: float | None = field(default=None, metadata={"at_least": 0})
    max_part_bytes: int = field(default=16 * 1024**2, metadata={"at_least": 1, "at_most": 256 * 1024**2})
    max_result_bytes: int = field(default=256 * 1024**2, metadata={"at_least": 1, "at_most": 4 * 1024**3})
    options: Mapping[str, Scalar] = field(default_factory=dict, metadata={REST: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSection:
    """`[selection]`: which devices a round asks, or without rounds which one gets work when another is done.

    It is for runs in which some are at work at a time (`count` or `fraction` of `[devices]`).

    Attributes:
        rule: uniform, all alike; or utility: those with a high loss that answer in time, and some new ones.
        round_s: preferred duration of a device's work; slower devices have less utility. None is the median device's.
        penalty: exponent by which a device that is slower than that has less; 0 does not look at it.
        exploration: share of devices never asked before, or never heard of since, in the first round.
        exploration_decay: factor of that share with each round.
        min_exploration: least share of them, as long as there are any.
        clip: quantile of the devices' utilities above which one counts as that, lower where a round asks many; 1
            clips none.
        fairness: how much of a device's utility is how seldom it was asked, in place of loss and time.
    """

    rule: SelectionRule = "uniform"
    round_s: float | None = field(default=None, metadata={"above": 0, "at_most": 1e9})
    penalty: float = field(default=2.0, metadata={"at_least": 0, "at_most": 10})
    exploration: float = field(default=0.9, metadata={"at_least": 0, "at_most": 1})
    exploration_decay: float = field(default=0.98, metadata={"above": 0, "at_most": 1})
    min_exploration: float = field(default=0.2, metadata={"at_least": 0, "at_most": 1})
    clip: float = field(default=0.95, metadata={"at_least": 0, "at_most": 1})
    fairness: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})

    def __post_init__(self) -> None:
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if changed and self.rule == "uniform":
            raise ConfigError(f'selection.{changed[0]} means nothing without selection.rule = "utility"')


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceSection:
    """What `edgefl advise run` predicted of the run whose file it wrote; it changes nothing.

    `edgefl history advice` compares it with what became of the run.

    Attributes:
        seconds: from the first instruction to the last closed round.
        rounds: that are closed.
        bytes_up, bytes_down: of updates and models.
        joules: of all devices while they compute; not given where the power of one is unknown.
        seconds_factor, bytes_factor, joules_factor: by which errors of earlier advice corrected these figures; not
            given where none did.
    """

    seconds: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1e12})
    rounds: int | None = field(default=None, metadata={"at_least": 0})
    bytes_up: int | None = field(default=None, metadata={"at_least": 0})
    bytes_down: int | None = field(default=None, metadata={"at_least": 0})
    joules: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1e15})
    seconds_factor: float | None = field(default=None, metadata={"above": 0, "at_most": 1e3})
    bytes_factor: float | None = field(default=None, metadata={"above": 0, "at_most": 1e3})
    joules_factor: float | None = field(default=None, metadata={"above": 0, "at_most": 1e3})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run file. `task` holds the options of the task that `run.task` names, which is the job's name in a job.

    A list of texts or numbers there is the same as one text with commas.
    """

    run: RunSection
    task: Mapping[str, Scalar] = field(default_factory=dict)
    strategy: StrategySection = field(default_factory=StrategySection)
    compression: CompressionSection = field(default_factory=CompressionSection)
    devices: DevicesSection = field(default_factory=DevicesSection)
    server: ServerSection = field(default_factory=ServerSection)
    aggregation: AggregationSection = field(default_factory=AggregationSection)
    guard: GuardSection = field(default_factory=GuardSection)
    privacy: PrivacySection = field(default_factory=PrivacySection)
    secure_aggregation: SecureAggregationSection = field(default_factory=SecureAggregationSection)
    models: ModelsSection = field(default_factory=ModelsSection)
    job: JobSection = field(default_factory=JobSection)
    split: SplitSection = field(default_factory=SplitSection)
    adapt: AdaptSection = field(default_factory=AdaptSection)
    conditions: RunConditions = field(default_factory=RunConditions)
    selection: SelectionSection = field(default_factory=SelectionSection)
    simulation: SimulationSection = field(default_factory=SimulationSection)
    advice: AdviceSection = field(default_factory=AdviceSection)

    def __post_init__(self) -> None:
        if self.run.min_updates and self.devices.count and self.run.min_updates > self.devices.count:
            raise ConfigError(
                f"run.min_updates must be at most devices.count = {self.devices.count}, got {self.run.min_updates}"
            )
        if self.selection.rule == "utility" and self.devices.count is None and self.devices.fraction is None:
            raise ConfigError('selection.rule = "utility" needs devices.count or devices.fraction: all are asked')
        if (num_rounds := get_num_rounds(self.strategy.name, self.strategy.options)) is not None:
            object.__setattr__(self, "run", replace(self.run, rounds=num_rounds))

    def to_json(self) -> Json:
        """Returns the run file as JSON values, every default written out; settings that are None are left out."""
        sections = {
            "run": asdict(self.run),
            "task": dict(self.task),
            "strategy": {"name": self.strategy.name, **self.strategy.options},
            "compression": asdict(self.compression),
            "devices": _devices_to_json(self.devices),
            "server": asdict(self.server),
            "aggregation": asdict(self.aggregation),
            "guard": asdict(self.guard),
            **({"privacy": asdict(self.privacy)} if self.privacy.unit is not None else {}),
            **({"secure_aggregation": asdict(self.secure_aggregation)} if self.secure_aggregation.enabled else {}),
            "models": asdict(self.models),
            "job": {**asdict(replace(self.job, options={})), **self.job.options},
            "split": asdict(self.split),
            "adapt": adapt_to_json(self.adapt),
            **({"conditions": conditions} if (conditions := self.conditions.to_json()) else {}),
            **({"selection": asdict(self.selection)} if self.selection.rule != "uniform" else {}),
            "simulation": {**asdict(self.simulation), "profiles": [*self.simulation.profiles]},
            **({"advice": asdict(self.advice)} if self.advice != AdviceSection() else {}),
        }
        sections["job"].pop("options")
        if self.job.name:
            counting = _list_job_run_settings(self.job.name)
            run = {key: item for key, item in sections["run"].items() if key in counting}
            devices = {key: item for key, item in sections["devices"].items() if key not in _TRAINING_DEVICE_SETTINGS}
            kept = {name: table for name, table in sections.items() if name in {"job", "conditions"}}
            if self.compression != CompressionSection():
                kept["compression"] = sections["compression"]
            sections = {"run": run, **kept, "devices": devices}
        else:
            del sections["job"]
        return {
            name: {key: item for key, item in table.items() if item is not None} for name, table in sections.items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunConfig:
        """Returns what `to_json` gave, checked again."""
        return parse_run(value)


def _devices_to_json(section: DevicesSection) -> Json:
    value = asdict(section) | {name: [*getattr(section, name)] for name in ("groups", "names", "exclude")}
    if not section.exclude:  # stored runs stay as they are
        del value["exclude"]
    return value


def adapt_to_json(section: AdaptSection) -> Json:
    """Returns the section as JSON values."""
    return {name: [*item] if isinstance(item, tuple) else item for name, item in asdict(section).items()}


class AlertKind(StrEnum):
    """What an alert is about."""

    ACCURACY_FELL = "accuracy-fell"
    BROKER_LOST = "broker-lost"
    CERTIFICATE_ENDS = "certificate-ends"
    DATA_DRIFTED = "data-drifted"
    DEVICE_GONE = "device-gone"
    DISK_LOW = "disk-low"
    GOAL_REACHED = "goal-reached"
    RUN_FAILED = "run-failed"
    RUN_FINISHED = "run-finished"
    RUN_STALLED = "run-stalled"
    SIGNATURES_OLD = "signatures-old"
    TEST = "test"
    THROTTLED = "throttled"
    UPDATES_REJECTED = "updates-rejected"


MAX_TOPIC_CHARS = 200
_TOPIC = re.compile(rf"(?=.{{1,{MAX_TOPIC_CHARS}}}\Z)[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
MAX_NOTIFY = 16
NOTIFY_FORM = "such as ntfys://ntfy.sh/TOPIC, env:NAME for a variable with it, or file:/PATH for a file with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """`[alerts]` in the coordinator's `settings.toml`: whom it tells that something is wrong, and when.

    Attributes:
        webhook: URL that gets a POST when an alert starts and when it ends; None for none.
        secret: key of the HMAC-SHA256 in the header `X-Edgefl-Signature`; None for no such header.
        notify: addresses of services for people as apprise has them; `env:NAME` and `file:/PATH` hold one or more.
        group_s: what follows an alert within so long is in one message with it; for `notify` alone.
        quiet_hours: spans of time such as 22:00-07:00 in which nothing goes to `notify`; one message follows.
        zone: IANA name of the time zone of the quiet hours; the coordinator's own at first.
        muted: kinds of alerts that are never sent.
        device_gone_s: a device that was there and is gone for so long.
        run_stalled_factor, run_stalled_s: a run in which no round closed for so many times its usual, but at least
            so long.
        accuracy_drop: a run's newest accuracy is so far below its best.
        rejected_updates: so many updates in a row of one device were rejected.
        throttled_s: a board is throttled for so long.
        disk_free_bytes: less room than this, on the coordinator's disk or on a board's.
        broker_lost_s: the broker is not reached for so long.
        certificate_days: a certificate ends in fewer days.
        check_s: how often all that is looked at.
    """

    webhook: str | None = field(default=None, repr=False, metadata={SECRET: True})
    secret: str | None = field(default=None, repr=False, metadata={SECRET: True})
    notify: tuple[str, ...] = field(default=(), repr=False, metadata={SECRET: True})
    group_s: float = field(default=10.0, metadata={"at_least": 0, "at_most": 3600})
    quiet_hours: tuple[str, ...] = ()
    zone: str = ""
    muted: tuple[str, ...] = (AlertKind.GOAL_REACHED.value, AlertKind.RUN_FINISHED.value)
    device_gone_s: float = field(default=300.0, metadata={"at_least": 0})
    run_stalled_factor: float = field(default=5.0, metadata={"at_least": 1})
    run_stalled_s: float = field(default=600.0, metadata={"above": 0})
    accuracy_drop: float = field(default=0.1, metadata={"above": 0})
    rejected_updates: int = field(default=3, metadata={"at_least": 1})
    throttled_s: float = field(default=60.0, metadata={"at_least": 0})
    disk_free_bytes: int = field(default=500_000_000, metadata={"at_least": 0})
    broker_lost_s: float = field(default=60.0, metadata={"at_least": 0})
    certificate_days: float = field(default=30.0, metadata={"at_least": 0})
    check_s: float = field(default=5.0, metadata={"above": 0})

    def __post_init__(self) -> None:
        faults = Faults()
        # No address is repeated: with many services it is the secret.
        if self.webhook is not None and not _is_web_url(self.webhook):
            faults.messages.append("alerts.webhook must be a URL such as https://HOST/PATH")
        if len(self.notify) > MAX_NOTIFY:
            faults.messages.append(f"alerts.notify must be at most {MAX_NOTIFY} addresses, got {len(self.notify)}")
        faults.messages += [
            f"alerts.notify: address {number} must be one {NOTIFY_FORM}"
            for number, address in enumerate(self.notify, 1)
            if "://" not in address and not address.startswith(("env:", "file:"))
        ]
        faults.messages += [
            f"alerts.muted: {kind!r:.40} is no alert ({suggest_name(kind, AlertKind)})"
            for kind in self.muted
            if kind not in set(AlertKind)
        ]
        try:
            RunConditions(hours=self.quiet_hours, zone=self.zone)
        except ConfigError as error:
            names = {"conditions.hours": "alerts.quiet_hours", "conditions.zone": "alerts.zone"}
            for fault in error.faults:
                faults.messages.append(re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], fault))
        faults.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSettings:
    """`[certificates]` in the coordinator's `settings.toml`: for how many days what it signs is good.

    Attributes:
        client_days: a device's certificate; the device renews it by itself at two thirds of that.
        server_days: the coordinator's own ones; it renews them likewise.
    """

    client_days: float = field(default=90.0, metadata={"at_least": 1, "at_most": 7300})
    server_days: float = field(default=730.0, metadata={"at_least": 1, "at_most": 7300})


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeAssistantSettings(BrokerSection):
    """`[home_assistant]` in the coordinator's `settings.toml`: the broker on which Home Assistant finds the fleet.

    Attributes:
        host: of the broker, which speaks MQTT 5; empty for none.
        port: 1883 at first, with `tls` 8883.
        login_file: a file whose first line is the user and whose second is the password.
        tls: whether the connection is encrypted.
        ca_file: authority of the broker's certificate; none for those of the system.
        discovery_prefix: as it is set in Home Assistant.
        topic: below which states are published; each fleet on a broker needs one of its own.
        every_s: seconds between two looks at the fleet; what has changed is published.
    """

    host: str = ""
    discovery_prefix: str = "homeassistant"
    topic: str = "edgefl"
    every_s: float = field(default=10.0, metadata={"at_least": 0.1, "at_most": 3600})

    def __post_init__(self) -> None:
        check_topic("home_assistant.discovery_prefix", self.discovery_prefix)
        check_topic("home_assistant.topic", self.topic)


def check_topic(setting: str, topic: str) -> None:
    """Checks a topic, or the beginning of topics, of a broker that is not the fleet's.

    Raises:
        ConfigError: it is none.
    """
    if not _TOPIC.fullmatch(topic):
        raise ConfigError(
            f"{setting} must be a topic of up to {MAX_TOPIC_CHARS} letters, digits and ._-/ that neither begins nor "
            f"ends with a slash, got {topic!r:.80}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIdSettings:
    """`[openid]` in the coordinator's `settings.toml`: where people sign in, and who may come.

    A person gets the highest role whose list has the verified e-mail address, or a value of the claim.

    Attributes:
        issuer: URL of the OpenID provider, as it calls itself; None for no such sign-in.
        name: of the provider, on the page; its host if empty.
        client_id, client_secret: as registered there, with `https://HOST:PORT/edgefl/v1/sign-in/callback` for the way
            back; None for a client without a secret.
        scope: what the provider is asked to tell.
        claim: whose values, a text or a list of texts, have roles.
        viewers, operators, admins: e-mail addresses, and values of the claim.
    """

    issuer: str | None = None
    name: str = ""
    client_id: str = ""
    client_secret: str | None = field(default=None, repr=False)
    scope: str = "openid email"
    claim: str = "groups"
    viewers: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.issuer is None:
            return
        if not is_secure_url(self.issuer):
            raise ConfigError(f"openid.issuer must be a URL with https, got {self.issuer!r}")
        if not self.client_id:
            raise ConfigError("openid.client_id must be what the provider calls this coordinator, got none")
        if not (self.viewers or self.operators or self.admins):
            raise ConfigError("openid names nobody: give at least one of viewers, operators, admins")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """`[connections]` in the coordinator's `settings.toml`: limits of its HTTPS port and of its embedded broker.

    A connection is pending until it has shown a device's key or an access token.

    Attributes:
        max_total: connections in all; 0 for as many as the limit of open files allows, less a reserve.
        max_pending_per_address: pending connections of an address (IPv6: of a /64 network).
        max_per_device: connections of a device, or of an operator's address; further ones stay pending.
        new_per_s: pending connections that an address may open a second; those of ten seconds at once.
        handshake_s: until the TLS hand-shake is done.
        header_s: until a request's header has arrived, or a broker's CONNECT.
        idle_s: between two requests of a pending connection.
        stall_s: how long the body of a request may arrive at less than `min_bytes_per_s`; six times as long with a
            key.
        write_s: how long a reader may take for the next 48 KB of an answer; six times as long with a key.
        min_bytes_per_s: least rate of a body.
    """

    max_total: int = field(default=0, metadata={"at_least": 0, "at_most": 1_000_000})
    max_pending_per_address: int = field(default=128, metadata={"at_least": 1, "at_most": 100_000})
    max_per_device: int = field(default=16, metadata={"at_least": 4, "at_most": 1000})
    new_per_s: float = field(default=50.0, metadata={"at_least": 1, "at_most": 100_000})
    handshake_s: float = field(default=10.0, metadata={"above": 0, "at_most": 600})
    header_s: float = field(default=10.0, metadata={"above": 0, "at_most": 600})
    idle_s: float = field(default=15.0, metadata={"above": 0, "at_most": 3600})
    stall_s: float = field(default=8.0, metadata={"above": 0, "at_most": 600})
    write_s: float = field(default=20.0, metadata={"above": 0, "at_most": 600})
    min_bytes_per_s: int = field(default=500, metadata={"at_least": 1, "at_most": 1_000_000})


def is_secure_url(url: str) -> bool:
    """Returns whether a URL is https, or http on this very machine."""
    if not _is_web_url(url):
        return False
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in {"127.0.0.1", "::1", "localhost"}


def _is_web_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def check_run_name(name: str | None) -> None:
    """Checks a run's name, so that nobody takes it for a path, an option, a formula or more than one line.

    Raises:
        ConfigError: it has other characters than letters, digits, spaces and `.,:+#=@()_~-`, begins with one of
            these marks, or is longer than a line.
    """
    if name is None:
        return
    if not _RUN_NAME.fullmatch(name) or not is_safe_text(name) or len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"run.name must be 1 to {MAX_NAME_CHARS} letters, digits, spaces and .,:+#=@()_~- and begin with a "
            f"letter or digit, got {name[:40]!a}"
        )


def make_run_config(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    """Returns a run's settings: themselves, or those of its tables or its file; raises as `load_run`."""
    if isinstance(config, RunConfig):
        return config
    return parse_run(config) if isinstance(config, Mapping) else load_run(config)


def load_run(path: str | Path, overrides: Mapping[str, Scalar] = MappingProxyType({})) -> RunConfig:
    """Returns the run file at `path`; relative paths in it are meant from its own folder.

    Args:
        path: of the file.
        overrides: values in place of the file's, by setting, such as `strategy.learning_rate`.

    Raises:
        ConfigError: the file is missing, no TOML, or holds a setting that makes no sense, or an override does; its
            `faults` are without the file's name.
    """
    file, text = Path(path), ""
    try:
        text = file.read_text(encoding="utf-8")
        config = parse_run(_apply_overrides(parse_toml(text), overrides))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {add_lines(str(error), text)}", error.faults) from None
    folder, simulation = file.parent.resolve(), config.simulation
    return replace(
        config,
        run=replace(config.run, init=_resolve_path(folder, config.run.init)),
        strategy=replace(config.strategy, options=_resolve_file_options(folder, config.strategy.options)),
        aggregation=replace(config.aggregation, hosts=_resolve_path(folder, config.aggregation.hosts)),
        simulation=replace(
            simulation,
            profile_file=_resolve_path(folder, simulation.profile_file),
            data=_resolve_path(folder, simulation.data),
            faults=_resolve_path(folder, simulation.faults),
        ),
        adapt=replace(config.adapt, base=_resolve_base(folder, config.adapt.base)),
    )


def _apply_overrides(tables: dict[str, Any], overrides: Mapping[str, Scalar]) -> dict[str, Any]:
    """Returns the tables of a run file, changed in place.

    Raises:
        ConfigError: a setting has no section, or lies below one that is no table.
    """
    faults = Faults()
    for setting, value in overrides.items():
        *path, name = setting.split(".")
        table: Any = tables
        for key in path:
            table = table.setdefault(key, {}) if isinstance(table, dict) else None
        with faults:
            if not path or not isinstance(table, dict):
                raise ConfigError(f"{setting} must be SECTION.NAME: {_suggest_setting(setting)}")
            table[name] = value
    faults.check()
    return tables


def _suggest_setting(name: str) -> str:
    """Returns a hint for a setting that was named without its section."""
    sections: dict[str, Any] = {key: option.annotation for key, option in list_options(RunConfig).items()}
    del sections["advice"]  # what is written into a file, and set by nobody
    known = {item: key for key, kind in sections.items() if isinstance(kind, type) for item in list_options(kind)}
    similar = find_similar(name, known)
    return "such as strategy.learning_rate" if similar is None else f"did you mean {known[similar]}.{similar}?"


def add_lines(message: str, text: str) -> str:
    """Returns a message about settings of a run file with the line of each in its TOML text."""
    lines = _find_lines(text)

    def add_line(match: re.Match[str]) -> str:
        line = lines.get(match[0])
        return match[0] if line is None else f"{match[0]} (line {line})"

    return _SETTING.sub(add_line, message)


def find_setting(message: str) -> str | None:
    """Returns the setting of a run file that a message is about, such as `run.rounds`; None if it names none."""
    sections = {item.name for item in fields(RunConfig)}
    names = (match[0] for match in _SETTING.finditer(message))
    return next((name for name in names if "." in name and name.partition(".")[0] in sections), None)


def _find_lines(text: str) -> dict[str, int]:
    """Returns the line of each setting, from 1; found without a parser, since TOML's gives no places."""
    lines, section = dict[str, int](), ""
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _HEADER.match(line)) is not None:
            section = header[1]
            lines.setdefault(section, number)
        elif (key := _KEY.match(line)) is not None:
            name = key[1].strip("\"'")
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines


def _resolve_file_options(folder: Path, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Returns a strategy's options; files that they name, such as a graph's, are meant from the run file's folder."""
    return {
        name: str(folder / value) if isinstance(value, str) and value.endswith(".json") else value
        for name, value in options.items()
    }


def _resolve_base(folder: Path, base: str | None) -> str | None:
    """Returns a base; that of a file is meant from the run file's folder, that of a coordinator is a name."""
    return _resolve_path(folder, base) if base is not None and base.endswith(BASE_SUFFIX) else base


def _resolve_path(folder: Path, path: str | None) -> str | None:
    return None if path is None else str(folder / path)


def parse_run(mapping: Mapping[str, Any]) -> RunConfig:
    """Returns a run file's tables as dataclasses.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; the text names the key.
    """
    return from_mapping(RunConfig, _join_lists(_expand_job(expand_preset(mapping))), path="")


def _join_lists(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tables with each list of texts or numbers in `[task]` as one text with commas between them.

    Raises:
        ConfigError: an entry has a comma of its own.
    """
    task = tables.get("task") if isinstance(tables, Mapping) else None
    if not isinstance(task, Mapping):
        return tables
    return {**tables, "task": {name: _join_list(f"task.{name}", value) for name, value in task.items()}}


def _join_list(name: str, value: object) -> object:
    if not isinstance(value, list) or not all(type(entry) in {str, int, float} for entry in value):
        return value
    if with_comma := [entry for entry in value if "," in str(entry)]:
        raise ConfigError(f"{name} must hold entries without a comma, got {with_comma[0]!r:.100}")
    return ",".join(map(str, value))


def _list_job_run_settings(name: str) -> frozenset[str]:
    """Returns the settings of `[run]` that count in a job of a name."""
    return APP_RUN_SETTINGS if name.startswith(APP_JOB_PREFIX) else JOB_RUN_SETTINGS


def _expand_job(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tables of a run file with a job as those of a run whose task is the job.

    Raises:
        ConfigError: it has what means nothing for a job.
    """
    job = tables.get("job") if isinstance(tables, Mapping) else None
    if not isinstance(job, Mapping):
        return tables
    if not isinstance(job.get("name"), str) or not job["name"]:
        raise ConfigError(f"job.name must be a job's name, such as my_jobs:WordCount, got {job.get('name')!r:.60}")
    faults, run, devices = Faults(), tables.get("run", {}), tables.get("devices", {})
    meaningful = {"run", "job", "devices", "conditions"}
    is_app = job["name"].startswith(APP_JOB_PREFIX)
    if is_app:
        meaningful.add("compression")
    what = "for a Flower app, whose own code trains" if is_app else "beside job, which trains nothing"
    unknown = {item.name for item in fields(RunConfig)} - meaningful
    for name in tables:
        if name == "privacy" and is_app:
            faults.messages.append(
                "privacy protects nothing of a Flower app, whose own code clips updates and adds them up; leave it "
                "out, and use Flower's, such as LocalDpMod or DifferentialPrivacyServerSideFixedClipping, in the app"
            )
        elif name in unknown:
            faults.messages.append(f"{name} means nothing {what}; leave it out")
    counting = _list_job_run_settings(job["name"])
    unused = [f"run.{key}" for key in run if key not in counting] if isinstance(run, Mapping) else []
    if isinstance(devices, Mapping):
        unused += [f"devices.{key}" for key in devices if key in _TRAINING_DEVICE_SETTINGS]
    faults.messages += [f"{name} means nothing for a job; leave it out" for name in unused]
    faults.check()
    if not isinstance(run, Mapping):
        return tables
    return {**tables, "run": {**run, "task": job["name"]}, "strategy": {"name": JOB_STRATEGY}}


def parse_run_text(text: str) -> RunConfig:
    """Returns the run file in a TOML text that lies in no folder, such as one that was pasted.

    Raises:
        ConfigError: as `parse_run`; or it is no TOML, or names a file by a path that is not absolute.
    """
    try:
        config = parse_run(parse_toml(text))
    except ValueError as error:
        raise ConfigError(f"the run file is not TOML: {error}") from None
    path_settings = {"run.init": config.run.init, "aggregation.hosts": config.aggregation.hosts}
    if config.adapt.base is not None and config.adapt.base.endswith(BASE_SUFFIX):
        path_settings["adapt.base"] = config.adapt.base
    path_settings |= {f"strategy.{name}": str(value) for name, value in config.strategy.options.items()}
    for key, path in path_settings.items():
        is_file = path is not None and (not key.startswith("strategy.") or path.endswith(".json"))
        if path is not None and is_file and not Path(path).is_absolute():
            raise ConfigError(f"{key} must be an absolute path on the coordinator's machine here, got {path!r}")
    return config
