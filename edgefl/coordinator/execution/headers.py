"""Wire ids and headers of instructions, and validated parsing of reply headers.

An assignment id is unique within its run. On the wire the run id precedes it, so that a device never takes an answer,
a cancellation or a report of an earlier run for one of this run.

Every resume of a run starts another incarnation: strategies count their assignments on from the checkpoint, so an id
may be used a second time, for other work. On the wire the incarnation precedes it. Every turn of the journal and
every fleet snapshot of a checkpoint records the incarnation: neither a clock nor a row that was not on the disk yet
may decide it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from edgefl.core.metrics import NO_METRICS, MetricSet
from edgefl.core.protocol import (
    JOB_LOG,
    MAX_THROTTLED_CHARS,
    finite_or_none,
    parse_job_log,
)
from edgefl.core.sites import SITE_KEY, parse_board_shares
from edgefl.core.types import (
    BASE_BYTE_KEY,
    NUM_REDUCTIONS,
    PREFETCH_BYTE_KEYS,
    EvaluateInstruction,
    EvaluateResult,
    Json,
    PeerMessage,
    TrainInstruction,
    UpdateMetrics,
)
from edgefl.storage.rollback import MAX_INCARNATION_ROWS
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages

FIRST_INCARNATION = 0

LINEAGE_KEY, MODEL_HASH_KEY, RECORD_KEY = "lineage", "model_sha256", "newest_record"
"""Of an instruction: the store's lineage, the full model's hash, the journal's newest durable record.

