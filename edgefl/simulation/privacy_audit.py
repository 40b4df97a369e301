"""Audit of a run's privacy: canaries in a simulated run, and what their traces in the model prove about ε.

Each canary takes part by the toss of a coin. Whoever sees the first and the last model guesses which did: more right
guesses than ε allows prove that ε is larger. Where devices are private a canary is a device that sends a random
direction, and its trace is the model's displacement along it; where examples are, it is an example with a wrong
label, and its trace is that the model's loss on it is low. LiRA takes examples as they are, and compares the model's
confidence with that of shadow models, of runs with other tosses.

Sources: Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, theorem 5.2; directions
as canaries: Andrew et al., One-shot Empirical Privacy Estimation for Federated Learning, ICLR 2024; LiRA: Carlini et
al., Membership Inference Attacks From First Principles, S&P 2022, Algorithm 1 with one variance for all examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edgefl.core.config import PrivacyUnit, RunConfig
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import (
    Array,
    ModelSpec,
    TensorKind,
    TrainInstruction,
    derive_rng,
)
from edgefl.engine.assembly.build import build_run, make_run_task
from edgefl.engine.assembly.normalisation import should_find_scales
from edgefl.simulation.backends.partitioned_data import FleetData, ShardRows
from edgefl.simulation.backends.trainer import SimulatedTrainer, TaskSpec
from edgefl.simulation.history_recorder import OnChange
from edgefl.simulation.simulated_run import make_device_names, simulate_with_data
from edgefl.storage.checkpoints import load_model_file

DEFAULT_DELTA = 1e-5
"""δ at which a run is audited that promises nothing."""
SHARES_GUESSED = (0.125, 0.25, 0.5, 1.0)
"""Parts of the canaries that are guessed; the strongest bound counts, at a confidence that is shared between them."""
MAX_EPSILON = 64.0
"""Highest bound that is looked for; so many right guesses would need 10²⁷ canaries."""
MIN_SHADOWS = 4
_HALVINGS = 30
MIN_LOSS, MAX_LOSS = 1e-9, 50.0
"""Cross-entropies between which confidences are compared."""
MIN_VARIANCE = 1e-9
_SUM_TOLERANCE = 1e-3
MAX_ENTRIES = 2**28
"""Most numbers of all directions together, 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyAudit:
    """What an audit has found.

    Attributes:
        unit: what the canaries are.
        canaries, included: how many there were, and how many of them took part.
        guesses, correct: of the bound: how many were guessed, and how many rightly.
        auc: area under the ROC curve of the canaries' scores; 0.5 where they say nothing.
        epsilon_lower: ε is at least this, with probability `confidence`; 0 where nothing is proven.
        epsilon_promised: of the run file; None where it promises nothing.
        delta: δ of both.
        confidence: of the bound.
        run_id: of the simulated run in the history.
        shadows: number of shadow models of LiRA; 0 for canaries.
    """

    unit: PrivacyUnit
    canaries: int
    included: int
    guesses: int
    correct: int
    auc: float
    epsilon_lower: float
    epsilon_promised: float | None
    delta: float
    confidence: float
    run_id: str
    shadows: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether the bound refutes the promise."""
        return self.epsilon_promised is not None and self.epsilon_lower > self.epsilon_promised


def audit_privacy(  # noqa: PLR0913 the last four by name
    config: RunConfig,
    data: FleetData,
    folder: Path,
    *,
    unit: PrivacyUnit | None = None,
    num_canaries: int = 100,
    confidence: float = 0.95,
    shadows: int = 0,
    on_change: OnChange | None = None,
) -> PrivacyAudit:
    """Runs a simulation with canaries and returns what they prove.

    Args:
        config: the run; it may have no `[privacy]`.
        data: of its fleet, in which the canaries are planted.
        folder: of the history.
        unit: what is audited; the run file's, or devices where it has none.
        num_canaries: how many may take part, at least 8.
        confidence: in (0, 1).
        shadows: runs of LiRA beside the one that is audited, for examples as they are; 0 for canaries.
        on_change: called with the run's progress.

    Raises:
        ConfigError: the run cannot be audited so.
        DataError: the data is too small, or has no classes to be wrong about.
        EdgeflError: the run failed.
    """
    if num_canaries < 8:
        raise ConfigError(f"an audit needs at least 8 canaries, got {num_canaries}")
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence of an audit must be in (0, 1), got {confidence:g}")
    if should_find_scales(config):
        raise ConfigError('an audit finds no means and scales; leave task.normalise = "fleet" out')
    unit = unit or config.privacy.unit or ("example" if shadows else "device")
    if shadows and unit != "example":
        raise ConfigError('shadow models are of examples; leave them out, or take the unit "example"')
    if 0 < shadows < MIN_SHADOWS:
        raise ConfigError(f"LiRA needs at least {MIN_SHADOWS} shadow models, got {shadows}")
    is_included = derive_rng(config.run.seed, "canaries").random(num_canaries) < 0.5
    audit = _audit_devices if unit == "device" else _audit_examples
    if shadows:
        audit = partial(_audit_members, num_shadows=shadows)
    scores, run_id = audit(config, data, folder, is_included, on_change)
    delta = config.privacy.delta if config.privacy.delta is not None else DEFAULT_DELTA
    guesses, correct, lower = find_strongest_bound(scores, is_included, delta, confidence)
    return PrivacyAudit(
        unit=unit,
        canaries=num_canaries,
        included=int(is_included.sum()),
        guesses=guesses,
        correct=correct,
        auc=compute_auc(scores, is_included),
        epsilon_lower=lower,
        epsilon_promised=config.privacy.epsilon if unit == config.privacy.unit else None,
        delta=delta,
        confidence=confidence,
        run_id=run_id,
        shadows=shadows,
    )


def find_strongest_bound(
    scores: Array, is_included: Array, delta: float, confidence: float
) -> tuple[int, int, float]:
    """Returns guesses, right ones, and the strongest lower bound of ε.

    Those with the highest scores are guessed to have taken part, as many with the lowest not to have.

    Args:
        scores: [n] of the canaries, higher where one seems to have taken part; NaN counts as lowest.
        is_included: [n] whether it did.
        delta: δ of the bound.
        confidence: of the bound.
    """
    order = np.argsort(np.nan_to_num(scores, nan=-np.inf), kind="stable")
    halves = sorted({max(1, int(share * len(scores)) // 2) for share in SHARES_GUESSED})
    p_value = (1.0 - confidence) / len(halves)
    found = []
    for half in halves:
        correct = int(is_included[order[-half:]].sum() + (~is_included[order[:half]]).sum())
        found.append((2 * half, correct, bound_epsilon(len(scores), 2 * half, correct, delta, p_value)))
    return max(found, key=lambda bound: bound[2])


def bound_epsilon(num_canaries: int, guesses: int, correct: int, delta: float, p_value: float) -> float:
    """Returns the largest ε that so many right guesses refute; 0 for none.

    Args:
        num_canaries: each took part with probability 1/2, by itself.
        guesses: how many were guessed.
        correct: how many rightly.
        delta: δ of the promise that is refuted.
        p_value: most probability of so many right guesses where the promise holds.
    """
    if compute_p_value(num_canaries, guesses, correct, 0.0, delta) > p_value:
        return 0.0
    low, high = 0.0, MAX_EPSILON
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if compute_p_value(num_canaries, guesses, correct, middle, delta) <= p_value:
            low = middle
        else:
            high = middle
    return low


def compute_p_value(num_canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Returns the most probability of at least so many right guesses under (ε, δ)-differential privacy."""
    density = _compute_binomial(guesses, 1.0 / (1.0 + math.exp(-epsilon)))
    at_least = float(density[correct:].sum())
    below = np.cumsum(density[:correct][::-1])  # [i - 1] = P[correct > X >= correct - i]
    slope = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, at_least + 2.0 * num_canaries * delta * slope)


