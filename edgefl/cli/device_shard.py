"""`edgefl device shard show`, `forget`, `guess`, and `edgefl device label`: looks at, removes, labels data."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.device_join import confine_option, find_shard_folder
from edgefl.cli.output import echo, text_format_option
from edgefl.cli.shard_labels import check_labels
from edgefl.cli.signing import signers_option
from edgefl.cli.sources import (
    NumberRange,
    allow_module_option,
    find_deployed_file,
    get_policy,
    load_device_state,
    state_option,
    window_option,
)
from edgefl.core.errors import ConfigError, NetworkError, NotJoinedError, StoreBusyError, StoreError, UsageError

if TYPE_CHECKING:
    from edgefl.device.collect.forgetting import ForgetRequest
    from edgefl.device.collect.label_guesses import Guesser, NotedGuesser
    from edgefl.device.collect.label_page import TrainingControl
    from edgefl.device.collect.shard_contents import Times
    from edgefl.device.collect.store_state import StoreState
    from edgefl.device.training.shard_uses import ShardUse

WAIT_S, POLL_S = 120.0, 0.1
DEPLOYED = "deployed"
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}


def _parse_time(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    from edgefl.device.collect.line_parser import parse_time  # noqa: PLC0415 fast start

    try:
        return None if value is None else parse_time(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}, such as 2026-03-01T14:00; got {value!r:.80}") from None


def _parse_conditions(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    conditions = dict[str, str]()
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"must be COLUMN=TEXT, got {value!r:.80}")
        conditions[name] = text
    return conditions


@click.command()
@click.argument("place", metavar="TASK|FOLDER")
@click.option(
    "--drift",
    "days",
    type=NumberRange(0.001, 36_600),
    metavar="DAYS",
    help="Compare the newest days with all before, column by column.",
)
@click.option(
    "--pictures",
    "sheet",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.png",
    help="Write the newest pictures of each class on one sheet, and print nothing else.",
)
@state_option
@text_format_option
def show(place: str, days: float | None, sheet: Path | None, root: Path | None, style: str) -> None:
    """Print what lies in a collected shard: classes, times, the newest examples, and which runs have used it."""
    from edgefl.device.collect.shard_contents import measure_recent_drift, read_contents  # noqa: PLC0415 fast start

    folder = find_shard_folder(place, root)
    if sheet is not None:
        _write_pictures(folder, sheet)
        return
    contents, uses = read_contents(folder), _find_uses(folder, root, -math.inf)
    drift = None if days is None else measure_recent_drift(folder, days)
    if style == "json":
        facts = {"folder": str(folder), **asdict(contents), "uses": [asdict(use) for use in uses]}
        if drift is not None:
            facts["drift"] = [asdict(column) for column in drift]
        click.echo(json.dumps({"v": 1, **facts}))
        return
    echo(f"{folder}: {contents.total.num} {contents.kind}{_format_span(contents.total)}")
    for column, counts in contents.classes.items():
        for text, count in counts.items():
            echo(f"  {column} {text or '(none)'}: {count}")
    if contents.num_spans > len(contents.spans):
        echo(f"  {contents.num_spans} spans, of which the newest are:")
    for number, times in contents.spans.items():
        echo(f"  span {number}: {times.num} rows{_format_span(times)}")
    for line in contents.examples:
        echo(f"  newest: {line}")
    for found in drift or []:
        ks = "" if found.ks is None else f", ks {found.ks:.2f}"
        echo(f"  drift of {found.name}: psi {found.psi:.2f}{ks}, {found.num_reference} then, {found.num_newer} now")
    _print_uses(uses)


def _write_pictures(folder: Path, sheet: Path) -> None:
    from edgefl.device.collect.shard_contents import write_picture_sheet  # noqa: PLC0415 fast start

    if sheet.suffix.lower() != ".png":
        raise UsageError(f"--pictures must be a name that ends in .png, got {str(sheet)!r:.80}")
    try:
        num_pictures = write_picture_sheet(folder, sheet)
    except OSError as error:
        raise UsageError(f"--pictures {sheet} cannot be written: {error.strerror or error}") from None
    echo(f"{num_pictures} pictures of {folder} are in {sheet}")


@click.command()
@click.argument("place", metavar="TASK|FOLDER")
@click.option("--since", "since_s", callback=_parse_time, metavar="TIME", help="From this time on [default: ever].")
@click.option("--until", "until_s", callback=_parse_time, metavar="TIME", help="Up to this time [default: now].")
@click.option(
    "--where",
    callback=_parse_conditions,
    multiple=True,
    metavar="COLUMN=TEXT",
    help="Only rows with this text, such as of a person; of files label=CLASS, or group=START of their names.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@state_option
def forget(
    place: str, since_s: float | None, until_s: float | None, where: dict[str, str], yes: bool, root: Path | None
) -> None:
    """Remove rows or files of a time, for ever; a collector and an agent may run meanwhile."""
    from edgefl.device.collect.forgetting import ForgetRequest, restore_here  # noqa: PLC0415 fast start
    from edgefl.device.collect.shard_contents import count_forgotten, require_state  # noqa: PLC0415 likewise
    from edgefl.device.collect.store_state import lock_folder  # noqa: PLC0415 likewise

    if since_s is None and until_s is None and not where:
        raise UsageError("what is to be forgotten? Give --since TIME, --until TIME or --where COLUMN=TEXT")
    folder = find_shard_folder(place, root)
    _check_conditions(require_state(folder), where)
    is_collected = False
    try:
        with lock_folder(folder):
            restore_here(folder, require_state(folder))
    except StoreBusyError:
        is_collected = True  # and it has done so
    request = ForgetRequest(since_s=since_s or 0.0, until_s=time.time() if until_s is None else until_s, where=where)
    found = count_forgotten(folder, request)
    if not (found.num or is_collected):
        echo(f"{folder} has nothing of that")
        return
    echo(f"{folder}: {found.num} examples{_format_span(found)}")
    uses = _find_uses(folder, root, found.first_s)
    _print_uses(uses)
    if not yes:
        click.confirm("forget them for ever?", abort=True)
    _apply(folder, request)
    if uses:
        echo("models of these runs have learned from them: forgetting them here does not change that")
    # Rows that the collector has not written yet are counted nowhere.
    echo(
        f"forgot {found.num} examples" + (", and what the collector had not written of that" if is_collected else "")
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--label", "labels", multiple=True, help="A label, in the order of the keys; may be repeated.")
@click.option("--host", default="127.0.0.1", show_default=True, help="IP address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="0 takes a free one.")
@window_option
@click.option(
    "--model",
    metavar="FILE|deployed",
    help="ONNX file, or the model that is deployed here: it guesses, and what it is least certain of comes first.",
)
@click.option(
    "--random",
    "share",
    type=NumberRange(0, 1),
    default=0.25,
    show_default=True,
    help="With --model: share of examples that are drawn at random, by which the page says how often it was right.",
)
@click.option("--uncertain", is_flag=True, help="Only what [answer] of the collect file was least certain of.")
@state_option
@signers_option
@confine_option
def label(  # noqa: PLR0913 the options of one command
    *,
    folder: Path,
    labels: tuple[str, ...],
    host: str,
    port: int,
    window: float,
    model: str | None,
    share: float,
    uncertain: bool,
    root: Path | None,
    signers: Path,
    confine: str | None,
) -> None:
    """Serve a page on which a person labels what a collector keeps in FOLDER, until SIGTERM or Ctrl-C."""
    from edgefl.device.collect.label_guesses import NotedGuesser  # noqa: PLC0415 fast start
    from edgefl.device.collect.label_page import LabelServer, print_address  # noqa: PLC0415 likewise
    from edgefl.device.collect.label_queue import FileTarget, LabelQueue, open_target  # noqa: PLC0415 likewise
    from edgefl.device.collect.label_server import Gate, make_pin, make_server_context  # noqa: PLC0415 likewise
    from edgefl.device.collect.uncertain_times import read_uncertain_times  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    check_labels(labels)
    if uncertain and model is not None:
        raise UsageError("--uncertain takes the guesses that the deployed model made; leave out --model")
    times = read_uncertain_times(folder) if uncertain else None
    target, pin = open_target(folder, window, times), make_pin()
    files = target if isinstance(target, FileTarget) else None
    guesser: Guesser | NotedGuesser | None = None if times is None else NotedGuesser(times)
    if model is not None:
        guesser = _make_guesser(model, share, root, signers, confine)
    queue = LabelQueue(target, labels, guesser)
    tls, fingerprint = None, ""
    if host not in _LOOPBACK:
        tls, fingerprint = make_server_context(host)
    try:
        address = _LOOPBACK.get(host, host), port
        server = LabelServer(queue, files, Gate(pin), address, tls, _find_training(root))
    except OSError as error:
        reason = error.strerror or error
        raise NetworkError(f"cannot listen on {host}:{port}: {reason}; try another --port") from None
    print_address(server, pin, fingerprint)
    with contextlib.ExitStack() as shared:
        if tls is not None:  # on loopback nobody else reaches it
            with contextlib.suppress(NotJoinedError, ConfigError, StoreError):  # a person labels all the same
                shared.enter_context(DeviceStateDir.load(root).share_label_page(server.url))
        server.run()


def _find_training(root: Path | None) -> TrainingControl | None:
    """Returns the control of this board's training; None where it belongs to no fleet."""
    from edgefl.device.collect.label_page import TrainingControl  # noqa: PLC0415 fast start
    from edgefl.device.conditions.gate import ConditionGate  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    try:
        gate = ConditionGate(DeviceStateDir.load(root).root, is_agent=False)
    except (NotJoinedError, ConfigError):  # without a fleet, or with damaged settings, a person still labels
        return None
    return TrainingControl(find_blocker=gate.find_owner_blocker, pause=gate.pause, resume=gate.resume)


