"""`edgefl device`: probes the board, joins a fleet, sets data, runs the agent, and answers with its model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.device_join import (
    confine_option,
    join,
    save_temperature_limit,
    set_,
    shard,
    temperature_option,
    training_threads_option,
)
from edgefl.cli.device_shard import forget, guess, label, show
from edgefl.cli.output import FullHelpGroup, echo, print_rows, text_format_option
from edgefl.cli.shard_labels import export, import_
from edgefl.cli.signing import apply_update, signers_option, trust
from edgefl.cli.sources import (
    EXISTING_FILE_TYPE,
    FILE_TYPE,
    allow_module_option,
    find_deployed_file,
    get_policy,
    load_device_state,
    open_store,
    state_option,
)
from edgefl.core.errors import DataError, NetworkError, UsageError, WrongCaError
from edgefl.core.safe_parsing import parse_duration_s

if TYPE_CHECKING:
    from edgefl.device.state_dir import DeviceStateDir

PREDICTION_COLUMNS: tuple[str, ...] = ("row", "class", "index", "probability")

MAX_PAUSE_S = 366 * 86_400

model_option = click.option(
    "--model",
    "file",
    type=FILE_TYPE,
    help="An ONNX file [default: the model that is deployed here].",
)
threads_option = click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True)


@click.command()
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help="Rows: .npy, .npz, .csv, an IDX, picture or WAV file, or a shard.",
)
@model_option
@state_option
@signers_option
@threads_option
@confine_option
@click.option("--format", "fmt", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def infer(  # noqa: PLR0913 the options of one command
    *, source: Path, file: Path | None, root: Path | None, signers: Path, threads: int, confine: str | None, fmt: str
) -> None:
    """Print class and probability of every row of a file."""
    import numpy as np  # noqa: PLC0415 fast start

    from edgefl.device.inference.onnx_model import predict_file  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise

    state_dir = root or get_default_state_dir()
    rows, labels = predict_file(
        file or find_deployed_file(root, signers),
        source,
        state_dir=state_dir,
        policy=get_policy(state_dir, confine),
        threads=threads,
    )
    predictions = [{"row": number, **prediction} for number, prediction in enumerate(rows)]
    columns = ("row", "values") if "values" in next(iter(rows), {}) else PREDICTION_COLUMNS
    if labels is not None:
        predictions = [{**row, "label": label} for row, label in zip(predictions, labels, strict=True)]
        columns = (*columns, "label")
    print_rows(predictions, columns, fmt, kind="predictions")
    if labels is not None and predictions and "index" in columns:
        right = float(np.mean([row["index"] == row["label"] for row in predictions]))
        click.echo(f"accuracy {right:.4f} on {len(predictions)} labelled rows", err=True)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; there is no login.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@model_option
@state_option
@signers_option
@threads_option
@confine_option
def serve(  # noqa: PLR0913 the options of one command
    *, host: str, port: int, file: Path | None, root: Path | None, signers: Path, threads: int, confine: str | None
) -> None:
    """Answer POST /predict with the deployed model until SIGTERM or Ctrl-C; a new one is taken over as it comes."""
    from edgefl.device.inference.server import ServedModel, open_listener, run_confined, run_server  # noqa: PLC0415 fast start
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise

    if file is not None and not file.is_file():
        raise DataError(f"there is no model file {file}")
    state_dir = root or get_default_state_dir()
    listener = open_listener(host, port)
    if get_policy(state_dir, confine) != "never":
        run_confined(listener, state_dir, signers, file, threads)
    served = ServedModel(store=None if file else open_store(root, signers), file=file, threads=threads)
    run_server(served, listener)


@click.group(cls=FullHelpGroup)
def command() -> None:
    """On the board itself: join it to a fleet and run its agent.

    The owner of the fleet types `edgefl devices` to see all boards.
    """


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--profile", type=FILE_TYPE, help="Measure, and write a simulator's profile.")
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
    from edgefl.device.hardware.capabilities import probe as look  # noqa: PLC0415 likewise
    from edgefl.device.hardware.health import read_board_status  # noqa: PLC0415 likewise
    from edgefl.device.hardware.requirements import get_training_facts  # noqa: PLC0415 likewise
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
@confine_option
@training_threads_option
@allow_module_option
def start(
    *,
    root: Path | None,
    signers: Path,
    max_temperature: str | float | None,
    confine: str | None,
    threads: int | None,
) -> None:
    """Run the agent until SIGTERM or Ctrl-C; what the systemd unit runs."""
    from edgefl.system.processes import reduce_memory  # noqa: PLC0415 fast start

    reduce_memory()  # before all other imports
    from edgefl.device.agent import run_agent  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise
    from edgefl.device.updates.slots import load_update_config  # noqa: PLC0415 likewise

    state = DeviceStateDir.load(root)
    with state.lock():
        save_temperature_limit(state, max_temperature)
        if confine is not None:
            state.update(confine=confine)
        if threads is not None:
            state.update(threads=threads)
        run_agent(state, load_update_config(signers))


@command.command()
@click.argument("file", type=EXISTING_FILE_TYPE)
@click.option("--withdraw", is_flag=True, help="Take back what [answer] has announced at its broker, and end.")
@allow_module_option
def collect(*, file: Path, withdraw: bool) -> None:
    """Make a shard of what sensors say, as FILE describes, until SIGTERM or Ctrl-C; beside the agent."""
    from edgefl.system.processes import reduce_memory  # noqa: PLC0415 fast start

    reduce_memory()  # before all other imports
    from edgefl.device.collect.collector import run_collector, withdraw_answers  # noqa: PLC0415 likewise

    (withdraw_answers if withdraw else run_collector)(file)


@command.command()
@state_option
@text_format_option
def status(root: Path | None, style: str) -> None:
    """Print who this device is and whether it reaches its coordinator and the broker."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start
    from edgefl.system.confinement import find_gaps  # noqa: PLC0415 likewise

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
        **_read_conditions(state),
        "confine": device.confine,
        "min_group": device.min_group,
        "max_epsilon": device.max_epsilon,
        "only_masked": device.only_masked,
        "base_source": device.base_source,
        "drift_references": dict(device.drift_references),
        "confinement_gaps": find_gaps(),
        "addresses": list(device.addresses),
        **_check_reachability(state),
    }
    if style == "json":
        click.echo(json.dumps({"v": 1, **facts}))
        return
    _print_facts(facts)


