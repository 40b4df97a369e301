"""What the coordinator, and whoever gets the models, see of boards' first round, by the settings of a run.

Boards train and encode as they do in a simulated run, with private gradients where the run file asks for them. Of
secure aggregation the vectors of whole numbers are added, as the protocol opens them, without keys and masks.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from edgefl.compression.codec import decode_body
from edgefl.compression.codec_selection import parse_auto_candidates
from edgefl.compression.registry import format_with_layers
from edgefl.core.config import CompressionSection, PrivacySection, RunConfig, SecureAggregationSection
from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, TrainInstruction
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.normalisation import should_find_scales
from edgefl.engine.assembly.privacy import get_private_mean
from edgefl.engine.assembly.strategy import get_inner_strategy, get_plan
from edgefl.simulation.backends.partitioned_data import FleetData, ShardRows
from edgefl.simulation.backends.trainer import EncodedModel, SimulatedTrainer
from edgefl.simulation.simulated_run import make_task_spec
from edgefl.strategies.private_mean import KEY_BYTES, PrivacySpend, SpendRecorder, compute_clip_factor

Observer = Literal["coordinator", "models"]
"""Who sees something of boards: the coordinator, or whoever gets the models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What somebody sees of a round.

    Attributes:
        settings: `plain`, the run without privacy, secure aggregation and codec, or `run`, as the run file says.
        seen_by: who sees it.
        boards: number of boards whose updates are in what is seen.
        config: of the settings.
    """

    settings: Literal["plain", "run"]
    seen_by: Observer
    boards: int
    config: RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardUpdate:
    """A board's update as it leaves the board, decoded, and the number of examples that it weighs as."""

    tensors: dict[str, Array]
    num_examples: int


def list_views(config: RunConfig, num_devices: int) -> list[View]:
    """Returns what is seen of a run, beside the same run without any protection where it has some.

    Args:
        config: of the run.
        num_devices: of the fleet, of which the run takes its boards.

    Raises:
        ConfigError: the run shows no updates that could be attacked.
    """
    _check(config)
    plain = replace(
        config,
        privacy=PrivacySection(),
        secure_aggregation=SecureAggregationSection(),
        compression=CompressionSection(),
    )
    asked = _count_asked(config, num_devices)
    views = [View(settings="plain", seen_by="coordinator", boards=1, config=plain)]
    if config.secure_aggregation.enabled:
        from edgefl.core.secure_aggregation.messages import compute_threshold  # noqa: PLC0415 for secure runs alone

        section = config.secure_aggregation
        least = compute_threshold(asked, section.threshold)
        if (
            section.graph == "sparse"
        ):  # what its bound promises: more than half of the honest boards that must be left
            least = (least - math.ceil(section.corrupted * asked)) // 2 + 1
        return [*views, View(settings="run", seen_by="coordinator", boards=least, config=config)]
    if config != plain:
        views.append(View(settings="run", seen_by="coordinator", boards=1, config=config))
    return [*views, View(settings="run", seen_by="models", boards=asked, config=config)]


def _check(config: RunConfig) -> None:
    if config.job.name or config.adapt.is_used or config.split.after is not None or config.aggregation.is_collective:
        raise ConfigError("an attack on updates has no [job], no [adapt], no [split] and no aggregation.collective")
    if should_find_scales(config):
        raise ConfigError('an attack on updates finds no means and scales; leave task.normalise = "fleet" out')
    if parse_auto_candidates(config.compression.up) is not None:
        raise ConfigError(f"an attack needs one codec as compression.up, got {config.compression.up!r}")
    components = build_run(config, "simulated")
    plan = get_plan(components.strategy)
    if plan is None or get_inner_strategy(components.strategy).has_nodes or components.cluster_shapes:
        raise ConfigError(
            f"an attack needs a strategy whose boards send the update of one model to the coordinator, got "
            f"{config.strategy.name!r}"
        )
    if plan.count_iterations(1) is None:
        raise ConfigError("an attack knows no time of a board; give strategy.epochs or iterations, not seconds")


def _count_asked(config: RunConfig, num_devices: int) -> int:
    """Returns how many boards are asked in a round, on average; at least one."""
    privacy, devices = config.privacy, config.devices
    if privacy.sampling is not None:
        return max(1, round(privacy.sampling * num_devices))
    if devices.count is not None:
        return min(devices.count, num_devices)
    return max(1, round((devices.fraction or 1.0) * num_devices))


