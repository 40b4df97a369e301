"""Update guard: refuses and clips the updates of one rogue device in a few, whatever the strategy.

An update is measured once, when it arrives: the norm and the largest entry of each tensor, and a sketch of its
direction. It is judged against the newest updates of *other* devices, one for each device, of earlier versions: so a
synchronous result does not depend on who answers first, and no device can move its own bounds. The first updates of a
run have none before them; they are held in the journal until all are there, and judged against each other.

- Not finite, of another shape, or above `max_norm`: refused.
- Entries, tensors or a whole update beyond a multiple of the others' median: clipped to it; to the median or below
  where a device was far above its peers in several versions, the further the more it is above; refused at hundreds of
  times the median. A tensor of which most entries are too large is scaled, so that it keeps its direction.
- Its part orthogonal to the others' direction adds up, version by version, to far more than theirs do (a slow creep):
  clipped to less than the median, by as much as it is ahead.
- It goes along with the others where they pull back (a changed sign): refused. An honest device descends an objective
  of its own, so when the others have moved the model, its next update moves against them: the inner product of both
  changes is negative, however different its data are.
- Its newest updates together are opposed to those of the others, and it is long or does not pull back: clipped to
  the median; where the others agree with each other: refused.

A device whose updates are refused several times in a row is quarantined. After a refusal for what a device's earlier
updates add up to, its next one is let in, clipped where it is opposed: each refusal has seen more than the last.

The memory is bounded: `MAX_RECORDS` records of two numbers per tensor and one sketch, two sketches and some numbers
per device, four sketches where its updates are sparse, and as many sketches of the model's way. The held updates stay
in the journal.

Sources: the sketch is a count sketch with one hash per block (Charikar, Chen, Farach-Colton, Finding Frequent Items
in Data Streams, 2002); that the change of a gradient has a positive inner product with the way is the curvature
condition of Nocedal, Wright, Numerical Optimization, 2006, section 6.1; clipping of norms as in Sun et al., Can You
Really Backdoor Federated Learning?, 2019; the median and its absolute deviation as robust scale: Hampel, 1974.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from edgefl.core.types import (
    NOT_FINITE,
    Array,
    ClippedUpdate,
    FleetView,
    LazyTensors,
    ModelSpec,
    SparseTensor,
    Tensor,
    TensorKind,
    Tensors,
    TensorSpec,
    Update,
    derive_rng,
)
from edgefl.strategies.aggregation import unload_tensors

SKETCH_SIZE = 1024
"""Numbers of a sketch: a cosine is known to about 1 / sqrt of them."""
MAX_RECORDS = 64
"""Devices whose newest update is remembered; of more, those of the newest versions."""
MIN_PEERS = 2
"""Other devices without which there is no usual norm."""
MIN_DIRECTION_PEERS = 4
"""Other devices without which there is no usual direction."""
TENSOR_RATIO_FACTOR, PEAK_RATIO_FACTOR = 2.0, 2.5
"""A single tensor varies more than the whole, and its largest entry more than the tensor."""
MAX_PEAK_FRACTION = 0.05
"""Of a tensor's entries that are cut off; where more are too large it is scaled, which keeps its direction."""
NUM_LONG_VERSIONS, MAX_LONG_VERSIONS = 3, 10
"""Versions with a norm far above the peers', less those without, after which clipping goes to the median and below;
and how many of them count."""
MAX_EXCESS_POWER = 4
"""Of `norm_ratio`, 256 times by default: a device that is still so far above its peers then is refused."""
DIRECTION_DECAY, MIN_DIRECTION_VERSIONS = 0.8, 5
"""A device's direction is the sum of those of its updates, so decayed: sparse updates of one device hardly overlap,
and those of a few batches differ, where their sums agree. And how many versions it needs to be judged by it."""
MIN_UNITY, MIN_OPPOSITION, MIN_OPPOSITION_BESIDE_RESPONSES = 0.25, 0.85, 1.25
"""How much the others must agree with each other, and more than the device does with them, since where shards differ
much honest devices pull against each other. In 240 runs without an attack the difference was at most 1.05 with
Dirichlet 0.3, of `scaffold` 0.7, and 0.5 i.i.d.; of a changed sign 1.0 with `scaffold`, and i.i.d. above 1.3 from the
fifth version on. Where responses are compared, they tell the rest."""
RESPONSE_DECAY, MIN_RESPONSES = 0.97, 5
"""Of the sums over versions, and how many a device needs to be judged by them."""
RESPONSE_BOUNDS, MIN_EXCUSE = ((2.0, -1.0), (1.0, -1.75)), -0.5
"""In standard deviations of a sum of random cosines: a device is refused from a first one on if three quarters of the
others are below the one beside it; below the last it is not called opposed, unless it is long. In 240 runs without an
attack honest devices were at most at 1.7 and 0.6; one of a changed sign passed the first after 9 to 43 versions."""
NUM_CALIBRATED = 10
"""Devices of those runs. Of more, chance alone has one at a higher score: the bounds rise so that one of all passes
them with the same probability."""
MIN_DOUBT = 1.0
"""From this on a device's refusals are not forgotten, though the next update is let in."""
MIN_SPARSE_GAP = 3.75
"""Where updates are sparse, how far a device has to be above three quarters of the others, if these are below -1. The
ways and changes are summed before they are compared, as directions are, and such sums follow one another: honest
devices were at most 3.4 above, those of a changed sign were it after 14 to 32 versions."""
MAX_EXCUSED_RATIO = 2.0
"""Of the others' median norm: an opposed update that grows moves against their way as well as one that pulls back."""
DRIFT_RATIO, DRIFT_DECAY, MIN_DRIFT_VERSIONS = 3.0, 0.98, 10
_NORMAL, MIN_QUANTILE, MAX_QUANTILE = NormalDist(), 1e-300, 1 - 1e-15
_DEVIATIONS = 3 * 1.4826
"""Three standard deviations, in median absolute deviations of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What is remembered of an update, as it was let in.

    `norms` and `peaks` are [T] norm and largest absolute entry by float tensor, `norm` that of all parameters,
    `raw_norm` the same before clipping, `sketch` the [SKETCH_SIZE] direction, of length 1 (or 0), `is_sparse` says
    whether it carries some of the entries alone, `entered` is the version that it went into.
    """

    version: int
    norm: float
    raw_norm: float
    norms: Array
    peaks: Array
    sketch: Array
    is_sparse: bool = False
    entered: int = 0

    @property
    def step(self) -> Array:
        """The sketch of the update, [SKETCH_SIZE]."""
        return np.float32(self.norm) * self.sketch


