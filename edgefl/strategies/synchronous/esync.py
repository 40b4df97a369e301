"""ESync: while the slowest device does one mini-batch, the others do as many as fit.

Source: Li, Zhou, Yu, Xu, ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers, IEEE TSC
2020. The model moves by the mean displacement, uniform over devices as in the paper, by examples, or normalised as in
FedNova (unequal steps on unequal data otherwise pull the mean towards the fast devices' optimum).

`budget` gives every device its number of iterations with the assignment. `live` is the paper's state server: devices
report their progress, and a `FinishEarlyInstruction` (READY) ends their work as late as can be. A device never waits
for the answer: it goes on until the recall arrives, which is the paper's non-blocking query with a delayed
acknowledgement.

Differs from the paper: durations in place of clocks, smoothed measurements, the time of the exchange counts, ε is a
fraction of an iteration unless `epsilon_s` is set (0.5 in the paper), devices may come, go and slow down at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, FleetView, Instruction, TrainConfig, Update
from edgefl.strategies.synchronous import esync_rule as rule
from edgefl.strategies.synchronous.esync_rule import DeviceRoundProgress, DeviceTiming, Slack
from edgefl.strategies.synchronous.fedavg import weight_by_examples
from edgefl.strategies.synchronous.fednova import check_normalisable, make_normaliser
from edgefl.strategies.synchronous.round_state import TICK_S, OpenRound, RoundState
from edgefl.strategies.synchronous.ssgd import SyncSingleStepConfig, weight_uniformly
from edgefl.strategies.synchronous.strategy import (
    RoundRules,
    SynchronousStrategy,
    compute_unit_norm,
    make_finish_early_instructions,
)

MODES = ("budget", "live")
AGGREGATIONS = ("uniform", "samples", "nova")
MIN_DEADLINE_S = 60.0
CHECK_INTERVAL_S_PER_DEVICE = 1e-5
"""Minimum interval of scans of all devices, per device, however many reports arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ESyncConfig(SyncSingleStepConfig):
    """Settings of a run with `esync`; budgets follow from speeds, not from `iterations` or `epochs`.

    Attributes:
        mode: where iterations are counted, see `MODES`.
        aggregation: see `AGGREGATIONS`.
        epsilon: ε as a fraction of a device's iteration. Below 0 a device may return that much after the slowest:
            where speeds are multiples of each other, as within one family of boards, a measured whole iteration
            otherwise never quite fits, and a device that could do two does one.
        epsilon_s: ε in seconds, in place of it.
        global_learning_rate: the mean displacement is multiplied by it.
        min_iterations, max_iterations: bounds of a budget; live work ends at the upper one without a recall.
        smoothing: of measured seconds; see `esync_rule.SMOOTHINGS`.
        patience: multiple of a round's planned seconds after which its devices are recalled.
        give_up: multiple of the planned seconds, and at least a minute, after which a device is given up.
    """

    mode: str = "budget"
    aggregation: str = "uniform"
    epsilon: float = -0.2
    epsilon_s: float | None = None
    global_learning_rate: float = 1.0
    min_iterations: int = 1
    max_iterations: int = 10_000
    smoothing: str = "median"
    patience: float = 1.5
    give_up: float = 10.0

    def build(self, rules: RoundRules) -> SynchronousStrategy[ESyncState]:
        self._check()
        plan, rate, is_nova = self.plan(), self.make_schedule(), self.aggregation == "nova"
        if is_nova:
            check_normalisable(plan, "esync with aggregation nova")
        server = replace(rules.server, learning_rate=rules.server.learning_rate * self.global_learning_rate)
        return ESync(
            plan=plan,
            compute_weight=weight_uniformly if self.aggregation == "uniform" else weight_by_examples,
            rules=replace(rules, server=server),
            compute_norm=make_normaliser(plan, rate) if is_nova else compute_unit_norm,
            lr_schedule=rate,
            config=self,
        )

    def _check(self) -> None:
        if self.seconds is not None or self.iterations != 1:
            name = "iterations" if self.seconds is None else "seconds"
            raise ConfigError(f"strategy.{name}: esync finds out itself how much each device does; leave it out")
        for name, choices in (("mode", MODES), ("aggregation", AGGREGATIONS), ("smoothing", rule.SMOOTHINGS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"strategy.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not (1 <= self.min_iterations <= self.max_iterations):
            raise ConfigError(
                "strategy.min_iterations must be at least 1 and at most max_iterations, "
                f"got {self.min_iterations} and {self.max_iterations}"
            )
        for name, at_least in (("epsilon", -1), ("epsilon_s", 0), ("patience", 1), ("give_up", 1)):
            value = getattr(self, name)
            if value is not None and not at_least <= value < float("inf"):
                raise ConfigError(f"strategy.{name} must be a number of {at_least} or more, got {value!r}")
        if not 0 < self.global_learning_rate < float("inf"):
            raise ConfigError(
                f"strategy.global_learning_rate must be a number above 0, got {self.global_learning_rate!r}"
            )


@dataclass(slots=True)
class ESyncMeasurements:
    """Measurements of a device in its last rounds, as `esync_rule.add_measurement` keeps them."""

    seconds_per_iteration: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)

    def compute_timing(self) -> DeviceTiming:
        return DeviceTiming(
            seconds_per_iteration=rule.compute_estimate(self.seconds_per_iteration),
            exchange_s=rule.compute_estimate(self.exchange_s),
        )


@dataclass(slots=True)
class ESyncState(RoundState):
    """State of ESync: measurements and plans by device.

    Attributes:
        measured: measurements by device.
        paces: timings used in the open round, by device.
        planned_s: planned duration of the open round, None when unknown.
        unbounded: devices that work until they are recalled, in `live` mode.
        looked_s: time of the last scan of all devices, in `live` mode.
    """

    measured: dict[str, ESyncMeasurements] = field(default_factory=dict)
    paces: dict[str, DeviceTiming] = field(default_factory=dict)
    planned_s: float | None = None
    unbounded: set[str] = field(default_factory=set)
    looked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ESync(SynchronousStrategy[ESyncState]):
    """Rounds with an individual budget for every device."""

    config: ESyncConfig

    def make_state(self, model: dict[str, Array]) -> ESyncState:
        return ESyncState(model=model)

    def make_plans(
        self, state: ESyncState, plan: TrainConfig, devices: Sequence[str], view: FleetView
    ) -> Mapping[str, TrainConfig]:
        """Returns one iteration for the slowest and for new devices, and as many as fit for the others."""
        settings, paces = self.config, self._get_timings(state, devices, view)
        counts = rule.compute_budgets(
            paces, self._slack, min_iterations=settings.min_iterations, max_iterations=settings.max_iterations
        )
        state.planned_s = rule.compute_horizon_s(paces) if paces else None
        state.looked_s = None
        state.paces |= paces
        plans = {}
        for device_id in devices:
            count = counts.get(device_id, settings.min_iterations)
            is_live = settings.mode == "live" and count > settings.min_iterations
            (state.unbounded.add if is_live else state.unbounded.discard)(device_id)
            plans[device_id] = replace(
                plan,
                iterations=settings.max_iterations if is_live else count,
                epochs=None,
                seconds=None,
                report_progress=is_live,
            )
        return plans

    def compute_deadline_s(self, state: ESyncState) -> float | None:
        if self.rules.deadline_s is not None or state.planned_s is None:
            return self.rules.deadline_s
        return max(MIN_DEADLINE_S, self.config.give_up * state.planned_s)

    def on_update(self, state: ESyncState, current_round: OpenRound, update: Update) -> None:  # noqa: ARG002 whatever the round
        """Records the device's measured speed."""
        metrics = update.metrics
        if metrics.iterations <= 0:
            return
        measurements, smoothing = (
            state.measured.setdefault(update.device_id, ESyncMeasurements()),
            self.config.smoothing,
        )
        newest = metrics.compute_s / metrics.iterations
        measurements.seconds_per_iteration = rule.add_measurement(
            measurements.seconds_per_iteration, newest, smoothing
        )
        measurements.exchange_s = rule.add_measurement(measurements.exchange_s, metrics.send_s, smoothing)

    def schedule_during_round(
        self, state: ESyncState, current_round: OpenRound, view: FleetView
    ) -> tuple[Instruction, ...]:
        """Recalls devices: live, when the rule says READY; always, when the round takes much longer than planned."""
        now_s = view.now_s
        if current_round.since_s is None or state.planned_s is None:
            return ()
        overrun_s = min(current_round.since_s, now_s) + self.config.patience * state.planned_s
        if now_s + TICK_S >= overrun_s:
            current_round.alarm_s = state.planned_s = None
            return make_finish_early_instructions(current_round, current_round.list_pending(view))
        if self.config.mode == "budget":
            current_round.alarm_s = overrun_s
        elif self._should_check(state, current_round, now_s):
            state.looked_s, current_round.alarm_s = now_s, overrun_s
            return self._check_devices(state, current_round, view)
        return ()

    @property
    def _slack(self) -> Slack:
        return Slack(fraction=self.config.epsilon, seconds=self.config.epsilon_s)

    def _get_timings(self, state: ESyncState, devices: Sequence[str], view: FleetView) -> dict[str, DeviceTiming]:
        """Returns own measurements; before there are any, the fleet's, if complete."""
        if state.measured:
            return {name: state.measured[name].compute_timing() for name in devices if name in state.measured}
        speeds, paces = view.speeds, {}
        for device_id in devices:
            speed = speeds.get(device_id)
            if speed is None or speed.seconds_per_iteration is None:
                return {}
            paces[device_id] = DeviceTiming(seconds_per_iteration=speed.seconds_per_iteration)
        return paces

    def _should_check(self, state: ESyncState, current_round: OpenRound, now_s: float) -> bool:
        if state.looked_s is None or state.looked_s > now_s or current_round.alarm_s is None:
            return True
        next_s = state.looked_s + CHECK_INTERVAL_S_PER_DEVICE * len(current_round.order)
        current_round.alarm_s = min(current_round.alarm_s, max(next_s, now_s))
        return now_s + TICK_S >= current_round.alarm_s

    def _check_devices(self, state: ESyncState, current_round: OpenRound, view: FleetView) -> tuple[Instruction, ...]:
        """Applies the rule to every busy device, and sets the alarm for the next one that gets READY.

        An iteration includes the exchange here, and its age counts from the opening of the round; of the rule's cost
        of one more iteration, the download is already done. The slowest is sought among those in their first
        iteration: one that has slowed down later can end when recalled.
        """
        pending = current_round.list_pending(view)
        progress_by_device = self._get_progress(state, current_round, pending, view)
        first_iteration = {
            name: device_progress
            for name, device_progress in progress_by_device.items()
            if device_progress.iterations == 0
        }
        slowest_id = rule.find_slowest(first_iteration) if first_iteration else None
        slowest, ready_ids = (None if slowest_id is None else first_iteration[slowest_id]), []
        for assignment_id in pending:
            device_id, _ = current_round.asked[assignment_id]
            device_progress = progress_by_device.get(device_id)
            if device_progress is None or assignment_id in current_round.recalled or device_id not in state.unbounded:
                continue
            exchange_s = state.paces[device_id].exchange_s if device_id in state.paces else 0.0
            slack_s = self._slack.to_seconds(device_progress.seconds_per_iteration - exchange_s) - exchange_s / 2
            # A recall lets the current iteration end: every device does at least one.
            after_iteration = replace(device_progress, iterations=max(1, device_progress.iterations))
            # Just after one more no longer fits: a device that ends an iteration at that moment begins the next.
            if slowest is None or rule.is_ready(
                after_iteration, slowest, slack_s - TICK_S, is_slowest=device_id == slowest_id
            ):
                ready_ids.append(assignment_id)
            elif current_round.alarm_s is not None:
                ends_s = view.now_s + slowest.seconds_per_iteration - slowest.age_s
                current_round.alarm_s = min(
                    current_round.alarm_s, ends_s - device_progress.seconds_per_iteration - slack_s + 2 * TICK_S
                )
        return make_finish_early_instructions(current_round, ready_ids)

    def _get_progress(
        self, state: ESyncState, current_round: OpenRound, pending: Sequence[str], view: FleetView
    ) -> dict[str, DeviceRoundProgress]:
        """Returns the progress of busy devices with known speed."""
        progress, progress_by_device = view.progress, {}
        age_s = 0.0 if current_round.since_s is None else view.now_s - current_round.since_s
        for assignment_id in pending:
            device_id, _ = current_round.asked[assignment_id]
            report, pace, iterations = progress.get(device_id), state.paces.get(device_id), 0
            if report is not None and report.assignment_id == assignment_id:
                exchange_s = 0.0 if pace is None else pace.exchange_s
                pace = DeviceTiming(seconds_per_iteration=report.seconds_per_iteration, exchange_s=exchange_s)
                iterations = report.iteration
            if pace is not None:
                progress_by_device[device_id] = DeviceRoundProgress(
                    iterations=iterations, seconds_per_iteration=pace.min_round_s, age_s=age_s
                )
        return progress_by_device
