"""Codec selection (`auto`): the codec of every instruction, chosen from its device's past updates.

The criterion is time. Of the candidates, a device gets the lightest whose upload is expected to take no more than a
share of the rest of its turnaround (compute, download, latency), and to meet the deadline. The share belongs to the
run: while the accuracy rises steadily it halves, when it stalls it doubles. The choice gets lighter one step an
update, since a wrong guess then costs little, and harder at once. An unknown device starts in the middle, and then
goes one step harder: the time of another size separates the uplink from the rest. Where sizes hardly differ, both
ways are taken to be equally fast. The estimates are checkpointed as they are (`LinkEstimates`).

A device whose connection is metered pays for bytes: it gets the codec of the run file for that, else the smallest
candidate that is worth it. What its upload took is observed all the same, for the time when it is not metered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from edgefl.compression.error_feedback import has_error_feedback
from edgefl.compression.registry import AUTO, LAYER_SEPARATOR
from edgefl.core.errors import CodecError
from edgefl.core.types import PREFETCH_BYTE_KEYS, Event, InstructionFailed, TrainInstruction, Update, UpdateStatus

CANDIDATES = (
    "ef|fp16",
    "ef|int8",
    "ef|topk:0.1|int8",
    "ef|topk:0.03|int8",
    "ef|topk:0.01|int8",
    "ef|topk:0.003|int8",
)
"""Candidates of a plain `auto`: each takes about a third of the bytes of the one before, except the first two."""

INITIAL_SHARE, MIN_SHARE, MAX_SHARE = 0.25, 0.125, 4.0
"""Below an eighth there is hardly any time left to save, and training on too few entries costs accuracy."""
DEADLINE_SHARE = 0.8
LIGHTER_CODEC_MARGIN = 0.8
"""Maximum fraction of the allowed time for the upload of a lighter codec, against oscillation by noise."""
DECAY = 0.8
"""Weight of an observation relative to the next one."""
MIN_BYTE_SPREAD = 0.02
"""Minimum relative spread of sizes for an estimate of the uplink."""
MAX_WORTHWHILE_RATIO = 0.95
"""Maximum size of a worthwhile harder codec, as a fraction of a lighter one's."""
HALF_WINDOW = 3
IMPROVING_RATIO, STALLED_RATIO = 0.9, 0.98
"""Ratio of the error of the last evaluations to that of those before: at most the first, or more than the second."""


def parse_auto_candidates(line: str) -> tuple[str, ...] | None:
    """Returns the candidates of `auto` or `auto:SPEC,SPEC,...`; None for a codec's line.

    Codecs of layers, behind a semicolon, are appended to each of them.

    Raises:
        CodecError: there is one candidate only, or one of them is empty.
    """
    head, semicolon, layers = line.partition(LAYER_SEPARATOR)
    name, colon, listing = head.strip().partition(":")
    if name.strip() != AUTO:
        return None
    candidates = tuple(part.strip() for part in listing.split(",")) if colon else CANDIDATES
    if len(set(candidates)) < 2 or not all(candidates):
        raise CodecError(f"codec {line!r}: auto chooses among two or more codecs, as in auto:fp16,topk:0.01|int8")
    return tuple(dict.fromkeys(f"{spec}{semicolon}{layers}" for spec in candidates))


