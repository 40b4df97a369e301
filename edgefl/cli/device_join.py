"""`edgefl device join`, `shard` and `set`: joins a fleet, by a token or a join file; its data and settings."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgefl.cli.output import FullHelpGroup, echo, text_format_option
from edgefl.cli.sources import NumberRange, allow_module_option, state_option, warn_visible_secret
from edgefl.core.errors import ConfigError, DataError, EdgeflError, NotFoundError, NotJoinedError, UsageError
from edgefl.core.protocol import PEER_PORT, JoinToken, validate_address
from edgefl.core.safe_parsing import parse_json

if TYPE_CHECKING:
    from edgefl.device.enrolment.join_file import JoinFile
    from edgefl.device.state_dir import DeviceStateDir
    from edgefl.tasks.datasets.shards import ShardReport

log = logging.getLogger(__name__)

DEFAULT_PORT = 8000
MAX_FILE_BYTES = 64 * 1024
MAX_TOKEN_CHARS = 8192
NO_LIMIT = "none"
FIRST_DATA = "first"


def _parse_limit(_context: click.Context, _option: click.Parameter, value: str | None) -> str | float | None:
    from edgefl.device.hardware.health import LIMIT_RANGE_C  # noqa: PLC0415 fast start

    if value is None or value == NO_LIMIT:
        return value
    lowest, highest = LIMIT_RANGE_C
    try:
        celsius = float(value)
    except ValueError:
        celsius = float("nan")
    if not lowest <= celsius <= highest:
        raise click.BadParameter(
            f"must be degrees Celsius from {lowest:g} to {highest:g}, or {NO_LIMIT}; got {value!r}"
        )
    return celsius


temperature_option = click.option(
    "--max-temperature",
    "max_temperature",
    callback=_parse_limit,
    envvar="EDGEFL_MAX_TEMPERATURE",
    metavar="CELSIUS|none",
    help="Rest between iterations while the board is hotter [default: none].",
)


training_threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Threads to train with; kept [default: as before, else all cores].",
)
confine_option = click.option(
    "--confine",
    type=click.Choice(["auto", "always", "never"]),
    envvar="EDGEFL_CONFINE",
    help="What runs without the device's key and the network: what is not built in, all, nothing [default: auto].",
)


def _validate_accelerator(_context: click.Context, _option: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise click.BadParameter(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
    return value


@click.command()
@click.argument("address", required=False, metavar="[HOST:PORT]")
@click.option(
    "--token",
    "text",
    envvar="EDGEFL_JOIN_TOKEN",
    callback=warn_visible_secret,
    help="What `edgefl coordinator token` printed; better in the variable or in a file.",
)
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
@training_threads_option
@click.option(
    "--peer-port",
    type=click.IntRange(1, 65535),
    default=PEER_PORT,
    show_default=True,
    help="Where it listens for neighbours, in runs with carrier = 'direct'.",
)
@temperature_option
@allow_module_option
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
    from edgefl.device.enrolment.enroll import (  # noqa: PLC0415 fast start
        EnrolmentOptions,
        RetryPolicy,
        delete_secret_file,
        enroll,
        enroll_with_retry,
        get_host_slug,
        wait_for_clock,
    )
    from edgefl.device.enrolment.join_file import JoinFile  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise

    if join_file is not None:
        if address or text or token_file or shards or name or role != "trainer":
            raise UsageError(
                "a join file says where, who and what: --file goes without address, token, shard or name"
            )
        if delete_file and join_file == "-":
            raise UsageError("--delete-file needs a file; the standard input cannot be removed")
        request = _read_join_file(join_file)
    else:
        if delete_file:
            raise UsageError("--delete-file goes with --file FILE")
        if token_file is not None:
            text = token_file.read(MAX_TOKEN_CHARS)
        if text is None:
            raise UsageError(
                "a join needs a token: --token-file FILE or EDGEFL_JOIN_TOKEN; `edgefl coordinator token` makes one"
            )
        JoinToken.parse(text)
        request = JoinFile(
            token=text,
            name=name,
            role=role,
            shards=dict(parse_shard_option(shard, task) for shard in shards),
            addresses=(parse_join_address(address),) if address else (),
        )
    token = JoinToken.parse(request.token)
    if until_joined and join_file is not None:
        wait_for_clock(RetryPolicy())
    reports, faults = _load_shard_reports(request.shards, is_tolerant=join_file is not None)
    options = EnrolmentOptions(
        name=request.name or get_host_slug(),
        role=request.role,
        # All of them: an unreadable shard is used as soon as it is readable, and the doctor reports it until then.
        shards=request.shards,
        examples={task: report.num_examples for task, report in reports.items()},
        accelerator=accelerator,
        threads=threads,
        peer_port=peer_port,
        facts={**_collect_facts(request.shards, request.role), **({"shard_errors": faults} if faults else {})},
    )
    token = replace(token, addresses=tuple(dict.fromkeys([*request.addresses, *token.addresses])))
    state_dir = root or get_default_state_dir()
    certificate = _read_certificate(state_dir)
    state = (enroll_with_retry if until_joined else enroll)(token, options, root=state_dir)
    if delete_file and join_file is not None:
        delete_secret_file(Path(join_file))
    save_temperature_limit(state, max_temperature)
    click.echo(
        f"joined fleet {state.settings.fleet} as {state.device_id} ({state.settings.role}); state in {state.root}"
    )
    _print_surprises(state, request.addresses, is_new=certificate != _read_certificate(state_dir))
    click.echo("next: edgefl device start" + (f" --state {root}" if root else ""))


def _print_surprises(state: DeviceStateDir, addresses: Sequence[str], *, is_new: bool) -> None:
    """Says that a join changed nothing, or went to another address than the one that was typed."""
    used = state.settings.addresses[0]
    if not is_new:
        click.echo("it was a member already: nothing of the token was used up")
    elif addresses and used not in addresses:
        click.echo(f"{addresses[0]} could not be used; it joined at {used}, as the token says")


def parse_join_address(text: str) -> str:
    """Returns HOST:PORT of an address, or of a URL that was copied from a browser.

    Raises:
        UsageError: neither.
    """
    host = re.sub(r"\Ahttps?://", "", text, flags=re.IGNORECASE)
    return validate_address(host.partition("/")[0] if host != text else text, DEFAULT_PORT)


def _read_certificate(root: Path) -> bytes | None:
    """Returns the certificate of a state directory; None where there is none."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    try:
        return DeviceStateDir.load(root).cert.read_bytes()
    except (EdgeflError, OSError):
        return None


