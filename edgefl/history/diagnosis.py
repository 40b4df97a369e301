"""Diagnosis of a round's duration: the straggler, and its cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json, UpdateStatus
from edgefl.storage.queries.history import RoundDetails

NOT_THROTTLED = "ok"
HOT_TEMPERATURE_C = 80.0
MIN_WAIT_FRACTION = 0.1
"""Fraction of the round below which a wait does not count."""
EXCESS_ITERATIONS_RATIO = 1.5
MIN_PACED_FRACTION = 0.25
"""Fraction of computing time spent in thermal pacing from which on pacing is the cause."""
_DEVICE_COLUMNS = (
    "device_id", "assignment_id", "outcome", "reason", "staleness", "iterations", "compute_s", "paced_s", "send_s",
    "wait_s", "bytes_up", "bytes_down", "max_temperature_c", "throttled", "signal_dbm", "link_bits_per_s", "energy_j",
)  # fmt: skip

MAX_NAMES = 3
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def diagnose_round(details: RoundDetails) -> Json:
    """Returns the diagnosis of a round: `sentence` for people, the facts for programs."""
    round_, rows = details.round, details.assignments
    straggler = next((row for row in rows if row["id"] == round_["waited_update_id"]), None)
    cause, sentences = "", _describe_no_straggler(round_, rows)
    if straggler is not None and _is_wait_significant(round_, rows):
        cause, sentences = _describe_straggler(round_, straggler, rows)
    reported = straggler if cause else None
    dropouts = [row for row in rows if row is not reported and row["outcome"] not in {UpdateStatus.USED, None}]
    return {
        "run_id": details.run["run_id"],
        "run_name": details.run["name"],
        "strategy": details.run["strategy"],
        **{name: round_[name] for name in ("round", "version", "started_at", "closed_at", "seconds")},
        "waited_for": round_["waited_for"] if cause else None,
        "waited_s": round_["waited_s"] if cause else None,
        "cause": cause or None,
        "sentence": " ".join([*sentences, *(_describe_dropouts(dropouts))]),
        "devices": [{name: row[name] for name in _DEVICE_COLUMNS} for row in rows],
    }


def _is_wait_significant(round_: Json, rows: Sequence[Json]) -> bool:
    """Returns whether the round was held up by a straggler; a single device always counts."""
    seconds, waited_s = round_["seconds"], round_["waited_s"]
    if seconds is None or waited_s is None:
        return False
    return len(_select_ended(round_, rows)) == 1 or waited_s > MIN_WAIT_FRACTION * seconds


def _select_ended(round_: Json, rows: Sequence[Json]) -> list[Json]:
    closed_at = math.inf if round_["closed_at"] is None else round_["closed_at"]
    return [row for row in rows if row["ended_at"] is not None and row["ended_at"] <= closed_at]


def _describe_no_straggler(round_: Json, rows: Sequence[Json]) -> list[str]:
    name, used_rows = f"Round {round_['round']}", [row for row in rows if row["outcome"] == UpdateStatus.USED]
    if round_["closed_at"] is None:
        missing = sorted({row["device_id"] for row in rows if row["ended_at"] is None})
        waits = f"it waits for {format_names(missing)}" if missing else "nobody has work"
        return [f"{name} is not closed yet: {waits}."]
    if not rows and round_["num_updates"]:
        wait_text = (
            f" It waited {format_seconds(round_['waited_s'])} for {round_['waited_for']}."
            if round_["waited_for"]
            else ""
        )
        count = _format_count(round_["num_updates"], "update")
        return [
            f"{name} took {format_seconds(round_['seconds'])} and {count}, which are not kept any more.{wait_text}"
        ]
    if not used_rows:
        return [f"{name} took {format_seconds(round_['seconds'])} and got no update."]
    devices = {row["device_id"] for row in used_rows}
    count = f"{_format_count(len(used_rows), 'update')} of {_format_count(len(devices), 'device')}"
    if round_["waited_for"] is None:
        stalest = max(used_rows, key=lambda row: row["staleness"] or 0)
        text = f"{name} waited for nobody: it took {count} as they came, in {format_seconds(round_['seconds'])}"
        if stalest["staleness"]:
            behind = _format_count(stalest["staleness"], "version")
            text += f"; the stalest, of {stalest['device_id']}, was {behind} behind"
        return [f"{text}."]
    compute_s = _compute_median(used_rows, "compute_s")
    text = (
        f"{name} waited for nobody in particular: {count} came close together, in {format_seconds(round_['seconds'])}"
    )
    return [
        f"{text}, of which {format_seconds(compute_s)} went into computing." if compute_s is not None else f"{text}."
    ]


def _describe_straggler(round_: Json, straggler: Json, rows: Sequence[Json]) -> tuple[str, list[str]]:
    """Returns the cause as a word, and the sentences."""
    ended_rows = _select_ended(round_, rows)
    other_rows = [row for row in ended_rows if row is not straggler and row["outcome"] == UpdateStatus.USED]
    cause, description = _find_cause(round_, straggler, other_rows, ended_rows)
    slow_ids = [row["device_id"] for row in _find_equally_slow(round_, straggler, ended_rows)]
    names = format_names([straggler["device_id"], *(name for name in slow_ids if name != straggler["device_id"])])
    text = f"Round {round_['round']} waited {format_seconds(round_['waited_s'])} for {names}"
    return cause, [
        f"{text}, {description}.",
        *(_describe_comparison(straggler, other_rows) if cause != "link" else []),
    ]


def _find_equally_slow(round_: Json, straggler: Json, ended: Sequence[Json]) -> list[Json]:
    """Returns the other updates that arrived in the second half of the wait."""
    if len(ended) < 3:
        return []
    half_s = round_["waited_s"] / 2
    other_rows = [row for row in ended if row is not straggler and row["outcome"] == UpdateStatus.USED]
    return [row for row in other_rows if row["ended_at"] > straggler["ended_at"] - half_s]


def _find_cause(round_: Json, straggler: Json, others: Sequence[Json], ended: Sequence[Json]) -> tuple[str, str]:
    outcome, reason = straggler["outcome"], straggler["reason"]
    if outcome not in {UpdateStatus.USED, None}:
        return str(outcome), f"which was {outcome}" + (f": {reason}" if reason else "")
    failed_rows = [
        row
        for row in ended
        if row["outcome"] in {UpdateStatus.LOST, UpdateStatus.FAILED} and _is_before(row, straggler)
    ]
    if failed_rows:
        return "replacement", f"which took over from {format_names([row['device_id'] for row in failed_rows])}"
    more_s = {name: _compute_excess(straggler, others, name) for name in ("compute_s", "send_s")}
    asked_s = (straggler["dispatched_at"] or round_["started_at"]) - round_["started_at"]
    if asked_s > max(*more_s.values(), round_["waited_s"] / 2):
        return "dispatched-late", f"which was asked only {format_seconds(asked_s)} after the round had begun"
    if more_s["send_s"] > more_s["compute_s"]:
        return "link", _describe_slow_link(straggler, others)
    return _find_board_cause(straggler, others)


def _is_before(row: Json, straggler: Json) -> bool:
    return straggler["dispatched_at"] is not None and row["ended_at"] <= straggler["dispatched_at"]


def _describe_slow_link(straggler: Json, others: Sequence[Json]) -> str:
    facts = []
    if straggler["signal_dbm"] is not None:
        facts.append(f"{straggler['signal_dbm']:.0f} dBm".replace("-", "\N{MINUS SIGN}"))
    if straggler["link_bits_per_s"] is not None:
        facts.append(format_bit_rate(straggler["link_bits_per_s"]))
    prefix = f"on a slow link ({', '.join(facts)}), " if facts else ""
    size = format_bytes((straggler["bytes_up"] or 0) + (straggler["bytes_down"] or 0))
    median_s = _compute_median(others, "send_s")
    comparison = f", those of the others {format_seconds(median_s)}" if median_s is not None else ""
    return f"{prefix}whose {size} were {format_seconds(straggler['send_s'])} on the way{comparison}"


def _find_board_cause(straggler: Json, others: Sequence[Json]) -> tuple[str, str]:
    temperature_c = straggler["max_temperature_c"]
    suffix = f" at {temperature_c:.0f} °C" if temperature_c is not None else ""
    if (straggler["paced_s"] or 0.0) > MIN_PACED_FRACTION * (straggler["compute_s"] or 0.0):
        description = (
            f"which rested for {format_seconds(straggler['paced_s'])} of its time to stay below its temperature limit"
        )
        return "paced", description + suffix
    if straggler["throttled"] not in {None, NOT_THROTTLED}:
        causes = straggler["throttled"].split(",")
        description = "throttled" if "throttled" in causes else f"held back by {format_names(causes)}"
        return "throttled", f"{description}{suffix}"
    median_iterations = _compute_median(others, "iterations")
    if median_iterations and (straggler["iterations"] or 0) > EXCESS_ITERATIONS_RATIO * median_iterations:
        return (
            "iterations",
            f"which did {straggler['iterations']} local iterations, the others {median_iterations:.0f}",
        )
    if not others:
        return "alone", "the only one that was asked"
    return (
        "slow",
        f"the slowest to compute{suffix if temperature_c is not None and temperature_c >= HOT_TEMPERATURE_C else ''}",
    )


def _describe_comparison(straggler: Json, others: Sequence[Json]) -> list[str]:
    if straggler["compute_s"] is None or straggler["send_s"] is None:
        return []
    computed, sent = format_seconds(straggler["compute_s"]), format_seconds(straggler["send_s"])
    sentence = f"It computed for {computed} and was {sent} on the way"
    compute_s, send_s = _compute_median(others, "compute_s"), _compute_median(others, "send_s")
    if compute_s is None or send_s is None:
        return [f"{sentence}."]
    return [f"{sentence}, the others {format_seconds(compute_s)} and {format_seconds(send_s)}."]


def _describe_dropouts(rows: Sequence[Json]) -> list[str]:
    """Returns a sentence about each outcome other than used."""
    sentences = []
    for outcome in (UpdateStatus.LOST, UpdateStatus.FAILED, UpdateStatus.REJECTED, UpdateStatus.LATE):
        names = sorted({row["device_id"] for row in rows if row["outcome"] == outcome})
        if names:
            reasons = {row["reason"] for row in rows if row["outcome"] == outcome and row["reason"]}
            reason_text = f": {next(iter(reasons))}" if len(reasons) == 1 else ""
            sentences.append(f"{format_names(names)} {'was' if len(names) == 1 else 'were'} {outcome}{reason_text}.")
    return sentences


def _compute_excess(straggler: Json, others: Sequence[Json], name: str) -> float:
    median_value = _compute_median(others, name)
    return float(straggler[name] or 0.0) - (median_value or 0.0)


def _compute_median(rows: Sequence[Json], name: str) -> Any:
    values = [row[name] for row in rows if row[name] is not None]
    return median(values) if values else None


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float | None) -> str:
    """Returns a duration: whole seconds from ten on, milliseconds below a second."""
    if seconds is None:
        return "an unknown time"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def format_bytes(num_bytes: float) -> str:
    """Returns a size with a decimal unit."""
    return _format_scaled(num_bytes, _BYTE_UNITS)


def format_bit_rate(bits_per_s: float) -> str:
    """Returns a rate with a decimal unit."""
    return _format_scaled(bits_per_s, _BIT_UNITS)


def format_names(names: Sequence[str]) -> str:
    """Returns `a`, `a and b`, `a, b and c`, or the first and the number of others, on one safe line."""
    printable = [escape_text(name) for name in names]
    if len(printable) > MAX_NAMES:
        printable = [*printable[: MAX_NAMES - 1], f"{len(printable) - MAX_NAMES + 1} more"]
    *leading, last = printable or [""]
    return f"{', '.join(leading)} and {last}" if leading else last


def _format_scaled(value: float, units: Sequence[str]) -> str:
    size = float(value)
    for unit in units[:-1]:
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {units[-1]}"