A device answers with the first two, and with the highest record that it heard of in this lineage and run.
"""

MAX_COUNT = 2**53
"""Largest valid count: JSON numbers are exact up to here."""
MAX_SHARD_VERSION = 2**48
"""Versions of shards are hashes of as many bits."""
PLAUSIBLE_RANGES = MappingProxyType(
    {
        "max_temperature_c": (-40.0, 150.0),
        "signal_dbm": (-200.0, 0.0),
        "link_bits_per_s": (0.0, 1e12),
        "energy_j": (0.0, 1e12),
        "paced_s": (0.0, 1e8),
    }
)
"""Valid ranges of reported telemetry; a value outside is treated as unknown."""


def format_wire_id(run_id: str, assignment_id: str, incarnation: int = FIRST_INCARNATION) -> str:
    """Returns the id of an assignment on the wire."""
    return (
        f"{run_id}/{assignment_id}" if incarnation == FIRST_INCARNATION else f"{run_id}/{incarnation}/{assignment_id}"
    )


class RunIncarnations:
    """Wire ids of the assignments of one run.

    Args:
        run_id: of the run.
        current: its present incarnation, 0 for the first.
        previous: the incarnations of earlier assignments, oldest first; assignments not listed are of the first.
    """

    def __init__(
        self, run_id: str, current: int = FIRST_INCARNATION, previous: Mapping[str, int] | None = None
    ) -> None:
        self.run_id, self.current = run_id, current
        self._previous = dict(previous or {})
        self._current_ids: dict[str, None] = {}

    def assign_wire_id(self, assignment_id: str) -> str:
        """Returns the wire id of an assignment that is dispatched now."""
        if self.current != FIRST_INCARNATION:
            self._current_ids.pop(assignment_id, None)
            self._current_ids[assignment_id] = None
            if len(self._current_ids) > MAX_INCARNATION_ROWS:
                del self._current_ids[next(iter(self._current_ids))]
        return format_wire_id(self.run_id, assignment_id, self.current)

    def get_wire_id(self, assignment_id: str) -> str:
        """Returns the wire id of a recent assignment, the newest if there were several."""
        incarnation = (
            self.current
            if assignment_id in self._current_ids
            else self._previous.get(assignment_id, FIRST_INCARNATION)
        )
        return format_wire_id(self.run_id, assignment_id, incarnation)

    def to_dict(self) -> dict[int, list[str]]:
        """Returns the newest assignments of each incarnation but the first, oldest first, to be stored."""
        incarnation_by_id = {
            assignment_id: incarnation
            for assignment_id, incarnation in self._previous.items()
            if assignment_id not in self._current_ids
        }
        incarnation_by_id |= dict.fromkeys(self._current_ids, self.current)
        ids_by_incarnation: dict[int, list[str]] = {}
        for assignment_id in islice(incarnation_by_id, max(0, len(incarnation_by_id) - MAX_INCARNATION_ROWS), None):
            if incarnation_by_id[assignment_id] != FIRST_INCARNATION:
                ids_by_incarnation.setdefault(incarnation_by_id[assignment_id], []).append(assignment_id)
        return ids_by_incarnation


def find_foreign_part(sent: Json, reply: Json, *, newest_record: int) -> str | None:
    """Returns why a reply is no answer to an instruction, though it names its assignment; None if it is one.

    Args:
        sent: header of the instruction's newest message.
        reply: header of the reply.
        newest_record: number of the journal's newest durable record.
    """
    if reply.get(LINEAGE_KEY) != sent[LINEAGE_KEY]:
        return f"it is of lineage {reply.get(LINEAGE_KEY)!r:.40}, this store is of {sent[LINEAGE_KEY]!r}"
    expected = sent.get(MODEL_HASH_KEY)
    if expected is not None and reply.get(MODEL_HASH_KEY) != expected:
        return f"it is of model {reply.get(MODEL_HASH_KEY)!r:.14}, sent was {expected!r:.14}"
    if is_ahead(reply, newest_record):
        return f"its device heard of record {reply[RECORD_KEY]}, the journal ends with {newest_record}"
    return None


def is_ahead(reply: Json, newest_record: int) -> bool:
    """Returns whether a device heard of a later state of this store than the store has: it was rolled back."""
    number = reply.get(RECORD_KEY)
    return isinstance(number, int) and not isinstance(number, bool) and number > newest_record


def create_instruction_header(
    incarnations: RunIncarnations, instruction: TrainInstruction | EvaluateInstruction
) -> Json:
    """Returns the header of one instruction with an assigned wire id, without the fields common to the run."""
    header: Json = {"assignment": incarnations.get_wire_id(instruction.assignment_id)}
    if isinstance(instruction, EvaluateInstruction):
        return {**header, "version": instruction.version}
    if instruction.block is not None:
        header["block"] = instruction.block
    plan, wire_id = instruction.plan.to_json(), header["assignment"]
    if (collective := plan.get("collective")) is not None:
        # Another incarnation of the run has other groups, and other work, under the same names.
        prefix = wire_id.removesuffix(instruction.assignment_id)
        resend = collective["resend"] and incarnations.get_wire_id(collective["resend"])
        plan["collective"] = {**collective, "group": f"{prefix}{collective['group']}", "resend": resend}
    if (secure := plan.get("secure")) is not None:
        prefix = wire_id.removesuffix(instruction.assignment_id)
        plan["secure"] = {**secure, "group": f"{prefix}{secure['group']}"}
    return {
        **header,
        "version": instruction.base_version,
        "plan": plan,
        "codec": instruction.codec or "dense",
        "used_assignments": [
            incarnations.get_wire_id(assignment_id) for assignment_id in instruction.used_assignments
        ],
    }


def parse_update_metrics(
    metrics: Json,
    *,
    turnaround_s: float,
    bytes_up: int,
    bytes_down: int,
    prefetch_bytes: tuple[int, int] = (0, 0),
    base_bytes: int = 0,
) -> UpdateMetrics:
    """Returns the device's measurements; the sending time is all of the turnaround that was not computing.

    `prefetch_bytes` are the bytes up and down that it spent on admission; they are included.
    `base_bytes` are those of `bytes_down` that were of a base and compiled task.

    Raises:
        KeyError, TypeError, ValueError: a measurement is missing or makes no sense.
    """
    compute_s = _parse_number(metrics["compute_s"])
    extra = metrics.get("extra")
    numbers = (
        {str(name): finite_or_none(value) for name, value in extra.items()} if isinstance(extra, Mapping) else {}
    )
    own_bytes = zip((*PREFETCH_BYTE_KEYS, BASE_BYTE_KEY), (*prefetch_bytes, base_bytes), strict=True)
    numbers |= {name: float(value) or None for name, value in own_bytes}
    return UpdateMetrics(
        iterations=_parse_count(metrics["iterations"]),
        num_examples=_parse_count(metrics["num_examples"]),
        loss=finite_or_none(metrics.get("loss")),
        compute_s=compute_s,
        send_s=max(0.0, turnaround_s - compute_s),
        bytes_up=bytes_up + prefetch_bytes[0],
        bytes_down=bytes_down + prefetch_bytes[1],
        extra={name: value for name, value in numbers.items() if value is not None},
        **_parse_health(metrics.get("health")),
        boards=tuple(share.to_json() for share in parse_board_shares(metrics.get(SITE_KEY))),
        **_parse_shard(metrics.get("shard")),
    )


def _parse_shard(reported: Any) -> dict[str, Any]:
    """Returns version and examples of a board's shard; what makes no sense is dropped."""
    if not isinstance(reported, Mapping):
        return {}
    version, count = reported.get("version"), reported.get("num_examples")
    if not _is_count(version, MAX_SHARD_VERSION) or not _is_count(count, MAX_COUNT):
        return {}
    return {"shard_version": f"{version:012x}", "shard_examples": count}


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _parse_health(reported: Any) -> dict[str, Any]:
    """Returns the plausible telemetry of a reply; implausible values are dropped, the update is kept."""
    if not isinstance(reported, Mapping):
        return {}
    health: dict[str, Any] = {}
    for name, (minimum, maximum) in PLAUSIBLE_RANGES.items():
        value = finite_or_none(reported.get(name))
        if value is not None and minimum <= value <= maximum:
            health[name] = value
    throttled = reported.get("throttled")
    if isinstance(throttled, str) and re.fullmatch(rf"[a-z,-]{{1,{MAX_THROTTLED_CHARS}}}", throttled):
        health["throttled"] = throttled
    return health


