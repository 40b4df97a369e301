"""Divergence of a run: losses that rise, swing, or stand still, by what devices and evaluators report.

Pure, and part of the loop's state, so a replayed run comes to the same findings. Memory is bounded: the losses of one
round, at most `MAX_ROUND_LOSSES` of them, and of the last few rounds. A round counts with the median of its devices'
losses, so that no device decides alone, and with a trusted evaluation of its model. An update that is not finite
counts as the largest loss.

The measure is the loss of a model that has learned nothing: log C for a task of C classes, else the first one seen,
by which losses rise and swing, but never stand still.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from edgefl.core.config import DivergenceAction
from edgefl.core.types import Array, Tensors

MAX_LOSS = 1e30
"""Larger losses, and those of models that are not finite, count as this."""
MAX_ROUND_LOSSES = 1024
WINDOW = 8
"""Rounds that a loss that swings or stands still is looked at over."""
NUM_ABOVE, LAST_ABOVE = 4, 5
"""A loss diverges when it was above that of such a model in so many of so many last rounds."""
ABOVE_RATIO = 1.1
RISE_RATIO, RISE_SHARE = 3.0, 0.5
"""It diverges, too, when three in a row are so many times the best, and by so much of an untrained model's loss."""
SWING_SHARE, NUM_SWINGS = 0.3, 5
"""It oscillates when so many of the last differences change sign and are so much of an untrained model's loss."""
STALL_SHARE, STALL_GAIN, STALL_ITERATIONS = 0.95, 0.01, 500
"""It stands still when it is above that share of an untrained model's loss, and has not fallen by that part in
`WINDOW` rounds with so many local iterations."""
STALLED = "stands still"
RECOVERY_ITERATIONS = 100
"""After a halved learning rate it does not recover when `NUM_ABOVE` rounds with so many local iterations bring no
gain, and the median of the last rounds is above `STALL_SHARE` of an untrained model's loss."""
QUIET_ROUNDS = 10
"""Rounds after a finding before the next one."""
MAX_HALVINGS = 10

TOO_HIGH = 1.5
"""So many times what the task recommends, a learning rate is taken for the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceRule:
    """What a run does when its loss diverges, oscillates or stands still.

    Attributes:
        action: say so, also halve the learning rate, or also end the run.
        untrained_loss: of a model that has learned nothing; None where the task does not say.
        smaller, other: what would help where the learning rate is too high, and where the loss stands still.
    """

    action: DivergenceAction = "warn"
    untrained_loss: float | None = None
    smaller: str = "start again with a smaller strategy.learning_rate"
    other: str = "start again with another strategy.learning_rate"


def make_advice(name: str, rate: float | None, usual: float, step_scale: float | None) -> dict[str, str]:
    """Returns the advice of a `DivergenceRule`.

    Args:
        name: of the setting of `[strategy]` that a step is proportional to.
        rate: its value; None is not known.
        usual: what the task recommends.
        step_scale: of an asynchronous strategy, where the run file has it.
    """
    if rate is None:
        return {}
    if rate > TOO_HIGH * usual:
        smaller = f"strategy.{name} = {rate:g} is too high: start again with {usual:g}, which suits this task"
        return {"smaller": smaller, "other": smaller}
    smaller = f"strategy.{name} = {rate:g} is too high here: start again with {rate / 4:g}"
    if step_scale is not None and name == "learning_rate":
        smaller = f"{smaller}, and without strategy.step_scale where there is one"
    other = (
        f"start again with strategy.{name} = {usual:g}, which suits this task"
        if rate < usual / TOO_HIGH
        else (
            f"start again with another strategy.{name} than {rate:g}, and look at the data and labels of the devices"
        )
    )
    return {"smaller": smaller, "other": other}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A finding: after which round, and in words what was seen, what would help, and what is done."""

    round: int
    message: str


