"""Selection of devices by utility: those whose examples have a high loss and that answer in time, and some new ones.

The utility of a device in round R is, with its n examples, the round L that it was last selected for, its duration t,
the preferred duration T, and a penalty p:

    U = n sqrt(mean of squared losses)    clipped at a quantile of all devices, as a part of the largest
    U + sqrt(0.1 log R / L)               times (T / t)^p where t > T

The first devices by it are selected, at random in proportion to it among those near the last of them; and a share of
devices that were never selected, which falls from round to round.

Source: Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, OSDI 2021, section 4 and
algorithm 1.

Differs from the paper: a device reports the mean of its losses, in place of their squares'; those that were never
selected are equally likely; T stays as it is set, or is the median duration. A device that was selected and brings
no update has no utility until it brings one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
    """

    num_selected: int = 0
    last_round: int = 1
    utility: float = 0.0
    duration_s: float | None = None


def record_selected(records: dict[str, SelectionRecord], device_id: str, round_number: int) -> None:
    """Records that a device is asked in a round."""
    record = records.setdefault(device_id, SelectionRecord())
    record.num_selected, record.last_round = record.num_selected + 1, round_number


def record_update(record: SelectionRecord, update: Update, asked_s: float) -> None:
    """Records an update that counts, to an instruction of that time; a loss that is no number is 0."""
    loss = abs(update.metrics.loss or 0.0)
    record.utility = min(MAX_UTILITY, max(0, update.metrics.num_examples) * loss) if math.isfinite(loss) else 0.0
    record.duration_s = max(0.0, update.received_s - asked_s)  # the clock of a restarted coordinator may be behind


def record_silent(records: Mapping[str, SelectionRecord], devices: Collection[str]) -> None:
    """Records that devices brought no update to a round that is closed."""
    for device_id in records.keys() & devices:
        records[device_id].utility = 0.0


def select_by_utility(
    records: Mapping[str, SelectionRecord],
    available: Sequence[str],
    count: int,
    *,
    settings: SelectionSection,
    round_number: int,
    rng: Generator,
) -> list[str]:
    """Returns `count` of the available devices, in their order.

    Args:
        records: of devices that were selected before, available or not.
        available: at least `count`.
        count: how many, at least 1.
        settings: of the rule.
        round_number: of the round, from 1.
        rng: of this selection.
    """
    known = [device_id for device_id in available if device_id in records]
    new = [device_id for device_id in available if device_id not in records]
    share = max(settings.min_exploration, settings.exploration * settings.exploration_decay ** (round_number - 1))
    num_new = min(len(new), max(count - len(known), int(share * count + rng.random())))
    selected = {new[place] for place in rng.permutation(len(new))[:num_new]}
    if count > num_new:
        scores = compute_scores(records, known, settings=settings, round_number=round_number)
        selected |= {known[place] for place in _draw(scores, count - num_new, rng)}
    return [device_id for device_id in available if device_id in selected]


def compute_scores(
    records: Mapping[str, SelectionRecord], devices: Sequence[str], *, settings: SelectionSection, round_number: int
) -> Array:
    """Returns the utility of devices that have a record, [devices] from 0 on; arguments as of `select_by_utility`."""
    largest = _find_largest([record.utility for record in records.values() if record.utility], settings.clip)
    durations = [record.duration_s for record in records.values() if record.duration_s is not None]
    round_s = settings.round_s or (statistics.median(durations) if durations else math.inf)
    most_selected = max(1, *(record.num_selected for record in records.values()))
    scores = np.zeros(len(devices))
    for place, record in enumerate(records[device_id] for device_id in devices):
        score = min(1.0, record.utility / largest)
        score += math.sqrt(STALENESS_WEIGHT * math.log(round_number) / record.last_round)
        if record.duration_s is not None and record.duration_s > round_s:
            score *= (round_s / record.duration_s) ** settings.penalty
        seldom = 1.0 - record.num_selected / most_selected
        scores[place] = (1.0 - settings.fairness) * score + settings.fairness * seldom
    return scores


def _find_largest(utilities: Sequence[float], clip: float) -> float:
    """Returns what utilities are clipped at: one of them, below 1 never the largest of several."""
    return float(np.quantile(utilities, clip, method="lower")) if utilities else 1.0


def _draw(scores: Array, count: int, rng: Generator) -> list[int]:
    """Returns the places of `count` scores: at random in proportion, among the largest and those near the last."""
    cutoff = CUTOFF * np.sort(scores)[-count]
    pool = np.flatnonzero(scores >= cutoff)
    # The largest of these keys are a sample without replacement in proportion (Gumbel); scores of 0 come last.
    keys = np.log(np.maximum(scores[pool], np.finfo(np.float64).tiny)) + rng.gumbel(size=len(pool))
    places: list[int] = pool[np.argsort(-keys, kind="stable")[:count]].tolist()
    return places
