"""Client state between instructions, for live and simulated devices."""

from __future__ import annotations

from edgefl.compression.error_feedback import has_error_feedback
from edgefl.core.errors import ConfigError
from edgefl.core.types import ModelSpec, TrainConfig


def is_stateful_training(plan: TrainConfig, codec: str, shapes: ModelSpec) -> bool:
    """Whether an instruction leaves state: node, optimiser, residual or local tensors.

    Args:
        plan: of the instruction.
        codec: the codec line of its update.
        shapes: the model's tensors.
    """
    has_state = plan.node is not None or plan.keeps_state or has_error_feedback(codec)
    return has_state or not all(spec.shared for spec in shapes)


def require_stateless_training(plan: TrainConfig, codec: str, shapes: ModelSpec) -> None:
    """Checks an instruction on a block of a redundant shard.

    Raises:
        ConfigError: the instruction leaves client state, so that other holders of the block get another result.
    """
    if is_stateful_training(plan, codec, shapes):
        raise ConfigError(
            "work on a block of a redundant shard must give the same result on all who hold it, so nothing may "
            "stay on the device: no kept optimiser state, no codec with ef, no tensors of its own"
        )