@command.command()
@click.argument("duration", required=False, metavar="[DURATION]")
@state_option
def pause(duration: str | None, root: Path | None) -> None:
    """Train nothing on this board for DURATION such as 30m, 2h or 1d, or until `edgefl device resume`."""
    from edgefl.device.conditions.budgets import Clocks  # noqa: PLC0415 fast start
    from edgefl.device.conditions.facts import read_boot_id  # noqa: PLC0415 likewise
    from edgefl.device.conditions.gate import save_pause  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    seconds = None if duration is None else _parse_duration_s(duration)
    state = DeviceStateDir.load(root)
    save_pause(state.root, seconds, Clocks(boot_id=read_boot_id(Path("/"))))
    click.echo(f"{state.device_id} trains nothing {'until it is resumed' if duration is None else f'for {duration}'}")


@command.command()
@state_option
def resume(root: Path | None) -> None:
    """End a pause of this board; its conditions hold as before."""
    from edgefl.device.conditions.gate import clear_pause  # noqa: PLC0415 fast start
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    state = DeviceStateDir.load(root)
    was_paused = clear_pause(state.root)
    click.echo(f"{state.device_id} {'trains again' if was_paused else 'was not paused'}")


def _parse_duration_s(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except ValueError:
        seconds = math.inf
    if seconds > MAX_PAUSE_S:
        raise UsageError(f"a duration is such as 30m, 2h or 1d, at most {MAX_PAUSE_S // 86_400}d; got {text!r:.40}")
    return seconds


def _read_conditions(state: DeviceStateDir) -> dict[str, Any]:
    """Returns the conditions, why the board may not train now, and its budgets; empty without either."""
    from edgefl.core.conditions import format_blocker  # noqa: PLC0415 fast start
    from edgefl.device.conditions.gate import ConditionGate  # noqa: PLC0415 likewise

    gate = ConditionGate(state.root, is_agent=False)
    blocker = gate.check()
    conditions, budgets = gate.conditions.to_json(), gate.describe_budgets()
    return {
        **({"conditions": conditions} if conditions else {}),
        **({"blocked": format_blocker(blocker)} if blocker else {}),
        **({"budgets": budgets} if budgets else {}),
    }


command.add_command(join)
command.add_command(shard)
command.add_command(label)
shard.add_command(export)
shard.add_command(forget)
shard.add_command(guess)
shard.add_command(import_)
shard.add_command(show)
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
    from edgefl.device.hardware.benchmark import measure_board, write_profile  # noqa: PLC0415 likewise
    from edgefl.device.hardware.capabilities import select_accelerator  # noqa: PLC0415 fast start

    state = load_device_state(root)
    device = state.settings if state else None
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
    from edgefl.device.diagnostics.device_checks import find_reachable_broker  # noqa: PLC0415 fast start
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
        echo(f"{name:<{width}}  {_format_value(value)}")


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_format_value, value)) or "none"
    return "-" if value is None else str(value)
