"""`edgefl history`: what happened, from the coordinator or straight from its store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from edgefl.cli.history_plot import plot
from edgefl.cli.render import format_option, known_columns, print_rows
from edgefl.errors import NetworkError, UsageError
from edgefl.storage.columns import COLUMNS, OF_NODES
from edgefl.summary import node_figures
from edgefl.types import Json

DATABASE_NAME = "edgefl.db"
DEFAULT_LIMIT = 100

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_HELP = {
    "rounds": "One row a round: version, updates, loss, accuracy and who measured it, bytes.",
    "updates": "One row an assignment: staleness, examples, seconds, bytes, loss, outcome.",
    "devices": "One row a device: presence, and what it computed and sent.",
    "heartbeats": "What the boards felt like; five-minute rows after a day.",
    "events": "Joins, losses, refusals, restarts.",
    "evaluations": "One row an evaluation, by coordinator, evaluator or device; and whose model it is.",
}
# A table fits on a screen; json and csv give every column of `COLUMNS`, but those of nodes only where there are any.
_TABLE = {
    "rounds": ("run_id", "round", "version", "closed_at", "num_devices", "num_updates", "train_loss", "loss",
               "accuracy", "source", "node_accuracy", "worst_node_accuracy", "disagreement", "bytes_up",
               "bytes_down"),
    "updates": ("run_id", "round", "device_id", "outcome", "staleness", "iterations", "num_examples", "loss",
                "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down"),
    "devices": ("device_id", "role", "groups", "presence", "last_seen_at", "examples", "num_used", "compute_s",
                "send_s", "wait_s", "bytes_up", "bytes_down"),
    "heartbeats": ("device_id", "at", "uptime_s", "temperature_c", "throttled", "cpu_fraction", "memory_fraction",
                   "memory_bytes", "disk_free_bytes", "run", "iteration"),
    "events": ("at", "kind", "run_id", "device_id", "message"),
    "evaluations": ("run_id", "round", "version", "device_id", "source", "subject", "loss", "accuracy",
                    "num_examples", "at"),
}  # fmt: skip
_DERIVED = {"rounds": ("disagreement",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What to ask for; `directory` and `url` say where."""

    kind: str
    filters: Mapping[str, Any]
    directory: Path | None
    url: str | None


@click.group(name="history")
def command() -> None:
    """Ask what happened: rounds, updates, devices, heartbeats, events, evaluations."""


def parse_time(text: str, *, now: float) -> float:
    """Returns unix seconds for an age (`90s`, `30m`, `2h`, `7d`, `2w`) or an ISO date and time (UTC unless it says).

    Raises:
        UsageError: it is neither.
    """
    if match := _AGE.match(text.strip()):
        return now - float(match[1]) * _UNIT_S[match[2]]
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"a time is an age such as 2h or 7d, or a date such as 2026-01-31T18:00, got {text!r}"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _fetch(request: _Request) -> list[Json]:
    if request.directory is None and (request.url or _has_operator_file()):
        return _ask(request)
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    return _read(request, request.directory or default_directory())


def _asked(limit: int | None, fmt: str) -> int | None:
    """Returns how many rows to ask for: programs get all; a table one more than it shows, to know that it was cut."""
    return limit if fmt != "table" else (limit or DEFAULT_LIMIT) + 1


def _fitting(kind: str, rows: list[Json], limit: int) -> list[Json]:
    if len(rows) <= limit:
        return rows
    # Devices come by name, everything else oldest first.
    which, kept = ("first", rows[:limit]) if kind == "devices" else ("newest", rows[-limit:])
    click.echo(f"only the {which} {limit} rows are shown; --limit N shows more", err=True)
    return kept


def _columns(kind: str, rows: list[Json], fmt: str) -> list[str]:
    every = _TABLE[kind] if fmt == "table" else (*COLUMNS[kind], *_DERIVED.get(kind, ()))
    return known_columns(rows, every, OF_NODES)


def _has_operator_file() -> bool:
    from edgefl.client import operator_path  # noqa: PLC0415 only when no directory was named

    path = operator_path()
    return "EDGEFL_URL" in os.environ or path.exists() or any(path.parent.glob("operator.*.toml"))


def _read(request: _Request, directory: Path) -> list[Json]:
    from edgefl.storage.queries import history  # noqa: PLC0415 SQLAlchemy is slow to load
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise

    with Store.open(directory.expanduser() / DATABASE_NAME, read_only=True) as store:
        return history(store, request.kind, **request.filters)


def _ask(request: _Request) -> list[Json]:
    from edgefl.client import Operator  # noqa: PLC0415 only commands that talk need it

    try:
        answer = Operator.from_options(request.url).get(f"/edgefl/v1/history/{request.kind}", request.filters)
    except NetworkError as error:
        raise NetworkError(f"{error}; --dir DIR reads the store of a coordinator that does not run") from error
    rows = answer.get("rows")
    if not isinstance(rows, list):
        raise NetworkError("the coordinator answered without rows; update edgefl on the older side")
    return rows


def _add(kind: str) -> None:
    @click.option("--run", help="A run's id or the beginning of it, its name, or `latest`; default: all runs.")
    @click.option("--device", help="One device; default: all.")
    @click.option("--since", help="From then on: an age (2h, 7d) or an ISO date and time.")
    @click.option("--until", help="Before then.")
    @click.option(
        "--limit",
        type=click.IntRange(min=1),
        help=f"Newest rows [default: {DEFAULT_LIMIT} in a table, all in json and csv].",
    )
    @click.option("--dir", "directory", type=click.Path(path_type=Path), help="Read the store in this directory.")
    @click.option("--url", help="Ask this coordinator.")
    @format_option
    def show(  # noqa: PLR0913 the options of one command
        *,
        run: str | None,
        device: str | None,
        since: str | None,
        until: str | None,
        limit: int | None,
        directory: Path | None,
        url: str | None,
        fmt: str,
    ) -> None:
        if directory is not None and url is not None:
            raise UsageError("--dir reads a store and --url asks a coordinator; give one of them")
        now = datetime.now(tz=UTC).timestamp()
        filters = {
            "run": run, "device": device, "limit": _asked(limit, fmt),
            "since": None if since is None else parse_time(since, now=now),
            "until": None if until is None else parse_time(until, now=now),
        }  # fmt: skip
        rows = _fetch(_Request(kind=kind, filters=filters, directory=directory, url=url))
        if fmt == "table":
            rows = _fitting(kind, rows, limit or DEFAULT_LIMIT)
        rows = [{**row, **node_figures(row)} for row in rows]
        print_rows(rows, _columns(kind, rows, fmt), fmt, kind=kind)

    command.command(kind, help=_HELP[kind])(show)


for _kind in COLUMNS:
    _add(_kind)
command.add_command(plot)
