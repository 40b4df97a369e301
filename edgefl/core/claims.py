"""Bounds of what devices say of their own work, by what the coordinator knows itself.

A strategy weighs, normalises and plans by these figures, so one device that claims 2^53 examples would be the model.
Fleets bound them before an update is journaled, and before any strategy sees it.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from edgefl.core.renyi_accounting import BUDGET_TOLERANCE
from edgefl.core.safe_text import escape_start
from edgefl.core.types import (
    EPSILON,
    DeviceInfo,
    DeviceThroughput,
    EvaluateResult,
    Progress,
    TrainConfig,
    TrainInstruction,
    UpdateMetrics,
)

CLAIM_BOUNDED = "claim-bounded"
"""Kind of the event: a device claimed more than was possible, or more than may count."""
DATA_DRIFTED = "data-drifted"
"""Kind of the event: what a device says of its data's drift is above `LARGE_DRIFT` for the first time."""
LARGE_DRIFT = 0.25
"""Population stability index above which a change is commonly called large (Siddiqi, 2006)."""
LARGE_JOINT_DRIFT, MAX_JOINT_P = 0.01, 0.002
"""Discrepancy of all columns at once above which a change is large, where chance makes it seldom enough."""
MAX_DRIFT_TASKS, MAX_DRIFT, MAX_MMD = 16, 1e6, 2.0
MAX_NAME_CHARS, MAX_PORT = 80, 65535
EXAMPLES_CHANGED = "examples-changed"
"""Kind of the event: a device reported another number of examples than before."""
DEFAULT_WEIGHT_RATIO = 2.0
MAX_SPEED_RATIO = 8.0
"""Within a budget of seconds, so many times the iterations of the fleet's median device are credible."""
MIN_ITERATION_S = 1e-4
"""Shortest credible iteration, before any device's speed is measured."""
MAX_GROWTH_RATIO = 2.0
MIN_GROWTH = 10_000
"""A report of more examples counts up to twice the former number, or 10,000 more where that is further. In a run a
device counts for at most twice what it had at its first instruction, however often it reports."""
GROWTH_PERIOD_S = 24 * 3600.0
"""Time in which a device's reports grow by that once."""
MAX_EXAMPLES = 2**40
TOTAL_ITERATIONS = "iterations_in_all"
"""Key in the `extra` of an autonomous node's update: its local iterations of the run."""
_LABEL_PAGE = re.compile(r"https://(?:([0-9.]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})/")
"""An IPv4 or an IPv6 address and a port; a name could be one that people trust."""
_COUNTERS = ("message_bytes", "messages")
_MAX_COUNTER = 2.0**53


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedClaim:
    """A claim that was too high or too low, and what counts in its place."""

    device_id: str
    name: str
    claim: float
    bound: float

    def __str__(self) -> str:
        return f"{self.name}: claimed {self.claim:.6g}, counted as {self.bound:.6g}"


OnBounded = Callable[[BoundedClaim], None]


def ignore_bounded(_claim: BoundedClaim) -> None:
    """Reports nothing."""


def compute_weight_limit(counts: Collection[int], ratio: float) -> float:
    """Returns the most examples that one device may weigh as.

    That is `ratio` times the median of the devices' counts, or times the mean of what then counts where this is less,
    so that with a ratio of 2 no device has more than 2/n of the weight. It is never below the median itself.

    Args:
        counts: of each device, 0 for unknown.
        ratio: above 0; 0 and infinity for no limit.
    """
    known = [count for count in counts if count > 0]
    if not known or not 0 < ratio < math.inf:
        return math.inf
    median = statistics.median_low(known)
    limit = ratio * median
    while limit > median:
        by_mean = ratio * sum(min(count, limit) for count in known) / len(known)
        if by_mean >= limit * (1 - 1e-9):
            break
        limit = by_mean
    return float(max(limit, median))


def bound_reported_examples(former: Mapping[str, int], reported: Mapping[str, object]) -> dict[str, int]:
    """Returns the examples by task that count after a report; the first one of a task counts as it is.

    Args:
        former: what counted before.
        reported: the device's report; what is no count of 0 to `MAX_EXAMPLES` is left out, or cut.
    """
    counts = {}
    for task, count in reported.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            continue
        limit: float = MAX_EXAMPLES
        if task in former:
            limit = max(former[task] * MAX_GROWTH_RATIO, former[task] + MIN_GROWTH)
        counts[task] = int(min(count, limit, MAX_EXAMPLES))
    return counts


