"""Selection of devices by utility: those whose examples have a high loss and that answer in time, and some new ones.

The utility of a device in round R is, with its n examples, the round L that it was last selected for, its duration t,
the preferred duration T, and a penalty p:

    U = n sqrt(mean of squared losses)    clipped at a quantile of all devices, as a part of that
    U + sqrt(0.1 log R / L)               times (T / t)^p where t > T

The first devices by it are selected, at random in proportion to it among those near the last of them; and a share of
devices that were never selected, which falls from round to round.

Source: Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, OSDI 2021, section 4 and
algorithm 1.

Differs from the paper: a device reports the mean of its losses, in place of their squares'; those that were never
selected are equally likely; T stays as it is set, or is the median duration. The quantile is low enough for twice as
many devices as a round selects to be at or above it, down to the median. A device that brings no update keeps its
utility; the time that the round waited for it counts as its duration, divided by the rounds since.

Without rounds, one device is selected whenever another is done, and a round is as many assignments as there were at
first. An update that takes k times as long as the median is about k times as stale, so that (T / t)^p is the penalty
of Pisces (Jiang et al., Pisces: Efficient Federated Learning via Guided Asynchronous Training, SoCC 2022), but for
its 1 + staleness, and devices faster than T, which lose nothing here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from edgefl.core.config import SelectionSection
from edgefl.core.types import Array, Update

MAX_UTILITY = 1e12
CUTOFF = 0.95
"""Part of the utility of the last device that is selected by it, from which on others may be in its place."""
STALENESS_WEIGHT = 0.1


@dataclass(slots=True, kw_only=True)
class SelectionRecord:
    """What is known of a device that was selected.

    Attributes:
        num_selected: how often.
        last_round: the newest round that it was selected for, from 1.
        utility: of its examples at its last update, 0 to `MAX_UTILITY`.
        duration_s: from its selection to its last update, by the coordinator's clock; None before the first.
        silent_s: how long the round waited that it was last selected for, where it brought no update.
    """

    num_selected: int = 0
    last_round: int = 1
    utility: float = 0.0
    duration_s: float | None = None
    silent_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RoundAnswers:
    """Whom an open round asked, and what came back: the records change when it closes.

    Attributes:
        asked_s: assignment id -> when it was made.
        devices: device -> when it was asked first.
        answers: device -> utility and duration of its update.
        now_s: when the round was looked at last.
    """

    asked_s: dict[str, float] = field(default_factory=dict)
    devices: dict[str, float] = field(default_factory=dict)
    answers: dict[str, tuple[float, float]] = field(default_factory=dict)
    now_s: float = 0.0

    def add_assignment(self, assignment_id: str, device_id: str, now_s: float) -> None:
        self.asked_s[assignment_id] = now_s
        self.devices.setdefault(device_id, now_s)

    def add_update(self, device_id: str, update: Update) -> None:
        """Adds an update that counts."""
        if (asked_s := self.asked_s.get(update.assignment_id)) is not None:
            self.answers[device_id] = measure_update(update, asked_s)


def measure_update(update: Update, asked_s: float) -> tuple[float, float]:
    """Returns the utility and duration of an update; a loss that is no number, or below 0, is 0."""
    loss = max(0.0, update.metrics.loss or 0.0)
    utility = max(0, update.metrics.num_examples) * loss if math.isfinite(loss) else 0.0
    # The clock of a restarted coordinator may be behind.
    return min(MAX_UTILITY, utility), max(0.0, update.received_s - asked_s)


def record_round(records: dict[str, SelectionRecord], closing: RoundAnswers, round_number: int) -> None:
    """Records a round that is closed."""
    for device_id, asked_s in closing.devices.items():
        record = records.setdefault(device_id, SelectionRecord())
        record.num_selected, record.last_round = record.num_selected + 1, round_number
        if device_id in closing.answers:
            (record.utility, record.duration_s), record.silent_s = closing.answers[device_id], 0.0
        else:
            record.silent_s = max(0.0, closing.now_s - asked_s)


def select_by_utility(  # noqa: PLR0913 one keyword for each thing that it depends on
    records: Mapping[str, SelectionRecord],
    available: Sequence[str],
    count: int,
    *,
    settings: SelectionSection,
    round_number: int,
    rng: Generator,
    num_at_work: int | None = None,
) -> list[str]:
    """Returns `count` of the available devices, in their order.

    Args:
        records: of devices that were selected before, available or not.
        available: at least `count`.
        count: how many, at least 1.
        settings: of the rule.
        round_number: of the round, from 1.
        rng: of this selection.
        num_at_work: how many are at work together, where they are not selected together; None for `count`.
    """
    round_s = _find_round_s(records, settings)

    def is_new(device_id: str) -> bool:
        record = records.get(device_id)
        return record is None or (record.duration_s is None and _compute_wait_s(record, round_number) <= round_s)

    new = [device_id for device_id in available if is_new(device_id)]
    known = [device_id for device_id in available if not is_new(device_id)]
    share = max(settings.min_exploration, settings.exploration * settings.exploration_decay ** (round_number - 1))
    num_new = min(len(new), max(count - len(known), int(share * count + rng.random())))
    selected = {new[place] for place in rng.permutation(len(new))[:num_new]}
    if count > num_new:
        scores = compute_scores(records, known, num_at_work or count, settings=settings, round_number=round_number)
        selected |= {known[place] for place in _draw(scores, count - num_new, rng)}
    return [device_id for device_id in available if device_id in selected]


def compute_scores(
    records: Mapping[str, SelectionRecord],
    devices: Sequence[str],
    count: int,
    *,
    settings: SelectionSection,
    round_number: int,
) -> Array:
    """Returns the utility of devices that have a record, [devices] from 0 on; arguments as of `select_by_utility`."""
    largest = _find_largest([record.utility for record in records.values() if record.utility], settings.clip, count)
    round_s = _find_round_s(records, settings)
    most_selected = max(1, *(record.num_selected for record in records.values()))
    scores = np.zeros(len(devices))
    for place, record in enumerate(records[device_id] for device_id in devices):
        score = min(1.0, record.utility / largest)
        score += math.sqrt(STALENESS_WEIGHT * math.log(round_number) / record.last_round)
        if (wait_s := _compute_wait_s(record, round_number)) > round_s:
            score *= (round_s / wait_s) ** settings.penalty
        seldom = 1.0 - record.num_selected / most_selected
        scores[place] = (1.0 - settings.fairness) * score + settings.fairness * seldom
    return scores


def _find_round_s(records: Mapping[str, SelectionRecord], settings: SelectionSection) -> float:
    """Returns the preferred duration of a round."""
    durations = [record.duration_s for record in records.values() if record.duration_s is not None]
    return settings.round_s or (statistics.median(durations) if durations else math.inf)


def _compute_wait_s(record: SelectionRecord, round_number: int) -> float:
    """Returns the duration of a device: of its last update, or of a silence since, divided by the rounds since."""
    return max(record.duration_s or 0.0, record.silent_s / max(1, round_number - record.last_round))


def _find_largest(utilities: Sequence[float], clip: float, count: int) -> float:
    """Returns what utilities are clipped at: one that 2 `count` of them reach, or a half; the largest with clip = 1.

    So devices that claim any loss are no likelier than others, unless they are more than 2 `count`.
    """
    if not utilities:
        return 1.0
    part = clip if clip == 1.0 else min(clip, max(0.5, 1.0 - 2 * count / len(utilities)))
    return float(np.quantile(utilities, part, method="lower"))


def _draw(scores: Array, count: int, rng: Generator) -> list[int]:
    """Returns the places of `count` scores: at random in proportion, among the largest and those near the last."""
    cutoff = CUTOFF * np.sort(scores)[-count]
    pool = np.flatnonzero(scores >= cutoff)
    # The largest of these keys are a sample without replacement in proportion (Gumbel); scores of 0 come last.
    keys = np.log(np.maximum(scores[pool], np.finfo(np.float64).tiny)) + rng.gumbel(size=len(pool))
    places: list[int] = pool[np.argsort(-keys, kind="stable")[:count]].tolist()
    return places
