"""`auto`: the codec of every assignment, chosen for its device from what its updates have shown.

The currency is time. Of the candidates, a device gets the lightest whose upload is expected to take no more than a
share of the rest of its turnaround (compute, download, latency), and to meet the deadline. The share belongs to the
run: while the accuracy rises steadily it halves, when it stalls it doubles. Lighter goes one step an update, since a
wrong guess then costs little; harder goes at once. A device that is not known yet begins in the middle, and then goes
one step harder: what other bytes take tells the uplink from the rest of the way. Where it tells nothing, since the
bytes hardly differ, both ways are taken to be equally fast. What is known goes into checkpoints as it is (`Learnt`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from edgefl.compression.feedback import uses_feedback
from edgefl.compression.registry import AUTO
from edgefl.compression.specs import BETWEEN_LAYERS
from edgefl.errors import CodecError
from edgefl.types import AHEAD, Assignment, Event, Lost, Outcome, Update

CANDIDATES = (
    "ef|fp16",
    "ef|int8",
    "ef|topk:0.1|int8",
    "ef|topk:0.03|int8",
    "ef|topk:0.01|int8",
    "ef|topk:0.003|int8",
)
"""Those of a plain `auto`: each takes about a third of the bytes of the one before, but for the first two."""

FIRST_SHARE, LEAST_SHARE, MOST_SHARE = 0.25, 0.125, 4.0
"""Below an eighth there is hardly any time left to win, and learning on too few entries loses some."""
DEADLINE_SHARE = 0.8
MARGIN = 0.8
"""A lighter codec is taken only when its upload stays so far below what is allowed, or noise would swing it."""
MEMORY = 0.8
"""So much an observation still counts when the next one comes."""
SPREAD = 0.02
"""Bytes that differ by less, as a fraction, say nothing of the uplink."""
WORTH = 0.95
"""A harder codec that takes more than this fraction of the bytes of a lighter one is not worth what it leaves out."""
HALF_WINDOW = 3
RISING, STALLED = 0.9, 0.98
"""The error of the last evaluations against that of those before: at most the first, or more than the second."""


def parse_auto(line: str) -> tuple[str, ...] | None:
    """Returns the candidates of `auto` or `auto:SPEC,SPEC,...`; None for the line of a codec.

    What stands behind a semicolon, codecs of some layers, goes behind each of them.

    Raises:
        CodecError: there is one candidate only, or one of them is empty.
    """
    head, semicolon, layers = line.partition(BETWEEN_LAYERS)
    name, colon, rest = head.strip().partition(":")
    if name.strip() != AUTO:
        return None
    found = tuple(part.strip() for part in rest.split(",")) if colon else CANDIDATES
    if len(set(found)) < 2 or not all(found):
        raise CodecError(f"codec {line!r}: auto chooses among two or more codecs, as in auto:fp16,topk:0.01|int8")
    return tuple(dict.fromkeys(f"{spec}{semicolon}{layers}" for spec in found))


@dataclass(slots=True)
class Way:
    """What the updates of one device have shown, newer ones counting more.

    Sums over (uploaded bytes, seconds on the way); how the seconds follow the bytes tells the uplink from the rest.
    `upload_share` is the part of the way that was found to be upload, None until bytes have varied.
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

    def note(self, *, up: float, down: float, seconds: float, compute_s: float) -> None:
        self.weight = MEMORY * self.weight + 1
        self.up = MEMORY * self.up + up
        self.both = MEMORY * self.both + up + down
        self.seconds = MEMORY * self.seconds + seconds
        self.up_squared = MEMORY * self.up_squared + up * up
        self.up_seconds = MEMORY * self.up_seconds + up * seconds
        self.compute_s = MEMORY * self.compute_s + compute_s

    def costs(self) -> tuple[float, float]:
        """Returns the seconds of an uploaded byte, and those of a turnaround without its upload."""
        up, seconds = self.up / self.weight, self.seconds / self.weight
        variance = self.up_squared / self.weight - up * up
        if seconds > 0 and variance > (SPREAD * up) ** 2:
            slope = (self.up_seconds / self.weight - up * seconds) / variance
            self.upload_share = min(max(slope * up / seconds, 0.0), 1.0)
        # Until bytes have varied, both ways are taken to be equally fast.
        share = self.up / max(self.both, 1.0) if self.upload_share is None else self.upload_share
        return share * seconds / up, (1 - share) * seconds + self.compute_s / self.weight


