"""Accounting of DP-SGD by Rényi differential privacy, small enough for a board: Poisson samples with Gaussian noise.

Neighbours are data sets in one of which one example is missing. A step releases the sum of the clipped gradients of a
Poisson sample with noise N(0, (zC)²). Rényi divergences of several steps add up, so an account is one number for each
order.

Source: Mironov, Talwar, Zhang, Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019, theorem 4; to
(ε, δ): Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020, proposition 12.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import MIN_NOISE, Array

ORDERS: tuple[float, ...] = (
    *(1.0 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 65)),
    128.0,
    256.0,
    512.0,
)
"""Orders at which divergences are kept; dp-accounting has the same, but for the last."""
BUDGET_TOLERANCE = 1e-6
"""Of a budget ε, relative, for rounding."""
MAX_NOISE = 1e6
NOISE_TOLERANCE = 1e-4
"""Of a noise multiplier that is found for a budget, relative; the one found is never too small."""
_TAIL = 12.0
"""Standard deviations behind which a normal density counts as 0."""


@lru_cache(maxsize=8192)
def _compute_divergence(order: float, sampling: float, noise: float) -> float:
    """Returns log E[(1 - q + q·exp((2x - 1)/2z²))^o] / (o - 1) of x ~ N(0, z²), o being the order.

    By the trapezoidal rule, which for this integrand converges faster than any power of its step.
    """
    if sampling == 1.0:
        return order / (2.0 * noise * noise)
    step = min(noise, noise * noise) / 8.0
    x = np.arange(-_TAIL * noise, order + _TAIL * noise, step)
    ratios = np.logaddexp(math.log1p(-sampling), math.log(sampling) + (2.0 * x - 1.0) / (2.0 * noise * noise))
    logs = order * ratios - x * x / (2.0 * noise * noise)
    largest = float(logs.max())
    total = float(np.exp(logs - largest).sum()) * step / (noise * math.sqrt(2.0 * math.pi))
    return max(0.0, largest + math.log(total)) / (order - 1.0)


def compute_divergences(sampling: float, noise: float, steps: int) -> Array:
    """Returns the Rényi divergence of some steps at each of `ORDERS`.

    Args:
        sampling: probability with which an example is in a batch, above 0; 1 where all always are.
        noise: z, standard deviation over clip.
        steps: how many.
    """
    assert 0.0 < sampling <= 1.0
    return steps * np.array([_compute_divergence(order, sampling, noise) for order in ORDERS])


def compute_epsilon(divergences: Array, delta: float) -> float:
    """Returns ε at `delta` of what has these divergences at `ORDERS`; 0 where there was nothing."""
    if not divergences.any():
        return 0.0
    orders = np.array(ORDERS)
    epsilons = divergences + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    return max(0.0, float(epsilons.min()))


@lru_cache(maxsize=256)
def find_noise(epsilon: float, delta: float, sampling: float, steps: int) -> float:
    """Returns the least noise multiplier, of at least `MIN_NOISE`, with which some steps fit into a budget.

    Raises:
        ConfigError: there is none.
    """

    def fits(noise: float) -> bool:
        return compute_epsilon(compute_divergences(sampling, noise, steps), delta) <= epsilon

    if fits(MIN_NOISE):
        return MIN_NOISE
    low, high = MIN_NOISE, 1.0
    while not fits(high):
        low, high = high, 2.0 * high
        if high > MAX_NOISE:
            raise ConfigError(
                f"no noise keeps {steps} steps within epsilon = {epsilon:g} at delta = {delta:g}; "
                "give a larger budget"
            )
    while high - low > NOISE_TOLERANCE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