class UpdateSource:
    """Boards with given examples that answer the first instruction of a run.

    Args:
        config: of the run.
        pool: all examples.
        shards: row numbers of each board's examples.
    """

    def __init__(self, config: RunConfig, pool: Dataset, shards: Sequence[Array]) -> None:
        self._components = build_run(config, "simulated")
        self._config, self._plan = config, get_plan(self._components.strategy)
        self._mean = get_private_mean(self._components.strategy)
        rows = tuple(ShardRows(rows=shard, train=shard, test=shard[:0], blocks={}) for shard in shards)
        self._names = [f"board-{number}" for number in range(len(shards))]
        self._lengths = [len(shard) for shard in shards]
        self._trainer = SimulatedTrainer(
            make_task_spec(config, self._components),
            FleetData(pool=pool, shards=rows),
            {name: number for number, name in enumerate(self._names)},
        )
        self._model = EncodedModel(version=0, body=self._components.encode(self._components.model, 0))

    @property
    def model(self) -> Mapping[str, Array]:
        """The model that the boards get."""
        return self._components.model

    def train(self, number: int) -> BoardUpdate:
        """Returns the update of a board as the coordinator decodes it.

        Raises:
            EdgeflError: the board failed.
        """
        instruction = TrainInstruction(
            assignment_id=f"attack-{number}",
            device_id=self._names[number],
            base_version=0,
            plan=self._plan,
            codec=format_with_layers(self._config.compression.up, self._config.compression.layers),
        )
        iterations = self._plan.count_iterations(max(1, self._lengths[number]))
        update = self._trainer.train(instruction, self._model, iterations)
        tensors = decode_body(update.body, self._components.update_shapes)
        return BoardUpdate(
            tensors={
                name: np.array(tensor if isinstance(tensor, np.ndarray) else tensor.dense())
                for name, tensor in tensors.items()
            },
            num_examples=update.num_examples,
        )

    def combine(self, updates: Sequence[BoardUpdate], seen_by: Observer) -> dict[str, Array]:
        """Returns what of some boards' updates is seen.

        One update seen by the coordinator is itself, several are the sum of secure aggregation as a mean. In the
        models is the weighted mean, or the private one with noise of its own at each call.
        """
        if self._config.secure_aggregation.enabled:
            return self._add_securely(updates)
        if seen_by == "coordinator":
            (update,) = updates
            return update.tensors
        if self._mean is not None:
            return self._release(updates)
        return _add(updates, [update.num_examples for update in updates], sum(up.num_examples for up in updates))

    def _add_securely(self, updates: Sequence[BoardUpdate]) -> dict[str, Array]:
        from edgefl.core.secure_aggregation.ring import decode_mean, encode_vector  # noqa: PLC0415 heavy

        section, number = self._config.secure_aggregation, len(updates)
        model = {name: np.asarray(self.model[name]) for name in updates[0].tensors}
        total = sum(
            encode_vector(
                update.tensors,
                weight=update.num_examples,
                max_weight=section.max_examples,
                clip=section.clip,
                num_members=number,
            )
            for update in updates
        )
        return decode_mean(
            np.asarray(total, np.uint32),
            model,
            num_added=number,
            max_weight=section.max_examples,
            clip=section.clip,
            num_members=number,
        )

    def _release(self, updates: Sequence[BoardUpdate]) -> dict[str, Array]:
        """Returns the private mean of a round, as the first one with a key of its own."""
        assert self._mean is not None
        recorder = SpendRecorder(spend=PrivacySpend(key=secrets.token_bytes(KEY_BYTES)))
        mean, clip = replace(self._mean, recorder=recorder), self._mean.get_clip(None)
        factors = [compute_clip_factor(update.tensors, clip) or 0.0 for update in updates]
        total = _add(updates, factors, 1.0)
        model = {name: np.asarray(self.model[name]) for name in total}
        return mean.release(total, model, version=1, clip=clip, num_below=0.0).displacement


def _add(updates: Sequence[BoardUpdate], factors: Sequence[float], divisor: float) -> dict[str, Array]:
    return {
        name: np.asarray(
            sum(factor * update.tensors[name].astype(float) for factor, update in zip(factors, updates, strict=True))
            / divisor
        )
        for name in updates[0].tensors
        if updates[0].tensors[name].dtype.kind == "f"
    }