@dataclass(slots=True)
class DeviceTrust:
    """What a device's updates were like: their direction, versions that were long less those that were not, drift.

    `direction` is a decayed sum of [SKETCH_SIZE] directions of its updates, `agreement` the cosine with that of the
    others when the last update came, `unity` how much these agreed with each other, `norm_ratio` a decayed geometric
    mean of the norms of its updates to their median, of 1 where one is shorter.

    `response`, `response_square` are decayed sums of the cosine of its update's change with the way that the others
    moved the model meanwhile, and of its square; `num_responses` their number. `way` and `change`, [SKETCH_SIZE], are
    decayed sums of both where updates are sparse. `refused_at` is `num_versions` when an update was last refused.
    """

    direction: Array = field(default_factory=lambda: np.zeros(SKETCH_SIZE, np.float32))
    agreement: float = 0.0
    unity: float = 0.0
    norm_ratio: float = 1.0
    num_long: int = 0
    num_versions: int = 0
    drift: Array = field(default_factory=lambda: np.zeros(SKETCH_SIZE, np.float32))
    damping: float = 1.0
    response: float = 0.0
    response_square: float = 0.0
    num_responses: int = 0
    way: Array = field(default_factory=lambda: np.zeros(1, np.float32))
    change: Array = field(default_factory=lambda: np.zeros(1, np.float32))
    refused_at: int = -1

    @property
    def is_judged(self) -> bool:
        """Whether nothing has been seen of its updates since one was refused."""
        return self.refused_at == self.num_versions

    @property
    def score(self) -> float | None:
        """The sum of responses in standard deviations of random ones; None while there are too few."""
        if self.num_responses < MIN_RESPONSES:
            return None
        return self.response / math.sqrt(self.response_square) if self.response_square > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class GuardState:
    """State of a guard: all that its decisions depend on, serialisable.

    Attributes:
        refusals: updates refused in a row, by device.
        quarantined: devices that are not asked again.
        records: newest update of each device, of versions before the present one.
        incoming: those of the present version.
        trust: by device, of those in `records`.
        positions: version -> sketch of the way from the first model, of the newest that devices began with.
        held: the run's first updates by assignment, not judged yet.
        is_open: whether these have been judged.
        usual_norm: the largest median norm of a version's updates so far.
    """

    refusals: dict[str, int] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    records: dict[str, UpdateRecord] = field(default_factory=dict)
    incoming: dict[str, UpdateRecord] = field(default_factory=dict)
    trust: dict[str, DeviceTrust] = field(default_factory=dict)
    positions: dict[int, Array] = field(default_factory=dict)
    held: dict[str, Update] = field(default_factory=dict)
    is_open: bool = False
    usual_norm: float = 0.0


