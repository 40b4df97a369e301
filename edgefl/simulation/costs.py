"""What an iteration of a task costs on a board, by the best that is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgefl.simulation.profiles import Catalogue, IterationCost, Profile
from edgefl.types import Scalar, Shapes

log = logging.getLogger(__name__)

FLOPS = 10e9
"""Of the reference machine while it trains small networks, where nothing better is known."""
FLOPS_PER_WEIGHT = 6
"""Forward, backward and gradient of one weight and one example; a convolution uses its weights far more often."""
OVERHEAD_S = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained: a task by name and options, its tensors, and seconds of an iteration if the user says them."""

    task: str
    options: Mapping[str, Scalar]
    shapes: Shapes
    iteration_s: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the names under which costs are looked up, the most exact first."""
        model = self.options.get("model")
        return (f"{self.task}/{model}",) if model is not None else (self.task,)


def reference_cost(workload: Workload, catalogue: Catalogue) -> IterationCost:
    """Returns what an iteration costs on the reference machine.

    That is what the run file says, else what was measured for the task; else it is estimated from the number of
    weights, with a warning.
    """
    if workload.iteration_s is not None:
        return IterationCost(fixed_s=workload.iteration_s)
    for key in workload.keys:
        if key in catalogue.reference:
            return catalogue.reference[key]
    num_weights = sum(spec.size for spec in workload.shapes)
    log.warning(
        "nobody knows how long an iteration of %s takes; estimated from its %d weights. "
        "Say it in the run file: [simulation] iteration_s, seconds on the reference machine",
        workload.keys[0],
        num_weights,
    )
    return IterationCost(fixed_s=OVERHEAD_S, example_s=FLOPS_PER_WEIGHT * num_weights / FLOPS)


def iteration_seconds(profile: Profile, workload: Workload, reference: IterationCost) -> Callable[[int], float]:
    """Returns batch size -> seconds of one iteration on this kind of board."""
    for key in workload.keys:
        if key in profile.iterations:
            return profile.iterations[key].seconds
    return lambda batch_size: reference.seconds(batch_size) / profile.speed