@dataclass(slots=True, kw_only=True)
class Learnt:
    """What a run knows of its devices' links, to be kept over a restart.

    Attributes:
        sizes: bytes of a body in each candidate, as expected; what is measured takes their place.
        share: of the rest of a turnaround that an upload may take.
        accuracies: the newest that came since the share was changed.
        ways: by device.
        given: candidate and deadline of the assignments that are out.
    """

    sizes: list[float] = field(default_factory=list)
    share: float = FIRST_SHARE
    accuracies: deque[float] = field(default_factory=lambda: deque(maxlen=2 * HALF_WINDOW))
    ways: dict[str, Way] = field(default_factory=dict)
    given: dict[str, tuple[int, float | None]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class AutoCodec:
    """Chooses among `specs`, lightest first; one object serves one run, live or simulated."""

    specs: Sequence[str]
    learnt: Learnt

    def adjust(self, order: Assignment) -> Assignment:
        """Returns the assignment with the codec that is best for its device now.

        A strategy that asks for a codec of its own gets it; blocks of redundant shards keep the lightest, since all
        copies of a block must be the same.
        """
        if order.codec != self.specs[0] or order.block is not None:
            return order
        way = self.learnt.ways.get(order.device_id)
        rung = (len(self.specs) - 1) // 2 if way is None else way.rung
        self.learnt.given[order.assignment_id] = rung, order.deadline_s
        return order if rung == 0 else replace(order, codec=self.specs[rung])

    def note(self, event: Event, accuracy: float | None) -> None:
        """Learns from what came back; `accuracy` is that of a version that was evaluated just now, else None."""
        if accuracy is not None:
            self._note_accuracy(accuracy)
        if not isinstance(event, Update | Lost):
            return
        known = self.learnt.given.pop(event.assignment_id, None)
        if known is None:
            return
        rung, deadline_s = known
        way = self.learnt.ways.get(event.device_id)
        if way is None:
            way = self.learnt.ways[event.device_id] = Way(rung=rung)
        if isinstance(event, Update):
            self._learn(way, event, rung, deadline_s)
        elif event.outcome is Outcome.LOST:  # it may have been too slow, and then nobody would ever measure it
            way.rung = max(way.rung, min(rung + 1, self._hardest()))

    def _learn(self, way: Way, update: Update, rung: int, deadline_s: float | None) -> None:
        metrics = update.metrics
        ahead_up, ahead_down = (int(metrics.extra.get(name, 0)) for name in AHEAD)
        up, down = metrics.bytes_up - ahead_up, metrics.bytes_down - ahead_down
        if up <= 0 or not (math.isfinite(metrics.send_s) and math.isfinite(metrics.compute_s)):
            return
        self.learnt.sizes[rung] += (1 - MEMORY) * (up - self.learnt.sizes[rung])
        way.note(up=up, down=max(0, down), seconds=metrics.send_s, compute_s=metrics.compute_s)
        per_byte, rest_s = way.costs()
        allowed_s = self.learnt.share * rest_s
        if deadline_s is not None:
            allowed_s = min(allowed_s, DEADLINE_SHARE * deadline_s - rest_s)
        hardest = self._hardest()
        if way.upload_share is None and not way.has_explored:
            way.has_explored = True  # other bytes than these will tell, and fewer cost nothing
            way.rung = rung + 1 if rung < hardest else max(rung - 1, 0)
            return
        fits = (place for place, size in enumerate(self.learnt.sizes) if per_byte * size <= allowed_s)
        best = min(next(fits, hardest), hardest)
        if best > way.rung:
            way.rung = best
        elif best < way.rung and per_byte * self.learnt.sizes[way.rung - 1] <= MARGIN * allowed_s:
            way.rung -= 1

    def _hardest(self) -> int:
        """Returns the last codec that is worth taking: beyond it bytes hardly fall."""
        return next(place for place, size in enumerate(self.learnt.sizes) if WORTH * size <= min(self.learnt.sizes))

    def _note_accuracy(self, accuracy: float) -> None:
        seen = self.learnt.accuracies
        seen.append(accuracy)
        if len(seen) < 2 * HALF_WINDOW:
            return
        before, after = (HALF_WINDOW - sum(islice(seen, start, start + HALF_WINDOW)) for start in (0, HALF_WINDOW))
        if after > STALLED * before:
            self.learnt.share = min(2 * self.learnt.share, MOST_SHARE)
        elif after <= RISING * before:
            self.learnt.share = max(self.learnt.share / 2, LEAST_SHARE)
        else:
            return
        seen.clear()  # the next change follows from what this one has brought


def make_auto(sizes: Mapping[str, int]) -> AutoCodec:
    """Returns the chooser among candidates, given the bytes that a body takes in each.

    Raises:
        CodecError: some of them keep what they leave out on the device (`ef`) and others do not: a change from one to
            the other would forget it.
    """
    specs = sorted(sizes, key=lambda spec: -sizes[spec])
    with_feedback = [spec for spec in specs if uses_feedback(spec)]
    if with_feedback and len(with_feedback) < len(specs):
        without = next(spec for spec in specs if spec not in with_feedback)
        raise CodecError(f"auto: all of its codecs begin with ef| or none does, got {with_feedback[0]} and {without}")
    return AutoCodec(specs=specs, learnt=Learnt(sizes=[float(sizes[spec]) for spec in specs]))
