"""Property inference: whether a board holds examples of a class, told from what is seen of its first round.

The attacker has examples of its own. It trains shadow boards on them from the model that the fleet gets, half of them
with the property, and a classifier on what is seen of these (Melis et al., Exploiting Unintended Feature Leakage in
Collaborative Learning, S&P 2019, section 5; Ganju et al., Property Inference Attacks on Fully Connected Neural
Networks, CCS 2018). As all boards start from the same weights, no neurons need to be brought into an order. The
classifier is a linear one, fitted in least squares with a penalty that leaving out each shadow in turn chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, derive_rng
from edgefl.simulation.attacks.observed_updates import Observer, UpdateSource, View, list_views
from edgefl.simulation.backends.partitioned_data import FleetData

MIN_TRIALS = 20
PENALTIES = tuple(10.0**power for power in range(-4, 3))
"""Penalties that are tried, in units of the mean square of what is seen."""
OTHERS = 10
"""Different boards for each place beside the one that is guessed."""
MAX_ENTRIES = 2**28
"""Most numbers of all that is seen together, 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyAudit:
    """How well a property of a board is told from what one view shows.

    Attributes:
        settings, seen_by, boards: of the view.
        examples: of each board.
        trials: number of boards that were guessed, half of them with the property; there were as many shadows.
        accuracy: share of right guesses, which is the balanced accuracy; guessing has 0.5.
        low, high: of its confidence interval.
    """

    settings: str
    seen_by: Observer
    boards: int
    examples: int
    trials: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """A share of a board's examples that is of a class; boards without the property have none of it."""

    class_number: int
    share: float


