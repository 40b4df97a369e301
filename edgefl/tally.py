"""What a run is measured against: its rounds, its goal, its score, and whether there is any hope left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from edgefl.errors import RunFailedError
from edgefl.node_scores import NodeScores, mean_accuracy
from edgefl.types import (
    Assignment,
    Evaluated,
    Evaluation,
    Event,
    FleetView,
    Lost,
    Order,
    Outcome,
    Role,
    Stop,
    Update,
)

GIVE_UP_AFTER = 3
"""The run fails when the devices have failed so often each, since the last update that arrived."""
MAX_ACCURACY_OVER = 100
"""So many accuracies are remembered."""


@dataclass(slots=True)
class RoundCount:
    """Counts rounds: so many versions are one. None until the first work is given out: then the number of devices."""

    versions_per_round: int | None = 1

    def begin(self, num_devices: int) -> None:
        """Takes the number of devices that the first work is given to, unless the number is known."""
        if self.versions_per_round is None:
            self.versions_per_round = max(1, num_devices)

    def of(self, version: int) -> int:
        """Returns the round that the aggregation to `version` belongs to; version 0 is before the first."""
        return math.ceil(version / (self.versions_per_round or 1))

    def closed(self, version: int) -> int:
        """Returns how many rounds are whole at `version`."""
        return version // (self.versions_per_round or 1)

    def ends_at(self, version: int) -> bool:
        return version % (self.versions_per_round or 1) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When a run is over: whichever is reached first; None does not count. `seconds` count from the first work.

    `accuracy` is to be reached by the mean of the last `accuracy_over` evaluated versions.
    """

    rounds: int | None = None
    updates: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    accuracy: float | None = None
    accuracy_over: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a run that goes on had counted before: updates, bytes, and seconds since its first work."""

    updates: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Scoreboard:
    """`accuracy` is that of the newest version that everybody who was asked has evaluated, or been lost over.

    It is the mean over the test examples of the evaluators; of the devices' own splits where there is no evaluator.
    Models of single devices do not count here; see `NodeScores`.
    """

    accuracy: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ACCURACY_OVER))
    version: int = -1
    asked: int = -1
    outstanding: dict[str, int] = field(default_factory=dict)
    results: dict[int, list[Evaluated]] = field(default_factory=dict)

    def ask(self, orders: Sequence[Order]) -> None:
        asked = {o.assignment_id: o.version for o in orders if isinstance(o, Evaluation) and not o.subject}
        self.outstanding |= asked
        self.asked = max([self.asked, *asked.values()])

    def note(self, event: Evaluated | Lost) -> None:
        version = self.outstanding.pop(event.assignment_id, None)
        if version is None:
            return
        if isinstance(event, Evaluated):
            self.results.setdefault(version, []).append(event)
        if version not in self.outstanding.values():
            self._score(version, self.results.pop(version, []))

    def mean(self, count: int) -> float | None:
        """Returns the mean accuracy of the last `count` evaluated versions, None before there are so many."""
        last = list(self.recent)[-count:]
        return sum(last) / count if len(last) == count else None

    def reached(self, goal: Goal) -> bool:
        mean = self.mean(goal.accuracy_over)
        return goal.accuracy is not None and mean is not None and mean >= goal.accuracy

    def _score(self, version: int, results: Sequence[Evaluated]) -> None:
        accuracy = mean_accuracy(results)
        if accuracy is not None and version > self.version:
            self.version, self.accuracy = version, accuracy
            self.recent.append(accuracy)


@dataclass(slots=True)
class Tally:
    """What the goal is measured against."""

    rounds: RoundCount = field(default_factory=RoundCount)
    version: int = 0
    updates: int = 0
    bytes: int = 0
    started_s: float | None = None
    earlier_s: float = 0.0
    stop_reason: str | None = None
    scores: Scoreboard = field(default_factory=Scoreboard)
    nodes: NodeScores = field(default_factory=NodeScores)
    failures: dict[str, int] = field(default_factory=dict)
    last_failure: str = ""
    has_new_failure: bool = False

    @property
    def awaits_scores(self) -> bool:
        """Whether somebody evaluates, the global model or one of a device."""
        return bool(self.scores.outstanding or self.nodes.outstanding)

    def go_on(self, earlier: Earlier) -> None:
        """Counts on from what was counted before."""
        self.updates, self.bytes, self.earlier_s = earlier.updates, earlier.bytes, earlier.seconds

    def give(self, orders: Sequence[Order], now_s: float) -> None:
        self.scores.ask(orders)
        self.nodes.ask(orders)
        if self.started_s is None and (asked := {o.device_id for o in orders if isinstance(o, Assignment)}):
            self.started_s = now_s - self.earlier_s
            self.rounds.begin(len(asked))

    def note(self, event: Event) -> None:
        match event:
            case Update():
                self.bytes += event.metrics.bytes_up + event.metrics.bytes_down
                self.failures.clear()
            case Evaluated():
                self.bytes += event.bytes_up + event.bytes_down
                self._note_score(event)
            case Lost() if self._is_evaluation(event.assignment_id):
                self._note_score(event)
            case Lost():
                if event.outcome in {Outcome.FAILED, Outcome.REFUSED}:
                    self.failures[event.device_id] = self.failures.get(event.device_id, 0) + 1
                    self.last_failure = f"{event.device_id}: {event.reason}"
                    self.has_new_failure = True
            case Stop():
                self.stop_reason = event.reason

    def reached(self, goal: Goal, now_s: float) -> str | None:
        """Returns why the run is over, or None."""
        facts: tuple[tuple[str, float | None, float | None], ...] = (
            ("rounds", self.rounds.closed(self.version), goal.rounds),
            ("updates", self.updates, goal.updates),
            ("seconds", None if self.started_s is None else now_s - self.started_s, goal.seconds),
            ("bytes", self.bytes, goal.bytes),
            ("accuracy", self.scores.mean(goal.accuracy_over), goal.accuracy),
        )
        for name, value, limit in facts:
            if value is not None and limit is not None and value >= limit:
                return f"{name} reached {limit:g}"
        return self.stop_reason

    def next_wake_s(self, goal: Goal, until_s: float, *, is_over: bool) -> float:
        """Returns when to look again: at `until_s`, or earlier when the time of the run ends before."""
        if is_over or goal.seconds is None or self.started_s is None:
            return until_s
        return min(until_s, self.started_s + goal.seconds)

    def check_hope(self, view: FleetView, barred: Collection[str]) -> None:
        """Ends a run that no device can do, instead of asking for ever.

        Raises:
            RunFailedError: every trainer that is there fails again and again, and nobody brought an update; or those
                that are asked do, as often as if it had been everybody, and nobody is at work.
        """
        # Nothing else takes hope away, and a look at every device at every turn is too much for a large fleet.
        if not self.has_new_failure:
            return
        self.has_new_failure = False
        if not self.failures and not barred:  # nothing went wrong: no reason to look at everybody
            return
        trainers = [info.device_id for info in view.devices.values() if info.role == Role.TRAINER]
        counts = [self.failures.get(name, 0) for name in trainers]
        if trainers and all(n >= GIVE_UP_AFTER or name in barred for name, n in zip(trainers, counts, strict=True)):
            raise RunFailedError(
                f"no device can do this work, each failed {GIVE_UP_AFTER} times or is flagged; {self.last_failure}"
            )
        # Those that are never asked (`local`, a board that does not fit) never fail, and bring nothing either.
        if trainers and not view.busy and sum(counts) >= GIVE_UP_AFTER * len(trainers):
            raise RunFailedError(
                f"no device that is asked can do this work, {sum(counts)} tries failed in a row; {self.last_failure}"
            )

    def _is_evaluation(self, assignment_id: str) -> bool:
        return assignment_id in self.scores.outstanding or assignment_id in self.nodes.outstanding

    def _note_score(self, event: Evaluated | Lost) -> None:
        self.scores.note(event)
        self.nodes.note(event)