def _read_join_file(path: str) -> JoinFile:
    """Returns the join file at `path`; `-` is the standard input.

    Raises:
        ConfigError: it cannot be read, or is no join file; the message never shows the token.
    """
    from edgefl.device.enrolment.join_file import JoinFile  # noqa: PLC0415 fast start

    try:
        if path == "-":
            text = sys.stdin.read(MAX_FILE_BYTES + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the join file {path} cannot be read: {reason}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"the join file {path} is longer than {MAX_FILE_BYTES} characters; it is none")
    return JoinFile.parse(text)


def _load_shard_reports(
    shards: Mapping[str, str], *, is_tolerant: bool
) -> tuple[dict[str, ShardReport], dict[str, str]]:
    """Returns the shards' reports, and the errors of those left out: at an unattended join, data may come later.

    Raises:
        EdgeflError: a shard cannot be used, and none may be left out.
    """
    reports, faults = {}, {}
    for task, path in shards.items():
        try:
            reports[task] = load_shard_report(task, path)
        except (EdgeflError, OSError) as error:
            if not is_tolerant:
                raise
            log.warning("joining without data for %s: %s; it is used as soon as it can be read", task, error)
            faults[task] = str(error)
    return reports, faults


def _collect_facts(shards: Mapping[str, str], role: str) -> dict[str, Any]:
    """Returns the facts that the coordinator needs at once, as the agent reports them later."""
    from edgefl.device.hardware.capabilities import probe as look  # noqa: PLC0415 fast start
    from edgefl.device.hardware.requirements import get_training_facts  # noqa: PLC0415 likewise
    from edgefl.device.training.task_cache import TaskCache  # noqa: PLC0415 likewise

    blocks = TaskCache(lambda: shards, accelerator="cpu", threads=1).list_blocks()
    board = look()
    facts = {**board, **get_training_facts(role, shards, board)}
    return {**facts, "blocks": blocks} if blocks else facts