@dataclass(slots=True)
class LossSeries:
    """Losses of one kind by round; `best` is the least median of three, `since_best` and `iterations` count from it.

    `first` is the first loss.
    """

    first: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    best: float = MAX_LOSS
    since_best: int = 0
    iterations: int = 0

    def add(self, loss: float, iterations: int) -> bool:
        """Adds the loss of a round; returns whether it is the best so far."""
        self.first = loss if self.first is None else self.first
        self.recent.append(loss)
        level = statistics.median(list(self.recent)[-3:])
        self.since_best, self.iterations = self.since_best + 1, self.iterations + iterations
        if level < self.best * (1.0 - STALL_GAIN):
            self.best, self.since_best, self.iterations = level, 0, 0
        return self.since_best == 0

    def start_again(self) -> None:
        """Forgets what the next rounds are not to be judged by; the best loss stays."""
        self.recent.clear()
        self.since_best, self.iterations = 0, 0

    def find_trend(self, untrained_loss: float | None, *, is_halved: bool = False) -> str | None:
        """Returns what is wrong with the losses, in words; None if nothing is.

        `is_halved` says that the learning rate was found too high before.
        """
        if self.first is None or len(self.recent) < NUM_ABOVE:
            return None
        whose = "that of the first round" if untrained_loss is None else "that of a model that has learned nothing"
        untrained = self.first if untrained_loss is None else untrained_loss
        found = self._find_rise(untrained, whose) or self._find_swing(untrained)
        if found or is_halved:
            return found or self._find_lasting(untrained)
        # A small regression has learned all there is in its first round, whose loss tells nothing then.
        return None if untrained_loss is None else self._find_stall(untrained, whose)

    def _find_rise(self, untrained: float, whose: str) -> str | None:
        last = list(self.recent)[-LAST_ABOVE:]
        if sum(loss > ABOVE_RATIO * untrained for loss in last) >= NUM_ABOVE:
            return f"diverges: it is {_format_loss(last[-1])}, {whose} {untrained:.3g}"
        level = min(last[-3:])
        if level >= max(RISE_RATIO * self.best, self.best + RISE_SHARE * untrained):
            return f"diverges: it rises from {self.best:.3g} to {_format_loss(level)}"
        return None

    def _find_swing(self, untrained: float) -> str | None:
        steps = [after - before for before, after in pairwise(self.recent)]
        swings = sum(
            one * other < 0 and min(abs(one), abs(other)) > SWING_SHARE * untrained for one, other in pairwise(steps)
        )
        if swings < NUM_SWINGS:
            return None
        return f"oscillates between {min(self.recent):.3g} and {_format_loss(max(self.recent))}"

    def _find_stall(self, untrained: float, whose: str) -> str | None:
        is_long = self.since_best >= WINDOW and self.iterations >= STALL_ITERATIONS
        if not is_long or self.best < STALL_SHARE * untrained:
            return None
        return f"{STALLED}: it is {self.best:.3g} after {self.since_best} rounds, {whose} {untrained:.3g}"

    def _find_lasting(self, untrained: float) -> str | None:
        level = statistics.median(self.recent)
        is_long = self.since_best >= NUM_ABOVE and self.iterations >= RECOVERY_ITERATIONS
        if not is_long or level < STALL_SHARE * untrained:
            return None
        return f"does not recover: it is {_format_loss(level)} after {self.since_best} rounds"