@dataclass(slots=True, kw_only=True)
class ClaimLimits:
    """Limits of the claims of one run's devices.

    Attributes:
        task: whose examples count.
        max_weight_ratio: of a device's examples to the median of those that were given work; 0 for no limit.
        test_fraction: of every shard that is not trained on.
        on_bounded: called with a bounded claim: the first, second, fourth, ... of each name of a device.
        examples: known examples of the devices that were given work.
        first_examples: those of each device at its first instruction.
    """

    task: str = ""
    max_weight_ratio: float = DEFAULT_WEIGHT_RATIO
    test_fraction: float = 0.0
    on_bounded: OnBounded = ignore_bounded
    examples: dict[str, int] = field(default_factory=dict)
    first_examples: dict[str, int] = field(default_factory=dict)
    _num_bounded: dict[tuple[str, str], int] = field(default_factory=dict)
    _weight_limit: float | None = None

    def record_order(self, device_id: str, info: DeviceInfo | None) -> None:
        """Notes how many examples a device has that is given work."""
        count = _count_examples(info, self.task)
        if count is None:
            return
        first = self.first_examples.setdefault(device_id, count) if count else 0
        if first and count > MAX_GROWTH_RATIO * first:
            count = int(self._bound(device_id, "examples", count, MAX_GROWTH_RATIO * first))
        if self.examples.get(device_id) != count:
            self.examples[device_id], self._weight_limit = count, None

    def restore(self, examples: Mapping[str, int], first_examples: Mapping[str, int]) -> None:
        """Restores the known examples from a snapshot."""
        self.examples, self._weight_limit = dict(examples), None
        self.first_examples = dict(first_examples)

    def bound_metrics(
        self,
        metrics: UpdateMetrics,
        instruction: TrainInstruction,
        *,
        elapsed_s: float,
        is_finishing_early: bool,
        speeds: Mapping[str, DeviceThroughput],
    ) -> UpdateMetrics:
        """Returns the metrics of an update with its claims bounded.

        Args:
            metrics: as the device claims.
            instruction: that it followed.
            elapsed_s: from dispatch to arrival, by the coordinator's clock.
            is_finishing_early: it was asked to send what it had.
            speeds: measured speeds of the run's devices.
        """
        device_id, plan = instruction.device_id, instruction.plan
        known = self.examples.get(device_id)
        examples = int(self._bound(device_id, "examples", metrics.num_examples, known, 0.0))
        compute_s = self._bound(device_id, "seconds", metrics.compute_s, max(0.0, elapsed_s))
        extra = self._bound_extra(metrics.extra, instruction, elapsed_s, speeds)
        if plan.node is not None and plan.node.carrier != "relay":
            least, most = 0, int(extra.get(TOTAL_ITERATIONS, 0))
        elif plan.seconds is not None and plan.has_training:
            least, most = 0, _count_possible_iterations(plan.seconds, speeds)
        else:
            reductions = 1 if plan.collective is None else plan.collective.reductions
            most = reductions * (plan.count_iterations(self._limit_passes(examples)) or 0)
            # Fewer than ordered would make a normalised update count for more; only a recall makes a device stop, or
            # that its query is not answered.
            ordered = most if plan.fallback_iterations is None else min(most, plan.fallback_iterations)
            least = 0 if is_finishing_early or plan.collective is not None else ordered
        iterations = self._bound(device_id, "iterations", metrics.iterations, most, least)
        weight = self._bound(device_id, "weight", examples, self._get_weight_limit())
        paced_s = None if metrics.paced_s is None else min(metrics.paced_s, compute_s)
        return replace(
            metrics,
            num_examples=int(weight),
            iterations=int(iterations),
            compute_s=float(compute_s),
            extra=extra,
            paced_s=paced_s,
        )

    def bound_progress(self, report: Progress, plan: TrainConfig, *, elapsed_s: float) -> Progress:
        """Returns a progress report that fits the instruction and the coordinator's clock."""
        device_id, elapsed_s = report.device_id, max(0.0, elapsed_s)
        most = plan.count_iterations(self._limit_passes(self.examples.get(device_id, MAX_EXAMPLES)))
        iteration = int(max(0, self._bound(device_id, "iterations", report.iteration, most)))
        seconds = self._bound(device_id, "seconds", report.seconds_per_iteration, elapsed_s / max(1, iteration), 0.0)
        age_s = self._bound(device_id, "seconds", report.age_s, elapsed_s, 0.0)
        return replace(report, iteration=iteration, seconds_per_iteration=float(seconds), age_s=float(age_s))

    def bound_evaluation(self, result: EvaluateResult, info: DeviceInfo | None) -> EvaluateResult:
        """Returns an evaluation on no more examples than the device has."""
        known = _count_examples(info, self.task)
        count = self._bound(result.device_id, "examples", result.num_examples, known)
        return result if count == result.num_examples else replace(result, num_examples=int(count))

    def _bound_extra(
        self,
        extra: Mapping[str, float],
        instruction: TrainInstruction,
        elapsed_s: float,
        speeds: Mapping[str, DeviceThroughput],
    ) -> Mapping[str, float]:
        bounded = {name: min(max(0.0, extra[name]), _MAX_COUNTER) for name in _COUNTERS if name in extra}
        if EPSILON in extra and (privacy := instruction.plan.privacy) is not None:
            budget = privacy.epsilon * (1.0 + BUDGET_TOLERANCE)  # which an honest board does not pass
            bounded[EPSILON] = self._bound(instruction.device_id, EPSILON, extra[EPSILON], budget, 0.0)
        node, total = instruction.plan.node, extra.get(TOTAL_ITERATIONS)
        if total is None:
            return {**extra, **bounded} if bounded else extra
        if node is None or node.carrier == "relay":  # its instructions count its iterations
            return {name: value for name, value in {**extra, **bounded}.items() if name != TOTAL_ITERATIONS}
        most = max(node.limit, node.until) or math.inf
        if not node.limit:
            most = node.until + _count_possible_iterations(elapsed_s, speeds)
        return {
            **extra,
            **bounded,
            TOTAL_ITERATIONS: self._bound(instruction.device_id, "iterations", total, most, 0.0),
        }

    def _limit_passes(self, examples: int) -> int:
        """Returns of how many examples an epoch is credible: twice what a device may weigh as.

        An honest device may have more than it weighs, but the number that it joined with is a claim as well.
        """
        return int(min(examples, 2 * self._get_weight_limit(), MAX_EXAMPLES))

    def _get_weight_limit(self) -> float:
        if self._weight_limit is None:
            trained = [round(count * (1 - self.test_fraction)) for count in self.examples.values()]
            limit = compute_weight_limit(trained, self.max_weight_ratio)
            self._weight_limit = limit if math.isinf(limit) else float(math.ceil(limit))
        return self._weight_limit

    def _bound(self, device_id: str, name: str, claim: float, most: float | None, least: float = -math.inf) -> float:
        bound = max(least, claim if most is None else min(claim, most))
        if bound != claim:
            count = self._num_bounded[device_id, name] = self._num_bounded.get((device_id, name), 0) + 1
            if count & (count - 1) == 0:
                self.on_bounded(BoundedClaim(device_id=device_id, name=name, claim=claim, bound=bound))
        return bound