@click.command()
@click.argument("place", metavar="TASK|FOLDER")
@click.option("--model", metavar="FILE|deployed", help="ONNX file, or the model that is deployed here: the teacher.")
@click.option(
    "--function",
    "functions",
    multiple=True,
    metavar="MODULE:CLASS",
    help="A label function of a module that --allow-module names; may be repeated, and the majority counts.",
)
@click.option(
    "--threshold",
    type=NumberRange(0, 1),
    default=0.95,
    show_default=True,
    help="Least probability of a model's guess.",
)
@click.option(
    "--share",
    type=NumberRange(0, 1),
    default=0.3,
    show_default=True,
    help="Most of all labels that may be weak; 1 for no limit.",
)
@window_option
@allow_module_option
@state_option
@signers_option
@confine_option
def guess(  # noqa: PLR0913 the options of one command
    *,
    place: str,
    model: str | None,
    functions: tuple[str, ...],
    threshold: float,
    share: float,
    window: float,
    root: Path | None,
    signers: Path,
    confine: str | None,
) -> None:
    """Give examples that nobody has labelled weak labels, by a model or functions, in place of the last ones."""
    from edgefl.device.collect.label_queue import MAX_GUESSED, open_target  # noqa: PLC0415 fast start
    from edgefl.device.collect.weak_labels import (  # noqa: PLC0415 likewise
        make_function_teacher,
        make_model_teacher,
        update_weak_labels,
    )

    if (model is None) == (not functions):
        raise UsageError("who guesses? Give --model FILE, --model deployed, or --function MODULE:CLASS")
    folder = find_shard_folder(place, root)
    target = open_target(folder, window, max_examples=MAX_GUESSED)
    teacher = make_function_teacher(functions)
    if model is not None:
        teacher = make_model_teacher(_make_guesser(model, 0.0, root, signers, confine), threshold)
    counts, num_examples = update_weak_labels(target, teacher, share)
    echo(f"{folder}: {sum(counts.values())} of {num_examples} examples without a label have a weak one")
    for label_, count in counts.items():
        echo(f"  {label_}: {count}")


