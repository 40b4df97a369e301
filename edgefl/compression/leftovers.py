"""What an assignment leaves on its device for the next one; live and simulated devices ask the same."""

from __future__ import annotations

from edgefl.compression.feedback import uses_feedback
from edgefl.errors import ConfigError
from edgefl.types import LocalPlan, Shapes


def leaves_something(plan: LocalPlan, codec: str, shapes: Shapes) -> bool:
    """Returns whether a node's or optimiser's state, a codec's residual or a tensor of the device's own stays there.

    Args:
        plan: the assignment's.
        codec: the line by which its update is encoded.
        shapes: the model's tensors.
    """
    stays = plan.node is not None or plan.keeps_state or uses_feedback(codec)
    return stays or not all(spec.shared for spec in shapes)


def check_leaves_nothing(plan: LocalPlan, codec: str, shapes: Shapes) -> None:
    """Checks an assignment of work on a block of a redundant shard.

    Raises:
        ConfigError: something would stay on the device, so that others that hold the block get another result.
    """
    if leaves_something(plan, codec, shapes):
        raise ConfigError(
            "work on a block of a redundant shard must give the same result on all who hold it, so nothing may "
            "stay on the device: no kept optimiser state, no codec with ef, no tensors of its own"
        )
