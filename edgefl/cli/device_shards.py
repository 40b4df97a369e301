"""`edgefl device shard`: a device's shards and their content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.command_group import FullHelpGroup
from edgefl.cli.device_options import state_option
from edgefl.core.errors import DataError, NotFoundError, UsageError
from edgefl.core.safe_parsing import parse_json

if TYPE_CHECKING:
    from edgefl.tasks.sharding.shard_files import ShardReport


@click.group(cls=FullHelpGroup)
def shard() -> None:
    """Say where this board's data lies, and look at it."""


@shard.command()
@click.argument("task")
@click.argument("path")
@state_option
def add(task: str, path: str, root: Path | None) -> None:
    """Use PATH (a shard file, a folder, or what the task reads) for TASK."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    state = DeviceStateDir.load(root)
    report = load_shard_report(task, str(Path(path).absolute()))
    state.set_shard(task, report.path)
    _print_report(report)


@shard.command()
@click.argument("task", required=False)
@state_option
def check(task: str | None, root: Path | None) -> None:
    """Read the shards and print their classes, counts and missing labels."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    shards = DeviceStateDir.load(root).settings.shards
    if task is not None and task not in shards:
        listing = f"it has {', '.join(shards)}" if shards else "it has none"
        raise NotFoundError(
            f"this device has no shard for task {task!r} ({listing}); edgefl device shard add TASK PATH"
        )
    if not shards:
        raise NotFoundError("this device has no shards; edgefl device shard add TASK PATH")
    for name in [task] if task else shards:
        _print_report(load_shard_report(name, shards[name]))


def parse_shard_option(text: str, default_task: str | None) -> tuple[str, str]:
    """Returns task and absolute path of a `--shard`: TASK=PATH, or a path with a card or `--task`."""
    task, separator, path = text.partition("=")
    if separator and task and not Path(text).exists() and "/" not in task:
        return task, str(Path(path).absolute())
    shard = Path(text).absolute()
    if not shard.exists():
        raise DataError(f"shard {shard} does not exist; give a .npz file or a folder of them")
    shard_task = default_task or _read_card_task(shard)
    if shard_task is None:
        raise UsageError(f"the task of {shard} is not known: it has no card; say --shard TASK={text}")
    return shard_task, str(shard)


def load_shard_report(task: str, path: str) -> ShardReport:
    """Returns the content report of a shard.

    Raises:
        EdgeflError: there is no such task, or the shard cannot be used for it.
    """
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start
    from edgefl.tasks.sharding.shard_files import check_shard  # noqa: PLC0415 likewise

    return check_shard(make_task(task, {}), path)


def _read_card_task(path: Path) -> str | None:
    cards = sorted(path.glob("*.json")) if path.is_dir() else [path.with_suffix(".json"), Path(f"{path}.json")]
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
    if report.missing_labels:
        click.echo(f"  missing: {', '.join(map(str, report.missing_labels))}")
