"""An advice in sentences with numbers, as rows, and as a run file with comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.safe_parsing import format_toml
from edgefl.core.types import Json
from edgefl.simulation.advice.advice import Advice, Option
from edgefl.simulation.advice.boards import ASSUMED_LATENCY_S
from edgefl.simulation.advice.candidates import COMPARED, LEFT_OUT

COLUMNS = (
    "strategy", "work", "codec", "seconds", "rounds", "bytes_up", "bytes_down", "joules", "memory_bytes", "waiting",
    "lost", "quality", "reached", "front",
)  # fmt: skip
SLOW_FACTOR, MUCH_WAITING, MUCH_SENDING, MUCH_LOST, MUCH_THROTTLED = 1.5, 0.1, 0.2, 0.02, 0.05
"""From these on a sentence says so: times the median board, shares of time, of assignments and of updates."""


def make_rows(advice: Advice) -> list[Json]:
    """Returns a row for each option, best first, in `COLUMNS`."""
    return [
        {
            "strategy": option.candidate.strategy,
            "work": option.candidate.work,
            "codec": option.candidate.codec,
            "seconds": option.seconds,
            "rounds": option.rounds,
            "bytes_up": option.bytes_up,
            "bytes_down": option.bytes_down,
            "joules": option.joules,
            "memory_bytes": option.memory_bytes,
            "waiting": option.waiting,
            "lost": option.lost,
            "loss_risk": option.cost.loss_risk,
            "quality": option.quality,
            "reached": option.is_reached,
            "front": option.is_front,
            "within": option.is_within,
            "written": option.candidate.is_written,
            "options": dict(option.candidate.options),
            "state_bytes": option.state_bytes,
            "simulations": option.num_simulations,
        }
        for option in advice.options
    ]


def explain(advice: Advice) -> list[str]:
    """Returns why the first option is recommended, or why none is."""
    if advice.best is None:
        return [*_explain_failure(advice), *_explain_boards(advice)]
    return [
        *_compare(advice, advice.best),
        *_explain_waiting(advice, advice.best),
        *_explain_sending(advice, advice.best),
        *_explain_front(advice, advice.best),
        *_explain_boards(advice),
    ]


def list_limits(advice: Advice) -> list[str]:
    """Returns what the advice did not look at, and what it assumes."""
    found = [*advice.left_out, *advice.fleet.limits]
    if advice.fleet.config.strategy.name in COMPARED:
        found += LEFT_OUT
    assumed = [board.name for board in advice.fleet.measured if not board.has_sizes]
    if assumed:
        found.append(
            f"{_list_names(assumed)}: all updates had one size, so {ASSUMED_LATENCY_S:g} s of an exchange are taken "
            "as latency and the rest as rate; a short run with another codec would tell"
        )
    repeated = [option for option in advice.options if option.num_simulations > 1]
    if repeated:
        names = "; ".join(str(option.candidate) for option in repeated)
        found.append(
            f"figures of {names} are medians of {repeated[0].num_simulations} simulations with seeds of their own, "
            "those of others are of one"
        )
    if advice.corrections:
        factors = ", ".join(f"{name} by {factor:.2f}" for name, factor in sorted(advice.corrections.items()))
        found.append(f"figures are corrected by the errors of earlier advice: {factors}")
    return found


def format_run_file(advice: Advice, config: RunConfig, *, stamp: str = "") -> str:
    """Returns the recommended run file: settings that are not defaults, with the reasons as comments above.

    Args:
        advice: with a recommended option.
        config: the run file for which it was asked.
        stamp: a first line, such as the command.

    Raises:
        RunFailedError: none is recommended.
    """
    made = advice.make_run(config)
    lines = [stamp, *explain(advice)] if stamp else explain(advice)
    comments = "".join(f"# {_clean(line)}\n" for line in lines)
    return f"{comments}{format_toml(_select_set(made))}"


def _select_set(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that differ from those of a run file with a task alone."""
    plain = parse_run({"run": {"task": config.run.task}}).to_json()
    tables = {}
    for name, table in config.to_json().items():
        kept = {
            key: value
            for key, value in table.items()
            if (name, key) in {("run", "task"), ("strategy", "name")} or plain.get(name, {}).get(key) != value
        }
        if kept:
            tables[name] = kept
    return tables


def _clean(line: str) -> str:
    """Returns a line that stays a comment."""
    return "".join(character if character.isprintable() else " " for character in line)


def _compare(advice: Advice, best: Option) -> Iterator[str]:
    costs = f"{_format_seconds(best.seconds)} and {_format_bytes(best)}"
    joules = "" if best.joules is None else f", {best.joules:.3g} J"
    sentence = f"{best.candidate} reaches {_format_goal(advice)} in {costs}{joules}"
    written = advice.written
    if written is not None and written.candidate.key == best.candidate.key:
        yield f"{sentence}: the run file as it is, and nothing that was tried is better in {advice.request.minimise}."
    elif written is None or not written.is_reached:
        yield f"{sentence}; the run file as it is does not reach it."
    else:
        energy = "" if written.joules is None else f", {written.joules:.3g} J"
        yield (
            f"{sentence}; the run file as it is ({written.candidate}) takes {_format_seconds(written.seconds)} and "
            f"{_format_bytes(written)}{energy}."
        )


