"""Gradient inversion: the examples behind an update of a few, by linear algebra and by matching gradients.

Where the first layer is fully connected with a bias, its gradient is D'[X 1]: D [n, outputs] has the slopes of the
loss by the layer's sums, X [n, features] the examples. So X lies in the span of its n strongest right singular
vectors, and one example is a quotient (Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic
Encryption, TIFS 2018, section III; the span: Dimitrov et al., SPEAR, NeurIPS 2024, theorem 3.1). What of them the
examples are, and all where the first layer is another, is what makes the gradient most like the one that was seen
(Zhu et al., Deep Leakage from Gradients, NeurIPS 2019; by the cosine and Adam: Geiping et al., Inverting Gradients,
NeurIPS 2020).

Differs from the papers: the attacker is told the targets; there is no prior of what pictures look like; values are
cut to the range of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.types import Array, Learner, derive_rng
from edgefl.engine.assembly.build import make_run_task
from edgefl.simulation.attacks.observed_updates import Observer, UpdateSource, View, list_views
from edgefl.simulation.backends.partitioned_data import FleetData
from edgefl.tasks.learners.gradient_matching import make_matcher
from edgefl.tasks.preparation import call_prepare

MAX_EXAMPLES = 8
"""Most examples of a board that is attacked."""
MAX_RECONSTRUCTED = 64
"""Most examples that are looked for in one update; of a sum of more the others are left."""
RECOVERED = 0.1
"""Most error of an example that counts as recovered."""
NUM_STEPS, NUM_STARTS = 200, 3
LEARNING_RATE, ADAM_RATES = 0.1, (0.9, 0.999)
CLOSE = 1e-10
"""Distance of gradients below which nothing is left to match."""

Distance = Callable[[Array], tuple[float, Array]]
"""Point -> what is to be small, and its slope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InversionAudit:
    """What gradient inversion has found in what one view shows.

    Attributes:
        settings, seen_by, boards: of the view.
        examples: of each board.
        trials: number of boards that were attacked.
        error: median over their examples of the squared distance to the nearest reconstruction, over that to the
            mean of all examples: 0 is the example itself, 1 is no better than the mean.
        baseline: the same of as many other examples in place of reconstructions.
        recovered: share of the examples with an error of at most `RECOVERED`.
    """

    settings: str
    seen_by: Observer
    boards: int
    examples: int
    trials: int
    error: float
    baseline: float
    recovered: float


def audit_inversion(
    config: RunConfig, data: FleetData, *, num_examples: int = 1, num_trials: int = 10
) -> list[InversionAudit]:
    """Returns how well examples can be reconstructed, for each view of a run.

    Args:
        config: the run; it may have no protection.
        data: of its fleet. Boards, those that are attacked and all others, hold some examples of one of its devices.
        num_examples: of a board, 1 to 8.
        num_trials: boards that are attacked, at least 1.

    Raises:
        ConfigError: the run cannot be attacked so.
        DataError: no device holds so many examples.
        TaskError: the model's features cannot be reconstructed.
        EdgeflError: a board failed.
    """
    if not 1 <= num_examples <= MAX_EXAMPLES:
        raise ConfigError(f"gradient inversion is of 1 to {MAX_EXAMPLES} examples, got {num_examples}")
    if num_trials < 1:
        raise ConfigError(f"gradient inversion attacks at least 1 board, got {num_trials}")
    shards = [shard.train for shard in data.shards if len(shard.train) >= num_examples]
    if not shards:
        raise DataError(f"no device holds {num_examples} examples to train on")
    learner = make_run_task(config).learner(accelerator="cpu", threads=1)
    features = _compute_features(learner, data)
    return [
        _audit_view(view, data, shards, learner, features, num_examples=num_examples, num_trials=num_trials)
        for view in list_views(config, len(data.shards))
    ]