@dataclass(slots=True, kw_only=True)
class UpdateGuard:
    """Refuses, clips and lets in updates; without `norm_ratio` and `min_cosine` only what is malformed is refused.

    Attributes:
        has_full_models: devices are nodes of a graph: an update holds a whole model, or none, and is only checked.
        has_collective: devices add up their updates: one of them sends what all hold, the others nothing;
            or their updates are masked, and come as messages.
        shapes: of the model; empty for no check.
        max_norm: most norm of an update, None for no bound.
        norm_ratio: most ratio of it to the median of other devices, None for no bound.
        min_cosine: least cosine with the other devices' directions, None for no bound.
        compares_responses: a device's update follows from the model that it got and its data alone.
        refusals_before_quarantine: number of them, until nothing speaks against its updates any more.
        hold_updates: number of first updates that are judged together, None for all that were asked for.
        find_fault: tensors of these shapes -> why no device can have them, None where one can.
    """

    has_full_models: bool = False
    has_collective: bool = False
    shapes: ModelSpec = ()
    max_norm: float | None = None
    norm_ratio: float | None = None
    min_cosine: float | None = None
    compares_responses: bool = True
    refusals_before_quarantine: int = 3
    hold_updates: int | None = None
    find_fault: Callable[[Tensors], str | None] = lambda _: None
    state: GuardState = field(default_factory=GuardState)
    _clipped: list[ClippedUpdate] = field(default_factory=list, init=False)
    _should_release: bool = field(default=False, init=False)
    _measured: tuple[str, UpdateRecord] | None = field(default=None, init=False)

    @property
    def is_adaptive(self) -> bool:
        """Whether updates are compared with those of other devices."""
        return (self.norm_ratio is not None or self.min_cosine is not None) and not self.has_full_models

    # Before the journal.

    def rejection_reason(self, update: Update) -> str | None:
        """Returns why an update is refused, or None; depends on earlier versions alone."""
        if (self.has_full_models or self.has_collective) and not update.tensors:
            return None
        reason = (
            self._find_mismatch(update.tensors)
            or self._find_norm_violation(update)
            or self.find_fault(update.tensors)
        )
        device_id = update.device_id
        is_judged = self.state.trust.get(device_id, _NO_TRUST).is_judged
        if reason is None and not is_judged:
            reason = self._find_opposition(device_id) or self._find_response(device_id)
        if reason is None:
            reason = self._find_excess(update)
        if reason is None:
            if self._is_clear(device_id):
                self.state.refusals.pop(device_id, None)
            return None
        self._measured = None
        count = self.record_rejection(update.device_id)
        if count < self.refusals_before_quarantine:
            return reason
        return f"{reason}; refused {count} times in a row, so {update.device_id} is quarantined and not asked again"

    def record_rejection(self, device_id: str) -> int:
        """Counts a refusal, and returns the number in a row.

        What a device's earlier updates add up to refuses one of them: the next is let in, and seen.
        """
        if (trust := self.state.trust.get(device_id)) is not None:
            trust.refused_at = trust.num_versions
        count = self.state.refusals[device_id] = self.state.refusals.get(device_id, 0) + 1
        if count >= self.refusals_before_quarantine:
            self.state.quarantined.add(device_id)
        return count

    def _find_mismatch(self, tensors: Tensors) -> str | None:
        for spec in self.shapes:
            if spec.name not in tensors:
                return f"the update has no tensor {spec.name!r}"
            tensor = tensors[spec.name]
            if tensor.shape != spec.shape:
                return f"tensor {spec.name!r} has shape {tensor.shape}, the model's is {spec.shape}"
        return None

    def _find_norm_violation(self, update: Update) -> str | None:
        if self.is_adaptive:
            record = measure_update(update, self._float_specs())
            self._measured = update.assignment_id, record
            norm, is_finite = record.norm, bool(np.isfinite(record.norms).all())
        else:
            norm = compute_norm(update.tensors)
            is_finite = math.isfinite(norm)
        if not is_finite:
            return f"{NOT_FINITE}: its training has diverged"
        if self.max_norm is not None and norm > self.max_norm and not self.has_full_models:
            return f"the update's norm is {norm:.4g}, at most {self.max_norm:g} is let in"
        return None

    def _find_opposition(self, device_id: str) -> str | None:
        trust = self.state.trust.get(device_id, _NO_TRUST)
        if not self._is_opposed(trust):
            return None
        least = MIN_OPPOSITION_BESIDE_RESPONSES if self.compares_responses else MIN_OPPOSITION
        if trust.unity < MIN_UNITY or trust.unity - trust.agreement < least:
            return None
        return (
            f"its newest updates are opposed to those of the others: their cosine is {trust.agreement:.2f}, at least "
            f"{self.min_cosine:g} is let in, and the others agree by {trust.unity:.2f}"
        )

    def _find_response(self, device_id: str) -> str | None:
        """Returns why an update is refused, of a device that goes along with what the others did to the model."""
        score = self.state.trust.get(device_id, _NO_TRUST).score
        if not self.compares_responses or self.min_cosine is None or score is None:
            return None
        scores = sorted(
            trust.score
            for name, trust in self.state.trust.items()
            if name != device_id and trust.score is not None and name not in self.state.quarantined
        )
        if len(scores) < MIN_DIRECTION_PEERS:
            return None
        usual = scores[math.ceil(0.75 * len(scores)) - 1]
        is_sparse = self._has_sparse_updates()
        # Scores of sparse updates are compared with those of the others: the distance is what rises, not their score.
        bounds, start = (((MIN_SPARSE_GAP, -1.0),), usual) if is_sparse else (RESPONSE_BOUNDS, 0.0)
        num_devices = 1 + len(scores)
        if not any(score - start >= raise_bound(least, num_devices) and usual <= most for least, most in bounds):
            return None
        return (
            f"its updates go along with what the others did to the model ({score:+.1f} deviations), where those of "
            f"the others pull back ({scores[len(scores) // 2]:+.1f}): it does not descend"
        )

    def _is_clear(self, device_id: str) -> bool:
        """Returns whether nothing speaks against a device's updates any more: its refusals are forgotten."""
        trust = self.state.trust.get(device_id, _NO_TRUST)
        is_doubtful = self.compares_responses and trust.score is not None and trust.score >= MIN_DOUBT
        return not (trust.is_judged or is_doubtful or self._is_opposed(trust))

    def _find_excess(self, update: Update) -> str | None:
        """Returns why an update is refused for its norm, of a device that was far above the others for long."""
        trust = self.state.trust.get(update.device_id, _NO_TRUST)
        if self.norm_ratio is None or self._measured is None or trust.num_long < NUM_LONG_VERSIONS:
            return None
        peers = [peer.raw_norm for name, peer in self.state.records.items() if name != update.device_id]
        usual = float(compute_low_medians(np.array(peers)[:, None])[0])
        norm = self._measured[1].norm
        # Of a model that fits nearly all examples most mini-batches move nothing; one of the others is none too long.
        if not norm > max(usual * self.norm_ratio**MAX_EXCESS_POWER, self.state.usual_norm):
            return None
        return (
            f"its norm {norm:.3g} is {norm / usual:.3g} times the usual {usual:.3g}, after "
            f"{trust.num_long} versions or more that were far above it"
        )

    def _is_opposed(self, trust: DeviceTrust) -> bool:
        """Returns whether it is opposed to others that agree, and is long or not seen to pull back."""
        if self.min_cosine is None or trust.num_versions < MIN_DIRECTION_VERSIONS:
            return False
        is_excused = self.compares_responses and trust.score is not None and trust.score < MIN_EXCUSE
        if is_excused and trust.norm_ratio <= MAX_EXCUSED_RATIO:
            return False
        return trust.agreement < self.min_cosine and trust.unity >= 0

    # Behind the journal.

    def admit(self, update: Update) -> Sequence[Update]:
        """Returns what the strategy is to receive of an update that the journal has: clipped, or none yet."""
        if not self.is_adaptive or not update.tensors:
            return (update,)
        if not self.state.is_open:
            self.state.held[update.assignment_id] = update
            self._measured = None
            unload_tensors(update.tensors)
            return ()
        return (self._judge(update, self._measure(update), self.state.records),)

    def release(self, view: FleetView) -> Sequence[Update]:
        """Returns the held updates, judged against each other, once enough are there; empty while they are not."""
        held = self.state.held
        if not held:
            return ()
        is_complete = self.hold_updates is not None and len(held) >= self.hold_updates
        if not (is_complete or self._should_release or not view.busy or len(held) >= MAX_RECORDS):
            return ()
        updates = list(held.values())
        records: dict[str, UpdateRecord] = {}
        for update in updates:
            records.setdefault(update.device_id, measure_update(update, self._float_specs()))
            unload_tensors(update.tensors)
        self.state.held, self.state.is_open, self._should_release = {}, True, False
        judged = [
            self._judge(update, measure_update(update, self._float_specs()), records, is_first=True)
            for update in updates
        ]
        self.state.records = dict(self.state.incoming)
        return judged

    def release_next(self) -> None:
        """Ends the hold at the next turn: the strategy does not wait any longer."""
        self._should_release = True

    def list_held(self) -> dict[str, list[str]]:
        """Returns held assignments by device."""
        held: dict[str, list[str]] = {}
        for update in self.state.held.values():
            held.setdefault(update.device_id, []).append(update.assignment_id)
        return held

    def record_version(self, version: int) -> None:
        """Makes the updates that arrived before a new version those that later ones are judged against."""
        state = self.state
        if not state.incoming:
            if version - 1 in state.positions:
                state.positions[version] = state.positions[version - 1]
            return
        incoming = {name: replace(record, entered=version) for name, record in state.incoming.items()}
        newest = {**state.records, **incoming}
        newest = {name: record for name, record in newest.items() if name not in state.quarantined}
        if self.is_adaptive:
            self._record_trust(newest)
            self._record_position(version)
            self._record_usual_norm(newest)
        state.incoming = {}
        if len(newest) > MAX_RECORDS:
            kept = sorted(newest, key=lambda name: (-newest[name].version, name))[:MAX_RECORDS]
            newest = {name: newest[name] for name in sorted(kept)}
        state.records = newest
        for name in [name for name in state.trust if name not in newest]:
            del state.trust[name]

    def pop_clipped(self) -> Sequence[ClippedUpdate]:
        """Returns what was clipped since the last call."""
        clipped, self._clipped = self._clipped, []
        return clipped

    def restore(self, state: GuardState, *, keeps_held: bool = False) -> None:
        """Restores a state; without `keeps_held` the devices are asked again for what was held."""
        self.state = state if keeps_held else replace(state, held={})

    # Judgement.

    def _float_specs(self) -> ModelSpec:
        return tuple(spec for spec in self.shapes if np.dtype(spec.dtype).kind in "fc")

    def _measure(self, update: Update) -> UpdateRecord:
        measured, self._measured = self._measured, None
        if measured is not None and measured[0] == update.assignment_id:
            return measured[1]
        return measure_update(update, self._float_specs())

    def _judge(
        self, update: Update, record: UpdateRecord, known: Mapping[str, UpdateRecord], *, is_first: bool = False
    ) -> Update:
        """Returns the update as it is let in, and keeps its record."""
        peers = [peer for name, peer in known.items() if name != update.device_id]
        clip = self._find_clip(update.device_id, record, peers)
        if clip is not None:
            update = replace(update, tensors=clip.apply_to(update.tensors), is_clipped=True, share=clip.share)
            clipped = measure_update(update, self._float_specs())
            record = replace(record, norm=clipped.norm, sketch=clipped.sketch)
            self._clipped.append(
                ClippedUpdate(assignment_id=update.assignment_id, device_id=update.device_id, reason=clip.reason)
            )
            unload_tensors(update.tensors)
        elif is_first:
            unload_tensors(update.tensors)
        self.state.incoming[update.device_id] = record
        return update

    def _find_clip(self, device_id: str, record: UpdateRecord, peers: Sequence[UpdateRecord]) -> TensorClip | None:
        if self.norm_ratio is None or len(peers) < MIN_PEERS:
            return None
        trust, reasons = self.state.trust.get(device_id, _NO_TRUST), list[str]()
        specs = self._float_specs()
        usual_peaks = compute_low_medians(np.array([peer.peaks for peer in peers]))
        usual_norms = compute_low_medians(np.array([peer.norms for peer in peers]))
        peak_limits = usual_peaks * self.norm_ratio * PEAK_RATIO_FACTOR
        norm_limits = usual_norms * self.norm_ratio * TENSOR_RATIO_FACTOR
        rows = list(zip(specs, peak_limits, record.peaks, norm_limits, record.norms, strict=True))
        peaks = {spec.name: float(limit) for spec, limit, peak, _, _ in rows if peak > limit}
        if peaks:
            times = self.norm_ratio * PEAK_RATIO_FACTOR
            reasons.append(f"entries of {next(iter(peaks))!r} are more than {times:g} times the usual")
        scales = {
            spec.name: float(limit / norm)
            for spec, _, _, limit, norm in rows
            if norm > limit and spec.name not in peaks
        }
        if scales:
            times = self.norm_ratio * TENSOR_RATIO_FACTOR / next(iter(scales.values()))
            reasons.append(f"the norm of {next(iter(scales))!r} is {times:.3g} times the usual")
        raw_norms = np.array([peer.raw_norm for peer in peers])
        limit = self._bound_norm(record.norm, trust, raw_norms, reasons)
        if not reasons:
            return None
        counted = min(record.norm, self._find_usual(raw_norms))
        share = limit / counted if 0 < limit < counted else 1.0
        return TensorClip(peaks=peaks, scales=scales, norm=limit, share=share, specs=specs, reason="; ".join(reasons))

    def _bound_norm(self, norm: float, trust: DeviceTrust, norms: Array, reasons: list[str]) -> float:
        """Returns the most norm of an update, by those of the others; adds why it is too long to the reasons."""
        usual, limit = self._find_usual(norms), self._compute_most(norms)
        most = limit
        is_opposed = self._is_opposed(trust)
        if is_opposed:
            limit = usual
        if trust.num_long >= NUM_LONG_VERSIONS:
            limit = usual * min(1.0, most / norm) if norm > 0 else usual
        if trust.damping < 1.0:
            limit = min(limit, usual * trust.damping)
        if norm > limit:
            reasons.append(f"its norm {norm:.3g} is {norm / usual:.3g} times the usual {usual:.3g}")
            if is_opposed:
                reasons.append("its newest updates are opposed to those of the others")
            if trust.damping < 1.0:
                reasons.append("what it adds beside the others' direction grows far faster than theirs")
        return limit

    def _find_usual(self, norms: Array) -> float:
        """Returns the others' low median, or the run's largest where most moved nothing; infinity while unknown."""
        usual = float(compute_low_medians(norms[:, None])[0])
        return usual if math.isfinite(usual) else self.state.usual_norm or math.inf

    def _compute_most(self, norms: Array) -> float:
        assert self.norm_ratio is not None
        most = compute_most_norm(norms, self.norm_ratio)
        return most if math.isfinite(most) else self._find_usual(norms) * self.norm_ratio

    def _record_trust(self, newest: Mapping[str, UpdateRecord]) -> None:
        names, incoming = list(newest), self.state.incoming
        if len(names) <= MIN_DIRECTION_PEERS:
            self.state.trust.clear()  # what was found among more devices is out of date
            return
        for name in incoming:
            trust = self.state.trust.setdefault(name, DeviceTrust())
            trust.direction = np.float32(DIRECTION_DECAY) * trust.direction + newest[name].sketch
        sketches = np.stack([newest[name].sketch for name in names])
        total = sketches.sum(axis=0)
        directions = np.stack([self._get_direction(name, newest[name]) for name in names])
        gram = directions @ directions.T
        agreements = compute_agreements(gram)
        raw = np.array([newest[name].raw_norm for name in names])
        for index, name in enumerate(names):
            if name not in incoming:
                continue
            trust = self.state.trust[name]
            others = total - sketches[index]
            length = float(np.linalg.norm(others))
            direction = others / length if length > 0 else others
            trust.agreement = float(agreements[index])
            trust.unity = float(np.median(compute_agreements(np.delete(np.delete(gram, index, 0), index, 1))))
            peers = np.delete(raw, index)
            usual = float(compute_low_medians(peers[:, None])[0])
            ratio = max(1.0, float(raw[index]) / usual) if usual > 0 else 1.0
            trust.norm_ratio = trust.norm_ratio**DIRECTION_DECAY * ratio ** (1.0 - DIRECTION_DECAY)
            is_long = self.norm_ratio is not None and raw[index] > self._compute_most(peers)
            trust.num_long = min(trust.num_long + 1, MAX_LONG_VERSIONS) if is_long else max(trust.num_long - 1, 0)
            step = sketches[index] * np.float32(newest[name].norm / usual if math.isfinite(usual) else 0.0)
            self._record_response(trust, self.state.records.get(name), incoming[name])
            trust.drift = np.float32(DRIFT_DECAY) * trust.drift + step - (step @ direction) * direction
            trust.num_versions += 1
        self._record_damping(incoming)

    def _get_direction(self, name: str, record: UpdateRecord) -> Array:
        trust = self.state.trust.get(name)
        direction = record.sketch if trust is None else trust.direction
        length = float(np.linalg.norm(direction))
        return direction / np.float32(length) if length > 0 else direction

    def _record_response(self, trust: DeviceTrust, previous: UpdateRecord | None, record: UpdateRecord) -> None:
        """Adds how a device's update has changed, along the way that the others moved the model meanwhile."""
        positions = self.state.positions
        if previous is None or previous.version >= record.version:
            return
        if not {previous.version, record.version} <= positions.keys():
            return
        way = positions[record.version] - positions[previous.version]
        if previous.entered <= record.version:
            way = way - previous.step
        change = record.step - previous.step
        if self._has_sparse_updates():
            way = trust.way = np.float32(DIRECTION_DECAY) * trust.way + way
            change = trust.change = np.float32(DIRECTION_DECAY) * trust.change + change
        length = float(np.linalg.norm(way)) * float(np.linalg.norm(change))
        response = float(way @ change) / length if 0 < length < math.inf else 0.0
        trust.response = RESPONSE_DECAY * trust.response + response
        trust.response_square = RESPONSE_DECAY**2 * trust.response_square + response**2
        trust.num_responses += 1

    def _has_sparse_updates(self) -> bool:
        records = self.state.records.values()
        return 2 * sum(record.is_sparse for record in records) > len(records)

    def _record_position(self, version: int) -> None:
        """Adds the way of a new version, and forgets what no device's next update begins behind."""
        state = self.state
        steps = [state.incoming[name].step for name in sorted(state.incoming)]
        before = state.positions.get(version - 1, np.zeros(SKETCH_SIZE, np.float32))
        position = before + np.sum(steps, axis=0)
        if not np.isfinite(position).all():  # of the first updates, which nobody bounds
            state.positions.clear()
            return
        oldest = min(record.version for record in {**state.records, **state.incoming}.values())
        kept = {
            known: way for known, way in state.positions.items() if oldest <= known and known > version - MAX_RECORDS
        }
        state.positions = {version - 1: before, **kept, version: position}

    def _record_usual_norm(self, newest: Mapping[str, UpdateRecord]) -> None:
        norms = np.array([[record.raw_norm] for record in newest.values()])
        if len(norms) > MIN_PEERS and math.isfinite(usual := float(compute_low_medians(norms)[0])):
            self.state.usual_norm = max(self.state.usual_norm, usual)

    def _record_damping(self, incoming: Mapping[str, UpdateRecord]) -> None:
        trust = self.state.trust
        drifts = {
            name: float(np.linalg.norm(each.drift))
            for name, each in trust.items()
            if each.num_versions >= MIN_DRIFT_VERSIONS
        }
        for name in incoming:
            if name not in drifts or len(drifts) <= MIN_DIRECTION_PEERS:
                continue
            others = np.array([drift for other, drift in drifts.items() if other != name])
            limit = float(np.median(others)) * compute_outlier_ratio(others, DRIFT_RATIO)
            trust[name].damping = min(1.0, limit / drifts[name]) if drifts[name] > 0 else 1.0