def audit_property(
    config: RunConfig,
    data: FleetData,
    requested: Property,
    *,
    num_examples: int | None = None,
    num_trials: int = 100,
    confidence: float = 0.95,
) -> list[PropertyAudit]:
    """Returns how well a property of boards is told, for each view of a run.

    Args:
        config: the run; it may have no protection.
        data: of its fleet; the attacker has half of the examples, the boards that are guessed the other half.
        requested: the property.
        num_examples: of a board; None for the median of the fleet.
        num_trials: boards that are guessed, an even number from 20, and as many shadows.
        confidence: of the interval, in (0, 1).

    Raises:
        ConfigError: the run cannot be attacked so, or a number is out of range.
        DataError: there are too few examples with and without the property.
        EdgeflError: a board failed.
    """
    if num_trials < MIN_TRIALS or num_trials % 2:
        raise ConfigError(f"property inference needs an even number of trials from {MIN_TRIALS}, got {num_trials}")
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence of an audit must be in (0, 1), got {confidence:g}")
    if not 0.0 < requested.share <= 1.0:
        raise ConfigError(f"the share of a class must be in (0, 1], got {requested.share:g}")
    size = num_examples or int(np.median([len(shard.train) for shard in data.shards]))
    rng = derive_rng(config.run.seed, "property")
    rows = rng.permutation(np.unique(np.concatenate([shard.train for shard in data.shards])))
    halves = [_Half.make(half, data.pool.targets, requested, size) for half in np.array_split(rows, 2)]
    found = []
    for view in list_views(config, len(data.shards)):
        has = rng.permutation(np.arange(num_trials) % 2 == 0)
        shadows, guessed = (_observe(view, data, half, has, rng) for half in halves)
        accuracy = float((classify(shadows, has, guessed) == has).mean())
        low, high = compute_interval(accuracy, num_trials, confidence)
        found.append(
            PropertyAudit(
                settings=view.settings,
                seen_by=view.seen_by,
                boards=view.boards,
                examples=size,
                trials=num_trials,
                accuracy=accuracy,
                low=low,
                high=high,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """Examples of which boards are made: rows of the class, all others, and how many of each a board gets."""

    of_class: Array
    others: Array
    num_of_class: int
    size: int

    @classmethod
    def make(cls, rows: Array, targets: Array, requested: Property, size: int) -> _Half:
        """Raises a `DataError` where no such boards can be made."""
        if targets.ndim != 1 or targets.dtype.kind not in "iu":
            raise DataError("property inference needs one class for each example")
        is_of_class = targets[rows] == requested.class_number
        half = cls(
            of_class=rows[is_of_class],
            others=rows[~is_of_class],
            num_of_class=max(1, round(requested.share * size)),
            size=size,
        )
        if len(half.of_class) < half.num_of_class or len(half.others) < size:
            raise DataError(
                f"half of the examples has {len(half.of_class)} of class {requested.class_number} and "
                f"{len(half.others)} others; boards of {size} examples need {half.num_of_class} and {size}: take "
                "fewer examples for a board, a smaller share or another class"
            )
        return half

    def draw(self, rng: np.random.Generator, *, has_property: bool) -> Array:
        """Returns the rows of a board with or without the property."""
        number = self.num_of_class if has_property else 0
        parts = (rng.choice(self.of_class, number, replace=False), rng.choice(self.others, self.size - number, False))
        return np.concatenate(parts)

    def draw_any(self, rng: np.random.Generator) -> Array:
        """Returns the rows of another board, of all examples."""
        return rng.choice(np.concatenate([self.of_class, self.others]), self.size, replace=False)


def _observe(view: View, data: FleetData, half: _Half, has: Array, rng: np.random.Generator) -> Array:
    """Returns [trials, parameters], what is seen of a round with each board; the other boards of it are any."""
    targets = [half.draw(rng, has_property=bool(value)) for value in has]
    others = [half.draw_any(rng) for _ in range(min(len(has), OTHERS) * (view.boards - 1))]
    source = UpdateSource(view.config, data.pool, [*targets, *others])
    size = sum(array.size for array in source.model.values())
    if size * (len(targets) + len(others)) > MAX_ENTRIES:
        raise ConfigError(
            f"{len(targets) + len(others)} updates of {size} parameters do not fit into memory; take fewer trials"
        )
    around = [source.train(number) for number in range(len(targets), len(targets) + len(others))]
    seen = np.empty((len(targets), size), np.float32)
    for number in range(len(targets)):
        chosen = rng.permutation(len(around))[: view.boards - 1]
        tensors = source.combine([source.train(number), *(around[index] for index in chosen)], view.seen_by)
        flat = np.concatenate([np.ravel(tensors[name]) for name in source.model if name in tensors])
        seen[number] = np.pad(flat, (0, size - len(flat)))
    return seen


def classify(shadows: Array, has: Array, seen: Array) -> Array:
    """Returns [n] guesses of whether boards have a property.

    Args:
        shadows: [m, parameters], what was seen of boards of which that is known.
        has: [m] whether each has it, half of them.
        seen: [n, parameters], what was seen of the boards to be guessed.

    Source: ridge regression of ±1 in its dual form; the errors with one shadow left out are those of Allen's PRESS.
    """
    mean = shadows.mean(axis=0)
    centred, labels = (shadows - mean).astype(np.float64), np.where(has, 1.0, -1.0)
    products = centred @ centred.T
    scale = float(np.trace(products)) / len(shadows)
    if not scale > 0.0:
        return np.zeros(len(seen), np.bool_)
    candidates: list[tuple[float, Array]] = []
    for penalty in PENALTIES:
        inverse = np.linalg.inv(products + penalty * scale * np.eye(len(shadows)))
        weights = inverse @ labels
        left_out = weights / np.diag(inverse)  # label less the prediction without it
        candidates.append((float(np.minimum(np.square(left_out), 4.0).mean()), weights))
    _, weights = min(candidates, key=lambda candidate: candidate[0])
    guesses: Array = (seen - mean) @ (centred.T @ weights) > 0.0
    return guesses


def compute_interval(share: float, number: int, confidence: float) -> tuple[float, float]:
    """Returns the bounds of a share of so many trials.

    Source: Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 1927.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre, divisor = share + z**2 / (2 * number), 1 + z**2 / number
    reach = z * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return max(0.0, (centre - reach) / divisor), min(1.0, (centre + reach) / divisor)
