"""`edgefl device`: look at the board, join a fleet, point at its data, run the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.device_inference import infer, serve
from edgefl.cli.device_join import join
from edgefl.cli.device_options import state_option
from edgefl.cli.device_settings import keep_limit, set_, temperature_option
from edgefl.cli.device_shards import shard
from edgefl.cli.device_updates import apply_update, signers_option, trust
from edgefl.cli.listing import ListedGroup
from edgefl.errors import NetworkError, NotJoinedError, WrongCaError

if TYPE_CHECKING:
    from edgefl.device.state import DeviceState


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
@state_option
@signers_option
@temperature_option
def start(root: Path | None, signers: Path, max_temperature: str | float | None) -> None:
    """Run the agent until SIGTERM or Ctrl-C; what the systemd unit runs."""
    from edgefl.device.frugal import be_frugal  # noqa: PLC0415 fast start

    be_frugal()  # before all other imports
    from edgefl.device.agent import run_agent  # noqa: PLC0415 likewise
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
    """Print who this device is and whether it reaches its coordinator and the broker."""
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


command.add_command(join)
command.add_command(shard)
command.add_command(set_)
command.add_command(infer)
command.add_command(serve)
command.add_command(trust)
command.add_command(apply_update)


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


def _reachable(state: DeviceState) -> dict[str, Any]:
    from edgefl.device.broker_probe import reachable_broker  # noqa: PLC0415 fast start
    from edgefl.device.trust import pinned_context, say_hello  # noqa: PLC0415 likewise

    context = pinned_context(state.ca.read_bytes())
    reasons = []
    for address in state.device.addresses:
        try:
            hello = say_hello(address, context, timeout_s=3.0)
        except (NetworkError, WrongCaError) as error:
            reasons.append(str(error))
            continue
        found = {"coordinator": address, "coordinator_version": hello.version}
        broker = reachable_broker(state, timeout_s=3.0)
        return {**found, "clock_skew_s": round(hello.skew_s, 3), "broker": broker}
    return {"coordinator": None, "unreachable": reasons}


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
