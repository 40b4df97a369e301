"""`edgefl device shard`: where a board's data lies, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.device_options import state_option
from edgefl.cli.listing import ListedGroup
from edgefl.errors import DataError, NotFoundError, UsageError
from edgefl.untrusted import parse_json

if TYPE_CHECKING:
    from edgefl.tasks.shards import ShardReport


@click.group(cls=ListedGroup)
def shard() -> None:
    """Say where this board's data lies, and look at it."""


@shard.command()
@click.argument("task")
@click.argument("path")
@state_option
def add(task: str, path: str, root: Path | None) -> None:
    """Use PATH (a shard file, a folder, or what the task reads) for TASK."""
    from edgefl.device.state import DeviceState  # noqa: PLC0415 fast start

    state = DeviceState.load(root)
    report = shard_report(task, str(Path(path).absolute()))
    state.set_shard(task, report.path)
    _print_report(report)


@shard.command()
@click.argument("task", required=False)
@state_option
def check(task: str | None, root: Path | None) -> None:
    """Read the shards and print their classes, counts and missing labels."""
    from edgefl.device.state import DeviceState  # noqa: PLC0415 fast start

    shards = DeviceState.load(root).device.shards
    if task is not None and task not in shards:
        known = f"it has {', '.join(shards)}" if shards else "it has none"
        raise NotFoundError(
            f"this device has no shard for task {task!r} ({known}); edgefl device shard add TASK PATH"
        )
    if not shards:
        raise NotFoundError("this device has no shards; edgefl device shard add TASK PATH")
    for name in [task] if task else shards:
        _print_report(shard_report(name, shards[name]))


def named_shard(text: str, default_task: str | None) -> tuple[str, str]:
    """Returns task and absolute path of a `--shard`: TASK=PATH, or a path whose card or `--task` says the task."""
    task, mark, path = text.partition("=")
    if mark and task and not Path(text).exists() and "/" not in task:
        return task, str(Path(path).absolute())
    place = Path(text).absolute()
    if not place.exists():
        raise DataError(f"shard {place} does not exist; give a .npz file or a folder of them")
    found = default_task or _card_task(place)
    if found is None:
        raise UsageError(f"the task of {place} is not known: it has no card; say --shard TASK={text}")
    return found, str(place)


def shard_report(task: str, path: str) -> ShardReport:
    """Returns what a shard holds.

    Raises:
        EdgeflError: there is no such task, or the shard cannot be used for it.
    """
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start
    from edgefl.tasks.shards import check_shard  # noqa: PLC0415 likewise

    return check_shard(make_task(task, {}), path)


def _card_task(place: Path) -> str | None:
    cards = sorted(place.glob("*.json")) if place.is_dir() else [place.with_suffix(".json"), Path(f"{place}.json")]
    for card in cards:
        try:
            task = parse_json(card.read_bytes())["task"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(task, str):
            return task
    return None


def _print_report(report: ShardReport) -> None:
    click.echo(f"{report.task}: {report.num_examples} examples in {report.path}")
    for label, count in sorted(report.counts.items()):
        name = f" {report.labels[label]}" if 0 <= label < len(report.labels) else ""
        click.echo(f"  class {label}{name}: {count}")
    if report.missing:
        click.echo(f"  missing: {', '.join(map(str, report.missing))}")
