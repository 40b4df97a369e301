"""Builds both sides of a network that is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgefl.compression.codec import make_codec
from edgefl.compression.codec_selection import CodecSelector
from edgefl.compression.split_bodies import BatchCodec
from edgefl.core.config import (
    RunConfig,
)
from edgefl.core.errors import CodecError, ConfigError
from edgefl.core.types import (
    Strategy,
    Task,
    Tensors,
    derive_rng,
)
from edgefl.engine.assembly.components import SplitModel
from edgefl.engine.assembly.strategy import get_inner_strategy
from edgefl.strategies.synchronous.scaffold import Scaffold
from edgefl.strategies.synchronous.strategy import SynchronousStrategy
from edgefl.tasks.local_algorithms.rest_training import check_split_algorithm
from edgefl.tasks.network_cut import describe_cut


@contextmanager
def name_codec_errors(setting: str) -> Iterator[None]:
    """Puts the setting before the message of a codec's error in the block."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"{setting}: {error}") from None


def make_split_model(config: RunConfig, task: Task) -> SplitModel:
    """Returns both sides of the cut.

    Raises:
        EdgeflError: the network cannot be cut there, or a setting does not go with it.
    """
    section, shapes, seed = config.split, task.shapes(), config.run.seed
    assert section.after is not None
    if local_tensors := [spec.name for spec in shapes if not spec.shared]:
        raise ConfigError(
            f"split.after: task {config.run.task} has tensors that stay on the board ({local_tensors[0]}), which a "
            "split network cannot have"
        )
    if config.compression.down != "dense":
        raise ConfigError(
            f"compression.down must be 'dense' with split.after, which sends the first layers alone, "
            f"got {config.compression.down!r}"
        )
    cut = describe_cut(config.run.task, config.task, section.after)
    for name, spec in (("split.up", section.up), ("split.down", section.down)):
        with name_codec_errors(name):
            BatchCodec(spec, cut.activation_shape)
    front = cut.select_front(shapes)
    codec = make_codec("dense", front)

    def encode_front(model: Tensors, version: int) -> bytes:
        return codec.encode({spec.name: model[spec.name] for spec in front}, derive_rng(seed, version, "downlink"))

    return SplitModel(section=section, cut=cut, front=front, rest=cut.select_rest(shapes), encode_front=encode_front)


def check_split_strategy(config: RunConfig, strategy: Strategy[Any], codecs: CodecSelector | None) -> None:
    """Checks that a strategy suits a network that is cut.

    Raises:
        ConfigError: a setting does not.
    """
    inner = get_inner_strategy(strategy)
    if not isinstance(inner, SynchronousStrategy) or isinstance(inner, Scaffold) or strategy.root_examples:
        raise ConfigError(
            "split.after needs a strategy in rounds that averages models alone, such as fedavg, got strategy.name = "
            f"{config.strategy.name!r}"
        )
    check_split_algorithm(inner.plan)
    if inner.double_buffering:
        raise ConfigError("strategy.double_buffering must be false with split.after: a round has one model, got true")
    if config.aggregation.is_collective:
        raise ConfigError(
            "aggregation.collective must be 'coordinator' with split.after: it has a part of each update, "
            f"got {config.aggregation.collective!r}"
        )
    if codecs is not None:
        raise ConfigError("compression.up = 'auto' is for whole networks; with split.after give one codec")
    if config.run.evaluate_on == "devices":
        raise ConfigError(
            "run.evaluate_on must be auto, coordinator, evaluator or none with split.after: a board has the first "
            "layers alone, got 'devices'"
        )