@dataclass(slots=True)
class DivergenceDetector:
    """Losses of a run, and its findings.

    `losses` are those of the open round, by arrival; `iterations` its local ones, `since_evaluation` those since the
    last evaluation. `quiet_until` is the round before which nothing is found, `num_halvings` how often the learning
    rate was halved; `not_finite` counts, by device, updates that were not finite since the last one that was. The
    models are kept only by runs whose learning rate is halved; `is_best` says that the last closed round has the best
    loss, and has learned something.
    """

    training: LossSeries = field(default_factory=LossSeries)
    evaluated: LossSeries = field(default_factory=LossSeries)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ROUND_LOSSES))
    iterations: int = 0
    since_evaluation: int = 0
    quiet_until: int = 0
    num_halvings: int = 0
    not_finite: dict[str, int] = field(default_factory=dict)
    is_best: bool = False
    newest_model: dict[str, Array] = field(default_factory=dict)
    good_model: dict[str, Array] = field(default_factory=dict)

    def keep_model(self, model: Tensors) -> None:
        """Keeps a copy of the model at the end of a round, and the last good one, to which a run may go back.

        Good is the first, and the one that the best losses are of: those of a round are of the model before it. One
        that diverged and learns no more has the loss of one that has learned nothing on all data, and is not good.
        """
        if self.is_best:
            self.good_model = self.newest_model
        self.newest_model = {name: np.array(tensor) for name, tensor in model.items()}
        self.good_model = self.good_model or self.newest_model

    def start_again(self, model: Mapping[str, Array] | None) -> None:
        """Looks anew at the rounds with a halved learning rate; `model` is where they begin, if it was restored."""
        for series in (self.training, self.evaluated):
            series.start_again()
        self.quiet_until = 0
        if model is not None:
            self.newest_model = dict(model)

    def add_update(self, loss: float | None, iterations: int) -> None:
        """Adds a device's loss on its own data in the open round; None is not known."""
        self.not_finite.clear()
        self.iterations += iterations
        self.since_evaluation += iterations
        if loss is not None:
            self.losses.append(_bound_loss(loss))

    def add_not_finite(self, device_id: str) -> None:
        """Adds an update that was refused as it held a NaN or an infinity."""
        self.losses.append(MAX_LOSS)
        if device_id in self.not_finite or len(self.not_finite) < MAX_ROUND_LOSSES:
            self.not_finite[device_id] = self.not_finite.get(device_id, 0) + 1

    def add_evaluation(self, loss: float) -> None:
        """Adds the loss of a version of the global model, from an evaluation that no single device decides."""
        self.evaluated.add(_bound_loss(loss), self.since_evaluation)
        self.since_evaluation = 0

    def close_round(self, round_number: int, rule: DivergenceRule) -> Divergence | None:
        """Returns what is found at the end of a round, if anything."""
        iterations, self.iterations, self.is_best = self.iterations, 0, False
        if self.losses:
            self.is_best = self.training.add(_compute_low_median(self.losses), iterations)
            self.is_best &= self.training.best < STALL_SHARE * (rule.untrained_loss or self.training.first or 0.0)
            self.is_best &= self._is_evaluation_good(rule.untrained_loss)
            self.losses.clear()
        for name, series in (("training loss", self.training), ("loss on the test data", self.evaluated)):
            trend = series.find_trend(rule.untrained_loss, is_halved=self.num_halvings > 0)
            if trend is not None:
                self.is_best = False
                return self._report(round_number, f"the {name} {trend}", rule, is_still=trend.startswith(STALLED))
        return None

    def _is_evaluation_good(self, untrained_loss: float | None) -> bool:
        """Returns whether the newest evaluation is of a model that has learned something, where there are any.

        A device with few classes trains any model to a small loss on them, also one whose units are all off.
        """
        if self.evaluated.first is None:
            return True
        limit = STALL_SHARE * (self.evaluated.first if untrained_loss is None else untrained_loss)
        return bool(self.evaluated.recent) and self.evaluated.recent[-1] < limit

    def find_not_finite(self, round_number: int, num_trainers: int, rule: DivergenceRule) -> Divergence | None:
        """Returns the finding that no device's update is finite any more, before the run runs out of devices."""
        if len(self.not_finite) * 2 <= num_trainers:
            return None
        self.not_finite.clear()
        return self._report(round_number, "the updates are not finite any more: the loss diverges", rule)

    def _report(
        self, round_number: int, what: str, rule: DivergenceRule, *, is_still: bool = False
    ) -> Divergence | None:
        if round_number < self.quiet_until:
            return None
        self.quiet_until = round_number + QUIET_ROUNDS
        advice = rule.other if is_still else rule.smaller
        return Divergence(round=round_number, message=f"round {round_number}: {what}; {advice}")


def _compute_low_median(losses: Sequence[float] | deque[float]) -> float:
    """Returns the median, the smaller one of two: one of two devices decides nothing by a large loss."""
    return sorted(losses)[(len(losses) - 1) // 2]


def _bound_loss(loss: float) -> float:
    return min(max(loss, -MAX_LOSS), MAX_LOSS) if math.isfinite(loss) else MAX_LOSS


def _format_loss(loss: float) -> str:
    return "not finite" if loss >= MAX_LOSS else f"{loss:.3g}"