def _compute_binomial(number: int, probability: float) -> Array:
    """Returns [number + 1] probabilities of the binomial distribution."""
    counts = range(number + 1)
    log_choose = np.array(
        [math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1) for k in counts]
    )
    k = np.arange(number + 1)
    log_miss = math.log1p(-probability) if probability < 1.0 else -math.inf
    with np.errstate(invalid="ignore"):  # 0 times infinity
        misses = np.where(k < number, (number - k) * log_miss, 0.0)
    density: Array = np.exp(log_choose + k * math.log(probability) + misses)
    return density


def compute_auc(scores: Array, is_included: Array) -> float:
    """Returns the area under the ROC curve, ties as one half; 0.5 where all or none took part."""
    above, below = scores[is_included], np.sort(scores[~is_included])
    if not len(above) or not len(below):
        return 0.5
    lower, upper = (np.searchsorted(below, above, side) for side in ("left", "right"))
    return float((lower + upper).mean() / (2 * len(below)))


class CanaryTrainer(SimulatedTrainer):
    """Trains as ever, but that canaries send a direction of their own, as long as `clip` or as what they trained."""

    def __init__(
        self,
        task_spec: TaskSpec,
        data: FleetData,
        shard_indices: Mapping[str, int],
        *,
        canaries: Mapping[str, int],
        shapes: ModelSpec,
        clip: float | None,
    ) -> None:
        super().__init__(task_spec, data, shard_indices)
        self._canaries, self._shapes, self._clip, self._seed = canaries, shapes, clip, task_spec.seed

    def change_displacement(self, instruction: TrainInstruction, displacement: dict[str, Array]) -> dict[str, Array]:
        number = self._canaries.get(instruction.device_id)
        if number is None:
            return displacement
        length = _compute_length(displacement) if self._clip is None else self._clip
        direction = _draw_direction(self._shapes, self._seed, number)
        return {
            name: (length * direction[name]).astype(tensor.dtype) if name in direction else np.zeros_like(tensor)
            for name, tensor in displacement.items()
        }


