"""Cost of a task's iteration on a device, from the best data available."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgefl.core.types import ModelSpec, Scalar
from edgefl.simulation.profiles import DeviceProfile, IterationCost, ProfileCatalogue

log = logging.getLogger(__name__)

REFERENCE_FLOPS = 10e9
"""Speed of the reference machine on small networks, for tasks without a measured cost."""
FLOPS_PER_WEIGHT = 6
"""Forward, backward and gradient of one weight and one example; a convolution uses its weights far more often."""
ITERATION_OVERHEAD_S = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The trained task by name and options, its tensors, and the user's seconds per iteration."""

    task: str
    options: Mapping[str, Scalar]
    model_spec: ModelSpec
    iteration_s: float | None = None

    @property
    def cost_keys(self) -> tuple[str, ...]:
        """Returns the names under which costs are looked up, most specific first."""
        model = self.options.get("model")
        return (f"{self.task}/{model}",) if model is not None else (self.task,)


def compute_reference_cost(workload: Workload, catalogue: ProfileCatalogue) -> IterationCost:
    """Returns the cost of an iteration on the reference machine.

    The run file's value goes first, then the task's measured one; else it is estimated from the number of
    weights, with a warning.
    """
    if workload.iteration_s is not None:
        return IterationCost(fixed_s=workload.iteration_s)
    for key in workload.cost_keys:
        if key in catalogue.reference_costs:
            return catalogue.reference_costs[key]
    num_weights = sum(spec.size for spec in workload.model_spec)
    log.warning(
        "nobody knows how long an iteration of %s takes; estimated from its %d weights. "
        "Say it in the run file: [simulation] iteration_s, seconds on the reference machine",
        workload.cost_keys[0],
        num_weights,
    )
    return IterationCost(fixed_s=ITERATION_OVERHEAD_S, example_s=FLOPS_PER_WEIGHT * num_weights / REFERENCE_FLOPS)


def make_cost_function(
    profile: DeviceProfile, workload: Workload, reference: IterationCost
) -> Callable[[int], float]:
    """Returns batch size -> seconds of one iteration for a device profile."""
    for key in workload.cost_keys:
        if key in profile.iterations:
            return profile.iterations[key].compute_seconds
    return lambda batch_size: reference.compute_seconds(batch_size) / profile.speed