def _compute_features(learner: Learner, data: FleetData) -> Array:
    """Returns [rows, ...] features of all examples.

    Raises:
        TaskError: they are not one array of numbers that can be moved.
    """
    prepare = getattr(learner, "prepare", None)
    features = None if prepare is None else call_prepare(prepare, data.pool.inputs)
    if not isinstance(features, np.ndarray) or features.dtype.kind != "f":
        raise TaskError(
            "gradient inversion needs a model with one array of numbers as input, and a learner's `prepare`"
        )
    return features


def _audit_view(  # noqa: PLR0913 the last two by name
    view: View,
    data: FleetData,
    shards: Sequence[Array],
    learner: Learner,
    features: Array,
    *,
    num_examples: int,
    num_trials: int,
) -> InversionAudit:
    rng = derive_rng(view.config.run.seed, "inversion")
    groups = [
        [rng.choice(shards[int(rng.integers(len(shards)))], num_examples, replace=False) for _ in range(view.boards)]
        for _ in range(num_trials)
    ]
    rows = np.unique(np.concatenate(shards))
    errors, baselines = [], []
    for group in groups:
        source = UpdateSource(view.config, data.pool, group)
        seen = source.combine([source.train(number) for number in range(view.boards)], view.seen_by)
        members = np.concatenate(group)
        learner.load(source.model)
        found = reconstruct(learner, seen, data.pool.targets[members[:MAX_RECONSTRUCTED]], features[rows], rng)
        others = rng.choice(_list_others(rows, members), len(found))
        errors.append(compute_errors(features[group[0]], found, features[rows]))
        baselines.append(compute_errors(features[group[0]], features[others], features[rows]))
    error = np.concatenate(errors)
    return InversionAudit(
        settings=view.settings,
        seen_by=view.seen_by,
        boards=view.boards,
        examples=num_examples,
        trials=num_trials,
        error=float(np.median(error)),
        baseline=float(np.median(np.concatenate(baselines))),
        recovered=float((error <= RECOVERED).mean()),
    )


def _list_others(rows: Array, members: Array) -> Array:
    """Returns the rows that are no members'; a `DataError` says that there are none."""
    others: Array = np.setdiff1d(rows, members)
    if not len(others):
        raise DataError(f"all {len(rows)} examples are attacked; gradient inversion needs others to compare with")
    return others


def compute_errors(real: Array, found: Array, pool: Array) -> Array:
    """Returns [n] of real examples: squared distance to the nearest that was found, over that to the pool's mean."""
    flat, guesses = real.reshape(len(real), -1).astype(float), found.reshape(len(found), -1).astype(float)
    mean = pool.reshape(len(pool), -1).mean(axis=0, dtype=float)
    nearest = np.square(flat[:, None] - guesses[None]).sum(axis=2).min(axis=1)
    errors: Array = nearest / np.maximum(np.finfo(float).tiny, np.square(flat - mean).sum(axis=1))
    return errors


def reconstruct(
    learner: Learner, seen: Mapping[str, Array], targets: Array, pool: Array, rng: np.random.Generator
) -> Array:
    """Returns [n, ...] guesses of the features of a batch from its update.

    Args:
        learner: with the model that the board got.
        seen: the update, or a mean of several; what is exactly 0 was not sent.
        targets: [n, ...] of the batch.
        pool: [m, ...] features of examples whose range, mean and deviation the attacker knows.
        rng: of the first guesses.

    Raises:
        TaskError: gradients of such a learner cannot be matched.
    """
    low, high = float(pool.min()), float(pool.max())
    layer = _find_dense(learner, seen, pool[0].size)
    shape = len(targets), *pool.shape[1:]
    if not any(np.any(array) for array in seen.values()):
        return np.broadcast_to(pool.mean(axis=0, dtype=float), shape)
    if layer is not None and len(targets) == 1:
        return np.clip(divide_by_bias(*layer), low, high).reshape(shape)
    matcher = make_matcher(learner, {name: -np.asarray(array) for name, array in seen.items()}, targets)
    scale = float(pool.std(dtype=float)) or 1.0
    if layer is None:
        centre = float(pool.mean(dtype=float))
        return np.clip(_match(matcher.compute, centre, scale, shape, rng), low, high)
    origin, directions = span_examples(*layer, len(targets))
    scale *= float(np.sqrt(pool[0].size / max(1, len(directions))))

    def compute(weights: Array) -> tuple[float, Array]:
        distance, slope = matcher.compute(origin + weights @ directions)
        return distance, slope @ directions.T

    best = _match(compute, 0.0, scale, (len(targets), len(directions)), rng)
    guesses: Array = np.clip(origin + best @ directions, low, high).reshape(shape)
    return guesses