def _draw_direction(shapes: ModelSpec, seed: int, number: int) -> dict[str, Array]:
    """Returns a canary's direction, a random one of length 1, in the parameters that travel."""
    rng = derive_rng(seed, "canary", number)
    tensors = {
        spec.name: rng.standard_normal(spec.shape)
        for spec in shapes
        if spec.shared and spec.kind == TensorKind.PARAMETER and np.dtype(spec.dtype).kind == "f"
    }
    length = _compute_length(tensors)
    return {name: tensor / length for name, tensor in tensors.items()}


def _compute_length(tensors: Mapping[str, Array]) -> float:
    """Returns the norm of all float tensors together."""
    floats = (tensor.astype(float) for tensor in tensors.values() if tensor.dtype.kind == "f")
    return math.sqrt(sum(float(np.vdot(tensor, tensor)) for tensor in floats))


def _audit_devices(
    config: RunConfig, data: FleetData, folder: Path, is_included: Array, on_change: OnChange | None
) -> tuple[Array, str]:
    """Returns the displacement of the model along each canary's direction, and the run's id."""
    if config.devices.names or config.devices.groups or config.devices.exclude:
        raise ConfigError("an audit is of all devices; leave devices.names, devices.groups and devices.exclude out")
    section = config.simulation
    if config.adapt.is_used or config.split.after is not None or config.secure_aggregation.enabled:
        raise ConfigError("an audit of devices has no [adapt], no [split] and no [secure_aggregation]")
    if section.accelerator != "cpu" or section.engine == "ray" or section.workers:
        raise ConfigError(
            "an audit of devices trains in this process, on the CPU; leave accelerator, engine and workers out"
        )
    components = build_run(config, "simulated")
    _check_size(components.shapes, len(is_included))
    num_devices, chosen = len(data.shards), np.flatnonzero(is_included)
    shards = data.shards + tuple(data.shards[number % num_devices] for number in chosen)
    names = make_device_names(len(shards))
    clip = config.privacy.clip if config.privacy.unit == "device" else None
    trainer = partial(
        CanaryTrainer,
        canaries=dict(zip(names[num_devices:], map(int, chosen), strict=True)),
        shapes=components.shapes,
        clip=None if clip == "adaptive" else clip,
    )
    result = simulate_with_data(
        _with_devices(config, len(shards)),
        replace(data, shards=shards),
        folder,
        on_change=on_change,
        make_trainer=trainer,
    )
    assert result.model is not None
    last = load_model_file(result.model)
    moved = {name: tensor - np.asarray(components.model[name]) for name, tensor in last.items()}
    return _solve_directions(components.shapes, config.run.seed, len(is_included), moved), result.run_id


