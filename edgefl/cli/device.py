"""`edgefl device`: probes the board, joins a fleet, sets data, runs the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.command_group import FullHelpGroup
from edgefl.cli.device_inference import infer, serve
from edgefl.cli.device_join import join
from edgefl.cli.device_options import state_option
from edgefl.cli.device_settings import save_temperature_limit, set_, temperature_option
from edgefl.cli.device_shards import shard
from edgefl.cli.device_updates import apply_update, signers_option, trust
from edgefl.core.errors import NetworkError, NotJoinedError, WrongCaError

if TYPE_CHECKING:
    from edgefl.device.state_dir import DeviceStateDir


@click.group(cls=FullHelpGroup)
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
    from edgefl.device.hardware.board_reader import BoardReader  # noqa: PLC0415 fast start
    from edgefl.device.hardware.board_status import read_board_status  # noqa: PLC0415 likewise
    from edgefl.device.hardware.capabilities import probe as look  # noqa: PLC0415 likewise
    from edgefl.device.hardware.training_facts import get_training_facts  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import list_task_names  # noqa: PLC0415 likewise

    facts = look()
    facts |= read_board_status(BoardReader(), is_jetson=facts["family"] == "jetson")
    facts |= get_training_facts("trainer", list_task_names(), facts)
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
    from edgefl.device.memory_tuning import reduce_memory  # noqa: PLC0415 fast start

    reduce_memory()  # before all other imports
    from edgefl.device.agent import run_agent  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise
    from edgefl.device.updates.update_config import load_update_config  # noqa: PLC0415 likewise

    state = DeviceStateDir.load(root)
    with state.lock():
        save_temperature_limit(state, max_temperature)
        run_agent(state, load_update_config(signers))


@command.command()
@state_option
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text", show_default=True)
def status(root: Path | None, style: str) -> None:
    """Print who this device is and whether it reaches its coordinator and the broker."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    state = DeviceStateDir.load(root)
    device = state.settings
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
        **_check_reachability(state),
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
    """Measures this board, with the data, cores and coordinator of its membership, if any."""
    from edgefl.device.enrolment.enroll import get_host_slug  # noqa: PLC0415 likewise
    from edgefl.device.hardware.accelerator import select_accelerator  # noqa: PLC0415 fast start
    from edgefl.device.hardware.profile import measure_board, write_profile  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    try:
        device = DeviceStateDir.load(root).settings
    except NotJoinedError:
        if root is not None:
            raise
        device = None
    shards = dict(device.shards) if device else {}
    chosen_tasks = tasks or tuple(shards) or ("digits",)
    profile = measure_board(
        name=name or (device.device_id if device else get_host_slug()),
        facts=dict(facts),
        tasks={task: shards.get(task.partition("/")[0]) for task in chosen_tasks},
        accelerator=select_accelerator(device.accelerator) if device else "cpu",
        threads=device.threads if device else None,
        addresses=device.addresses if device else (),
    )
    write_profile(path, profile)
    click.echo(f"profile {profile.name} of {', '.join(chosen_tasks)} written to {path}", err=True)


def _check_reachability(state: DeviceStateDir) -> dict[str, Any]:
    from edgefl.device.diagnostics.broker_probe import find_reachable_broker  # noqa: PLC0415 fast start
    from edgefl.system.https_client import create_pinned_context, fetch_coordinator_info  # noqa: PLC0415 likewise

    context = create_pinned_context(state.ca.read_bytes())
    reasons = []
    for address in state.settings.addresses:
        try:
            hello = fetch_coordinator_info(address, context, timeout_s=3.0)
        except (NetworkError, WrongCaError) as error:
            reasons.append(str(error))
            continue
        facts = {"coordinator": address, "coordinator_version": hello.version}
        broker = find_reachable_broker(state, timeout_s=3.0)
        return {**facts, "clock_skew_s": round(hello.skew_s, 3), "broker": broker}
    return {"coordinator": None, "unreachable": reasons}


def _print_facts(facts: Mapping[str, Any]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {_format_value(value)}")


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_format_value, value)) or "none"
    return "-" if value is None else str(value)