def _explain_waiting(advice: Advice, best: Option) -> Iterator[str]:
    others = [option for option in advice.options if option is not best and (option.waiting or 0.0) >= MUCH_WAITING]
    if not others:
        return
    worst = advice.written if advice.written in others else max(others, key=lambda one: one.waiting or 0.0)
    assert worst is not None
    cost = worst.cost
    if cost.slowest_s < SLOW_FACTOR * cost.median_s:
        return
    yield (
        f"{cost.slowest} takes {cost.slowest_s / cost.median_s:.1f} times as long as the median board: with "
        f"{worst.candidate} boards wait {worst.waiting:.0%} of their time, with {best.candidate} "
        f"{best.waiting or 0.0:.0%}."
    )


def _explain_sending(advice: Advice, best: Option) -> Iterator[str]:
    reference = max(advice.options, key=lambda one: one.cost.bytes_up)
    cost, mine = reference.cost, best.cost
    if cost.sending < MUCH_SENDING or mine.bytes_up >= cost.bytes_up:
        return
    profile = next(board.profile for board in advice.fleet.boards if board.name == cost.slowest)
    yield (
        f"{cost.slowest}, with {profile.up_bytes_per_s / 1e3:.3g} kB/s up, spends {cost.sending:.0%} of its round on "
        f"the way with {reference.candidate}: {best.candidate.codec} sends {mine.bytes_up / cost.bytes_up:.1%} of "
        "the bytes up."
    )


def _explain_front(advice: Advice, best: Option) -> Iterator[str]:
    front = [option for option in advice.options if option.is_front and option is not best]
    for option in front:
        better = []
        if option.get_cost("time") < best.get_cost("time"):
            better.append(f"only {_format_seconds(option.seconds)}")
        if option.get_cost("bytes") < best.get_cost("bytes"):
            better.append(f"only {_format_bytes(option)}")
        if option.get_cost("energy") < best.get_cost("energy"):
            better.append(f"only {option.joules:.3g} J")
        if better:
            yield f"{option.candidate} needs {' and '.join(better)}, and is worse in the rest."


def _explain_boards(advice: Advice) -> Iterator[str]:
    for option in advice.options[:1]:
        if (option.lost or 0.0) >= MUCH_LOST:
            yield f"{option.lost:.0%} of its assignments are lost with their boards."
    for board in advice.fleet.measured:
        if board.throttled_fraction >= MUCH_THROTTLED:
            heat = "" if board.max_temperature_c is None else f" and came to {board.max_temperature_c:.0f} °C"
            yield f"{board.name} was throttled in {board.throttled_fraction:.0%} of its updates{heat}."
    needed = max((option.memory_bytes for option in advice.options), default=0)
    for board_ in advice.fleet.boards:
        memory = board_.profile.memory_bytes
        if memory is not None and memory < needed:
            yield f"{board_.name} has {memory / 1e6:.0f} MB, and the model needs up to {needed / 1e6:.0f} MB."


def _explain_failure(advice: Advice) -> Iterator[str]:
    if not advice.options:
        if advice.failure:
            yield f"no simulation came to a result: {advice.failure}"
        else:
            yield "no simulation ended in time: give more --seconds, or fewer boards."
        return
    reached = [option for option in advice.options if option.is_reached]
    if reached:
        cheapest = reached[0]
        yield (
            f"{len(reached)} of {len(advice.options)} reach {_format_goal(advice)}, and none within the budgets; the "
            f"nearest is {cheapest.candidate} with {_format_seconds(cheapest.seconds)} and {_format_bytes(cheapest)}."
        )
        return
    nearest = advice.options[0]
    quality = "unknown" if nearest.quality is None else f"{nearest.quality:.4f}"
    yield (
        f"none of {len(advice.options)} reaches {_format_goal(advice)} on the proxy data; the nearest is "
        f"{nearest.candidate}, {quality} after {_format_seconds(nearest.seconds)} and {nearest.rounds} rounds."
    )


def _format_goal(advice: Advice) -> str:
    goal = advice.goal
    text = f"{goal.name} {'>=' if goal.is_max else '<='} {goal.limit:.4g}"
    return f"{text}, to which the run file as it is comes," if advice.is_own_goal else text


def _format_seconds(seconds: float | None) -> str:
    return "unknown time" if seconds is None else f"{seconds:.3g} s"


def _format_bytes(option: Option) -> str:
    total = (option.bytes_up or 0) + (option.bytes_down or 0)
    return f"{total / 1e6:.3g} MB"


def _list_names(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def make_report(advice: Advice) -> Mapping[str, Any]:
    """Returns an advice as JSON values."""
    return {
        "goal": str(advice.goal),
        "minimise": advice.request.minimise,
        "rows": make_rows(advice),
        "sentences": explain(advice),
        "limits": list_limits(advice),
    }