def _solve_directions(shapes: ModelSpec, seed: int, number: int, moved: Mapping[str, Array]) -> Array:
    """Returns how far the model moved along each direction, in least squares, so that none counts for another."""
    target = _flatten({name: moved[name] for name in _draw_direction(shapes, seed, 0)})
    directions = np.empty((number, target.size), np.float32)
    for index in range(number):
        directions[index] = _flatten(_draw_direction(shapes, seed, index))
    solved: Array = np.linalg.lstsq(directions @ directions.T, directions @ target, rcond=None)[0]
    return solved


def _flatten(tensors: Mapping[str, Array]) -> Array:
    return np.concatenate([tensor.reshape(-1).astype(np.float32) for tensor in tensors.values()])


def _check_size(shapes: ModelSpec, number: int) -> None:
    size = sum(tensor.size for tensor in _draw_direction(shapes, 0, 0).values())
    if 2 * number > size:
        raise ConfigError(
            f"{number} canaries are too many for a model of {size} parameters; take at most {size // 2}"
        )
    if number * size > MAX_ENTRIES:
        raise ConfigError(
            f"the directions of {number} canaries in {size} parameters do not fit into memory; take at most "
            f"{MAX_ENTRIES // size}"
        )


def _with_devices(config: RunConfig, number: int) -> RunConfig:
    return replace(config, simulation=replace(config.simulation, devices=number))


def _audit_examples(
    config: RunConfig, data: FleetData, folder: Path, is_included: Array, on_change: OnChange | None
) -> tuple[Array, str]:
    """Returns minus the model's loss on each canary, and the run's id."""
    rng = derive_rng(config.run.seed, "canary examples")
    rows = _choose_rows(data, len(is_included), rng)
    pool = replace(data.pool, targets=_make_wrong(data.pool.targets, rows, rng))
    losses, run_id = _measure_losses(config, replace(data, pool=pool), folder, rows, is_included, on_change)
    return -losses, run_id


def _measure_losses(
    config: RunConfig, data: FleetData, folder: Path, rows: Array, is_included: Array, on_change: OnChange | None
) -> tuple[Array, str]:
    """Returns the loss on each of some rows of a model that was trained with those included, and the run's id."""
    shards = tuple(_without(shard, rows[~is_included]) for shard in data.shards)
    result = simulate_with_data(config, replace(data, shards=shards), folder, on_change=on_change)
    assert result.model is not None
    learner = make_run_task(config).learner(accelerator="cpu", threads=1)
    learner.load(load_model_file(result.model))
    with np.errstate(over="ignore", invalid="ignore"):
        losses = [learner.evaluate(data.pool.take(np.array([row])))[0] for row in rows]
    return np.array(losses), result.run_id


def _audit_members(
    config: RunConfig,
    data: FleetData,
    folder: Path,
    is_included: Array,
    on_change: OnChange | None,
    *,
    num_shadows: int,
) -> tuple[Array, str]:
    """Returns the likelihood ratio of each example's membership, and the run's id."""
    rows = _choose_rows(data, len(is_included), derive_rng(config.run.seed, "members"))
    _check_cross_entropy(config, data, rows[0])
    coins = derive_rng(config.run.seed, "shadows").random((num_shadows, len(rows))) < 0.5
    shadows = np.empty(coins.shape)
    for number, coin in enumerate(coins):
        seed = (config.run.seed + 1 + number) % 2**31
        other = replace(config, run=replace(config.run, seed=seed))
        shadows[number] = compute_logit(_measure_losses(other, data, folder, rows, coin, on_change)[0])
    losses, run_id = _measure_losses(config, data, folder, rows, is_included, on_change)
    return compute_likelihood_ratios(compute_logit(losses), shadows, coins), run_id


