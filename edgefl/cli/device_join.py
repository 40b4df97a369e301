"""`edgefl device join`: takes a board into a fleet, by a token or by a join file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgefl.cli.device_join_file import BoardSide, join_from_file
from edgefl.cli.device_options import state_option
from edgefl.cli.device_settings import keep_limit, temperature_option
from edgefl.cli.device_shards import named_shard, shard_report
from edgefl.errors import UsageError
from edgefl.protocol import PEER_PORT, JoinToken, checked_address

if TYPE_CHECKING:
    from edgefl.device.state import DeviceState

DEFAULT_PORT = 8000


def _accelerator(_context: click.Context, _option: click.Parameter, value: str) -> str:
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
        side = BoardSide(
            report=shard_report, facts=_facts, accelerator=accelerator, threads=threads, peer_port=peer_port
        )
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
    named = dict(named_shard(shard, task) for shard in shards)
    reports = {name: shard_report(name, path) for name, path in named.items()}
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


def _facts(shards: Mapping[str, str], role: str) -> dict[str, Any]:
    """Returns what the coordinator is to know from the first moment on, as the agent reports it later."""
    from edgefl.device.board.capabilities import probe as look  # noqa: PLC0415 fast start
    from edgefl.device.board.training_facts import training_facts  # noqa: PLC0415 likewise
    from edgefl.device.warm_tasks import WarmTasks  # noqa: PLC0415 likewise

    blocks = WarmTasks(lambda: shards, accelerator="cpu", threads=1).blocks()
    board = look()
    facts = {**board, **training_facts(role, shards, board)}
    return {**facts, "blocks": blocks} if blocks else facts
