"""Differential privacy of devices: the sum of clipped updates with Gaussian noise, and a record of what was released.

A round releases (sum of d min(1, C/|d|) + N(0, (zC)²)) / m over its updates d: the clip C bounds what one device can
change, the divisor m is a setting, and not who has answered. Two fleets are neighbours when in one of them one device
takes part in no round. So a device that is late or lost changes nothing about the noise, and the number of short
updates, of halves with a sign, changes by 1/2.

The noise comes from a key of the operating system and the sum itself: a replay repeats it, and another sum of the
same version gets other noise, which counts as another release. Both are saved before a model leaves `release`.

With correlated noise (DP-FTRL) it comes from the key, a random number of the beginning and the number of the round in
it. Another sum of a version that was released begins the noise anew, and participations of devices count on.

Source: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, fixed denominator;
adaptive clipping: Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021, Algorithm 1.
"""

from __future__ import annotations

import hmac
import math
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from edgefl.core.errors import PrivacyBudgetError
from edgefl.core.types import Array, Tensors
from edgefl.strategies.correlated_noise import CorrelatedNoise
from edgefl.strategies.update_guard import compute_norm

KEY_BYTES = 32
SALT_BYTES = 16
KEPT_RELEASES = 1000
"""Newest releases whose digest is kept; a replay goes back to the newest checkpoint but one, which is less."""
CLIP_RATE = 0.2
"""Rate by which the logarithm of the adaptive norm follows the quantile."""
COUNT_SHARE = 20
"""Standard deviation of the noise on the number of short updates, as one in so many of m."""
MAX_NOISE_RATIO = 1.2
"""Most update noise over z with an adaptive norm: close to twice the noise of the count it grows without bound."""
_ROUNDING = 1.0 - 2.0**-20
"""Factor of clipped updates, so that rounding to half or single precision leaves none above the norm."""
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A released version.

    Attributes:
        digest: of what was released.
        sampled, repeated: releases of both kinds up to it.
        start, salt: of the beginning of the correlated noise that covers it.
        participations: of all devices, with this one, where it is the first since the noise began; None elsewhere.
    """

    digest: bytes
    sampled: int
    repeated: int
    start: int = 0
    salt: bytes = b""
    participations: dict[str, int] | None = None


@dataclass(slots=True, kw_only=True)
class PrivacySpend:
    """What a run has released, as it is saved.

    Attributes:
        key: of the noise, the samples and the digests; secret, and empty once the run is over.
        sampled: releases of a version's first sum.
        repeated: releases of a version that was released before, by another sum; they are never amplified.
        newest: highest version that was released.
        repeatable: up to this version a replay comes to the same sums.
        releases: version -> its last release; the newest `KEPT_RELEASES`.
        restarts: with correlated noise, numbers of releases at which it began anew.
        start: version behind which it began last.
        salt: random, of that beginning, so that a copy of the record that is used twice begins with other noise;
            empty for the first one, which has a key of its own.
        bands: of it, from the first release on.
        participations: with correlated noise, device -> number of releases for which it was asked.
    """

    key: bytes
    sampled: int = 0
    repeated: int = 0
    newest: int = 0
    repeatable: int = 0
    releases: dict[int, Release] = field(default_factory=dict)
    restarts: tuple[int, ...] = ()
    start: int = 0
    salt: bytes = b""
    bands: int = 0
    participations: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All releases."""
        return self.sampled + self.repeated

    def list_segments(self, total: int) -> tuple[int, ...]:
        """Returns how many of the first releases belong to each beginning of the correlated noise."""
        marks = (0, *(mark for mark in self.restarts if mark < total), total)
        return tuple(end - start for start, end in pairwise(marks))

    def restart_noise(self, version: int) -> None:
        """Records that the correlated noise begins anew behind a version."""
        if self.total > max(self.restarts, default=0):
            self.restarts += (self.total,)
        self.start, self.salt = version, secrets.token_bytes(SALT_BYTES)

    def count_with(self, version: int) -> tuple[int, int]:
        """Returns the first and the repeated releases, with another one of a version."""
        is_first = version > self.newest
        return self.sampled + is_first, self.repeated + (not is_first)