def _find_dense(learner: Learner, seen: Mapping[str, Array], size: int) -> tuple[Array, Array] | None:
    """Returns what was seen of weight [outputs, size] and bias of a first layer that is fully connected."""
    names = list(learner.parameters)[:2]
    if len(names) < 2 or not set(names) <= seen.keys():
        return None
    weight, bias = (np.asarray(seen[name], float) for name in names)
    return (weight, bias) if weight.ndim == 2 and weight.shape[1] == size and bias.shape == weight.shape[:1] else None


def divide_by_bias(weight: Array, bias: Array) -> Array:
    """Returns [features] of one example: quotients of a dense layer's gradients, in least squares over its outputs.

    Args:
        weight: [outputs, features] gradient; what is 0 was not sent.
        bias: [outputs] likewise.
    """
    total = np.square(bias) @ (weight != 0.0)
    quotients: Array = np.divide(bias @ weight, total, out=np.zeros_like(total), where=total > 0.0)
    return quotients


def span_examples(weight: Array, bias: Array, number: int) -> tuple[Array, Array]:
    """Returns a point [features] and directions [k, features], k < number, in whose span the examples lie.

    Args:
        weight: [outputs, features] gradient of a dense layer.
        bias: [outputs] likewise.
        number: of examples.
    """
    rows = np.linalg.svd(np.column_stack([weight, bias]), full_matrices=False)[2][:number]
    last = rows[:, -1]
    # Weights a with a'last = 1: for the bias each example is a 1.
    origin: Array = last / max(np.finfo(float).tiny, float(last @ last)) @ rows[:, :-1]
    others = np.linalg.svd(last[None])[2][1:]
    return origin, others @ rows[:, :-1]


def _match(compute: Distance, centre: float, scale: float, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Returns the point of least distance that Adam finds from some starts."""
    best, least = np.full(shape, centre), np.inf
    for _ in range(NUM_STARTS):
        point, distance = _descend(compute, centre + scale * rng.standard_normal(shape), scale)
        if distance < least:
            best, least = point, distance
        if least < CLOSE:
            break
    return best


def _descend(compute: Distance, point: Array, scale: float) -> tuple[Array, float]:
    """Returns the best point on the way of Adam, whose rate falls along a quarter of a cosine, and its distance."""
    first, second, best, least = np.zeros_like(point), np.zeros_like(point), point, np.inf
    for step in range(NUM_STEPS):
        distance, slope = compute(point)
        if distance < least:
            best, least = point, distance
        if least < CLOSE or not np.isfinite(slope).all():
            break
        first = ADAM_RATES[0] * first + (1.0 - ADAM_RATES[0]) * slope
        second = ADAM_RATES[1] * second + (1.0 - ADAM_RATES[1]) * slope**2
        mean, variance = first / (1.0 - ADAM_RATES[0] ** (step + 1)), second / (1.0 - ADAM_RATES[1] ** (step + 1))
        rate = LEARNING_RATE * scale * np.cos(np.pi / 2 * step / NUM_STEPS)
        point = point - rate * mean / (np.sqrt(variance) + 1e-12 * scale)
    return best, least