@dataclass(slots=True)
class LinkEstimate:
    """Link estimate of one device from its updates, newer ones counting more.

    Sums over (uploaded bytes, transfer seconds); their regression separates the uplink from the rest. `upload_share`
    is the measured share of the upload in the transfer, None until bytes have varied.
    """

    rung: int
    has_explored: bool = False
    upload_share: float | None = None
    weight: float = 0.0
    up: float = 0.0
    both: float = 0.0
    seconds: float = 0.0
    up_squared: float = 0.0
    up_seconds: float = 0.0
    compute_s: float = 0.0

    def observe(self, *, uploaded_bytes: float, downloaded_bytes: float, seconds: float, compute_s: float) -> None:
        self.weight = DECAY * self.weight + 1
        self.up = DECAY * self.up + uploaded_bytes
        self.both = DECAY * self.both + uploaded_bytes + downloaded_bytes
        self.seconds = DECAY * self.seconds + seconds
        self.up_squared = DECAY * self.up_squared + uploaded_bytes * uploaded_bytes
        self.up_seconds = DECAY * self.up_seconds + uploaded_bytes * seconds
        self.compute_s = DECAY * self.compute_s + compute_s

    def compute_costs(self) -> tuple[float, float]:
        """Returns the seconds of an uploaded byte, and those of a turnaround without its upload."""
        up, seconds = self.up / self.weight, self.seconds / self.weight
        variance = self.up_squared / self.weight - up * up
        if seconds > 0 and variance > (MIN_BYTE_SPREAD * up) ** 2:
            slope = (self.up_seconds / self.weight - up * seconds) / variance
            self.upload_share = min(max(slope * up / seconds, 0.0), 1.0)
        # Until bytes have varied, both ways are taken to be equally fast.
        share = self.up / max(self.both, 1.0) if self.upload_share is None else self.upload_share
        return share * seconds / up, (1 - share) * seconds + self.compute_s / self.weight