def _make_guesser(model: str, share: float, root: Path | None, signers: Path, confine: str | None) -> Guesser:
    from edgefl.device.collect.label_guesses import Guesser  # noqa: PLC0415 fast start
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise

    def find_model() -> Path:
        return find_deployed_file(root, signers) if model == DEPLOYED else Path(model)

    state_dir = root or get_default_state_dir()
    return Guesser(find_model, state_dir=state_dir, policy=get_policy(state_dir, confine), share=share)


def _check_conditions(state: StoreState, where: dict[str, str]) -> None:
    from edgefl.device.collect.forgetting import GROUP, LABEL  # noqa: PLC0415 fast start

    names = (*state.columns, LABEL) if state.columns else (LABEL, GROUP)
    for name in where:
        if name not in names:
            raise UsageError(f"--where {name!r:.80}: this shard has {', '.join(names):.400}")


def _apply(folder: Path, request: ForgetRequest) -> None:
    """Has a request applied: by the running collector, or here where there is none.

    Raises:
        StoreBusyError: the collector has not done it in time, and does it later.
    """
    from edgefl.device.collect.forgetting import (  # noqa: PLC0415 fast start
        forget_here,
        has_forget_request,
        write_forget_request,
    )
    from edgefl.device.collect.shard_contents import require_state  # noqa: PLC0415 likewise
    from edgefl.device.collect.store_state import lock_folder  # noqa: PLC0415 likewise

    deadline_s, is_asked = time.monotonic() + WAIT_S, False
    while time.monotonic() < deadline_s:
        with contextlib.suppress(StoreBusyError), lock_folder(folder):
            forget_here(folder, require_state(folder))  # what an earlier one has left to do
            if not is_asked:
                write_forget_request(folder, request)
                forget_here(folder, require_state(folder))
            return
        if not is_asked:
            write_forget_request(folder, request)
            is_asked = True
        if not has_forget_request(folder):
            return
        time.sleep(POLL_S)
    raise StoreBusyError(f"the collector of {folder} has not done it in {WAIT_S:g} s; it is asked for, and will be")


def _find_uses(folder: Path, root: Path | None, since_s: float) -> list[ShardUse]:
    """Returns the runs that have used a shard since a time, as the agent's ledger has them."""
    from edgefl.device.training.shard_uses import INTERVAL_S, USES_NAME, read_shard_uses  # noqa: PLC0415 fast start

    state = load_device_state(root)
    if state is None:
        return []
    tasks = {task for task, path in state.settings.shards.items() if Path(path).resolve() == folder.resolve()}
    uses = read_shard_uses(state.root / USES_NAME)
    return [use for use in uses if use.task in tasks and use.last_s + INTERVAL_S >= since_s]


def _print_uses(uses: list[ShardUse]) -> None:
    for use in uses:
        echo(f"  used by run {use.run} of {use.task}, {_format_time(use.first_s)} to {_format_time(use.last_s)} UTC")


def _format_span(times: Times) -> str:
    return f", {_format_time(times.first_s)} to {_format_time(times.last_s)} UTC" if times.num else ""


def _format_time(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S}"