@click.command("set")
@state_option
@temperature_option
@confine_option
@click.option(
    "--conditions",
    metavar="FILE|none",
    help="When this board may train: a TOML file with the table [conditions], which is copied; `none` ends them.",
)
@click.option(
    "--min-group",
    type=click.IntRange(1, 1_000_000),
    help="Least number of examples that statistics and other analyses may be about; 5 at first.",
)
@click.option(
    "--max-epsilon",
    type=NumberRange(0, 1000),
    help="Most that a task may spend of its examples' privacy over all runs, at delta 1e-5; runs without "
    'privacy.unit = "example" are refused then. 0 ends it.',
)
@click.option(
    "--only-masked/--also-unmasked",
    "only_masked",
    default=None,
    help="Train in runs with secure aggregation alone, so that no update, sum or node of this board is sent without "
    "masks; or in all runs, as at first.",
)
@click.option(
    "--base-source",
    metavar="FOLDER|none",
    help="Look for bases and compiled tasks in FOLDER first, such as a mounted USB stick; `none` ends it.",
)
@click.option(
    "--drift",
    "drifts",
    multiple=True,
    metavar="TASK=REFERENCE",
    help="Compare the task's newest data with `first`, that of its first work from now on, or with a file or folder; "
    "`none` ends it.",
)
def set_(  # noqa: PLR0913 one argument per option
    *,
    root: Path | None,
    max_temperature: str | float | None,
    confine: str | None,
    conditions: str | None,
    min_group: int | None,
    max_epsilon: float | None,
    only_masked: bool | None,
    base_source: str | None,
    drifts: tuple[str, ...],
) -> None:
    """Change a setting of this joined board."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    values = max_temperature, confine, conditions, min_group, max_epsilon, only_masked, base_source
    if all(value is None for value in values) and not drifts:
        raise UsageError(
            "nothing to set; give --max-temperature CELSIUS, or none for no limit, --conditions FILE, "
            "--confine POLICY, --min-group N, --max-epsilon EPSILON, --only-masked, --base-source FOLDER, or "
            "--drift TASK=first"
        )
    references = [_parse_reference(text) for text in drifts]
    state = DeviceStateDir.load(root)
    save_temperature_limit(state, max_temperature)
    if max_temperature is not None:
        celsius = state.settings.max_temperature_c
        rest = "never" if celsius is None else f"between iterations above {celsius:g} °C"
        click.echo(f"{state.device_id} rests {rest}")
    if confine is not None:
        state.update(confine=confine)
        click.echo(f"{state.device_id} confines: {confine}; restart its agent")
    if conditions is not None:
        _save_conditions(state, conditions)
    if min_group is not None:
        state.update(min_group=min_group)
        click.echo(f"{state.device_id} says nothing about fewer than {min_group} examples")
    if max_epsilon is not None:
        state.update(max_epsilon=max_epsilon or None)
        click.echo(
            f"{state.device_id} lets a task spend " + (f"epsilon {max_epsilon:g}" if max_epsilon else "any epsilon")
        )
    if only_masked is not None:
        state.update(only_masked=only_masked)
        click.echo(f"{state.device_id} trains " + ("with secure aggregation alone" if only_masked else "in all runs"))
    if base_source is not None:
        _save_base_source(state, base_source)
    for task, reference in references:
        _save_reference(state, task, reference)


def _save_base_source(state: DeviceStateDir, text: str) -> None:
    """Saves the folder in which bases are looked for first; it may be one that is not mounted now."""
    from edgefl.device.enrolment.join_file import is_hidden  # noqa: PLC0415 fast start

    folder = None if text == NO_LIMIT else str(Path(text).absolute())
    state.update(base_source=folder)
    if folder is None:
        click.echo(f"{state.device_id} fetches bases from its coordinator alone")
    else:
        now = "" if Path(folder).is_dir() else ", which is not there now"
        click.echo(f"{state.device_id} looks for bases in {folder} first{now}")
        if is_hidden(f"{folder}/"):
            click.echo("as a service it sees none of /home, /root, /tmp: mount it below /media or /srv", err=True)


def _save_conditions(state: DeviceStateDir, name: str) -> None:
    """Saves the conditions in a file, and says whether the board may train now.

    Raises:
        ConfigError: they cannot be read, or could never hold on this board.
    """
    from edgefl.core.conditions import format_blocker, parse_conditions  # noqa: PLC0415 fast start
    from edgefl.device.conditions.gate import ConditionGate, save_conditions  # noqa: PLC0415 likewise

    if name == NO_LIMIT:
        save_conditions(state.root, None)
        click.echo(f"{state.device_id} trains at any time")
        return
    try:
        with Path(name).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_FILE_BYTES} bytes; it holds no conditions")
    gate = ConditionGate(state.root, is_agent=False)
    if unknown := gate.list_unknown(parse_conditions(text)):
        raise ConfigError(f"{name}: {state.device_id} could never train: conditions.{'; conditions.'.join(unknown)}")
    save_conditions(state.root, text)
    blocker = gate.check()
    click.echo(f"{state.device_id} keeps these conditions; now it {'may train' if blocker is None else 'may not'}")
    if blocker is not None:
        click.echo(format_blocker(blocker))


def _parse_reference(text: str) -> tuple[str, str]:
    """Returns task and reference of a `--drift`: `first`, `none`, or an absolute path."""
    task, separator, reference = text.rpartition("=")
    if not separator or not task or not reference:
        raise UsageError(f"--drift must be TASK=first, TASK=PATH or TASK=none, got {text!r:.200}")
    if reference in {FIRST_DATA, NO_LIMIT}:
        return task, reference
    path = Path(reference).absolute()
    if not path.exists():
        raise UsageError(f"--drift {text!r:.200}: {path} does not exist; give `first`, `none`, a file or a folder")
    return task, str(path)


def _save_reference(state: Any, task: str, reference: str) -> None:
    """Saves what a task's data is compared with, and removes what was kept of an earlier one."""
    from edgefl.device.drift_watch import list_reference_paths  # noqa: PLC0415 fast start

    others = {name: source for name, source in state.settings.drift_references.items() if name != task}
    state.update(drift_references=others if reference == NO_LIMIT else {**others, task: reference})
    for path in list_reference_paths(state.root, task):
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)  # what was told of features
    what = {NO_LIMIT: "nothing", FIRST_DATA: "that of its next work"}.get(reference, reference)
    click.echo(f"{state.device_id} compares new data of {task} with {what}")