def _count_examples(info: DeviceInfo | None, task: str) -> int | None:
    """Returns the known examples of a device; None for unknown."""
    return None if info is None else info.examples.get(task)


def _count_possible_iterations(seconds: float, speeds: Mapping[str, DeviceThroughput]) -> int:
    """Returns how many iterations a device can have done in this time.

    The fleet's median speed decides, not the device's own: that is measured by its own claims.
    """
    measured = [speed.seconds_per_iteration for speed in speeds.values() if speed.seconds_per_iteration]
    fastest_s = statistics.median_high(measured) / MAX_SPEED_RATIO if measured else MIN_ITERATION_S
    return 1 + math.ceil(max(0.0, seconds) / max(fastest_s, 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftClaim:
    """What a device says of its newest data against its reference: the column that moved most, and all at once.

    Attributes:
        column: its name.
        psi: population stability index, at least 0.
        ks: Kolmogorov-Smirnov statistic, 0 to 1; None of classes.
        num_reference, num_newer: examples of the two.
        mmd: squared maximum mean discrepancy of all columns at once, -2 to 2; None of older releases.
        p_value: how often chance alone makes it as large, 0 to 1; None as `mmd` is.
        feature_mmd, feature_p_value: likewise of what the last layer of the board's model gets; None without a model.
    """

    column: str
    psi: float
    ks: float | None
    num_reference: int
    num_newer: int
    mmd: float | None = None
    p_value: float | None = None
    feature_mmd: float | None = None
    feature_p_value: float | None = None

    @property
    def is_large(self) -> bool:
        pairs = ((self.mmd, self.p_value), (self.feature_mmd, self.feature_p_value))
        return self.psi > LARGE_DRIFT or any(
            mmd is not None and p_value is not None and mmd > LARGE_JOINT_DRIFT and p_value <= MAX_JOINT_P
            for mmd, p_value in pairs
        )

    def __str__(self) -> str:
        ks = "" if self.ks is None else f", ks {self.ks:.2g}"
        joint = _format_mmd(self.mmd, self.p_value, "all columns")
        joint += _format_mmd(self.feature_mmd, self.feature_p_value, "features")
        counts = f"{self.num_newer} examples against {self.num_reference}"
        return f"psi {self.psi:.2g}{ks} of {self.column}{joint}, {counts}"


def _format_mmd(mmd: float | None, p_value: float | None, what: str) -> str:
    return "" if mmd is None or p_value is None else f", mmd {mmd:.2g} (p {p_value:.2g}) of {what}"


def parse_drift_claim(value: object) -> DriftClaim | None:
    """Returns what was said of one task's data; None for what makes no sense."""
    if not isinstance(value, Mapping):
        return None
    column, psi, ks = value.get("column"), value.get("psi"), value.get("ks")
    pairs = [(value.get(f"{what}mmd"), value.get(f"{what}p_value")) for what in ("", "feature_")]
    counts = [value.get(name) for name in ("num_reference", "num_newer")]
    is_right = (
        isinstance(column, str)
        and _is_number(psi, MAX_DRIFT)
        and (ks is None or _is_number(ks, 1.0))
        and all(mmd is None or _is_number(mmd, MAX_MMD, least=-MAX_MMD) for mmd, _ in pairs)
        and all(p_value is None or _is_number(p_value, 1.0) for _, p_value in pairs)
        and all((mmd is None) == (p_value is None) for mmd, p_value in pairs)
        and all(_is_number(count, MAX_EXAMPLES) and isinstance(count, int) for count in counts)
    )
    if not is_right:
        return None
    return DriftClaim(
        column=escape_start(str(column), MAX_NAME_CHARS),
        psi=float(cast("float", psi)),
        ks=None if ks is None else float(ks),
        num_reference=int(cast("int", counts[0])),
        num_newer=int(cast("int", counts[1])),
        **{
            f"{what}{name}": float(number)
            for what, pair in zip(("", "feature_"), pairs, strict=True)
            for name, number in zip(("mmd", "p_value"), pair, strict=True)
            if number is not None
        },
    )


def parse_drift(facts: Mapping[str, Any]) -> dict[str, DriftClaim]:
    """Returns `drift` of a device's capabilities by task, large ones first; drops what makes no sense."""
    reported = facts.get("drift")
    if not isinstance(reported, Mapping):
        return {}
    claims = {
        escape_start(str(task), MAX_NAME_CHARS): claim
        for task, value in itertools.islice(reported.items(), MAX_DRIFT_TASKS)
        if (claim := parse_drift_claim(value)) is not None
    }
    return dict(sorted(claims.items(), key=lambda item: (not item[1].is_large, -item[1].psi)))


def parse_label_page(facts: Mapping[str, Any]) -> str | None:
    """Returns the address of a device's label page, by its capabilities; None for what is no IP address and port.

    That the address is the device's own is not checked: behind a translated network or a gateway the coordinator does
    not see that.
    """
    reported = facts.get("label_page")
    if not isinstance(reported, str) or len(reported) > MAX_NAME_CHARS:
        return None
    if (found := _LABEL_PAGE.fullmatch(reported)) is None or not 1 <= int(found[3]) <= MAX_PORT:
        return None
    try:
        ipaddress.IPv6Address(found[2]) if found[1] is None else ipaddress.IPv4Address(found[1])
    except ValueError:
        return None
    return reported


def format_drift(claims: Mapping[str, DriftClaim]) -> str | None:
    """Returns the claims as one line; None where there are none."""
    return "; ".join(f"{task}: {claim}" for task, claim in claims.items()) or None


def _is_number(value: object, most: float, *, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