@dataclass(slots=True, kw_only=True)
class LinkEstimates:
    """Link estimates of a run's devices, kept over a restart.

    Attributes:
        sizes: bytes of a body in each candidate, expected at first, then measured.
        share: allowed upload time relative to the rest of a turnaround.
        accuracies: the newest since the last change of the share.
        ways: by device.
        in_flight: candidate and deadline of the instructions in flight.
    """

    sizes: list[float] = field(default_factory=list)
    share: float = INITIAL_SHARE
    accuracies: deque[float] = field(default_factory=lambda: deque(maxlen=2 * HALF_WINDOW))
    ways: dict[str, LinkEstimate] = field(default_factory=dict)
    in_flight: dict[str, tuple[int, float | None]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class CodecSelector:
    """Selects among `specs`, lightest first; one object serves one run, live or simulated.

    `metered_spec` is that of devices whose connection is metered; None for `specs[smallest]`, the last useful one by
    the sizes expected at first: measured ones have the same bytes more in each, and are not of all.
    """

    specs: Sequence[str]
    link_estimates: LinkEstimates
    metered_spec: str | None = None
    smallest: int = 0

    def adapt_instruction(self, instruction: TrainInstruction, *, is_metered: bool = False) -> TrainInstruction:
        """Returns the instruction with the best codec for its device now.

        A strategy's own codec takes precedence; blocks of redundant shards keep the lightest, since all
        copies of a block must be the same.
        """
        if instruction.codec != self.specs[0] or instruction.block is not None:
            return instruction
        if is_metered and self.metered_spec is not None:
            return replace(instruction, codec=self.metered_spec)  # none of `specs`: it says nothing of their time
        if len(self.specs) == 1:
            return instruction
        estimate = self.link_estimates.ways.get(instruction.device_id)
        index = (len(self.specs) - 1) // 2 if estimate is None else estimate.rung
        index = self.smallest if is_metered else index
        self.link_estimates.in_flight[instruction.assignment_id] = index, instruction.deadline_s
        return instruction if index == 0 else replace(instruction, codec=self.specs[index])

    def observe(self, event: Event, accuracy: float | None) -> None:
        """Updates the estimates from an event; `accuracy` is that of a just evaluated version, else None."""
        if accuracy is not None:
            self._record_accuracy(accuracy)
        if not isinstance(event, Update | InstructionFailed):
            return
        choice = self.link_estimates.in_flight.pop(event.assignment_id, None)
        if choice is None:
            return
        index, deadline_s = choice
        estimate = self.link_estimates.ways.get(event.device_id)
        if estimate is None:
            estimate = self.link_estimates.ways[event.device_id] = LinkEstimate(rung=index)
        if isinstance(event, Update):
            self._update_estimate(estimate, event, index, deadline_s)
        elif event.outcome is UpdateStatus.LOST:  # it may have been too slow, and then it would never be measured
            estimate.rung = max(estimate.rung, min(index + 1, self._find_hardest()))

    def _update_estimate(self, link: LinkEstimate, update: Update, rung: int, deadline_s: float | None) -> None:
        metrics = update.metrics
        prefetched_up, prefetched_down = (int(metrics.extra.get(name, 0)) for name in PREFETCH_BYTE_KEYS)
        up, down = metrics.bytes_up - prefetched_up, metrics.bytes_down - prefetched_down
        if up <= 0 or not (math.isfinite(metrics.send_s) and math.isfinite(metrics.compute_s)):
            return
        self.link_estimates.sizes[rung] += (1 - DECAY) * (up - self.link_estimates.sizes[rung])
        link.observe(
            uploaded_bytes=up, downloaded_bytes=max(0, down), seconds=metrics.send_s, compute_s=metrics.compute_s
        )
        per_byte, other_s = link.compute_costs()
        allowed_s = self.link_estimates.share * other_s
        if deadline_s is not None:
            allowed_s = min(allowed_s, DEADLINE_SHARE * deadline_s - other_s)
        hardest = self._find_hardest()
        if link.upload_share is None and not link.has_explored:
            link.has_explored = True  # a different size is informative, and a smaller one costs nothing
            link.rung = rung + 1 if rung < hardest else max(rung - 1, 0)
            return
        fitting = (index for index, size in enumerate(self.link_estimates.sizes) if per_byte * size <= allowed_s)
        best = min(next(fitting, hardest), hardest)
        if best > link.rung:
            link.rung = best
        elif (
            best < link.rung
            and per_byte * self.link_estimates.sizes[link.rung - 1] <= LIGHTER_CODEC_MARGIN * allowed_s
        ):
            link.rung -= 1

    def _find_hardest(self) -> int:
        return _find_smallest(self.link_estimates.sizes)

    def _record_accuracy(self, accuracy: float) -> None:
        accuracies = self.link_estimates.accuracies
        accuracies.append(accuracy)
        if len(accuracies) < 2 * HALF_WINDOW:
            return
        earlier_error, later_error = (
            HALF_WINDOW - sum(islice(accuracies, start, start + HALF_WINDOW)) for start in (0, HALF_WINDOW)
        )
        if later_error > STALLED_RATIO * earlier_error:
            self.link_estimates.share = min(2 * self.link_estimates.share, MAX_SHARE)
        elif later_error <= IMPROVING_RATIO * earlier_error:
            self.link_estimates.share = max(self.link_estimates.share / 2, MIN_SHARE)
        else:
            return
        accuracies.clear()  # the next change depends on the effect of this one


def _find_smallest(sizes: Sequence[float]) -> int:
    """Returns the index of the last useful codec: beyond it bytes hardly fall."""
    return next(index for index, size in enumerate(sizes) if MAX_WORTHWHILE_RATIO * size <= min(sizes))


def make_codec_selector(sizes: Mapping[str, int], metered_spec: str | None = None) -> CodecSelector:
    """Returns the selector among candidates, given the size of a body in each.

    Args:
        sizes: by codec; one alone for what is not metered.
        metered_spec: of devices whose connection is metered; None for the smallest.

    Raises:
        CodecError: some of them keep a residual on the device (`ef`) and others do not: a change from one to the
            other would lose it.
    """
    specs = sorted(sizes, key=lambda spec: -sizes[spec])
    every = specs if metered_spec is None else [*specs, metered_spec]
    with_feedback = [spec for spec in every if has_error_feedback(spec)]
    if with_feedback and len(with_feedback) < len(every):
        without = next(spec for spec in every if spec not in with_feedback)
        rule = (
            "auto: all of its codecs begin with ef| or none does"
            if metered_spec is None
            else "it and up both begin with ef| or neither does"
        )
        raise CodecError(f"{rule}, got {with_feedback[0]} and {without}")
    estimates = LinkEstimates(sizes=[float(sizes[spec]) for spec in specs])
    smallest = _find_smallest(estimates.sizes)
    return CodecSelector(specs=specs, link_estimates=estimates, metered_spec=metered_spec, smallest=smallest)
