"""Correlated noise of DP-FTRL: little on the sum of all rounds, where who takes part in a round cannot be sampled.

The prefix sums A x of the rounds' sums x are released as B (C x + z), with A = B C and z of independent normal
numbers. Round t gets row t of C⁻¹ z, which cancels a part of the noise of the rounds before. C is a banded Toeplitz
matrix of the first coefficients of (1 - x)^(-1/2). Rounds of one device that are a band apart meet in no row, so
that k of them change C x by at most √k times the norm of a column: that is a single Gaussian mechanism, also where
updates depend on what was released (Denisov et al., Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams, NeurIPS 2022).

Sources: Kairouz et al., Practical and Private (Deep) Learning without Sampling or Shuffling, ICML 2021; banded
matrices and participations: Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023; the
coefficients: Kalinin and Lampert, Banded Square Root Matrix Factorization, NeurIPS 2024.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgefl.core.types import Array

MAX_BANDS = 64
MAX_NOISE_BYTES = 2**28
"""Most memory of the noise of former rounds; a larger model has fewer bands."""


def compute_coefficients(bands: int) -> Array:
    """Returns [bands] first coefficients of (1 - x)^(-1/2), which are the columns of C."""
    steps = np.arange(1, bands)
    coefficients: Array = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
    return coefficients


def compute_prefix_deviations(bands: int, rounds: int) -> Array:
    """Returns [rounds] standard deviations of the noise on the sum of the first rounds, with z of deviation 1."""
    coefficients, inverse = compute_coefficients(bands), np.zeros(rounds)
    inverse[0] = 1.0
    for row in range(1, rounds):
        width = min(row, bands - 1)
        inverse[row] = -coefficients[1 : width + 1] @ inverse[row - width : row][::-1]
    deviations: Array = np.sqrt(np.cumsum(np.cumsum(inverse) ** 2))
    return deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationLimits:
    """How often a device may take part.

    Attributes:
        separation: least rounds from one participation of a device to its next; 1 allows each round.
        participations: most of a device in the whole run; None for as many as the separation allows.
    """

    separation: int
    participations: int | None

    def permits(self, participation: tuple[int, int], version: int) -> bool:
        """Returns whether a device may take part in making a version.

        Args:
            participation: how often it has, and the last version that it took part in, 0 for none to keep apart from.
            version: that is made.
        """
        count, last = participation
        is_used_up = self.participations is not None and count >= self.participations
        return not is_used_up and (last == 0 or version - last >= self.separation)

    def compute_sensitivity(self, bands: int, segments: Sequence[int]) -> float:
        """Returns how far a device can move C x, in units of the clip.

        Args:
            bands: of C, at most `separation`.
            segments: rounds since each beginning of the noise, at least 1; between two of them no separation counts.
        """
        squares = np.cumsum(compute_coefficients(bands) ** 2)
        full, ends = 0, list[float]()
        for rounds in segments:
            before = (rounds - 1) // self.separation  # all but the last have a whole column behind them
            full += before
            ends.append(float(squares[min(bands, rounds - before * self.separation) - 1]))
        most = full + len(ends) if self.participations is None else self.participations
        full = min(full, most)
        return math.sqrt(full * float(squares[-1]) + sum(sorted(ends, reverse=True)[: most - full]))

    def list_faults(
        self,
        *,
        boards: int,
        count: int,
        rounds: int | None,
        names: tuple[str, str, str] = (
            "privacy.boards",
            "privacy.separation x devices.count",
            "privacy.participations",
        ),
    ) -> list[str]:
        """Returns why rounds of `count` boards would wait for ever, a line each; `names` are of the settings."""
        faults = list[str]()
        if boards < self.separation * count:
            faults.append(
                f"{names[0]} must be at least {names[1]} = {self.separation * count}, got {boards}: the others would "
                "still rest"
            )
        if rounds is not None and self.participations is not None and boards * self.participations < rounds * count:
            faults.append(
                f"{names[2]} must be at least {-(-rounds * count // boards)} with {rounds} rounds of {count} of "
                f"{boards} boards, got {self.participations}"
            )
        return faults

    def choose_bands(self, rounds: int, size: int) -> int:
        """Returns the number of bands for some rounds of a model with so many parameters; more leave less noise."""
        return min(self.separation, rounds, MAX_BANDS, 1 + MAX_NOISE_BYTES // (8 * max(1, size)))


@dataclass(slots=True, kw_only=True)
class CorrelatedNoise:
    """Rows of C⁻¹ z, in order of the rounds; only the last ones are held, and any other is made anew from the first.

    Attributes:
        limits: that the accounting rests on.
        bands: of C in a new run, at most the separation; a run that goes on keeps its own.
    """

    limits: ParticipationLimits
    bands: int
    _newest: tuple[bytes, int, int, int] = (b"", 0, 0, 0)
    _former: deque[Array] = field(default_factory=deque)

    def draw(
        self, bands: int, source: bytes, number: int, size: int, make_rng: Callable[[int], np.random.Generator]
    ) -> Array:
        """Returns [size] the noise of a round, with z of standard deviation 1; not to be written to.

        Args:
            bands: of C.
            source: of z, such as a digest of the key: another one begins anew.
            number: of the round since the beginning, from 1.
            size: parameters of the model.
            make_rng: number of a round -> generator of its z, always the same.
        """
        first = number
        if self._newest != (source, bands, size, number - 1):
            self._former, first = deque(maxlen=max(1, bands - 1)), 1
        coefficients = compute_coefficients(bands)[1:]
        for row in range(first, number + 1):
            noise: Array = make_rng(row).standard_normal(size)
            for coefficient, former in zip(coefficients, reversed(self._former), strict=False):
                noise -= coefficient * former
            self._former.append(noise)
        self._newest = (source, bands, size, number)
        return self._former[-1]