_NO_TRUST = DeviceTrust()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClip:
    """Bounds of an update: entries by tensor, factors of tensors, and the norm of all parameters.

    `share` is that norm to the others' median, where it is less.
    """

    peaks: Mapping[str, float]
    scales: Mapping[str, float]
    norm: float
    share: float
    specs: ModelSpec
    reason: str

    def apply_to(self, tensors: Tensors) -> Tensors:
        """Returns the clipped tensors, computed at their first access."""

        def load() -> Tensors:
            clipped = {name: self._clip_tensor(name, tensor) for name, tensor in tensors.items()}
            norm = compute_norm({spec.name: clipped[spec.name] for spec in _select_parameters(self.specs)})
            if norm > self.norm:
                for spec in _select_parameters(self.specs):
                    clipped[spec.name] = _scale(clipped[spec.name], self.norm / norm)
            unload_tensors(tensors)
            return clipped

        return LazyTensors(load)

    def _clip_tensor(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.peaks:
            values = tensor.values if isinstance(tensor, SparseTensor) else tensor
            limit, sizes = self.peaks[name], np.abs(values)
            if np.count_nonzero(sizes > limit) > MAX_PEAK_FRACTION * values.size:
                return _scale(tensor, limit / float(sizes.max()))
            values = np.clip(values, -limit, limit).astype(values.dtype, copy=False)
            tensor = replace(tensor, values=values) if isinstance(tensor, SparseTensor) else values
        return _scale(tensor, self.scales[name]) if name in self.scales else tensor


def _scale(tensor: Tensor, factor: float) -> Tensor:
    if isinstance(tensor, SparseTensor):
        return replace(tensor, values=(tensor.values * factor).astype(tensor.values.dtype, copy=False))
    return np.asarray(tensor * factor).astype(tensor.dtype, copy=False)


def _select_parameters(specs: ModelSpec) -> list[TensorSpec]:
    return [spec for spec in specs if spec.kind == TensorKind.PARAMETER]


def compute_low_medians(values: Array) -> Array:
    """Returns the lower median of the positive entries of each column; infinity where fewer than half are.

    Args:
        values: [n, columns], at least 0.
    """
    num_rows = len(values)
    ordered = np.sort(np.where(values > 0, values, np.inf), axis=0)
    num_positive = np.isfinite(ordered).sum(axis=0)
    medians = ordered[np.maximum(num_positive - 1, 0) // 2, np.arange(values.shape[1])]
    return np.where(2 * num_positive >= num_rows, medians, np.inf)


def compute_outlier_ratio(values: Array, least: float) -> float:
    """Returns how far above the median a value may lie: `least` times, or up to its square where they differ much.

    Args:
        values: [n], at least 0; of the other devices.
        least: above 1.
    """
    logs = np.log(values[values > 0])
    if not len(logs):
        return least
    spread = float(np.median(np.abs(logs - np.median(logs))))
    return min(max(least, math.exp(_DEVIATIONS * spread)), least**2)


def raise_bound(bound: float, num_devices: int) -> float:
    """Returns what one of so many normal deviations passes as seldom as one of `NUM_CALIBRATED` passes `bound`."""
    if num_devices <= NUM_CALIBRATED:
        return bound
    below = _NORMAL.cdf(bound) ** (NUM_CALIBRATED / num_devices)
    return max(bound, _NORMAL.inv_cdf(min(max(below, MIN_QUANTILE), MAX_QUANTILE)))


def compute_most_norm(norms: Array, ratio: float) -> float:
    """Returns how long an update may be by the norms of the others, [n].

    That is `ratio` times their low median, and more where they differ much, but at most `ratio` times their upper
    quartile: among few devices with much or little data the spread alone would let anything pass.
    """
    usual = float(compute_low_medians(norms[:, None])[0])
    known = np.sort(norms[norms > 0])
    quartile = float(known[math.ceil(0.75 * len(known)) - 1]) if len(known) else math.inf
    return min(usual * compute_outlier_ratio(norms, ratio), max(usual, quartile) * ratio)


def compute_agreements(gram: Array) -> Array:
    """Returns the cosine of each of n unit vectors with the sum of the others, [n], by their inner products."""
    sums, own = gram.sum(axis=1), np.diagonal(gram)
    cosines: Array = (sums - own) / np.sqrt(np.maximum(gram.sum() - 2 * sums + own, 1e-12))
    return cosines


def compute_norm(tensors: Tensors, *, precision: str = "float32") -> float:
    """Returns the norm over all float tensors; NaN or infinite when an entry is.

    A tensor's squares are added up in its own precision, or in `precision` where that is more.
    """
    total = 0.0
    for tensor in tensors.values():
        values = _flat_values(tensor)
        if values.dtype.kind in "fc":
            total += _square(values.astype(np.promote_types(values.dtype, precision), copy=False))
    return math.sqrt(total) if total >= 0 else math.nan


def measure_update(update: Update, specs: ModelSpec) -> UpdateRecord:
    """Returns the record of an update, in one pass over its tensors.

    Args:
        update: with the tensors of `specs`.
        specs: the float tensors of the model.
    """
    norms, peaks, sketch = np.zeros(len(specs)), np.zeros(len(specs)), np.zeros(SKETCH_SIZE, np.float32)
    total, offset = 0.0, 0
    with np.errstate(over="ignore", invalid="ignore"):  # not finite: the update is refused
        for index, spec in enumerate(specs):
            tensor = update.tensors[spec.name]
            values = _flat_values(tensor)
            square = _square(values)
            norms[index] = math.sqrt(square) if square >= 0 else math.nan
            peaks[index] = max(float(values.max()), -float(values.min())) if values.size else 0.0
            if spec.kind == TensorKind.PARAMETER and math.isfinite(square):
                total += square
                part = _compute_sketch(spec, tensor, values)
                sketch += np.roll(part, offset % SKETCH_SIZE)
            offset += spec.size
        length = float(np.linalg.norm(sketch))
    norm = math.sqrt(total)
    unit = sketch / np.float32(length) if 0 < length < math.inf else np.zeros_like(sketch)
    is_sparse = any(isinstance(tensor, SparseTensor) for tensor in update.tensors.values())
    return UpdateRecord(
        version=update.base_version,
        norm=norm,
        raw_norm=norm,
        norms=norms,
        peaks=peaks,
        sketch=unit,
        is_sparse=is_sparse,
    )


def _flat_values(tensor: Tensor) -> Array:
    """Returns the stored entries, flat, in single precision at least."""
    values = tensor.values if isinstance(tensor, SparseTensor) else tensor
    return values.reshape(-1).astype(np.float32, copy=False) if values.dtype == np.float16 else values.reshape(-1)


def _square(values: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):  # the square of a large norm overflows too
        return float(np.dot(values, values))


def _compute_sketch(spec: TensorSpec, tensor: Tensor, values: Array) -> Array:
    """Returns sums of a tensor's entries, [SKETCH_SIZE]: blocks are added up with a random sign each."""
    num_blocks = -(-spec.size // SKETCH_SIZE)
    signs = derive_rng("sketch", spec.name).integers(0, 2, num_blocks).astype(np.float32) * 2 - 1
    if isinstance(tensor, SparseTensor):
        weights = values * signs[tensor.indices // SKETCH_SIZE]
        return np.bincount(tensor.indices % SKETCH_SIZE, weights, SKETCH_SIZE).astype(np.float32)
    whole = values.size // SKETCH_SIZE
    sketch = np.zeros(SKETCH_SIZE, np.float32)
    if whole:
        sketch += signs[:whole] @ values[: whole * SKETCH_SIZE].reshape(whole, SKETCH_SIZE)
    rest = values[whole * SKETCH_SIZE :]
    if rest.size:
        sketch[: rest.size] += signs[whole] * rest
    return sketch