def save_temperature_limit(state: Any, max_temperature: str | float | None) -> None:
    """Saves a given limit; None leaves the present one."""
    if max_temperature is not None:
        state.update(max_temperature_c=None if max_temperature == NO_LIMIT else max_temperature)


@click.group(cls=FullHelpGroup)
def shard() -> None:
    """Say where this board's data lies, and look at it."""


@shard.command()
@click.argument("task")
@click.argument("path")
@click.option("--only", "is_only", is_flag=True, help="Take the shards of all other tasks away.")
@state_option
@allow_module_option
def add(task: str, path: str, is_only: bool, root: Path | None) -> None:
    """Use PATH (a shard file, a folder, or what the task reads) for TASK."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    state = DeviceStateDir.load(root)
    report = load_shard_report(task, str(Path(path).absolute()))
    state.set_shard(task, report.path, is_only=is_only)
    _print_report(report)


@shard.command()
@click.argument("task")
@state_option
def remove(task: str, root: Path | None) -> None:
    """Train TASK on this board no longer; the data stays where it is."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    state = DeviceStateDir.load(root)
    path = _find_shard(state, task)
    state.remove_shard(task)
    echo(f"{state.device_id} trains {task} no longer; {path} stays")


@shard.command()
@click.argument("task", required=False)
@state_option
@allow_module_option
def check(task: str | None, root: Path | None) -> None:
    """Read the shards and print their classes, counts and missing labels."""
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    state = DeviceStateDir.load(root)
    shards = state.settings.shards if task is None else {task: _find_shard(state, task)}
    if not shards:
        raise NotFoundError("this device has no shards; edgefl device shard add TASK PATH")
    for name, path in shards.items():
        _print_report(load_shard_report(name, path))


