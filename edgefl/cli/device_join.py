"""`edgefl device join`: joins a fleet, by a token or by a join file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgefl.cli.device_join_file import JoinDependencies, join_from_file
from edgefl.cli.device_options import state_option
from edgefl.cli.device_settings import save_temperature_limit, temperature_option
from edgefl.cli.device_shards import load_shard_report, parse_shard_option
from edgefl.core.errors import UsageError
from edgefl.core.protocol import PEER_PORT, JoinToken, validate_address

if TYPE_CHECKING:
    from edgefl.device.state_dir import DeviceStateDir

DEFAULT_PORT = 8000


def _validate_accelerator(_context: click.Context, _option: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise click.BadParameter(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
    return value


@click.command()
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
    "--accelerator", callback=_validate_accelerator, metavar="auto|cpu|cuda|cuda:N", default="auto", show_default=True
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
    from edgefl.device.enrolment.enroll import EnrolmentOptions, get_host_slug  # noqa: PLC0415 fast start
    from edgefl.device.enrolment.enroll import enroll as join_fleet  # noqa: PLC0415 likewise
    from edgefl.device.enrolment.retry import enroll_with_retry  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise

    if join_file is not None:
        if address or text or token_file or shards or name or role != "trainer":
            raise UsageError(
                "a join file says where, who and what: --file goes without address, token, shard or name"
            )
        side = JoinDependencies(
            load_shard_report=load_shard_report,
            collect_facts=_collect_facts,
            accelerator=accelerator,
            threads=threads,
            peer_port=peer_port,
        )
        state_dir = root or get_default_state_dir()
        state = join_from_file(join_file, side, root=state_dir, should_retry=until_joined, should_delete=delete_file)
        save_temperature_limit(state, max_temperature)
        _print_joined(state, root)
        return
    if delete_file:
        raise UsageError("--delete-file goes with --file FILE")
    if token_file is not None:
        text = token_file.read(8192)
    if text is None:
        raise UsageError("a join needs --token TOKEN or --token-file FILE; `edgefl coordinator token` makes one")
    token = JoinToken.parse(text)
    addresses = [validate_address(address, DEFAULT_PORT)] if address else []
    shard_paths = dict(parse_shard_option(shard, task) for shard in shards)
    reports = {name: load_shard_report(name, path) for name, path in shard_paths.items()}
    options = EnrolmentOptions(
        name=name or get_host_slug(),
        role=role,
        shards=shard_paths,
        examples={name: report.num_examples for name, report in reports.items()},
        accelerator=accelerator,
        threads=threads,
        peer_port=peer_port,
        facts=_collect_facts(shard_paths, role),
    )
    state_dir = root or get_default_state_dir()
    if until_joined:
        state = enroll_with_retry(replace(token, addresses=(*addresses, *token.addresses)), options, root=state_dir)
    else:
        state = join_fleet(token, options, root=state_dir, addresses=addresses)
    save_temperature_limit(state, max_temperature)
    _print_joined(state, root)


def _print_joined(state: DeviceStateDir, root: Path | None) -> None:
    click.echo(
        f"joined fleet {state.settings.fleet} as {state.device_id} ({state.settings.role}); state in {state.root}"
    )
    click.echo("next: edgefl device start" + (f" --state {root}" if root else ""))


def _collect_facts(shards: Mapping[str, str], role: str) -> dict[str, Any]:
    """Returns the facts that the coordinator needs at once, as the agent reports them later."""
    from edgefl.device.hardware.capabilities import probe as look  # noqa: PLC0415 fast start
    from edgefl.device.hardware.training_facts import get_training_facts  # noqa: PLC0415 likewise
    from edgefl.device.training.task_cache import TaskCache  # noqa: PLC0415 likewise

    blocks = TaskCache(lambda: shards, accelerator="cpu", threads=1).list_blocks()
    board = look()
    facts = {**board, **get_training_facts(role, shards, board)}
    return {**facts, "blocks": blocks} if blocks else facts
