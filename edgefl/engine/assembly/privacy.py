"""Makes the private mean of a run, and checks that nothing else of the run releases what devices hold."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from edgefl.compression.codec_selection import parse_auto_candidates
from edgefl.core.config import PrivacySection, RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.renyi_accounting import BUDGET_TOLERANCE
from edgefl.core.settings import Faults, format_setting
from edgefl.core.types import Algorithm, ExamplePrivacy, ModelSpec, Strategy, TensorKind
from edgefl.engine.privacy_accounting import (
    MAX_COUNTED,
    compute_epsilon,
    compute_gaussian_epsilon,
    count_releases,
    find_gaussian_noise,
    find_noise,
)
from edgefl.strategies.correlated_noise import CorrelatedNoise, ParticipationLimits
from edgefl.strategies.private_mean import KEY_BYTES, PrivacySpend, PrivateMean, SpendRecorder
from edgefl.strategies.strategy_config import RoundRules

SPARE_PARTICIPATIONS = 2
"""Participations beyond those that the rounds need: for boards that did not answer, and versions made anew."""
PRIVATE_STRATEGIES = ("fedavg", "fedprox", "ssgd")
"""Strategies that use nothing of updates but their mean."""
EXAMPLE_STRATEGIES = (
    "fedavg", "fedprox", "fednova", "krum", "multi-krum", "bulyan", "coordinate-median", "trimmed-mean",
    "geometric-median", "centred-clipping",
)  # fmt: skip
"""Strategies whose boards do nothing with their examples but steps along gradients."""
_HOW, _HOW_EXAMPLE = 'privacy.unit = "device"', 'privacy.unit = "example"'
_HOW_CORRELATED = 'privacy.mechanism = "dp-ftrl"'
_HOW_SECURE = "secure_aggregation.enabled = true"


def check_private(config: RunConfig) -> None:
    """Checks that nothing of a run releases what its unit of privacy holds, but by the noise.

    Raises:
        ConfigError: a setting does.
    """
    if config.privacy.unit == "example":
        _check_examples(config)
    else:
        _check_devices(config)


def _check_examples(config: RunConfig) -> None:
    """Checks that examples reach an update by private gradients alone; what is made of it then costs nothing."""
    if config.strategy.name not in EXAMPLE_STRATEGIES:
        raise ConfigError(
            f"strategy.name must be one of {', '.join(EXAMPLE_STRATEGIES)} with {_HOW_EXAMPLE}, got "
            f"{config.strategy.name!r}: others use more of the examples than gradients, or plan their steps anew"
        )
    run, faults = config.run, Faults()
    needs = {
        "aggregation.collective": (
            config.aggregation.collective,
            "coordinator",
            "members send to one another",
        ),
        "split.after": (config.split.after, None, "activations have no noise"),
        "adapt.method": (config.adapt.method, "none", "adapters have no gradients by example"),
        "task.normalise": (config.task.get("normalise") or None, None, "means and scales of the fleet have no noise"),
        "run.on_divergence": (run.on_divergence, "warn", "boards keep their losses"),
        "selection.rule": (config.selection.rule, "uniform", "boards keep their losses"),
        "run.compiled": (run.compiled, None, "compiled tasks have no gradients by example; boards need torch"),
    }
    _compare(needs, faults, _HOW_EXAMPLE)
    if run.backend == "onnx":
        faults.messages.append(
            f'run.backend must be "torch" with {_HOW_EXAMPLE}, got "onnx": compiled tasks clip no gradient by example'
        )
    if config.privacy.noise is None and run.rounds is None:
        faults.messages.append("privacy.noise is missing: give it, or run.rounds, from which each board finds it")
    faults.check()


def _compare(needs: Mapping[str, tuple[object, object, str]], faults: Faults, how: str) -> None:
    """Adds a fault for each setting, by name with what is found, what is needed, and why, that is another."""
    for name, (found, needed, reason) in needs.items():
        if found != needed:
            right = "left out" if needed is None else format_setting(needed)
            faults.messages.append(f"{name} must be {right} with {how}, got {format_setting(found)}: {reason}")


def check_secure(config: RunConfig) -> None:
    """Checks that the coordinator needs nothing of single updates where it learns their sum alone.

    Raises:
        ConfigError: a setting does.
    """
    if config.strategy.name not in PRIVATE_STRATEGIES:
        raise ConfigError(
            f"strategy.name must be one of {', '.join(PRIVATE_STRATEGIES)} with {_HOW_SECURE}, got "
            f"{config.strategy.name!r}: it needs more than the weighted sum of updates"
        )
    run, guard, compression, faults = config.run, config.guard, config.compression, Faults()
    needs = {
        "strategy.double_buffering": (
            config.strategy.options.get("double_buffering", False),
            False,
            "two rounds would be open at a time",
        ),
        "compression.up": (compression.up, "dense", "only whole numbers of equal size add up under masks"),
        "compression.layers": (dict(compression.layers), {}, "only whole numbers of equal size add up under masks"),
        "guard.enabled": (guard.enabled, False, "no update is there to be compared; a board can send anything"),
        "guard.max_norm": (guard.max_norm, None, "no update is there to be measured; boards clip their own"),
        "guard.max_weight_ratio": (guard.max_weight_ratio, 0.0, "secure_aggregation.max_examples bounds weights"),
        "run.min_updates": (run.min_updates, None, "secure_aggregation.threshold says how many are needed"),
        "run.on_timeout": (run.on_timeout, "aggregate", "another board has no keys of the round"),
        "aggregation.collective": (config.aggregation.collective, "coordinator", "devices add up what others see"),
        "selection.rule": (config.selection.rule, "uniform", "it goes by what single devices brought"),
        "split.after": (config.split.after, None, "activations have no masks"),
        "privacy.unit": (
            "device" if config.privacy.unit == "device" else None,
            None,
            "updates are clipped one by one",
        ),
    }
    _compare(needs, faults, _HOW_SECURE)
    if config.devices.min < 3:
        faults.messages.append(
            f"devices.min must be at least 3 with {_HOW_SECURE}, got {config.devices.min}: in a sum of two each "
            "knows the other's update"
        )
    faults.check()


def _check_devices(config: RunConfig) -> None:
    """Checks that a device changes nothing but its own, clipped update in the sum of a round.

    Raises:
        ConfigError: a setting compares devices, moves by what they measure, or sends more than updates.
    """
    if config.strategy.name not in PRIVATE_STRATEGIES:
        raise ConfigError(
            f"strategy.name must be one of {', '.join(PRIVATE_STRATEGIES)} with {_HOW}, got "
            f"{config.strategy.name!r}: only a mean of one update of each device has a bound that noise fits"
        )
    run, guard, faults = config.run, config.guard, Faults()
    needs = {
        "strategy.double_buffering": (
            config.strategy.options.get("double_buffering", False),
            False,
            "two rounds would be open at a time",
        ),
        "guard.enabled": (guard.enabled, False, "it judges an update by those of others, and clips it already"),
        "guard.max_norm": (guard.max_norm, None, "privacy.clip bounds an update"),
        "run.min_updates": (run.min_updates, None, "one device's update would keep another's out"),
        "run.on_divergence": (run.on_divergence, "warn", "the losses of devices have no noise"),
        "devices.fraction": (config.devices.fraction, None, "give privacy.sampling, or devices.count"),
        "selection.rule": (config.selection.rule, "uniform", "the losses of devices have no noise"),
        "aggregation.collective": (config.aggregation.collective, "coordinator", "no update is there to be clipped"),
        "split.after": (config.split.after, None, "activations have no noise"),
        "task.normalise": (config.task.get("normalise") or None, None, "means and scales of the fleet have no noise"),
        "run.epochs": (run.epochs, None, "it goes by numbers of examples, which have no noise"),
        "run.updates": (run.updates, None, "it goes by who answers, which has no noise"),
        "run.bytes": (run.bytes, None, "it goes by the sizes of updates, which have no noise"),
    }
    _compare(needs, faults, _HOW)
    if parse_auto_candidates(config.compression.up) is not None:
        faults.messages.append(f"compression.up must be one codec with {_HOW}: auto goes by what devices measure")
    if (run.accuracy is not None or run.until is not None) and run.evaluate_on not in {"coordinator", "evaluator"}:
        faults.messages.append(
            "run.evaluate_on must be coordinator or evaluator where run.accuracy or run.until ends a run with "
            f"{_HOW}, got {run.evaluate_on!r}: what devices measure has no noise"
        )
    faults.check()


def get_private_mean(strategy: Strategy[Any]) -> PrivateMean | None:
    """Returns how a strategy makes its mean private, None where it does not."""
    rules = getattr(strategy, "rules", None)
    return rules.privacy if isinstance(rules, RoundRules) else None


def make_private_mean(config: RunConfig, shapes: ModelSpec) -> PrivateMean:
    """Returns the private mean of a run, with a record of its own.

    Raises:
        ConfigError: a setting is missing, or the model has tensors that noise does not fit.
        MissingPackageError: dp-accounting is not installed.
    """
    privacy, rounds = config.privacy, config.run.rounds
    assert privacy.epsilon is not None
    assert privacy.delta is not None
    _check_tensors(shapes, _HOW)
    if privacy.noise is None and rounds is None:
        raise ConfigError("privacy.noise is missing: give it, or run.rounds, from which it is found")
    num_expected = _count_expected(config)
    recorder = SpendRecorder(spend=PrivacySpend(key=secrets.token_bytes(KEY_BYTES)))
    correlation = _make_correlation(config, shapes) if privacy.mechanism == "dp-ftrl" else None
    compute: Callable[[int, int], float]
    if correlation is None:
        noise = privacy.noise or find_noise(privacy.epsilon, privacy.delta, privacy.sampling, rounds or 1)
        compute = partial(compute_epsilon, noise, privacy.delta, privacy.sampling)
    else:
        noise = privacy.noise or _find_correlated_noise(privacy, correlation, rounds or 1)
        compute = partial(_compute_correlated_epsilon, correlation, recorder, noise, privacy.delta)
    if compute(1, 0) > privacy.epsilon * (1.0 + BUDGET_TOLERANCE):
        raise ConfigError(
            f"privacy.noise = {noise:g} passes epsilon = {privacy.epsilon:g} in the first round; give more noise"
        )
    mean = PrivateMean(
        first_clip=privacy.first_clip if privacy.clip == "adaptive" else float(privacy.clip),
        quantile=privacy.quantile if privacy.clip == "adaptive" else None,
        noise_multiplier=noise,
        num_expected=num_expected,
        epsilon=privacy.epsilon,
        sampling=privacy.sampling,
        compute_epsilon=compute,
        recorder=recorder,
        correlation=correlation,
    )
    if num_expected < mean.min_expected:
        raise ConfigError(
            f'privacy.clip = "adaptive" needs {math.ceil(mean.min_expected)} boards in a round at a noise multiplier '
            f"of {noise:.3g}, expected are {num_expected:g}; give a number as privacy.clip"
        )
    return mean


def _make_correlation(config: RunConfig, shapes: ModelSpec) -> CorrelatedNoise:
    """Returns the correlated noise of a run, with the bands that leave the least of it on the sums of its rounds.

    Raises:
        ConfigError: there are too few boards for the limits of participation.
    """
    privacy, rounds, count, faults = config.privacy, config.run.rounds, config.devices.count, Faults()
    limits = _make_limits(privacy, rounds)
    if count is None:
        faults.messages.append(
            f"devices.count is missing: {_HOW_CORRELATED} needs it, so that the boards of one round are not all"
        )
    elif privacy.boards is not None:
        faults.messages += limits.list_faults(boards=privacy.boards, count=count, rounds=rounds)
    faults.check()
    planned = rounds or limits.separation * (limits.participations or 1)
    size = sum(math.prod(spec.shape) for spec in shapes if spec.shared)
    return CorrelatedNoise(limits=limits, bands=limits.choose_bands(planned, size))


def _make_limits(privacy: PrivacySection, rounds: int | None) -> ParticipationLimits:
    """Returns the limits of participation; by default a little more than the rounds need."""
    separation, participations = privacy.separation, privacy.participations
    assert separation is not None
    if participations is None and rounds is not None:
        participations = -(-rounds // separation) + SPARE_PARTICIPATIONS
    return ParticipationLimits(separation=separation, participations=participations)


def check_fleet_size(config: RunConfig, num_devices: int) -> None:
    """Checks that there are devices enough for limits of participation, where their number is known.

    Raises:
        ConfigError: rounds would wait for ever.
    """
    privacy, count = config.privacy, config.devices.count
    if privacy.mechanism != "dp-ftrl" or privacy.separation is None or count is None:
        return
    faults, limits = Faults(), _make_limits(privacy, config.run.rounds)
    names = ("the number of devices", "privacy.separation x devices.count", "privacy.participations")
    faults.messages += limits.list_faults(boards=num_devices, count=count, rounds=config.run.rounds, names=names)
    faults.check()


def _find_correlated_noise(privacy: PrivacySection, correlation: CorrelatedNoise, rounds: int) -> float:
    assert privacy.epsilon is not None
    assert privacy.delta is not None
    sensitivity = correlation.limits.compute_sensitivity(correlation.bands, (rounds,))
    return find_gaussian_noise(privacy.epsilon, privacy.delta) * sensitivity


def _compute_correlated_epsilon(
    correlation: CorrelatedNoise, recorder: SpendRecorder, noise: float, delta: float, first: int, repeated: int
) -> float:
    """Returns ε of releases with correlated noise; repeated ones have a noise of their own, begun anew."""
    if first + repeated == 0:
        return 0.0
    spend = recorder.spend
    segments, bands = spend.list_segments(first + repeated), spend.bands or correlation.bands
    return compute_gaussian_epsilon(noise / correlation.limits.compute_sensitivity(bands, segments), delta)


def make_example_privacy(config: RunConfig, shapes: ModelSpec) -> ExamplePrivacy:
    """Returns what boards need to make gradients private; the optimiser is the plan's.

    Raises:
        ConfigError: a number is out of range, or the model has tensors that noise does not fit.
    """
    section = config.privacy
    assert section.epsilon is not None
    assert section.delta is not None
    _check_tensors(shapes, _HOW_EXAMPLE)
    privacy = ExamplePrivacy(
        optimizer=Algorithm.SGD,
        clip=float(section.clip),
        epsilon=section.epsilon,
        delta=section.delta,
        noise=section.noise,
        rounds=config.run.rounds if section.noise is None else None,
    )
    privacy.check("privacy")
    return privacy


def _check_tensors(shapes: ModelSpec, how: str) -> None:
    for spec in shapes:
        if spec.kind == TensorKind.BUFFER or spec.dtype not in {"float32", "float64"}:
            what = "a buffer" if spec.kind == TensorKind.BUFFER else spec.dtype
            raise ConfigError(
                f"{how} needs a model of float32 or float64 parameters alone: tensor {spec.name!r} is {what}; "
                "take a model without running statistics"
            )


def _count_expected(config: RunConfig) -> float:
    privacy, count = config.privacy, config.devices.count
    if privacy.sampling is not None and count is not None:
        raise ConfigError(
            f"devices.count must be left out with privacy.sampling, got {count}: a sample has no fixed size"
        )
    if privacy.boards is None and (count is None or privacy.sampling is not None):
        raise ConfigError(
            "privacy.boards is missing: the number of devices that are expected, since the sum of a round is divided "
            "by a number that does not depend on who answers"
        )
    if count is not None:
        return float(count)
    assert privacy.boards is not None
    return privacy.boards * (privacy.sampling or 1.0)


def explain_privacy(config: RunConfig, mean: PrivateMean | None) -> str:
    """Returns one line on what a private run promises, and what not; empty for another."""
    privacy = config.privacy
    if privacy.unit == "example":
        noise = (
            f"each board takes the least noise with which {config.run.rounds} rounds of its examples fit"
            if privacy.noise is None
            else f"noise multiplier {privacy.noise:g}, and a board takes part as long as its budget lasts"
        )
        return (
            f"each example has differential privacy on its board, against the coordinator, too: epsilon "
            f"{privacy.epsilon:g} at delta {privacy.delta:g}, gradients clipped to {privacy.clip:g}; {noise}; each "
            "board keeps its account; metrics, numbers of examples, bytes, times and logs are not covered"
        )
    if mean is None:
        return ""
    how = (
        f"take part with probability {privacy.sampling:g}"
        if privacy.sampling is not None
        else "are counted as if each was in every round, without amplification"
        if mean.correlation is None
        else _explain_limits(mean.correlation)
    )
    of_updates = "" if mean.quantile is None else f" ({mean.update_noise:.4g} on updates)"
    num_rounds = count_releases(
        lambda number: mean.compute_epsilon(number, 0), mean.epsilon * (1.0 + BUDGET_TOLERANCE)
    )
    enough = (
        "for as many rounds as boards may take part in" if num_rounds == MAX_COUNTED else f"for {num_rounds} rounds"
    )
    return (
        f"each device's data has differential privacy in the models: epsilon {privacy.epsilon:g} at delta "
        f"{privacy.delta:g}, noise "
        f"multiplier {mean.noise_multiplier:.4g}{of_updates}, enough {enough}; sums are divided by "
        f"{mean.num_expected:g}, and devices {how}; metrics, counts, bytes, times and logs are not covered"
    )


def _explain_limits(correlation: CorrelatedNoise) -> str:
    limits = correlation.limits
    most = "" if limits.participations is None else f"at most {limits.participations} times, "
    return (
        f"take part {most}{limits.separation} rounds apart at least, with noise that is correlated over "
        f"{correlation.bands} rounds"
    )