@dataclass(slots=True, kw_only=True)
class SpendRecorder:
    """Record of a run's releases; `save` makes it durable, and without it the record ends with the process."""

    spend: PrivacySpend
    save: Callable[[PrivacySpend], None] = lambda _: None

    def record(self, version: int, digest: bytes, participants: Iterable[str] = ()) -> Release:
        """Records a release, durably, and returns it; the same sum of the same version is no further one.

        Args:
            version: that is released.
            digest: of what is released.
            participants: devices whose participations are counted.
        """
        spend, former = self.spend, self.spend.releases.get(version)
        if former is not None and hmac.compare_digest(former.digest, digest):
            return former
        spend.sampled, spend.repeated = spend.count_with(version)
        spend.newest, spend.repeatable = max(spend.newest, version), version
        for device_id in participants:
            spend.participations[device_id] = spend.participations.get(device_id, 0) + 1
        spend.releases[version] = release = Release(
            digest=digest,
            sampled=spend.sampled,
            repeated=spend.repeated,
            start=spend.start,
            salt=spend.salt,
            participations=dict(spend.participations) if version == spend.start + 1 else None,
        )
        for old in sorted(spend.releases)[:-KEPT_RELEASES]:
            del spend.releases[old]
        self.save(spend)
        return release

    def restart(self, version: int) -> None:
        """Records that the versions behind this one will be made anew, from other updates and with other noise."""
        spend = self.spend
        spend.repeatable = min(spend.repeatable, version)
        spend.restart_noise(version)
        self.save(spend)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateDisplacement:
    """The released displacement, and the norm of the next round.

    Where the correlated noise began with it, `participations` are those of all devices, with this round; else None.
    """

    displacement: dict[str, Array]
    clip: float
    participations: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateMean:
    """Mean of updates that keeps what one device holds private.

    Attributes:
        first_clip: C, the most norm of an update in the first round.
        quantile: the share of updates that the norm follows; None keeps the norm.
        noise_multiplier: z of a release, of all that it says.
        num_expected: m, the divisor of the sum.
        epsilon: the budget.
        sampling: probability with which an idle device takes part; None where it is not drawn.
        compute_epsilon: (first releases, repeated releases) -> ε that they have spent.
        recorder: of this run.
        correlation: of the noise of rounds with one another, in DP-FTRL; None for independent noise.
    """

    first_clip: float
    quantile: float | None
    noise_multiplier: float
    num_expected: float
    epsilon: float
    sampling: float | None
    compute_epsilon: Callable[[int, int], float]
    recorder: SpendRecorder
    correlation: CorrelatedNoise | None = None

    @property
    def count_noise(self) -> float:
        """The standard deviation of the noise on the number of updates below the norm."""
        return self.num_expected / COUNT_SHARE

    @property
    def update_noise(self) -> float:
        """The multiplier of the noise on the sum, where the number with an adaptive norm has its part of z.

        Source: Theorem 1 of the paper.
        """
        if self.quantile is None:
            return self.noise_multiplier
        return 1.0 / math.sqrt(self.noise_multiplier**-2 - (2 * self.count_noise) ** -2)

    @property
    def bands(self) -> int:
        """The bands of correlated noise; of what was released, where that began with others. 0 without."""
        return 0 if self.correlation is None else self.recorder.spend.bands or self.correlation.bands

    @property
    def min_expected(self) -> float:
        """The least m with which the noise on the sum is at most `MAX_NOISE_RATIO` times z; 0 for a fixed norm."""
        if self.quantile is None:
            return 0.0
        return self.noise_multiplier * COUNT_SHARE / 2 / math.sqrt(1.0 - MAX_NOISE_RATIO**-2)

    def get_clip(self, adapted: float | None) -> float:
        """Returns C of a round, from the norm that the last one has led to; None before the first."""
        return self.first_clip if adapted is None else adapted

    def sample(self, available: Sequence[str], version: int) -> list[str]:
        """Returns the devices that take part in making a version, each by itself; a run file does not tell which."""
        assert self.sampling is not None
        rng = np.random.default_rng(int.from_bytes(self._digest(struct.pack("<8sq", b"sampling", version))))
        is_selected = rng.random(len(available)) < self.sampling
        return [name for name, takes_part in zip(available, is_selected, strict=True) if takes_part]

    def permits(self, participation: tuple[int, int], version: int) -> bool:
        """Returns whether a device may take part in a version; see `ParticipationLimits.permits`."""
        return self.correlation is None or self.correlation.limits.permits(participation, version)

    def restore_participations(self) -> dict[str, tuple[int, int]]:
        """Returns the participations of devices where versions are made anew, with noise that begins anew."""
        return {name: (count, 0) for name, count in self.recorder.spend.participations.items()}

    def can_release(self, version: int) -> bool:
        """Returns whether the budget is enough for a version, which it is where that was released before."""
        return version <= self.recorder.spend.repeatable or self._has_room_for(version)

    def compute_spent(self, version: int) -> float:
        """Returns ε spent up to a version."""
        spend = self.recorder.spend
        release = spend.releases.get(version, spend) if version else Release(digest=b"", sampled=0, repeated=0)
        return self.compute_epsilon(release.sampled, release.repeated)

    def release(
        self,
        total: Mapping[str, Array],
        model: Mapping[str, Array],
        *,
        version: int,
        clip: float,
        num_below: float,
        participants: Sequence[str] = (),
    ) -> PrivateDisplacement:
        """Returns the noisy mean of a round; its spend is recorded before.

        Args:
            total: sum of the clipped updates; a tensor that is missing is 0.
            model: tensors of which the displacement is.
            version: that it leads to.
            clip: C of this round.
            num_below: sum of 1/2 for each update below the norm, and -1/2 for the others.
            participants: the devices that were asked for an update, whether it is in the sum or not.

        Raises:
            PrivacyBudgetError: it would pass the budget.
        """
        sums = {
            name: np.asarray(total[name], np.float64).reshape(-1) if name in total else np.zeros(tensor.size)
            for name, tensor in sorted(model.items())
        }
        scale = self.update_noise * clip
        # All that a release depends on: the same noise at two scales would give the sum away.
        settings = (clip, scale, num_below, self.count_noise, self.num_expected)
        facts = struct.pack("<8sq5d", b"release", version, *settings)
        released = self._record(version, facts, sums, participants)
        draw = self._make_draw(released, version, sum(flat.size for flat in sums.values()))
        displacement = {}
        for name, flat in sums.items():
            noisy = scale * draw(flat.size)
            noisy += flat
            noisy /= self.num_expected
            displacement[name] = noisy.reshape(model[name].shape).astype(model[name].dtype, copy=False)
        if self.quantile is not None:
            share = (num_below + self.count_noise * float(draw(1)[0])) / self.num_expected + 0.5
            clip *= math.exp(-CLIP_RATE * (min(1.0, max(0.0, share)) - self.quantile))
        participations = None if self.correlation is None else released.participations
        return PrivateDisplacement(displacement=displacement, clip=clip, participations=participations)

    def _record(self, version: int, facts: bytes, sums: Mapping[str, Array], participants: Sequence[str]) -> Release:
        """Returns the release of a sum, which is recorded; that of before, where it is repeated."""
        spend = self.recorder.spend

        def compute_digest(salt: bytes) -> bytes:
            parts: list[bytes | memoryview] = [facts, *(flat.data for flat in sums.values())]
            if self.correlation is not None:
                names = "\0".join(sorted(participants)).encode()
                parts += [struct.pack("<q", self.bands), salt, names]
            return self._digest(*parts)

        former = spend.releases.get(version)
        if former is not None and hmac.compare_digest(former.digest, compute_digest(former.salt)):
            return former
        if self.correlation is not None and not self._is_next(version):
            self.recorder.restart(version - 1)  # two sums with one noise would give their difference away
        if not self._has_room_for(version):
            self.recorder.restart(version - 1)  # what was to be repeated here cannot be
            raise PrivacyBudgetError(
                f"version {version} would pass the privacy budget of epsilon = {self.epsilon:g}: it was made "
                "before, from other updates, and a second release counts"
            )
        spend.bands = self.bands
        return self.recorder.record(
            version, compute_digest(spend.salt), () if self.correlation is None else participants
        )

    def _is_next(self, version: int) -> bool:
        """Returns whether a version is the next one since the correlated noise began."""
        spend = self.recorder.spend
        return version == spend.start + 1 + spend.total - max(spend.restarts, default=0)

    def _make_draw(self, released: Release, version: int, size: int) -> Callable[[int], Array]:
        """Returns what draws standard normal numbers of a release; of correlated ones there are `size`."""
        if self.correlation is None:
            return np.random.default_rng(int.from_bytes(self._digest(b"noise", released.digest))).standard_normal
        source = self._digest(struct.pack("<8sq", b"matrix", self.bands), released.salt)

        def make_rng(number: int) -> np.random.Generator:
            return np.random.default_rng(int.from_bytes(self._digest(source, struct.pack("<q", number))))

        row, position = self.correlation.draw(self.bands, source, version - released.start, size, make_rng), 0

        def take(number: int) -> Array:
            nonlocal position
            position += number
            return row[position - number : position]

        return take

    def _has_room_for(self, version: int) -> bool:
        """Returns whether the budget is enough for another release of a version."""
        spent = self.compute_epsilon(*self.recorder.spend.count_with(version))
        return spent <= self.epsilon * (1.0 + _TOLERANCE)

    def _digest(self, *parts: bytes | memoryview) -> bytes:
        code = hmac.new(self.recorder.spend.key, digestmod="sha256")
        for part in parts:
            code.update(part)
        return code.digest()


def compute_clip_factor(tensors: Tensors, clip: float) -> float | None:
    """Returns the factor by which an update is shortened to `clip`, at most 1; None without a finite norm."""
    norm = compute_norm(tensors, precision="float64")
    if not math.isfinite(norm):
        return None
    return 1.0 if norm <= clip else clip / norm * _ROUNDING