def parse_part_log(header: Json) -> list[str]:
    """Returns the lines that a part of a job logged, bounded whatever its device sent."""
    return parse_job_log(header.get(JOB_LOG))


def parse_evaluate_result(
    instruction: EvaluateInstruction, figures: Json, source: str, sums: bytes = b"", metrics: MetricSet = NO_METRICS
) -> EvaluateResult:
    """Returns the outcome of an evaluation; `sums` are those of the task's `metrics`, as the device sent them.

    Raises:
        KeyError, TypeError, ValueError: a figure is missing or makes no sense, or the sums do not fit the metrics.
    """
    accuracy = None if figures["accuracy"] is None else _parse_number(figures["accuracy"])
    if accuracy is not None and accuracy > 1:
        raise ValueError(f"accuracy must lie in 0 to 1, got {accuracy!r}")
    return instruction.make_result(
        source=source,
        num_examples=_parse_count(figures["num_examples"]),
        loss=_parse_number(figures["loss"], at_least=-math.inf),
        accuracy=accuracy,
        metrics=metrics.combine([sums]),
        sums=sums,
    )


def parse_peer_messages(
    instruction: TrainInstruction, header: Json, body: bytes
) -> tuple[tuple[PeerMessage, ...], bytes]:
    """Returns the messages of a node, or of a step of secure aggregation, and the rest; the whole body of others.

    Raises:
        ValueError: it answers for another node, or for an edge that it does not have.
        NetworkError: the header does not fit the body.
    """
    plan = instruction.plan.node
    if instruction.plan.secure is not None:
        messages, rest = decode_messages(header.get("messages", []), body)
        if rest or any(message.edge[0] != instruction.device_id for message in messages):
            raise ValueError("it holds more than its own messages of secure aggregation")
        return messages, rest
    if plan is None:
        return (), body
    messages, model_body = decode_messages(header.get("messages", []), body)
    edges = {(instruction.device_id, side.neighbour) for side in plan.edges}
    foreign_edges = [message.edge for message in messages if message.edge not in edges]
    if foreign_edges:
        raise ValueError(f"it sends along {' - '.join(foreign_edges[0])}, which is no edge of its own")
    if bool(model_body) != plan.reports:
        raise ValueError("it holds no model, which was asked for" if plan.reports else "it holds more than messages")
    return messages, model_body


def has_all_reductions(instruction: TrainInstruction, metrics: UpdateMetrics) -> bool:
    """Returns whether a member of a collective has done all of its round's all-reduces, and may send only that."""
    collective = instruction.plan.collective
    return collective is not None and metrics.extra.get(NUM_REDUCTIONS) == collective.reductions


def _parse_number(value: Any, *, at_least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_COUNT:
        raise ValueError(f"not a number: {value!r:.40}")
    number = float(value)
    if not (math.isfinite(number) and number >= at_least):
        raise ValueError(f"must be finite and at least {at_least:g}, got {number!r}")
    return number


def _parse_count(value: Any) -> int:
    number = _parse_number(value)
    if number != int(number):
        raise ValueError(f"must be a whole number, got {number!r}")
    return int(number)
