"""Why a round took as long as it did: whom it waited for, and what held that device up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from edgefl.history.wording import bits_text, bytes_text, names_text, seconds_text
from edgefl.storage.round_facts import RoundFacts
from edgefl.types import Json, Outcome

NOT_THROTTLED = "ok"
HOT_C = 80.0
TOGETHER = 0.1
"""Who is back within this part of the round has not been waited for."""
FAR_MORE = 1.5
PACED = 0.25
"""A board that rested for this part of its computing or more was slow for that reason."""
_TOLD = (
    "device_id", "assignment_id", "outcome", "reason", "staleness", "iterations", "compute_s", "paced_s", "send_s",
    "wait_s", "bytes_up", "bytes_down", "max_temperature_c", "throttled", "signal_dbm", "link_bits_per_s", "energy_j",
)  # fmt: skip


def explain(facts: RoundFacts) -> Json:
    """Returns what there is to say of a round: `sentence` for people, the facts behind it for programs."""
    round_, rows = facts.round, facts.assignments
    waited = next((row for row in rows if row["id"] == round_["waited_update_id"]), None)
    cause, sentences = "", _nobody(round_, rows)
    if waited is not None and _matters(round_, rows):
        cause, sentences = _somebody(round_, waited, rows)
    told = waited if cause else None
    dropped = [row for row in rows if row is not told and row["outcome"] not in {Outcome.USED, None}]
    return {
        "run_id": facts.run["run_id"],
        "run_name": facts.run["name"],
        "strategy": facts.run["strategy"],
        **{name: round_[name] for name in ("round", "version", "started_at", "closed_at", "seconds")},
        "waited_for": round_["waited_for"] if cause else None,
        "waited_s": round_["waited_s"] if cause else None,
        "cause": cause or None,
        "sentence": " ".join([*sentences, *(_dropped(dropped))]),
        "devices": [{name: row[name] for name in _TOLD} for row in rows],
    }


def _matters(round_: Json, rows: Sequence[Json]) -> bool:
    """Says whether the round was held up by somebody; whoever is alone always does."""
    seconds, waited_s = round_["seconds"], round_["waited_s"]
    if seconds is None or waited_s is None:
        return False
    return len(_ended(round_, rows)) == 1 or waited_s > TOGETHER * seconds


def _ended(round_: Json, rows: Sequence[Json]) -> list[Json]:
    closed_at = math.inf if round_["closed_at"] is None else round_["closed_at"]
    return [row for row in rows if row["ended_at"] is not None and row["ended_at"] <= closed_at]


def _nobody(round_: Json, rows: Sequence[Json]) -> list[str]:
    name, used = f"Round {round_['round']}", [row for row in rows if row["outcome"] == Outcome.USED]
    if round_["closed_at"] is None:
        missing = sorted({row["device_id"] for row in rows if row["ended_at"] is None})
        waits = f"it waits for {names_text(missing)}" if missing else "nobody has work"
        return [f"{name} is not closed yet: {waits}."]
    if not rows and round_["num_updates"]:
        whom = (
            f" It waited {seconds_text(round_['waited_s'])} for {round_['waited_for']}."
            if round_["waited_for"]
            else ""
        )
        took = _count(round_["num_updates"], "update")
        return [f"{name} took {seconds_text(round_['seconds'])} and {took}, which are not kept any more.{whom}"]
    if not used:
        return [f"{name} took {seconds_text(round_['seconds'])} and got no update."]
    devices = {row["device_id"] for row in used}
    took = f"{_count(len(used), 'update')} of {_count(len(devices), 'device')}"
    if round_["waited_for"] is None:
        stalest = max(used, key=lambda row: row["staleness"] or 0)
        text = f"{name} waited for nobody: it took {took} as they came, in {seconds_text(round_['seconds'])}"
        if stalest["staleness"]:
            text += f"; the stalest, of {stalest['device_id']}, was {_count(stalest['staleness'], 'version')} behind"
        return [f"{text}."]
    compute_s = _middle(used, "compute_s")
    text = f"{name} waited for nobody in particular: {took} came close together, in {seconds_text(round_['seconds'])}"
    return [
        f"{text}, of which {seconds_text(compute_s)} went into computing." if compute_s is not None else f"{text}."
    ]


def _somebody(round_: Json, waited: Json, rows: Sequence[Json]) -> tuple[str, list[str]]:
    """Returns the cause in a word, and the sentences."""
    ended = _ended(round_, rows)
    others = [row for row in ended if row is not waited and row["outcome"] == Outcome.USED]
    cause, words = _cause(round_, waited, others, ended)
    slow = [row["device_id"] for row in _as_slow(round_, waited, ended)]
    whom = names_text([waited["device_id"], *(name for name in slow if name != waited["device_id"])])
    text = f"Round {round_['round']} waited {seconds_text(round_['waited_s'])} for {whom}"
    return cause, [f"{text}, {words}.", *(_compared(waited, others) if cause != "link" else [])]


def _as_slow(round_: Json, waited: Json, ended: Sequence[Json]) -> list[Json]:
    """Returns the other updates that came when more than half of the wait was over."""
    if len(ended) < 3:
        return []
    half_s = round_["waited_s"] / 2
    used = [row for row in ended if row is not waited and row["outcome"] == Outcome.USED]
    return [row for row in used if row["ended_at"] > waited["ended_at"] - half_s]


def _cause(round_: Json, waited: Json, others: Sequence[Json], ended: Sequence[Json]) -> tuple[str, str]:
    outcome, reason = waited["outcome"], waited["reason"]
    if outcome not in {Outcome.USED, None}:
        return str(outcome), f"which was {outcome}" + (f": {reason}" if reason else "")
    before = [row for row in ended if row["outcome"] in {Outcome.LOST, Outcome.FAILED} and _precedes(row, waited)]
    if before:
        return "rescue", f"which took over from {names_text([row['device_id'] for row in before])}"
    more_s = {name: _more(waited, others, name) for name in ("compute_s", "send_s")}
    asked_s = (waited["dispatched_at"] or round_["started_at"]) - round_["started_at"]
    if asked_s > max(*more_s.values(), round_["waited_s"] / 2):
        return "asked-late", f"which was asked only {seconds_text(asked_s)} after the round had begun"
    if more_s["send_s"] > more_s["compute_s"]:
        return "link", _slow_link(waited, others)
    return _slow_board(waited, others)


def _precedes(row: Json, waited: Json) -> bool:
    return waited["dispatched_at"] is not None and row["ended_at"] <= waited["dispatched_at"]


def _slow_link(waited: Json, others: Sequence[Json]) -> str:
    facts = []
    if waited["signal_dbm"] is not None:
        facts.append(f"{waited['signal_dbm']:.0f} dBm".replace("-", "\N{MINUS SIGN}"))
    if waited["link_bits_per_s"] is not None:
        facts.append(bits_text(waited["link_bits_per_s"]))
    told = f"on a slow link ({', '.join(facts)}), " if facts else ""
    size = bytes_text((waited["bytes_up"] or 0) + (waited["bytes_down"] or 0))
    usual = _middle(others, "send_s")
    compared = f", those of the others {seconds_text(usual)}" if usual is not None else ""
    return f"{told}whose {size} were {seconds_text(waited['send_s'])} on the way{compared}"


def _slow_board(waited: Json, others: Sequence[Json]) -> tuple[str, str]:
    heat = waited["max_temperature_c"]
    at = f" at {heat:.0f} °C" if heat is not None else ""
    if (waited["paced_s"] or 0.0) > PACED * (waited["compute_s"] or 0.0):
        rested = f"which rested for {seconds_text(waited['paced_s'])} of its time to stay below its temperature limit"
        return "paced", rested + at
    if waited["throttled"] not in {None, NOT_THROTTLED}:
        words = waited["throttled"].split(",")
        held = "throttled" if "throttled" in words else f"held back by {names_text(words)}"
        return "throttled", f"{held}{at}"
    usual = _middle(others, "iterations")
    if usual and (waited["iterations"] or 0) > FAR_MORE * usual:
        return "iterations", f"which did {waited['iterations']} local iterations, the others {usual:.0f}"
    if not others:
        return "alone", "the only one that was asked"
    return "slow", f"the slowest to compute{at if heat is not None and heat >= HOT_C else ''}"


def _compared(waited: Json, others: Sequence[Json]) -> list[str]:
    if waited["compute_s"] is None or waited["send_s"] is None:
        return []
    own = f"It computed for {seconds_text(waited['compute_s'])} and was {seconds_text(waited['send_s'])} on the way"
    compute_s, send_s = _middle(others, "compute_s"), _middle(others, "send_s")
    if compute_s is None or send_s is None:
        return [f"{own}."]
    return [f"{own}, the others {seconds_text(compute_s)} and {seconds_text(send_s)}."]


def _dropped(rows: Sequence[Json]) -> list[str]:
    """Returns a sentence about each outcome other than used."""
    found = []
    for outcome in (Outcome.LOST, Outcome.FAILED, Outcome.REFUSED, Outcome.LATE):
        names = sorted({row["device_id"] for row in rows if row["outcome"] == outcome})
        if names:
            reasons = {row["reason"] for row in rows if row["outcome"] == outcome and row["reason"]}
            why = f": {next(iter(reasons))}" if len(reasons) == 1 else ""
            found.append(f"{names_text(names)} {'was' if len(names) == 1 else 'were'} {outcome}{why}.")
    return found


def _more(waited: Json, others: Sequence[Json], name: str) -> float:
    usual = _middle(others, name)
    return float(waited[name] or 0.0) - (usual or 0.0)


def _middle(rows: Sequence[Json], name: str) -> Any:
    values = [row[name] for row in rows if row[name] is not None]
    return median(values) if values else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
