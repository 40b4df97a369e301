"""`edgefl device`: look at the board, join a fleet, point at its data, run the agent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgefl.cli.device_inference import infer, serve
from edgefl.cli.device_join_file import BoardSide, join_from_file
from edgefl.cli.device_settings import keep_limit, set_, temperature_option
from edgefl.cli.device_updates import apply_update, signers_option, trust
from edgefl.cli.listing import ListedGroup
from edgefl.errors import DataError, NetworkError, NotFoundError, NotJoinedError, UsageError, WrongCaError
from edgefl.protocol import PEER_PORT, JoinToken, checked_address

if TYPE_CHECKING:
    from edgefl.device.state import DeviceState
    from edgefl.tasks.shards import ShardReport

DEFAULT_PORT = 8000


def _accelerator(_context: click.Context, _option: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise click.BadParameter(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
    return value


state_option = click.option(
    "--state",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    help="State directory [default: ~/.local/share/edgefl/device].",
)


@click.group(cls=ListedGroup)
def command() -> None:
    """Join a board to a fleet and run its agent."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--profile", type=click.Path(path_type=Path, dir_okay=False), help="Measure, and write a simulator's profile."
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="TASK[/MODEL]",
    help="What --profile measures; may be repeated [default: the tasks of this board's shards, else digits].",
)
@click.option("--name", help="What the profile is called [default: this device's name].")
@state_option
def probe(
    *, as_json: bool, profile: Path | None, tasks: tuple[str, ...], name: str | None, root: Path | None
) -> None:
    """Print what this board is and can do, as the coordinator is told at a join, and how it is at this moment."""
    from edgefl.device.board.board import Board  # noqa: PLC0415 fast start
    from edgefl.device.board.capabilities import probe as look  # noqa: PLC0415 likewise
    from edgefl.device.board.condition import condition  # noqa: PLC0415 likewise
    from edgefl.device.board.training_facts import training_facts  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import task_names  # noqa: PLC0415 likewise

    facts = look()
    facts |= condition(Board(), is_jetson=facts["family"] == "jetson")
    facts |= training_facts("trainer", task_names(), facts)
    if profile is not None:
        _write_profile(profile, facts, tasks, name, root)
    if as_json:
        click.echo(json.dumps({"v": 1, **facts}))
        return
    _print_facts(facts)


