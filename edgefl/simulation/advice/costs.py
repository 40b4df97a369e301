"""Costs of a candidate by arithmetic alone: seconds, bytes and joules of a round, and how much of them is waiting.

It ranks hundreds of candidates in milliseconds, so that only the best are simulated. A synchronous round lasts as
long as its slowest board; of asynchronous strategies a round is as many updates as there are boards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.compression.codec_selection import CANDIDATES as LIGHTER_CODECS
from edgefl.compression.registry import AUTO
from edgefl.core.types import Scalar
from edgefl.simulation.advice.candidates import ADAPTIVE, ASYNCHRONOUS, Candidate
from edgefl.simulation.profiles import DeviceProfile

STALENESS_GAIN = 0.7
"""Assumed worth of an asynchronous update to that of a synchronous one."""
CODEC_GAINS = dict(zip(LIGHTER_CODECS, (1.0, 1.0, 0.9, 0.8, 0.6, 0.4), strict=True))
"""Assumed worth of an update through a codec to that of a dense one; for others 1. `auto` is as its middle."""
CODECS_MEASURED = ("dense", *LIGHTER_CODECS)
AUTO_AS = LIGHTER_CODECS[2]
DOUBLE_TRAFFIC = frozenset({"scaffold"})
"""Strategies that send a control variate beside the model, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One board as the arithmetic sees it: `iteration_s` maps a batch size to seconds."""

    name: str
    profile: DeviceProfile
    num_examples: int
    iteration_s: Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a model on its way down, and of an update by codec; rates are the coordinator's own, None without."""

    model_bytes: int
    update_bytes: Mapping[str, int]
    server_up_bytes_per_s: float | None = None
    server_down_bytes_per_s: float | None = None

    def count_up(self, candidate: Candidate) -> int:
        codec = AUTO_AS if candidate.codec.startswith(AUTO) else candidate.codec
        return self.update_bytes[codec] * (2 if candidate.strategy in DOUBLE_TRAFFIC else 1)

    def count_down(self, candidate: Candidate) -> int:
        return self.model_bytes * (2 if candidate.strategy in DOUBLE_TRAFFIC else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """What a round costs by arithmetic.

    Attributes:
        seconds: of a round.
        bytes_up, bytes_down: of all boards.
        joules: of all boards while they compute; None where a board's power is not known.
        waiting: share of the boards' time in which they wait for others.
        slowest: the board that takes longest.
        slowest_s, median_s: its seconds for a round's work, and those of the median board.
        sending: share of the slowest board's time in which model and update travel.
        loss_risk: probability that a board is lost before its update is there, mean over the boards.
        examples: that all boards train on in a round.
        gain: assumed progress of a round; only a comparison of candidates makes sense of it.
    """

    seconds: float
    bytes_up: int
    bytes_down: int
    joules: float | None
    waiting: float
    slowest: str
    slowest_s: float
    median_s: float
    sending: float
    loss_risk: float
    examples: int
    gain: float

    def score(self, minimise: str) -> float:
        """Returns cost per progress: seconds, bytes or joules."""
        costs = {"time": self.seconds, "bytes": self.bytes_up + self.bytes_down, "energy": self.joules}
        return (costs[minimise] or 0.0) / self.gain


def compute_round_cost(
    candidate: Candidate, boards: Sequence[Board], sizes: Sizes, defaults: Mapping[str, Scalar]
) -> RoundCost:
    """Returns the cost of a round of a candidate.

    Args:
        candidate: its strategy, work and codec.
        boards: at least one.
        sizes: of what travels.
        defaults: of the strategy's settings.
    """
    options = {**defaults, **candidate.defaults, **candidate.options}
    batch_size = int(options.get("batch_size") or 32)
    step_s = [board.iteration_s(batch_size) for board in boards]
    up, down = sizes.count_up(candidate), sizes.count_down(candidate)
    sending_s = [_compute_exchange_s(board.profile, up, down) for board in boards]
    if candidate.strategy in ADAPTIVE:
        reach_s = max(one + sent for one, sent in zip(step_s, sending_s, strict=True))
        counts = [max(1, int((reach_s - sent) / one)) for one, sent in zip(step_s, sending_s, strict=True)]
    else:
        counts = [_count_iterations(options, board.num_examples, batch_size, one)
                  for board, one in zip(boards, step_s, strict=True)]  # fmt: skip
    compute_s = [count * one for count, one in zip(counts, step_s, strict=True)]
    total_s = [work + sent for work, sent in zip(compute_s, sending_s, strict=True)]
    slowest = max(range(len(boards)), key=total_s.__getitem__)
    shared_s = max(
        len(boards) * up / (sizes.server_up_bytes_per_s or math.inf),
        len(boards) * down / (sizes.server_down_bytes_per_s or math.inf),
    )
    is_asynchronous = candidate.strategy in ASYNCHRONOUS
    updates_per_s = math.fsum(1 / one for one in total_s)
    seconds = max(shared_s, len(boards) / updates_per_s if is_asynchronous else total_s[slowest])
    gain = math.fsum(map(math.sqrt, counts)) * _get_codec_gain(candidate.codec)
    if is_asynchronous:  # a fast board's updates come more often than once in a round
        often = [math.sqrt(count) / one for count, one in zip(counts, total_s, strict=True)]
        gain = STALENESS_GAIN * math.fsum(often) * seconds * _get_codec_gain(candidate.codec)
    powers = [board.profile.power_w for board in boards]
    known = [power for power in powers if power is not None]
    joules = math.fsum(power * work for power, work in zip(known, compute_s, strict=False))
    return RoundCost(
        seconds=seconds,
        bytes_up=len(boards) * up,
        bytes_down=len(boards) * down,
        joules=joules if len(known) == len(boards) else None,
        waiting=0.0 if is_asynchronous else max(0.0, 1 - math.fsum(total_s) / (len(boards) * seconds)),
        slowest=boards[slowest].name,
        slowest_s=total_s[slowest],
        median_s=sorted(total_s)[len(boards) // 2],
        sending=sending_s[slowest] / total_s[slowest],
        loss_risk=math.fsum(
            _compute_loss_risk(board.profile, one) for board, one in zip(boards, total_s, strict=True)
        )
        / len(boards),
        examples=batch_size * sum(counts),
        gain=gain,
    )


def _count_iterations(options: Mapping[str, Scalar], num_examples: int, batch_size: int, step_s: float) -> int:
    if (number := options.get("iterations")) is not None:
        return max(1, int(number))
    if (seconds := options.get("seconds")) is not None:
        return max(1, int(float(seconds) / step_s))
    return max(1, round(float(options.get("epochs") or 1.0) * math.ceil(num_examples / batch_size)))


def _compute_exchange_s(profile: DeviceProfile, up: int, down: int) -> float:
    return 2 * profile.latency_s + up / profile.up_bytes_per_s + down / profile.down_bytes_per_s


def _compute_loss_risk(profile: DeviceProfile, work_s: float) -> float:
    return 0.0 if profile.mtbf_s is None else 1 - math.exp(-work_s / profile.mtbf_s)


def _get_codec_gain(codec: str) -> float:
    return CODEC_GAINS.get(AUTO_AS if codec.startswith(AUTO) else codec, 1.0)