@shard.command()
@click.argument("place", metavar="TASK|FOLDER")
@state_option
@text_format_option
def stats(place: str, root: Path | None, style: str) -> None:
    """Print what a collector keeps in a shard: rows, days, bytes written a day, what was left out, weak labels."""
    from edgefl.device.collect.shard_contents import WEAK, count_weak  # noqa: PLC0415 fast start
    from edgefl.device.collect.store_state import read_store_state  # noqa: PLC0415 likewise

    folder = find_shard_folder(place, root)
    state = read_store_state(folder)
    if state is None:
        raise NotFoundError(f"no collector has written into {folder}; edgefl device collect FILE")
    weak = count_weak(folder, state)
    facts = {
        "folder": str(folder),
        "columns": list(state.columns),
        "rows": state.num_rows,
        "bytes": state.num_bytes,
        "segments": len(state.segments),
        "first_s": state.segments[0].first_s if state.segments else None,
        "last_s": state.segments[-1].last_s if state.segments else None,
        "written_bytes": dict(state.written),
        "left_out": dict(state.counts),
        "weak_labels": weak,
    }
    if style == "json":
        click.echo(json.dumps({"v": 1, **facts}))
        return
    if state.segments:
        ends_s = state.segments[0].first_s, state.segments[-1].last_s
        times = (f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M}" for time_s in ends_s)
        echo(f"{folder}: {state.num_rows} rows of {', '.join(state.columns)}, {' to '.join(times)} UTC")
    for day, num_bytes in sorted(state.written.items()):
        echo(f"  written on {day}: {num_bytes / 1e6:.2f} MB")
    for name, count in sorted(state.counts.items()):
        echo(f"  left out, {name}: {count}")
    for label, count in weak.items():
        echo(f"  {WEAK} {label}: {count}")


def find_shard_folder(place: str, root: Path | None) -> Path:
    """Returns a folder that is given by its path, or that of a task's shard; one without a slash comes after those.

    Raises:
        NotFoundError: this device has no shard for the task.
        NotJoinedError: it belongs to no fleet, and there is no such folder.
    """
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    if "/" in place:
        return Path(place)
    try:
        return Path(_find_shard(DeviceStateDir.load(root), place))
    except (NotFoundError, NotJoinedError):
        if Path(place).is_dir():
            return Path(place)
        raise


def _find_shard(state: DeviceStateDir, task: str) -> str:
    """Returns the path of a task's shard; raises a `NotFoundError` where this device has none."""
    shards = state.settings.shards
    if task not in shards:
        listing = f"it has {', '.join(shards)}" if shards else "it has none"
        raise NotFoundError(
            f"this device has no shard for task {task!r} ({listing}); edgefl device shard add TASK PATH"
        )
    return shards[task]


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
    from edgefl.tasks.datasets.shards import inspect_shard  # noqa: PLC0415 fast start

    return inspect_shard(task, path, is_detailed=True)


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
    echo(f"{report.task}: {report.num_examples} examples in {report.path}")
    for label, count in sorted(report.counts.items()):
        name = f" {report.labels[label]}" if 0 <= label < len(report.labels) else ""
        echo(f"  class {label}{name}: {count}")
    if report.target_range is not None:
        echo(f"  targets: {report.target_range[0]:g} to {report.target_range[1]:g}")
    for line in report.details:
        echo(f"  {line}")
    if report.missing_labels:
        click.echo(f"  missing: {', '.join(map(str, report.missing_labels))}")