@command.command()
@click.argument("address", required=False, metavar="[HOST:PORT]")
@click.option("--token", "text", envvar="EDGEFL_JOIN_TOKEN", help="What `edgefl coordinator token` printed.")
@click.option("--token-file", type=click.File(), help="A file with the token in it; - is the standard input.")
@click.option("--file", "join_file", metavar="FILE", help="A join file, which says it all; - is the standard input.")
@click.option("--delete-file", is_flag=True, help="Overwrite and remove the join file after the join.")
@click.option("--until-joined", is_flag=True, help="Go on trying until it works or the token lets nobody in.")
@click.option("--shard", "shards", multiple=True, metavar="[TASK=]PATH", help="This board's data; may be repeated.")
@click.option("--task", help="The task of shards that do not say it.")
@click.option("--name", help="This device's name [default: the host's].")
@click.option("--role", type=click.Choice(["trainer", "evaluator"]), default="trainer", show_default=True)
@state_option
@click.option(
    "--accelerator", callback=_accelerator, metavar="auto|cpu|cuda|cuda:N", default="auto", show_default=True
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads to train with [default: all cores].")
@click.option(
    "--peer-port",
    type=click.IntRange(1, 65535),
    default=PEER_PORT,
    show_default=True,
    help="Where it listens for neighbours, in runs with carrier = 'direct'.",
)
@temperature_option
def join(  # noqa: PLR0913, PLR0917 one argument per option
    address: str | None,
    text: str | None,
    token_file: TextIO | None,
    join_file: str | None,
    delete_file: bool,
    until_joined: bool,
    shards: tuple[str, ...],
    task: str | None,
    name: str | None,
    role: str,
    root: Path | None,
    accelerator: str,
    threads: int | None,
    peer_port: int,
    max_temperature: str | float | None,
) -> None:
    """Join the fleet of the coordinator at HOST:PORT (or at the token's own addresses)."""
    from edgefl.device.joining.enrolment import JoinWishes, host_slug  # noqa: PLC0415 fast start
    from edgefl.device.joining.enrolment import join as join_fleet  # noqa: PLC0415 likewise
    from edgefl.device.joining.patient_join import join_patiently  # noqa: PLC0415 likewise
    from edgefl.device.state import default_state_dir  # noqa: PLC0415 likewise

    if join_file is not None:
        if address or text or token_file or shards or name or role != "trainer":
            raise UsageError(
                "a join file says where, who and what: --file goes without address, token, shard or name"
            )
        side = BoardSide(report=_report, facts=_facts, accelerator=accelerator, threads=threads, peer_port=peer_port)
        place = root or default_state_dir()
        state = join_from_file(join_file, side, root=place, is_patient=until_joined, deletes=delete_file)
        keep_limit(state, max_temperature)
        _say_joined(state, root)
        return
    if delete_file:
        raise UsageError("--delete-file goes with --file FILE")
    if token_file is not None:
        text = token_file.read(8192)
    if text is None:
        raise UsageError("a join needs --token TOKEN or --token-file FILE; `edgefl coordinator token` makes one")
    token = JoinToken.parse(text)
    addresses = [checked_address(address, DEFAULT_PORT)] if address else []
    named = dict(_shard(shard, task) for shard in shards)
    reports = {name: _report(name, path) for name, path in named.items()}
    wishes = JoinWishes(
        name=name or host_slug(),
        role=role,
        shards=named,
        examples={name: report.num_examples for name, report in reports.items()},
        accelerator=accelerator,
        threads=threads,
        peer_port=peer_port,
        facts=_facts(named, role),
    )
    place = root or default_state_dir()
    if until_joined:
        state = join_patiently(replace(token, addresses=(*addresses, *token.addresses)), wishes, root=place)
    else:
        state = join_fleet(token, wishes, root=place, addresses=addresses)
    keep_limit(state, max_temperature)
    _say_joined(state, root)


def _say_joined(state: DeviceState, root: Path | None) -> None:
    click.echo(f"joined fleet {state.device.fleet} as {state.device_id} ({state.device.role}); state in {state.root}")
    click.echo("next: edgefl device start" + (f" --state {root}" if root else ""))


@command.command()
@state_option
@signers_option
@temperature_option
def start(root: Path | None, signers: Path, max_temperature: str | float | None) -> None:
    """Run the agent until SIGTERM or Ctrl-C; what the systemd unit runs."""
    from edgefl.device.agent import run_agent  # noqa: PLC0415 fast start
    from edgefl.device.install_facts import own_site  # noqa: PLC0415 likewise
    from edgefl.device.state import DeviceState  # noqa: PLC0415 likewise

    state = DeviceState.load(root)
    with state.locked():
        keep_limit(state, max_temperature)
        run_agent(state, own_site(signers))


@command.command()
@state_option
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text", show_default=True)
def status(root: Path | None, style: str) -> None:
    """Print who this device is and whether it reaches its coordinator."""
    from edgefl.device.state import DeviceState  # noqa: PLC0415 fast start

    state = DeviceState.load(root)
    device = state.device
    facts: dict[str, Any] = {
        "device_id": device.device_id,
        "fleet": device.fleet,
        "role": device.role,
        "state": str(state.root),
        "shards": dict(device.shards),
        "accelerator": device.accelerator,
        "threads": device.threads,
        "max_temperature_c": device.max_temperature_c,
        "addresses": list(device.addresses),
        **_reachable(state),
    }
    if style == "json":
        click.echo(json.dumps({"v": 1, **facts}))
        return
    _print_facts(facts)


command.add_command(set_)
command.add_command(infer)
command.add_command(serve)
command.add_command(trust)
command.add_command(apply_update)


@command.group(cls=ListedGroup)
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
    report = _report(task, str(Path(path).absolute()))
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
        _print_report(_report(name, shards[name]))


def _write_profile(
    path: Path, facts: Mapping[str, Any], tasks: Sequence[str], name: str | None, root: Path | None
) -> None:
    """Measures this board, with the data, cores and coordinator that it joined with if it has joined."""
    from edgefl.device.board.accelerator import chosen_accelerator  # noqa: PLC0415 fast start
    from edgefl.device.joining.enrolment import host_slug  # noqa: PLC0415 likewise
    from edgefl.device.profile import measure_board, write_profile  # noqa: PLC0415 likewise
    from edgefl.device.state import DeviceState  # noqa: PLC0415 likewise

    try:
        device = DeviceState.load(root).device
    except NotJoinedError:
        if root is not None:
            raise
        device = None
    shards = dict(device.shards) if device else {}
    chosen = tasks or tuple(shards) or ("digits",)
    made = measure_board(
        name=name or (device.device_id if device else host_slug()),
        facts=dict(facts),
        tasks={task: shards.get(task.partition("/")[0]) for task in chosen},
        accelerator=chosen_accelerator(device.accelerator) if device else "cpu",
        threads=device.threads if device else None,
        addresses=device.addresses if device else (),
    )
    write_profile(path, made)
    click.echo(f"profile {made.name} of {', '.join(chosen)} written to {path}", err=True)


def _shard(text: str, default_task: str | None) -> tuple[str, str]:
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


def _card_task(place: Path) -> str | None:
    cards = sorted(place.glob("*.json")) if place.is_dir() else [place.with_suffix(".json"), Path(f"{place}.json")]
    for card in cards:
        try:
            task = json.loads(card.read_bytes())["task"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(task, str):
            return task
    return None


def _report(task: str, path: str) -> ShardReport:
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 fast start
    from edgefl.tasks.shards import check_shard  # noqa: PLC0415 likewise

    return check_shard(make_task(task, {}), path)


def _print_report(report: ShardReport) -> None:
    click.echo(f"{report.task}: {report.num_examples} examples in {report.path}")
    for label, count in sorted(report.counts.items()):
        name = f" {report.labels[label]}" if 0 <= label < len(report.labels) else ""
        click.echo(f"  class {label}{name}: {count}")
    if report.missing:
        click.echo(f"  missing: {', '.join(map(str, report.missing))}")


def _reachable(state: DeviceState) -> dict[str, Any]:
    from edgefl.device.trust import pinned_context, say_hello  # noqa: PLC0415 fast start

    context = pinned_context(state.ca.read_bytes())
    reasons = []
    for address in state.device.addresses:
        try:
            hello = say_hello(address, context, timeout_s=3.0)
        except (NetworkError, WrongCaError) as error:
            reasons.append(str(error))
            continue
        found = {"coordinator": address, "coordinator_version": hello.version}
        return {**found, "clock_skew_s": round(hello.skew_s, 3)}
    return {"coordinator": None, "unreachable": reasons}


def _facts(shards: Mapping[str, str], role: str) -> dict[str, Any]:
    """Returns what the coordinator is to know from the first moment on, as the agent reports it later."""
    from edgefl.device.board.capabilities import probe as look  # noqa: PLC0415 fast start
    from edgefl.device.board.training_facts import training_facts  # noqa: PLC0415 likewise
    from edgefl.device.warm_tasks import WarmTasks  # noqa: PLC0415 likewise

    blocks = WarmTasks(lambda: shards, accelerator="cpu", threads=1).blocks()
    board = look()
    facts = {**board, **training_facts(role, shards, board)}
    return {**facts, "blocks": blocks} if blocks else facts


def _print_facts(facts: Mapping[str, Any]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {_plain(value)}")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_plain, value)) or "none"
    return "-" if value is None else str(value)
