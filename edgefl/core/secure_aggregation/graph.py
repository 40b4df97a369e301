"""Who masks with whom where not all boards do: each board draws the holders of its shares by itself.

A coordinator that draws the graph, or sees it before it asks for keys, could surround a board by its own. So a board
draws after the members' keys are fixed, with its system's generator, and nobody can draw again for it. It masks with
those that it has drawn and those that have drawn it.

Source: Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020, section 4.
Differs from the paper: all boards verify all keys and sign one set of survivors, so that the secrets of a board
cannot both be opened, whatever the graph is; the coordinator may choose who drops out when it has seen the graph.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from edgefl.core.secure_aggregation.messages import compute_threshold
from edgefl.core.types import Array, SecureAggregationConfig

SECURITY_BITS = 40
"""An attempt's graph fails to protect with a probability of at most 2^-40 (sigma in the paper)."""
CORRECTNESS_BITS = 30
"""An attempt with as many random drop-outs as foreseen cannot be opened with at most 2^-30 (eta in the paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """How many boards have a board's shares, itself among them, and how many of these give its secret."""

    num_holders: int
    threshold: int


def compute_neighbourhood(num_members: int, config: SecureAggregationConfig) -> Neighbourhood:
    """Returns the smallest neighbourhood that protects; of all members where none smaller does, or it is complete."""
    everyone = Neighbourhood(num_holders=num_members, threshold=compute_threshold(num_members, config.threshold))
    if config.corrupted is None:
        return everyone
    return _find_neighbourhood(num_members, config.threshold, config.corrupted, config.dropped) or everyone


def draw_holders(name: str, members: Sequence[str], num_holders: int) -> tuple[str, ...]:
    """Returns the boards that get shares of a board's secrets, itself among them, sorted."""
    others = [member for member in members if member != name]
    return tuple(sorted([name, *secrets.SystemRandom().sample(others, num_holders - 1)]))


@lru_cache(maxsize=64)
def _find_neighbourhood(num_members: int, fraction: float, corrupted: float, dropped: float) -> Neighbourhood | None:
    """Returns the smallest neighbourhood of drawn holders that meets three bounds, or None.

    With n members, of whom C are corrupted and T must be left, k drawn holders and t of k + 1 needed:

    1. n P[more than k - t of the drawn drop out] ≤ 2^-30, of δn random ones; t is the largest that meets it.
    2. (n - C) P[more than c of the drawn are corrupted] ≤ 2^-41, and c < t. So an opened board is one of t - c
       honest boards that masked with each other through it and are in the sum.
    3. No set S of s ≤ (T - C) / 2 honest boards has drawn none of r = T - C - s others, whatever T - C honest boards
       the coordinator leaves: Σ_s binom(n - C, s) binom(n - C - s, r) P[a board draws none of r]^s ≤ 2^-41, from
       s = t - c on. So a sum that can be opened has more than half of the honest boards that must be left.
    """
    num_corrupted, num_dropped = math.ceil(corrupted * num_members), math.ceil(dropped * num_members)
    honest = num_members - num_corrupted
    least_left = compute_threshold(num_members, fraction) - num_corrupted
    if 2 * least_left <= honest:  # two sets of T members may have no honest one in common
        return None
    table = np.concatenate([[0.0], np.cumsum(np.log2(np.arange(1, num_members + 1)))])
    for degree in range(1, num_members - 1):
        drops = _count_tail(table, num_members - 1, num_dropped, degree) + math.log2(num_members)
        threshold = degree - int(np.argmax(drops <= -CORRECTNESS_BITS)) + 1  # a tail of 0 ends each
        among = _count_tail(table, num_members - 1, num_corrupted, degree) + math.log2(honest)
        most_corrupted = int(np.argmax(among <= -SECURITY_BITS - 1)) - 1
        if threshold - most_corrupted < 1:
            continue
        sizes = np.arange(threshold - most_corrupted, least_left // 2 + 1)
        others = least_left - sizes
        cuts = _log_binomial(table, honest, sizes) + _log_binomial(table, honest - sizes, others)
        avoids = _log_binomial(table, num_members - 1 - others, np.array(degree))
        cuts += sizes * (avoids - _log_binomial(table, np.array(num_members - 1), np.array(degree)))
        if np.logaddexp2.reduce(cuts, initial=-np.inf) <= -SECURITY_BITS - 1:
            return Neighbourhood(num_holders=degree + 1, threshold=threshold)
    return None


def _log_binomial(table: Array, n: Array | int, k: Array | int) -> Array:
    """Returns log2 of binom(n, k), -inf where k is above n."""
    n, k = np.broadcast_arrays(n, k)
    found = table[n] - table[np.minimum(k, n)] - table[np.maximum(n - k, 0)]
    return np.where(k > n, -np.inf, found)


def _count_tail(table: Array, num_members: int, num_marked: int, num_sampled: int) -> Array:
    """Returns log2 P[at least x of the drawn are marked], by x from 0 to `num_sampled` + 1, where it is -inf."""
    counts = np.arange(num_sampled + 1)
    chances = _log_binomial(table, num_marked, counts)
    chances = chances + _log_binomial(table, num_members - num_marked, num_sampled - counts)
    chances = chances - _log_binomial(table, num_members, num_sampled)
    return np.concatenate([np.logaddexp2.accumulate(chances[::-1])[::-1], [-np.inf]])
