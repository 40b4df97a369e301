"""ESync: while the slowest device does one mini-batch, the others do as many as fit.

Source: Li, Zhou, Yu, Xu, ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers, IEEE TSC
2020. The model moves by the mean displacement, uniform over devices as in the paper, by examples, or normalised as in
FedNova (unequal steps on unequal data otherwise pull the mean towards the fast devices' optimum).

`budget` gives every device its number of iterations with the assignment. `live` is the paper's state server: devices
report their progress, and a `Recall` (READY) ends their work as late as can be. A device never waits for the answer:
it goes on until the recall arrives, which is the paper's non-blocking query with a delayed acknowledgement.

Differs from the paper: durations in place of clocks, smoothed measurements, the time of the exchange counts, ε is a
fraction of an iteration unless `epsilon_s` is set (0.5 in the paper), devices may come, go and slow down at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgefl.errors import ConfigError
from edgefl.strategies import esync_rule as rule
from edgefl.strategies.esync_rule import Pace, Slack, Standing
from edgefl.strategies.fedavg import by_examples
from edgefl.strategies.fednova import check_normalizable, normalizer
from edgefl.strategies.open_round import TICK_S, OpenRound, RoundState
from edgefl.strategies.rounds import RoundRules, Synchronous, recalls, unscaled
from edgefl.strategies.ssgd import OneStep, equally
from edgefl.types import Array, FleetView, LocalPlan, Order, Update

MODES = ("budget", "live")
AGGREGATIONS = ("uniform", "samples", "nova")
SHORTEST_DEADLINE_S = 60.0
LOOK_S_PER_DEVICE = 1e-5
"""All devices are looked at no more often than this, times their number, however many reports arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ESync(OneStep):
    """Settings of a run with `esync`; how much is done follows from speeds, not from `iterations` or `epochs`.

    Attributes:
        mode: who counts iterations, see `MODES`.
        aggregation: see `AGGREGATIONS`.
        epsilon: ε as a fraction of a device's iteration. Below 0 it is so much that a device may be back after the
            slowest: where speeds are multiples of each other, as those of one family of boards are, a measured whole
            iteration otherwise never quite fits, and a device that could do two does one.
        epsilon_s: ε in seconds, in place of it.
        global_learning_rate: the mean displacement is multiplied by it.
        min_iterations, max_iterations: bounds of a budget; live work ends at the upper one without a recall.
        smoothing: of measured seconds; see `esync_rule.SMOOTHINGS`.
        patience: devices are recalled when a round takes so many times its planned seconds.
        give_up: a device is given up when it takes so many times the planned seconds, and at least a minute.
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

    def build(self, rules: RoundRules) -> Synchronous[ESyncState]:
        self._check()
        plan, rate, is_nova = self.plan(), self.rate(), self.aggregation == "nova"
        if is_nova:
            check_normalizable(plan, "esync with aggregation nova")
        server = replace(rules.server, learning_rate=rules.server.learning_rate * self.global_learning_rate)
        return ESyncRounds(
            plan=plan,
            weigh=equally if self.aggregation == "uniform" else by_examples,
            rules=replace(rules, server=server),
            norm=normalizer(plan, rate) if is_nova else unscaled,
            rate=rate,
            settings=self,
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
class Measured:
    """What a device measured in its last rounds, as `esync_rule.smoothed` keeps it."""

    seconds_per_iteration: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)

    def pace(self) -> Pace:
        return Pace(
            seconds_per_iteration=rule.level(self.seconds_per_iteration), exchange_s=rule.level(self.exchange_s)
        )


@dataclass(slots=True)
class ESyncState(RoundState):
    """What is known of devices.

    Attributes:
        measured: by device.
        paces: what the open round reckons with, by device.
        planned_s: how long the open round should take, None when nothing is known.
        unbounded: devices that work until they are recalled, in `live` mode.
        looked_s: when all devices were last looked at, in `live` mode.
    """

    measured: dict[str, Measured] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    planned_s: float | None = None
    unbounded: set[str] = field(default_factory=set)
    looked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ESyncRounds(Synchronous[ESyncState]):
    """Rounds in which every device has a budget of its own."""

    settings: ESync

    def begin(self, model: dict[str, Array]) -> ESyncState:
        return ESyncState(model=model)

    def plans(
        self, state: ESyncState, plan: LocalPlan, devices: Sequence[str], view: FleetView
    ) -> Mapping[str, LocalPlan]:
        """Returns one iteration for the slowest and for those who are new, and as many as fit for the others."""
        settings, paces = self.settings, self._paces(state, devices, view)
        counts = rule.budgets(paces, self._slack, at_least=settings.min_iterations, at_most=settings.max_iterations)
        state.planned_s = rule.horizon_s(paces) if paces else None
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

    def deadline_s(self, state: ESyncState) -> float | None:
        if self.rules.deadline_s is not None or state.planned_s is None:
            return self.rules.deadline_s
        return max(SHORTEST_DEADLINE_S, self.settings.give_up * state.planned_s)

    def note(self, state: ESyncState, opened: OpenRound, update: Update) -> None:  # noqa: ARG002 whatever the round
        """Learns how fast the device was."""
        metrics = update.metrics
        if metrics.iterations <= 0:
            return
        known, smoothing = state.measured.setdefault(update.device_id, Measured()), self.settings.smoothing
        newest = metrics.compute_s / metrics.iterations
        known.seconds_per_iteration = rule.smoothed(known.seconds_per_iteration, newest, smoothing)
        known.exchange_s = rule.smoothed(known.exchange_s, metrics.send_s, smoothing)

    def watch(self, state: ESyncState, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:
        """Recalls devices: live, when the rule says READY; always, when the round takes much longer than planned."""
        now_s = view.now_s
        if opened.since_s is None or state.planned_s is None:
            return ()
        overrun_s = min(opened.since_s, now_s) + self.settings.patience * state.planned_s
        if now_s + TICK_S >= overrun_s:
            opened.alarm_s = state.planned_s = None
            return recalls(opened, opened.pending(view))
        if self.settings.mode == "budget":
            opened.alarm_s = overrun_s
        elif self._is_time_to_look(state, opened, now_s):
            state.looked_s, opened.alarm_s = now_s, overrun_s
            return self._look(state, opened, view)
        return ()

    @property
    def _slack(self) -> Slack:
        return Slack(fraction=self.settings.epsilon, seconds=self.settings.epsilon_s)

    def _paces(self, state: ESyncState, devices: Sequence[str], view: FleetView) -> dict[str, Pace]:
        """Returns what is known: own measurements; before there are any, the fleet's, if it knows all the devices."""
        if state.measured:
            return {name: state.measured[name].pace() for name in devices if name in state.measured}
        speeds, paces = view.speeds, {}
        for device_id in devices:
            speed = speeds.get(device_id)
            if speed is None or speed.seconds_per_iteration is None:
                return {}
            paces[device_id] = Pace(seconds_per_iteration=speed.seconds_per_iteration)
        return paces

    def _is_time_to_look(self, state: ESyncState, opened: OpenRound, now_s: float) -> bool:
        if state.looked_s is None or state.looked_s > now_s or opened.alarm_s is None:
            return True
        next_s = state.looked_s + LOOK_S_PER_DEVICE * len(opened.order)
        opened.alarm_s = min(opened.alarm_s, max(next_s, now_s))
        return now_s + TICK_S >= opened.alarm_s

    def _look(self, state: ESyncState, opened: OpenRound, view: FleetView) -> tuple[Order, ...]:
        """Applies the rule to every device that works, and sets the alarm for the next one that gets READY.

        An iteration counts here with the exchange, and its age from the opening of the round; of what the rule
        reckons for one more iteration, the way down lies behind a device already. The slowest is looked for among
        those in their first iteration: one that has slowed down later can end when it is told to.
        """
        pending = opened.pending(view)
        standings = self._standings(state, opened, pending, view)
        first = {name: one for name, one in standings.items() if one.iterations == 0}
        slowest_id = rule.slowest(first) if first else None
        last, done = (None if slowest_id is None else first[slowest_id]), []
        for assignment_id in pending:
            device_id, _ = opened.asked[assignment_id]
            one = standings.get(device_id)
            if one is None or assignment_id in opened.recalled or device_id not in state.unbounded:
                continue
            exchange_s = state.paces[device_id].exchange_s if device_id in state.paces else 0.0
            slack_s = self._slack.of(one.seconds_per_iteration - exchange_s) - exchange_s / 2
            # A recall lets the iteration that is under way end: everybody does at least one.
            begun = replace(one, iterations=max(1, one.iterations))
            # Just behind the moment at which one more does not fit: who ends one at that moment begins the next.
            if last is None or rule.is_ready(begun, last, slack_s - TICK_S, is_last=device_id == slowest_id):
                done.append(assignment_id)
            elif opened.alarm_s is not None:
                ends_s = view.now_s + last.seconds_per_iteration - last.age_s
                opened.alarm_s = min(opened.alarm_s, ends_s - one.seconds_per_iteration - slack_s + 2 * TICK_S)
        return recalls(opened, done)

    def _standings(
        self, state: ESyncState, opened: OpenRound, pending: Sequence[str], view: FleetView
    ) -> dict[str, Standing]:
        """Returns where those are who are at work and whose speed is known."""
        progress, standings = view.progress, {}
        age_s = 0.0 if opened.since_s is None else view.now_s - opened.since_s
        for assignment_id in pending:
            device_id, _ = opened.asked[assignment_id]
            report, pace, iterations = progress.get(device_id), state.paces.get(device_id), 0
            if report is not None and report.assignment_id == assignment_id:
                exchange_s = 0.0 if pace is None else pace.exchange_s
                pace = Pace(seconds_per_iteration=report.seconds_per_iteration, exchange_s=exchange_s)
                iterations = report.iteration
            if pace is not None:
                standings[device_id] = Standing(
                    iterations=iterations, seconds_per_iteration=pace.shortest_s, age_s=age_s
                )
        return standings