def _check_cross_entropy(config: RunConfig, data: FleetData, row: int) -> None:
    """Checks that the loss of an example is -log p, p being the probability of its class.

    Raises:
        DataError: it is another, or there is more than one class for each.
    """
    classes = _count_classes(data.pool.targets)
    components, learner = build_run(config, "simulated"), make_run_task(config).learner(accelerator="cpu", threads=1)
    learner.load(components.make_whole(components.model))
    total, targets = 0.0, data.pool.targets.copy()
    for number in range(classes):
        targets[row] = number
        total += math.exp(-learner.evaluate(replace(data.pool, targets=targets).take(np.array([row])))[0])
    if not abs(total - 1.0) <= _SUM_TOLERANCE:
        raise DataError(
            f"LiRA needs the cross-entropy of one class for each example: by this task's loss the probabilities of "
            f"{classes} classes sum to {total:.3g}; leave --shadows out"
        )


def compute_logit(losses: Array) -> Array:
    """Returns log(p / (1 - p)) of probabilities p with these cross-entropies; the least for a NaN."""
    logits: Array = -np.log(np.expm1(np.clip(np.nan_to_num(losses, nan=MAX_LOSS), MIN_LOSS, MAX_LOSS)))
    return logits


def compute_likelihood_ratios(observed: Array, shadows: Array, coins: Array) -> Array:
    """Returns [n] logarithms of how much likelier each example's confidence is with it than without it.

    Args:
        observed: [n] confidences of the audited model.
        shadows: [m, n] those of shadow models.
        coins: [m, n] whether each was trained with the example.
    """
    scores = np.zeros(len(observed))
    for members, sign in ((coins, 1.0), (~coins, -1.0)):
        counts = members.sum(axis=0)
        means = np.where(members, shadows, 0.0).sum(axis=0) / np.maximum(1, counts)
        means = np.where(counts, means, shadows[members].mean() if members.any() else 0.0)
        deviations = np.where(members, shadows - means, 0.0)
        freedom = max(1, int(members.sum() - (counts > 0).sum()))
        variance = max(MIN_VARIANCE, float((deviations**2).sum()) / freedom)
        scores -= sign * ((observed - means) ** 2 / variance + math.log(variance)) / 2
    return scores


def _choose_rows(data: FleetData, number: int, rng: np.random.Generator) -> Array:
    """Returns rows of the pool that exactly one device trains on."""
    if any(shard.blocks for shard in data.shards):
        raise ConfigError("an audit of examples has each on one device; simulation.scheme gives blocks to several")
    rows = np.concatenate([shard.train for shard in data.shards])
    if data.pool.weak is not None:
        rows = rows[~data.pool.weak[rows]]  # a guess is no class to be wrong about
    if 2 * number > len(rows):
        raise DataError(f"{number} canaries are more than half of the {len(rows)} examples with a class; take fewer")
    return rng.choice(rows, number, replace=False)


def _count_classes(targets: Array) -> int:
    """Returns the number of classes; a `DataError` says that examples have none."""
    if targets.ndim != 1 or targets.dtype.kind not in "iu":
        raise DataError("an audit of examples needs one class for each; audit devices: --unit device")
    classes = int(targets.max()) + 1
    if classes < 2:
        raise DataError(f"an audit of examples needs two classes at least, got {classes}")
    return classes


def _make_wrong(targets: Array, rows: Array, rng: np.random.Generator) -> Array:
    """Returns the targets with another class in some rows."""
    classes, wrong = _count_classes(targets), targets.copy()
    wrong[rows] = (targets[rows] + rng.integers(1, classes, len(rows))) % classes
    return wrong


def _without(shard: ShardRows, rows: Array) -> ShardRows:
    return replace(
        shard,
        rows=shard.rows[~np.isin(shard.rows, rows)],
        train=shard.train[~np.isin(shard.train, rows)],
    )
